"""Settings, what makes a namespace, counters, and that importing the connector touches nothing."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.connector import attach, fingerprint
from kvd.connector.groups import Unsupported
from kvd.connector.metrics import COUNTERS, REASONED, Counters, join, summary
from kvd.connector.settings import SETTINGS, read_settings
from kvtools.errors import UsageError
from tests.support.processes import run_python


def test_settings_come_from_the_command_line_then_the_environment_then_defaults() -> None:
    assert read_settings({}, {}).chunk_tokens is None
    environ = {"KVD_SOCKET": "/env", "KVD_CHUNK_TOKENS": "512", "KVD_LOAD_TIMEOUT": "2s", "KVD_SAVE": "0"}
    found = read_settings({"socket": "/mine", "load_threads": 3, "load": False}, environ)
    assert (found.socket, found.chunk_tokens, found.load_timeout_s, found.save) == ("/mine", 512, 2.0, False)
    assert (found.load_threads, found.load) == (3, False)
    assert dict(found.origins)["socket"] == "file:kv_connector_extra_config"
    assert dict(found.origins)["chunk_tokens"] == "env:KVD_CHUNK_TOKENS"
    assert read_settings({}, {"KVD_CHUNK_TOKENS": "auto"}).chunk_tokens is None


def test_older_names_are_understood_and_said() -> None:
    found = read_settings({}, {"INFERA_KVD_SOCKET": "/old", "INFERA_KVD_CHUNK_TOKENS": "auto"})
    assert found.socket == "/old"
    assert found.notices == [
        "INFERA_KVD_SOCKET is accepted; its name here is KVD_SOCKET",
        "INFERA_KVD_CHUNK_TOKENS is accepted; its name here is KVD_CHUNK_TOKENS",
    ]
    assert read_settings({}, {"INFERA_KVD_SOCKET": "/old", "KVD_SOCKET": "/new"}).socket == "/new"


@pytest.mark.parametrize(
    ("extra", "environ", "named"),
    [
        ({}, {"KVD_CHUNK_TOKENS": "many"}, "chunk_tokens (env:KVD_CHUNK_TOKENS): not a whole number from 1 to 16777216: 'many'"),
        ({}, {"KVD_CHUNK_TOKENS": "0"}, "not a whole number from 1 to 16777216: '0'"),
        ({}, {"KVD_LOAD_TIMEOUT": "soon"}, "load_timeout_s (env:KVD_LOAD_TIMEOUT): not a duration: 'soon'"),
        ({}, {"KVD_CHUNK_TOKENS": "9" * 20}, "not a whole number from 1 to 16777216"),
        ({}, {"KVD_LOAD_THREADS": "1000000"}, "load_threads (env:KVD_LOAD_THREADS): not a whole number from 1 to 256"),
        ({}, {"KVD_LOAD_TIMEOUT": "0"}, "load_timeout_s (env:KVD_LOAD_TIMEOUT): not a time from 1.0 ms up: '0'"),
        ({}, {"KVD_SAVE": "maybe"}, "save (env:KVD_SAVE): neither on nor off: 'maybe'"),
        ({"sokcet": "/x"}, {}, "unknown key 'sokcet' in kv_connector_extra_config"),
    ],
)
def test_what_cannot_be_meant_is_named_at_start(extra: dict[str, Any], environ: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_settings(extra, environ)
    assert named in caught.value.message


def test_every_setting_says_what_it_is() -> None:
    assert all(setting.help and setting.environment[0].startswith("KVD_") for setting in SETTINGS)


def test_weights_are_told_apart_by_name_size_and_samples(tmp_path: Path) -> None:
    one = tmp_path / "model.safetensors"
    one.write_bytes(bytes(4 << 20))
    digest = fingerprint.files_digest([one])
    assert fingerprint.files_digest([one]) == digest
    for change in (0, (4 << 20) - 1, 1 << 20):
        data = bytearray(4 << 20)
        data[change] = 1
        one.write_bytes(data)
        assert fingerprint.files_digest([one]) != digest
    one.write_bytes(bytes((4 << 20) + 1))
    assert fingerprint.files_digest([one]) != digest
    copy = tmp_path / "copy" / "model.safetensors"
    copy.parent.mkdir()
    copy.write_bytes(one.read_bytes())
    assert fingerprint.files_digest([copy]) == fingerprint.files_digest([one]), "where it lies does not matter"


def _engine(folder: Path, **changes: Any) -> SimpleNamespace:
    """The parts of a VllmConfig that are read."""
    hf = {"hidden_size": 8, "_name_or_path": str(folder), "transformers_version": "5", **changes.pop("hf", {})}
    model = SimpleNamespace(
        model=str(folder),
        revision=None,
        dtype="torch.float32",
        quantization=None,
        seed=0,
        hf_config=SimpleNamespace(to_dict=lambda: hf),
    )
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, rank=0)
    engine = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=parallel,
        speculative_config=None,
    )
    for path, value in changes.items():
        target: Any = engine
        *way, last = path.split("__")
        for step in way:
            target = getattr(target, step)
        setattr(target, last, value)
    return engine


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"w" * 1000)
    return tmp_path


@pytest.mark.parametrize(
    "change",
    [
        {"hf": {"rope_theta": 1e6}},
        {"model_config__dtype": "torch.bfloat16"},
        {"model_config__quantization": "fp8"},
        {"model_config__quantization_config": {"ignore": ["lm_head"]}},
        {"model_config__model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}},
        {"cache_config__cache_dtype": "fp8"},
        {"load_config__load_format": "dummy"},
        {"speculative_config": SimpleNamespace(model="draft", method="eagle")},
        {"parallel_config__tensor_parallel_size": 2},
        {"parallel_config__pipeline_parallel_size": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_bytes_changes_the_namespace(weights: Path, change: dict[str, Any]) -> None:
    def namespace(**changes: Any) -> bytes:
        engine = _engine(weights, **changes)
        return fingerprint.digest({**fingerprint.model_facts(engine, "0.32.0"), **fingerprint.parallel_facts(engine, 1)})

    assert namespace() == namespace()
    assert namespace() != namespace(**change)


@pytest.mark.parametrize(
    "hf",
    [
        {"rope_parameters": {"rope_type": "longrope"}},
        {"text_config": {"rope_scaling": {"type": "longrope"}}},
        {"text_config": {"model_type": "llama4_text"}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "longrope"}}},
    ],
)
def test_where_positions_depend_on_the_longest_context_it_counts(weights: Path, hf: dict[str, Any]) -> None:
    short, long = ({"model_config__max_model_len": tokens} for tokens in (4096, 131072))

    def facts(**changes: Any) -> dict[str, str]:
        return fingerprint.model_facts(_engine(weights, **changes), "0.32.0")

    assert fingerprint.differences(facts(hf=hf, **short), facts(hf=hf, **long)) == ["max_model_len: 4096 / 131072"]
    plain = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    assert facts(hf=plain, **short) == facts(hf=plain, **long), "engines of other models share over lengths"


def test_how_images_are_prepared_counts_for_models_that_take_them(weights: Path) -> None:
    def media(options: dict[str, Any] | None = None, **more: Any) -> str:
        config = SimpleNamespace(mm_processor_kwargs=options, **more)
        return fingerprint.model_facts(_engine(weights, model_config__multimodal_config=config), "0.32.0")["media"]

    plain = media()
    assert media({"device": "cuda"}) == plain == media(), "where it is prepared does not matter"
    found = {plain, media({"max_pixels": 1000}), media(video_pruning_rate=0.5), media(media_io_kwargs={"video": {"fps": 1}})}
    (weights / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    found.add(media())
    (weights / "preprocessor_config.json").write_text('{"image_mean": [0.4]}')
    found.add(media())
    assert len(found) == 6
    assert "media" not in fingerprint.model_facts(_engine(weights, model_config__multimodal_config=None), "0.32.0")


@pytest.mark.parametrize(
    ("model", "spec", "why"),
    [
        ({"is_prefix_caching_supported": True}, {"non_causal": False}, ""),
        ({}, {}, ""),
        (
            {"is_prefix_caching_supported": False, "pooler_config": SimpleNamespace(seq_pooling_type="MEAN")},
            {},
            "MEAN pooling needs every token computed: vLLM reuses no prefix of it",
        ),
        (
            {"is_prefix_caching_supported": False, "pooler_config": None},
            {},
            "this kind of model needs every token computed: vLLM reuses no prefix of it",
        ),
        ({}, {"non_causal": True}, "layer 0: its attention is not causal, a prefix depends on what follows it"),
        (
            {},
            {"kv_cache_specs": {"a": SimpleNamespace(), "b": SimpleNamespace(non_causal=True)}},
            "layer 0: its attention is not causal, a prefix depends on what follows it",
        ),
    ],
)
def test_models_whose_prefixes_the_engine_never_reuses_are_refused(model: dict[str, Any], spec: dict[str, Any], why: str) -> None:
    engine = SimpleNamespace(model_config=SimpleNamespace(**model))
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer 0"], kv_cache_spec=SimpleNamespace(**spec))])
    with pytest.raises(Unsupported) if why else contextlib.nullcontext() as caught:
        attach._check_reuse(engine, caches)
    assert (str(caught.value) if caught is not None else "") == why


def test_the_engines_version_and_every_rank_have_their_own(weights: Path) -> None:
    engine = _engine(weights)
    assert fingerprint.model_facts(engine, "0.32.0") != fingerprint.model_facts(engine, "0.33.0")
    places = []
    for rank in range(4):
        engine = _engine(weights, parallel_config__tensor_parallel_size=4, parallel_config__rank=rank)
        places.append((fingerprint.parallel_facts(engine, 1)["parallel"], fingerprint.parallel_facts(engine, 4)["parallel"]))
    assert len({one for one, _ in places}) == 4
    assert len({shared for _, shared in places}) == 1, "ranks that hold the same bytes share them"


def test_a_mismatch_is_named_field_by_field() -> None:
    mine, theirs = {"dtype": "float32", "chunk_tokens": "256"}, {"dtype": "bfloat16", "chunk_tokens": "256", "draft": "x"}
    assert fingerprint.differences(mine, theirs) == ["draft: - / x", "dtype: float32 / bfloat16"]


def test_no_word_of_a_request_makes_it_the_tenant_of_another_engine() -> None:
    whose = [("", ""), ("acme", ""), ("", "acme"), ("acme", "acme"), ("acme", "x"), ("", "acme\0x"), ("acme\0x", "")]
    salts = {
        fingerprint.salt_of(hash_algorithm="sha256", hash_seed="00", tenant=tenant, request_tenant=request)
        for tenant, request in whose
    }
    assert len(salts) == len(whose)


def test_salts_cover_hash_and_tenant() -> None:
    salts = {
        fingerprint.salt_of(hash_algorithm=a, hash_seed=s, tenant=t)
        for a in ("sha256", "xxhash")
        for s in ("", "0")
        for t in ("", "x")
    }
    assert len(salts) == 8
    assert len({fingerprint.salted(bytes(32), salt) for salt in salts}) == 8


def test_counters_are_sent_once_and_add_up() -> None:
    counters = Counters()
    counters.add("loads")
    counters.add("load_bytes", 1 << 30)
    counters.add("load_seconds", 0.5)
    first = counters.growth()
    assert counters.growth() == {}
    counters.add("loads", 2)
    both = join(dict(first), counters.growth())
    assert both == {"loads": 3, "load_bytes": 1 << 30, "load_seconds": 0.5}
    assert summary(both)["load_gib_per_s"] == 2.0
    assert json.loads(json.dumps(both)) == both
    assert {name.partition("/")[0] for name in counters.values()} == {*COUNTERS, *REASONED}


def test_importing_the_connector_costs_and_touches_nothing() -> None:
    code = (
        "import sys, threading; import kvd.connector, kvd.connector.plugin;"
        "print(threading.active_count(), sorted({'torch', 'vllm', 'numpy', 'msgspec', 'kvd.wire.client'} & set(sys.modules)))"
    )
    assert run_python(code).stdout.strip() == "1 []"
