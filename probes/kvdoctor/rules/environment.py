"""Where this runs, and whose commands these are."""

from kvdoctor.facts import Facts
from kvdoctor.results import Evidence, Result, file_evidence
from kvdoctor.rules.base import check, in_virtual_machine, result, skip, unknown


@check("env.container", "i", "Container")
def container(facts: Facts) -> Result:
    """Inform: which markers of a container there are, and what cannot be seen from inside one."""
    markers = facts.environment.container_markers
    if not markers:
        return result("info", "no marker of a container")
    limits = (
        "" if not facts.environment.in_container else "modinfo, dkms, /boot and the kernel log are about the container, or absent"
    )
    return result(
        "info",
        "; ".join(markers),
        why=limits or "A marker alone proves nothing: an image's files may run as a virtual machine.",
        fix="Run kvdoctor on the host, or bind-mount / read-only and use --root /host." if facts.environment.in_container else "",
        evidence=[file_evidence("/proc/1/cgroup"), file_evidence("/proc/self/mountinfo")],
    )


@check("env.capture", "R", "Evidence is whole")
def capture(facts: Facts) -> Result:
    """All that a capture was written with must still be there: evidence that went missing is no evidence of absence."""
    if not facts.captured:
        return result("info", "looked at directly")
    if facts.lost:
        shown = ", ".join(facts.lost[:3]) + (f" and {len(facts.lost) - 3} more" if len(facts.lost) > 3 else "")
        return unknown(
            f"the capture no longer holds, or does not let be read: {shown}",
            fix="Copy the capture again, whole and readable (tar keeps its links), or write it anew: kvdoctor capture DIR.",
            evidence=[Evidence("capture", "index.json", f"{len(facts.lost)} of its entries are gone, shorter, or of another kind")],
        )
    if facts.partial:
        return result("info", "made by hand: what it lacks proves nothing")
    return result("info", "whole")


@check("env.privilege", "i", "Privileges")
def privilege(facts: Facts) -> Result:
    """Inform: what root would add. Nothing here needs it."""
    here = facts.environment
    if facts.foreign:
        return skip("privileges of this process: they say nothing about that host's")
    if here.euid is None:
        return skip("user and capabilities: not in this capture")
    more = []
    if "SYSLOG" not in here.capabilities and here.dmesg_restrict != "0":
        more.append("the kernel log")
    if "SYS_ADMIN" not in here.capabilities:
        more.append("PCI configuration space (ACS)")
    if here.euid != 0:
        more.append("other users' engine environments")
    lock = f", lockdown {here.lockdown}" if here.lockdown and here.lockdown != "none" else ""
    return result(
        "info",
        f"uid {here.euid}{lock}" + ("; root would add: " + ", ".join(more) if more else ""),
        evidence=[file_evidence("/proc/self/status", f"CapEff has {', '.join(here.capabilities) or 'none that matter'}")],
    )


@check("env.virt", "i", "Virtual machine")
def virt(facts: Facts) -> Result:
    """Inform: a virtual machine hides topology, so the PCIe checks say less in one."""
    what = in_virtual_machine(facts)
    return result("info", f"virtual machine: {what}" if what else "no sign of a virtual machine")


@check("cfg.scripts", "i", "Console scripts")
def scripts(facts: Facts) -> Result:
    """Warn where another distribution also installs a command of ours: the one installed last owns the name."""
    if not facts.scripts:
        return skip("no installed console script to compare")
    clash = [
        f"{item.name}: {', '.join(item.owners)}"
        for item in facts.scripts
        if len(item.owners) > 1 or item.owners not in (["kvtools"], [])
    ]
    if not clash:
        return result("pass", "kvctl, kvtop and the others belong to kvtools")
    return result(
        "warn",
        "; ".join(clash),
        expected="one owner, kvtools",
        why="The distribution that was installed last owns the command; the other one's pages and habits do not apply to it.",
        fix="Use `kvtools ctl` and `kvtools top`, which nobody else installs, or put one of the two into its own environment.",
    )
