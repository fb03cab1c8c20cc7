"""The engine's side of tests/support/engine.py: one real vLLM in this process, driven by JSON lines.

    python tests/support/engine_main.py IN_FD OUT_FD '{"model": ..., ...LLM arguments}'
    python tests/support/engine_main.py nursery

Each line in is [command, arguments]; each line out is {"ok": answer} or {"error": text}. What vLLM prints goes to stderr.
Commands are the methods of `Engine`. `hold`/`let_go` stop the connector's loading threads between the look-up and the copy,
which is where aborts, vanished chunks and dead daemons are most interesting.
"""

import ctypes
import errno
import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# The one function that eager mode still compiles counts ranks of log-probabilities: seconds, or half a minute with cold caches.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def _told(out: Any) -> dict[str, Any]:
    """A request's output as JSON."""
    sequence = out.outputs[0]
    chosen = zip(sequence.logprobs or (), sequence.token_ids, strict=False)
    return {
        "tokens": list(sequence.token_ids),
        "logprobs": [entry[token].logprob for entry, token in chosen],
        "cached": out.num_cached_tokens,
        "finish": sequence.finish_reason,
    }


def _raise(*_: Any, **__: Any) -> None:
    raise RuntimeError("sabotaged")


class FailingLibc:
    """The C library as the elastic pool uses it, whose every second mmap of memory to write fails."""

    def __init__(self, real: Any, code: int) -> None:
        self.real = real
        self.fallocate = real.fallocate
        self.munmap = real.munmap
        self._code = code
        self._calls = 0

    def mmap(self, address: int, length: int, protection: int, *more: int) -> Any:
        if protection & mmap.PROT_WRITE:
            self._calls += 1
            if not self._calls % 2:
                ctypes.set_errno(self._code)
                return ctypes.c_void_p(-1).value
        return self.real.mmap(address, length, protection, *more)


class Engine:
    """vLLM's LLM and what tests ask of it."""

    def __init__(self, **arguments: Any) -> None:
        from vllm import LLM

        defaults = {"enforce_eager": True, "block_size": 32, "enable_prefix_caching": True, "disable_log_stats": False}
        self.llm = LLM(**{**defaults, **arguments})
        self.gate = threading.Event()
        self.gate.set()
        self.held = 0
        self.whole: dict[Any, Any] = {}
        self._gate_loads()

    def _gate_loads(self) -> None:
        from kvd.connector.worker import Worker

        fetch = Worker._fetch

        def gated(worker: Any, job: Any) -> None:
            self.held += not self.gate.is_set()
            self.gate.wait(60)
            fetch(worker, job)

        Worker._fetch = gated  # type: ignore[method-assign]

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int = 8,
        params: dict[str, Any] | None = None,
        logprobs: int | None = 0,
        **more: Any,
    ) -> list[Any]:
        """Greedy: for each prompt the token ids, their log-probabilities, how many prompt tokens were cached, how it ended."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params else None
        how = SamplingParams(temperature=0, max_tokens=tokens, logprobs=logprobs, ignore_eos=True, extra_args=extra)
        batch: list[Any] = [{"prompt_token_ids": prompt, **more} for prompt in prompts]
        begun = time.perf_counter()
        outputs = self.llm.generate(batch, how, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return [{**_told(out), "seconds": seconds} for out in outputs]

    def embed(self, prompt: list[int]) -> list[float]:
        """What a pooling model answers."""
        (out,) = self.llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
        return list(out.outputs.embedding)

    def metrics(self) -> dict[str, float]:
        """vLLM's own metrics that have a plain value; labelled ones by `name{label}`."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                labels = {key: text for key, text in metric.labels.items() if key not in {"model_name", "engine"}}
                found[metric.name + ("{" + ",".join(labels.values()) + "}" if labels else "")] = value
        return found

    def reset(self, connector: bool = False) -> bool:
        """Forget the engine's own prefix cache; with `connector`, what the connector has stored too."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def hold(self) -> None:
        """From now on loads wait before they read."""
        self.held = 0
        self.gate.clear()

    def let_go(self) -> None:
        self.gate.set()

    def close(self) -> None:
        """Shut down as the API server does."""
        self._engine().engine_core.shutdown()

    def _engine(self) -> Any:
        return self.llm.llm_engine

    def begin(self, prompt: list[int], name: str, tokens: int = 8) -> str:
        """Add a request without waiting for it; its id."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True)
        return str(self._engine().add_request(name, {"prompt_token_ids": prompt}, how) or name)

    def step_until_held(self, loads: int = 1) -> None:
        """Step the engine until that many loads wait at the gate."""
        deadline = time.monotonic() + 20
        while self.held < loads:
            self._engine().step()
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.held} of {loads} loads were started")

    def abort(self, name: str) -> None:
        self._engine().abort_request([name])

    def drain(self, seconds: float = 30.0) -> dict[str, Any]:
        """Step until nothing is left; each request's last output. AssertionError when the engine does not come to rest."""
        deadline = time.monotonic() + seconds
        outputs = {}
        while self._engine().has_unfinished_requests():
            for out in self._engine().step():
                outputs[out.request_id] = _told(out)
            if time.monotonic() > deadline:
                raise AssertionError("the engine does not come to rest")
        for _ in range(3):  # deferred frees and the last reports
            self._engine().step()
        return outputs

    def free_blocks(self) -> list[int]:
        """Blocks free in the engine's pool, and all there are: what leaks shows here (in-process engines only)."""
        scheduler = self._engine().engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return [pool.get_num_free_blocks(), pool.num_gpu_blocks]

    def call(self, target: str, **more: Any) -> Any:
        """Call module:function here, where vLLM is imported already."""
        import importlib

        sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]
        module, _, function = target.partition(":")
        return getattr(importlib.import_module(module), function)(**more)

    def sleep(self, level: int = 1) -> None:
        self.llm.sleep(level)

    def wake(self) -> None:
        self.llm.wake_up()

    def starve(self, how: str = "") -> None:
        """Let no page be mapped any more, or all again (""): workers in this process only.

        "floor": the device keeps the rest for others. Else the kernel's answer to the second of each page's mmap calls, by its
        errno's name: the first one has to be taken back.
        """
        memory = self._worker()._kvtools_memory.pages.memory
        memory.min_free_bytes = (1 << 60) * (how == "floor")
        if isinstance(memory._libc, FailingLibc):
            memory._libc = memory._libc.real
        if how not in ("", "floor"):
            memory._libc = FailingLibc(memory._libc, getattr(errno, how))

    def nap(self) -> bool:
        """Send the worker to sleep behind the engine's back; whether its memory went."""
        self._worker().sleep(1)
        return bool(self._worker()._kvtools_memory.asleep)

    def _worker(self) -> Any:
        return self._engine().engine_core.engine_core.model_executor.driver_worker.worker

    def sabotage(self, broken: bool) -> None:
        """Make the connector's scheduler and worker raise in every call, or let them work again."""
        from kvd.connector.scheduler import Scheduler
        from kvd.connector.worker import Worker

        for kind, names in (
            (Scheduler, ("match", "allocated", "plan", "heard", "finished")),
            (Worker, ("start", "save", "results")),
        ):
            for name in names:
                if broken:
                    self.whole[kind, name] = getattr(kind, name)
                    setattr(kind, name, _raise)
                elif (kind, name) in self.whole:
                    setattr(kind, name, self.whole.pop((kind, name)))

    def log_stats(self) -> None:
        """Write the interval's line to the log now."""
        self._engine().do_log_stats()

    def preemptions(self) -> float:
        return sum(value for name, value in self.metrics().items() if name.startswith("vllm:num_preemptions"))


