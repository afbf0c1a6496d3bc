"""What `up` finds out from the engine, so that nobody has to say it: the model, its tokenizer, its window."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stepwell.errors import EngineUnavailable
from stepwell.up.http import Answer, get, message

PATIENCE = 300.0
"""Seconds: a vLLM that was started together with this takes its time."""
POLL = 0.5
HOW_TO_START = "vllm serve MODEL --port 8001 --logprobs-mode processed_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What an engine says of the model that it serves; None is what it does not say."""

    name: str
    root: str | None
    """Folder, on the engine's machine, or name on the Hugging Face hub."""
    window: int | None
    """Tokens that prompt and response may have together."""


def wait_for_model(address: str, key: str | None, still_waiting: Callable[[str], None]) -> Model:
    """Ask until there is an answer. EngineUnavailable says what to do if there is none, or not the right one."""
    deadline = time.monotonic() + PATIENCE
    while (answer := get(f"{address}/v1/models", key)).status in (0, 502, 503):
        if time.monotonic() > deadline:
            raise EngineUnavailable(
                f"no engine answers at {address}: {message(answer)}; start one ({HOW_TO_START}), or name another "
                "with --engine"
            )
        still_waiting(f"{message(answer)}; if none runs, start one: {HOW_TO_START}")
        time.sleep(POLL)
    return read_model(address, answer)


def read_model(address: str, answer: Answer) -> Model:
    if answer.status in (401, 403):
        raise EngineUnavailable(f"the engine at {address} asks for a key: set STEPWELL_GATEWAY_ENGINE_KEY to it")
    match answer.body:
        case {"data": [{"id": str(name), **rest}, *_]} if answer.status == 200:
            return Model(name=name, root=_text(rest.get("root")), window=_whole(rest.get("max_model_len")))
    raise EngineUnavailable(
        f"{address} lists no models at /v1/models ({message(answer)}): is it a server that speaks OpenAI's API?"
    )


def tokenizer_of(model: Model) -> str | None:
    """Where its tokenizer is, as seen from here; None if that cannot be known."""
    if model.root is None or (_is_path(model.root) and not Path(model.root).expanduser().exists()):
        return None
    return model.root


def _is_path(root: str) -> bool:
    return root.startswith(("/", "./", "../", "~"))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
