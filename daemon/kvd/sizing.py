"""`kvd size`: what share of the tokens would be found with more RAM, or less.

Pure functions over the object of `kvd stats --json`, which holds the curve that the daemon estimates from a sample of its keys
(`store/reuse`). Inside a namespace bytes are proportional to tokens, so shares of bytes are shares of tokens.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kvtools.output import table
from kvtools.units import format_size

FEW, FEW_KEYS = 1000, 30
"""Uses of watched keys, and such keys, below which the figures are no more than a hint."""


def curves(body: Mapping[str, Any]) -> dict[str, dict[float, float]]:
    """Share found by multiple of the arena, for each namespace that is published and for `all`; unknown ones left out."""
    found: dict[str, dict[float, float]] = {}
    for label, share in body.get("size_hit_share", {}).items():
        namespace, _, scale = label.rpartition("/")
        if share >= 0:
            found.setdefault(namespace, {})[float(scale)] = share
    return {name: dict(sorted(found[name].items())) for name in sorted(found, key=lambda name: (name != "all", name))}


def sentence(curve: Mapping[float, float]) -> str:
    """The one line that answers the question."""
    half, now, twice = (f"{100 * curve[scale]:.0f} %" for scale in (0.5, 1.0, 2.0))
    return f"with twice the RAM {now} -> {twice} of tokens hit, with half {half}"


def as_json(body: Mapping[str, Any]) -> dict[str, Any]:
    """The object of `kvd size --json`."""
    arena = body["arena_bytes_limit"]
    return {
        "arena_bytes": arena,
        "watched_keys": body.get("size_sampled_keys", 0),
        "watched_per_million": body.get("size_sample_per_million", 0),
        "uses": body.get("size_uses_total", 0),
        "curves": [
            {
                "namespace": name,
                "points": [{"arena_bytes": int(arena * scale), "hit_share": round(share, 4)} for scale, share in curve.items()],
            }
            for name, curve in curves(body).items()
        ],
    }


def page(body: Mapping[str, Any]) -> Iterator[str]:
    """The lines for people."""
    found, arena, uses = curves(body), body["arena_bytes_limit"], body.get("size_uses_total", 0)
    if "all" not in found:
        used = body.get("gets_total", 0) + body.get("sets_total", 0)
        yield f"nothing is known yet: {'the sample has just begun, ask again in 2 s' if used else 'no value was read or put'}"
        return
    yield sentence(found["all"])
    yield ""
    scales = list(found["all"])
    rows = [(name, *(f"{100 * curve[scale]:.0f} %" for scale in scales)) for name, curve in found.items()]
    yield from table(
        ("NAMESPACE", *(format_size(int(arena * scale)) for scale in scales)), rows, right=tuple(range(1, len(scales) + 1))
    )
    yield ""
    watched = body.get("size_sampled_keys", 0)
    hint = "; too few to rely on" if uses < FEW or watched < FEW_KEYS else ""
    yield f"the arena has {format_size(arena)}; estimated from {uses:,} uses of {watched:,} watched keys{hint}"
