"""The registry of checks, and what several rules share.

A rule is `(Facts) -> Result | list[Result]`, registered by `@check(id, need, title)`; the group is the id's first part. Ids
are API. Rules never raise: where a fact is None they say `unknown`, or `skip` when the capture is partial and the fact
belongs to what hand-made captures leave out (see `absent`).
"""

import functools
import importlib
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvdoctor.facts import Facts, Gpu, KvPath
from kvdoctor.parse.kfd import node_bdf, smi_guest, smi_names
from kvdoctor.results import Confidence, Evidence, Need, Result, Status

Rule = Callable[[Facts], "Result | list[Result]"]
Answer = TypeVar("Answer", bound="Result | list[Result]")

GROUPS = {
    "env": "Environment",
    "gpu": "GPU",
    "driver": "Driver",
    "ais": "AIS",
    "kernel": "Kernel",
    "rocm": "ROCm",
    "nv": "NVIDIA GDS",
    "storage": "Storage",
    "proof": "Proof",
    "limits": "Limits",
    "cfg": "Configuration",
    "kvd": "kvd",
}
"""Group key -> heading, in the order of the report."""


@dataclass(frozen=True)
class Check:
    id: str
    need: Need
    title: str
    rule: Rule
    group: str


SHM = "/dev/shm"  # noqa: S108 - the folder that is judged

CHECKS: dict[str, Check] = {}
"""Every check by id, filled as the rule modules are imported (see `registry`)."""


def group_of(check_id: str) -> str:
    """The group of an id: its first part, but for the driver's, the topology's and the proofs'."""
    if check_id.startswith("gpu.driver."):
        return "driver"
    return {"p2p.topology": "kernel", "storage.selfcheck": "proof", "ais.proof": "proof"}.get(check_id, check_id.split(".", 1)[0])


def check(check_id: str, need: Need, title: str) -> Callable[[Callable[[Facts], Answer]], Callable[[Facts], Answer]]:
    """Register a rule."""

    def register(rule: Callable[[Facts], Answer]) -> Callable[[Facts], Answer]:
        assert check_id not in CHECKS
        CHECKS[check_id] = Check(check_id, need, title, rule, group_of(check_id))
        return rule

    return register


MODULES = (
    *("environment", "gpu", "driver", "ais", "kernel", "rocm", "nvidia"),
    *("storage", "backing", "directio", "proof", "limits", "config", "health"),
)


@functools.cache
def registry() -> dict[str, Check]:
    """All checks, in the order of the report: rule modules are imported when they are first asked for."""
    for name in MODULES:
        importlib.import_module(f"kvdoctor.rules.{name}")
    order = list(GROUPS)
    return {item.id: item for item in sorted(CHECKS.values(), key=lambda item: order.index(item.group))}


def result(
    status: Status,
    observed: str = "",
    *,
    expected: str = "",
    why: str = "",
    fix: str = "",
    commands: list[str] | None = None,
    evidence: list[Evidence] | None = None,
    confidence: Confidence = "high",
    scope: str = "host",
) -> Result:
    return Result(
        status=status,
        observed=observed,
        expected=expected,
        why=why,
        fix=fix,
        commands=commands or [],
        evidence=evidence or [],
        confidence=confidence,
        scope=scope,
    )


def skip(why: str, scope: str = "host") -> Result:
    return Result(status="skip", observed=why, scope=scope)


def unknown(why: str, *, fix: str = "", scope: str = "host", evidence: list[Evidence] | None = None) -> Result:
    return Result(status="unknown", observed=why, fix=fix, scope=scope, evidence=evidence or [], confidence="low")


def other_host(what: str, scope: str = "host") -> Result:
    """A question about a process, asked of another root: this process's answer would be about the wrong host."""
    return skip(f"{what} can be told only on that host", scope)


def absent(facts: Facts, what: str, scope: str = "host", *, fix: str = "") -> Result:
    """The fact is not there: hand-made captures lack it as a rule (skip), or this host would not tell (unknown)."""
    if facts.partial:
        return skip(f"{what}: not in this capture", scope)
    return unknown(f"{what} could not be read", scope=scope, fix=fix)


