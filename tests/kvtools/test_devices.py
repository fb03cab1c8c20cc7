"""GPUs from a made-up sysfs and procfs; on this machine, whatever there is, without an error."""

from pathlib import Path

import pytest

from kvtools.devices import Device, find_devices, match_uuid

GiB = 1 << 30


def card(root: Path, number: int, pci: str, **files: str) -> None:
    device = root / "sys/devices" / pci
    device.mkdir(parents=True)
    for name, text in files.items():
        (device / name).write_text(text + "\n")
    (root / f"sys/class/drm/card{number}").mkdir(parents=True)
    (root / f"sys/class/drm/card{number}/device").symlink_to(device)


def test_amd_by_sysfs(tmp_path: Path) -> None:
    memory = {"vendor": "0x1002", "device": "0x74a1", "mem_info_vram_total": str(192 * GiB), "mem_info_vram_used": str(3 * GiB)}
    card(tmp_path, 1, "0000:c5:00.0", unique_id="f00d", product_name="MI300X", **memory)
    card(tmp_path, 0, "0000:05:00.0", **memory)
    card(tmp_path, 2, "0000:00:02.0", vendor="0x8086", mem_info_vram_total="5")
    card(tmp_path, 3, "0000:00:03.0", vendor="0x1002")
    (tmp_path / "sys/class/drm/card0-DP-1").mkdir()
    assert find_devices(tmp_path) == [
        Device(0, "amd", "AMD GPU 0x74a1", "", "0000:05:00.0", 192 * GiB, 3 * GiB),
        Device(1, "amd", "MI300X", "GPU-f00d", "0000:c5:00.0", 192 * GiB, 3 * GiB),
    ]
    assert find_devices(tmp_path)[1].free_bytes == 189 * GiB


def test_numbers_that_are_none_are_0(tmp_path: Path) -> None:
    card(tmp_path, 0, "0", vendor="0x1002", mem_info_vram_total="many", mem_info_vram_used="-5")
    assert (find_devices(tmp_path)[0].total_bytes, find_devices(tmp_path)[0].used_bytes) == (0, 0)


def test_nvidia_without_nvml_has_names_and_no_sizes(tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:65:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   16\nGPU UUID: \t GPU-5f2a-77\n")
    assert find_devices(tmp_path) == [Device(0, "nvidia", "NVIDIA H200", "GPU-5f2a-77", "0000:65:00.0", 0, 0)]


def test_no_gpu_and_no_folder(tmp_path: Path) -> None:
    assert find_devices(tmp_path) == []
    assert find_devices(tmp_path / "none") == []


def test_this_machine_whatever_it_has() -> None:
    assert all(device.total_bytes >= device.used_bytes >= 0 for device in find_devices())


@pytest.mark.parametrize(
    ("uuid", "index"),
    [("GPU-aaaa-1", 0), ("gpu-AAAA-1", 0), ("aaaa", 0), ("GPU-aa", None), ("", None), ("x", None), ("GPU-", None)],
)
def test_uuids_as_engines_write_them(uuid: str, index: int | None) -> None:
    devices = [Device(0, "nvidia", "", "GPU-aaaa-1", "", 0, 0), Device(1, "nvidia", "", "GPU-aabb-2", "", 0, 0)]
    found = match_uuid(devices, uuid)
    assert (found.index if found else None) == index
