"""What the engine has in its own prefix cache, as far as its KV events tell its server.

Only where the operator has turned them on (--kv-events-config '{"enable_kv_cache_events": true}'): then a thread listens
to the engine's publisher and keeps, for each cache group, which block hashes it holds. Otherwise nobody outside the
scheduler knows, and the answer is "unknown", never a guess; so it is after an event was missed, until the engine says that
all is cleared.

Events carry either whole hashes or their last 64 bits (vLLM's default): both are kept as 64-bit numbers, four million at
most. A wrong answer by collision would be one in a billion billion, and nothing but a word in an explanation.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from kvd.connector.keys import Span
from kvd.connector.view import View

logger = logging.getLogger("vllm.kvd")

MOST = 4 << 20
MEDIUM = "GPU"
"""vLLM's word for the engine's own blocks, on every platform."""


def short(block_hash: "bytes | int") -> int:
    """A hash as events name it, as one number."""
    number = int.from_bytes(block_hash, "big") if isinstance(block_hash, bytes) else block_hash
    return number & ((1 << 64) - 1)


def _binds(endpoint: str) -> bool:
    """Whether the publisher waits for listeners there, as vLLM decides it; else it calls a listener that is not us."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class Watch:
    """Thread-safe. `known`: whether the answers mean anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, set[int]] = {}
        self._complete = False
        self._sequence = -1

    @property
    def known(self) -> bool:
        return self._complete

    def start(self, engine_client: Any) -> None:
        """Listen, where this engine publishes. Never raises: an explanation less is no reason not to serve."""
        try:
            sources = engine_client.get_kv_event_sources()
        except Exception:  # noqa: BLE001 - an engine client of another release
            sources = {}
        # Of several schedulers each has a cache of its own, and nobody knows which one a request will meet.
        endpoints = [config for config in sources.values() if config.publisher == "zmq"]
        if len(endpoints) == 1 and _binds(engine_client.vllm_config.kv_events_config.endpoint):
            self._complete = True
            config = endpoints[0]
            threading.Thread(target=self._listen, args=(config.endpoint, config.topic), name="kvd-events", daemon=True).start()

    def _listen(self, endpoint: str, topic: str) -> None:
        try:
            import msgspec
            import zmq
            from vllm.distributed.kv_events import KVEventBatch

            decoder = msgspec.msgpack.Decoder(KVEventBatch)
            socket = zmq.Context.instance().socket(zmq.SUB)
            socket.connect(endpoint.replace("*", "127.0.0.1"))
            socket.setsockopt_string(zmq.SUBSCRIBE, topic)
            while True:
                _, number, payload = socket.recv_multipart()
                self.heard(int.from_bytes(number, "big"), decoder.decode(payload).events)
        except Exception:  # a thread's edge: without events the answer is "unknown"
            self._complete = False
            logger.warning("kvd: the engine's KV events cannot be followed: kvd why will not know its own cache", exc_info=True)

    def heard(self, sequence: int, events: Sequence[Any]) -> None:
        """One batch of events."""
        with self._lock:
            if sequence != self._sequence + 1:
                self._complete = False
            self._sequence = sequence
            for event in events:
                kind = type(event).__name__
                if kind == "AllBlocksCleared":
                    self._held.clear()
                    self._complete = True
                elif getattr(event, "medium", MEDIUM) in (MEDIUM, None):
                    held = self._held.setdefault(getattr(event, "group_idx", None) or 0, set())
                    if kind == "BlockStored":
                        held.update(map(short, event.block_hashes))
                    elif kind == "BlockRemoved":
                        held.difference_update(map(short, event.block_hashes))
            if sum(map(len, self._held.values())) > MOST:
                self._held.clear()
                self._complete = False

    def has(self, view: View, hashes: Sequence[bytes], span: Span) -> bool | None:
        """Whether the engine holds all blocks that it needs of this chunk; None where nobody knows."""
        with self._lock:
            if not self._complete:
                return None
            for group in view.groups:
                step = group.block_tokens // view.hashes.tokens
                held = self._held.get(group.id, set())
                if not all(short(hashes[(block + 1) * step - 1]) in held for block in group.stored(*span)):
                    return False
        return True
