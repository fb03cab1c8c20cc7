"""Moving bytes past the page cache: plain system calls on real files, and the bindings of hipFile and cuFile.

The bindings run against a stand-in library that this machine's C compiler builds from the headers' types; and against the real
libcufile, which has no driver here and must be understood all the same.
"""

import importlib.metadata
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvd.connector import direct_io
from kvd.connector.direct_io import Buffer, DirectError, DirectIO, LibraryIO, PosixIO, host_buffer, open_io
from tests.kvd.connector.gds import SOURCE, WARNINGS, StandIn, built, standin

__all__ = ["built", "standin"]

BACKENDS = ["posix", "cufile", "hipfile"]
PAGE = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "region"
    made.write_bytes(bytes(64 * PAGE))
    return made


def make(name: str, standin: StandIn) -> DirectIO:
    return open_io(name, None if name == "posix" else standin.path)


def filled(size: int) -> Buffer:
    buffer = host_buffer(size)
    assert buffer.view is not None
    buffer.view[:] = os.urandom(len(buffer.view))
    return buffer


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_written_is_read_back_at_its_place(name: str, standin: StandIn, path: Path) -> None:
    io = make(name, standin)
    there, back = filled(8 * PAGE), host_buffer(8 * PAGE)
    io.register(there)
    io.register(back)
    with io.opened(path) as file:
        io.write(file, there, 8 * PAGE, 5 * PAGE)
        io.sync(file)
        io.read(file, back, 8 * PAGE, 5 * PAGE)
    assert there.view is not None
    assert bytes(there.view) == bytes(back.view or b"")
    assert path.read_bytes()[5 * PAGE : 13 * PAGE] == bytes(there.view)
    assert not any(path.read_bytes()[: 5 * PAGE] + path.read_bytes()[13 * PAGE :])
    io.deregister(there)
    io.deregister(back)
    io.close()
    assert (standin["handles"], standin["buffers"], standin["unregistered"]) == (0, 0, 0)


@pytest.mark.parametrize("name", ["cufile", "hipfile"])
def test_short_transfers_go_on_where_they_stopped(name: str, standin: StandIn, path: Path) -> None:
    io = make(name, standin)
    there, back = filled(8 * PAGE), host_buffer(8 * PAGE)
    io.register(there)
    io.register(back)
    standin["most"] = 3 * PAGE
    with io.opened(path) as file:
        io.write(file, there, 8 * PAGE, 0)
        io.read(file, back, 8 * PAGE, 0)
    assert bytes(back.view or b"") == bytes(there.view or b"")
    assert (standin["reads"], standin["writes"]) == (3, 3)
    io.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_the_end_of_a_file_is_an_error_and_no_short_answer(name: str, standin: StandIn, path: Path) -> None:
    io = make(name, standin)
    buffer = host_buffer(8 * PAGE)
    io.register(buffer)
    with io.opened(path) as file, pytest.raises(DirectError) as caught:
        io.read(file, buffer, 8 * PAGE, 60 * PAGE)
    assert caught.value.reason == "short_transfer"
    io.close()


@pytest.mark.parametrize(("code", "reason"), [(5001, "driver_not_loaded"), (5008, "file_unsupported"), (5099, "error_5099")])
@pytest.mark.parametrize("name", ["cufile", "hipfile"])
def test_every_call_of_a_library_may_fail_and_says_which_and_why(
    name: str, code: int, reason: str, standin: StandIn, path: Path
) -> None:
    prefix = {"cufile": "cuFile", "hipfile": "hipFile"}[name]

    def go_through() -> None:
        io = make(name, standin)
        buffer = host_buffer(PAGE)
        io.register(buffer)
        with io.opened(path) as file:
            io.read(file, buffer, PAGE, 0)

    def failing(switch: str) -> DirectError:
        standin[switch] = code
        try:
            with pytest.raises(DirectError) as caught:
                go_through()
        finally:
            standin[switch] = 0
        return caught.value

    for switch, word in (
        ("open_error", "DriverOpen"),
        ("buffer_error", "BufRegister"),
        ("register_error", "HandleRegister"),
        ("io_error", "Read"),
    ):
        error = failing(switch)
        assert error.reason == reason
        assert str(error).startswith(f"{prefix}{word}: ")
        assert str(code) in str(error)
    standin["errno"] = 28
    io = make(name, standin)
    with io.opened(path) as file, pytest.raises(DirectError, match="No space left"):
        io.write(file, host_buffer(PAGE), PAGE, 0)
    io.close()


def test_the_gpu_drivers_own_error_is_named_too(standin: StandIn) -> None:
    standin["open_error"] = 5011
    with pytest.raises(DirectError, match="GPU driver: 101"):
        LibraryIO("hipfile", standin.path)


