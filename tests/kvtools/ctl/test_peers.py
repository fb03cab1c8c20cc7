"""What is learned about kvcached's engines from outside, on a made-up /proc; and kvctl's own journal."""

import os
import socket
import stat
import uuid
from pathlib import Path

import pytest

from kvtools.ctl import journal, peers
from kvtools.segments import pool


def process(
    proc: Path, pid: int, environ: dict[str, str], *, exe: str = "/usr/bin/python3.11", group: int = 1, parent: int = 1
) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in environ.items()))
    (folder / "exe").symlink_to(exe)
    (folder / "stat").write_text(f"{pid} (py (x) thon) S {parent} {group} {group} 0 -1")
    (folder / "cmdline").write_bytes(b"python\0-m\0vllm\0")


def found(proc: Path, name: str) -> list[int]:
    return [one.pid for one in peers.likely_owners(name, proc=proc)]


def test_an_explicit_name_is_found_sanitised_or_not(tmp_path: Path) -> None:
    process(tmp_path, 10, {"KVCACHED_IPC_NAME": "my model/1"})
    process(tmp_path, 11, {"KVCACHED_IPC_NAME": "other"})
    process(tmp_path, 12, {"KVCACHED_IPC_NAME": "my model/1"}, exe="/bin/bash")
    assert found(tmp_path, "my-model-1") == [10]
    assert found(tmp_path, "other") == [11]
    assert peers.likely_owners("other", proc=tmp_path)[0].command == "python -m vllm"


def test_a_default_name_is_found_by_its_process_group(tmp_path: Path) -> None:
    process(tmp_path, 20, {"ENABLE_KVCACHED": "true"}, group=20)
    process(tmp_path, 21, {"ENABLE_KVCACHED": "true", "KVCACHED_PAGE_PREALLOC_ENABLED": "false"}, group=20)
    process(tmp_path, 22, {}, group=20)
    process(tmp_path, 23, {"ENABLE_KVCACHED": "1", "KVCACHED_IPC_NAME": "named"}, group=20)
    assert found(tmp_path, "kvcached_vLLM_20") == [20, 21]
    assert found(tmp_path, "kvcached_SGLang_20_1") == [20, 21]
    assert found(tmp_path, "kvcached_vLLM_21") == []
    assert [one.prealloc_off for one in peers.likely_owners("kvcached_vLLM_20", proc=tmp_path)] == [False, True]


def test_this_process_and_its_ancestors_are_not_engines(tmp_path: Path) -> None:
    process(tmp_path, os.getpid(), {"KVCACHED_IPC_NAME": "x"}, parent=7)
    process(tmp_path, 7, {"KVCACHED_IPC_NAME": "x"}, parent=1)
    process(tmp_path, 8, {"KVCACHED_IPC_NAME": "x"})
    assert found(tmp_path, "x") == [8]


def test_processes_that_vanish_or_are_not_readable_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "30").mkdir()
    (tmp_path / "self").mkdir()
    assert found(tmp_path, "x") == []


@pytest.mark.parametrize(
    ("name", "made"), [("a", "a"), ("a b/c.d", "a-b-c-d"), ("名前", "名前"), ("x" * 70, "x" * 64), ("a_b-c", "a_b-c")]
)
def test_sanitising_as_kvcached_does(name: str, made: str) -> None:
    assert peers.sanitised(name) == made


@pytest.mark.parametrize(
    ("name", "limit", "used", "said"),
    [
        ("kvcached_vLLM_812", 5, 0, "default name of a kvcached vLLM engine in process group 812"),
        ("kvcached_SGLang_812_3", 5, 0, "_3: the plain name was taken"),
        ("kvcached_mem_info", 5, 0, "every engine of kvcached 0.1.1 and 0.1.2"),
        ("kvcached_vllm_GPU0_GPU1", 5, 0, "sardeenz gives this name to all models on these GPUs"),
        ("chat_g3", 5, 0, "pool 3 of its process"),
        ("chat", 0, 5, "segment deleted under a live engine"),
        ("chat", 0, 0, "its engines ignore the limit"),
    ],
)
def test_quirks_are_said_by_name(name: str, limit: int, used: int, said: str) -> None:
    assert said in " ".join(peers.quirks(pool.PoolReading(name, limit, used, 0, 0)))


