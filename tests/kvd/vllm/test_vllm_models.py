"""What decides the bytes of a cache besides weights and tokens: the longest context, and answers that need every token."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.daemon import MakeDaemon
from tests.support.engine import Engine, model, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.real("vllm"), pytest.mark.real("kvd"), pytest.mark.timeout(240)]


@pytest.mark.slow
def test_engines_whose_positions_are_encoded_by_their_length_share_nothing(kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = kvd_daemon(max_bytes="64MiB")
    folder, one = tmp_path / "model", prompt(700)
    shutil.copytree(model(), folder)
    config = json.loads((folder / "config.json").read_text())
    half = config["head_dim"] // 2
    config["max_position_embeddings"] = 4096
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 1200,
        "factor": 4096 / 1200,
        "short_factor": [1.0] * half,
        "long_factor": [1.0 + i / 8 for i in range(half)],
    }
    (folder / "config.json").write_text(json.dumps(config))
    with Engine(folder, daemon.socket, max_model_len=1100) as engine:
        short = engine.one(one)
    with Engine(folder, daemon.socket, max_model_len=2048) as engine:
        long = engine.one(one)
        assert long["cached"] == 0
        assert long["tokens"] != short["tokens"], "it would have been a wrong answer"
    with Engine(folder, daemon.socket, max_model_len=2048) as engine:
        assert engine.one(one)["cached"] == 672


@pytest.mark.slow
def test_a_model_whose_answer_needs_every_token_is_served_and_not_stored(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="64MiB")
    pooler = {"seq_pooling_type": "MEAN"}
    pooling = {"runner": "pooling", "convert": "embed", "pooler_config": pooler, "enable_prefix_caching": False}
    one = prompt(700)
    with Engine(model(), daemon.socket, **pooling) as engine:
        first, second = (engine.ask("embed", prompt=one) for _ in range(2))
        assert first == second
        assert "MEAN pooling needs every token computed" in engine.text()