def small_shm(room: str) -> None:
    """A /dev/shm of this process's own of 64 KiB, of which `room` bytes are free. Before any thread is made."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags, who = 0x20000, (os.getuid(), os.getgid())  # CLONE_NEWNS
    steps = [(libc.unshare, flags | (0x10000000 if who[0] else 0))]  # CLONE_NEWUSER
    for call, *arguments in (
        *steps,
        (libc.mount, b"none", b"/", None, 0x44000, None),  # MS_REC | MS_PRIVATE: nobody else sees what follows
        (libc.mount, b"none", b"/dev/shm", b"tmpfs", 0, b"size=64k"),
    ):
        if call(*arguments):
            raise OSError(ctypes.get_errno(), "no mount namespace can be had here")
    Path("/dev/shm/filler").write_bytes(bytes((64 << 10) - int(room)))


def serve(reader: Any, writer: Any, arguments: dict[str, Any]) -> None:
    """Answer commands until the other end hangs up."""
    if room := os.environ.get("KVTEST_SHM_ROOM"):
        small_shm(room)

    def answer(line: dict[str, Any]) -> None:
        writer.write(json.dumps(line) + "\n")
        writer.flush()

    engine = Engine(**arguments)
    answer({"ok": "ready"})
    for line in reader:
        command, more = json.loads(line)
        try:
            answer({"ok": getattr(engine, command)(**more)})
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
    engine.close()


def nursery() -> None:
    """Import once, fork for each engine: most of an engine's start is imports. Requests are JSON lines on stdin."""
    import gc
    import signal

    from vllm import LLM  # noqa: F401 - for the sake of what it imports

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    for line in sys.stdin:
        wanted = json.loads(line)
        pid = os.fork()
        if not pid:
            os.environ.update(wanted["env"])
            log = os.open(wanted["log"], os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with open(wanted["out"], "w") as writer, open(wanted["in"]) as reader:
                try:
                    serve(reader, writer, wanted["arguments"])
                except BaseException:
                    # Before the pipe closes: whoever reads its end wants to know why.
                    import traceback

                    traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        print(pid, flush=True)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "nursery":
        nursery()
    else:
        incoming, outgoing = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
        os.dup2(2, 1)
        serve(incoming, outgoing, json.loads(sys.argv[3]))
