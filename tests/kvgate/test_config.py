"""models.yaml: every form that is accepted, and what is said about the rest."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.config import Endpoint, GateConfig, load
from kvgate.errors import ConfigError


def read(folder: Path, text: str) -> GateConfig:
    path = folder / "models.yaml"
    path.write_text(text)
    return load(path)


def refused(folder: Path, text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(folder, text)
    assert "\n" not in caught.value.message
    return caught.value


def test_nested_flattened_and_top_level_models_mean_the_same(tmp_path: Path) -> None:
    nested = read(tmp_path, "models: {m: {endpoint: {host: localhost, port: 12346}}}")
    inside = read(tmp_path, "models: {m: {host: localhost, port: 12346}}")
    flat = read(tmp_path, "m: {host: localhost, port: 12346}")
    as_json = read(tmp_path, '{"m": {"endpoint": {"host": "localhost", "port": 12346}}}')
    assert nested.models == inside.models == flat.models == as_json.models
    assert nested.models["m"].endpoint == Endpoint("localhost", 12346)


def test_peers_instances_are_understood(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
kvcached: {kvcached_gpu_utilization: 0.9, kvcached_log_level: INFO}
router: {enable_router: true, router_port: 9000}
sleep_manager: {idle_threshold_seconds: 10, check_interval_seconds: 5, auto_sleep_enabled: true, wakeup_on_request: true,
                min_sleep_duration: 7}
launch_delay_seconds: 3
instances:
  - name: llama
    model: meta-llama/Llama-3.2-1B
    engine: vllm
    using_venv: true
    venv_path: ../venv
    kvcached_env: ["KVCACHED_IPC_NAME=VLLM_1"]
    engine_env: ["HF_HOME=/models"]
    engine_args: ["--no-enable-prefix-caching", "--port 12346", "--enable-sleep-mode"]
  - {model: Qwen/Qwen3, engine: vllm, args: "--port=12347"}
""",
    )
    llama, qwen = config.models.values()
    assert (config.port, config.launch_delay_s, config.sleep.min_sleep_s) == (9000, 3, 7)
    assert (llama.name, llama.endpoint.port, llama.segment) == ("meta-llama/Llama-3.2-1B", 12346, "VLLM_1")
    assert llama.instance is not None
    assert llama.instance.args == ("--no-enable-prefix-caching", "--port", "12346", "--enable-sleep-mode")
    assert dict(llama.instance.environment) == {
        "KVCACHED_GPU_UTILIZATION": "0.9",
        "KVCACHED_LOG_LEVEL": "INFO",
        "KVCACHED_IPC_NAME": "VLLM_1",
        "HF_HOME": "/models",
    }
    assert qwen.instance is not None
    assert (qwen.instance.name, qwen.endpoint.port) == ("Qwen3", 12347)


