"""`python -m kvgate` is the console script kvgate."""

from kvtools.cli import kvgate

if __name__ == "__main__":
    kvgate()
