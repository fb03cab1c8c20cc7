"""A capture judges like the host it was made from, and holds nothing that identifies it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdoctor import api
from kvdoctor.capture import Recording, kept_arguments, write_capture
from kvdoctor.redact import Redactor
from kvdoctor.results import Report
from kvtools.errors import UsageError


def statuses(report: Report) -> list[tuple[str, str, str]]:
    return [(item.id, item.scope, item.status) for item in report.results]


def test_a_capture_of_a_case_judges_like_the_case(
    case_name: str, laid_out: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    case, wanted = laid_out(case_name)
    recording = Recording()
    facts = api.collect_capture(case, recorder=recording)
    copy = tmp_path / "copy"
    write_capture(recording, facts, copy, redact=True)
    report = api.judge(api.collect_capture(copy))
    assert statuses(report) == statuses(api.judge(facts))
    assert (report.verdict, report.posix) == (wanted["expected_overall"], wanted["expected_posix"])


@pytest.mark.real("host")
def test_a_capture_of_this_host_judges_like_this_host(tmp_path: Path) -> None:
    recording = Recording()
    facts = api.collect_host(paths=[str(tmp_path)], recorder=recording)
    write_capture(recording, facts, tmp_path / "capture", redact=False)
    again = api.collect_capture(tmp_path / "capture")
    assert not again.partial
    live, replayed = api.judge(facts), api.judge(again)
    assert (replayed.verdict, replayed.posix) == (live.verdict, live.posix)
    # Segments of other programs come and go between the two looks of one collection; all else must agree.
    differ = set(statuses(live)) ^ set(statuses(replayed))
    assert not {item for item in differ if not item[0].startswith("kvd.")}


def test_nothing_private_is_left(laid_out: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    case, _ = laid_out("32-nfs-backed-kv")
    root = case / "root"
    (root / "proc/sys/kernel/hostname").write_text("gpu-node-17.corp.example\n")
    (root / "proc/cmdline").write_text("root=UUID=9f1c2d3e-aaaa-4bbb-8ccc-0123456789ab ip=10.20.30.40 iommu=pt\n")
    (root / "proc/self/mountinfo").write_text(
        "27 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n"
        "612 27 0:60 / /nvme rw - nfs filer03.corp.example:/vol rw,vers=3,hard,proto=tcp,addr=10.20.30.41,clientaddr=fd00:1:2::7\n"
    )
    (case / "cmd/dmesg.out").write_text("[ 1.0] amdgpu gpu-node-17: host gpu-node-17 is up, mac 3c:ec:ef:01:02:03\n")
    told = json.loads((case / "case.json").read_text())
    (case / "case.json").write_text(
        json.dumps({**told, "kv_path": "/home/alice/kv", "env": {"KVD_SOCKET": "/home/alice/kvd.sock"}})
    )
    recording = Recording()
    facts = api.collect_capture(case, recorder=recording)
    write_capture(recording, facts, tmp_path / "copy", redact=True)
    text = "\n".join(file.read_text() for file in (tmp_path / "copy").rglob("*") if file.is_file())
    for private in ("gpu-node-17", "corp.example", "9f1c2d3e", "10.20.30", "3c:ec:ef", "fd00:1:2", "filer03", "alice"):
        assert private not in text
    copied = json.loads((tmp_path / "copy/case.json").read_text())
    assert copied["kv_path"] == "/home/user1/kv"
    assert copied["env"] == {"KVD_SOCKET": "***"}, "no rule reads it"
    assert "iommu=pt" in text


def test_without_redaction_all_stays(laid_out: Callable[[str], tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    case, _ = laid_out("32-nfs-backed-kv")
    recording = Recording()
    facts = api.collect_capture(case, recorder=recording)
    write_capture(recording, facts, tmp_path / "copy", redact=False)
    assert "192.0.2.16:/export" in (tmp_path / "copy/root/proc/self/mountinfo").read_text()
    assert json.loads((tmp_path / "copy/case.json").read_text())["captured"]["redacted"] is False


def test_a_capture_never_mixes_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        write_capture(Recording(), api.Facts(), tmp_path, redact=True)
    assert (tmp_path / "file").read_text() == "mine"
    empty = tmp_path / "new"
    empty.mkdir()
    write_capture(Recording(), api.Facts(), empty, redact=True)
    assert (empty / "case.json").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [], "no scratch is left"


def test_arguments_keep_only_what_decides() -> None:
    line = "python3 -m vllm.entrypoints.openai.api_server --model /secret/llama --api-key sk-1 --tensor-parallel-size 8"
    more = ["--kv-transfer-config", '{"kv_connector":"X","token":"t"}', "--no-enable-prefix-caching", "--max-bytes=4G"]
    args = line.split() + more
    kept = kept_arguments(args)
    assert kept[:2] == ["python3", "-m"]
    assert kept[-6:] == [
        "--tensor-parallel-size",
        "8",
        "--kv-transfer-config",
        "{}",
        "--no-enable-prefix-caching",
        "--max-bytes=4G",
    ]
    assert not {"sk-1", "/secret/llama"} & set(kept)


@pytest.mark.parametrize(
    "kept",
    [
        "GDS release version: 1.14.0.30",
        "amdgpu/6.16.13-2278356.24.04, 6.8.0-60-generic",
        "Linux 6.8.0-60-generic",
        "0000:41:00.0",
        "0x0000000010000000 0x000000001fffffff",
        "D5FB5F3108420043522DCAC",
        "0.0.0.0 127.0.0.1",
        "LnkSta: Speed 2.5GT/s",
        "12:34:56",
    ],
)
def test_what_is_no_address_stays(kept: str) -> None:
    assert Redactor().text(kept) == kept


@given(
    address=st.ip_addresses(v=4, network="10.0.0.0/8") | st.ip_addresses(v=4, network="172.16.0.0/12"),
    before=st.sampled_from(["addr=", "from ", "(", "//", ","]),
    after=st.sampled_from(["", ":2049", ",rw", "/export", ")", " "]),
)
def test_every_address_goes(address: Any, before: str, after: str) -> None:
    text = Redactor().text(f"{before}{address}{after}")
    assert str(address) not in text
    assert text.startswith(before + "192.0.2.")


@given(st.text(max_size=200))
def test_redaction_is_stable_and_never_raises(text: str) -> None:
    redactor = Redactor(hosts=["node-a"], users=["alice"])
    once = redactor.text(text)
    assert redactor.text(text) == once
    assert "alice" not in redactor.text(f"/home/alice/{'x'}")


def test_one_name_one_stand_in() -> None:
    redactor = Redactor(hosts=["node7.example"])
    text = redactor.text("node7 10.0.0.1 10.0.0.2 10.0.0.1 node7.example")
    assert text == "host1 192.0.2.1 192.0.2.2 192.0.2.1 host1"


def test_two_captures_into_one_directory_leave_one_whole(tmp_path: Path) -> None:
    home = tmp_path / "host"
    words = [sys.executable, "-m", "kvdoctor", "capture", str(home), "--path", str(tmp_path)]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    told = [child.communicate(timeout=30)[1] for child in running]
    assert min(child.returncode for child in running) == 0
    assert [child.returncode for child in running].count(0) == 1, told
    assert "Traceback" not in "".join(told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host"], "no scratch directory is left"
    assert api.judge(api.collect_capture(home)).by_id("storage.exists")[0].status == "pass"
