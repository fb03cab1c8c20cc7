"""`python -m kvtop` is the console script kvtop."""

from kvtools.cli import kvtop

kvtop()