def unanswered(facts: Facts, key: str, what: str) -> Result:
    """As `absent`, of a system call that may not have come back."""
    if facts.denied.get(f"({key})") == "ETIMEDOUT":
        return unknown(f"{what} could not be asked for before the deadline", fix="Give it more time (--deadline).")
    return absent(facts, what)


def missing(facts: Facts, what: str, scope: str = "host", *, fix: str = "") -> Result:
    """A fact that its gate cannot do without: unknown, also in a hand-made capture, unless that holds command output only."""
    if facts.partial and not facts.files_captured:
        return skip(f"{what}: not in this capture", scope)
    return unknown(f"{what} {'is not in this capture' if facts.captured else 'could not be read'}", scope=scope, fix=fix)


# Commands for --fix, in the words of the host's distribution. Names that come from the host go through `quote`.


def quote(name: str) -> str:
    """A name as one word of a shell command: mount points may hold blanks, and a tree from elsewhere may mean harm.

    What does not print is written in octal, so that the line can be read, pasted, and still means that very name.
    """
    if name.isprintable():
        return shlex.quote(name)
    # A minus at the head would be an option of printf.
    kept = {byte for byte in range(32, 127) if chr(byte) not in "%\\'-"}
    told = "".join(chr(byte) if byte in kept else f"\\{byte:03o}" for byte in os.fsencode(name))
    # A command substitution drops newlines at the end of a name: only bash's own quoting keeps those.
    return f"$'{told}'" if name.endswith("\n") else f"\"$(printf '{told}')\""


def _red_hat(facts: Facts) -> bool:
    return bool(re.search(r"Red Hat|Rocky|Alma|Oracle|CentOS|Fedora|Amazon Linux", facts.environment.os_name))


def install(facts: Facts, debian: str, red_hat: str = "") -> str:
    """The command that installs a package here ('zypper' on SUSE; Debian's where the distribution is not known)."""
    if _red_hat(facts):
        return f"dnf install {red_hat or debian}"
    return f"zypper install {red_hat or debian}" if "SUSE" in facts.environment.os_name else f"apt-get install {debian}"


def rebuild_initramfs(facts: Facts) -> str:
    """The command that puts new module options, or a new module, into the initramfs."""
    return "dracut -f" if _red_hat(facts) or "SUSE" in facts.environment.os_name else "update-initramfs -u"


# Which GPUs there are


def has_amd(facts: Facts) -> bool:
    return bool(facts.amd) or (not facts.gpus and bool(smi_names(_tool_text(facts, "amd-smi"))))


def pci_known(facts: Facts) -> bool:
    """Whether every PCI function was seen: only then does "no GPU among them" say that there is none."""
    return facts.pci_captured and not facts.pci_unread


def has_nvidia(facts: Facts) -> bool:
    """NVIDIA by PCI, or, where a capture holds no PCI tree, by its driver's files and tools."""
    if facts.nvidia_gpus:
        return True
    here = facts.nvidia
    traces = (here.gdscheck is not None, here.cufile_error is not None, bool(here.driver_version), here.regkeys is not None)
    installed = bool(here.cufile) or here.fs_loaded is True
    return facts.partial and not facts.gpus and not facts.pci_captured and (any(traces) or installed)


def gpu_unjudged(facts: Facts) -> bool:
    """No GPU was seen, and nothing says that there is none: neither a PCI tree read whole nor the vendor's own checker."""
    if has_amd(facts) or has_nvidia(facts) or pci_known(facts):
        return False
    told = facts.partial and facts.ais_check is not None and facts.ais_check.amdgpu is False
    return bool(facts.pci_unread) or not told


def no_gpu(facts: Facts) -> bool:
    return not has_amd(facts) and not has_nvidia(facts) and not gpu_unjudged(facts)


def amd_only(rule: Callable[[Facts], Answer]) -> Callable[[Facts], Answer | Result]:
    """Skip a rule where no AMD GPU is."""

    def guarded(facts: Facts) -> Answer | Result:
        return rule(facts) if has_amd(facts) else skip("no AMD GPU")

    guarded.__doc__, guarded.__name__ = rule.__doc__, getattr(rule, "__name__", "rule")
    return guarded


