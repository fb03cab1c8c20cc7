"""ais-check's answer, in all its versions: two to four 'name : True' lines, a volume table, a warning about VFs.

Names were right-aligned and lower case once, left-aligned after a tab later; the table's columns are found by its header,
because a mountpoint may hold blanks.
"""

import re

from kvdoctor.facts import AisCheck, AisVolume

_LINE = re.compile(r"^\s*(HIP runtime|amdgpu|Kernel P2PDMA support|hipFile-capable volume)\s*:\s*(true|false)\s*$", re.IGNORECASE)
_FIELDS = {"hip runtime": "hip", "amdgpu": "amdgpu", "kernel p2pdma support": "p2pdma", "hipfile-capable volume": "volume"}
COLUMNS = ("MOUNTPOINT", "FSTYPE", "DEVICE", "BACKING", "O_DIRECT", "HIPFILE")
_VF = re.compile(r"([0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]) \(([^)]*)\)")


def parse_ais_check(out: str, err: str = "", rc: int | None = None) -> AisCheck | None:
    """What it said, or None where `out` holds none of its lines."""
    result = AisCheck(rc=rc)
    seen = False
    for line in out.splitlines():
        if found := _LINE.match(line):
            setattr(result, _FIELDS[found[1].lower()], found[2].lower() == "true")
            seen = True
    result.volumes = _volumes(out.splitlines())
    for line in err.splitlines():
        if "virtual function" in line:
            result.virtual_functions += [f"{bdf} ({name})" for bdf, name in _VF.findall(line)]
    return result if seen or result.volumes else None


def _volumes(lines: list[str]) -> list[AisVolume]:
    header = next((i for i, line in enumerate(lines) if all(name in line for name in COLUMNS)), None)
    if header is None:
        return []
    starts = [lines[header].index(name) for name in COLUMNS]
    if starts != sorted(starts):
        return []
    rows = []
    for line in lines[header + 1 :]:
        if not line.strip() or line.lstrip().startswith("AIS support"):
            break
        cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        if cells[0]:
            rows.append(AisVolume(*cells))
    return rows
