"""Runs as root inside a private mount namespace: makes file systems on loop devices and says what kvdoctor sees on each.

`unshare --mount --propagation private python mount_zoo.py zoo|frozen|dead|capture|full SCRATCH` prints JSON. All mounts die
with the namespace, and loop devices with their mounts (autoclear), even when this is killed.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvdoctor import api

MIB = 1 << 20


def sh(*words: str | Path) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: {done.stderr.strip()}")


def image(scratch: Path, name: str, size: int, *mkfs: str) -> Path:
    file = scratch / f"{name}.img"
    with file.open("wb") as handle:
        handle.truncate(size)
    sh(*mkfs, file)
    return file


def mounted(scratch: Path, name: str, what: str | Path, *options: str) -> Path:
    folder = scratch / name
    folder.mkdir()
    sh("mount", *options, what, folder)
    return folder


def zoo(scratch: Path) -> dict[str, str]:
    """Name -> folder of every kind of file system."""
    ext4 = ("mkfs.ext4", "-q", "-F")
    places = {
        "ext4 ordered": mounted(scratch, "ordered", image(scratch, "ordered", 32 * MIB, *ext4), "-o", "loop"),
        "ext4 writeback": mounted(scratch, "writeback", image(scratch, "writeback", 32 * MIB, *ext4), "-o", "loop,data=writeback"),
        "ext4 journal": mounted(scratch, "journal", image(scratch, "journal", 32 * MIB, *ext4), "-o", "loop,data=journal"),
        "ext4 none": mounted(scratch, "none", image(scratch, "none", 32 * MIB, *ext4, "-O", "^has_journal"), "-o", "loop"),
    }
    hidden = image(scratch, "hidden", 32 * MIB, *ext4)
    sh("tune2fs", "-o", "journal_data_writeback", hidden)
    places["ext4 hidden writeback"] = mounted(scratch, "hidden", hidden, "-o", "loop")
    places["ext4 read-only"] = mounted(scratch, "readonly", image(scratch, "readonly", 32 * MIB, *ext4), "-o", "loop,ro")
    places["xfs"] = mounted(scratch, "xfs", image(scratch, "xfs", 320 * MIB, "mkfs.xfs", "-q"), "-o", "loop")
    places["btrfs"] = mounted(scratch, "btrfs", image(scratch, "btrfs", 128 * MIB, "mkfs.btrfs", "-q"), "-o", "loop")
    places["tmpfs"] = mounted(scratch, "tmpfs", "tmpfs", "-t", "tmpfs", "-o", "size=16m")
    for part in ("lower", "upper", "work"):
        (places["xfs"] / part).mkdir()
    folders = {f"{name}dir": places["xfs"] / name for name in ("lower", "upper", "work")}
    layers = ",".join(f"{name}={folder}" for name, folder in folders.items())
    places["overlay"] = mounted(scratch, "overlay", "overlay", "-t", "overlay", "-o", layers)
    (places["xfs"] / "kvd").mkdir()
    places["bind with a blank"] = mounted(scratch, "my bind", places["xfs"] / "kvd", "--bind")
    places["nearly full"] = mounted(scratch, "full", "tmpfs", "-t", "tmpfs", "-o", "size=100m")
    (places["nearly full"] / "ballast").write_bytes(bytes(82 * MIB))
    return {name: str(folder) for name, folder in places.items()}


def frozen(scratch: Path) -> dict[str, Any]:
    """A look at a frozen file system beside a healthy one: writers there sleep and survive SIGKILL."""
    ice = mounted(scratch, "ice", image(scratch, "ice", 320 * MIB, "mkfs.xfs", "-q"), "-o", "loop")
    healthy = scratch / "healthy"
    healthy.mkdir()
    sh("xfs_freeze", "-f", ice)
    try:
        started = time.monotonic()
        facts = api.collect_host(paths=[str(healthy), str(ice)], deadline_s=3.0)
        took = time.monotonic() - started
    finally:
        sh("xfs_freeze", "-u", ice)
    return {"facts": facts.to_json(), "seconds": took, "ice": str(ice), "healthy": str(healthy)}


def dead(scratch: Path) -> dict[str, Any]:
    """A look at a mount whose server never answers, as a hard NFS mount without its server: even stat does not return."""
    silent, healthy = scratch / "silent", scratch / "healthy"
    silent.mkdir()
    healthy.mkdir()
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"silent", os.fsencode(silent), b"fuse", 0, options):
        raise SystemExit(f"mount fuse: {os.strerror(ctypes.get_errno())}")
    try:
        started = time.monotonic()
        facts = api.collect_host(paths=[str(silent / "kvd"), str(healthy)], deadline_s=8.0, run_tools=False)
        took = time.monotonic() - started
        words = {"--from": 1, "--root": 1, "capture": 4}  # the last one looks at this host first
        refused = [command(word, silent / "kvd", "--deadline", str(limit)) for word, limit in words.items()]
    finally:
        os.close(server)
    return {"facts": facts.to_json(), "seconds": took, "refused": refused, "silent": str(silent / "kvd"), "healthy": str(healthy)}


def command(*words: str | Path) -> dict[str, Any]:
    """kvdoctor as a process: its status, what it said, and how long it took."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "kvdoctor", *map(str, words)], capture_output=True, text=True)
    return {"rc": done.returncode, "stdout": done.stdout, "stderr": done.stderr, "seconds": time.monotonic() - started}


def capture(scratch: Path) -> dict[str, Any]:
    """A capture onto a frozen file system, and one to the same name once it has thawed."""
    ice = mounted(scratch, "ice", image(scratch, "ice", 320 * MIB, "mkfs.xfs", "-q"), "-o", "loop")
    words = ("capture", ice / "host", "--path", scratch, "--deadline", "2")
    sh("xfs_freeze", "-f", ice)
    try:
        onto_ice = command(*words)
    finally:
        sh("xfs_freeze", "-u", ice)
    thawed = command(*words)
    return {"ice": str(ice), "frozen": onto_ice, "thawed": thawed, "left": sorted(os.listdir(ice))}


def full(scratch: Path) -> dict[str, Any]:
    """A proof and a capture on a file system without room."""
    place = mounted(scratch, "full", "tmpfs", "-t", "tmpfs", "-o", "size=1m")
    (place / "ballast").write_bytes(bytes(MIB - 4096))
    proof = command("--prove", "--json", "--path", place, "--only", "storage.selfcheck")
    return {"proof": proof, "capture": command("capture", place / "host"), "left": sorted(os.listdir(place))}


def main() -> None:
    scratch = Path(sys.argv[2])
    if sys.argv[1] == "zoo":
        places = zoo(scratch)
        print(json.dumps({"places": places, "facts": api.collect_host(paths=list(places.values())).to_json()}))
    else:
        print(json.dumps({"frozen": frozen, "dead": dead, "capture": capture, "full": full}[sys.argv[1]](scratch)))


if __name__ == "__main__":
    main()
