"""Stand-ins for what must not leave a host: the same thing always gets the same one, so that verdicts stay the same.

What of a file leaves at all is decided in `kvdoctor.private`; here names that must stay recognisable are replaced: host names,
user names, IP and MAC addresses, UUIDs and other long serials. Kept: versions, PCI addresses, device names, sizes, the shape
of paths. Three ways in: `text` for words of tools, `path` for a file or folder (stricter outside the system's own folders: an
address may hide in any part of a name), `stand_in` for a whole word of a kind.
"""

import ipaddress
import re
from collections.abc import Iterable

_MAC = re.compile(r"(?<![0-9A-Fa-f:])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![0-9A-Fa-f:])")
_IPV4 = re.compile(r"(?<![\w.:-])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])")
_IPV4_IN_NAME = re.compile(r"(?<![\d.])(\d{1,3})([._-])(\d{1,3})\2(\d{1,3})\2(\d{1,3})(?!\d|\.\d)")
"""In a name of somebody's own an address may stand beside anything, and be written with dashes: kv_10.0.0.5, ip-10-0-0-5."""
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,8}(?:\.\d{1,3}){0,3}(?:%[\w.-]+)?(?![\w:])")
_UUID = re.compile(r"\b[0-9a-fA-F]{8}([-_])(?:[0-9a-fA-F]{4}\1){3}[0-9a-fA-F]{12}\b")
_LVM = re.compile(r"\bLVM-[0-9A-Za-z]{64}\b")
_HEX = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{32,128}(?![0-9A-Za-z])")
_WWID = re.compile(r"\b(nvme\.|eui\.|naa\.|mpath-|GPU-)[0-9a-f][0-9a-f-]{14,}[0-9a-f]\b")
_IQN = re.compile(r"\b(?:iqn\.\d{4}-\d\d\.|nqn\.\d{4}-\d\d\.|eui\.)[\w.:@-]+", re.IGNORECASE)
_MAIL = re.compile(r"\b[\w.+-]+@[\w.-]+\.\w+\b")
_HOME = re.compile(r"(?<=/)(home|homes|Users|users|user|nethome|u|scratch|work)/([^/\s,:;\"']+)")
_NFS = re.compile(r"( - nfs4? )([^\s:/]+):(/)")
_UNAME = re.compile(r"^(Linux )(\S+)( \d+\.\d+)", re.MULTILINE)
_KEPT_ADDRESS = re.compile(r"0\.0\.0\.0|127\.|255\.|192\.0\.2\.|169\.254\.169\.254")
_GENERIC_USERS = frozenset({"root", "user", "ubuntu", "admin", "nobody", "daemon", "kvd", "vllm", "data", "home", "shared"})
_SYSTEM = re.compile(
    r"/(proc|sys|dev|boot|lib|lib64|usr/(lib|lib64|share|src|bin|sbin)|etc|run/modprobe\.d|var/lib/dkms|opt/rocm[^/]*)(/|$)"
)
"""Folders whose names are the system's own: versions there look like addresses, and words there are nobody's name."""
_NUMBERED = re.compile(r"(?:host|user|server|volume|segment|group|label|distribution)\d+")


