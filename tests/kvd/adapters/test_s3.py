"""`s3` on moto's server: away at start, killed, frozen, denied, no bucket; what it counts; a daemon over it."""

import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvd.store.retention import Retention
from kvd.tiers.adapters import registry
from kvd.tiers.adapters.base import Adapter, AdapterConfigError, AdapterError, Durability, Item, Loaded, Stored, Want
from kvd.tiers.adapters.objects import one_line
from kvd.tiers.adapters.s3 import NAME_MAX, PREFIX_MAX, S3Adapter
from tests.kvd.adapters.subjects import S3
from tests.kvd.adapters.test_conformance import body, get, ident, put
from tests.kvd.tiers.ram_tier import running
from tests.support.processes import wait_until
from tests.support.servers import MotoServer, Server, free_port

pytestmark = pytest.mark.real("s3")


def adapter_at(port: int, bucket: str, **more: Any) -> Adapter:
    spec = {"type": "s3", "bucket": bucket, "s3_endpoint": f"http://127.0.0.1:{port}", "timeout": "1s", **more}
    (adapter,) = registry.build([{"aws_access_key_id": "test", "aws_secret_access_key": "test", **spec}])
    return adapter


@pytest.fixture
def moto(servers: dict[str, Server]) -> MotoServer:
    server = servers["s3"].wait()
    assert isinstance(server, MotoServer)
    return server


@pytest.fixture
def bucket(moto: MotoServer, tmp_path: Path) -> str:
    return S3(tmp_path, moto).bucket


@pytest.fixture
def late() -> Iterator[MotoServer]:
    """A server that is started by the test."""
    server = MotoServer()
    try:
        yield server
    finally:
        server.remove()


def test_a_server_that_is_away_at_the_start_is_used_when_it_comes(late: MotoServer, caplog: pytest.LogCaptureFixture) -> None:
    adapter = adapter_at(late.port, "late", max_capacity_gb=1)
    adapter.open()
    wait_until(lambda: "serving without it" in caplog.text, what="the warning")
    for call in (
        lambda: put(adapter, 1),
        lambda: adapter.lookup([ident(1)]),
        lambda: get(adapter, 1),
        lambda: adapter.delete([ident(1)]),
    ):
        with pytest.raises(AdapterError, match=f"at http://127.0.0.1:{late.port}/late"):
            call()
    late.start().wait()
    late.request("PUT", "/late")
    assert put(adapter, 1).ok
    assert get(adapter, 1) == body(1)
    adapter.close()


def test_a_server_that_hangs_fails_within_the_timeout(moto: MotoServer, bucket: str) -> None:
    adapter = adapter_at(moto.port, bucket, timeout="200ms")
    adapter.open()
    put(adapter, 1)
    moto.freeze()
    try:
        begun = time.monotonic()
        with pytest.raises(AdapterError):
            get(adapter, 1)
        assert time.monotonic() - begun < 8
    finally:
        moto.thaw()
    wait_until(lambda: get(adapter, 1) == body(1), what="the server to answer again")
    adapter.close()


def test_no_such_bucket_is_an_error_and_not_a_miss(moto: MotoServer) -> None:
    adapter = adapter_at(moto.port, "there-is-no-such-bucket")
    adapter.open()
    with pytest.raises(AdapterError, match="cannot store") as caught:
        put(adapter, 1)
    assert "\n" not in caught.value.message
    adapter.close()


def test_a_batch_is_moved_side_by_side(moto: MotoServer, bucket: str) -> None:
    adapter = adapter_at(moto.port, bucket, timeout="10s")
    adapter.open()
    items = [Item(ident(n), memoryview(body(n))) for n in range(40)]
    assert adapter.store(items) == [Stored(True, "", Durability.FSYNC)] * 40
    buffers = [bytearray(5000) for _ in items]
    assert adapter.load([Want(ident(n), memoryview(buffers[n])) for n in range(40)]) == [Loaded.OK] * 40
    assert [bytes(buffer) for buffer in buffers] == [body(n) for n in range(40)]
    adapter.close()


def test_without_a_limit_it_still_counts_what_is_there(moto: MotoServer, bucket: str) -> None:
    first = adapter_at(moto.port, bucket)
    first.open()
    for number in range(5):
        put(first, number)
    assert first.usage().entries == 5
    first.delete([ident(0)])
    first.close()
    second = adapter_at(moto.port, bucket)
    second.open()
    wait_until(lambda: second.usage().entries == 4, what="the listing")
    assert second.usage().bytes_used == 4 * 5128
    assert second.usage().bytes_limit == 0
    second.close()


def test_prefixes_keep_daemons_apart_and_foreign_objects_are_left_alone(moto: MotoServer, bucket: str) -> None:
    mine = adapter_at(moto.port, bucket, prefix="/mine/")
    other = adapter_at(moto.port, bucket, prefix="other", name="other")
    put(mine, 1)
    put(other, 2)
    moto.request("PUT", f"/{bucket}/mine/v1/README", b"x")
    moto.request("PUT", f"/{bucket}/mine/v2/{'00' * 32}/{'00' * 32}", b"x")
    assert [identity for identity, _ in mine.enumerate()] == [ident(1)]
    mine.delete_namespace(ident(1)[:32])
    assert get(other, 2) == body(2)
    assert moto.request("GET", f"/{bucket}/mine/v1/README") == b"x"
    for adapter in (mine, other):
        adapter.close()


