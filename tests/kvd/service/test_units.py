"""The unit files: systemd finds nothing wrong with them, and what they say is what the daemon does."""

import configparser
import grp
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kvd.service.settings import LIVE, SETTINGS, read_file
from kvd.wire.connection import default_socket
from tests.support.daemon import MakeDaemon
from tests.support.processes import SCRIPTS, run_cli

UNITS = Path(__file__).resolve().parents[3] / "daemon" / "systemd"
EXAMPLE = UNITS / "kvd.toml"


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((UNITS / name).read_text())
    return parser


def test_the_service_runs_a_command_that_exists(tmp_path: Path) -> None:
    service = unit("kvd.service")["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[0].endswith("/kvd")
    config = tmp_path / "kvd.toml"
    config.write_text('max_bytes = "2MiB"\n')
    words = [str(config) if word == "/etc/kvd.toml" else word for word in words[1:]]
    shown = run_cli("kvd", *words, "--show-config")
    assert shown.rc == 0, shown.stderr
    assert ["max_bytes", "2", "MiB", f"file:{config}"] in [line.split() for line in shown.stdout.splitlines()]
    assert service["Type"] == "notify"
    assert service["ExecReload"].split()[-2:] == ["-HUP", "$MAINPID"]
    drain = next(setting.default for setting in SETTINGS if setting.name == "drain_timeout")
    assert float(service["TimeoutStopSec"]) > drain, "systemd must not kill it before it has drained"


def test_socket_service_and_example_name_one_socket() -> None:
    socket = unit("kvd.socket")["Socket"]
    service = unit("kvd.service")["Service"]
    example = read_file(EXAMPLE)
    assert socket["ListenStream"] == example["socket"] == "/run/kvd/kvd.sock"
    assert Path(socket["ListenStream"]).parent == Path("/run") / service["RuntimeDirectory"]
    assert socket["SocketMode"] == example["socket_mode"]
    assert [str(path) for path in example["long_path"]] == service["ReadWritePaths"].split()
    if default_socket() == Path("/run/kvd/kvd.sock"):  # root's default
        assert str(default_socket()) == socket["ListenStream"]


@pytest.mark.real("kvd")
def test_the_example_configures_a_daemon(kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
    """With the paths of a test; and everything it says may be reloaded is, and nothing else."""
    text = EXAMPLE.read_text()
    for there, here in (
        ("/run/kvd/kvd.sock", str(tmp_path / "unused.sock")), ("/var/lib/kvd", str(tmp_path / "tier")),
        ("8GiB", "8MiB"), ("32GiB", "64MiB"), ("metrics_port = 9400", ""), ('["kvd"]', f'["{grp.getgrgid(0).gr_name}"]'),
    ):  # fmt: skip
        assert there in text
        text = text.replace(there, here)
    config = tmp_path / "kvd.toml"
    config.write_text(text)
    daemon = kvd_daemon("--config", config, max_bytes="8MiB")
    with daemon.client() as client:
        assert client.put(bytes(32), b"v", wait="tier").durability == "none"
    named = EXAMPLE.read_text().split("takes over ")[1].split(";")[0]
    words = {word.strip(" #\n,.") for word in named.replace(" and ", " ").split()}
    assert words - {""} == set(LIVE)


def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    """`systemd-analyze verify`, with a command that is there in place of the installed one."""
    if not shutil.which("systemd-analyze"):
        for name in ("kvd.service", "kvd.socket"):  # nothing to ask: at least it reads as a unit file
            assert unit(name).sections()
        return
    for name in ("kvd.service", "kvd.socket"):
        text = (UNITS / name).read_text().replace("/opt/kvtools/bin/kvd", str(SCRIPTS / "kvd"))
        (tmp_path / name).write_text(text)
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in ("kvd.service", "kvd.socket"))],
        capture_output=True, text=True, env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    )  # fmt: skip
    said = [line for line in ran.stderr.splitlines() if "kvd." in line and "Failed to resolve" not in line]
    assert said == [], ran.stderr
