"""Write a host as a capture: a directory with root/, cmd/ and case.json that `kvdoctor --from` judges anywhere alike.

The collectors run as always, over a source whose recorder takes down everything they read; nothing else is copied, so a
capture is small (kallsyms and the kernel log shrink to the lines that matter) and holds no file that no check looks at.
Environment and arguments of engines are kept only where they decide about caching. Private values are replaced on writing
(`redact`). `case.json` says `complete: true`: what such a capture lacks, the host lacked.
"""

import datetime as dt
import getpass
import json
import os
import re
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvdoctor.facts import Facts, ToolRun
from kvdoctor.redact import Redactor
from kvtools.errors import KvError, UsageError, hint_for

KEPT_ARGUMENT = re.compile(
    r"^(--(no-)?enable-prefix-caching|--prefix-caching-hash-algo|--kv-transfer-config|--tensor-parallel-size|--long-path"
    r"|--long-bytes|--max-bytes|--block-size)(=|$)"
)
COMMAND_WORD = re.compile(r"(^|/)(vllm|kvd|python3?(\.\d+)?|sglang|lmcache_server)$|^(serve|-m|kvd|VLLM::EngineCore.*)$")


class Recording:
    """What a collection read, in memory until it is written (`kvdoctor.collect.source.Recorder`)."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.folders: set[str] = set()
        self.refused: dict[str, str] = {}
        self.commands: dict[str, str] = {}

    def file(self, path: str, data: bytes) -> None:
        if data or path not in self.files:
            self.files[path] = data

    def link(self, path: str, target: str) -> None:
        self.links[path] = target

    def folder(self, path: str) -> None:
        self.folders.add(path)

    def denied(self, path: str, reason: str) -> None:
        self.refused[path] = reason

    def command_file(self, name: str, text: str) -> None:
        self.commands[name] = text

    def tool(self, run: ToolRun) -> None:
        if run.state in ("hung", "abandoned"):
            self.commands[f"{run.key}.hang"] = f"{run.state} after {run.seconds:.1f} s, state {run.proc_state}, in {run.wchan}\n"
            return
        self.commands[f"{run.key}.out"] = run.out
        if run.err:
            self.commands[f"{run.key}.err"] = run.err
        if run.rc or run.state == "missing":
            self.commands[f"{run.key}.rc"] = f"{run.rc or 127}\n"

    def value(self, key: str, value: Any) -> None:
        self.commands[f"{key}.json"] = json.dumps(_reduced(value) if key == "processes" else value, indent=1) + "\n"


def _reduced(value: Any) -> Any:
    """Processes with only those arguments that a rule looks at: model names and keys stay at home."""
    if not isinstance(value, dict):
        return value
    return {kind: [{**item, "args": kept_arguments(item.get("args") or [])} for item in items] for kind, items in value.items()}


def kept_arguments(args: Sequence[str]) -> list[str]:
    """The words of a command line that say what program it is and how it caches."""
    kept = []
    for i, word in enumerate(args):
        if KEPT_ARGUMENT.match(word):
            name, equals, _ = word.partition("=")
            private = name == "--kv-transfer-config"
            kept.append(f"{name}={{}}" if private and equals else word)
            if not equals and not name.startswith(("--no-", "--enable")) and i + 1 < len(args) and not args[i + 1].startswith("--"):
                kept.append("{}" if private else args[i + 1])
        elif COMMAND_WORD.search(word) and i < 4:
            kept.append(word)
    return kept


def write_capture(recording: Recording, facts: Facts, folder: Path, *, redact: bool) -> None:
    """Write `recording` into `folder`, which must not exist or be empty; all of it or nothing. Raises UsageError, KvError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there and not empty", hint="name a new directory: a capture is never mixed with another")
    redactor = Redactor(*_private_names(facts)) if redact else None
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            place = Path(scratch) / "capture"
            place.mkdir(mode=0o700)
            _write(recording, facts, place, redactor)
            if folder.exists():
                folder.rmdir()
            place.rename(folder)
    except OSError as error:
        hint = hint_for(error, "name a directory that you may write")
        raise KvError(f"cannot write {folder}: {error.strerror}", hint=hint) from None


def _private_names(facts: Facts) -> tuple[set[str], set[str]]:
    hosts = {name for name in (facts.environment.hostname, socket.gethostname()) if name}
    users = {name for name in (os.environ.get("SUDO_USER", ""), os.environ.get("USER", "")) if name}
    try:
        users.add(getpass.getuser())
    except (KeyError, OSError):
        pass  # a uid without a name, as in many containers
    return hosts, users


def _write(recording: Recording, facts: Facts, place: Path, redactor: Redactor | None) -> None:
    def shown(text: str) -> str:
        return redactor.text(text) if redactor else text

    root, cmd = place / "root", place / "cmd"
    root.mkdir()
    cmd.mkdir()
    for path in sorted(recording.folders):
        if path != "/" and path not in recording.links:
            _below(root, shown(path)).mkdir(parents=True, exist_ok=True)
    for path, target in sorted(recording.links.items()):
        link = _below(root, shown(path))
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink() and not link.exists():
            link.symlink_to(shown(target))
    for path, data in sorted(recording.files.items()):
        target_file = _below(root, shown(path))
        if path in recording.folders or target_file.is_dir():
            continue
        target_file.parent.mkdir(parents=True, exist_ok=True)
        # Too short or too common a host name is not replaced as a word elsewhere, but it goes from its own file.
        private = redactor is not None and path == "/proc/sys/kernel/hostname"
        target_file.write_bytes(b"host1\n" if private else _redacted(data, redactor))
    for name, text in sorted(recording.commands.items()):
        (cmd / name).write_text(shown(text))
    paths = [shown(path.path) for path in facts.paths]
    case = {
        "case": facts.case or ("host1" if redactor else facts.environment.hostname),
        "context": "container-root" if facts.environment.in_container else "host-root",
        "kv_path": paths[0] if paths else "",
        "kv_paths": paths,
        "env": {name: shown(value) for name, value in facts.env.items()},
        "complete": not facts.partial,
        "denied": {shown(path): reason for path, reason in sorted(recording.refused.items())},
        "captured": {"at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"), "redacted": redactor is not None},
    }
    (place / "case.json").write_text(json.dumps(case, indent=1) + "\n")


def _below(root: Path, path: str) -> Path:
    """A captured path below root/. What was read came from `Source.real`, which holds no '..'."""
    return root / path.lstrip("/")


def _redacted(data: bytes, redactor: Redactor | None) -> bytes:
    """Text with stand-ins; binary files (configuration space, EFI variables) hold no names and stay as they are."""
    if redactor is None:
        return data
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data
    return redactor.text(text).encode()
