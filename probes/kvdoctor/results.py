"""A rule's answer, and a whole report: plain records from which text, JSON, fixes and diffs are all made.

Status words: pass, info (true, and nothing to do), warn, fail, unknown (could not be learned; never shown as good), skip
(does not apply here, or was not captured). Need: R is required for GPU-direct, P for the POSIX tier, i informs.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "info", "warn", "fail", "unknown", "skip"]
Need = Literal["R", "P", "i"]
Confidence = Literal["high", "medium", "low"]

WORST: tuple[Status, ...] = ("skip", "info", "pass", "unknown", "warn", "fail")
"""From best to worst: what one word for several devices is chosen by."""

REPORT_SCHEMA = "kvdoctor.report/1"


@dataclass
class Evidence:
    """Where a fact was read: kind is file, command, system or capture; `source` a path or a command; `excerpt` its words."""

    kind: str
    source: str
    excerpt: str = ""


@dataclass
class Result:
    """One check of one thing. `scope` is "host", a PCI address or a path; `caused_by` is the id of the check that explains it."""

    status: Status
    observed: str = ""
    expected: str = ""
    why: str = ""
    fix: str = ""
    commands: list[str] = field(default_factory=list)
    """Shell lines for --fix; printed, never run."""
    evidence: list[Evidence] = field(default_factory=list)
    confidence: Confidence = "high"
    scope: str = "host"
    id: str = ""
    group: str = ""
    need: Need = "i"
    title: str = ""
    caused_by: str = ""
    cost_ms: float = 0.0
    blind: bool = False
    """Its evidence is there (or was, in a capture) and could not be read, or its proof did not end."""

    @property
    def bad(self) -> bool:
        return self.status in ("warn", "fail", "unknown")


@dataclass
class Report:
    """Everything said about one host. `verdict` is about GPU-direct, `posix` about the tier without it."""

    verdict: str
    posix: str
    results: list[Result]
    selected: bool = False
    """Only some checks were asked for, so the verdicts are about those."""
    roots: list[str] = field(default_factory=list)
    """Ids of root causes, the one to mend first at the head."""
    next_step: str = ""
    host: dict[str, Any] = field(default_factory=dict)
    abandoned: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def by_id(self, check_id: str) -> list[Result]:
        return [result for result in self.results if result.id == check_id]

    def to_json(self) -> dict[str, Any]:
        """The stable JSON body (schema kvdoctor.report/1 without the schema field itself)."""
        from kvtools import __version__

        return {
            "tool": {"name": "kvdoctor", "version": __version__},
            "sources_version": SOURCES_VERSION,
            "host": self.host,
            "overall": {
                "verdict": self.verdict,
                "posix": self.posix,
                "selected": self.selected,
                "root_causes": self.roots,
                "next_step": self.next_step,
            },
            "results": [_result_json(result) for result in self.results],
            "abandoned": self.abandoned,
            "seconds": self.seconds,
        }


SOURCES_VERSION = "2026-11"
"""When the rules were last checked against the kernel driver, hipFile and GDS they describe."""


def _result_json(result: Result) -> dict[str, Any]:
    body = asdict(result)
    order = ("id", "group", "need", "title", "scope", "status", "confidence", "observed", "expected", "evidence", "why", "fix")
    return {key: body[key] for key in (*order, "commands", "caused_by", "cost_ms")}


def file_evidence(path: str, excerpt: object = "") -> Evidence:
    return Evidence("file", path, _short(excerpt))


def command_evidence(command: str, excerpt: object = "") -> Evidence:
    return Evidence("command", command, _short(excerpt))


def _short(value: object) -> str:
    text = "" if value is None else str(value).strip()
    return text if len(text) <= 300 else text[:297] + "..."


def worst(results: list[Result]) -> Status:
    """The worst status of several results ("skip" for none)."""
    return max((result.status for result in results), key=WORST.index, default="skip")
