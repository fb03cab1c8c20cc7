"""daemon/CONNECTOR.md: its tables are what the code would write, its links lead somewhere, its command lines exist."""

import json
import re

import pytest

from tests.support.generated import CONNECTOR, CONNECTOR_BLOCKS, block
from tests.support.typer_tree import walk

TEXT = CONNECTOR.read_text()
FENCES = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", CONNECTOR_BLOCKS)
def test_generated_block_is_up_to_date(name: str) -> None:
    assert block(TEXT, name) == CONNECTOR_BLOCKS[name](), "python -m tests.support.generated --write"


def test_links_lead_to_files() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", TEXT) if "://" not in target]
    assert targets
    assert [target for target in targets if not (CONNECTOR.parent / target).exists()] == []


def test_every_command_and_option_exists() -> None:
    nodes = {node.words: node for node in walk("kvd")}
    lines = [line for fence in FENCES for line in fence.splitlines() if line.startswith("kvd ")]
    assert len(lines) >= 5
    for line in lines:
        words = line.split()[1:]
        assert (words[0],) in nodes, line
        assert {word for word in words if word.startswith("--")} <= nodes[words[0],].options, line


def test_every_transfer_configuration_is_json_with_known_roles() -> None:
    found = [json.loads(text) for text in re.findall(r"--kv-transfer-config '(\{.*?\})'", "\n".join(FENCES), re.DOTALL)]
    assert len(found) == 5
    for one in found:
        children = one.get("kv_connector_extra_config", {}).get("connectors", [])
        assert {one["kv_role"], *(child["kv_role"] for child in children)} <= {"kv_both", "kv_producer", "kv_consumer"}
        if children:
            assert children[0]["kv_connector"] == "KvdConnector", "the first that offers a prefix loads it"
            assert one["kv_load_failure_policy"] == "recompute"


def test_what_kvd_why_can_say_is_on_the_page() -> None:
    from kvd.store.tombstones import Fate

    words = {Fate.EVICTED: "evicted", Fate.EXPIRED: "time to live", Fate.DELETED: "deleted", Fate.REFUSED: "refused"}
    words |= {Fate.CORRUPT: "damaged", Fate.UNSAVED: "not saved"}
    assert set(words) == set(Fate)
    assert all(f"| {word}" in TEXT or word in TEXT for word in words.values())
