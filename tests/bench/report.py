"""What was measured, kept and shown: results.json for programs, RESULTS.md and the README's block for people.

RESULTS.md ends with profiles.md, which is written by hand: what the time goes into.

The machine is named by what it is (cores, processor, virtual or not, kind of disk), never by where it stands.
"""

import json
import os
import platform
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvtools.units import format_duration, format_rate
from tests.bench.measure import Result

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results.json"


def machine() -> str:
    """Cores, processor, memory and disk, as in "2 vCPU AMD EPYC VM, 24 GiB, virtio disk"."""
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    words = " ".join((model[1] if model else platform.machine()).split()[:2])
    virtual = bool(re.search(r"^flags\s*:.*\bhypervisor\b", info, re.MULTILINE))
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    gib = round(int(memory[1]) / (1 << 20)) if memory else 0
    disks = sorted(path.name for path in Path("/sys/block").iterdir() if not path.name.startswith(("loop", "ram", "zram", "dm-")))
    kind = (
        "NVMe" if any(d.startswith("nvme") for d in disks) else "virtio" if any(d.startswith("vd") for d in disks) else "SCSI/SATA"
    )
    return f"{os.cpu_count()} {'vCPU' if virtual else 'cores'} {words}{' VM' if virtual else ''}, {gib} GiB, {kind} disk"


def save(results: Sequence[Result], *, when: float | None = None) -> None:
    """Merge into results.json: a run of some measurements keeps the others."""
    kept = {row["name"]: row for row in load().get("results", [])}
    day = time.strftime("%Y-%m-%d", time.gmtime(when))
    for result in results:
        kept[result.name] = {**result.as_json(), "day": day}
    body = {"schema": "kvtools.bench/1", "machine": machine(), "results": [kept[name] for name in sorted(kept)]}
    RESULTS.write_text(json.dumps(body, indent=1) + "\n")
    (FOLDER / "RESULTS.md").write_text(_document(body))


def load() -> dict[str, Any]:
    """results.json, or {} before the first run."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def show(value: float, unit: str) -> str:
    """A measured value for people."""
    if unit == "B/s":
        return format_rate(value)
    if unit == "s" and value < 1e-5:
        return f"{value * 1e6:.2g} us"
    if unit == "s":
        return format_duration(value)
    if unit == "keys/s":
        return f"{value / 1e6:.2f} M/s"
    return f"{value:.3g} {unit}".strip()


def table(rows: Iterable[dict[str, Any]]) -> str:
    """A Markdown table of results."""
    lines = ["| what | measured | floor in the same run | ratio | budget |", "|---|---|---|---|---|"]
    for row in rows:
        sign = "<=" if row["at_most"] else ">="
        state = "" if row["ok"] else " **short**"
        lines.append(
            f"| {row['what']} | {show(row['value'], row['unit'])} | {show(row['floor'], row['unit'])} "
            f"| {row['ratio']:.2f} | {sign} {row['budget']:g}{state} |"
        )
    return "\n".join(lines)


HEADLINES = ("arena.", "control.", "single.", "disk.", "ttft.", "connector.", "startup.", "kvtop.", "gate.", "elastic.")
"""What the README shows, by the beginnings of names; the rest is in RESULTS.md."""


def readme_table() -> str:
    """The README's block: the machine, then the table."""
    body = load()
    if not body:
        return "Nothing was measured yet: `make bench`."
    rows = [row for row in body["results"] if row["name"].startswith(HEADLINES)]
    more = "Tiers, serde, eviction policies, kvdoctor and profiles: [tests/bench/RESULTS.md](tests/bench/RESULTS.md)."
    return "\n\n".join([f"Measured on: {body['machine']}.", table(rows), more])


def _document(body: dict[str, Any]) -> str:
    short = [row["what"] for row in body["results"] if not row["ok"]]
    days = sorted({row["day"] for row in body["results"]})
    return (
        "# Results\n\n"
        f"Written by `python -m tests.bench` on: {body['machine']}; {days[0]} to {days[-1]}. How it is measured: README.\n\n"
        f"{table(body['results'])}\n\n"
        + ("All budgets are met.\n" if not short else "Short of their budget: " + "; ".join(short) + ".\n")
        + "\n"
        + (FOLDER / "profiles.md").read_text()
    )
