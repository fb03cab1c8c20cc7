"""The address of an HTTP server as somebody typed it. Who asks says what the address is of, and how it is written."""

from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

PORTS = "the port is a number from 1 to 65535"


def http_parts(url: str, schemes: Collection[str] = ("http", "https")) -> tuple[SplitResult, str, int | None]:
    """Its parts, the host, and the port where there is one.

    Raises ValueError for what is none: with PORTS as its text where just the port is wrong, else without one.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that hold no IPv6 address
        raise ValueError from None
    # A request line takes ASCII without blanks; what else there is in a path is written %C3%BC.
    if parts.scheme not in schemes or not parts.hostname or not all("!" <= char <= "~" for char in url):
        raise ValueError
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(PORTS)
    return parts, parts.hostname, port
