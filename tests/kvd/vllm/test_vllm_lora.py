"""Adapters (LoRA) on a real server: what was computed with an adapter's old files is never loaded for its new ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.api_server import ApiServer
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.engine import model, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.real("vllm"), pytest.mark.real("kvd"), pytest.mark.timeout(300)]


def write_adapter(folder: Path, seed: int) -> None:
    """An adapter for the tiny llama, in PEFT's two files. Files of two seeds have one size."""
    source = np.random.default_rng(seed)
    header: dict[str, Any] = {}
    data = b""
    for layer in range(4):
        for name, width in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            for part, shape in (("A", (8, 256)), ("B", (width, 8))):
                raw = (source.standard_normal(shape) * 0.3).astype("<f4").tobytes()
                key = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{part}.weight"
                header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
                data += raw
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "CAUSAL_LM"}))


def start(daemon: Daemon | None, folder: Path) -> ApiServer:
    words = ("--enable-lora", "--max-lora-rank", "16", "--lora-modules", f"them={folder}")
    return ApiServer(model(), daemon.socket if daemon else None, words=words)


def answer(server: ApiServer, name: str = "them") -> list[int]:
    found: list[int] = server.complete(prompt(600), 8, model=name, return_token_ids=True)["choices"][0]["token_ids"]
    return found


def stored(server: ApiServer, **body: Any) -> int:
    found: int = server.ok("POST", "/v1/cache/why", {"token_ids": prompt(600), **body})["found_tokens"]
    return found


@pytest.mark.slow
def test_an_adapter_replaced_in_place_is_another_one_after_a_restart(kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon, folder = kvd_daemon(max_bytes="64MiB"), tmp_path / "adapter"
    write_adapter(folder, 1)
    with start(daemon, folder) as server:
        answer(server)
        assert (stored(server, model="them"), stored(server)) == (576, 0)
        hashes = server.ok("POST", "/v1/cache/keys", {"token_ids": prompt(600), "model": "them"})["block_hashes"]
        assert (
            stored(server, token_ids=None, block_hashes=hashes, model="them"),
            stored(server, token_ids=None, block_hashes=hashes),
        ) == (576, 0)
        status, refused = server.post("/v1/cache/prewarm", {"block_hashes": hashes, "model": "nobody"})
        assert (status, "`nobody` does not exist" in refused["error"]["message"]) == (404, True)
        write_adapter(folder, 2)
        answer(server)
        status, refused = server.post("/v1/cache/why", {"token_ids": prompt(600), "model": "them"})
        assert (status, "until the engine restarts" in refused["error"]["message"]) == (409, True)
    with start(None, folder) as cold:
        expected = answer(cold)
    with start(daemon, folder) as server:
        assert stored(server, model="them") == 0
        assert answer(server) == expected
        assert stored(server, model="them") == 576
