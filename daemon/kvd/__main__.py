"""`python -m kvd` is the same program as `kvd`."""

from kvtools.cli import kvd

kvd()
