"""GPUs for the snapshot: kvtools.devices tells memory; here it becomes `Gpu`, with load and heat where sysfs or NVML has them.

Asking costs little but not nothing (NVML starts and stops its library each time), so memory is asked once in `EVERY_S` seconds
and the answer repeated in between. A host without GPUs is asked once a minute: a driver may be loaded later.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtools.devices import Device, find_devices
from kvtop.snapshot import Gpu

EVERY_S = 2.0
NONE_EVERY_S = 60.0


class Gpus:
    """Remembers the last answer. Belongs to the thread that reads snapshots."""

    def __init__(
        self,
        find: Callable[[], list[Device]] = find_devices,
        *,
        sys: Path = Path("/sys"),
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._sys = sys
        self._mono = mono
        self._due = 0.0
        self._last: Sequence[Gpu] = ()

    def __call__(self) -> Sequence[Gpu]:
        now = self._mono()
        if now >= self._due:
            self._last = tuple(self._gpu(device) for device in self._find())
            self._due = now + (EVERY_S if self._last else NONE_EVERY_S)
        return self._last

    def _gpu(self, device: Device) -> Gpu:
        known = device.total_bytes > 0
        folder = self._sys / "bus/pci/devices" / device.pci
        return Gpu(
            index=device.index,
            name=device.name,
            uuid=device.uuid,
            total_bytes=device.total_bytes if known else -1,
            used_bytes=device.used_bytes if known else -1,
            busy_percent=_known(device.busy_percent, lambda: _number(folder / "gpu_busy_percent")),
            temperature_c=_known(device.temperature_c, lambda: _hwmon(folder, "temp1_input", 1000.0)),
            power_w=_known(device.power_w, lambda: _hwmon(folder, "power1_average", 1e6)),
            source=device.vendor,
        )


def _known(value: float, otherwise: Callable[[], float]) -> float:
    return value if value >= 0 else otherwise()


def _number(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return -1.0


def _hwmon(folder: Path, name: str, scale: float) -> float:
    try:
        found = next((folder / "hwmon").iterdir(), None)
    except OSError:
        return -1.0
    value = _number(found / name) if found else -1.0
    return value / scale if value >= 0 else -1.0
