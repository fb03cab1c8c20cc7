"""The dashboard file asks only for what a daemon publishes: names and labels, checked against a real /metrics."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.kvd.service.test_window import ask, free_port
from tests.support.daemon import MakeDaemon
from tests.support.processes import wait_until

BOARD = json.loads((Path(__file__).resolve().parents[3] / "daemon" / "grafana" / "kvd.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
SCRAPER = {"instance", "job"}
"""Labels that Prometheus itself adds."""


def published(text: str) -> dict[str, set[str]]:
    """Each metric of a /metrics page and the labels it has."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^([a-z_]+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def asked(expression: str) -> list[tuple[str, set[str]]]:
    """Each metric of a query and the labels it is selected by."""
    pairs = re.findall(r"\b(kvd_[a-z_]+)(?:\{([^}]*)\})?", expression)
    return [(name, set(re.findall(r"(\w+)\s*=", selector))) for name, selector in pairs]


@pytest.mark.real("kvd")
def test_every_metric_and_label_it_names_is_published(kvd_daemon: MakeDaemon) -> None:
    port = free_port()
    daemon = kvd_daemon("--metrics-port", str(port), tier="32MiB")
    with daemon.client(namespace="tenant") as client:
        assert client.put(bytes(32), b"v")
    wait_until(lambda: "kvd_namespace_sets_total" in ask(port, "/metrics")[1], what="the namespace to be shown")
    there = published(ask(port, "/metrics")[1])
    assert len(EXPRESSIONS) > 30
    for expression in EXPRESSIONS:
        names = asked(expression)
        assert names, f"no metric in {expression}"
        for name, labels in names:
            assert name in there, f"{name} is not published: {expression}"
            assert labels - SCRAPER <= there[name], f"{name} has no labels {labels - there[name]}"
        grouped = {word.strip() for by in re.findall(r"\bby \(([^)]*)\)", expression) for word in by.split(",")}
        assert grouped - SCRAPER <= set.union(*(there[name] for name, _ in names)), expression
    for variable in BOARD["templating"]["list"]:
        for name, _ in asked(str(variable["query"])):
            assert name in there


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", target["expr"])))) | SCRAPER
            assert wanted <= kept, target


def test_panels_have_their_own_place_title_and_unit() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
