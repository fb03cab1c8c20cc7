"""ROCm's user space where this runs. Engine image and host are two answers: check where the engine runs."""

from kvdoctor.facts import Facts
from kvdoctor.parse.versions import at_least, version_tuple
from kvdoctor.results import Result, command_evidence, file_evidence
from kvdoctor.rules.base import absent, amd_only, check, install, missing, result, skip, unknown

MINIMUM = (7, 2)


@check("rocm.version", "R", "ROCm version")
@amd_only
def version(facts: Facts) -> Result:
    """ROCm 7.2 or later. TheRock previews 7.9 and 7.10 compare higher and may lack the file calls."""
    rocm = facts.rocm
    if not rocm.version:
        if not rocm.looked:
            return missing(facts, "ROCm's version")
        return result(
            "fail",
            "no ROCm was found here",
            expected="7.2 or later",
            why="The engine's HIP runtime brings the file calls; the driver alone is not enough.",
            fix="Install ROCm 7.2 or later where the engine runs (this may be its container image: run kvdoctor inside it).",
            evidence=[file_evidence(place, "absent") for place in ("/opt", "/opt/rocm", "/opt/rocm/.info/version")],
        )
    evidence = [file_evidence(rocm.version_path, rocm.version)]
    enough = at_least(rocm.version, MINIMUM)
    if enough is None:
        return unknown(f"version {rocm.version!r} is not understood", evidence=evidence)
    if not enough:
        return result(
            "fail",
            f"ROCm {rocm.version}",
            expected="7.2 or later",
            why="Its HIP runtime has no file calls; the driver may be up all the same.",
            fix="Install ROCm 7.2 or later where the engine runs.",
            evidence=evidence,
        )
    if (version_tuple(rocm.version) or ())[:2] in ((7, 9), (7, 10)):
        return result(
            "warn",
            f"ROCm {rocm.version} is a technology preview that may not be based on 7.2",
            fix="Check rocm.hip_ais; use a release (7.2, or 7.11 and later) where it does not pass.",
            evidence=evidence,
        )
    return result("pass", rocm.version, expected="7.2 or later", evidence=evidence)


@check("rocm.hip_ais", "R", "HIP with file calls")
@amd_only
def hip_ais(facts: Facts) -> Result:
    """libamdhip64 holds hipAmdFileRead (found in its bytes: nothing is loaded); else what ais-check says of the runtime."""
    libraries = facts.rocm.hip_libraries
    good = [path for path, has in libraries.items() if has]
    if good:
        return result("pass", good[0], evidence=[file_evidence(good[0], "hipAmdFileRead")], confidence="medium")
    if libraries:
        first = next(iter(libraries))
        return result(
            "fail",
            f"{first} has no hipAmdFileRead",
            fix="Install ROCm 7.2 or later where the engine runs.",
            evidence=[file_evidence(first)],
            confidence="medium",
        )
    said = facts.ais_check.hip if facts.ais_check else None
    if said is not None:
        evidence = [command_evidence("ais-check", f"HIP runtime: {said}")]
        if said:
            return result("pass", "the runtime ais-check found", evidence=evidence, confidence="medium")
        return result(
            "fail",
            "ais-check finds no HIP runtime with file calls",
            evidence=evidence,
            fix="Install ROCm 7.2 or later.",
            confidence="medium",
        )
    return absent(facts, "libamdhip64.so")


@check("rocm.hipfile_lib", "R", "hipFile library")
@amd_only
def hipfile_lib(facts: Facts) -> Result:
    """libhipfile.so, which the connector loads by ctypes."""
    if facts.rocm.hipfile_libraries:
        return result("pass", facts.rocm.hipfile_libraries[0], evidence=[file_evidence(facts.rocm.hipfile_libraries[0])])
    if not facts.rocm.library_folders:
        return absent(facts, "libhipfile.so")
    return result(
        "fail",
        f"no libhipfile.so in {', '.join(facts.rocm.library_folders[:3])}",
        fix="Install hipFile (package hipfile of ROCm) where the engine runs.",
        commands=[install(facts, "hipfile")],
    )


@check("rocm.hipfile_py", "R", "hipFile for Python")
@amd_only
def hipfile_py(facts: Facts) -> Result:
    """The Python binding. Other connectors import it; this toolkit's loads the library itself, so its absence informs."""
    version_ = facts.rocm.hipfile_python
    if version_ is None:
        return skip("Python packages: not in this capture")
    if version_:
        return result("pass", f"hipfile {version_}")
    return result("info", "no hipfile package here", why="kvd's connector loads libhipfile itself; only others need the binding.")
