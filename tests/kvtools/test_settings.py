"""`kvtools config`: every variable that the sources read is shown, with its value and origin; slips are named."""

import ast
import re
from pathlib import Path

import pytest

from kvd.connector.settings import INSTEAD
from kvtools.settings import BESIDE, COMMON, PREFIXES, settings, shown, strangers
from tests.support.processes import run_cli

ROOT = Path(__file__).resolve().parents[2]


def variables_in_sources() -> set[str]:
    """String constants of the packages that are names of variables of ours."""
    found = set()
    for package in ("kvtools", "tui/kvtop", "probes/kvdoctor", "daemon/kvd", "daemon/kvgate"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.update(re.findall(rf"^(?:{'|'.join(PREFIXES)})[A-Z0-9_]*[A-Z0-9]$", node.value))
    return found


def test_every_variable_that_is_read_is_shown() -> None:
    listed = {name for row in settings({}) for name in row.variables} | set(BESIDE)
    listed |= set(INSTEAD)  # read only to say what they are called here
    assert variables_in_sources() - listed == set()


def test_every_variable_that_is_shown_is_read() -> None:
    ours = {name for row in settings({}) for name in row.variables if name.startswith(PREFIXES)}
    assert ours - variables_in_sources() == set()


def test_value_and_origin() -> None:
    rows = {(row.reader, row.setting): row for row in settings({"KVD_MAX_BYTES": "3G", "HOME": "/nonexistent"})}
    chosen, other = rows["kvd serve", "max_bytes"], rows["kvd serve", "long_bytes"]
    assert (chosen.value, chosen.origin, shown(chosen)) == (3 << 30, "env:KVD_MAX_BYTES", "3 GiB")
    assert other.origin == "default"
    assert rows["kvtop", "refresh"].value == 1.0
    assert shown(rows["vLLM connector", "direct_staging"]) == "512 MiB"
    assert shown(rows["vLLM connector", "load_timeout_s"]) == "30.0 s"
    (wrong,) = [row for row in settings({"KVD_LOAD_THREADS": "0"}) if row.error]
    assert (wrong.setting, wrong.origin, shown(wrong)) == ("load_threads", "env:KVD_LOAD_THREADS", "?")


def test_a_file_is_an_origin(tmp_path: Path) -> None:
    file = tmp_path / "kvtop.yaml"
    file.write_text("refresh: 3s\n")
    rows = {(row.reader, row.setting): row for row in settings({"KVTOP_CONFIG": str(file)})}
    assert (rows["kvtop", "refresh"].value, rows["kvtop", "refresh"].origin) == (3.0, f"file:{file}")


def test_what_nothing_reads_is_named_with_the_nearest() -> None:
    environ = {"KVD_SOKET": "x", "KVTOOLS_DEBUG": "1", "PATH": "/bin", "KVGATE_ZZZZZZZZZZZZ": ""}
    assert strangers(environ, list(settings({}))) == [("KVD_SOKET", "KVD_SOCKET"), ("KVGATE_ZZZZZZZZZZZZ", "")]


def test_json() -> None:
    ran = run_cli("kvtools", "config", "--json", env={"KVD_MAX_BYTES": "3G"})
    body = ran.json()
    assert ran.rc == 0
    assert body["schema"] == "kvtools.config/1"
    (row,) = [row for row in body["settings"] if row["setting"] == "max_bytes"]
    assert row["value"] == 3 << 30
    assert row["origin"] == "env:KVD_MAX_BYTES"


def test_a_value_that_cannot_be_meant_is_an_error_after_the_table() -> None:
    ran = run_cli("kvtools", "config", env={"KVD_MAX_BYTES": "much"})
    assert ran.rc == 2
    assert "max_bytes" in ran.stdout
    assert ran.stderr == "kvtools: error: kvd serve: max_bytes (env:KVD_MAX_BYTES): not a size: 'much'\n"


def test_a_slip_is_a_warning_and_no_failure() -> None:
    ran = run_cli("kvtools", "config", env={"KVD_SOKET": "/x"})
    assert ran.rc == 0
    assert ran.stderr == "kvtools: warning: KVD_SOKET is set, and nothing reads it; did you mean KVD_SOCKET?\n"


@pytest.mark.parametrize("name", [name for setting in COMMON for name in setting.environment])
def test_common_variables_are_there(name: str) -> None:
    assert name in run_cli("kvtools", "config").stdout


def test_no_control_character_of_the_environment_reaches_the_terminal() -> None:
    ran = run_cli("kvtools", "config", env={"KVD_TENANT": "a\x1b[31mb"})
    assert "\x1b[31m" not in ran.stdout
    assert "a\\x1b[31mb" in ran.stdout
