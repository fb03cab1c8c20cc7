"""What saving costs an engine: prompts a second with the connector storing all of them, beside the same engine without any.

    python -m tests.bench --only throughput

Two real engines of one model, out of process as in production, take turns with prompts of their own (nothing is cached, every
block is new): prefill of 1000 tokens and 16 decoded, several requests at once. Needs .venv-vllm.
"""

from collections.abc import Iterator

from tests.bench.measure import Result, in_turn
from tests.support.daemon import Daemon
from tests.support.engine import Engine, installed, model, prompt

BUDGET = 0.97
TOKENS, DECODED, BATCH = 1000, 16, 4


def measure(*, quick: bool = False) -> Iterator[Result]:
    """One result: tokens a second with saving on, the floor is without a connector."""
    if not installed("throughput"):
        return
    daemon = Daemon(max_bytes="1GiB")
    seeds = iter(range(1_000_000))
    how = {"tokens": DECODED, "logprobs": None}

    def turn(engine: Engine) -> None:
        engine.generate([prompt(TOKENS, next(seeds)) for _ in range(BATCH)], **how)

    try:
        daemon.start()
        saving = Engine(model("llama", "small"), daemon.socket, processes=True, max_model_len=TOKENS + 100)
        without = Engine(model("llama", "small"), None, processes=True, max_model_len=TOKENS + 100, transfer=None)
        with saving, without:
            took, floor, ratio = in_turn(lambda: turn(saving), lambda: turn(without), rounds=4 if quick else 15)
            saved = saving.metrics()["vllm:kvd_save_bytes"]
            assert saved > 0, "nothing was saved"
    finally:
        daemon.remove()
    total = BATCH * (TOKENS + DECODED)
    what = f"engine throughput while saving, {BATCH} x {TOKENS} tokens"
    yield Result("throughput.saving", what, round(total / took, 1), "tokens/s", round(total / floor, 1), round(ratio, 3), BUDGET)
