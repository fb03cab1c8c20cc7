"""What the vendors' own libraries say, asked in a child: `python -I smi_library.py amd|nvidia`.

amdsmi and NVML can hang for ever on a wedged driver, and amdsmi without its C library prints to stdout and raises KeyError
on import: so neither is ever imported by kvdoctor itself. Prints one line of JSON, {"gpus": [{bdf, name, virtualization}],
"driver": version}, or {"error": why}; everything else that lands on stdout is not JSON and is skipped by the reader.
"""

import json
import sys


def amd() -> dict[str, object]:
    try:
        import amdsmi
    except ImportError:
        sys.path.append("/opt/rocm/share/amd_smi")
        import amdsmi
    amdsmi.amdsmi_init()
    found = []
    driver = ""
    for handle in amdsmi.amdsmi_get_processor_handles():
        asic = amdsmi.amdsmi_get_gpu_asic_info(handle)
        driver = str(amdsmi.amdsmi_get_gpu_driver_info(handle).get("driver_version", ""))
        ask = getattr(amdsmi, "amdsmi_get_gpu_virtualization_mode", None)  # newer releases only
        mode = ask(handle) if ask else ""
        mode = mode.get("mode", "") if isinstance(mode, dict) else mode
        found.append(
            {
                "bdf": str(amdsmi.amdsmi_get_gpu_device_bdf(handle)).lower(),
                "name": str(asic.get("market_name", "")),
                "virtualization": str(getattr(mode, "name", mode)).rsplit("_", 1)[-1].lower(),
            }
        )
    return {"gpus": found, "driver": driver}


def nvidia() -> dict[str, object]:
    import pynvml

    def text(value: object) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)

    modes = {0: "", 1: "passthrough", 2: "guest", 3: "host", 4: "host"}
    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        bus = text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()
        try:
            mode = modes.get(pynvml.nvmlDeviceGetVirtualizationMode(handle), "")
        except pynvml.NVMLError:
            mode = ""
        found.append({"bdf": bus[-12:], "name": text(pynvml.nvmlDeviceGetName(handle)), "virtualization": mode})
    return {"gpus": found, "driver": text(pynvml.nvmlSystemGetDriverVersion())}


def main() -> None:
    try:
        answer = amd() if sys.argv[1] == "amd" else nvidia()
    except Exception as error:  # noqa: BLE001 - the edge of this process: whatever a vendor's library raises becomes one line
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
