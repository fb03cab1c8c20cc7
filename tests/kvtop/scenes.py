"""Scenes: snapshots of hosts that do not exist, the same every time. Tests, snapshots and the README's picture use them.

`host(tick)` is a busy inference host with three engines, a daemon with two tiers and a GPU; the numbers move with the tick in a
way that only depends on it.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvtop.model import Model
from kvtop.screens.dashboard import Dashboard, Options
from kvtop.snapshot import (
    Gpu,
    LimitNote,
    Problem,
    Process,
    Segment,
    Series,
    Snapshot,
    Stats,
)

GIB = 1 << 30
MIB = 1 << 20
START_S = 1_767_225_600.0
"""1 January 2026, 00:00 UTC."""


def wave(tick: int, period: float, phase: float = 0.0) -> float:
    """0 to 1, smooth and periodic."""
    return 0.5 + 0.5 * math.sin(2 * math.pi * (tick / period + phase))


def series(name: str, kind: str = "gauge", unit: str = "", text: str = "", **labels: str) -> Series:
    return Series(name=name, kind=kind, unit=unit, help=text, labels=tuple(sorted(labels.items())))


def segment(name: str = "llama-70b", **changed: object) -> Segment:
    """A segment in good health; any field may be changed."""
    fields: dict[str, object] = {
        "limit_bytes": 48 * GIB,
        "used_bytes": 30 * GIB,
        "prealloc_bytes": 2 * GIB,
        "owner": "live",
        "pid": 4711,
        "engine": "vllm",
        "model": "meta/llama-3.1-70b",
        "devices": ("GPU-8f1c",),
        "capacity_bytes": 64 * GIB,
        "page_bytes": 2 * MIB,
        "story": "pid 4711 runs",
        **changed,
    }
    return Segment(name=name, **fields)  # type: ignore[arg-type]


_KVD: tuple[Series, ...] = (
    series("sets_total", "counter", text="values stored"),
    series("gets_total", "counter", text="values asked for"),
    series("hits_total", "counter", text="values found"),
    series("misses_total", "counter", text="values not found"),
    series("set_bytes_total", "counter", "bytes", "bytes stored"),
    series("get_bytes_total", "counter", "bytes", "bytes read"),
    series("evictions_total", "counter", text="values dropped for room"),
    series("corruptions_total", "counter", text="values whose checksum was wrong"),
    series("rejections_total", "counter", text="puts refused", reason="busy"),
    series("entries", text="values in the arena"),
    series("arena_bytes_used", unit="bytes"),
    series("arena_bytes_limit", unit="bytes"),
    series("leases_active", text="pins held"),
    series("quarantine_bytes", unit="bytes"),
    *(
        series(name, kind, unit, tier=tier, type=of)
        for tier, of in (("nvme0", "disk"), ("s3", "s3"))
        for name, kind, unit in (
            ("tier_bytes_used", "gauge", "bytes"),
            ("tier_bytes_limit", "gauge", "bytes"),
            ("tier_entries", "gauge", ""),
            ("tier_hits_total", "counter", ""),
            ("tier_misses_total", "counter", ""),
            ("tier_stores_total", "counter", ""),
            ("tier_store_bytes_total", "counter", "bytes"),
            ("tier_load_bytes_total", "counter", "bytes"),
            ("tier_evictions_total", "counter", ""),
            ("tier_corruptions_total", "counter", ""),
            ("tier_breaker_open", "gauge", ""),
        )
    ),
    *(series("get_seconds", "bucket", "seconds", le=le) for le in ("0.0001", "0.001", "0.01", "+Inf")),
    *(series("tier_load_seconds", "bucket", "seconds", tier="nvme0", le=le) for le in ("0.001", "0.01", "0.1", "+Inf")),
    series("a_name_of_the_future", text="no version of kvtop knows this one"),
)


def kvd(tick: int = 0, *, instance: str = "3f9ac1d2e4b5", state: str = "fresh", **changed: float) -> Stats:
    """A daemon's numbers; any value may be set by its name (a tier's as tier_breaker_open__nvme0)."""
    values: dict[str, float] = {
        "sets_total": 40.0 * tick,
        "gets_total": 220.0 * tick,
        "hits_total": 200.0 * tick,
        "misses_total": 20.0 * tick,
        "set_bytes_total": 0.3 * GIB * tick,
        "get_bytes_total": 1.7 * GIB * tick + GIB * wave(tick, 40),
        "evictions_total": 3.0 * tick,
        "entries": 12_345,
        "arena_bytes_used": 96 * GIB + 8 * GIB * wave(tick, 90),
        "arena_bytes_limit": 128 * GIB,
        "leases_active": 12,
        "tier_bytes_used__nvme0": 1400 * GIB + tick * MIB * 300,
        "tier_bytes_limit__nvme0": 2048 * GIB,
        "tier_entries__nvme0": 91_234,
        "tier_hits_total__nvme0": 60.0 * tick,
        "tier_misses_total__nvme0": 15.0 * tick,
        "tier_store_bytes_total__nvme0": 0.25 * GIB * tick,
        "tier_load_bytes_total__nvme0": 0.5 * GIB * tick,
        "tier_bytes_used__s3": 9000 * GIB,
        "tier_hits_total__s3": 4.0 * tick,
        "tier_misses_total__s3": 11.0 * tick,
        "tier_load_bytes_total__s3": 0.04 * GIB * tick,
        "a_name_of_the_future": 7,
    }
    values |= changed
    buckets = {"0.0001": 90.0, "0.001": 150.0, "0.01": 199.0, "+Inf": 200.0, "0.1": 200.0}
    found = []
    for one in _KVD:
        labels = dict(one.labels)
        name = f"{one.name}__{labels['tier']}" if "tier" in labels and one.kind != "bucket" else one.name
        found.append(buckets[labels["le"]] * tick if one.kind == "bucket" else float(values.get(name, 0.0)))
    return Stats(
        kind="kvd",
        instance=instance,
        schema=_KVD,
        values=tuple(found),
        pid=4242,
        created_s=START_S,
        heartbeat_s=START_S + tick,
        state=state,
    )


def host(tick: int = 0, segments: int = 3, **changed: object) -> Snapshot:
    """A busy host at second `tick`; any field of the snapshot may be changed."""
    names = ["llama-70b", "qwen-32b", "mistral-7b"] + [f"engine-{number:03d}" for number in range(3, segments)]
    made = []
    for number, name in enumerate(names[:segments]):
        limit = (48, 24, 8)[number] * GIB if number < 3 else 4 * GIB
        used = int(limit * (0.35 + 0.5 * wave(tick, 60 + 7 * number, number / 3))) // (2 * MIB) * (2 * MIB)
        made.append(
            segment(
                name,
                limit_bytes=limit,
                used_bytes=used,
                prealloc_bytes=256 * MIB,
                pid=4711 + number,
                model=("meta/llama-3.1-70b", "qwen/qwen-32b", "mistral/7b")[number] if number < 3 else f"model-{number}",
                story=f"pid {4711 + number} runs",
                limits=(LimitNote(limit_bytes=limit, by="kvctl limit, uid 0", at_s=START_S - 600, state="applied"),)
                if number == 1
                else (),
            )
        )
    fields: dict[str, object] = {
        "host": "gpu-host-3",
        "segments": tuple(made),
        "stats": (kvd(tick),),
        "gpus": (
            Gpu(
                index=0,
                name="NVIDIA H200",
                uuid="GPU-8f1c",
                total_bytes=141 * GIB,
                used_bytes=int((96 + 6 * wave(tick, 50)) * GIB),
                source="nvml",
            ),
        ),
        "processes": tuple(
            Process(
                pid=one.pid,
                role="engine",
                command=f"vllm serve {one.model}",
                user="vllm",
                state="running",
                cpu_percent=80.0 + 40 * wave(tick, 20),
                rss_bytes=9 * GIB,
                threads=91,
                started_s=START_S - 7200,
                holds=(one.name,),
            )
            for one in made[:3]
        ),
        "shm_total_bytes": 256 * GIB,
        "shm_free_bytes": 120 * GIB,
        **changed,
    }
    return Snapshot(time_s=START_S + tick, mono_s=float(tick), **fields)  # type: ignore[arg-type]


def foreign(tick: int) -> Snapshot:
    """The busy host, with names from everywhere: every text that comes from outside holds letters that are not ASCII."""
    name = "名前-é-👩‍👩-" + "ü" * 60
    there = host(tick)
    labelled = tuple(
        change(one, labels=tuple((key, f"{value}-日本") for key, value in one.labels), help="größe 大きさ") for one in _KVD
    )
    return change(
        there,
        host=name,
        segments=tuple(change(one, name=f"{n}{name}", model=name, engine=name, devices=(name,), story=name) for n, one in
                       enumerate(there.segments)),
        stats=(change(kvd(tick, tier_breaker_open__nvme0=1), schema=labelled, instance="模型"),),
        gpus=(change(there.gpus[0], name=name, used_bytes=-1),),
        processes=tuple(change(one, command=name, user=name, holds=(name,), state="死") for one in there.processes),
        problems=(Problem(source=name, message=name),),
    )  # fmt: skip


def showcase(tick: int) -> Snapshot:
    """The host of the README's picture: two models that share a GPU well, one whose limit was just lowered, one that died."""
    llama, qwen, mistral = host(tick, segments=3).segments
    lowered = tick >= 200
    qwen = change(
        qwen,
        limit_bytes=(16 if lowered else 24) * GIB,
        used_bytes=int((15.6 + 1.2 * wave(tick, 80, 0.3)) * GIB) // (2 * MIB) * (2 * MIB),
        limits=(
            LimitNote(limit_bytes=24 * GIB, by="kvctl limit, uid 0", at_s=START_S - 600, state="applied"),
            *([LimitNote(limit_bytes=16 * GIB, by="kvtop, uid 0", at_s=START_S + 200, state="pending")] if lowered else []),
        ),
    )
    old = segment(
        "gemma-2b", owner="stale", pid=3977, limit_bytes=4 * GIB, used_bytes=2 * GIB, prealloc_bytes=0, model="google/gemma-2b",
        story="pid 3977 is gone",
    )  # fmt: skip
    return host(tick, segments=3) if tick < 0 else change(host(tick), segments=(llama, qwen, mistral, old))


