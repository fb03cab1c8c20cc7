"""The stand-in for hipFile and cuFile, built by the C compiler of this machine."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("standin_gds.c")
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
SWITCHES = ("open_error", "register_error", "buffer_error", "io_error", "errno")
COUNTS = ("handles", "buffers", "reads", "writes", "unregistered")


class StandIn:
    """The library and its switches."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)

    def __setitem__(self, name: str, value: int) -> None:
        kind = ctypes.c_size_t if name == "most" else ctypes.c_int
        kind.in_dll(self._library, f"standin_{name}").value = value

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._library, f"standin_{name}").value

    def reset(self) -> None:
        for name in (*SWITCHES, *COUNTS, "most"):
            self[name] = 0


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    target = tmp_path_factory.mktemp("gds") / "libstandin.so"
    subprocess.run(["cc", *WARNINGS, "-shared", "-fPIC", "-o", target, SOURCE], check=True)
    return StandIn(target)


@pytest.fixture
def standin(built: StandIn) -> Iterator[StandIn]:
    built.reset()
    yield built
    built.reset()
