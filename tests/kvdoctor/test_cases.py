"""Every host case gets exactly the verdicts of its manifest: each check named there, and both overall words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvdoctor import api
from kvdoctor.results import worst
from kvdoctor.rules.base import registry


def test_case(case_name: str, laid_out: Callable[[str], tuple[Path, dict[str, Any]]]) -> None:
    capture, wanted = laid_out(case_name)
    report = api.judge(api.collect_capture(capture))
    got = {check: worst(report.by_id(check)) for check in wanted["expected"]}
    assert got == wanted["expected"]
    assert report.verdict == wanted["expected_overall"]
    assert report.posix == wanted["expected_posix"]
    assert {item.id for item in report.results} == set(registry()), "every check is present, even when skipped"
