"""What the engine does with a synchronous load that fails, as loads layer by layer would have to be: run by test_vllm_traps.

    python -m tests.kvd.vllm.sync_trap MODEL        one JSON line: the tokens of three requests with one prompt

The connector offers a prefix for the first request, fills nothing, and reports all its blocks as failed, as it should.
"""

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

TOKENS, OFFERED, BLOCK = 1000, 960, 32


@dataclass
class Failing(KVConnectorMetadata):
    """Blocks that this step should fill."""

    blocks: tuple[int, ...] = ()


class FailingConnector(KVConnectorBase_V1):
    """Offers once, synchronously, and fails."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._offered = False
        self._pending: tuple[int, ...] = ()
        self._bad: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return (0 if self._offered or num_computed_tokens else OFFERED), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._offered = True
            self._pending = tuple(blocks.get_block_ids()[0][: num_external_tokens // BLOCK])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        pending, self._pending = self._pending, ()
        return Failing(pending)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        self._bad = set(metadata.blocks) if isinstance(metadata, Failing) else set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad

    def register_kv_caches(self, kv_caches: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def main(model: str) -> None:
    """Three requests with one prompt, in a batch that lets the later ones run before the first is recomputed."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    transfer = {
        "kv_connector": "FailingConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "tests.kvd.vllm.sync_trap",
        "kv_load_failure_policy": "recompute",
    }
    how = {"max_num_batched_tokens": 512, "long_prefill_token_threshold": 64, "kv_transfer_config": transfer}
    llm: Any = LLM(model=model, dtype="float32", max_model_len=4096, enforce_eager=True, block_size=BLOCK, **how)
    ids = [number * 7919 % 500 + 5 for number in range(TOKENS)]
    for name in ("first", "second", "third"):
        llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, SamplingParams(max_tokens=8, temperature=0))
    found = {}
    while llm.llm_engine.has_unfinished_requests():
        found |= {out.request_id: list(out.outputs[0].token_ids) for out in llm.llm_engine.step() if out.finished}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
