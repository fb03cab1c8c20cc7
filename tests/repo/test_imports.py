"""What a command loads: fast starts and the layers of the design, seen from sys.modules of a fresh process.

import-linter sees what is written; this sees what happens, late imports included.
"""

import json
import sys
import time
from pathlib import Path

import pytest

from tests.bench.startup import BUDGET, cpu_seconds
from tests.support.processes import SCRIPTS, run_python

WEB = frozenset(["aiohttp", "uvicorn", "starlette", "uvloop"])
HEAVY = WEB | {"textual", "pydantic", "asyncio", "torch", "vllm", "rich", "psutil", "numpy", "pyudev", "curses"}

AFTER_RUN = """
import json, os, sys
sys.argv = {argv!r}
from kvtools.cli import COMMANDS, run
targets = {{script: target for script, target, _ in COMMANDS.values()}} | {{"kvtools": "kvtools.cli:app"}}
try:
    run(sys.argv[0], targets[sys.argv[0]])
except SystemExit as end:
    sys.stdout.flush()
    sys.stderr.write("\\nMODULES " + json.dumps([end.code, sorted(sys.modules)]))
"""


def loaded_by(*argv: str) -> tuple[int, set[str]]:
    """Exit status of a command, and the top-level names and full names of the modules it loaded."""
    ran = run_python(AFTER_RUN.format(argv=list(argv)))
    code, modules = json.loads(ran.stderr.partition("MODULES ")[2])
    return code, {part for module in modules for part in (module, module.partition(".")[0])}


def loaded_by_import(statement: str) -> set[str]:
    """Modules that `statement` adds to those of a bare interpreter of this environment."""
    ran = run_python(
        f"import json, sys; before = set(sys.modules); {statement}; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    assert ran.rc == 0, ran.stderr
    return set(json.loads(ran.stdout))


def top_level(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["--version"], ["--help"]])
def test_kvctl_loads_nothing_heavy(words: list[str]) -> None:
    code, modules = loaded_by("kvctl", *words)
    assert code == 0
    assert not modules & HEAVY


@pytest.mark.parametrize("script", ["kvtools", "kvd", "kvdoctor", "kvgate"])
def test_help_and_version_load_no_torch_and_no_dashboard(script: str) -> None:
    for word in ("--version", "--help"):
        code, modules = loaded_by(script, word)
        assert code == 0
        assert not modules & {"textual", "torch", "vllm", "pydantic"}


def test_kvtop_without_its_screen_loads_no_textual() -> None:
    for words in (["--version"], ["--once"], ["--json"]):
        code, modules = loaded_by("kvtop", *words)
        assert code == 0, words
        assert not modules & {"textual", "torch", "pydantic"}, words


def test_the_client_loads_no_engine_and_no_front_end() -> None:
    modules = top_level(loaded_by_import("import kvd.wire.client"))
    assert not modules & {"textual", "torch", "vllm", "rich", "typer", "kvtop", "kvgate", "aiohttp"}


def test_the_elastic_pool_is_importable_without_an_engine() -> None:
    import kvtools.elastic

    names = [path.stem for path in Path(kvtools.elastic.__path__[0]).glob("*.py") if path.stem != "__init__"]
    assert {"vllm_plugin", "vllm_worker", "cuda", "hip"} <= set(names)
    modules = top_level(loaded_by_import("; ".join(f"import kvtools.elastic.{name}" for name in names)))
    assert not modules & (HEAVY | {"typer", "msgspec", "yaml", "xxhash", "kvd"})


def test_the_connector_package_is_importable_without_an_engine() -> None:
    assert not top_level(loaded_by_import("import kvd.connector")) & {"torch", "vllm", "textual"}


@pytest.mark.parametrize("module", ["kvtools.segments", "kvtools.units", "kvtools.errors", "kvtools.output", "kvtools.config"])
def test_the_core_loads_the_standard_library_only(module: str) -> None:
    foreign = top_level(loaded_by_import(f"import {module}")) - sys.stdlib_module_names - {"kvtools"}
    assert not foreign


@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("kvd", {"kvtop", "kvgate", "textual"}),
        ("kvdoctor.api", {"kvd", "kvtop", "kvgate", "textual", "typer"}),
        ("kvgate", {"kvtop", "textual", "torch"}),
        ("kvtop", {"kvd", "kvgate", "torch"}),
    ],
)
def test_packages_keep_to_their_layer(package: str, others: set[str]) -> None:
    assert not top_level(loaded_by_import(f"import {package}")) & others


def test_kvctl_list_starts_within_its_budget() -> None:
    """At most 8 times the CPU of `python -c pass`; sources and packages are byte-compiled (see conftest)."""
    for attempt in range(3):
        bare = cpu_seconds([sys.executable, "-c", "pass"])
        ratio = cpu_seconds([str(SCRIPTS / "kvctl"), "list"]) / bare
        if ratio <= BUDGET:
            return
        time.sleep(attempt)
    pytest.fail(f"kvctl list takes {ratio:.1f} times the CPU of python -c pass; the budget is {BUDGET:g}")
