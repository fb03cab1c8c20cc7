"""Rules about storage, limits, configuration, kvd, tools and proofs: facts in, answer out."""

from dataclasses import replace
from typing import Any

import pytest

from kvdoctor.facts import Block, DirectIo, Engine, GpuProof, MdArray, Mount, Proof, SegmentFact, ToolRun
from kvdoctor.report import lines
from kvdoctor.verdict import judge
from tests.kvdoctor.hosts import answer, gpu, host, nvme, path, status

# Storage


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ([nvme()], "pass"),
        ([nvme(pci="", chain=[])], "unknown"),
        ([Block(name="md0", kind="md", detail="raid0", slaves=["a"]), nvme()], "warn"),
        ([Block(name="md0", kind="md", detail="raid5", slaves=["a"]), nvme()], "warn"),
        ([Block(name="dm-0", kind="crypt", slaves=["a"]), nvme()], "fail"),
        ([Block(name="dm-0", kind="mpath", slaves=["a"]), nvme()], "fail"),
        ([Block(name="md0", kind="md", slaves=["dm-0"]), Block(name="dm-0", kind="crypt", slaves=["a"]), nvme()], "fail"),
        ([Block(name="dm-0", kind="dm", slaves=["a"]), nvme()], "fail"),
        ([Block(name="loop0", kind="loop")], "fail"),
        ([Block(name="vda", kind="virtio")], "fail"),
        ([Block(name="sda", kind="scsi")], "fail"),
        ([Block(name="nvme2n1", kind="nvme-fabric", transport="rdma")], "warn"),
        ([Block(name="nvme2n1", kind="nvme-fabric", transport="tcp")], "fail"),
        ([], "unknown"),
    ],
)
def test_backing(stack: list[Block], expected: str) -> None:
    assert status(host(paths=[path(stack=stack)]), "storage.backing") == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "warn"),
        ({"symbols": None}, "warn"),
        ({"symbols": ["get_pci_dev_from_dm"]}, "pass"),
        ({"symbols": ["get_pci_dev_from_dm"], "drives": 17}, "warn"),
        ({"symbols": ["get_pci_dev_from_dm"], "hidden": ["nvme1n1"]}, "warn"),
    ],
)
def test_lvm(changes: dict[str, Any], expected: str) -> None:
    drives = [nvme(name=f"nvme{i}n1", syspath=f"/sys/nvme{i}") for i in range(changes.get("drives", 2))]
    volume = Block(
        name="dm-0",
        kind="lvm",
        syspath="/sys/dm-0",
        slaves=[drive.name for drive in drives],
        slave_nodes_missing=changes.get("hidden", []),
    )
    facts = host(paths=[path(stack=[volume, *drives])])
    facts.kernel.symbols = changes.get("symbols", ["kfd_ais_rw_file"])
    assert status(facts, "storage.backing") == expected


def test_paths_are_judged_each_for_itself() -> None:
    tmp = path(path="/tmp/kv", mount=Mount("0:30", "/", "/tmp", "tmpfs", "tmpfs", ["rw"], []), stack=[], direct=None)
    report = judge(host(paths=[path(), tmp]))
    assert {item.scope: item.status for item in report.by_id("storage.fs")} == {"/nvme/kv": "pass", "/tmp/kv": "fail"}
    assert report.verdict == "not-ready"
    followers = {item.scope for item in report.results if item.caused_by == "storage.fs"}
    assert followers == {"/tmp/kv"}


