"""Settings that quietly defeat a shared cache: hash seeds, hipFile's switches, chunk size, engine flags."""

import re

from kvdoctor.facts import Engine, Facts
from kvdoctor.parse.versions import at_least
from kvdoctor.results import Result, command_evidence, file_evidence
from kvdoctor.rules.base import check, has_amd, quote, result, skip

FIXED_SEED_VLLM = (0, 32)
"""The vLLM wheel in which the fixed seed for sha256 block hashes was seen."""
SEED_MAX = 4294967295
SEED_FIX = "Export PYTHONHASHSEED=0 for every engine, the same on prefill and decode."
TRUE = ("1", "true", "yes", "on")


def seed_is_number(value: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,10}", value, re.ASCII)) and int(value) <= SEED_MAX


@check("cfg.hashseed", "P", "Hash seed")
def hashseed(facts: Facts) -> Result | list[Result]:
    """Block hashes must be equal in every process: PYTHONHASHSEED in the *engine's* environment, by the installed vLLM's rule."""
    engines = facts.engines
    if engines.log_builtin_hash:
        return result(
            "fail",
            "the engine itself logs that it hashes with a random seed",
            expected="PYTHONHASHSEED set",
            why="LMCache's builtin hash differs per process without it: nothing is ever found again.",
            fix=SEED_FIX,
            commands=["export PYTHONHASHSEED=0"],
            evidence=[file_evidence("engine log", engines.log_builtin_hash)],
        )
    if engines.processes:
        return [_seed(facts, engine) for engine in engines.processes]
    value = facts.env.get("PYTHONHASHSEED")
    if value is None and not (engines.vllm_version or engines.lmcache_version or engines.vllm_fixed_seed is not None):
        return skip("no engine here and none installed: export PYTHONHASHSEED=0 where it runs")
    return _seed(facts, Engine(environ=facts.env))


def _seed(facts: Facts, engine: Engine) -> Result:
    scope = f"pid {engine.pid}" if engine.pid else "host"
    evidence = [command_evidence(f"/proc/{engine.pid}/environ" if engine.pid else "environment", "PYTHONHASHSEED")]
    if engine.environ is None:
        return result(
            "info",
            "another user's engine: its environment may not be read",
            fix=SEED_FIX + " Or run kvdoctor as its user.",
            scope=scope,
        )
    value = engine.environ.get("PYTHONHASHSEED")
    if value is not None:
        if seed_is_number(value):
            return result("pass", f"PYTHONHASHSEED={value}", scope=scope, evidence=evidence)
        return result(
            "fail", f"PYTHONHASHSEED={value}", expected="a number, such as 0", fix=SEED_FIX, scope=scope, evidence=evidence
        )
    algorithm = _hash_algorithm(engine.args)
    fixed = facts.engines.vllm_fixed_seed
    if fixed is None and facts.engines.vllm_version:
        fixed = at_least(facts.engines.vllm_version, FIXED_SEED_VLLM)
    unset = "PYTHONHASHSEED is not set"
    if "xxhash" in algorithm:
        return result(
            "fail",
            f"{unset}, and {algorithm} takes its seed from it",
            fix=SEED_FIX,
            scope=scope,
            commands=["export PYTHONHASHSEED=0"],
        )
    if fixed is None:
        return result(
            "warn",
            f"{unset}, and which vLLM this is cannot be told",
            fix=SEED_FIX,
            scope=scope,
            commands=["export PYTHONHASHSEED=0"],
            confidence="low",
        )
    if fixed:
        return result(
            "info",
            f"{unset}; this vLLM falls back on a fixed seed for sha256",
            why="0 is the safe setting all the same.",
            scope=scope,
        )
    return result(
        "fail",
        f"{unset}, and this vLLM hashes with a random seed then",
        expected="PYTHONHASHSEED set",
        why="Block hashes differ per process, so no engine finds what another (or its own past) stored.",
        fix=SEED_FIX,
        commands=["export PYTHONHASHSEED=0"],
        scope=scope,
    )


def _hash_algorithm(args: list[str]) -> str:
    for i, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name == "--prefix-caching-hash-algo":
            return value if equals else args[i + 1] if i + 1 < len(args) else ""
    return "sha256"


