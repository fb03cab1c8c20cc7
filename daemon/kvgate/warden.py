"""The process between the gate and one engine: it ends the engine when the gate is gone, however that went.

    python -I -S warden.py GATE_PID PATIENCE_S PROGRAM WORD ...

It is started as the leader of a session, so it and all that the engine starts are one process group. It passes SIGTERM on to the
program, and when that has ended, it kills what is left of the group and ends by the same status or signal. When the gate dies
(the kernel tells by PR_SET_PDEATHSIG, also after kill -9), the program gets SIGTERM and PATIENCE_S to end. Telling the program
alone would not do: one that is a script dies of its SIGTERM and leaves the engine it had started with the GPU.

The signal comes when the thread that started us ends, and the gate's other threads may be there for a moment still: so it is
never taken for proof that the gate is gone, and what has to be done does not depend on that.

Standard library only, and nothing of ours: it runs beside every engine for as long as that does (9 MiB).
"""

import ctypes
import os
import resource
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
POLL_S = 0.2
WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """See the module."""
    gate, patience_s, words = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != gate:
        sys.exit("the gate is gone")
    child = os.fork()
    if child == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # should this process be killed, which the gate sees too
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        os.execvp(words[0], words)  # noqa: S606 - no shell is the point
    status = _watch(gate, child, patience_s)
    _end_group()
    _end_as(status)


def _watch(gate: int, child: int, patience_s: float) -> int:
    """The wait status of the child; 0 where the gate is gone and the child does not end in time."""
    told = False
    deadline = 0.0
    while True:
        got = signal.sigtimedwait(WATCHED, POLL_S if told else 3600)
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if got is not None and got.si_signo != signal.SIGCHLD:
            told = True
            os.kill(child, signal.SIGTERM)
        if told and os.getppid() != gate:
            deadline = deadline or time.monotonic() + patience_s
            if time.monotonic() >= deadline:
                return 0


def _end_group() -> None:
    """Kill the rest of our group, for 2 s at most: a process inside the kernel cannot be hurried."""
    until = time.monotonic() + 2
    while (others := _others()) and time.monotonic() < until:
        for pid in others:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)


def _others() -> list[int]:
    """Living processes of our group but us."""
    found = []
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    for pid in pids:
        try:
            fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
            try:
                fields = os.read(fd, 4096).rpartition(b")")[2].split()
            finally:
                os.close(fd)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == os.getpid() and fields[0] not in {b"Z", b"X"} and pid != os.getpid():
            found.append(pid)
    return found


def _end_as(status: int) -> None:
    """End by what the child ended by."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left its own
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
