"""Asking an engine's server: what is no vLLM is told so by name, what is not there or silent ends in one line.

The real engine is asked in tests/kvd/vllm/test_vllm_server.py. Here the servers are others: the daemon's own window, and
small ones that answer as the documentation of other engines says they do.
"""

import http.server
import json
import re
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.engine_commands import Check, Report, compare, read_prompt
from kvd.engines import EngineServer, NotVllm
from kvtools.errors import UsageError
from tests.support.daemon import MakeDaemon
from tests.support.processes import run_cli
from tests.support.servers import free_port

Start = Callable[..., str]


@pytest.fixture
def server() -> Iterator[Start]:
    """Starts servers that answer these paths with this JSON (or text), and 404 to all else; their URL."""
    made: list[http.server.ThreadingHTTPServer] = []

    def start(answers: dict[str, Any], context: ssl.SSLContext | None = None) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = answers.get(self.path)
                text = found if isinstance(found, str) else json.dumps(found)
                self.send_response(200 if found is not None else 404)
                self.end_headers()
                self.wfile.write(text.encode())

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        made.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        if context is not None:
            made[-1].socket = context.wrap_socket(made[-1].socket, server_side=True)
        threading.Thread(target=made[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{made[-1].server_address[1]}"

    yield start
    for one in made:
        one.shutdown()
        one.server_close()


SGLANG = {"data": [{"owned_by": "sglang"}]}
VLLM = {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"id": "m", "owned_by": "vllm"}]}}


@pytest.mark.parametrize(
    ("answers", "name"),
    [
        ({"/get_server_info": {"model_path": "m"}, "/v1/models": SGLANG}, "SGLang"),
        (
            {"/version": {"version": "0.5"}, "/server_info": {"model_path": "m"}, "/v1/models": {"data": [{"owned_by": "sglang"}]}},
            "SGLang",
        ),
        ({"/info": {"model_id": "m", "max_total_tokens": 5}}, "Text Generation Inference"),
        ({"/props": {"default_generation_settings": {}}, "/v1/models": {"data": []}}, "llama.cpp"),
        ({"/": "Ollama is running", "/api/version": {"version": "0.1"}}, "Ollama"),
        ({"/v1/models": {"data": [{"owned_by": "somebody"}]}}, "an OpenAI-compatible server of another kind"),
        ({}, "another server"),
    ],
)
@pytest.mark.parametrize("words", [("why", "-"), ("status",), ("prefetch", "-")], ids=lambda words: words[0])
def test_a_server_that_is_no_vllm_is_refused_by_name(
    server: Start, answers: dict[str, Any], name: str, words: tuple[str, ...]
) -> None:
    url = server(answers)
    ran = run_cli("kvd", words[0], "--engine", url, *words[1:], stdin="a prompt")
    assert ran.rc == 1
    assert f"is {name}" in ran.stderr
    assert ", not vLLM\nhint: kvd works with vLLM 0.32 or newer" in ran.stderr


def test_a_vllm_is_known_also_where_it_wants_a_key(server: Start) -> None:
    assert EngineServer(server(VLLM)).identify() == "0.32.0"
    assert EngineServer(server({**VLLM, "/v1/models": {"error": "Unauthorized"}})).identify() == "0.32.0"
    with pytest.raises(NotVllm):
        EngineServer(server({"/version": {"version": "1"}})).identify()


def test_a_vllm_without_kvds_routes_is_told_how_to_let_them_in(server: Start) -> None:
    ran = run_cli("kvd", "why", "--engine", server(VLLM), "-", stdin="a prompt")
    assert ran.rc == 3
    assert "has no kvd routes" in ran.stderr
    assert "VLLM_PLUGINS=kvd" in ran.stderr
    metrics = '# TYPE vllm:kvd_saves_total counter\nvllm:kvd_saves_total{engine="0"} 4.0\nvllm:kvd_errors_total 0.0\n'
    ran = run_cli("kvd", "status", "--engine", server({**VLLM, "/metrics": metrics}), "--json")
    words = {check["name"]: check["word"] for check in ran.json()["engines"][0]["checks"]}
    assert (ran.rc, words["routes"], words["connector"], words["saving"], words["hash seed"]) == (0, "warn", "ok", "ok", "unknown")
    metrics += 'vllm:kvd_direct_fallback_total{engine="0",reason="no_library"} 3.0\n'
    ran = run_cli("kvd", "status", "--engine", server({**VLLM, "/metrics": metrics}))
    assert re.search(r"warn +direct +0 B moved GPU-direct; chunks that were not, by reason: no_library 3", ran.stdout)


