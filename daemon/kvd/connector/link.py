"""One connection to the daemon that never makes the engine wait twice.

A daemon may be absent, restarted, or wedged (stopped, swapped out) at any time. The first call that meets this waits for
the client's timeout at most; then the link is *down*: every call is refused at once, without a system call, until a thread
in the background has reached the daemon again. So a wedged daemon costs an engine one timeout for each link, and no more.

Thread-safe. The thread exists only while the link is down. State changes are said in the log, once each.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

from kvd.errors import DeadlinePassed, KvdError, Unavailable

logger = logging.getLogger("vllm.kvd")
"""Below "vllm", whose handler is the one that an engine's operator sees."""

Result = TypeVar("Result")

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0


class Down(Exception):
    """The daemon is not reachable now; the link looks for it in the background."""


class Link:
    """A client, and whether it may be used. `connect` makes a client that is connected, or raises KvdError."""

    def __init__(self, name: str, connect: Callable[[], Any], *, on_loss: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.problem: KvdError | None = None
        """Why it is down; None while it is up, or has not been looked for yet."""
        self.connections = 0
        """How often it has come up."""
        self._connect = connect
        self._on_loss = on_loss
        self._client: Any = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._probe: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def up(self) -> bool:
        """Whether a call would be tried."""
        return self._client is not None

    def look(self) -> bool:
        """Whether the daemon is there, a hang-up that no call has met yet included: without that an idle engine's link stays
        up for ever. Sends nothing; a daemon that is stopped, and not gone, is told by a call only.
        """
        client = self._client
        if client is not None and not client.alive():
            self._lose(client, Unavailable("it hung up"))
        return self.up

    def start(self) -> None:
        """Look for the daemon in the background from now on."""
        with self._lock:
            self._search_locked()

    def call(self, use: Callable[[Any], Result]) -> Result:
        """`use(client)`. Raises Down (at once while down, or after the timeout that takes it down), and other KvdErrors."""
        client = self._client
        if client is None:
            raise Down(f"{self.name}: no daemon")
        try:
            return use(client)
        except (Unavailable, DeadlinePassed) as error:
            self._lose(client, error)
            raise Down(f"{self.name}: {error}") from error

    def lost(self, client: Any, error: KvdError) -> None:
        """Told by whoever used the client outside `call` (a lease) and met an error."""
        if isinstance(error, (Unavailable, DeadlinePassed)):
            self._lose(client, error)

    def close(self) -> None:
        """Stop looking and close the client."""
        self._closed.set()
        with self._lock:
            client, self._client, probe = self._client, None, self._probe
        if probe is not None and probe is not threading.current_thread():
            probe.join(timeout=2.0)
        _close(client)

    def _lose(self, client: Any, error: KvdError) -> None:
        with self._lock:
            if self._client is not client:
                return
            self._client, self.problem = None, error
            self._on_loss()
            logger.warning("kvd: lost the daemon (%s: %s); serving without it until it is back", self.name, error)
            self._search_locked()
        _close(client)

    def _search_locked(self) -> None:
        if self._client is None and self._probe is None and not self._closed.is_set():
            self._probe = threading.Thread(target=self._search, name=f"kvd-{self.name}", daemon=True)
            self._probe.start()

    def _search(self) -> None:
        wait = FIRST_WAIT_S
        said = False
        while not self._closed.is_set():
            try:
                client = self._connect()
            except KvdError as error:
                self.problem = error
                if not said:
                    logger.warning("kvd: no daemon yet (%s: %s)", self.name, error)
                    said = True
            else:
                with self._lock:
                    self._probe = None
                    if not self._closed.is_set():
                        self._client, self.problem = client, None
                        self.connections += 1
                        client = None
                _close(client)
                logger.info("kvd: connected (%s)", self.name)
                return
            self._closed.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)
        with self._lock:
            self._probe = None


def _close(client: Any) -> None:
    if client is not None:
        try:
            client.close()
        except (KvdError, OSError):
            logger.debug("kvd: closing a client failed", exc_info=True)


def wait_up(link: Link, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> bool:
    """Whether the link came up within `timeout_s`: for start-up, so that the first request already finds the daemon."""
    deadline = clock() + timeout_s
    while not link.up and clock() < deadline:
        time.sleep(0.005)
    return link.up
