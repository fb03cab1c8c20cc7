"""What the kernel says of an engine's KV memory: never our own counters."""

import os
from pathlib import Path


def family(pid: int) -> list[int]:
    """The process and all that came from it."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += [int(word) for word in task.read_text().split()]
            except OSError:
                continue
    return found


def physical(pid: int) -> list[int]:
    """Bytes behind the KV memory files of an engine's processes, one number a worker: blocks the kernel has given them."""
    found: dict[int, int] = {}
    for one in family(pid):
        try:
            for link in Path(f"/proc/{one}/fd").iterdir():
                if "kvtools-elastic" in os.readlink(link):
                    status = link.stat()
                    found[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue
    return list(found.values())


def resident(pid: int) -> int:
    """Rss of the mappings of those files in all processes of the engine, from smaps."""
    total = 0
    for one in family(pid):
        inside = False
        try:
            lines = Path(f"/proc/{one}/smaps").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            word = line.split(maxsplit=1)[0]
            if "-" in word and not word.endswith(":"):
                inside = "memfd:kvtools-elastic" in line
            elif inside and word == "Rss:":
                total += int(line.split()[1]) * 1024
    return total