def test_of_several_engines_one_that_is_not_there_is_a_check_and_the_others_are_asked(server: Start) -> None:
    metrics = "# TYPE vllm:kvd_saves_total counter\nvllm:kvd_saves_total 4.0\nvllm:kvd_down_total 1.0\n"
    there = server({**VLLM, "/metrics": metrics})
    ran = run_cli("kvd", "status", "--engine", "http://127.0.0.1:1", "--engine", there, "--json")
    gone, up = ({check["name"]: check for check in one["checks"]} for one in ran.json()["engines"])
    assert (ran.rc, gone["server"]["word"], up["saving"]["word"]) == (4, "fail", "ok")
    assert "no server answers at http://127.0.0.1:1" in gone["server"]["text"]
    assert up["faults"]["text"] == "1 connection to the daemon was lost"
    assert [check["word"] for check in ran.json()["together"]] == ["unknown"]


def view(**more: Any) -> dict[str, Any]:
    """What an engine with kvd tells of itself, as far as `kvd status` reads it."""
    told = {"saves": True, "loads": True, "daemon_up": True, "socket": "/kvd.sock", "seed": "fixed", **more}
    return {"chunk_tokens": 256, "groups": [[]], "ranks": [{}], "hashes": {"algorithm": "sha256"}, "more": told}


@pytest.mark.parametrize(
    ("problem", "more", "word", "says"),
    [
        ("", {}, "ok", "is connected to /kvd.sock"),
        (None, {}, "ok", "is connected to /kvd.sock"),
        ("not allowed", {}, "fail", "no daemon answers the engine at /kvd.sock"),
        ("", {"daemon_up": False}, "fail", "the engine is not connected"),
    ],
)
def test_a_daemon_that_hangs_or_is_gone_is_not_said_to_be_connected(
    server: Start, problem: str | None, more: dict[str, Any], word: str, says: str
) -> None:
    body = {
        "schema": "kvd.engine/1",
        "kv_connector": "KvdConnector",
        "kv_role": "kv_both",
        "view": view(**more),
        "daemon_problem": problem,
    }
    paths = {**VLLM, "/metrics": "# TYPE vllm:kvd_saves_total counter\n", "/v1/cache/engine": body}
    ran = run_cli("kvd", "status", "--engine", server(paths), "--json")
    check = next(check for check in ran.json()["engines"][0]["checks"] if check["name"] == "daemon")
    assert (check["word"], ran.rc) == (word, 1 if word == "fail" else 0)
    assert says in check["text"]
    assert check["hint"] == "not allowed" or problem != "not allowed"


def test_an_engine_that_reset_its_caches_is_told_apart(server: Start) -> None:
    body = {
        "schema": "kvd.engine/1",
        "kv_connector": "KvdConnector",
        "kv_role": "kv_both",
        "view": view(reset=True),
        "daemon_problem": "",
    }
    paths = {**VLLM, "/metrics": "# TYPE vllm:kvd_saves_total counter\n", "/v1/cache/engine": body}
    ran = run_cli("kvd", "status", "--engine", server(paths))
    assert re.search(r"warn +reset +the engine reset its caches: until it restarts", ran.stdout)


