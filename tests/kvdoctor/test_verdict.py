"""Verdicts, causes, exit statuses, and the one-line answers other programs ask for."""

from collections.abc import Callable

import pytest

from kvdoctor import api
from kvdoctor.facts import AmdDriver, Block, DkmsEntry, Facts, ModuleFile
from kvdoctor.verdict import exit_code, judge
from tests.kvdoctor.hosts import VRAM, gpu, host, path

# Verdicts


def test_no_gpu_condemns_neither_storage_nor_limits() -> None:
    facts = host(gpus=[], paths=[path(stack=[Block(name="vda", kind="virtio")])])
    report = judge(facts)
    assert (report.verdict, report.posix) == ("no-gpu", "usable")
    assert exit_code(report, strict=False) == 7
    assert report.by_id("storage.backing")[0].status == "info"
    assert report.next_step == ""


@pytest.mark.parametrize(
    ("spoil", "verdict", "posix", "code", "strict"),
    [
        (lambda facts: setattr(facts.limits, "memlock", 65536), "ready-with-warnings", "usable", 0, 1),
        (lambda facts: setattr(facts.limits, "shm", 64 << 20), "ready-with-warnings", "unusable", 0, 1),
        (lambda facts: setattr(facts.kernel, "symbols", None), "undetermined", "usable", 7, 7),
        (lambda facts: setattr(facts.gpus[0], "vram", VRAM * 2), "not-ready", "usable", 1, 1),
        (lambda facts: setattr(facts.paths[0], "free", 1 << 30), "ready-with-warnings", "degraded", 0, 1),
    ],
)
def test_verdicts(spoil: Callable[[Facts], None], verdict: str, posix: str, code: int, strict: int) -> None:
    facts = host()
    spoil(facts)
    report = judge(facts)
    assert (report.verdict, report.posix) == (verdict, posix)
    assert (exit_code(report, strict=False), exit_code(report, strict=True)) == (code, strict)


def test_causes_never_go_in_circles() -> None:
    facts = host(gpus=[gpu(p2pmem=None, device="74b5")])
    facts.driver = AmdDriver(loaded=True, initstate="live", version="6.14.14", disk_asked=True)
    facts.driver.disk, facts.driver.dkms = ModuleFile(version="6.16.6"), [DkmsEntry("6.16.6", "6.8.0", "x86_64", "installed")]
    facts.kernel.symbols = []
    report = judge(facts)
    for item in report.results:
        seen, at = set(), item.id
        while parents := {other.caused_by for other in report.results if other.id == at and other.caused_by}:
            assert at not in seen
            seen.add(at)
            at = next(iter(parents))
    assert report.roots[:2] == ["gpu.vf", "gpu.driver.match"], "what no reboot can mend comes first"


# What other programs ask


def test_one_line_reasons() -> None:
    assert api.direct_reason("/nvme/kv", facts=host()) == ""
    assert api.direct_reason("/nvme/kv", facts=host(gpus=[])) == "no AMD or NVIDIA GPU on this host (gpu.present)"
    facts = host()
    facts.driver.param_ais_disabled, facts.gpus[0].p2pmem = "1", None
    assert api.direct_reason("/nvme/kv", facts=facts) == "AIS: switched off by ais_disabled=1 (module parameter) (ais.param)"
    assert (
        api.posix_reason("/nvme/kv", facts=host(paths=[path(writable=False)]))
        == "uid 0 itself may not write there (storage.writable)"
    )
    assert api.posix_reason("/nvme/kv", facts=host()) == ""


def test_warnings_are_root_causes_only() -> None:
    facts = host()
    facts.driver.version, facts.kernel.symbols = "6.14.14", ["p2pdma_pgmap_ops"]
    facts.gpus[0].p2pmem = None
    facts.driver.disk = ModuleFile(version="6.16.6")
    assert api.warnings(judge(facts)) == ["fail: Driver: 6.16.6 is on disk but 6.14.14 is running (gpu.driver.match)"]
    assert api.warnings(judge(host())) == []
