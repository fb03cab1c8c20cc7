"""Which weights an adapter (LoRA) has: part of the namespace of what is computed with it.

vLLM mixes an adapter's name and path into its block hashes, but not what lies at that path. Files replaced in place, and an
engine started anew, would find what the old ones computed. So a request with an adapter is salted with a digest of its files
as well, taken when the adapter is first seen in this process; each request costs one stat a file.

Files that changed while the engine runs leave open which of the two it computes with, and whoever cannot read them knows
nothing of them: of such an adapter nothing is stored or loaded until the engine restarts. That holds for changes before its first
request, too: the engine may have loaded it long before.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvd.connector.fingerprint import files_digest, model_folder, weight_files

logger = logging.getLogger("vllm.kvd")

IN_DOUBT = "the files of the request's adapter changed while the engine ran, or cannot be read here"

Stamps = tuple[tuple[int, int, int, int], ...]
"""Of each file: size, inode, times of its last writing and of its last change in any way, in nanoseconds."""


class Adapters:
    """What this process has seen of adapters since it began (`since_ns`, of time.time_ns). Thread-safe."""

    def __init__(self, since_ns: int | None = None) -> None:
        self._since_ns = time.time_ns() if since_ns is None else since_ns
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], _Adapter] = {}

    def mark(self, request: Any) -> str | None:
        """Of a LoRARequest: the digest of its files. '' without one; None where it is in doubt what the engine computes with."""
        if request is None:
            return ""
        key = (str(request.lora_name), str(request.lora_path))
        with self._lock:
            adapter = self._seen.get(key)
            if adapter is None:
                adapter = self._seen[key] = _Adapter(*key, self._since_ns)
            return adapter.mark()


class _Adapter:
    """One name and path."""

    def __init__(self, name: str, path: str, since_ns: int) -> None:
        self._name, self._path = name, path
        self._files: Sequence[Path] = ()
        self._stamps: Stamps = ()
        self._mark: str | None = None
        if not self._read():
            self._doubt("its files cannot be read here")
        elif self._newest() > since_ns:
            self._doubt("its files are newer than this engine")

    def _read(self) -> bool:
        try:
            self._files = _files(self._path)
            self._stamps = _stamps(self._files)
            self._mark = files_digest(self._files) if self._files else None
        except OSError:
            self._mark = None
        return self._mark is not None

    def _newest(self) -> int:
        return max((changed for *_, changed in self._stamps), default=0)

    def mark(self) -> str | None:
        if self._mark is not None:
            try:
                changed = _stamps(self._files) != self._stamps
            except OSError:
                changed = True
            if changed:
                self._doubt("its files changed since this engine has it")
        return self._mark

    def _doubt(self, why: str) -> None:
        self._mark = None
        logger.warning(
            "kvd: nothing is stored or loaded for adapter %r at %s until the engine restarts: %s", self._name, self._path, why
        )


def whose(tenant: str, mark: str) -> str:
    """A request's tenant and its adapter as one word for salts. Forging one gains nothing: block hashes differ still."""
    return f"{tenant}\0adapter {mark}" if mark else tenant


def _files(path: str) -> list[Path]:
    """An adapter's weights and its settings, as vLLM resolves the path. Raises OSError."""
    place = Path(path).expanduser() if path.startswith("~") else Path(path)
    if place.is_file():
        return [place]
    folder = model_folder(str(place), None)
    weights = weight_files(folder) if folder is not None else []
    return sorted([*weights, *folder.glob("adapter_config.json")]) if folder is not None and weights else []


def _stamps(files: Sequence[Path]) -> Stamps:
    return tuple((stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns) for stat in map(os.stat, files))