def test_what_is_wrong_with_tls_is_told_apart_from_a_server_that_is_not_there(server: Start, tmp_path: Path) -> None:
    plain = server(VLLM)
    ran = run_cli("kvd", "status", "--engine", plain.replace("http:", "https:"))
    assert (ran.rc, "speaks no TLS\nhint: is its address http://" in ran.stderr) == (4, True)
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=kv"]
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"]
    subprocess.run(["openssl", *words, *more, "-keyout", key, "-out", certificate], capture_output=True, check=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    secure = server(VLLM, context).replace("http:", "https:")
    ran = run_cli("kvd", "why", "--engine", secure, "-", stdin="a prompt")
    assert (ran.rc, "is not trusted: self" in ran.stderr, "hint: SSL_CERT_FILE" in ran.stderr) == (4, True, True)
    ran = run_cli("kvd", "why", "--engine", secure, "-", stdin="a prompt", env={"SSL_CERT_FILE": str(certificate)})
    assert (ran.rc, "has no kvd routes" in ran.stderr) == (3, True)


@pytest.mark.real("kvd")
def test_the_daemons_own_window_is_no_engine(kvd_daemon: MakeDaemon) -> None:
    port = free_port()
    kvd_daemon("--metrics-port", str(port), max_bytes="1MiB")
    ran = run_cli("kvd", "status", "--engine", f"127.0.0.1:{port}")
    assert (ran.rc, "is another server" in ran.stderr) == (1, True)
    for command in ("why", "prefetch"):
        ran = run_cli("kvd", command, "--engine", f"127.0.0.1:{port}", "-", stdin="a prompt")
        assert (ran.rc, "is another server" in ran.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "rc", "says"),
    [
        (("why", "--engine", "http://127.0.0.1:1", "-"), 4, "no server answers at http://127.0.0.1:1: Connection refused"),
        (("why", "--engine", "ftp://x", "-"), 2, "not an engine's URL"),
        (("why", "--engine", "http://127.0.0.1:99999", "-"), 2, "not an engine's URL"),
        (("why", "--engine", "http://[::1", "-"), 2, "not an engine's URL: 'http://[::1'"),
        (("why", "--engine", "http://127.0.0.1:1/a b", "-"), 2, "not an engine's URL"),
        (("why", "--engine", "http://127.0.0.1:0", "-"), 2, "not an engine's URL"),
        (("why", "--engine", "http://127.0.0.1:1", "--timeout", "0", "-"), 2, "a timeout of 0"),
        (("why", "--engine", "http://127.0.0.1:1", "--namespace", "x", "-"), 2, "--namespace does not go with --engine"),
        (("prefetch", "--engine", "http://127.0.0.1:1", "--socket", "/x", "-"), 2, "--socket does not go with --engine"),
        (("status", "--engine", "http://127.0.0.1:1", "--tiers"), 2, "--tiers does not go with --engine"),
        (("status", "--engine", "http://127.0.0.1:1", "--model", "x"), 2, "--model goes with --probe"),
        (("why", "--engine", "http://127.0.0.1:1", ""), 2, "the file's name is empty"),
        (("why", "--engine", "http://127.0.0.1:1", "/nope"), 2, "/nope: No such file or directory"),
        (("why", "--engine", "http://127.0.0.1:1", "a", "b"), 2, "one prompt at a time"),
        (("prefetch", "--engine", "http://127.0.0.1:1", "aa" * 32, "b"), 2, "not a block hash: 'b'"),
        (("why", "--engine", "", "-"), 2, "not an engine's URL: ''"),
        (("prefetch", "--engine", "", "-"), 2, "not an engine's URL: ''"),
        (("status", "--engine", "http://me:secret@127.0.0.1:1"), 2, "an API key goes into VLLM_API_KEY"),
        (("status", "--engine", "http://127.0.0.1:1"), 4, "Connection refused"),
        (("status", "--probe"), 2, "--probe goes with --engine only"),
        (("prefetch", "--max-bytes", "1G", "aa"), 2, "--max-bytes goes with --engine only"),
    ],
)
def test_what_cannot_be_asked_is_one_line(words: tuple[str, ...], rc: int, says: str) -> None:
    ran = run_cli("kvd", *words, stdin="a prompt")
    assert ran.rc == rc
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "secret" not in ran.stderr


def test_a_key_that_no_request_can_carry_is_a_slip_and_not_repeated() -> None:
    for key in ("secret\n", "secret\r\nX: y", "sécret\u20ac"):
        ran = run_cli("kvd", "status", "--engine", "http://127.0.0.1:1", env={"VLLM_API_KEY": key})
        assert (ran.rc, ran.stderr.count("\n")) == (2, 2)
        assert "the key in VLLM_API_KEY" in ran.stderr
        assert "cret" not in ran.stderr