class Redactor:
    """One host's stand-ins. `hosts` and `users` are names known to be private, replaced as whole words."""

    def __init__(self, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        self._stand_ins: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._words: dict[str, tuple[str, str]] = {}
        for kind, names in (("host", hosts), ("user", users)):
            for name in sorted(names):
                short = [name, name.partition(".")[0]] if kind == "host" else [name]
                for word in short:
                    # A host called "vm" or a user called "kv" would tear ordinary words of a report apart.
                    if len(word) >= 3 and word not in _GENERIC_USERS and word != "localhost":
                        self._words[word] = (kind, name)
        pattern = "|".join(re.escape(word) for word in sorted(self._words, key=len, reverse=True))
        self._known = re.compile(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])") if pattern else None

    def _number(self, kind: str, value: str) -> int:
        if (kind, value) not in self._stand_ins:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._stand_ins[kind, value] = str(self._counts[kind])
        return int(self._stand_ins[kind, value])

    def stand_in(self, kind: str, value: str) -> str:
        """'server3' for the third server seen; what already is a stand-in stays."""
        return value if not value or _NUMBERED.fullmatch(value) else f"{kind}{self._number(kind, value)}"

    def path(self, path: str) -> str:
        """A path with the same shape and nobody's name or address in it."""
        if _SYSTEM.match(path):
            return self.text(path, words=False)
        path = _IPV4_IN_NAME.sub(self._ipv4_in_name, path)
        return self.text(path)

    def free(self, text: str) -> str:
        """A sentence of a tool: as `text`, and addresses however they are written."""
        return self.text(_IPV4_IN_NAME.sub(self._ipv4_in_name, text))

    def text(self, text: str, *, words: bool = True) -> str:
        """`text` with every private value replaced; known names too, unless `words` is off."""
        if words:
            text = _HOME.sub(lambda found: f"{found[1]}/{self.stand_in('user', found[2])}", text)
            if self._known:
                text = self._known.sub(lambda found: self._word(found[0]), text)
        text = _UNAME.sub(lambda found: f"{found[1]}host1{found[3]}", text)
        text = _NFS.sub(lambda found: f"{found[1]}{self._server(found[2])}:{found[3]}", text)
        text = _MAIL.sub(lambda found: f"user{self._number('user', found[0])}@host.example", text)
        text = _IQN.sub(lambda found: f"iqn.2000-01.example:{self._number('iqn', found[0])}", text)
        text = _UUID.sub(lambda found: f"00000000-0000-4000-8000-{self._number('uuid', found[0].lower()):012d}", text)
        text = _LVM.sub(lambda found: f"LVM-{self._number('lvm', found[0]):064d}", text)
        text = _WWID.sub(lambda found: f"{found[1]}{self._number('wwid', found[0]):016d}", text)
        text = _HEX.sub(lambda found: f"{self._number('hex', found[0]):0{len(found[0])}d}", text)
        text = _MAC.sub(lambda found: self._mac(found[0].lower()), text)
        text = _IPV6.sub(lambda found: self._ipv6(found[0]), text)
        return _IPV4.sub(lambda found: self._ipv4(found, text), text)

    def _word(self, word: str) -> str:
        kind, name = self._words[word]
        return f"{kind}{self._number(kind, name)}"

    def _server(self, name: str) -> str:
        return name if _IPV4.fullmatch(name) or name.startswith("[") else self.stand_in("server", name)

    def _mac(self, value: str) -> str:
        number = self._number("mac", value)
        return f"02:00:00:00:{number >> 8 & 255:02x}:{number & 255:02x}"

    def _ipv4(self, found: re.Match[str], text: str) -> str:
        """An address, unless it is a version number of four parts: those stand after the word."""
        before = text[max(0, found.start() - 24) : found.start()].lower()
        if _KEPT_ADDRESS.match(found[0]) or re.search(r"(version|release|driver|amdgpu|kernel)\W*$", before):
            return found[0]
        if any(int(part) > 255 for part in found[0].split(".")):
            return found[0]
        return f"192.0.2.{self._number('ip', found[0]) % 255}"

    def _ipv4_in_name(self, found: re.Match[str]) -> str:
        dotted = ".".join((found[1], found[3], found[4], found[5]))
        if _KEPT_ADDRESS.match(dotted) or any(int(part) > 255 for part in dotted.split(".")):
            return found[0]
        return f"192.0.2.{self._number('ip', dotted) % 255}".replace(".", found[2])

    def _ipv6(self, value: str) -> str:
        """An address that parses as one. A PCI address (0000:42:00.0) and a clock time do not."""
        bare = value.partition("%")[0]
        try:
            known = ipaddress.IPv6Address(bare)
        except ValueError:
            return value
        if known.is_unspecified or known.is_loopback or bare.lower().startswith("2001:db8:"):
            return value
        return f"2001:db8::{self._number('ip6', known.exploded):x}"
