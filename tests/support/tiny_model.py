#!/usr/bin/env python3
"""Write a random-weight model with a tokenizer, so that tests, benches and the demo run a real engine with nothing downloaded.

    python tests/support/tiny_model.py OUT_DIR [--kind llama|mla|sliding] [--size tiny|small] [--seed N]

Kinds (each is one way an engine lays out its KV cache):
    llama    grouped-query attention: one cache group
    mla      multi-head latent attention, latent of 512 + 64 channels: one cache group with a single head
    sliding  sliding-window (128 tokens) and full layers in turn: two cache groups that overlay each other's memory
Sizes: `tiny` loads in about a second; `small` (about 0.15 B parameters, 48 KiB of KV per token in float32) has a prefill
that is worth saving. Weights are drawn wide enough that greedy decoding does not fall into one repeated token, which would
be a weak witness for damaged KV. Runs inside the engine's environment (needs torch and transformers).
"""

import argparse
from pathlib import Path
from typing import Any

SIZES = {"tiny": (256, 512, 4), "small": (1024, 2816, 12)}
"""Hidden size, intermediate size, layers."""

VOCABULARY = 512


def make_model(out: Path, *, kind: str = "llama", size: str = "tiny", seed: int = 0) -> Path:
    """Write the model to `out` (reused as it is when complete) and return `out`."""
    if (out / "config.json").exists() and (out / "model.safetensors").exists():
        return out
    import torch

    torch.manual_seed(seed)
    _tokenizer().save_pretrained(out)
    _network(kind, size).to(torch.bfloat16).save_pretrained(out)
    return out


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["cache blocks are pages of keys and values; warm prefixes survive restarts "] * 50, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def _network(kind: str, size: str) -> Any:
    import transformers

    hidden, intermediate, layers = SIZES[size]
    heads = hidden // 64
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16384,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.15,
    }
    grouped = {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(head_dim=64, **grouped, **common))
    if kind == "sliding":
        return transformers.Olmo3ForCausalLM(
            transformers.Olmo3Config(
                sliding_window=128,
                pad_token_id=2,
                layer_types=["sliding_attention", "full_attention"] * (layers // 2),
                tie_word_embeddings=False,
                **grouped,
                **common,
            )
        )
    if kind == "mla":
        return transformers.DeepseekV2ForCausalLM(
            transformers.DeepseekV2Config(
                num_attention_heads=4,
                num_key_value_heads=4,
                q_lora_rank=None,
                kv_lora_rank=512,
                qk_rope_head_dim=64,
                qk_nope_head_dim=128,
                v_head_dim=128,
                first_k_dense_replace=layers,  # dense layers only: experts would cost load time and test nothing here
                n_shared_experts=1,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=128,
                **common,
            )
        )
    raise ValueError(f"unknown kind {kind!r}: one of llama, mla, sliding")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=["llama", "mla", "sliding"], default="llama")
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make_model(args.out, kind=args.kind, size=args.size, seed=args.seed))


if __name__ == "__main__":
    main()
