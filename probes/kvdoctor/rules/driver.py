"""The amdgpu driver: loaded, new enough, the same as on disk, built for this kernel, let in by Secure Boot."""

from kvdoctor.facts import AmdDriver, DkmsEntry, Facts, ModuleFile
from kvdoctor.parse.versions import at_least, version_tuple
from kvdoctor.results import Evidence, Result, command_evidence, file_evidence
from kvdoctor.rules.base import absent, amd_only, check, install, missing, quote, rebuild_initramfs, result, skip, unknown

MINIMUM = (6, 16, 6)
MINIMUM_TEXT = "6.16.6 (package amdgpu-dkms 30.20.1)"
MODULE = "/sys/module/amdgpu"


def is_loaded(driver: AmdDriver) -> bool:
    """Live, or built into the kernel (which has the folder and no initstate)."""
    return bool(driver.loaded) and driver.initstate in ("live", "")


def too_old(facts: Facts) -> bool:
    """Whether the loaded driver is known to lack AIS: no version (the kernel's own) or one below the minimum."""
    driver = facts.driver
    return is_loaded(driver) and (not driver.version or at_least(driver.version, MINIMUM) is False)


@check("gpu.driver.loaded", "R", "Driver loaded")
@amd_only
def loaded(facts: Facts) -> Result:
    """The module is live and bound to the GPUs; vfio-pci or nothing in its place has a text of its own."""
    driver = facts.driver
    evidence = [file_evidence(f"{MODULE}/initstate", driver.initstate)]
    bdfs = ", ".join(gpu.bdf for gpu in facts.amd) or "the GPU"
    if driver.loaded is None:
        return missing(facts, "/sys/module, which says what is loaded,")
    if not is_loaded(driver):
        return result(
            "fail",
            f"amdgpu is {driver.initstate or 'not loaded'}",
            expected="loaded and live",
            fix=f"The amdgpu module is not loaded for {bdfs}. Load it and read the last kernel messages; "
            "if they say the key was rejected, see gpu.driver.secureboot.",
            commands=["modprobe amdgpu", "dmesg | tail -n 30"],
            evidence=evidence,
        )
    elsewhere = [gpu for gpu in facts.amd if gpu.driver is not None and gpu.driver != "amdgpu"]
    if elsewhere:
        told = ", ".join(f"{gpu.bdf} is bound to {gpu.driver or 'no driver'}" for gpu in elsewhere)
        return result(
            "fail" if len(elsewhere) == len(facts.amd) else "warn",
            told,
            expected="amdgpu",
            why="vfio-pci holds a GPU for a virtual machine." if any(gpu.driver == "vfio-pci" for gpu in elsewhere) else "",
            fix="Unbind it there and bind it to amdgpu, or run this inside the machine the GPU was given to.",
            evidence=[file_evidence(f"/sys/bus/pci/devices/{gpu.bdf}/driver", gpu.driver) for gpu in elsewhere[:2]],
        )
    evidence += [file_evidence(f"/sys/bus/pci/devices/{gpu.bdf}/uevent") for gpu in facts.amd if gpu.driver is None]
    return result("pass", "live and bound", evidence=evidence)


@check("gpu.driver.version", "R", "Driver version")
@amd_only
def version(facts: Facts) -> Result:
    """The *loaded* module's version, against 6.16.6. The kernel's own amdgpu has no version file and no AIS."""
    driver = facts.driver
    if driver.loaded is None:
        return missing(facts, "the loaded driver")
    if not is_loaded(driver):
        return _installed_version(driver)
    evidence = [file_evidence(f"{MODULE}/version", driver.version or "absent")]
    if not driver.version:
        return result(
            "fail",
            "the kernel's own amdgpu is loaded (it states no version)",
            expected=MINIMUM_TEXT,
            why="AIS comes with AMD's dkms driver only.",
            fix=f"Install amdgpu-dkms for kernel {facts.kernel.release or 'this kernel'}, then reboot.",
            commands=[f"{install(facts, 'amdgpu-dkms')}    # from AMD's driver repository", "reboot"],
            evidence=evidence,
        )
    enough = at_least(driver.version, MINIMUM)
    if enough is None:
        return unknown(f"the version {driver.version!r} is not understood", evidence=evidence)
    if enough:
        return result("pass", driver.version, expected=MINIMUM_TEXT, evidence=evidence)
    return result(
        "fail",
        f"{driver.version} is loaded",
        expected=MINIMUM_TEXT,
        why="This driver predates AIS.",
        fix="Install amdgpu-dkms 30.20.1 or later from AMD's driver repository, then reboot.",
        commands=[f"{install(facts, 'amdgpu-dkms')}    # from AMD's driver repository", "reboot"],
        evidence=evidence,
    )