def test_a_huge_object_in_our_place_is_not_fetched(moto: MotoServer, tmp_path: Path) -> None:
    subject = S3(tmp_path, moto)
    with subject.opened() as adapter:
        put(adapter, 1)
        subject.set_raw(ident(1), subject.raw(ident(1)) + bytes(16 << 20))
        assert get(adapter, 1) is Loaded.CORRUPT
        assert put(adapter, 1).ok
        subject.set_raw(ident(1), subject.raw(ident(1)) + bytes(16 << 20))
        assert adapter.lookup([ident(1)]) == [None]
        assert adapter.counters.corruptions == 2
        assert get(adapter, 1) is Loaded.MISS
        assert put(adapter, 1).ok


def test_values_above_the_limit_are_not_sent(moto: MotoServer, bucket: str) -> None:
    adapter = adapter_at(moto.port, bucket, max_value_bytes=1000)
    assert put(adapter, 1, bytes(1001)) == Stored(False, "too_large")
    assert put(adapter, 2, bytes(1000)).ok
    adapter.close()


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"s3_num_io_threads": 0}, "field 's3_num_io_threads': not a number from 1 to 256"),
        ({"max_capacity_gb": -1}, "field 'max_capacity_gb'"),
        ({"s3_endpont": "x"}, "unknown field 's3_endpont'"),
        ({"aws_secret_access_key": "env:KVT_NOT_SET"}, "environment variable KVT_NOT_SET is not set"),
    ],
)
def test_what_cannot_be_meant(more: dict[str, Any], line: str) -> None:
    with pytest.raises(AdapterConfigError, match=line):
        adapter_at(1, "bucket", **more)


def test_endpoints() -> None:
    made = registry.build([{"type": "s3", "bucket": "kv-cache", "s3_endpoint": "minio:9000", "disable_tls": True}])[0]
    assert isinstance(made, S3Adapter)
    assert made.where == "https://minio:9000/kv-cache"
    made.close()


def test_a_daemon_over_s3(moto: MotoServer, bucket: str) -> None:
    keys = [bytes([i]) * 32 for i in range(12)]
    with running(adapter_at(moto.port, bucket, timeout="10s")) as daemon, daemon.client(timeout_s=10) as client:
        for i, key in enumerate(keys):
            assert client.put(key, bytes([i]) * 30_000)
        assert client.flush(timeout_s=20) == "fsync"
        daemon.evict_all()
        assert client.prefix(keys).length == 12
        assert client.get_many(keys) == [bytes([i]) * 30_000 for i in range(12)]
        assert client.clear() == 12
        assert client.get(keys[0]) is None


def test_a_daemon_over_no_server_serves(servers: dict[str, Server]) -> None:
    with running(adapter_at(free_port(), "none"), drain_s=0.3) as daemon, daemon.client() as client:
        assert client.put(b"k" * 32, b"value" * 1000)
        assert client.get(b"k" * 32) == b"value" * 1000
        assert client.get(b"x" * 32) is None
        assert daemon.tier().name == "s3"


def test_what_the_server_says_comes_first(moto: MotoServer, caplog: pytest.LogCaptureFixture) -> None:
    """Its XML begins behind two hundred characters of the client's own, and a line ends somewhere."""
    adapter = adapter_at(moto.port, "no-such-bucket")
    adapter.open()
    where = f"http://127.0.0.1:{moto.port}/no-such-bucket"
    assert f"cannot list at {where}: NoSuchBucket: The specified bucket does not exist (" in caplog.text
    with pytest.raises(AdapterError) as caught:
        put(adapter, 1)
    assert f"cannot store at {where}: NoSuchBucket: The specified bucket" in caught.value.message
    assert "<" not in caught.value.message
    adapter.close()
    assert one_line(OSError("refused")) == "refused"
    assert one_line(OSError("403: <Error><Code>AccessDenied</Code></Error>")) == "AccessDenied (403)"


