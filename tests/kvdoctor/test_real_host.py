"""Real file systems, a real hang, real namespaces and processes on this machine."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdoctor import api
from kvdoctor.facts import Facts, Gpu, KvPath
from kvdoctor.prove import gpu as gpu_proof
from kvdoctor.prove import prove
from kvdoctor.results import Report, Result
from tests.support.processes import SCRIPTS, Ran, wait_until

pytestmark = pytest.mark.real("host")

HERE = Path(__file__).parent
TOOLS = {
    "mkfs.ext4": "e2fsprogs",
    "mkfs.xfs": "xfsprogs",
    "mkfs.btrfs": "btrfs-progs",
    "xfs_freeze": "xfsprogs",
    "unshare": "util-linux",
}
MI300X = Gpu(bdf="0000:41:00.0", vendor="1002", device="74a1", driver="amdgpu")
"""So that storage is judged for GPU-direct on a machine that has none."""


def needs(*tools: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts and loop devices")
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = sorted({TOOLS[tool] for tool in tools if not shutil.which(tool, path=path)})
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install {' '.join(missing)}")


def in_mount_namespace(what: str, scratch: Path) -> Any:
    """Run mount_zoo.py with mounts of its own."""
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, str(HERE / "mount_zoo.py"), what, str(scratch)]
    env = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, env=env, stdin=subprocess.DEVNULL)
    if "Operation not permitted" in run.stderr and run.returncode:
        pytest.skip(f"needs to mount: {run.stderr.strip()}")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Facts, dict[str, str], Report]:
    """Facts of every kind of file system, judged as on a host with a GPU."""
    needs("mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "unshare")
    answer = in_mount_namespace("zoo", tmp_path_factory.mktemp("zoo"))
    facts = Facts.from_json(answer["facts"])
    facts.gpus = [MI300X]
    return facts, answer["places"], api.judge(facts)


def of(zoo: tuple[Facts, dict[str, str], Report], check: str, place: str) -> Result:
    _, places, report = zoo
    return next(item for item in report.by_id(check) if item.scope == places[place])


@pytest.mark.parametrize(
    ("place", "fs", "journal", "odirect"),
    [
        ("ext4 ordered", "pass", "pass", "pass"),
        ("ext4 writeback", "pass", "fail", "pass"),
        ("ext4 hidden writeback", "pass", "fail", "pass"),
        ("ext4 journal", "pass", "fail", "fail"),
        ("ext4 none", "pass", "warn", "pass"),
        ("xfs", "pass", "pass", "pass"),
        ("bind with a blank", "pass", "pass", "pass"),
        ("btrfs", "fail", "pass", "fail"),
        ("tmpfs", "fail", "pass", "fail"),
        ("overlay", "fail", "pass", "pass"),
    ],
)
def test_file_systems(zoo: tuple[Facts, dict[str, str], Report], place: str, fs: str, journal: str, odirect: str) -> None:
    got = tuple(of(zoo, check, place).status for check in ("storage.fs", "storage.journal", "storage.odirect"))
    assert got == (fs, journal, odirect)


def test_a_hidden_journal_mode_is_told_from_one_in_the_mount_table(zoo: tuple[Facts, dict[str, str], Report]) -> None:
    hidden = of(zoo, "storage.journal", "ext4 hidden writeback")
    assert "which the mount table does not show" in hidden.observed
    assert any(command.startswith("tune2fs -o ^journal_data_writeback") for command in hidden.commands)
    plain = of(zoo, "storage.journal", "ext4 writeback")
    assert "does not show" not in plain.observed
    assert not any("tune2fs" in command for command in plain.commands)


def test_a_loop_device_is_no_nvme(zoo: tuple[Facts, dict[str, str], Report]) -> None:
    answer = of(zoo, "storage.backing", "xfs")
    assert answer.status == "fail"
    assert "loop" in answer.observed


def test_the_posix_tier_of_each(zoo: tuple[Facts, dict[str, str], Report]) -> None:
    assert of(zoo, "storage.writable", "ext4 read-only").status == "fail"
    assert of(zoo, "storage.space", "nearly full").status == "warn"
    assert of(zoo, "storage.writable", "overlay").status == "pass"


def test_a_bind_mount_is_found_by_its_longest_prefix(zoo: tuple[Facts, dict[str, str], Report]) -> None:
    facts, places, _ = zoo
    path = next(path for path in facts.paths if path.path == places["bind with a blank"])
    assert path.mount is not None
    assert (path.mount.root, path.mount.point) == ("/kvd", places["bind with a blank"])


def test_probing_leaves_no_file(zoo: tuple[Facts, dict[str, str], Report], tmp_path: Path) -> None:
    api.collect_host(paths=[str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_file_system_costs_its_deadline_and_nothing_else(tmp_path: Path) -> None:
    needs("mkfs.xfs", "xfs_freeze", "unshare")
    answer = in_mount_namespace("frozen", tmp_path)
    assert answer["seconds"] < 20, "the hang itself is for ever"
    facts = Facts.from_json(answer["facts"])
    report = api.judge(facts)
    ice = {item.id: item for item in report.results if item.scope == answer["ice"]}
    healthy = {item.id: item for item in report.results if item.scope == answer["healthy"]}
    assert ice["storage.exists"].status == "pass", "stat answers on a frozen file system"
    assert ice["storage.writable"].status == "fail"
    assert "a write does not return" in ice["storage.writable"].observed
    assert "state D" in ice["storage.writable"].observed
    assert healthy["storage.exists"].status == "pass"
    assert report.posix == "unusable"
    assert [item["tool"] for item in report.abandoned] == ["pathprobe"]
    assert report.abandoned[0]["state"] == "abandoned"


def test_a_mount_that_never_answers_costs_its_deadline_and_only_its_own_answer(tmp_path: Path) -> None:
    needs("unshare")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse")
    answer = in_mount_namespace("dead", tmp_path)
    assert answer["seconds"] < 20, "the hang itself is for ever"
    report = api.judge(Facts.from_json(answer["facts"]))
    silent = {item.id: item for item in report.results if item.scope == answer["silent"]}
    healthy = {item.id: item for item in report.results if item.scope == answer["healthy"]}
    for word in answer["refused"]:
        assert (word["rc"], word["stdout"]) == (6, ""), "as a capture, as a root, and as a place to write one to"
        assert word["stderr"].startswith("kvdoctor: error: ")
        assert answer["silent"] in word["stderr"]
    assert silent["storage.exists"].status == "fail"
    assert "no answer within" in silent["storage.exists"].observed
    assert healthy["storage.exists"].status == healthy["storage.writable"].status == "pass", "though it was named second"
    assert report.posix == "unusable"


def test_inside_a_user_namespace_as_in_a_container(tmp_path: Path) -> None:
    """Root without CAP_SYSLOG: the look goes on, and says what it could not see."""
    needs("unshare")
    command = ["unshare", "-Umpf", "--mount-proc", "--map-root-user", str(SCRIPTS / "kvdoctor"), "--json", "--path", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    if run.returncode == 1 and "unshare" in run.stderr:
        pytest.skip(f"needs user namespaces: {run.stderr.strip()}")
    report = json.loads(run.stdout)
    assert run.returncode in (0, 1, 7)
    by_id = {item["id"]: item for item in report["results"]}
    assert by_id["storage.exists"]["status"] == "pass"
    assert by_id["env.privilege"]["status"] == "info"
    assert run.stderr == ""


@pytest.mark.parametrize("covered", ["/sys", "/sys/bus", "/sys/bus/pci"])
def test_a_host_whose_sys_cannot_be_read_is_undetermined(tmp_path: Path, covered: str) -> None:
    """An empty folder mounted over it, as in a container that hides it: no GPU seen is not "no GPU"."""
    needs("unshare")
    look = shlex.join([sys.executable, "-m", "kvdoctor", "--json", "--path", str(tmp_path)])
    shell = f"mount -t tmpfs none {covered} && exec {look}"
    command = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", shell]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, stdin=subprocess.DEVNULL)
    if "permission denied" in run.stderr.lower() or "not permitted" in run.stderr:
        pytest.skip(f"needs to mount: {run.stderr.strip()}")
    report = json.loads(run.stdout)
    assert (run.returncode, report["overall"]["verdict"]) == (7, "undetermined")
    results = {item["id"]: item for item in report["results"]}
    assert results["gpu.present"]["status"] == "unknown"
    assert covered != "/sys" or results["storage.backing"]["status"] in ("unknown", "pass")


def test_as_another_user_nothing_breaks(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: to become another user")
    os.chmod(tmp_path, 0o755)
    # The interpreter may lie in a folder of root's: a first look as root imports all that the second will need.
    code = (
        "import json, os, sys\nfrom kvdoctor import api\n"
        "look = lambda: json.dumps(api.judge(api.collect_host(paths=[sys.argv[1]])).to_json())\n"
        "look(); os.setgroups([]); os.setgid(65534); os.setuid(65534); print(look())"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=30)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    by_id = {item["id"]: item for item in report["results"]}
    assert "uid 65534" in by_id["env.privilege"]["observed"]
    assert "the kernel log" in by_id["env.privilege"]["observed"]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts a process that looks like `vllm serve` and has an environment of its own; returns its pid."""
    started: list[subprocess.Popen[bytes]] = []
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text("import sys, time\nprint('up', flush=True)\ntime.sleep(60)\n")

    def start(*words: str, **env: str) -> int:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        command = [sys.executable, "-I", str(script), "serve", *words]
        child = subprocess.Popen(command, env={**clean, **env}, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        child.stdout.close()
        started.append(child)
        return child.pid

    yield start
    for child in started:
        child.kill()
        child.wait()


def seeds(facts: Facts) -> dict[str, Result]:
    return {item.scope: item for item in api.judge(facts, only=["cfg.hashseed"]).results}


def test_the_hash_seed_is_the_engines_own(engine: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")  # kvdoctor's own environment proves nothing about the engine
    good, bad = engine(PYTHONHASHSEED="0"), engine("--prefix-caching-hash-algo", "xxhash")
    facts = api.collect_host(paths=[str(tmp_path)])
    found = seeds(facts)
    assert found[f"pid {good}"].status == "pass"
    assert found[f"pid {bad}"].status == "fail"


def test_secrets_of_engines_stay_there(engine: Callable[..., int], tmp_path: Path) -> None:
    pid = engine("--api-key", "sk-private", "--hf-token=hf_private", VLLM_API_KEY="sk-private", OTHER="sk-private")
    facts = api.collect_host(paths=[str(tmp_path)])
    mine = next(item for item in facts.engines.processes if item.pid == pid)
    assert "sk-private" not in json.dumps(facts.to_json())
    assert "hf_private" not in json.dumps(facts.to_json())
    assert mine.environ is not None
    assert mine.environ["VLLM_API_KEY"] == "***"


def test_an_engine_that_cannot_cache(engine: Callable[..., int], tmp_path: Path) -> None:
    pid = engine("--no-enable-prefix-caching", "--kv-transfer-config", "{}", PYTHONHASHSEED="0")
    report = api.judge(api.collect_host(paths=[str(tmp_path)]), only=["cfg.engine_flags"])
    mine = next(item for item in report.results if item.scope == f"pid {pid}")
    assert mine.status == "warn"
    assert "prefix caching is off" in mine.observed


def test_prove_moves_real_bytes_and_cleans_up(tmp_path: Path) -> None:
    facts = api.collect_host(paths=[str(tmp_path)], run_tools=False)
    prove(facts, size=64 << 20)
    proof = facts.paths[0].proof
    assert proof is not None
    assert (proof.error, proof.same) == ("", True)
    assert proof.bytes >= 16 << 20
    assert proof.write_bytes_per_s
    assert proof.read_bytes_per_s
    result = api.judge(facts, only=["storage.selfcheck"]).results[0]
    assert result.status == ("pass" if proof.direct else "warn")
    assert list(tmp_path.iterdir()) == []


def test_prove_on_the_command_line(cli: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    report = cli("kvdoctor", "--prove", "--json", "--path", tmp_path / "file", "--only", "storage.selfcheck").json()
    assert report["results"][0]["status"] == "fail"
    assert "Not a directory" in report["results"][0]["observed"]


@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="needs an NVIDIA GPU")
def test_prove_gpu_direct(cli: Callable[..., Ran], tmp_path: Path) -> None:
    report = cli("kvdoctor", "--prove", "--json", "--path", tmp_path, "--only", "ais.proof", timeout_s=90).json()
    assert report["results"][0]["status"] in ("pass", "fail", "skip"), report
    assert list(tmp_path.iterdir()) == []


def test_without_a_library_the_gpu_proof_is_skipped_and_says_so(tmp_path: Path) -> None:
    path = KvPath(path=str(tmp_path), exists=True, is_dir=True, writable=True)
    found = gpu_proof(path, "hipfile", [], {})
    assert found.step == "load"
    assert "libhipfile.so" in found.error
    assert list(tmp_path.iterdir()) == []


def test_a_killed_proof_leaves_nothing(tmp_path: Path) -> None:
    script = Path(api.__file__).with_name("collect") / "proof_disk.py"
    child = subprocess.Popen([sys.executable, "-I", str(script), str(tmp_path), str(256 << 20)], stdout=subprocess.PIPE)
    wait_until(lambda: any("deleted" in os.readlink(link) for link in links(child.pid)), what="the nameless file")
    child.kill()
    child.communicate()
    assert list(tmp_path.iterdir()) == []


def links(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


def test_the_live_source_shows_real_kernels_release() -> None:
    facts = api.collect_host(run_tools=False)
    assert facts.kernel.release == os.uname().release
    assert facts.environment.euid == os.geteuid()


@pytest.mark.skipif(not shutil.which("modinfo", path="/usr/sbin:/sbin:/usr/bin"), reason="needs kmod: apt-get install kmod")
def test_our_own_reader_of_modules_agrees_with_kmod(tmp_path: Path) -> None:
    from kvdoctor.parse import driver
    from tests.kvdoctor.elf import elf_with_modinfo

    module = tmp_path / "amdgpu.ko"
    module.write_bytes(elf_with_modinfo(b"version=6.16.13\0srcversion=D5FB5F31\0vermagic=6.8.0-60-generic SMP\0intree=Y\0"))
    modinfo = shutil.which("modinfo", path="/usr/sbin:/sbin:/usr/bin")
    assert modinfo is not None
    run = subprocess.run([modinfo, str(module)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    theirs, ours = driver.parse_modinfo(run.stdout), driver.parse_module_elf(module.read_bytes(), str(module))
    assert theirs == ours