Struct = TypeVar("Struct", bound=msgspec.Struct)


def change(struct: Struct, **fields: object) -> Struct:
    """The same snapshot, segment or stats with some fields replaced."""
    return msgspec.structs.replace(struct, **fields)


def model(ticks: int = 30, make: Callable[[int], Snapshot] = host, **options: object) -> Model:
    """A model that has seen `ticks` seconds of a scene."""
    made = Model(clock=lambda: START_S, **options)  # type: ignore[arg-type]
    for tick in range(ticks):
        made.take(make(tick))
    return made


class Silent:
    """A source that is never asked: tests deliver snapshots themselves."""

    def read(self) -> Snapshot:
        raise AssertionError("nobody should read this")


def dashboard(made: Model | None = None, **options: object) -> Dashboard:
    """A dashboard without a reading thread."""
    return Dashboard(made or model(), Silent(), Options(**options), start_reader=False)  # type: ignore[arg-type]


def grid_text(app: Dashboard) -> list[str]:
    """What is on the screen, a string a row."""
    return ["".join(part.text for part in strip) for strip in app.screen._compositor.render_strips()]


def drive(app: Dashboard, *keys: str, size: tuple[int, int] = (120, 36), ticks: Sequence[Snapshot] = ()) -> list[str]:
    """Run `app` at a size, deliver `ticks`, press `keys` one after another, and give the screen as text."""

    async def run() -> list[str]:
        async with app.run_test(size=size) as pilot:
            for snapshot in ticks:
                app.main.take(snapshot)
            await pilot.pause()
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
            return grid_text(app)

    return asyncio.run(run())
