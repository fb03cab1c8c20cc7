"""From the body of a request to block hashes, through the engine's own renderer, on its server.

A chat or a completion goes through the very objects that serve /v1/chat/completions and /v1/completions, up to where they
would hand it to the engine; so templates, tools, images, adapters and salts count as they would there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams

from kvd.connector import hashing
from kvd.connector.asked import Asked
from kvd.connector.lora import IN_DOUBT, Adapters, whose
from kvd.connector.view import HashSource, View


class Refusal(Exception):
    """An answer that is an error: its HTTP status, a reason, the body's field at fault."""

    def __init__(self, status: int, message: str, field: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field


@dataclass(frozen=True)
class Prompt:
    """A prompt's block hashes and its length. `whose`: the tenant, and the adapter's weights, as `View.places` takes them.

    `rehash`: the same as another engine hashes it; None where tokens are not known.
    """

    hashes: list[bytes]
    tokens: int
    whose: str
    rehash: Callable[[HashSource], Sequence[bytes] | None]


async def prompt_of(asked: Asked, engine: Any, state: Any, view: View, adapters: Adapters) -> Prompt:
    """Raises Refusal."""
    if asked.kind == "block_hashes":
        length = len(bytes.fromhex(view.hashes.none_hash))
        if len(asked.value[0]) != length:
            raise Refusal(400, f"this engine's block hashes are {length} bytes ({view.hashes.algorithm})", "block_hashes")
        # One token more than the hashes cover: all of them may be hit then, since the last token never is.
        mine = _whose(asked, adapters, await _adapter_named(asked, state))
        return Prompt(list(asked.value), len(asked.value) * view.hashes.tokens + 1, mine, lambda source: None)
    core_request = await _core_request(asked, engine, state)

    def rehash(source: HashSource) -> Sequence[bytes] | None:
        try:
            return hashing.hashes_of(core_request, source) if source.none_hash and source.tokens else None
        except ValueError:  # a hash function that this engine does not have
            return None

    embeds = core_request.prompt_embeds
    tokens = len(core_request.prompt_token_ids) if core_request.prompt_token_ids is not None else len(embeds)
    return Prompt(hashing.hashes_of(core_request, view.hashes), tokens, _whose(asked, adapters, core_request.lora_request), rehash)


def _whose(asked: Asked, adapters: Adapters, lora: Any) -> str:
    mark = adapters.mark(lora)
    if mark is None:
        raise Refusal(
            409, f"nothing is stored or loaded for adapter {lora.lora_name!r} until the engine restarts: {IN_DOUBT}", "model"
        )
    return whose(asked.tenant, mark)


async def _adapter_named(asked: Asked, state: Any) -> Any:
    """The adapter that a body of block hashes names as its model; None: the model itself. Raises Refusal."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    serving = state.openai_serving_completion
    named = CompletionRequest(model=str(asked.fields.get("model") or "") or None, prompt=[0])
    error = getattr(await serving._check_model(named), "error", None)
    if error is not None:
        raise Refusal(int(error.code), str(error.message), str(error.param or ""))
    return serving._maybe_get_adapters(named)


async def _core_request(asked: Asked, engine: Any, state: Any) -> Any:
    """The request as the engine's core would get it. Raises Refusal."""
    from pydantic import ValidationError

    try:
        engine_input, lora = await _rendered(asked, state)
        tasks = await engine.get_supported_tasks()
        params = SamplingParams(max_tokens=1)
        return engine.input_processor.process_inputs("kvd-prompt", engine_input, params, tasks, lora_request=lora)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise Refusal(400, f"{field}: {first['msg']}", field) from None
    except Refusal:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise Refusal(400, str(error)) from None


async def _rendered(asked: Asked, state: Any) -> tuple[Any, Any]:
    """The engine's input, and the adapter it is for."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    fields = {name: value for name, value in asked.fields.items() if name not in ("messages", "prompt", "stream", "stream_options")}
    if asked.kind == "messages":
        serving = state.openai_serving_chat
        request: Any = ChatCompletionRequest(**fields, messages=asked.value)
        result = await serving.render_chat_request(request)
        inputs = result[1] if isinstance(result, tuple) else result
    else:
        serving = state.openai_serving_completion
        request = CompletionRequest(**fields, prompt=asked.value)
        inputs = await serving.render_completion_request(request)
    error = getattr(inputs, "error", None)
    if error is not None:
        raise Refusal(int(error.code), str(error.message), str(error.param or ""))
    if len(inputs) != 1:
        raise Refusal(400, f"{len(inputs)} prompts in one body: ask for one at a time", asked.kind)
    return inputs[0], serving._maybe_get_adapters(request)
