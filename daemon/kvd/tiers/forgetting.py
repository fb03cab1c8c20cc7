"""Deletes on their way through the tiers: waiting for them, and owning up to those that are not carried out.

A delete that a tier has not come to is known to the daemon alone: look-ups miss the value at once, and a daemon that ends
before the tier has forgotten it too brings it back with its next start. So whoever asked is told how many those are, and why.
"""

import asyncio
from typing import NamedTuple

from kvd.tiers.tier import Receipt, Tier

BROKEN_POLL_S = 0.25
"""How often to look whether a tier that is waited for has broken meanwhile."""

Erased = tuple[Tier, Receipt, int]
"""A delete that a tier was told of, its receipt, and of how many values it is."""


class Forgotten(NamedTuple):
    """What a delete or clear came to: values that were held; how many some tier still has to get rid of, and what ails it."""

    values: int = 0
    left: int = 0
    why: str = ""


async def carried_out(values: int, erased: list[Erased], timeout_s: float) -> Forgotten:
    """Wait for the tiers that work to have done these deletes; what that came to."""
    end = asyncio.get_running_loop().time() + timeout_s
    while waiting := [receipt.done for tier, receipt, _ in erased if not receipt.done.done() and not tier.broken]:
        left_s = end - asyncio.get_running_loop().time()
        if left_s <= 0:
            break
        await asyncio.wait(waiting, timeout=min(left_s, BROKEN_POLL_S))
    late = [(tier, number) for tier, receipt, number in erased if not receipt.done.done()]
    return Forgotten(values, sum(number for _, number in late), "; ".join(dict.fromkeys(trouble(tier) for tier, _ in late)))


def trouble(tier: Tier) -> str:
    """Why something waits for this tier."""
    if not tier.broken:
        return f"tier {tier.name} has not come to it yet"
    return f"tier {tier.name} does not work ({tier.breaker.reason or 'a call into it does not return'})"
