"""Traces of what engines ask a KV cache for: requests, each the keys of its prompt's chunks from the beginning.

Three kinds of users, each seeded and endless in principle:

chats   conversations of several turns behind one of a few system prompts; each turn repeats all that was said and adds to it.
        Some are popular applications, most conversations end after a few turns, and people take their time between turns.
agents  loops of many short steps: a long tool prompt that all share, and a context that grows at its end; now and then a
        branch goes back to an earlier step.
scans   long documents read once: no chunk of one ever comes again, beyond a shared instruction in front.

`mixed` interleaves them by shares. A chunk is a number; equal numbers are equal chunks.
"""

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

Request = list[int]


@dataclass(frozen=True)
class Shape:
    """How users behave, in chunks (of 256 tokens, say) and requests."""

    apps: int = 12
    system_chunks: tuple[int, int] = (4, 24)
    turns: float = 4.0
    turn_chunks: tuple[int, int] = (1, 6)
    pause: float = 150.0
    """Requests of others between two turns of one conversation, on average."""
    tools: int = 4
    tool_chunks: tuple[int, int] = (20, 60)
    steps: float = 25.0
    scan_chunks: tuple[int, int] = (60, 250)


class Numbers:
    """Fresh chunk numbers."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def take(self, count: int) -> Request:
        return list(itertools.islice(self._next, count))


def chats(rng: random.Random, numbers: Numbers, shape: Shape) -> Iterator[Request]:
    """Turns in the order of time: conversations begin at a steady rate and come back after their pauses."""
    systems = [numbers.take(rng.randint(*shape.system_chunks)) for _ in range(shape.apps)]
    weights = [1 / (rank + 1) for rank in range(shape.apps)]
    waiting: list[tuple[float, int, Request]] = []
    now, serial = 0.0, 0
    while True:
        now += 1.0
        serial += 1
        if waiting and waiting[0][0] <= now:
            history = heapq.heappop(waiting)[2]
        else:
            history = list(rng.choices(systems, weights)[0])
        history = history + numbers.take(rng.randint(*shape.turn_chunks))
        yield history
        if rng.random() < 1 - 1 / shape.turns:
            answered = history + numbers.take(rng.randint(*shape.turn_chunks))
            heapq.heappush(waiting, (now + rng.expovariate(1 / shape.pause), serial, answered))


def agents(rng: random.Random, numbers: Numbers, shape: Shape) -> Iterator[Request]:
    """A few loops side by side, a step of one at a time."""
    tools = [numbers.take(rng.randint(*shape.tool_chunks)) for _ in range(shape.tools)]
    loops: list[list[Request]] = []
    while True:
        if len(loops) < 6 or rng.random() < 1 / shape.steps:
            loops.append([list(rng.choice(tools))])
        if len(loops) > 8:
            loops.pop(rng.randrange(len(loops)))
        steps = rng.choice(loops)
        base = steps[-1] if rng.random() > 0.08 else rng.choice(steps)
        steps.append(base + numbers.take(rng.randint(1, 3)))
        yield steps[-1]


def scans(rng: random.Random, numbers: Numbers, shape: Shape) -> Iterator[Request]:
    """Documents, each once, behind one instruction."""
    instruction = numbers.take(3)
    while True:
        yield instruction + numbers.take(rng.randint(*shape.scan_chunks))


def mixed(shares: dict[str, float], requests: int, *, seed: int = 1, shape: Shape | None = None) -> list[Request]:
    """So many requests, of each kind by its share."""
    rng, numbers, shape = random.Random(seed), Numbers(), shape or Shape()
    makers = {"chats": chats, "agents": agents, "scans": scans}
    sources = {kind: makers[kind](random.Random(rng.random()), numbers, shape) for kind in shares}
    kinds = rng.choices(list(shares), list(shares.values()), k=requests)
    return [next(sources[kind]) for kind in kinds]


TRACES: dict[str, dict[str, float]] = {
    "chats": {"chats": 1.0},
    "agents": {"agents": 1.0},
    "chats, 5 % scans": {"chats": 0.95, "scans": 0.05},
    "chats and agents": {"chats": 0.6, "agents": 0.4},
    "all, 5 % scans": {"chats": 0.65, "agents": 0.3, "scans": 0.05},
    "all, 15 % scans": {"chats": 0.6, "agents": 0.25, "scans": 0.15},
}
