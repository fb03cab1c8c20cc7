"""`python -m kvtop` is the command kvtop."""

from kvtools.cli import kvtop

kvtop()
