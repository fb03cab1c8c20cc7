"""Replace what must not leave a host, so that the same thing always gets the same stand-in and verdicts stay the same.

Replaced: host names, user names, IP and MAC addresses, UUIDs and other long serials, names of NFS servers. Kept: versions,
PCI addresses, device names, sizes, mount points (but for user names in them), models of drives.
"""

import re
from collections.abc import Iterable

_MAC = re.compile(r"(?<![0-9A-Fa-f:])(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}(?![0-9A-Fa-f:])")
_IPV4 = re.compile(r"(?<![\w.:-])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{1,4}:){2,7}(?::|[0-9a-fA-F]{1,4})(?::?[0-9a-fA-F]{1,4})*(?![\w:.])")
_UUID = re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
_LVM = re.compile(r"\bLVM-[0-9A-Za-z]{64}\b")
_HEX = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{32,128}(?![0-9A-Za-z])")
_WWID = re.compile(r"\b(nvme\.|eui\.|naa\.|mpath-)[0-9a-f][0-9a-f-]{14,}[0-9a-f]\b")
_HOME = re.compile(r"/home/([^/\s,:;\"']+)")
_NFS = re.compile(r"( - nfs4? )([^\s:/]+):(/)")
_UNIQUE = re.compile(r"^(unique_id|hive_id) \d+$", re.MULTILINE)
_UNAME = re.compile(r"^(Linux )(\S+)( \d+\.\d+)", re.MULTILINE)
_KEPT_ADDRESS = re.compile(r"0\.0\.0\.0|127\.|255\.|192\.0\.2\.|169\.254\.169\.254")
_GENERIC_USERS = frozenset({"root", "user", "ubuntu", "admin", "nobody", "daemon", "kvd", "vllm"})


class Redactor:
    """One host's stand-ins. `hosts` and `users` are names known to be private, replaced as whole words."""

    def __init__(self, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        self._stand_ins: dict[tuple[str, str], str] = {}
        self._words: dict[str, tuple[str, str]] = {}
        for kind, names in (("host", hosts), ("user", users)):
            for name in names:
                short = [name, name.partition(".")[0]] if kind == "host" else [name]
                for word in short:
                    # A host called "vm" or a user called "kv" would tear ordinary words of a report apart.
                    if len(word) >= 3 and word not in _GENERIC_USERS and word != "localhost":
                        self._words[word] = (kind, name)
        pattern = "|".join(re.escape(word) for word in sorted(self._words, key=len, reverse=True))
        self._known = re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])") if pattern else None

    def _number(self, kind: str, value: str) -> int:
        known = sum(1 for other, _ in self._stand_ins if other == kind)
        return int(self._stand_ins.setdefault((kind, value), str(known + 1)))

    def text(self, text: str) -> str:
        """`text` with every private value replaced."""
        text = _HOME.sub(lambda found: f"/home/user{self._number('user', found[1])}", text)
        if self._known:
            text = self._known.sub(lambda found: self._word(found[0]), text)
        text = _UNAME.sub(lambda found: f"{found[1]}host1{found[3]}", text)
        text = _NFS.sub(lambda found: f"{found[1]}{self._server(found[2])}:{found[3]}", text)
        text = _UUID.sub(lambda found: f"00000000-0000-4000-8000-{self._number('uuid', found[0].lower()):012d}", text)
        text = _LVM.sub(lambda found: f"LVM-{self._number('lvm', found[0]):064d}", text)
        text = _WWID.sub(lambda found: f"{found[1]}{self._number('wwid', found[0]):016d}", text)
        text = _HEX.sub(lambda found: f"{self._number('hex', found[0]):0{len(found[0])}d}", text)
        text = _MAC.sub(
            lambda found: (
                f"02:00:00:00:{self._number('mac', found[0].lower()) >> 8:02x}:{self._number('mac', found[0].lower()) & 255:02x}"
            ),
            text,
        )
        text = _IPV6.sub(lambda found: self._ipv6(found[0]), text)
        text = _UNIQUE.sub(lambda found: f"{found[1]} 0", text)
        return _IPV4.sub(lambda found: self._ipv4(found, text), text)

    def _word(self, word: str) -> str:
        kind, name = self._words[word]
        return f"{kind}{self._number(kind, name)}"

    def _server(self, name: str) -> str:
        return name if _IPV4.fullmatch(name) or name.startswith(("server", "[")) else f"server{self._number('server', name)}"

    def _ipv4(self, found: re.Match[str], text: str) -> str:
        """An address, unless it is a version number of four parts: those stand after the word."""
        before = text[max(0, found.start() - 24) : found.start()].lower()
        if _KEPT_ADDRESS.match(found[0]) or re.search(r"(version|release|driver|amdgpu|kernel)\W*$", before):
            return found[0]
        if any(int(part) > 255 for part in found[0].split(".")):
            return found[0]
        return f"192.0.2.{self._number('ip', found[0]) % 255}"

    def _ipv6(self, value: str) -> str:
        """An address: 8 groups, or a '::'. A PCI address (0000:42:00.0) and a clock time are neither."""
        groups = value.split(":")
        if "::" not in value and len(groups) != 8:
            return value
        if value in ("::", "::1") or value.startswith("2001:db8:"):
            return value
        return f"2001:db8::{self._number('ip6', value.lower()):x}"
