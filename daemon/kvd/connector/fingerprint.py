"""What must match for stored bytes to be reusable, and the 32-byte namespace made of it.

Facts are a flat dict of words, so that a mismatch can be named field by field. The digest covers all of them:

    format        version of keys, chunks and this list
    engine        name and version: the meaning of the bytes is the engine's
    model         its configuration as the engine reads it (overrides included)
    weights       names, sizes and samples of the weight files; for a hub name without local files: name and revision
    dtype, cache_dtype, quantization
    loading       what the engine was told of how weights become a model (quantization's settings, classes), where it was
    max_model_len where the model's positions are encoded differently for long contexts and short ones
    media         of models that take more than text: how images and the like are prepared
    parallel      this rank's place and the sizes of tensor and pipeline parallelism
    group, layers, spec, block_tokens, lanes, chunk_tokens     the cache group, and the order of bytes in a chunk

What the block hashes depend on (algorithm, seed) is known only to the scheduler and goes into the *salt* that the plans
carry, together with tenants and a request's adapter (`lora`); a namespace is completed with it by `salted`.

Weights are sampled, not read whole: 17 windows of 64 KiB a file tell two models apart in milliseconds; weights that differ
only between the windows, in files of one size, are taken for equal. Whoever edits weights in place sets KVD_TENANT.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvd.connector.keys import FORMAT

WINDOW_BYTES = 64 << 10
WINDOWS = 16
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_MEDIA_OPTIONS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)
_LOADING_OPTIONS = ("quantization_config", "model_class_overrides")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz")


def digest(facts: Mapping[str, str]) -> bytes:
    """The namespace of these facts."""
    text = json.dumps(dict(facts), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(b"kvd namespace 1" + text.encode()).digest()


def salted(namespace: bytes, salt: bytes) -> bytes:
    """A namespace completed with what the scheduler knows."""
    return hashlib.sha256(namespace + salt).digest()


def salt_of(*, hash_algorithm: str, hash_seed: str, tenant: str, request_tenant: str = "") -> bytes:
    """The scheduler's part: how block hashes are made, and whose they are: the engine's tenant, and the request's within it.

    The two are kept apart: a request may say any word, and none of them may make it the tenant of another engine.
    """
    whose = [tenant, request_tenant] if request_tenant else [tenant]
    return hashlib.sha256(json.dumps(["kvd salt 1", hash_algorithm, hash_seed, *whose]).encode()).digest()


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The facts that differ, as 'name: mine / theirs' lines in a fixed order."""
    names = sorted(set(mine) | set(theirs))
    return [f"{name}: {mine.get(name, '-')} / {theirs.get(name, '-')}" for name in names if mine.get(name) != theirs.get(name)]


def model_facts(vllm_config: Any, engine_version: str) -> dict[str, str]:
    """The facts that hold for all ranks and groups of an engine."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = {
        "format": str(FORMAT),
        "engine": f"vllm {engine_version}",
        "model": _configuration(model),
        "weights": _weights(str(model.model), getattr(model, "revision", None)),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
    }
    if bound_to_length(model.hf_config.to_dict()):
        facts["max_model_len"] = str(model.max_model_len)
    if getattr(model, "multimodal_config", None) is not None:
        facts["media"] = _media(model)
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    if "dummy" in load_format:
        facts["weights"] = f"dummy {model.seed}"
    told = {name: given for name in _LOADING_OPTIONS if (given := getattr(model, name, None))}
    if told:
        facts["loading"] = json.dumps(told, sort_keys=True, default=str)
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None:
        # Draft layers live in the same cache: their weights decide its bytes too.
        draft = str(getattr(speculative, "model", None) or "")
        facts["draft"] = f"{getattr(speculative, 'method', '')} {_weights(draft, None) if draft else ''}"
    return facts


def _configuration(model: Any) -> str:
    """A digest of the model's configuration as the engine reads it; where and by what it was written does not count."""
    config = model.hf_config.to_dict()
    for volatile in ("_name_or_path", "transformers_version", "architectures_override", "use_cache"):
        config.pop(volatile, None)
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def bound_to_length(config: Any) -> bool:
    """Whether a prefix's cache depends on how long a context the engine is set up for, by the model's configuration.

    With LongRoPE the engine chooses one of two sets of factors for all positions by its longest context; Llama 4 tempers its
    attention by it. Engines of different lengths would read each other's cache wrong.
    """
    if isinstance(config, Mapping):
        kind = {str(config.get(name, "")) for name in ("rope_type", "type")}
        if kind & {"longrope", "su"} or str(config.get("model_type", "")).startswith("llama4"):
            return True
        return any(map(bound_to_length, config.values()))
    return isinstance(config, (list, tuple)) and any(map(bound_to_length, config))


def _media(model: Any) -> str:
    """How media become embeddings: the engine's block hashes cover the media themselves and what a request says, and not the
    engine's own options and the model's processor files.
    """
    given = model.multimodal_config
    options = {name: getattr(given, name, None) for name in _MEDIA_OPTIONS}
    options["mm_processor_kwargs"] = {k: v for k, v in (options["mm_processor_kwargs"] or {}).items() if k != "device"}
    text = json.dumps(options, sort_keys=True, default=str)
    found = model_folder(str(model.model), getattr(model, "revision", None))
    files = files_digest(path for name in _PROCESSORS if found is not None and (path := found / name).is_file())
    return hashlib.sha256(f"{text}{files}".encode()).hexdigest()[:32]


def _weights(model: str, revision: str | None) -> str:
    if (file := Path(model)).is_file():
        return files_digest([file])
    folder = model_folder(model, revision)
    if folder is None:
        return f"hub {model} {revision or ''}".strip()
    files = weight_files(folder)
    return files_digest(files) if files else f"path {model}"


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a folder, sorted."""
    return sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})


def model_folder(model: str, revision: str | None) -> Path | None:
    """The folder of that name, or where the hub client keeps this model on this host, without asking the network."""
    if (folder := Path(model)).is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # noqa: BLE001 - any reason not to find it means the same here: known by its name only
        return None


def files_digest(files: Iterable[Path]) -> str:
    """A digest of names, sizes and samples of these files. Raises OSError."""
    state = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            state.update(f"{path.name}\0{size}\0".encode())
            last = max(0, size - WINDOW_BYTES)
            for index in range(WINDOWS + 1):
                file.seek(last * index // WINDOWS)
                state.update(file.read(WINDOW_BYTES))
                if last == 0:
                    break
    return state.hexdigest()[:32]


def parallel_facts(vllm_config: Any, replicas: int) -> dict[str, str]:
    """This rank's place. Ranks that hold the same bytes (MLA under tensor parallelism) have the same facts."""
    parallel = vllm_config.parallel_config
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    tensor_rank, pipeline_rank = parallel.rank % tensor, parallel.rank // tensor % pipeline
    return {"parallel": f"tp {tensor_rank // replicas}/{tensor // replicas} of {tensor} pp {pipeline_rank}/{pipeline}"}
