"""The body of a prewarm or why request, read and checked: which prompt is meant, and within which bounds.

    {"messages": [...]} | {"prompt": "..." or [ids]} | {"token_ids": [...]} | {"block_hashes": ["64 hex digits", ...]}
    with, optionally: model, cache_salt, kv_transfer_params (as in the request it is about), max_bytes, deadline_s

A recorded request is such a body already; what else stands in it (temperature, tools, ...) goes to the engine's own
renderer, so that the prompt is the one the request would have. A line of an OpenAI batch file is taken apart first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvd.connector.parameters import retention, slips, tenant
from kvtools.errors import UsageError
from kvtools.units import parse_size

KINDS = ("messages", "prompt", "token_ids", "block_hashes")
OURS = ("max_bytes", "deadline_s", "token_ids", "prompt_token_ids", "block_hashes")
"""Fields that the engine's own request does not have."""
DEADLINE_S = 30.0
MAX_DEADLINE_S = 600.0
MAX_TOKENS = 1 << 24


class BadBody(ValueError):
    """A body that cannot be meant: answered with 400. `field`: the one at fault."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Asked:
    """One request. `kind`: one of KINDS, with its `value`; `fields`: the body as the engine's own endpoint would take it.

    `max_bytes` None: no bound of the caller's. `tenant`: kvd_namespace; `retention`: as the request asked for it; `slips`: what
    its kv_transfer_params have that cannot be meant, in words.
    """

    kind: str
    value: Any
    fields: dict[str, Any]
    deadline_s: float = DEADLINE_S
    max_bytes: int | None = None
    tenant: str = ""
    retention: str = ""
    slips: tuple[str, ...] = ()


def read(body: Any) -> Asked:
    """Raises BadBody, naming the field."""
    if not isinstance(body, Mapping):
        raise BadBody("the body is not a JSON object")
    if isinstance(body.get("body"), Mapping) and "url" in body:
        body = body["body"]
    body = dict(body)
    if "prompt_token_ids" in body:
        body.setdefault("token_ids", body.pop("prompt_token_ids"))
    kinds = [kind for kind in KINDS if body.get(kind) is not None]
    if len(kinds) != 1:
        given = f"{' and '.join(kinds)} are" if kinds else "none is"
        raise BadBody(f"exactly one of {', '.join(KINDS)} is needed; {given} given", kinds[-1] if kinds else "")
    kind = kinds[0]
    value = body[kind]
    if kind == "prompt" and isinstance(value, list) and value and all(_is_id(one) for one in value):
        kind = "token_ids"
    value = _CHECKS[kind](value)
    parameters = body.get("kv_transfer_params") or {}
    if not isinstance(parameters, Mapping):
        raise BadBody("kv_transfer_params is not an object", "kv_transfer_params")
    fields = {name: one for name, one in body.items() if name not in OURS and one is not None}
    fields.pop("prompt" if kind == "token_ids" else "", None)
    return Asked(
        kind,
        value,
        fields,
        _deadline(body.get("deadline_s")),
        _bytes(body.get("max_bytes")),
        tenant(parameters),
        retention(parameters),
        tuple(slips(parameters).values()),
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _messages(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value or not all(isinstance(one, Mapping) for one in value):
        raise BadBody("messages is not a list of objects, or is empty", "messages")
    return value


def _prompt(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise BadBody("prompt is not one text (or one list of token ids): ask for one prompt at a time", "prompt")
    if not value:
        raise BadBody("prompt is empty", "prompt")
    return value


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not value or not all(_is_id(one) and one >= 0 for one in value):
        raise BadBody("token_ids is not a list of whole numbers, or is empty", "token_ids")
    if len(value) > MAX_TOKENS:
        raise BadBody(f"token_ids has {len(value)} entries, at most {MAX_TOKENS} are taken", "token_ids")
    return value


def _hashes(value: Any) -> list[bytes]:
    if not isinstance(value, list) or not value:
        raise BadBody("block_hashes is not a list of hexadecimal texts, or is empty", "block_hashes")
    try:
        hashes = [bytes.fromhex(one) for one in value]
    except (TypeError, ValueError):
        raise BadBody("a block hash is not hexadecimal", "block_hashes") from None
    if len({len(one) for one in hashes}) != 1 or not 8 <= len(hashes[0]) <= 64:
        raise BadBody("block hashes are of unequal length, or not 8 to 64 bytes long", "block_hashes")
    return hashes


_CHECKS = {"messages": _messages, "prompt": _prompt, "token_ids": _token_ids, "block_hashes": _hashes}


def _deadline(value: Any) -> float:
    if value is None:
        return DEADLINE_S
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_DEADLINE_S:
        raise BadBody(f"deadline_s is not a number of seconds up to {MAX_DEADLINE_S:g}", "deadline_s")
    return float(value)


def _bytes(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = parse_size(value)
        except UsageError as error:
            raise BadBody(f"max_bytes: {error.message}", "max_bytes") from None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadBody("max_bytes is neither a number of bytes above 0 nor a size such as 2GiB", "max_bytes")
    return value
