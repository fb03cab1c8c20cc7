"""The arena pinned for a GPU: what is registered, when, and what becomes of it; the runtime is a stand-in built here."""

import ctypes
import logging
import subprocess
from pathlib import Path

import pytest

from kvd.connector.attach import Links
from kvd.connector.link import Down, wait_up
from kvd.connector.metrics import Counters
from kvd.connector.pinning import Pinner, Runtime, Unpinned, pinner_for
from kvd.connector.settings import read_settings
from tests.support.daemon import MakeDaemon
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

SOURCE = """
#include <stddef.h>
int pinned, failing, last_flags; size_t bytes;
static void *known[16]; static size_t sizes[16];
static int take(void *p, size_t n, unsigned flags) {
    if (failing) return failing;
    if ((size_t)p % 4096) return 1;
    for (int i = 0; i < 16; i++) if (known[i] == p) return 712; /* already registered */
    for (int i = 0; i < 16; i++)
        if (!known[i]) { known[i] = p; sizes[i] = n; pinned++; bytes += n; last_flags = flags; return 0; }
    return 2;
}
static int leave(void *p) {
    for (int i = 0; i < 16; i++) if (known[i] == p) { known[i] = 0; pinned--; bytes -= sizes[i]; return 0; }
    return 713;
}
int cudaHostRegister(void *p, size_t n, unsigned f) { return take(p, n, f); }
int cudaHostUnregister(void *p) { return leave(p); }
int hipHostRegister(void *p, size_t n, unsigned f) { return take(p, n, f); }
int hipHostUnregister(void *p) { return leave(p); }
"""


class StandIn:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)

    def __getitem__(self, name: str) -> int:
        return (ctypes.c_size_t if name == "bytes" else ctypes.c_int).in_dll(self.library, name).value

    def fail(self, code: int) -> None:
        ctypes.c_int.in_dll(self.library, "failing").value = code


@pytest.fixture
def runtime(tmp_path: Path) -> StandIn:
    (tmp_path / "gpu.c").write_text(SOURCE)
    subprocess.run(["cc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", tmp_path / "libgpu.so", tmp_path / "gpu.c"], check=True)
    return StandIn(tmp_path / "libgpu.so")


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_both_mappings_are_pinned_and_let_go_with_their_connection(kvd_daemon: MakeDaemon, runtime: StandIn, kind: str) -> None:
    daemon = kvd_daemon(max_bytes="8MiB")
    links = Links(read_settings({}, {"KVD_SOCKET": str(daemon.socket)}), Counters())
    links._pinner = Pinner(Runtime(kind, [runtime.path]))
    assert wait_up(links.save(), 5)
    wait_until(lambda: runtime["pinned"] == 2)
    assert runtime["bytes"] == 2 * (8 << 20), "the arena as it is read, and as it is written"
    assert wait_up(links.load(), 5)
    wait_until(lambda: runtime["pinned"] == 3)
    assert runtime["last_flags"] == 8, "what is mapped for reading is registered so"
    daemon.kill9()
    with pytest.raises(Down):
        links.load().call(lambda client: client.stats())
    assert runtime["pinned"] == 2, "the lost one's memory is let go before it is unmapped"
    daemon.start()
    assert wait_up(links.load(), 20)
    wait_until(lambda: runtime["pinned"] == 3)
    links.close()
    assert runtime["pinned"] == 0


def test_a_refusal_is_said_once_and_nothing_else_changes(
    kvd_daemon: MakeDaemon, runtime: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = kvd_daemon(max_bytes="8MiB")
    runtime.fail(2)
    links = Links(read_settings({}, {"KVD_SOCKET": str(daemon.socket)}), Counters())
    links._pinner = Pinner(Runtime("cuda", [runtime.path]))
    with caplog.at_level(logging.WARNING, "vllm.kvd"):
        for link in (links.save(), links.load()):
            assert wait_up(link, 5)
            links._pinner.pin_soon(link.name, link._client).join()
    said = [record.message for record in caplog.records if "not pinned" in record.message]
    assert said == [
        "kvd: the arena is not pinned, transfers to and from the GPU are slower: cudaHostRegister of 8388608 bytes: error 2"
    ]
    assert links.save().call(lambda client: client.ping()) > 0
    links.close()


def test_no_runtime_is_an_answer(tmp_path: Path, runtime: StandIn) -> None:
    with pytest.raises(Unpinned, match="no cuda runtime"):
        Runtime("cuda", [str(tmp_path / "none.so")])
    with pytest.raises(Unpinned, match="has no such call"):
        Runtime("xpu", [runtime.path])
    assert pinner_for(None) is None, "an engine whose memory is the host's"