@check("gpu.driver.match", "R", "Loaded driver is the installed one")
@amd_only
def match(facts: Facts) -> Result:
    """Loaded against on disk: by version, else srcversion. Not comparable is not a pass."""
    driver = facts.driver
    if driver.loaded is None:
        return missing(facts, "the loaded driver")
    if not is_loaded(driver):
        return result("pass", "no driver is loaded that could differ from the installed one", confidence="low")
    evidence = [
        file_evidence(f"{MODULE}/version", driver.version or "absent"),
        command_evidence("modinfo amdgpu", driver.disk.filename or "no answer" if driver.disk else "no answer"),
    ]
    if driver.disk is None:
        if not driver.disk_asked and facts.partial:
            return missing(facts, "modinfo's answer")
        why = (
            "modinfo knows no amdgpu for this kernel"
            if driver.disk_missing
            else "the module on disk could not be read (no modinfo here)"
        )
        return unknown(why, fix="Run kvdoctor on the host, where the module tree and modinfo are.", evidence=evidence)
    disk = driver.disk
    same = same_module(driver, disk)
    if not same and disk.kernel and facts.kernel.release and disk.kernel != facts.kernel.release:
        if not driver.version:
            return _not_comparable(f"the module on disk is for kernel {disk.kernel}, the kernel's own one is running", evidence)
        return unknown(f"the module on disk is for kernel {disk.kernel}, not {facts.kernel.release}", evidence=evidence)
    if same is None:
        in_tree = disk.intree or "/kernel/" in disk.filename
        return _not_comparable("the kernel's own amdgpu states neither version nor srcversion", evidence, in_tree=in_tree)
    if same:
        return result(
            "pass", driver.version or driver.srcversion, evidence=evidence, confidence="medium" if driver.disk_foreign else "high"
        )
    if driver.disk_foreign:
        return unknown("the module found is this container's, not the host's", evidence=evidence)
    return _differs(facts, evidence)


def same_module(driver: AmdDriver, disk: ModuleFile) -> bool | None:
    """Whether loaded and installed module are the same: by version, else by srcversion; None where neither states enough.

    Only one of them stating a version also tells them apart: AMD's driver always has one, the kernel's own never.
    """
    if disk.version and driver.version:
        loaded, installed = version_tuple(driver.version), version_tuple(disk.version)
        return loaded == installed if installed else disk.version == driver.version
    if disk.version or driver.version:
        return False
    if disk.srcversion and driver.srcversion:
        return disk.srcversion == driver.srcversion
    return None


def _installed_version(driver: AmdDriver) -> Result:
    """No driver is loaded: judge the installed one, so that the missing load stays the only fault."""
    installed = driver.disk.version if driver.disk else ""
    installed = installed or next((entry.version for entry in driver.dkms or [] if entry.state == "installed"), "")
    enough = at_least(installed, MINIMUM)
    if enough is None:
        return skip("amdgpu is not loaded, and which one is installed is not known")
    evidence = [command_evidence("modinfo amdgpu", installed)]
    if enough:
        return result(
            "pass", f"{installed} is installed (not loaded)", expected=MINIMUM_TEXT, evidence=evidence, confidence="medium"
        )
    return result(
        "fail",
        f"{installed} is installed (not loaded)",
        expected=MINIMUM_TEXT,
        fix="Install amdgpu-dkms 30.20.1 or later.",
        evidence=evidence,
    )


def _not_comparable(observed: str, evidence: list[Evidence], *, in_tree: bool = True) -> Result:
    if not in_tree:
        return unknown(observed, evidence=evidence)
    return result(
        "warn",
        observed,
        why="Loaded and installed driver cannot be told apart by what they state.",
        fix="Install AMD's dkms driver, which states a version.",
        evidence=evidence,
        confidence="low",
    )


def _differs(facts: Facts, evidence: list[Evidence]) -> Result:
    driver = facts.driver
    assert driver.disk is not None
    disk = driver.disk.version or driver.disk.srcversion or "the kernel's own"
    here = driver.version or "the kernel's own"
    if disk == here:
        disk, here = f"{disk} (srcversion {driver.disk.srcversion})", f"{here} (srcversion {driver.srcversion})"
    return result(
        "fail",
        f"{disk} is on disk but {here} is running",
        expected="the same",
        why="Only a reboot (or a reload of the module) puts an installed driver to work.",
        fix="Reboot. If it is still old afterwards, the initramfs carries the old module: rebuild it, and reboot again.",
        commands=["reboot", f"{rebuild_initramfs(facts)}    # only if the old driver is still there, then reboot again"],
        evidence=evidence,
    )


