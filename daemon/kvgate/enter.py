"""What a tmux session starts: the engine, with the environment that the gate meant for it.

    python -I -S enter.py FILE PROGRAM WORD ...

A tmux server that runs already has an environment of its own, which knows nothing of the gate's; and what tmux is given as words
(`-e NAME=VALUE`) stands in the list of processes, where everybody reads it. So the environment comes in FILE (JSON, mode 0600),
which is removed as soon as it is read. This process then becomes PROGRAM: its pid is the engine's.

Standard library only, and nothing of ours.
"""

import json
import os
import sys
from pathlib import Path

KEPT = ("TERM", "TMUX", "TMUX_PANE")
"""What tmux says of the terminal."""


def main() -> None:
    """See the module."""
    file, words = Path(sys.argv[1]), sys.argv[2:]
    environment = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    environment |= {name: os.environ[name] for name in KEPT if name in os.environ}
    os.execve(words[0], words, environment)  # noqa: S606 - no shell is the point


if __name__ == "__main__":
    main()