def nvidia_only(rule: Callable[[Facts], Answer]) -> Callable[[Facts], Answer | Result]:
    """Skip a rule where no NVIDIA GPU is."""

    def guarded(facts: Facts) -> Answer | Result:
        return rule(facts) if has_nvidia(facts) else skip("no NVIDIA GPU")

    guarded.__doc__, guarded.__name__ = rule.__doc__, getattr(rule, "__name__", "rule")
    return guarded


def each_path(facts: Facts, rule: Callable[[Facts, KvPath], Result]) -> list[Result]:
    """One result a KV path; a single skip where there is none."""
    if not facts.paths:
        none = "no KV path to judge: give one with --path"
        return [skip(none) if facts.partial else unknown(none)]
    found = []
    for path in facts.paths:
        answer = rule(facts, path)
        answer.scope = path.path
        found.append(answer)
    return found


def direct_only(facts: Facts, answer: Result) -> Result:
    """A storage answer that matters only to GPU-direct: on a host without a GPU it informs, whatever it is."""
    if no_gpu(facts) and answer.bad:
        answer.status = "info"
        answer.why = "It would matter to GPU-direct only, and there is no GPU here."
        answer.fix, answer.commands = "", []
    return answer


# Kinds of AMD GPU

VF_IDS = {"7410", "74b5", "74b6", "74b9", "74bd", "75b0", "75b3"}
"""PCI ids of Instinct virtual functions as pci.ids names them (MI210, MI300X, MI308X, MI325X, MI350X, MI355X)."""
APU_IDS = {
    *("74a0", "1586", "150e", "1114", "15bf", "15c8", "1900", "1901", "164e", "13c0", "1681", "1506", "1636", "1638", "164c"),
    *("15d8", "15dd", "163f"),
}
"""PCI ids of APUs: MI300A, Strix Halo, Strix, Krackan, Phoenix, Hawk Point, Raphael, Granite Ridge, Rembrandt, and older."""


def _tool_text(facts: Facts, key: str) -> str:
    run = facts.tool(key)
    return run.out if run else ""


def smi_name(facts: Facts, gpu: Gpu) -> str:
    """amd-smi's market name of a GPU; with one GPU in the table it is that one, whatever address the guest shows."""
    if gpu.name:
        return gpu.name
    names = smi_names(_tool_text(facts, "amd-smi"))
    if gpu.bdf in names:
        return names[gpu.bdf]
    return next(iter(names.values())) if len(names) == 1 and len(facts.amd) == 1 else ""


def vf_reason(facts: Facts, gpu: Gpu) -> str:
    """Why a GPU is a virtual function, or ''. A whole GPU passed through to a guest is none."""
    if gpu.virtual_function:
        return "its PCI function has a physfn link"
    if gpu.virtualization == "guest":
        return "its driver says it is a guest"
    if gpu.virtualization == "passthrough":
        return ""
    name = smi_name(facts, gpu)
    if name.endswith(" VF"):
        return f"amd-smi calls it {name}"
    if gpu.device in VF_IDS:
        return f"PCI id 1002:{gpu.device} is a virtual function's"
    warned = facts.ais_check.virtual_functions if facts.ais_check else []
    return next((f"ais-check warns: {text}" for text in warned if text.startswith(gpu.bdf)), "")


def apu_reason(facts: Facts, gpu: Gpu) -> str:
    """Why a GPU shares memory with the CPU, or ''."""
    if gpu.device in APU_IDS:
        return f"PCI id 1002:{gpu.device} is an APU's"
    for node in facts.kfd or []:
        mine = node_bdf(node) == gpu.bdf or len(facts.amd) == 1
        if mine and node.simds > 0 and node.cpu_cores > 0:
            return f"KFD node {node.node} has CPU cores and SIMDs"
    return ""


def candidates(facts: Facts) -> list[Gpu]:
    """The AMD GPUs that could do GPU-direct: neither VF nor APU; all of them where none is left."""
    able = [gpu for gpu in facts.amd if not vf_reason(facts, gpu) and not apu_reason(facts, gpu)]
    return able or facts.amd


def in_virtual_machine(facts: Facts) -> str:
    """What says that this is a virtual machine, or ''."""
    if facts.environment.virtual_machine:
        return facts.environment.virtual_machine
    return "amd-smi says Linux Guest" if smi_guest(_tool_text(facts, "amd-smi")) else ""
