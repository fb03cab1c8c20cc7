"""GPUs from a made-up sysfs and procfs, from NVML over a stand-in of the driver's library, and whatever this machine has."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvtools.devices import Device, find_devices, match_uuid
from tests.support.processes import run_python

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


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1 that answers as the driver's would (nvml_standin.c)."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler: apt-get install gcc")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml_standin.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-o", str(folder / "libnvidia-ml.so.1"), str(source)], check=True)
    return folder


def ask_nvml(folder: Path, **environment: str) -> list[Any]:
    """What find_devices and kvtop's GPUs say in a process that finds the stand-in where the driver's library would be."""
    code = (
        "import json; from dataclasses import asdict; from pathlib import Path; import msgspec\n"
        "from kvtools import devices; from kvtop.gpus import Gpus\n"
        "devices.NVIDIA_CONTROL = Path('/dev/null')\n"
        "found = devices.find_devices()\n"
        "print(json.dumps([[asdict(one) for one in found], msgspec.to_builtins(Gpus()())]))"
    )
    ran = run_python(code, env={"LD_LIBRARY_PATH": str(folder), **environment})
    assert (ran.rc, ran.stderr) == (0, "")
    return list(json.loads(ran.stdout))


def test_nvidia_by_nvml(nvml: Path) -> None:
    found, shown = ask_nvml(nvml)
    assert found[0] == {
        "index": 0, "vendor": "nvidia", "name": "NVIDIA H200", "uuid": "GPU-00000000-1111-2222-3333-444444444444",
        "pci": "0000:65:00.0", "total_bytes": 141 * GiB, "used_bytes": 37 * GiB,
        "busy_percent": 63.0, "temperature_c": 54.0, "power_w": 412.5,
    }  # fmt: skip
    assert (shown[0]["busy_percent"], shown[0]["temperature_c"], shown[0]["power_w"]) == (63.0, 54.0, 412.5)


def test_what_nvml_refuses_is_unknown(nvml: Path) -> None:
    found, shown = ask_nvml(nvml)
    board = found[1]
    assert (board["total_bytes"], board["busy_percent"], board["temperature_c"], board["power_w"]) == (0, -1.0, 54.0, -1.0)
    assert (shown[1]["total_bytes"], shown[1]["used_bytes"], shown[1]["busy_percent"]) == (-1, -1, -1.0)


@pytest.mark.parametrize("call", ["init", "count"])
def test_a_driver_that_does_not_fit_its_library_is_no_error(nvml: Path, call: str) -> None:
    assert ask_nvml(nvml, NVML_STANDIN_FAIL=call) == [[], []]