@check("cfg.hipfile_env", "R", "hipFile's switches")
def hipfile_env(facts: Facts) -> Result:
    """Variables that turn the fast path, or its safety check, off."""
    if not has_amd(facts):
        return skip("no AMD GPU")
    env = facts.env

    def on(name: str) -> bool:
        return env.get(name, "").lower() in TRUE

    if on("HIPFILE_FORCE_COMPAT_MODE"):
        strict = env.get("HIPFILE_ALLOW_COMPAT_MODE", "").lower() in ("0", "false", "no", "off")
        return result(
            "fail",
            "HIPFILE_FORCE_COMPAT_MODE=true turns the fast path off"
            + (", and with ALLOW_COMPAT_MODE=false every request fails" if strict else ""),
            fix="Unset it.",
            commands=["unset HIPFILE_FORCE_COMPAT_MODE"],
        )
    if on("HIPFILE_UNSUPPORTED_FILE_SYSTEMS"):
        return result(
            "warn",
            "HIPFILE_UNSUPPORTED_FILE_SYSTEMS=true turns the file-system check off",
            why="It may corrupt data on file systems that mix cached and direct writes.",
            fix="Unset it, unless the path is NFS over RDMA and its vendor says so.",
            commands=["unset HIPFILE_UNSUPPORTED_FILE_SYSTEMS"],
        )
    if env.get("HIPFILE_ALLOW_COMPAT_MODE", "").lower() in ("0", "false", "no", "off"):
        return result("info", "strict: HIPFILE_ALLOW_COMPAT_MODE=false makes a refused request an error")
    return result("pass", "none set")


@check("cfg.chunk", "i", "Chunk size")
def chunk(facts: Facts) -> Result:
    """GPU-direct wants chunks of 128 MiB or more; a fixed number of tokens rarely gives that."""
    for name in ("KVD_CHUNK_TOKENS", "INFERA_KVD_CHUNK_TOKENS"):
        value = facts.env.get(name)
        if value and value.lower() != "auto":
            return result(
                "warn",
                f"{name}={value}",
                expected="auto",
                why="GPU-direct is worth its cost from chunks of 128 MiB on.",
                fix="Unset it, or set auto.",
                commands=[f"unset {quote(name)}"],
            )
    return result("pass", "auto")


@check("cfg.roots", "P", "hipFile's roots")
def roots(facts: Facts) -> Result:
    """INFERA_KVD_HIPFILE_ROOTS 'name=path,...': each a directory that the engine may write."""
    text = facts.env.get("INFERA_KVD_HIPFILE_ROOTS", "")
    if not text:
        return skip("INFERA_KVD_HIPFILE_ROOTS is not set")
    bad = [part for part in (item.strip() for item in text.split(",")) if part and not part.partition("=")[2].startswith("/")]
    if bad:
        return result("fail", f"not name=/path: {bad[0]}", expected="long=/nvme/kvd", fix="Write name=/path, separated by commas.")
    named = [part.partition("=")[2].strip() for part in text.split(",") if part.strip()]
    known = {path.path.rstrip("/"): path for path in facts.paths}
    broken, unseen = [], []
    for name in named:
        path = known.get(name.rstrip("/"))
        if path is None or path.exists is None:
            unseen.append(name)
        elif not path.exists or path.is_dir is False:
            broken.append(f"{name} is not a directory")
        elif path.writable is False:
            broken.append(f"{name} may not be written")
    if broken:
        return result("fail", "; ".join(broken), fix="Mend the path, or the variable.")
    if unseen:
        return skip(f"{', '.join(unseen)}: not looked at")
    return result("pass", ", ".join(named))


FLAGS = {
    "--no-enable-prefix-caching": "prefix caching is off: nothing is ever reused, and the connector has nothing to offer",
    "--disable-hybrid-kv-cache-manager": "",
    "--enforce-eager": "",
}


@check("cfg.engine_flags", "i", "Engine flags")
def engine_flags(facts: Facts) -> Result | list[Result]:
    """Flags of running engines that defeat caching."""
    if not facts.engines.processes:
        return skip("no engine runs here")
    found = []
    for engine in facts.engines.processes:
        told = [why for flag, why in FLAGS.items() if why and flag in engine.args]
        if any(word.startswith("--kv-transfer-config") for word in engine.args) is False:
            found.append(
                result(
                    "warn" if told else "info",
                    "; ".join([*told, "no --kv-transfer-config: this engine uses no connector"]),
                    scope=f"pid {engine.pid}",
                )
            )
        elif told:
            found.append(result("warn", "; ".join(told), fix="Drop that flag.", scope=f"pid {engine.pid}"))
        else:
            found.append(result("pass", "caching is on", scope=f"pid {engine.pid}"))
    return found