def test_an_ordinary_segment_has_none() -> None:
    assert peers.quirks(pool.PoolReading("VLLM_MODEL_1", 5, 3, 1, 0)) == []


def test_worker_sockets_are_counted_and_not_spoken_to(tmp_path: Path) -> None:
    assert peers.worker_folder("VLLM", temporary=tmp_path) is None
    folder = tmp_path / f"kvcached-tp-VLLM-{str(uuid.uuid5(uuid.NAMESPACE_DNS, 'VLLM'))[:8]}"
    folder.mkdir()
    assert peers.worker_folder("VLLM", temporary=tmp_path) == folder
    with socket.socket(socket.AF_UNIX) as bound, socket.socket(socket.AF_UNIX) as gone:
        bound.bind(str(folder / "w0.sock"))
        gone.bind(str(folder / "w1.sock"))
        gone.close()
        assert peers.worker_sockets(folder) == (2, 1)


def change(root: Path, limit: int, file: Path) -> pool.LimitChange:
    written = pool.write_limit("x", limit, root=root)
    journal.note(written, by="t", at_ns=1, root=root, file=file)
    return written


def test_the_journal_remembers_an_unbroken_chain(tmp_path: Path) -> None:
    file = tmp_path / "state" / "limits.jsonl"
    pool.create_pool("x", 100, root=tmp_path)
    assert journal.history(pool.read_pool("x", root=tmp_path), root=tmp_path, file=file) == []
    change(tmp_path, 50, file)
    change(tmp_path, 50, file)
    last = change(tmp_path, 70, file)
    chain = journal.history(last.after, root=tmp_path, file=file)
    assert [(one.before_bytes, one.after_bytes) for one in chain] == [(100, 50), (50, 70)]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    pool.write_limit("x", 60, root=tmp_path)
    assert journal.history(pool.read_pool("x", root=tmp_path), root=tmp_path, file=file) == [], "somebody else wrote"
    last = change(tmp_path, 40, file)
    assert [(one.before_bytes, one.after_bytes) for one in journal.history(last.after, root=tmp_path, file=file)] == [(60, 40)]


def test_a_new_segment_of_an_old_name_has_no_history(tmp_path: Path) -> None:
    file = tmp_path / "limits.jsonl"
    pool.create_pool("x", 100, root=tmp_path)
    change(tmp_path, 50, file)
    (tmp_path / "keep").write_bytes(b"")  # so that the inode is not the next one free
    old = (tmp_path / "x").rename(tmp_path / "old")
    pool.create_pool("x", 50, root=tmp_path)
    assert journal.history(pool.read_pool("x", root=tmp_path), root=tmp_path, file=file) == []
    old.unlink()


def test_garbage_in_the_journal_and_no_place_for_it(tmp_path: Path) -> None:
    file = tmp_path / "limits.jsonl"
    pool.create_pool("x", 100, root=tmp_path)
    file.write_bytes(b'\xff{"\n[]\n5\n{}\n{"segment":null}\n' + b"[" * 5000 + b"\n")
    last = change(tmp_path, 50, file)
    assert len(journal.history(last.after, root=tmp_path, file=file)) == 1
    journal.note(last, by="t", at_ns=1, root=tmp_path, file=file / "below")
    assert journal.history(last.after, root=tmp_path, file=file / "below") == []


def test_the_journal_stays_small(tmp_path: Path) -> None:
    file = tmp_path / "limits.jsonl"
    pool.create_pool("x", 100, root=tmp_path)
    file.write_bytes(b'{"padding":"' + b"x" * 200 + b'"}\n')
    file.write_bytes(file.read_bytes() * 1300)
    last = change(tmp_path, 50, file)
    assert file.stat().st_size < 200 << 10
    assert len(journal.history(last.after, root=tmp_path, file=file)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x", "limits.jsonl"] or len(list(tmp_path.iterdir())) == 2
