"""The interactive shell: kvctl's commands without `kvctl` before them, with history and completion.

It runs kvctl's commands and nothing else: a line that is none of them is an error, never handed to a system shell. Each line
goes through the same parser, error printer and exit statuses as on the command line; the shell itself ends with 0, the
status of the last line is shown when it is not 0. `watch` and `apply --watch` end with Ctrl-C and come back to the prompt.

History lies in `$XDG_STATE_HOME/kvtools/kvctl_history` (0600); without a place to write it, there is none. Completion asks
Typer, as the system shell's completion does, so options and names complete alike.
"""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from kvtools.exits import Exit
from kvtools.output import emit, note

TARGET = "kvtools.ctl.app:app"
PROMPT = "kvctl> "
_HISTORY_LINES = 1000


def run_shell(root: Path, *, read: Callable[[str], str] = input) -> int:
    """Read lines and run them until exit, quit or end of file. Returns an exit status."""
    if os.environ.get(_INSIDE):
        note("kvctl: already in the shell")
        return Exit.USAGE
    os.environ[_INSIDE] = "1"
    os.environ["KVTOOLS_SHM"] = str(root)  # so that every line looks where the shell was told to look
    history = _Readline()
    try:
        note("kvctl shell: help lists the commands, exit or Ctrl-D leaves")
        while True:
            try:
                line = read(PROMPT)
            except EOFError:
                emit()
                return Exit.OK
            except KeyboardInterrupt:
                emit()
                continue
            if not _run_line(line):
                return Exit.OK
    finally:
        history.save()
        del os.environ[_INSIDE]


_INSIDE = "KVTOOLS_IN_SHELL"


def _run_line(line: str) -> bool:
    """Run one line; False when it ends the shell."""
    from kvtools import cli

    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        note(f"kvctl: error: {str(error).lower()}\nhint: close the quotation")
        return True
    if not words:
        return True
    if words[0] in {"exit", "quit"}:
        return False
    if words[0] in {"help", "?"}:
        words = [*words[1:], "--help"]
    if words[0].startswith("!"):
        note("kvctl: error: this shell runs no system commands\nhint: leave it with exit, or use another terminal")
        return True
    if words[0] == "kvctl":
        words = words[1:] or ["--help"]
    status = cli.run_words("kvctl", TARGET, words)
    if status == Exit.PIPE:
        return False
    sys.stdout.flush()
    if status not in (Exit.OK, Exit.INTERRUPTED):
        note(f"(status {status})")
    elif status == Exit.INTERRUPTED:
        emit()
    return True


class _Readline:
    """History and completion by readline where Python has it; a plain prompt where not."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._matches: list[str] = []
        try:
            import readline
        except ImportError:
            note("kvctl: no readline in this Python: no history and no completion")
            return
        self._file = _history_file()
        if self._file is not None and self._file.exists():
            try:
                readline.read_history_file(self._file)
            except OSError:
                pass  # not ours, or of another readline: start without
        readline.set_history_length(_HISTORY_LINES)
        readline.set_completer_delims(" \t\n")  # names hold - and .
        readline.set_completer(self.complete)
        editline = "libedit" in (getattr(readline, "backend", "") or readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if editline else "tab: complete")

    def save(self) -> None:
        """Write the history, readable by its user alone."""
        if self._file is None:
            return
        import readline

        try:
            before = os.umask(0o077)
            try:
                readline.write_history_file(self._file)
            finally:
                os.umask(before)
            self._file.chmod(0o600)
        except OSError as error:
            note(f"kvctl: history not saved: {error.strerror}")

    def complete(self, text: str, state: int) -> str | None:
        """readline's protocol: candidate number `state` for the word `text`."""
        if state == 0:
            import readline

            before = readline.get_line_buffer()[: readline.get_begidx()]
            self._matches = candidates(before, text)
        return self._matches[state] if state < len(self._matches) else None


def candidates(before: str, text: str) -> list[str]:
    """What may stand at the end of the line `before` + `text`: commands, options and names, each with a blank after it."""
    from kvtools import cli
    from kvtools.completion import items_for

    try:
        words = shlex.split(before)
    except ValueError:
        return []
    items = items_for(cli.load(TARGET), "kvctl", words, text)
    if any(item.type in {"file", "dir"} for item in items):
        return _files(text)
    found = [item.value for item in items]
    if not words:
        found += [word for word in ("exit", "help", "quit") if word.startswith(text)]
    return [f"{shlex.quote(word)} " for word in found]


def _files(text: str) -> list[str]:
    """Files that begin with `text`; a folder keeps its place open with a slash."""
    folder, _, start = text.rpartition("/")
    try:
        there = sorted(Path(folder + "/" if "/" in text else ".").expanduser().iterdir())
    except (OSError, RuntimeError):
        return []
    lead = f"{folder}/" if "/" in text else ""
    return [shlex.quote(f"{lead}{path.name}") + ("/" if path.is_dir() else " ") for path in there if path.name.startswith(start)]


def _history_file() -> Path | None:
    state = os.environ.get("XDG_STATE_HOME")
    try:
        folder = (Path(state) if state else Path.home() / ".local" / "state") / "kvtools"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return folder / "kvctl_history"
