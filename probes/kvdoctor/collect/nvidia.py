"""NVIDIA GPUDirect Storage: two routes, nvidia-fs (a patched NVMe driver) and PCI P2PDMA (since CUDA 12.8); one is enough."""

import os
import re

from kvdoctor.collect.source import Source
from kvdoctor.facts import Nvidia
from kvdoctor.parse import gds

PROC = "/proc/driver/nvidia"
FS = "/proc/driver/nvidia-fs"
TOOLS = ("gds/tools/gdscheck", "gds/tools/gdscheck.py")


def start_tools(source: Source) -> None:
    """Begin gdscheck, where a CUDA tree has it."""
    for tree in [
        "/usr/local/cuda",
        *(f"/usr/local/{name}" for name in reversed(source.names("/usr/local", r"cuda-.*"))),
    ]:
        for tool in TOOLS:
            path = f"{tree}/{tool}"
            if source.run_tools and os.access(path, os.X_OK):
                source.start("gdscheck", [path, "-p"], deadline_s=10.0)
                return


def collect_nvidia(source: Source, env: dict[str, str]) -> Nvidia:
    """Facts of both routes."""
    found = Nvidia()
    if text := source.read(f"{PROC}/version", 8192):
        found.driver_version, found.open_kernel_module = gds.parse_nvidia_version(text)
        found.open_source = f"{PROC}/version"
    if (text := source.read(f"{PROC}/params", 16384)) is not None:
        keys = re.search(r'^RegistryDwords:\s*"?([^"\n]*)', text, re.MULTILINE)
        found.regkeys = keys[1].strip() if keys else ""
    _nvidia_fs(source, found)
    _gdscheck(source, found)
    path = env.get("CUFILE_ENV_PATH_JSON") or "/etc/cufile.json"
    if text := source.read(path, 1 << 20):
        found.cufile, found.cufile_path = gds.parse_cufile_json(text) or {}, path
    found.cufile_error, found.cufile_error_line = gds.parse_cufile_log(source.captured("cufile.log") or "")
    answer = source.value("nvidia-devices", lambda: _devices_denied(source))
    if isinstance(answer, list):
        found.devices_tried, found.devices_denied = True, [str(node) for node in answer]
    return found


def _devices_denied(source: Source) -> list[str]:
    nodes = [f"/dev/{name}" for name in os.listdir(source.host_path("/dev")) if re.fullmatch(r"nvidia(\d+|ctl)", name)]  # noqa: PTH208
    return [node for node in sorted(nodes) if not os.access(source.host_path(node), os.R_OK | os.W_OK)]


def _nvidia_fs(source: Source, found: Nvidia) -> None:
    modules = source.read("/proc/modules", 1 << 18)
    listed = modules or source.captured("lsmod.out")
    if source.is_folder("/sys/module/nvidia_fs") or source.is_folder(FS):
        found.fs_loaded = True
    elif listed is not None:
        found.fs_loaded = bool(re.search(r"^nvidia_fs\s", listed, re.MULTILINE))
    elif source.is_folder("/sys/module"):
        found.fs_loaded = False
    if text := source.read(f"{FS}/version", 4096):
        match = re.search(r"\d+\.\d+(\.\d+)?", text)
        found.fs_version = match[0] if match else text.strip()
    if text := source.read(f"{FS}/stats", 65536):
        found.fs_ops = gds.parse_fs_stats(text)


def _gdscheck(source: Source, found: Nvidia) -> None:
    run = source.answer("gdscheck")
    if run is None or not run.answered:
        return
    found.gdscheck = gds.parse_gdscheck(run.out)
    if found.gdscheck is None:
        return
    found.gdscheck_gpus = gds.gdscheck_gpus(run.out)
    found.gdscheck_verified = gds.gdscheck_verified(run.out)
    found.gdscheck_kernel = gds.gdscheck_kernel(run.out)
    status = found.gdscheck.get("nvidia driver info status", "")
    if found.open_kernel_module is None and status:
        found.open_kernel_module = "Open Driver" in status
        found.open_source = "gdscheck"
    if not found.fs_version and (text := found.gdscheck.get("nvidia_fs version")):
        found.fs_version = text.split()[0]
        if found.fs_loaded is None and not source.whole:
            # No list of modules was captured: gdscheck reads this version from the loaded module.
            found.fs_loaded = True