class _Empty(BaseHTTPRequestHandler):
    """A bucket with nothing in it."""

    def do_GET(self) -> None:
        body = b'<?xml version="1.0"?><ListBucketResult><Name>kv-cache</Name><IsTruncated>false</IsTruncated></ListBucketResult>'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def tls_bucket(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """The port of a server with a certificate of its own, and the file that has it."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=kv"]
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"]
    made = subprocess.run(["openssl", *words, *more, "-keyout", key, "-out", certificate], capture_output=True)
    assert made.returncode == 0, made.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Empty)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1], certificate
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("trusted", [True, False])
def test_certificates_of_ones_own_are_trusted_where_ssl_cert_file_names_them(
    tls_bucket: tuple[int, Path], trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, certificate = tls_bucket
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    spec = {"type": "s3", "bucket": "kv-cache", "s3_endpoint": f"https://127.0.0.1:{port}", "timeout": "1s"}
    (adapter,) = registry.build([spec | {"aws_access_key_id": "k", "aws_secret_access_key": "k"}])
    adapter.open()
    if trusted:
        assert list(adapter.enumerate()) == []
    else:
        with pytest.raises(AdapterError, match="cannot list"):
            list(adapter.enumerate())
    adapter.close()


def test_the_longest_prefix(moto: MotoServer, bucket: str) -> None:
    """S3 takes names of 1024 bytes: with the longest prefix that is taken, a value's name has just as many."""
    adapter = adapter_at(moto.port, bucket, prefix="p" * PREFIX_MAX)
    adapter.open()
    assert put(adapter, 1).ok
    assert get(adapter, 1) == body(1)
    assert isinstance(adapter, S3Adapter)
    assert len(adapter._name(ident(1)).encode()) == NAME_MAX
    adapter.close()


def filled(moto: MotoServer, bucket: str, count: int) -> S3Adapter:
    """One with room for ten values, which has taken the first `count`."""
    adapter = adapter_at(moto.port, bucket, max_capacity_gb=10 * 5128 / (1 << 30))
    assert isinstance(adapter, S3Adapter)
    adapter.open()
    for number in range(count):
        assert put(adapter, number).ok
    return adapter


def in_bucket(moto: MotoServer, bucket: str) -> int:
    """Bytes of all that is there, counted by somebody else."""
    other = adapter_at(moto.port, bucket, name="count", max_capacity_gb=1)
    other.open()
    wait_until(lambda: other._listed, what="the listing")  # type: ignore[attr-defined]
    used = other.usage().bytes_used
    other.close()
    return used


def test_what_could_not_be_evicted_is_still_counted_and_goes_later(moto: MotoServer, bucket: str) -> None:
    adapter = filled(moto, bucket, 10)
    unlink = adapter._unlink

    def away(identities: Sequence[bytes]) -> None:
        raise AdapterError("s3: cannot delete")

    adapter._unlink = away  # type: ignore[method-assign]
    for number in range(20, 40):
        with pytest.raises(AdapterError):
            put(adapter, number)
    with pytest.raises(AdapterError):
        adapter.store([Item(ident(0), memoryview(b"anew")), Item(ident(50), memoryview(bytes(5000)))])
    assert adapter.usage().bytes_used == in_bucket(moto, bucket) == 10 * 5128
    adapter._unlink = unlink  # type: ignore[method-assign]
    for number in range(60, 70):
        assert put(adapter, number).ok
        assert adapter.usage().bytes_used == in_bucket(moto, bucket) <= 10 * 5128
    adapter.close()


def test_a_put_that_fails_leaves_what_it_was_to_replace_counted(moto: MotoServer, bucket: str) -> None:
    adapter = filled(moto, bucket, 5)
    puts = adapter._puts
    adapter._puts = lambda items: [OSError("away")] * len(items)  # type: ignore[method-assign]
    for number in (3, 4, 5, 6):
        with pytest.raises(AdapterError):
            put(adapter, number)
    assert adapter.usage().bytes_used == in_bucket(moto, bucket) == 5 * 5128
    adapter._puts = puts  # type: ignore[method-assign]
    for number in range(4, 20):
        assert put(adapter, number).ok
        assert adapter.usage().bytes_used == in_bucket(moto, bucket) <= 10 * 5128
    adapter.close()


def test_what_is_deleted_while_it_is_listed_is_not_counted(moto: MotoServer, bucket: str) -> None:
    first = adapter_at(moto.port, bucket)
    for number in range(5):
        put(first, number)
    first.close()
    adapter = adapter_at(moto.port, bucket, max_capacity_gb=1)
    assert isinstance(adapter, S3Adapter)
    objects = adapter._objects

    def slow() -> Iterator[tuple[float, int, bytes]]:
        for number, row in enumerate(list(objects())):
            if number == 2:
                adapter.delete([ident(n) for n in range(4)])  # of some this has passed by, others it has yet to name
            yield row
            if number == 3 and not failed:
                failed.append(True)
                raise AdapterError("s3: cannot list")

    failed: list[bool] = []
    adapter._objects = slow  # type: ignore[method-assign]
    adapter.open()
    assert failed
    assert put(adapter, 9).ok
    assert adapter.usage().entries == 2
    assert adapter.usage().bytes_used == in_bucket(moto, bucket)
    adapter.close()


def test_what_goes_again_for_those_behind_it_in_a_batch_is_not_put(moto: MotoServer, bucket: str) -> None:
    adapter = adapter_at(moto.port, bucket, max_capacity_gb=2.5 * 5128 / (1 << 30))
    adapter.open()
    classes = [Retention.SHORT, Retention.LONG, Retention.LONG]
    results = adapter.store([Item(ident(n), memoryview(body(n)), klass) for n, klass in enumerate(classes)])
    assert [result.reason for result in results] == ["full", "", ""]
    assert adapter.usage().bytes_used == in_bucket(moto, bucket) == 2 * 5128
    assert [get(adapter, number) for number in range(3)] == [Loaded.MISS, body(1), body(2)]
    adapter.close()