def test_contract_names_are_aliases_and_a_model_may_differ(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
sleep_manager: {min_sleep_duration_seconds: 5m, level: 2}
models:
  a: {port: 1}
  b: {port: 2, sleep: {level: 1, auto_sleep_enabled: false}, limits: {max_queue: 3}}
""",
    )
    assert (config.models["a"].sleep.min_sleep_s, config.models["a"].sleep.level) == (300, 2)
    b = config.models["b"]
    assert (b.sleep.min_sleep_s, b.sleep.level, b.sleep.auto_sleep, b.limits.max_queue) == (300, 1, False, 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no models"),
        ("models: {}", "no models"),
        ("- a", "expected a mapping, found a list"),
        ("models: [a]", "models: expected a mapping"),
        ("models: {m: {host: h}}", "models.m: needs 'port'"),
        ("models: {m: {host: h, prot: 1}}", "models.m: needs 'port'"),
        ("models: {m: {host: h, port: 1, wieght: 2}}", "models.m.wieght: unknown key"),
        ("models: {m: {endpoint: {port: 1, hots: h}}}", "models.m.endpoint.hots: unknown key"),
        ("models: {m: {endpoint: {port: 1}, port: 2}}", "models.m.port: stands beside `endpoint`"),
        ("models: {m: {port: 0}}", "models.m.port: expected a whole number from 1 to 65535"),
        ("models: {m: {port: true}}", "models.m.port: expected a whole number"),
        ("models: {m: {port: '1'}}", "models.m.port: expected a whole number"),
        ("models: {m: {port: 1}}\nrouter: {max_que: 1}", "router.max_que: unknown key"),
        ("models: {m: {port: 1}}\nrouter: {enable_router: false}", "router.enable_router: kvgate is the router"),
        (
            "models: {m: {port: 1}}\nsleep_manager: {idle_threshold_seconds: -1}",
            "sleep_manager.idle_threshold_seconds: expected seconds",
        ),
        (
            "models: {m: {port: 1}}\nsleep_manager: {idle_threshold_seconds: soon}",
            "sleep_manager.idle_threshold_seconds: not a duration",
        ),
        (
            "models: {m: {port: 1}}\nsleep_manager: {auto_sleep_enabled: 1}",
            "sleep_manager.auto_sleep_enabled: expected true or false",
        ),
        ("models: {m: {port: 1}}\nsleep_manager: {min_sleep_duration: 1, min_sleep_duration_seconds: 2}", "is another name of"),
        ("models: {m: {port: 1}}\nslep_manager: {}", "slep_manager: unknown key"),
        ("models: {m: {port: 1}, m: {port: 2}}", "models.yaml:1:24: key 'm' is written twice"),
        ("models: {m: {port: 1}}\nserver: {port: 2}", "server: unknown key"),
        ("a: {host: localhost, port: 1}\nb: {host: 127.0.0.1, port: 1}", "share the endpoint"),
        ("1: {port: 1}", "key 1 is a number, not text"),
        ("models: {m: !!python/object:os.system {}}", "models.yaml:1:13"),
        ("models: {m: {port: 1}", "models.yaml:1:22"),
        ("instances: {a: 1}", "instances: expected a list"),
        ("instances: [{engine: vllm}]", "instances[0]: needs 'model'"),
        ("instances: [{model: m}]", "instances[0]: needs 'engine'"),
        ("instances: [{model: m, engine: sglang, port: 1}]", "instances[0].engine: 'sglang' is not supported"),
        ("instances: [{model: m, engine: vllm}]", "instances[0]: no port"),
        ("instances: [{model: m, engine: vllm, args: --port x}]", "--port 'x' is not a port"),
        ("instances: [{model: m, engine: vllm, args: --port 1, port: 2}]", "instances[0].port: differs from --port 1"),
        ('instances: [{model: m, engine: vllm, port: 1, args: "\'"}]', "instances[0].args: cannot split"),
        ("instances: [{model: m, engine: vllm, port: 1, engine_env: [A]}]", "instances[0].engine_env: not an assignment: 'A'"),
        ("instances: [{model: m, engine: vllm, port: 1, using_venv: true}]", "using_venv needs venv_path"),
        ("instances: [{model: m, engine: vllm, port: 1, launcher: screen}]", "instances[0].launcher: unknown word 'screen'"),
        ("instances: [{model: m, engine: vllm, port: 1, elastic: {limit: 4G}}]", "instances[0].elastic: needs a `segment`"),
        (
            "instances: [{model: m, engine: vllm, port: 1, segment: s, elastic: {limit: much}}]",
            "limit (env:KVTOOLS_LIMIT): not a size",
        ),
        (
            "instances: [{model: m, engine: vllm, port: 1, segment: s, elastic: {limits: 4G}}]",
            "instances[0].elastic.limits: unknown key",
        ),
        ("instances: [{model: m, engine: vllm, port: 1, segment: a/b}]", "instances[0].segment: not a segment name"),
        (
            "instances: [{model: a, engine: vllm, port: 1, segment: s}, {model: b, engine: vllm, port: 2, segment: s}]",
            "share the segment s",
        ),
        ("kvcached: {page_size: 2}\nm: {port: 1}", "kvcached.page_size: unknown key"),
        ("devices: {gpu0: 1}\nm: {port: 1}", "devices: not a device index: 'gpu0'"),
        ("devices: {0: lots}\nm: {port: 1}", "devices: not a size: 'lots'"),
        ("m: {port: 1, weights_bytes: 1PiB}", "m.weights_bytes: not a size"),
        ("m: {port: 1, api_key: 'env:KVGATE_TEST_UNSET'}", "environment variable KVGATE_TEST_UNSET is not set"),
        ("models:", "no models"),
        ("m: {port: 1, host: ''}", "m.host: expected text, found none"),
        ('m: {port: 1, segment: "a\\nb"}', "m.segment: expected text on one line, found 'a\\\\nb'"),
        ("m: {port: 1, host: 'http://h'}", "m.host: not a host name or an address: 'http://h'"),
        ("m: {port: 1, host: 'h:80'}", "m.host: not a host name"),
        ("m: {port: 1, host: h/v1}", "m.host: not a host name"),
        ("m: {port: 1, host: u@h}", "m.host: not a host name"),
        ("m: {port: 1, host: a b}", "m.host: not a host name"),
        ("models: {'': {port: 1}}", "models: not a model's name: ''"),
        ("models: {' m': {port: 1}}", "models: not a model's name: ' m'"),
        ('models: {"m\\e[31m": {port: 1}}', "models: not a model's name"),
        ('"a\\nb": {port: 1}', "not a model's name"),
        ("m: {port: 1}\nrouter: {allowed_origins: ['*']}", "router.allowed_origins: not an origin: '*'"),
        ("m: {port: 1}\nrouter: {allowed_origins: [ui.example]}", "router.allowed_origins: not an origin"),
        ("m: {port: 1}\nrouter: {allowed_origins: ['https://ui.example/app']}", "router.allowed_origins: not an origin"),
        ("m: {port: 1}\nrouter: {allowed_hosts: ['gate.example:8080']}", "router.allowed_hosts: not a host name"),
        (
            "instances: [{model: x/m, engine: vllm, port: 1}, {model: y/m, engine: vllm, port: 2}]",
            "'x/m' and 'y/m' both have the name 'm'",
        ),
        (
            "models: {m: {port: 1}}\ninstances: [{model: x/m, engine: vllm, port: 2}]",
            "the name of 'x/m' is that of the model 'm'",
        ),
        ("devices: {0: 10GiB}\nm: {port: 1, devices: [0], weights_bytes: 9GiB, kv_bytes: 2GiB}", "'m' needs 11 GiB of device 0"),
    ],
)
def test_what_cannot_be_meant_is_named_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused(tmp_path, text).message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("models: {m: {host: h, prot: 1}}", "it has 'prot': did you mean that?"),
        ("m: {port: 1}\nrouter: {max_que: 1}", "did you mean 'max_queue'?"),
        ("m: {port: 1}\nslep_manager: {}", "did you mean 'sleep_manager'?"),
        ("instances: [{model: m, engine: vllm, port: 1, launcher: tmuxx}]", "did you mean 'tmux'?"),
        ("models:\n\t- m", "YAML indents with blanks, never with tabs"),
    ],
)
def test_did_you_mean(tmp_path: Path, text: str, hint: str) -> None:
    assert refused(tmp_path, text).hint == hint


def test_hosts_and_origins_are_taken_as_they_are_written_by_hand(tmp_path: Path) -> None:
    text = "models: {a: {port: 1, host: '[::1]'}, b: {port: 2, host: '::1'}, c: {port: 3, host: node-1_x.example.}}\n"
    config = read(tmp_path, text + "router: {router_host: '::1', allowed_origins: ['HTTPS://UI.example:8443']}")
    assert [model.endpoint.url for model in config.models.values()] == [
        "http://[::1]:1",
        "http://[::1]:2",
        "http://node-1_x.example.:3",
    ]
    assert (config.host, config.allowed_origins) == ("::1", ("https://ui.example:8443",))


@pytest.mark.parametrize("value", ["!!timestamp x", "!!int ''", "!!bool x", "!!float x"])
def test_a_tag_whose_text_does_not_fit_is_one_line(tmp_path: Path, value: str) -> None:
    assert "not YAML" in refused(tmp_path, f"m: {{port: 1, host: {value}}}").message


def test_a_key_that_is_written_out_is_taken_and_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read(tmp_path, "m: {port: 1, api_key: hush}").models["m"].api_key == "hush"
    said = capsys.readouterr().err
    assert "models.yaml: m.api_key is written out" in said
    assert "hush" not in said


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    big = tmp_path / "big.yaml"
    big.write_text("#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load(big)
    deep = tmp_path / "deep.yaml"
    deep.write_text("[" * 10_000)
    with pytest.raises(ConfigError, match="not YAML"):
        load(deep)


def test_secrets_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "hush-hush")
    config = read(tmp_path, "m: {port: 1, api_key: 'env:UPSTREAM_KEY'}")
    assert config.models["m"].api_key == "hush-hush"
    assert "hush" not in repr(config)
    assert "hush" not in str(config.report)


WORDS = "models instances router sleep_manager kvcached devices host port endpoint model engine"
_keys = st.sampled_from(WORDS.split())
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys | st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(_keys | st.text(max_size=5), _values, max_size=4))
def test_any_document_is_a_configuration_or_one_line(tmp_path_factory: pytest.TempPathFactory, document: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=False))
    said = f"{path.name}: nothing"
    try:
        assert load(path).models
    except ConfigError as error:
        said = error.message
    assert "\n" not in said
    assert "any.yaml" in said
