"""What a request asks for, the same for all three ways of asking."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Json = dict[str, Any]
ToolChoice = Literal["none", "auto", "required", "named"]
PauseMode = Literal["keep", "wait", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request to generate, its prompt already tokens."""

    model: str
    prompt_ids: list[int]
    max_tokens: int | None
    n: int
    seed: int
    """Requests without one get 0: the fake engine is deterministic even where vLLM is not."""

    ignore_eos: bool
    top_logprobs: int | None
    """How many alternatives to show for each token; None: no log-probabilities at all."""

    return_ids: bool
    stream: bool
    include_usage: bool
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    choice: str | None = None
    """The text that `structured_outputs` holds the reply to."""

    prompt_logprobs: int | None = None
    """Not None: tell the log-probabilities of the prompt's tokens too."""

    include_reasoning: bool = True
    tool_choice: ToolChoice = "none"
    """"none" also where no tools were given: calls then stay part of the text."""

    demanded: Mapping[str, Any] | None = None
    """The function that must be called."""


class RefusedError(Exception):
    """A request that vLLM answers with an error object."""

    def __init__(self, status: int, type_: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.type, self.param = status, type_, param

    def payload(self) -> Json:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.status}}


def common_fields(body: Mapping[str, Any], sampling: Mapping[str, Any]) -> Json:
    """The fields of an `Ask` that every way of asking spells alike; `sampling` may be the body itself."""
    return {
        "n": whole(sampling, "n") or 1,
        "seed": whole(sampling, "seed") or 0,
        "temperature": float(1.0 if sampling.get("temperature") is None else sampling["temperature"]),
        "stop": _stop(sampling.get("stop")),
        "choice": (body.get("structured_outputs") or {}).get("choice", [None])[0],
        "ignore_eos": bool(sampling.get("ignore_eos")),
        "return_ids": bool(body.get("return_token_ids")),
        "stream": bool(body.get("stream")),
        "include_usage": bool((body.get("stream_options") or {}).get("include_usage")),
    }


def _stop(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value or ())
    if not all(isinstance(stop, str) for stop in stops):
        raise RefusedError(400, "Bad Request", "Input should be a valid string: body.stop", "body.stop")
    return stops


def whole(body: Mapping[str, Any], name: str) -> int | None:
    """A number that vLLM takes as a whole one: 2.0 is one."""
    value = body.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and not (isinstance(value, int) and -(2**63) <= value < 2**63):
        raise RefusedError(400, "Bad Request", f"Input should be a valid integer: body.{name}", f"body.{name}")
    return value


def required(body: Mapping[str, Any], name: str) -> Any:
    if name not in body:
        raise RefusedError(400, "Bad Request", f"Field required: body.{name}", f"body.{name}")
    return body[name]


def fit(ask: Ask, *, model: str, max_model_len: int, adapters: Collection[str] = ()) -> Ask:
    """Refuse what vLLM refuses, and cut max_tokens down to the room that the prompt leaves, as it does."""
    if ask.model != model and ask.model not in tuple(adapters):
        message = f"The model `{ask.model}` does not exist. Valid aliases: {model}."
        raise RefusedError(404, "NotFoundError", message, "model")
    if not ask.temperature >= 0:
        message = f"temperature must be non-negative, got {ask.temperature}."
        raise RefusedError(400, "BadRequestError", message, "temperature")
    if "" in ask.stop:
        raise RefusedError(400, "BadRequestError", "stop cannot contain an empty string.", "stop")
    if ask.max_tokens is not None and ask.max_tokens > max_model_len:
        message = f"max_tokens={ask.max_tokens} cannot be greater than max_model_len={max_model_len}."
        raise RefusedError(400, "BadRequestError", message, "max_tokens")
    room = max_model_len - len(ask.prompt_ids)
    if room < 1:
        message = (
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
            f"{max_model_len + 1} input tokens, which exceeds this limit even without any output tokens."
        )
        raise RefusedError(400, "BadRequestError", message, "input_tokens")
    return ask if ask.max_tokens is None else replace(ask, max_tokens=min(ask.max_tokens, room))
