"""How a byte budget is cut into regions.

Eviction frees a region at a time, and a value never spans two, so there is a pull both ways: many small regions lose
little per eviction, few large ones take large values. A chunk of the connector is up to 128 MiB, and eight of them with
their headers should fill a region without waste; a demo has a few MiB in all. Hence:

    budget                 regions   region
    256 KiB .. 560 MiB     4         a quarter of the budget
    560 MiB .. 4.5 GiB     4 to 8    at least 140 MiB: one 128 MiB chunk always fits
    4.5 GiB .. 16 GiB      16        at least 288 MiB
    16 GiB .. 512 GiB      16 to 511 1 GiB + 1 MiB: eight such chunks and their headers
    above                  512       1/512 of the budget (a region is one open file), at most 64 GiB

The same budget always gives the same regions; regions of another size found at the start stay readable.
"""

from dataclasses import dataclass

from kvd.tiers.adapters.base import AdapterConfigError
from kvd.tiers.adapters.disk.format import PAGE
from kvd.tiers.adapters.disk.index import MAX_REGION_BYTES, MAX_REGIONS
from kvtools.units import format_size

MIN_REGION_BYTES = 16 * PAGE
MIN_BYTES = 4 * MIN_REGION_BYTES
_CHUNK_REGION = 140 << 20
_MEDIUM_REGION = 288 << 20
_LARGE_REGION = (1 << 30) + (1 << 20)
_FIXED_PAGES = 3
"""Region header, extent header and index page: what a value that fills a region leaves room for."""


@dataclass(frozen=True)
class Geometry:
    """How many regions of which size."""

    max_bytes: int
    region_bytes: int

    @property
    def regions(self) -> int:
        """Regions of this size that fit the budget."""
        return self.max_bytes // self.region_bytes

    @property
    def max_value_bytes(self) -> int:
        """The largest value that fits a region."""
        return self.region_bytes - _FIXED_PAGES * PAGE

    @property
    def lanes(self) -> int:
        """Regions of one retention class that may be open for writing at once."""
        return max(1, min(4, self.regions // 4))


def default_region_bytes(max_bytes: int) -> int:
    """The region size for a budget (see the table above), a multiple of 4096."""
    if max_bytes >= 16 * _LARGE_REGION:
        size = max(_LARGE_REGION, min(max_bytes // 512, MAX_REGION_BYTES))
    elif max_bytes >= 16 * _MEDIUM_REGION:
        size = max_bytes // 16
    else:
        size = max_bytes // max(4, min(8, max_bytes // _CHUNK_REGION))
    return size // PAGE * PAGE


def plan(name: str, max_bytes: int, region_bytes: int | None) -> Geometry:
    """The geometry for a budget. Raises AdapterConfigError naming the adapter, the field and the limit it breaks."""
    if max_bytes < MIN_BYTES:
        raise AdapterConfigError(
            f"{name}: max_bytes is {format_size(max_bytes)}; a disk tier needs at least {format_size(MIN_BYTES)}",
            hint="give the tier more bytes, or leave it out",
        )
    size = default_region_bytes(max_bytes) if region_bytes is None else region_bytes
    if size < MIN_REGION_BYTES or size > MAX_REGION_BYTES or size % PAGE:
        raise AdapterConfigError(
            f"{name}: region_bytes is {size}; it must be a multiple of {PAGE} from {MIN_REGION_BYTES} to {MAX_REGION_BYTES}",
            hint="leave region_bytes out: it follows from the budget",
        )
    geometry = Geometry(max_bytes, size)
    if not 2 <= geometry.regions <= MAX_REGIONS:
        raise AdapterConfigError(
            f"{name}: {format_size(max_bytes)} hold {geometry.regions} regions of {format_size(size)}, not 2 to {MAX_REGIONS}",
            hint="leave region_bytes out: it follows from the budget",
        )
    return geometry
