"""What --prove found out: real I/O is the last word."""

import errno

from kvdoctor.facts import Facts, KvPath
from kvdoctor.results import Result, command_evidence
from kvdoctor.rules.base import check, each_path, no_gpu, result, skip, unknown
from kvtools.errors import hint_for
from kvtools.units import format_rate, format_size

ADVICE = {
    errno.EACCES: "Run the proof as the daemon's user, or give that user the directory.",
    errno.EPERM: "Run the proof as the daemon's user, or give that user the directory.",
    errno.ENOTDIR: "Name a directory.",
    errno.ENOENT: "Create the directory first.",
    errno.EINVAL: "This file system does not take what was asked of it: see storage.odirect and storage.fs.",
    errno.EOPNOTSUPP: "This file system does not take what was asked of it: see storage.odirect and storage.fs.",
}
"""What to do about an error of the proof, besides what its number says of itself (`kvtools.errors.hint_for`)."""
GIVEN_UP = (
    "Give it more time (--deadline). If that does not help, the kernel log says what the file system or its device waits for."
)
NOT_RUN = "not run: --prove does real I/O below the path"


@check("storage.selfcheck", "P", "Real I/O")
def selfcheck(facts: Facts) -> list[Result]:
    """A direct write, an fsync and a direct read of the same bytes, with four threads; only with --prove."""

    def rule(facts: Facts, path: KvPath) -> Result:
        proof = path.proof
        if proof is None:
            return skip(NOT_RUN)
        if proof.given_up:
            return unknown(proof.error, fix=GIVEN_UP)
        if proof.error:
            if advice := hint_for(OSError(proof.errno or 0, ""), ADVICE.get(proof.errno or 0, "")):
                return result("fail", proof.error, fix=advice[:1].upper() + advice[1:].removesuffix(".") + ".")
            return result("fail", proof.error, fix="The kernel log names the device's error.", commands=["dmesg | tail -n 30"])
        if not proof.same:
            return result(
                "fail", "other bytes came back than were written", fix="Do not use this path: check drive, controller, memory."
            )
        rates = f"write {format_rate(proof.write_bytes_per_s or 0)}, read {format_rate(proof.read_bytes_per_s or 0)}"
        how = "direct" if proof.direct else "buffered"
        told = f"{rates} ({format_size(proof.bytes)}, {how}, fsync {1000 * (proof.fsync_s or 0):.0f} ms)"
        if not proof.direct:
            return result("warn", told, why="O_DIRECT was refused: these rates are the page cache's.", fix="See storage.odirect.")
        return result("pass", told)

    return each_path(facts, rule)


@check("ais.proof", "R", "GPU-direct, proven")
def direct(facts: Facts) -> Result | list[Result]:
    """A strict write and read between GPU memory and a file of the path; only with --prove."""
    if no_gpu(facts):
        return skip("no GPU")

    def rule(facts: Facts, path: KvPath) -> Result:
        proof = path.gpu_proof
        if proof is None:
            return skip(NOT_RUN)
        evidence = [command_evidence(f"{proof.library}, strict mode", proof.error or f"{proof.bytes} bytes each way")]
        if proof.given_up:
            return unknown(proof.error, fix=GIVEN_UP, evidence=evidence)
        if proof.step == "load":
            return skip(f"{proof.library} is not here: {proof.error}")
        if proof.error:
            return result(
                "fail",
                f"refused in strict mode: {proof.error}",
                why="Without strict mode the library would quietly have copied through the CPU.",
                fix="The failed checks above say which gate is closed; the kernel log has the driver's own word.",
                commands=["dmesg | grep -i ais | tail"],
                evidence=evidence,
            )
        if not proof.same:
            return result("fail", "other bytes came back than were written", fix="Do not use GPU-direct here.", evidence=evidence)
        rates = f"write {format_rate(proof.write_bytes_per_s or 0)}, read {format_rate(proof.read_bytes_per_s or 0)}"
        if proof.counted == 0:
            return result(
                "fail", f"{rates}, but the driver counted no peer DMA", why="The bytes went through the CPU.", evidence=evidence
            )
        counted = "" if proof.counted is None else f"; the driver counted {format_size(proof.counted)}"
        return result("pass", rates + counted, evidence=evidence, confidence="medium" if proof.counted is None else "high")

    return each_path(facts, rule)