@pytest.mark.parametrize(("command", "route"), [("why", "why"), ("prefetch", "prewarm")])
def test_an_answer_of_another_kind_is_no_answer(server: Start, command: str, route: str) -> None:
    """A proxy that answers everything with 200, and an engine whose kvd speaks another version."""
    for body, says in (
        ({"ok": True}, "something else"),
        ({"schema": "kvd.why_prompt/9"}, "kvd.why_prompt/9"),
        (["x"], "something"),
    ):
        ran = run_cli("kvd", command, "--engine", server({**VLLM, f"/v1/cache/{route}": body}), "-", stdin="a prompt")
        assert (ran.rc, f"/v1/cache/{route} answers with {says}" in ran.stderr) == (1, True)
        ran = run_cli("kvd", command, "--engine", server({f"/v1/cache/{route}": body}), "-", stdin="a prompt")
        assert (ran.rc, "is another server" in ran.stderr) == (1, True)


def test_a_file_is_a_prompt_messages_ids_or_a_request(tmp_path: Any) -> None:
    file = tmp_path / "p"
    for text, body in (
        ("plain words", {"prompt": "plain words"}),
        ('[{"role": "user"}]', {"messages": [{"role": "user"}]}),
        ("[1, 2]", {"token_ids": [1, 2]}),
        ('{"prompt": "x", "temperature": 1}', {"prompt": "x", "temperature": 1}),
        ("42", {"prompt": "42"}),
    ):
        file.write_text(text)
        assert read_prompt(str(file)) == body
    for raw, prompt in ((b"one\r\ntwo\r", "one\r\ntwo\r"), (b"\xef\xbb\xbfplain", "plain"), ("süß".encode(), "süß")):
        file.write_bytes(raw)
        assert read_prompt(str(file)) == {"prompt": prompt}
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "x"}')
    assert read_prompt(str(file)) == {"prompt": "x"}
    for text, says in (
        (" \n", "is empty"),
        ("[]", "neither a list of messages nor one of token ids"),
        ('[1, "x"]', "neither a list of messages"),
        ("[[1], [2]]", "neither a list of messages"),
        ("[" * 100_000, "too many brackets"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=says):
            read_prompt(str(file))


def test_a_file_that_is_almost_json_is_said_to_be_taken_for_text(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "request.json"
    for text in ('{"prompt": "x"', '{"prompt": "x"}\n{"prompt": "y"}\n', " [see below] and so on"):
        file.write_text(text)
        assert read_prompt(str(file)) == {"prompt": text}
        assert "begins as JSON does and is none" in capsys.readouterr().err
    file.write_text("see [below]")
    read_prompt(str(file))
    assert capsys.readouterr().err == ""


def test_the_locale_does_not_change_a_prompt() -> None:
    ran = run_cli("kvd", "why", "--engine", "http://127.0.0.1:1", "-", stdin="süß", env={"PYTHONIOENCODING": "ascii"})
    assert (ran.rc, "no server answers" in ran.stderr) == (4, True)


def engine(url: str, **told: Any) -> Report:
    body = {"canary": "aa", "hash_algorithm": "sha256", "hash_tokens": 32, "facts": {"dtype": "f32"}}
    return Report(url, engine={**body, **told})


def words(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.word for check in checks}


def test_engines_are_compared_and_what_is_not_known_is_unknown() -> None:
    assert words(compare([engine("a"), engine("b")])) == {"canary": "ok", "sharing": "ok"}
    assert words(compare([engine("a"), Report("b")])) == {"canary": "unknown"}
    assert words(compare([engine("a"), engine("b", canary=None, facts=None)])) == {"canary": "unknown"}
    assert words(compare([engine("a"), engine("b", hash_tokens=16, facts=None)])) == {"canary": "ok", "blocks": "fail"}
    assert words(compare([engine("a"), engine("b", facts={"dtype": "f16"})])) == {"canary": "ok", "sharing": "warn"}
    (check,) = [one for one in compare([engine("a"), engine("b", canary="bb")]) if one.name == "canary"]
    assert (check.word, "PYTHONHASHSEED" in check.hint) == ("fail", True)
    (check,) = [one for one in compare([engine("a"), engine("b", canary="bb", hash_algorithm="xxhash")]) if one.name == "canary"]
    assert "b has xxhash" in check.hint
