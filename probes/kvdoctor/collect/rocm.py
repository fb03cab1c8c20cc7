"""ROCm's user space where this runs: version, HIP with its file calls, hipFile.

Several trees may lie side by side (/opt/rocm, /opt/rocm-7.2.1, /opt/rocm/core-7.11, a pip wheel); the engine uses one of
them. No library is loaded: HIP's file calls are found by their name in the file's bytes.
"""

import re

from kvdoctor.collect.source import Source
from kvdoctor.facts import Rocm

NEEDLE = b"hipAmdFileRead"
SYSTEM_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/lib")


def collect_rocm(source: Source, env: dict[str, str]) -> Rocm:
    """What ROCm there is, newest tree named by ROCM_PATH or /opt/rocm first."""
    found = Rocm(looked=source.whole)
    trees = [
        tree for tree in dict.fromkeys([env.get("ROCM_PATH", ""), "/opt/rocm", *_opt(source)]) if tree and source.is_folder(tree)
    ]
    found.looked = found.looked or bool(trees)
    folders: list[str] = []
    for tree in trees:
        _version(source, tree, found)
        folders += [f"{tree}/lib", f"{tree}/lib64"]
        for name in source.names(tree, r"core-\d+\.\d+"):
            folders.append(f"{tree}/{name}/lib")
            if not found.version:
                found.version, found.version_path = name.removeprefix("core-"), f"{tree}/{name}"
    _python(source, found, folders)
    seen: set[str] = set()
    for folder in [*folders, *SYSTEM_FOLDERS]:
        names = source.names(folder, r"lib(amdhip64|hipfile)\.so.*")
        if names:
            found.library_folders.append(folder)
        for name in names:
            real = source.real(f"{folder}/{name}")
            if name.startswith("libamdhip64.so") and real not in seen:
                seen.add(real)
                has = source.contains(real, NEEDLE)
                if has is not None:
                    found.hip_libraries[real] = has
            elif name.startswith("libhipfile.so") and real not in found.hipfile_libraries:
                found.hipfile_libraries.append(real)
    return found


def _opt(source: Source) -> list[str]:
    return sorted((f"/opt/{name}" for name in source.names("/opt", r"rocm-.*")), reverse=True)


def _version(source: Source, tree: str, found: Rocm) -> None:
    if found.version:
        return
    for path in (f"{tree}/.info/version", f"{tree}/.info/version-dev"):
        if text := source.word(path):
            found.version, found.version_path = text, path
            return
    named = re.fullmatch(r"/opt/rocm-(\d+\.\d+(?:\.\d+)?)", source.real(tree))
    if named:
        found.version, found.version_path = named[1], tree


def _python(source: Source, found: Rocm, folders: list[str]) -> None:
    """Python packages of this interpreter: the pip wheels of ROCm and the hipFile binding."""
    # This interpreter's packages are not another root's.
    answer = None if source.foreign else source.value("python-packages", _packages)
    if not isinstance(answer, dict):
        return
    found.hipfile_python = str(answer.get("hipfile", ""))
    if answer.get("rocm"):
        folders.append(f"{answer.get('rocm_folder')}/lib")
        if not found.version:
            found.version, found.version_path = str(answer["rocm"]), str(answer.get("rocm_folder"))


def _packages() -> dict[str, str]:
    from importlib import metadata

    found = {"hipfile": "", "rocm": "", "rocm_folder": ""}
    for name in ("rocm-sdk-core", "rocm"):
        try:
            found["rocm"] = found["rocm"] or metadata.version(name)
            found["rocm_folder"] = found["rocm_folder"] or str(metadata.distribution(name).locate_file("_rocm_sdk_core"))
        except metadata.PackageNotFoundError:
            continue
    try:
        found["hipfile"] = metadata.version("hipfile")
    except metadata.PackageNotFoundError:
        pass
    return found