@pytest.mark.parametrize(
    ("changes", "check", "expected"),
    [
        ({"exists": False}, "storage.exists", "fail"),
        ({"is_dir": False}, "storage.exists", "fail"),
        ({"exists": None, "hung": "no answer within 4.0 s"}, "storage.exists", "fail"),
        ({"exists": None, "probe_error": "EACCES"}, "storage.exists", "unknown"),
        ({"hung": "no answer within 4.0 s", "writable": True}, "storage.writable", "fail"),
        ({"writable": False}, "storage.writable", "fail"),
        ({"free": 1 << 40, "want": 2 << 40}, "storage.space", "fail"),
        ({"free": 1 << 40, "want": 2 << 40, "held": 1 << 40}, "storage.space", "pass"),
        ({"free": 1 << 38}, "storage.space", "warn"),
        ({"free_files": 3}, "storage.space", "fail"),
        ({"direct": DirectIo(opened=True, mem_align=0, offset_align=0)}, "storage.odirect", "fail"),
        ({"direct": DirectIo(opened=False, error="EINVAL")}, "storage.odirect", "fail"),
        ({"direct": DirectIo(opened=True)}, "storage.odirect", "unknown"),
        ({"direct": DirectIo(opened=True, mem_align=512, offset_align=512, write_error="EIO")}, "storage.odirect", "fail"),
        ({"direct": DirectIo(opened=True, mem_align=4, offset_align=65536)}, "storage.align", "warn"),
    ],
)
def test_a_path(changes: dict[str, Any], check: str, expected: str) -> None:
    assert status(host(paths=[path(**changes)]), check) == expected


@pytest.mark.parametrize(
    ("options", "symbols", "expected"),
    [
        ("rw,hard,proto=rdma,nconnect=16,rsize=4194304,wsize=4194304", ["nfs_check_all_transports_p2p"], "pass"),
        ("rw,hard,proto=rdma,nconnect=16", [], "warn"),
        ("rw,hard,proto=tcp,nconnect=16", [], "warn"),
        ("rw,soft,proto=rdma,nconnect=16", ["kfd_ais_get_storage_type"], "fail"),
        ("rw,hard,proto=rdma,nconnect=16,rsize=1048576", ["kfd_ais_get_storage_type"], "info"),
    ],
)
def test_nfs(options: str, symbols: list[str], expected: str) -> None:
    mount = Mount("0:60", "/", "/nvme", "nfs4", "server:/vol", ["rw"], options.split(","))
    facts = host(paths=[path(mount=mount, stack=[], direct=None)])
    facts.kernel.symbols = symbols
    assert status(facts, "storage.nfs") == expected


def test_a_raid_that_lost_a_member() -> None:
    facts = host(
        paths=[path(stack=[Block(name="md0", kind="md", detail="raid5", md_state="clean", md_degraded=1, slaves=["a"]), nvme()])]
    )
    facts.md = [MdArray("md0", missing=1)]
    assert status(facts, "storage.degraded") == "fail"
    facts.md[0].rebuilding = "recovery 5%"
    assert status(facts, "storage.degraded") == "warn"
    facts.md[0].active = False
    assert status(facts, "storage.degraded") == "fail"


def test_numa_weighs_all_drives_and_names_the_better_one() -> None:
    near = path(path="/near", stack=[nvme(numa=1)])
    facts = host(gpus=[gpu(numa=1)], paths=[path(), near])
    found = answer(facts, "storage.numa")
    assert found.status == "warn"
    assert found.fix == "Prefer /near, whose drive is on the GPU's node."
    assert status(host(gpus=[gpu(numa=None)]), "storage.numa") == "pass"


# Limits and configuration


@pytest.mark.parametrize(
    ("limit", "arena", "expected"),
    [
        (-1, 8 << 30, "pass"),
        (4 << 30, 8 << 30, "fail"),
        ((8 << 30) + 1, 8 << 30, "warn"),
        (16 << 30, 8 << 30, "pass"),
        (1 << 30, None, "info"),
    ],
)
def test_memory_of_the_control_group(limit: int, arena: int | None, expected: str) -> None:
    facts = host()
    facts.limits.memory_max, facts.limits.arena = limit, arena
    assert status(facts, "limits.memcg") == expected


@pytest.mark.parametrize(
    ("size", "free", "expected"),
    [(64 << 20, None, "fail"), (512 << 20, None, "warn"), (1 << 30, 0, "fail"), (1 << 30, None, "pass")],
)
def test_shared_memory(size: int, free: int | None, expected: str) -> None:
    facts = host()
    facts.limits.shm, facts.limits.shm_free = size, free
    assert status(facts, "limits.shm") == expected


