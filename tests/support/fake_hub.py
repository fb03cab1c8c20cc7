"""A Hugging Face Hub for tests, as far as buckets go: its HTTP calls on loopback, over a content store in a directory.

huggingface_hub and hf_xet are the real ones. What hf_xet reads and writes is the directory (its `local://` store), so contents
are cut, hashed, stored and put together as ever; only who keeps them is another. The HTTP calls are those of
huggingface_hub 2.4: create and describe a bucket, list it, look paths up, apply a batch, hand out tokens for the content store.

The server runs on threads of this process, since the content store may be open in one process only. `frozen` set, it takes
requests and does not answer; `failing` names paths that a batch refuses.
"""

import json
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.servers import Server

TOKEN = "hf_test"
PAGE = 100
"""Files on a page of a listing."""


class FakeHub(Server):
    """Buckets by id; in each, files by path: {path, size, xetHash, uploadedAt}."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets: dict[str, dict[str, dict[str, Any]]] = {}
        self.lock = threading.Lock()
        self.thawed = threading.Event()
        self.thawed.set()
        self.failing: set[str] = set()
        self.requests: list[str] = []
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def store(self) -> str:
        return f"local://{self.folder}/contents"

    def start(self) -> "FakeHub":
        (self.folder / "contents").mkdir(exist_ok=True)
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True, name="fake-hub").start()
        return self

    def wait(self) -> "FakeHub":
        return self

    def kill(self) -> None:
        if self._server is not None:
            self.thawed.set()
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def freeze(self) -> None:
        self.thawed.clear()

    def thaw(self) -> None:
        self.thawed.set()

    def content(self, xet_hash: str, size: int | None = None) -> bytes:
        """The bytes of this hash, by hf_xet from the store."""
        from hf_xet import XetFileInfo
        from huggingface_hub.utils._xet import get_xet_session

        if size == 0:
            return b""
        with get_xet_session().new_download_stream_group(endpoint=self.store) as group:
            return b"".join(group.download_stream(XetFileInfo(xet_hash, size)))

    def read(self, bucket: str, path: str) -> bytes:
        row = self.buckets[bucket][path]
        return self.content(row["xetHash"], row["size"])

    def api(self) -> Any:
        """huggingface_hub's client for it."""
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.url, token=TOKEN)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        """No log."""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(30)

    def _answer(self, code: int, body: Any = None, **headers: str) -> None:
        raw = json.dumps(body).encode() if body is not None else b""
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def _begin(self) -> "tuple[str, list[str], bytes] | None":
        """Bucket, the words behind it and the body; None where the request is answered already."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {self.path}")
        self.hub.thawed.wait(20)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials"}, X_Error_Message="Invalid credentials in Authorization header")
            return None
        words = urlsplit(self.path).path.removeprefix("/api/buckets/").split("/", 3)
        bucket = "/".join(words[:2])
        made = self.command == "POST" and len(words) == 2
        if not made and bucket not in self.hub.buckets:
            self._answer(404, {"error": "Not found"}, X_Error_Code="RepoNotFound", X_Error_Message="Bucket not found")
            return None
        return bucket, words[2:], body

    def do_GET(self) -> None:
        if (begun := self._begin()) is None:
            return
        bucket, words, _ = begun
        files = self.hub.buckets[bucket]
        if not words:
            size = sum(row["size"] for row in files.values())
            made = {"id": bucket, "private": True, "createdAt": "2026-01-01T00:00:00.000Z", "size": size, "totalFiles": len(files)}
            self._answer(200, made)
        elif words[0] in ("xet-write-token", "xet-read-token"):
            ends = int(time.time()) + 3600
            self._answer(200, {"casUrl": self.hub.store, "accessToken": "x", "exp": ends})
        else:
            self._tree(files, unquote(words[1]) if len(words) > 1 else "")

    def _tree(self, files: dict[str, dict[str, Any]], prefix: str) -> None:
        """A page of all files below the prefix; where more follow, a link says so."""
        query = dict(part.partition("=")[::2] for part in urlsplit(self.path).query.split("&"))
        start = int(query.get("cursor", 0))
        with self.hub.lock:
            rows = [row for path, row in sorted(files.items()) if path.startswith(prefix)]
        more = f"{self.hub.url}{urlsplit(self.path).path}?recursive=true&cursor={start + PAGE}"
        headers = {"Link": f'<{more}>; rel="next"'} if len(rows) > start + PAGE else {}
        self._answer(200, rows[start : start + PAGE], **headers)

    def do_POST(self) -> None:
        if (begun := self._begin()) is None:
            return
        bucket, words, body = begun
        if not words:
            known = bucket in self.hub.buckets
            self.hub.buckets.setdefault(bucket, {})
            self._answer(409 if known else 200, {"url": f"{self.hub.url}/buckets/{bucket}"})
        elif words[0] == "paths-info":
            with self.hub.lock:
                files = self.hub.buckets[bucket]
                self._answer(200, [files[path] for path in json.loads(body)["paths"] if path in files])
        else:
            self._batch(bucket, [json.loads(line) for line in body.splitlines()])

    def _batch(self, bucket: str, operations: list[dict[str, Any]]) -> None:
        files = self.hub.buckets[bucket]
        failed = []
        for one in operations:
            path = one["path"]
            if path in self.hub.failing:
                failed.append({"path": path, "error": "refused by the test"})
            elif one["type"] == "deleteFile":
                with self.hub.lock:
                    if files.pop(path, None) is None:
                        failed.append({"path": path, "error": "no such file"})
            else:
                row = {"type": "file", "path": path, "xetHash": one["xetHash"], "size": len(self.hub.content(one["xetHash"]))}
                row["uploadedAt"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
                with self.hub.lock:
                    files[path] = row
        done = len(operations) - len(failed)
        self._answer(200 if done or not failed else 422, {"success": not failed, "processed": done, "failed": failed})
