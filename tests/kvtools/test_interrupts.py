"""A signal in the stretch between starting a child and knowing its pid waits for the end of it."""

import signal

import pytest

from tests.support.processes import run_python

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_waits_for_the_end_and_is_not_lost(number: signal.Signals) -> None:
    ran = run_python(f"""
import signal
from kvtools.interrupts import interrupts_held, terminate_as_interrupt
terminate_as_interrupt()
known = None
try:
    with interrupts_held():
        signal.raise_signal({int(number)})
        known = "child"
    print("not reached")
except KeyboardInterrupt:
    print(known)
""")
    assert (ran.rc, ran.stdout, ran.stderr) == (0, "child\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_without_a_handler_of_ours_the_signal_ends_the_process_afterwards(number: signal.Signals) -> None:
    ran = run_python(f"""
import signal
from kvtools.interrupts import interrupts_held
with interrupts_held():
    signal.raise_signal({int(number)})
    print("still here", flush=True)
print("not reached", flush=True)
""")
    assert (ran.rc, ran.stdout) == (-int(number), "still here\n")


def test_a_child_started_meanwhile_can_be_ended() -> None:
    ran = run_python("""
import subprocess, sys
from kvtools.interrupts import interrupts_held
with interrupts_held():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
child.terminate()
print(child.wait())
""")
    assert (ran.rc, ran.stdout) == (0, "-15\n")


def test_handlers_are_what_they_were() -> None:
    ran = run_python("""
import signal
from kvtools.interrupts import interrupts_held
mine = lambda *_: None
signal.signal(signal.SIGTERM, mine)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with interrupts_held():
    pass
print(signal.getsignal(signal.SIGTERM) is mine, signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)
""")
    assert ran.stdout == "True True\n"


@pytest.mark.parametrize("number", NUMBERS)
def test_once_means_that_only_the_first_signal_unwinds(number: signal.Signals) -> None:
    ran = run_python(f"""
import signal
from kvtools.interrupts import interrupts_held, terminate_as_interrupt
terminate_as_interrupt(once=True)
try:
    signal.raise_signal({int(number)})
    print("not reached")
except KeyboardInterrupt:
    for again in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(again)
        with interrupts_held():
            signal.raise_signal(again)
    print("cleaned up")
""")
    assert (ran.rc, ran.stdout, ran.stderr) == (0, "cleaned up\n", "")


def test_once_leaves_an_ignored_ctrl_c_ignored() -> None:
    ran = run_python("""
import signal
from kvtools.interrupts import terminate_as_interrupt
signal.signal(signal.SIGINT, signal.SIG_IGN)
terminate_as_interrupt(once=True)
signal.raise_signal(signal.SIGINT)
print("goes on")
""")
    assert (ran.rc, ran.stdout) == (0, "goes on\n")