@pytest.mark.parametrize(
    ("environ", "vllm", "args", "expected"),
    [
        ({"PYTHONHASHSEED": "0"}, None, [], "pass"),
        ({"PYTHONHASHSEED": "4294967295"}, None, [], "pass"),
        ({"PYTHONHASHSEED": "4294967296"}, None, [], "fail"),
        ({"PYTHONHASHSEED": "random"}, True, [], "fail"),
        ({"PYTHONHASHSEED": ""}, True, [], "fail"),
        ({}, True, [], "info"),
        ({}, False, [], "fail"),
        ({}, None, [], "warn"),
        ({}, True, ["--prefix-caching-hash-algo", "xxhash_cbor"], "fail"),
        ({}, True, ["--prefix-caching-hash-algo=sha256_cbor"], "info"),
        (None, True, [], "info"),
    ],
)
def test_hash_seed(environ: dict[str, str] | None, vllm: bool | None, args: list[str], expected: str) -> None:
    facts = host()
    facts.engines.processes = [Engine(pid=7, name="vllm", args=args, environ=environ)]
    facts.engines.vllm_fixed_seed = vllm
    assert status(facts, "cfg.hashseed") == expected


def test_hash_seed_by_the_installed_version() -> None:
    facts = host()
    facts.engines.processes = [Engine(pid=7, environ={})]
    facts.engines.vllm_version = "0.32.0"
    assert status(facts, "cfg.hashseed") == "info"
    facts.engines.vllm_version = "0.11.0"
    assert status(facts, "cfg.hashseed") == "fail"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "pass"),
        ({"HIPFILE_FORCE_COMPAT_MODE": "true"}, "fail"),
        ({"HIPFILE_UNSUPPORTED_FILE_SYSTEMS": "true"}, "warn"),
        ({"HIPFILE_ALLOW_COMPAT_MODE": "false"}, "info"),
    ],
)
def test_hipfile_switches(env: dict[str, str], expected: str) -> None:
    assert status(host(env=env), "cfg.hipfile_env") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("long=/nvme/kv", "pass"),
        ("long=/nvme/kv,short=/elsewhere", "skip"),
        ("nvme/kv", "fail"),
        ("long=nvme", "fail"),
        ("", "skip"),
    ],
)
def test_hipfile_roots(text: str, expected: str) -> None:
    assert status(host(env={"INFERA_KVD_HIPFILE_ROOTS": text}), "cfg.roots") == expected


def test_another_distributions_kvctl() -> None:
    from kvdoctor.facts import Scripts

    facts = host(scripts=[Scripts("kvctl", ["kvcached", "kvtools"]), Scripts("kvd", ["kvtools"])])
    found = answer(facts, "cfg.scripts")
    assert found.status == "warn"
    assert found.observed == "kvctl: kvcached, kvtools"


# kvd


def test_segments_and_daemons() -> None:
    facts = host()
    facts.segments = [
        SegmentFact("kvtools.kvd.a", "kvd", "ok", "its writer holds the lock", 0.5, {"gets_total": 2000, "hits_total": 0}),
        SegmentFact("kvtools.kvd.b", "kvd", "frozen", "", 60.0),
        SegmentFact("kvtools.kvd.c", "kvd", "stale", "nobody holds its lock"),
        SegmentFact("kvtools.kvd.d", "kvd", "ok", "", 0.1, {"tier_breaker_open{tier=0}{type=disk}": 1, "corruptions_total": 3}),
        SegmentFact("VLLM", "pool", "unknown", "no owner file"),
    ]
    by_scope = {item.scope: item for item in judge(facts, only=["kvd.segments"]).results}
    assert [by_scope[name].status for name in ("kvtools.kvd.a", "kvtools.kvd.b", "kvtools.kvd.c", "VLLM")] == [
        "pass",
        "warn",
        "warn",
        "pass",
    ]
    assert "last beat 60 s ago" in by_scope["kvtools.kvd.b"].observed
    health = {item.scope: item for item in judge(facts, only=["kvd.health"]).results}
    assert "nothing that is asked for was ever stored" in health["kvtools.kvd.a"].observed
    assert "3 values came back damaged" in health["kvtools.kvd.d"].observed
    assert "1 tier is cut off" in health["kvtools.kvd.d"].observed


