"""Who may ask for what: API keys, and no web page on management paths.

Keys lie in a file, one a line, only as hashes: `NAME ROLE sha256:HEX`, where ROLE is `client` (models) or `admin` (models
and management). Keys are random and long, so one fast hash is enough: there is nothing to guess. The file must not be
readable by others. Without a file the gate is open, and then `kvgate serve` binds to loopback only.

A browser can be made to send requests to loopback by any page it shows. On management paths therefore: a request with an
`Origin` (or `Sec-Fetch-Site: cross-site`) is refused unless that origin is allowed, and `Host` must be an IP address,
localhost or an allowed name, since a name that was re-bound to 127.0.0.1 (DNS rebinding) always arrives as a name.

Paths for probes (/healthz, /readyz, /health) are open: they say nothing about models.
"""

import hashlib
import ipaddress
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvgate.errors import ConfigError, Forbidden, Unauthorized

PROBES = frozenset({"/health", "/healthz", "/readyz"})
_LINE = re.compile(r"(\S+)\s+(client|admin)\s+sha256:([0-9a-f]{64})", re.ASCII)
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Key:
    """Whose key it is, and what it opens."""

    name: str
    role: str


class KeyRing:
    """Keys by the hash of their text."""

    def __init__(self, keys: dict[str, Key]) -> None:
        self._keys = keys

    @classmethod
    def load(cls, path: Path) -> "KeyRing":
        """Read a key file. Raises ConfigError, naming file and line."""
        try:
            mode = path.stat().st_mode
            if stat.S_ISFIFO(mode):
                # It gives its keys once, and they are read again at every reload.
                raise ConfigError(f"API keys: {path} is a pipe, not a file", hint="keep the keys in a file")
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raise ConfigError(f"API keys: {path}: {reason}", hint="router.api_keys names the file, kvgate(1) shows one") from None
        if mode & 0o077:
            raise ConfigError(f"API keys: {path} is open to others (mode {stat.S_IMODE(mode):04o})", hint=f"chmod 600 {path}")
        keys = {}
        for number, line in enumerate(lines, 1):
            line = line.partition("#")[0].strip()
            if not line:
                continue
            found = _LINE.fullmatch(line)
            if not found:
                raise ConfigError(
                    f"API keys: {path}:{number}: not a key line", hint="write NAME client|admin sha256:HEX, lower case"
                )
            if found[3] in keys:
                raise ConfigError(f"API keys: {path}:{number}: this key stands there twice", hint="leave one of the lines")
            keys[found[3]] = Key(found[1], found[2])
        if not keys:
            raise ConfigError(f"API keys: {path} holds no key", hint="write NAME client|admin sha256:HEX")
        return cls(keys)

    def check(self, headers: Headers, *, admin: bool) -> Key:
        """The key that `headers` carry. Raises Unauthorized, or Forbidden when it is not an admin's and must be."""
        given = ""
        for name, value in headers:
            if name == b"authorization":
                scheme, _, given = value.decode("latin-1").partition(" ")
                given = given.strip() if scheme.lower() == "bearer" else ""
        if not given:
            raise Unauthorized("no API key given", hint="send `Authorization: Bearer KEY`")
        key = self._keys.get(hashlib.sha256(given.encode("latin-1")).hexdigest())
        if key is None:
            raise Unauthorized("this API key is not known")
        if admin and key.role != "admin":
            raise Forbidden(f"the key {key.name!r} may not use management paths", hint="use a key of role admin")
        return key


class Guard:
    """The checks of one configuration."""

    def __init__(self, keys: KeyRing | None, allowed_hosts: Iterable[str] = (), allowed_origins: Iterable[str] = ()) -> None:
        self.keys = keys
        self._hosts = {host.lower() for host in allowed_hosts} | {"localhost"}
        self._origins = set(allowed_origins)

    def check(self, path: str, headers: Headers, *, inference: bool) -> None:
        """Let the request pass, or raise Unauthorized or Forbidden."""
        if path in PROBES:
            return
        if not inference:
            self._check_browser(headers)
        if self.keys is not None:
            self.keys.check(headers, admin=not inference and path != "/metrics")

    def _check_browser(self, headers: Headers) -> None:
        given = {name: value.decode("latin-1") for name, value in headers if name in {b"host", b"origin", b"sec-fetch-site"}}
        origin = given.get(b"origin")
        if origin is not None and origin not in self._origins:
            raise Forbidden(
                f"the origin {origin[:100]!r} is not allowed on management paths", hint="add it to router.allowed_origins"
            )
        if origin is None and given.get(b"sec-fetch-site") == "cross-site":
            raise Forbidden("a page of another site may not use management paths")
        host = _host_name(given.get(b"host", ""))
        if host not in self._hosts and not _is_address(host):
            raise Forbidden(
                f"the host name {host[:100]!r} is not allowed on management paths", hint="add it to router.allowed_hosts"
            )


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether listening on `host` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
