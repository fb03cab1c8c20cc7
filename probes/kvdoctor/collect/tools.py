"""Run one external command so that nothing it does can hold kvdoctor up.

Vendor tools hang: amd-smi, rocm-smi and rocminfo sit in uninterruptible sleep when the driver is wedged, and such a child
survives SIGKILL, so that `subprocess.run(timeout=...)` then blocks in wait(). Here a child gets its own process group, its
output is read without blocking and only up to a bound, the whole group is killed at the deadline, and what is still there
half a second later is abandoned: its pipes are closed, its state and wait channel are reported, nobody waits for it.
Grandchildren that keep the pipes open after the command ended cost at most a tenth of a second.
"""

import atexit
import contextlib
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

from kvdoctor.facts import ToolRun

MAX_OUTPUT = 1 << 20
GRACE_S = 0.5
"""How long a killed child may take to go before it is abandoned."""
LINGER_S = 0.1
"""How long pipes may stay open after the command itself ended."""

_abandoned: list[subprocess.Popen[bytes]] = []  # kept, so that the garbage collector does not wait for or warn about them


_running: set[subprocess.Popen[bytes]] = set()


def _end_running() -> None:
    """Nothing that was asked outlives the asker: what still runs at the end (after Ctrl-C, or a deadline) is killed."""
    for child in list(_running):
        _kill(child, signal.SIGKILL)


atexit.register(_end_running)


def _kill(child: subprocess.Popen[bytes], number: int) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)


def run(
    key: str,
    argv: list[str],
    deadline_s: float,
    *,
    environ: dict[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    polite: bool = False,
) -> ToolRun:
    """Run `argv` for at most `deadline_s` and say what came of it; never waits longer than deadline + GRACE_S.

    A `polite` end is SIGTERM first, for a child that cleans up. What interrupts the wait (Ctrl-C) ends the child too, and is
    raised; nothing else is.
    """
    started = time.monotonic()
    result = ToolRun(key=key, argv=list(argv))
    env = {**os.environ, "LC_ALL": "C", "LANG": "C", **(environ or {})}
    try:
        child = subprocess.Popen(argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, env=env)
    except OSError as error:
        result.state = "missing"
        result.rc = 127 if isinstance(error, FileNotFoundError) else 126
        result.err = error.strerror or str(error)
        return result
    result.pid = child.pid
    _running.add(child)
    try:
        output = _read(child, started + deadline_s)
    except BaseException:
        _stop(child, result, polite=polite)
        raise
    finally:
        _running.discard(child)
    result.out, result.err = (bytes(part).decode("utf-8", "replace") for part in output)
    if child.poll() is None:
        _stop(child, result, polite=polite)
    # Closed only now: one that is still writing would die of the closed pipe and look as if it had ended by itself.
    for stream in (child.stdout, child.stderr):
        assert stream is not None
        stream.close()
    if child.returncode is not None and result.state == "ok":
        result.rc = child.returncode
    result.seconds = round(time.monotonic() - started, 3)
    return result


def _read(child: subprocess.Popen[bytes], deadline: float) -> tuple[bytearray, bytearray]:
    """stdout and stderr, each up to MAX_OUTPUT, until both close, the command has been gone for LINGER_S, or `deadline`."""
    assert child.stdout is not None
    assert child.stderr is not None
    parts: dict[IO[bytes], bytearray] = {child.stdout: bytearray(), child.stderr: bytearray()}
    gone_at: float | None = None
    with selectors.DefaultSelector() as selector:
        for stream in parts:
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            now = time.monotonic()
            if gone_at is None and child.poll() is not None:
                gone_at = now
            limit = deadline if gone_at is None else min(deadline, gone_at + LINGER_S)
            if now >= limit:
                break
            for ready, _ in selector.select(min(0.05, limit - now)):
                stream = ready.fileobj  # type: ignore[assignment]
                with contextlib.suppress(BlockingIOError):
                    data = os.read(stream.fileno(), 65536)
                    if not data:
                        selector.unregister(stream)
                    elif len(parts[stream]) < MAX_OUTPUT:
                        parts[stream] += data[: MAX_OUTPUT - len(parts[stream])]
    if child.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, min(LINGER_S, deadline - time.monotonic())))
    return parts[child.stdout], parts[child.stderr]


def _stop(child: subprocess.Popen[bytes], result: ToolRun, *, polite: bool = False) -> None:
    """Kill the group of `child`; abandon it where even that does not end it."""
    result.state = "hung"
    for number in (signal.SIGTERM, signal.SIGKILL) if polite else (signal.SIGKILL,):
        _kill(child, number)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            if child.poll() is not None:
                return
            time.sleep(0.02)
    result.state = "abandoned"
    result.proc_state, result.wchan = process_state(child.pid)
    _abandoned.append(child)


def process_state(pid: int) -> tuple[str, str]:
    """The one-letter state and the kernel function a process sleeps in, empty where /proc does not tell.

    Of its threads the one that cannot be killed counts (state D): a process whose first thread has ended already looks like
    a zombie while another still sleeps in the kernel.
    """
    found: list[tuple[str, str]] = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        state = wchan = ""
        with contextlib.suppress(OSError, IndexError):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        with contextlib.suppress(OSError):
            wchan = (task / "wchan").read_text().strip("0 \n")
        found.append((state, wchan))
    return next((item for item in found if item[0] == "D"), found[0] if found else ("", ""))