def test_connectors_tell_of_lost_daemons_and_failures() -> None:
    counted = {"daemon_up": 1.0, "lookups_total": 9.0, "hit_tokens_total": 512.0}
    good = SegmentFact("kvtools.connector.7-0", "connector", "ok", "", 0.1, counted)
    cold = replace(good, name="kvtools.connector.8-0", values={"daemon_up": 0, "load_failures_total": 2, "loads_total": 3})
    full = replace(good, name="kvtools.connector.9-0", values={"daemon_up": 1, "saves_total": 5, "save_failures_total": 5})
    found = {item.scope: item for item in judge(host(segments=[good, cold, full]), only=["kvd.connector"]).results}
    assert found[good.name].status == "pass"
    assert "its daemon is not there" in found[cold.name].observed
    assert "2 of 5 loads failed" in found[cold.name].observed
    assert "5 chunks were not stored" in found[full.name].observed


def test_many_of_a_kind_are_one_story() -> None:
    facts = host(segments=[SegmentFact(f"kvtools.kvd.{i}", "kvd", "stale", "nobody holds its lock") for i in range(20)])
    text = "\n".join(lines(judge(facts)))
    assert text.count("its writer is gone") == 2
    assert "and 18 more like it (kvd.segments)" in text


def test_direct_fallbacks_are_shown_by_reason() -> None:
    facts = host(
        segments=[SegmentFact("kvtools.connector.7-0", "connector", "ok", "", 0.1, {"direct_fallback_total{reason=unaligned}": 5})]
    )
    found = answer(facts, "kvd.direct")
    assert found.status == "warn"
    assert "5 (reason=unaligned)" in found.observed


# Tools and proof


def test_a_tool_that_hangs_is_unknown_and_listed() -> None:
    run = ToolRun("amd-smi", ["amd-smi"], "abandoned", seconds=5.5, pid=7, proc_state="D", wchan="amdgpu_device_lock")
    report = judge(host(tools={"amd-smi": run}))
    found = report.by_id("gpu.smi")[0]
    assert found.status == "unknown"
    assert "abandoned after 5.5 s (pid 7, state D, in amdgpu_device_lock)" in found.observed
    assert report.abandoned[0]["wchan"] == "amdgpu_device_lock"
    assert report.verdict == "ready-with-warnings"


@pytest.mark.parametrize(
    ("proof", "expected"),
    [
        (GpuProof("hipfile", 1 << 26, 1e10, 1e10, 1 << 27, True), "pass"),
        (GpuProof("hipfile", 1 << 26, 1e10, 1e10, None, True), "pass"),
        (GpuProof("hipfile", 1 << 26, 1e10, 1e10, 0, True), "fail"),
        (GpuProof("hipfile", 1 << 26, 1e10, 1e10, None, False), "fail"),
        (GpuProof("hipfile", error="hipFileRead moved -5011 of 16777216 bytes", step="hipFileRead"), "fail"),
        (GpuProof("cufile", error="libcufile.so.0: cannot open", step="load"), "skip"),
        (None, "skip"),
    ],
)
def test_proof_of_gpu_direct(proof: GpuProof | None, expected: str) -> None:
    facts = host(paths=[path(gpu_proof=proof)])
    assert status(facts, "ais.proof") == expected
    if expected == "fail":
        assert judge(facts).verdict == "not-ready"


@pytest.mark.parametrize(
    ("proof", "expected"),
    [
        (Proof(1 << 30, 2e9, 3e9, 0.1, True, True), "pass"),
        (Proof(1 << 30, 2e9, 3e9, 0.1, False, True), "warn"),
        (Proof(1 << 30, 2e9, 3e9, 0.1, True, False), "fail"),
        (Proof(error="write: Input/output error"), "fail"),
    ],
)
def test_proof_of_the_disk(proof: Proof, expected: str) -> None:
    assert status(host(paths=[path(proof=proof)]), "storage.selfcheck") == expected
