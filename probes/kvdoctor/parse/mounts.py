"""Mount table, software RAID table, df: what lies where, from the kernel's own text.

mountinfo's third field (major:minor) is trusted, its source name is not: inside a container the name may lie.
"""

import re

from kvdoctor.facts import MdArray, Mount

_OCTAL = re.compile(r"\\([0-7]{3})")
_DF_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}


def unescape(text: str) -> str:
    r"""mountinfo writes blanks, tabs, newlines and backslashes as three octal digits: '\040' is a blank."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)


def parse_mountinfo(text: str) -> list[Mount]:
    """Every well-formed line, in order (later ones cover earlier ones)."""
    mounts = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        head, tail = left.split(), right.split(" ")
        if not dash or len(head) < 6 or len(tail) < 2 or ":" not in head[2]:
            continue
        mounts.append(
            Mount(
                dev=head[2],
                root=unescape(head[3]),
                point=unescape(head[4]),
                options=head[5].split(","),
                fstype=tail[0],
                source=unescape(tail[1]),
                super_options=tail[2].split(",") if len(tail) > 2 and tail[2] else [],
            )
        )
    return mounts


def mount_of(path: str, mounts: list[Mount]) -> Mount | None:
    """The mount a path lies on: the longest mountpoint that is a prefix, and of equal ones the last mounted.

    Not by st_dev: overlay and btrfs give files a device number that is in no mount table.
    """
    best: Mount | None = None
    for mount in mounts:
        point = mount.point.rstrip("/")
        if (path == point or path.startswith(point + "/")) and (best is None or len(point) >= len(best.point.rstrip("/"))):
            best = mount
    return best


def parse_mdstat(text: str) -> list[MdArray]:
    """Arrays of /proc/mdstat: 'md0 : active raid5 a[0] b[1]' and the line below it with '[3/2] [UU_]'."""
    arrays: list[MdArray] = []
    for line in text.splitlines():
        name, colon, rest = line.partition(" : ")
        if colon and name.startswith("md") and not line.startswith(" "):
            words = rest.split()
            array = MdArray(name=name.strip(), active=bool(words) and words[0] == "active")
            words = [word for word in words[1:] if not word.startswith("(")]
            if words and "[" not in words[0]:
                array.level = words.pop(0)
            array.members = [word.split("[", 1)[0] for word in words if "[" in word]
            array.missing = sum("(F)" in word for word in words)
            arrays.append(array)
        elif arrays and line.startswith(" "):
            if found := re.search(r"\[([U_]+)\]", line):
                arrays[-1].missing = max(arrays[-1].missing, found[1].count("_"))
            if found := re.search(r"\b(recovery|resync|reshape|check|repair)\s*=\s*(\S+)", line):
                arrays[-1].rebuilding = f"{found[1]} {found[2]}"
            elif found := re.search(r"\b(recovery|resync)=(DELAYED|PENDING)", line):
                arrays[-1].rebuilding = f"{found[1]} {found[2].lower()}"
    return arrays


def parse_df_shm(text: str) -> int | None:
    """Bytes of the line mounted on /dev/shm: 'shm 64M 20M 45M 31% /dev/shm' (df -h) or in bytes (df -B1) or 1K blocks."""
    scale = 1
    for line in text.splitlines():
        if line.startswith("Filesystem"):
            scale = 1024 if "1K-blocks" in line else 1
        words = line.split()
        if len(words) >= 6 and words[-1] == "/dev/shm":  # noqa: S108 - a name to look for
            found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,3})?)([KMGTP]?)i?B?", words[-5])
            if found:
                unit = _DF_UNITS[found[2]] if found[2] else scale
                return int(float(found[1]) * unit)
    return None


def mount_size(options: list[str]) -> int | None:
    """Bytes of a tmpfs from its size= option ('24684084k'), None where it has none."""
    for option in options:
        if found := re.fullmatch(r"size=(\d{1,18})([kmgKMG]?)", option):
            return int(found[1]) * _DF_UNITS[found[2].upper()]
    return None
