"""What leaves an answer open: lost evidence, junk where a number belongs, a proof that does not end, options that go nowhere."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvdoctor import api
from kvdoctor.collect import tools
from kvdoctor.facts import KvPath, Proof
from kvdoctor.parse.versions import decimal
from kvdoctor.prove import prove
from kvdoctor.verdict import exit_code
from tests.kvdoctor.conftest import remove
from tests.kvdoctor.hosts import host, path
from tests.support.processes import Ran

LaidOut = Callable[[str], tuple[Path, dict[str, Any]]]
Cli = Callable[..., Ran]


def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs that never end: a real child, and the real way to be rid of it."""
    real = tools.run
    monkeypatch.setattr(tools, "run", lambda key, argv, *rest, **more: real(key, ["sleep", "300"], *rest, **more))


def test_one_deadline_for_all_proofs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    endless(monkeypatch)
    facts = host(
        gpus=[], paths=[KvPath(path=str(tmp_path), exists=True, is_dir=True, writable=True) for _ in range(3)], seconds=1.0
    )
    began = time.monotonic()
    prove(facts, deadline_s=1.5)
    assert time.monotonic() - began < 10  # three times 45 s without it
    assert all(one.proof and one.proof.given_up for one in facts.paths)
    assert facts.seconds > 2.0, "the proof's time counts"


def test_without_time_no_child_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = host(gpus=[], paths=[KvPath(path=str(tmp_path), exists=True, is_dir=True, writable=True)])
    monkeypatch.setattr(tools, "run", lambda *_, **__: pytest.fail("a child"))
    prove(facts, deadline_s=-1.0)
    assert facts.paths[0].proof
    assert "deadline" in facts.paths[0].proof.error


@pytest.mark.parametrize(
    ("proof", "word", "code"),
    [
        (None, "usable", 0),
        (Proof(direct=True, same=True, bytes=1), "usable", 0),
        (Proof(error="allocate: No space left on device", errno=28), "unusable", 1),
        (Proof(error="write: File too large", errno=27), "unusable", 1),
        (Proof(direct=True, same=False, bytes=1), "unusable", 1),
        (Proof(error="abandoned after 4.0 s (pid 7, state D)", given_up=True), "undetermined", 7),
    ],
)
def test_a_proof_decides_about_the_posix_tier(proof: Proof | None, word: str, code: int) -> None:
    report = api.judge(host(paths=[path(proof=proof)]))
    assert (report.posix, exit_code(report, strict=False)) == (word, code)


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("74-remount-read-only-after-errors", "root/proc/self/mountinfo"),
        ("26-hashseed-unset-lmcache-builtin", "cmd/engine.log"),
        ("25-docker-shm-64M", "cmd/df-h.out"),
        ("69-raid5-degraded-and-rebuilding", "root/proc/self/mountinfo"),
        ("69-raid5-degraded-and-rebuilding", "root/proc/mdstat"),
    ],
)
def test_lost_evidence_does_not_improve_the_posix_tier(
    doctor: Cli, laid_out: LaidOut, tmp_path: Path, case: str, part: str
) -> None:
    whole = tmp_path / "whole"
    assert doctor("capture", whole, "--from", laid_out(case)[0]).rc == 0
    before = api.judge(api.collect_capture(whole)).posix
    (whole / part).unlink()
    assert before in ("unusable", "degraded")
    assert api.judge(api.collect_capture(whole)).posix == "undetermined"


def test_a_mount_table_that_is_none(laid_out: LaidOut) -> None:
    capture, _ = laid_out("69-raid5-degraded-and-rebuilding")
    (capture / "root/proc/self/mountinfo").write_text("nan\n")
    assert api.judge(api.collect_capture(capture)).posix == "undetermined"


def test_numbers_without_end(laid_out: LaidOut) -> None:
    capture, _ = laid_out("00-base-amd-good")
    huge = "9" * 400
    for place in (capture / "root").rglob("*"):
        if place.is_file() and not place.is_symlink() and place.name.startswith(("size", "mem_info", "numa_node", "current_link")):
            place.write_text(huge + "\n")
    (capture / "root/proc/meminfo").write_text(f"HugePages_Total: {huge}\nHugepagesize: {huge} kB\n")
    report = api.judge(api.collect_capture(capture))
    assert {item.status for item in report.by_id("ais.registered") + report.by_id("gpu.largebar")} == {"unknown"}


def test_what_is_a_number() -> None:
    assert [decimal(text) for text in ("18446744073709551615", "0x10", " 7\n", "-1")] == [(1 << 64) - 1, 16, 7, -1]
    assert [decimal(text) for text in ("9" * 21, "9" * 5000, "", "x", "1.5")] == [None] * 5


@pytest.mark.parametrize("damage", ["cut", "missing", "empty", "folder", "fifo", "nothing listed"])
def test_a_damaged_list_of_one_of_our_captures(doctor: Cli, laid_out: LaidOut, tmp_path: Path, damage: str) -> None:
    whole = tmp_path / "whole"
    doctor("capture", whole, "--from", laid_out("00-base-amd-good")[0])
    index, text = whole / "index.json", (whole / "index.json").read_text()
    assert json.loads((whole / "case.json").read_text())["complete"] is False
    assert api.judge(api.collect_capture(whole)).verdict != "undetermined"
    remove(index)
    if damage == "folder":
        index.mkdir()
    elif damage == "fifo":
        os.mkfifo(index)
    elif damage != "missing":
        listed = json.dumps({**json.loads(text), "root": {}, "cmd": {}})
        index.write_text({"cut": text[:-3], "empty": "{}", "nothing listed": listed}[damage])
    report = api.judge(api.collect_capture(whole))
    assert (report.verdict, report.posix) == ("undetermined", "undetermined")
    assert "index.json" in report.by_id("env.capture")[0].observed


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--from", "/tmp", "capture"], "capture --from"),
        (["--path", "/tmp", "capture"], "capture --path"),
        (["--root", "/", "capture"], "capture --root"),
        (["--json", "explain"], "explain --json"),
        (["--strict", "explain"], "no such option"),
        (["--prove", "diff"], "no such option"),
        (["--only", "storage", "explain"], "no such option"),
    ],
)
def test_an_option_before_a_subcommand_is_not_swallowed(doctor: Cli, tmp_path: Path, words: list[str], hint: str) -> None:
    place = tmp_path / "taken"
    ran = doctor(*words, *{"capture": [place], "diff": [place, place]}.get(words[-1], []))
    assert (ran.rc, ran.stdout) == (2, "")
    assert words[0] in ran.stderr
    assert hint in ran.stderr
    assert not place.exists()


def test_debug_may_stand_before_a_subcommand(doctor: Cli) -> None:
    assert doctor("--debug", "explain", "storage.fs").rc == 0


def test_json_says_that_nothing_of_the_tier_was_judged(doctor: Cli) -> None:
    assert doctor("--only", "env.container", "--json").json()["overall"]["posix"] == "not-judged"


@pytest.mark.parametrize("word", ["--json", "--fix"])
def test_quiet_and_output_exclude_each_other(doctor: Cli, word: str) -> None:
    assert doctor("-q", word).rc == 2
