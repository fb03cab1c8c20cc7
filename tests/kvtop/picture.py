"""The README's picture of kvtop, drawn by kvtop itself from a host that does not exist: `python -m tests.kvtop.picture`.

The same scene gives the same bytes, so a test notices when the picture is no longer what kvtop shows.
"""

import os
import sys
import time
from pathlib import Path

from tests.kvtop import scenes

PICTURE = Path(__file__).resolve().parents[2] / "man" / "kvtop.svg"
SIZE = (118, 34)
TICKS = 240


def draw() -> str:
    """The picture, as it is now."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    return scenes.dashboard(scenes.model(TICKS, scenes.showcase)).picture(SIZE)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    sys.stdout.write(f"{PICTURE}: {PICTURE.stat().st_size} bytes\n")