@check("gpu.driver.dkms", "i", "dkms state")
@amd_only
def dkms(facts: Facts) -> Result:
    """`dkms status` for the running kernel: installed, or why not. Stale trees and failed builds have texts of their own."""
    driver, kernel = facts.driver, facts.kernel.release
    if driver.dkms_stale:
        where = driver.dkms_stale if driver.dkms_stale != "?" else "under /var/lib/dkms/amdgpu"
        return result(
            "warn",
            f"dkms stops at a half-removed old tree {where}",
            why="A folder without its source makes every dkms command fail, so no later kernel gets the driver.",
            fix="Move that directory away and run dkms status again.",
            commands=[f"mv {quote(where)} /root/", "dkms status amdgpu"]
            if where.startswith("/")
            else ["ls -l /var/lib/dkms/amdgpu"],
            evidence=[command_evidence("dkms status", "Could not locate dkms.conf file")],
        )
    if driver.dkms is None:
        if facts.environment.in_container:
            return unknown("dkms is about the host, and this is a container")
        if facts.partial and not driver.dkms_asked:
            return skip("dkms status: not in this capture")
        if not facts.partial:
            return result("info", "dkms is not used on this host")
        return unknown("dkms status could not be run")
    evidence = [command_evidence("dkms status amdgpu", "; ".join(_line(entry) for entry in driver.dkms[:4]) or "no entry")]
    if driver.key_rejected and driver.dkms:
        return result(
            "pass",
            "a module is there for this kernel: the kernel refused its key, not its absence",
            evidence=[*evidence, command_evidence("modprobe amdgpu", driver.key_rejected)],
            confidence="medium",
        )
    mine = [entry for entry in driver.dkms if entry.kernel == kernel or not kernel]
    if done := [entry for entry in mine if entry.state == "installed"]:
        if "Diff between built and installed" in done[0].note:
            return result(
                "warn",
                f"{_line(done[0])}",
                fix="Rebuild and install it again.",
                commands=[f"dkms install --force {quote(f'amdgpu/{done[0].version}')}"],
            )
        return result("pass", f"{done[0].version} installed for {kernel or 'a kernel'}", evidence=evidence)
    running = [entry for entry in driver.dkms if driver.version and version_tuple(entry.version) == version_tuple(driver.version)]
    if not mine and is_loaded(driver) and any(entry.state == "installed" for entry in running):
        return result(
            "pass", f"listed for {running[0].kernel} only, but {driver.version} is loaded here", evidence=evidence, confidence="low"
        )
    return _dkms_bad(facts, mine, evidence)


def _line(entry: DkmsEntry) -> str:
    return f"{entry.version}, {entry.kernel or 'no kernel'}: {entry.state}" + (f" ({entry.note})" if entry.note else "")


def _dkms_bad(facts: Facts, mine: list[DkmsEntry], evidence: list[Evidence]) -> Result:
    driver, kernel = facts.driver, facts.kernel.release
    entries = driver.dkms or []
    others = sorted({entry.kernel for entry in entries if entry.kernel and entry.kernel != kernel and entry.state == "installed"})
    state = mine[0].state if mine else "added" if any(not entry.kernel for entry in entries) else "missing"
    fix = (
        f"Install the kernel headers and build it: dkms autoinstall -k {kernel}; "
        "the reason is in /var/lib/dkms/amdgpu/*/build/make.log."
        + (f" Or boot the kernel it was built for ({others[-1]})." if others else "")
    )
    what = f'amdgpu is "{state}" for kernel {kernel}'
    if state == "missing" and others:
        what = f"the driver was built for {', '.join(others)}, and {kernel} is running"
    if driver.dkms_failed:
        what += f"; the build failed: {driver.dkms_failed}"
        fix += " A driver that does not build on this kernel needs a newer amdgpu-dkms, or an older kernel."
    return result(
        "fail",
        what,
        expected="installed for the running kernel",
        fix=fix,
        commands=[
            install(facts, quote(f"linux-headers-{kernel}"), quote(f"kernel-devel-{kernel}")),
            f"dkms autoinstall -k {quote(kernel)}",
        ],
        evidence=evidence,
    )


@check("gpu.driver.secureboot", "i", "Secure Boot")
@amd_only
def secure_boot(facts: Facts) -> Result:
    """A fault only where the module is not loaded: a loaded one was let in. Nobody is told to switch Secure Boot off."""
    driver = facts.driver
    on = {True: "Secure Boot is on", False: "Secure Boot is off", None: "Secure Boot state not known"}[driver.secure_boot]
    if is_loaded(driver):
        return result("pass", f"{on}; the module is loaded", confidence="high" if driver.secure_boot is not None else "medium")
    if driver.key_rejected:
        return result(
            "fail",
            f"Secure Boot refuses the module's signature: {driver.key_rejected}",
            expected="a module signed with an enrolled key",
            fix="Enrol the signing certificate (confirm it at the next boot), or use a signed driver package.",
            commands=["mokutil --import /var/lib/shim-signed/mok/MOK.der", "reboot    # and confirm the key in the blue screen"],
            evidence=[command_evidence("modprobe amdgpu", driver.key_rejected)],
        )
    if driver.secure_boot is False:
        return result("pass", on)
    if driver.secure_boot:
        return result(
            "warn", f"{on}, and amdgpu is not loaded", fix="Try modprobe amdgpu and read its answer.", commands=["modprobe amdgpu"]
        )
    return absent(facts, "the Secure Boot state")
