"""`python -m kvtools` is the console script kvtools."""

from kvtools.cli import kvtools

kvtools()