def test_a_library_may_not_fall_back_by_itself(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in refuses to start unless it was forbidden to, as the bindings must have done; an operator's word counts more."""
    monkeypatch.delenv("CUFILE_ALLOW_COMPAT_MODE", raising=False)
    LibraryIO("cufile", standin.path)
    assert os.environ["CUFILE_ALLOW_COMPAT_MODE"] == "false"
    monkeypatch.setenv("CUFILE_ALLOW_COMPAT_MODE", "true")
    with pytest.raises(DirectError):
        LibraryIO("cufile", standin.path)


@pytest.mark.parametrize("name", ["cufile", "hipfile"])
def test_no_library_is_a_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(DirectError) as caught:
        open_io(name, str(tmp_path / "libnone.so"))
    assert caught.value.reason == "no_library"


def test_a_library_without_the_calls_is_too_old(tmp_path: Path) -> None:
    source = tmp_path / "old.c"
    source.write_text("int cuFileDriverOpen(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "old.so", source], check=True)
    with pytest.raises(DirectError) as caught:
        open_io("cufile", str(tmp_path / "old.so"))
    assert caught.value.reason == "library_too_old"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("damage", "reason"), [("gone", "no_file"), ("link", "io_error")])
def test_files_that_cannot_be_opened(name: str, damage: str, reason: str, standin: StandIn, path: Path) -> None:
    target = path.with_name("other")
    if damage == "link":
        target.symlink_to(path)
    io = make(name, standin)
    with pytest.raises(DirectError) as caught, io.opened(target):
        pass
    assert caught.value.reason == reason
    io.close()


def test_a_file_system_without_direct_io_is_said_so(standin: StandIn) -> None:
    """procfs takes no O_DIRECT."""
    with pytest.raises(DirectError) as caught, PosixIO().opened(Path("/proc/self/oom_score_adj")):
        pass
    assert caught.value.reason == "no_o_direct"


@pytest.mark.parametrize("name", BACKENDS)
def test_files_stay_open_up_to_a_number_and_unlinked_ones_do_not(name: str, standin: StandIn, tmp_path: Path) -> None:
    io = make(name, standin)
    before = len(os.listdir("/proc/self/fd"))
    paths = [tmp_path / f"{number}" for number in range(direct_io.OPEN_FILES + 10)]
    for path in paths:
        path.write_bytes(bytes(PAGE))
        with io.opened(path):
            pass
    assert len(os.listdir("/proc/self/fd")) - before == direct_io.OPEN_FILES
    for path in paths[:-1]:
        path.unlink()
    with io.opened(paths[-1]):
        pass
    assert len(os.listdir("/proc/self/fd")) - before == 1
    io.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert standin["handles"] == 0


def test_threads_share_files(path: Path) -> None:
    io = PosixIO()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            mine, back = filled(PAGE), host_buffer(PAGE)
            for _ in range(50):
                with io.opened(path) as file:
                    io.write(file, mine, PAGE, number * PAGE)
                    io.read(file, back, PAGE, number * PAGE)
                assert bytes(mine.view or b"") == bytes(back.view or b"")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    io.close()
    assert not failures


def cufile_folder() -> Path:
    """Where the package nvidia-cufile-cu12 has its header and its library."""
    files = importlib.metadata.files("nvidia-cufile-cu12")
    assert files is not None
    header = next(file for file in files if file.name == "cufile.h")
    return Path(str(header.locate())).parents[1]


def test_the_types_are_those_of_the_real_header(tmp_path: Path) -> None:
    """cuda.h is not in the package: of it the header needs three names."""
    (tmp_path / "cuda.h").write_text("typedef int CUresult; typedef void *CUstream; typedef int CUdevice;\n")
    command = [
        "cc",
        *WARNINGS,
        "-fsyntax-only",
        "-DCHECK_CUFILE_H",
        "-I",
        tmp_path,
        "-isystem",
        cufile_folder() / "include",
        SOURCE,
    ]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_real_library_has_every_call_and_its_refusal_is_understood(tmp_path: Path) -> None:
    """In a process of its own, which it may write its log beside: this host has no driver for it."""
    library = cufile_folder() / "lib" / "libcufile.so.0"
    program = f"""
import ctypes
from kvd.connector.direct_io import DirectError, open_io
library = ctypes.CDLL({str(library)!r})
for word in ("DriverOpen", "HandleRegister", "HandleDeregister", "BufRegister", "BufDeregister", "Read", "Write"):
    assert hasattr(library, "cuFile" + word), word
try:
    open_io("cufile", {str(library)!r})
except DirectError as error:
    print(error.reason, "|", error)
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "driver_setup | cuFileDriverOpen" in ran.stdout
