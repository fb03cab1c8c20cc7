"""GPUs of this host: which there are, how much memory each has, and how much of it is taken.

Purpose: a percentage of *the engine's* GPU, and the GPU bars of kvtop. Contract: looking creates no GPU context and needs no
torch; a host without GPUs, or without the libraries to ask them, gives an empty list and never an error.

Data flow: AMD's numbers come from sysfs (`mem_info_vram_total` and `_used` of amdgpu, always there with the driver);
NVIDIA's from NVML when the `nvidia-ml-py` package and the driver's library are installed (with load, heat and power), else
names and UUIDs only, from /proc/driver/nvidia. `root` stands for the root of the file system, so a captured host can be
read; NVML speaks for the running host alone and is asked only when `root` is "/".

Failure: a file that is missing or does not parse leaves its field 0 or empty. Concurrency: no state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AMD, NVIDIA = "0x1002", "0x10de"
NVIDIA_CONTROL = Path("/dev/nvidiactl")
"""There with the driver: without it NVML's library is not even looked for."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. Sizes in bytes; 0 where they cannot be read. `index` is its place on the PCI bus among its vendor's GPUs."""

    index: int
    vendor: str
    name: str
    uuid: str
    pci: str
    total_bytes: int
    used_bytes: int
    busy_percent: float = -1.0
    """-1 where nobody says it, as the two below."""
    temperature_c: float = -1.0
    power_w: float = -1.0

    @property
    def free_bytes(self) -> int:
        return max(self.total_bytes - self.used_bytes, 0)


def find_devices(root: Path = Path("/")) -> list[Device]:
    """All GPUs with memory of their own, AMD's first, each vendor's by PCI address."""
    return _amd(root) + _nvidia(root)


def match_uuid(devices: list[Device], uuid: str) -> Device | None:
    """The device an engine calls `uuid`: with or without "GPU-", in any case, or cut short as CUDA_VISIBLE_DEVICES allows."""
    wanted = _plain(uuid)
    found = [device for device in devices if wanted and _plain(device.uuid).startswith(wanted)]
    return found[0] if len(found) == 1 else None


def _plain(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")


def _amd(root: Path) -> list[Device]:
    found = []
    for card in _cards(root):
        if _text(card / "vendor") != AMD or not (card / "mem_info_vram_total").exists():
            continue
        unique = _text(card / "unique_id")
        pci = card.resolve().name
        name = _text(card / "product_name") or f"AMD GPU {_text(card / 'device')}"
        total, used = _number(card / "mem_info_vram_total"), _number(card / "mem_info_vram_used")
        found.append((pci, name, f"GPU-{unique}" if unique else "", total, used))
    return [Device(i, "amd", name, uuid, pci, total, used) for i, (pci, name, uuid, total, used) in enumerate(sorted(found))]


def _cards(root: Path) -> list[Path]:
    try:
        names = sorted(path.name for path in (root / "sys/class/drm").iterdir())
    except OSError:
        return []
    return [root / "sys/class/drm" / name / "device" for name in names if name.startswith("card") and name[4:].isdigit()]


def _nvidia(root: Path) -> list[Device]:
    if root == Path("/") and (devices := _nvml()):
        return devices
    found = []
    try:
        addresses = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").iterdir())
    except OSError:
        return []
    for i, address in enumerate(addresses):
        lines = _text(root / "proc/driver/nvidia/gpus" / address / "information").splitlines()
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        found.append(Device(i, "nvidia", facts.get("Model", "NVIDIA GPU"), facts.get("GPU UUID", ""), address, 0, 0))
    return found


def _nvml() -> list[Device]:
    """By NVML, a library of the driver: no context is made. Empty without the package, the library or a GPU."""
    if not NVIDIA_CONTROL.exists():
        return []
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_nvml_device(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _nvml_device(nvml: Any, i: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(i)

    def number(ask: Callable[[], float]) -> float:
        try:
            return float(ask())
        except nvml.NVMLError:
            return -1.0  # a GPU in MIG mode, one that shares the host's memory, or a board without that sensor

    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, used = int(memory.total), int(memory.used)
    except nvml.NVMLError:
        total, used = 0, 0
    texts = [nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetPciInfo(handle).busId]
    name, uuid, pci = (text.decode() if isinstance(text, bytes) else str(text) for text in texts)
    busy = number(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    heat = number(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    milliwatts = number(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    power = milliwatts / 1000 if milliwatts >= 0 else -1.0
    return Device(i, "nvidia", name, uuid, _as_sysfs(pci), total, used, busy, heat, power)


def _as_sysfs(pci: str) -> str:
    """NVML's address (00000000:65:00.0) as sysfs writes it (0000:65:00.0)."""
    domain, _, rest = pci.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest and len(domain) == 8 and domain.startswith("0000") else pci.lower()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isascii() and text.isdigit() else 0
