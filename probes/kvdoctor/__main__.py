"""`python -m kvdoctor` is the console script kvdoctor."""

from kvtools.cli import kvdoctor

kvdoctor()
