"""Room and ceilings: /dev/shm, the control group's memory, locked memory, open files."""

from kvdoctor.facts import Facts
from kvdoctor.results import Result, file_evidence
from kvdoctor.rules.base import SHM, check, other_host, result, skip, unanswered
from kvtools.units import format_size

MIB, GIB = 1 << 20, 1 << 30
NOFILE_WANTED = 4096


@check("limits.shm", "P", "Shared memory")
def shm(facts: Facts) -> Result:
    """Shared memory holds segments and the engine's own queues. kvd's arena is a memfd and does not count here."""
    limits = facts.limits
    if limits.shm is None and facts.foreign:
        return other_host("the size of /dev/shm")
    if limits.shm is None:
        return unanswered(facts, "shm", "the size of /dev/shm")
    evidence = [file_evidence(limits.shm_source, format_size(limits.shm))]
    fix = "Start the container with --shm-size 16g or --ipc=host; Kubernetes: an emptyDir with medium Memory on /dev/shm."
    commands = ["docker run --shm-size 16g ..."] if facts.environment.in_container else ["mount -o remount,size=50% /dev/shm"]
    if limits.shm <= 64 * MIB:
        alone = facts.engines.log_tensor_parallel == 1
        return result(
            "warn" if alone else "fail",
            f"{SHM} has {format_size(limits.shm)}",
            expected="1 GiB or more",
            why="The workers of one engine exchange tensors through it: with 64 MiB an engine of several ranks dies or hangs.",
            fix=fix,
            commands=commands,
            evidence=evidence,
        )
    if limits.shm_free is not None and limits.shm_free < MIB:
        return result(
            "fail",
            f"{SHM} is full ({format_size(limits.shm_free)} free)",
            fix="Remove what lies there: kvctl prune, ls -l /dev/shm.",
            evidence=evidence,
        )
    if limits.shm < GIB:
        return result(
            "warn",
            f"{SHM} has {format_size(limits.shm)}",
            expected="1 GiB or more",
            fix=fix,
            commands=commands,
            evidence=evidence,
        )
    return result("pass", format_size(limits.shm), evidence=evidence)


@check("limits.memcg", "P", "Memory of the control group")
def memcg(facts: Facts) -> Result:
    """memory.max of the daemon's control group against its arena: the arena is charged there."""
    limits = facts.limits
    if limits.memory_max is None:
        return skip("no control group limit is known")
    evidence = [file_evidence(f"{limits.memory_group}/memory.max", limits.memory_max)]
    if limits.memory_max < 0:
        return result("pass", "no limit", evidence=evidence)
    size = format_size(limits.memory_max)
    if limits.arena is None:
        return result("info", f"limit {size}; no arena size is known to hold against it", evidence=evidence)
    arena = format_size(limits.arena)
    if limits.memory_max < limits.arena:
        return result(
            "fail",
            f"limit {size}, arena {arena}",
            fix="Raise the limit, or lower --max-bytes: the daemon would be killed.",
            evidence=evidence,
        )
    if limits.memory_max < limits.arena + GIB:
        return result(
            "warn", f"limit {size}, arena {arena}", expected="1 GiB more than the arena", fix="Raise the limit.", evidence=evidence
        )
    return result("pass", f"limit {size}, arena {arena}", evidence=evidence)


@check("limits.memlock", "i", "Locked memory")
def memlock(facts: Facts) -> Result:
    """RLIMIT_MEMLOCK: RDMA and Mooncake pin memory. CAP_IPC_LOCK overrides it."""
    limits = facts.limits
    if limits.memlock is None and facts.foreign:
        return other_host("what a process there may lock")
    if limits.memlock is None:
        return unanswered(facts, "ulimit", "the locked-memory limit")
    if limits.memlock < 0:
        return result("pass", "unlimited")
    if limits.cap_ipc_lock:
        return result("pass", f"{format_size(limits.memlock)}, lifted by CAP_IPC_LOCK")
    return result(
        "warn",
        f"locked memory is limited to {format_size(limits.memlock)}",
        expected="unlimited",
        why="RDMA and Mooncake pin whole buffers.",
        fix="Use --ulimit memlock=-1, LimitMEMLOCK=infinity or the capability IPC_LOCK.",
        commands=["docker run --ulimit memlock=-1 ...    # or in the unit: LimitMEMLOCK=infinity"],
    )


@check("limits.nofile", "i", "Open files")
def nofile(facts: Facts) -> Result:
    """hipFile opens a second descriptor for each registered file."""
    limits = facts.limits
    if limits.nofile is None and facts.foreign:
        return other_host("how many files a process there may open")
    if limits.nofile is None:
        return unanswered(facts, "ulimit", "the open-files limit")
    if 0 <= limits.nofile < NOFILE_WANTED:
        return result(
            "warn",
            f"{limits.nofile} open files are allowed",
            expected=f"{NOFILE_WANTED} or more",
            why="hipFile needs two descriptors a chunk file.",
            fix=f"Raise it to {NOFILE_WANTED} or more (LimitNOFILE, --ulimit nofile).",
            commands=["docker run --ulimit nofile=1048576 ...    # or in the unit: LimitNOFILE=1048576"],
        )
    return result("pass", "unlimited" if limits.nofile < 0 else str(limits.nofile))
