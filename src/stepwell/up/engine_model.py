"""What `up` asks the engine, so that the user need not configure it: the model, its tokenizer, its context length."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from stepwell.engines import ENGINES, vllm_command
from stepwell.engines.connections import EngineConnections
from stepwell.engines.engine import EngineHttp
from stepwell.engines.missing import find_missing
from stepwell.errors import EngineUnavailable
from stepwell.up.http import JsonAnswer, get_json

TIMEOUT = 300.0
"""Seconds: a vLLM that was started at the same time needs some minutes."""
POLL = 0.5
CHECK_TIMEOUT = 10.0
"""Seconds for all questions to one engine: the first token of a vLLM that has just started may take some."""
HOW_TO_START = vllm_command.one_line()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What an engine reports of the model that it serves; None if it does not report it."""

    name: str
    root: str | None
    """Folder on the engine's machine, or name on the Hugging Face hub."""
    window: int | None
    """Largest number of tokens of prompt and response together."""


def wait_for_model(
    address: str, key: str | None, on_wait: Callable[[str], None], timeout: float = TIMEOUT
) -> ServedModel:
    """Asks until the engine answers. EngineUnavailable says what to do if it does not, or with something else."""
    deadline = time.monotonic() + timeout
    while (answer := get_json(f"{address}/v1/models", key)).status in (0, 502, 503):
        if time.monotonic() > deadline:
            raise EngineUnavailable(
                f"no engine answers at {address} after {timeout:g} s: {answer.message}; start one ({HOW_TO_START}), "
                "or name another with --engine"
            )
        on_wait(f"{answer.message} (tries for {timeout:g} s); if none runs, start one: {HOW_TO_START}")
        time.sleep(POLL)
    return read_model(address, answer)


def missing_lines(addresses: Sequence[str], key: str | None, timeout: float = CHECK_TIMEOUT) -> dict[str, list[str]]:
    """A line for each thing that engines lack: its cost, and the flag that helps; with the addresses of these engines.
    An engine that does not answer is a line too."""
    return asyncio.run(_missing_lines(addresses, key, timeout))


async def _missing_lines(addresses: Sequence[str], key: str | None, timeout: float) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    with closing(EngineConnections(key)) as connections:
        found = await asyncio.gather(
            *(_lacks(EngineHttp(connections, address, timeout), timeout) for address in addresses)
        )
    for address, lacks in zip(addresses, found, strict=True):
        for line in lacks:
            lines.setdefault(line, []).append(address)
    return lines


async def _lacks(http: EngineHttp, timeout: float) -> list[str]:
    try:
        async with asyncio.timeout(timeout):
            return [str(missing) for missing in await find_missing(http, ENGINES)]
    except (EngineUnavailable, TimeoutError) as failure:
        why = str(failure) or f"no answer within {timeout:g} s"
        return [f"what it lacks is not known ({why}); `stepwell doctor --engine ADDRESS` examines it"]


def read_model(address: str, answer: JsonAnswer) -> ServedModel:
    if answer.status in (401, 403):
        raise EngineUnavailable(f"the engine at {address} requires a key: set STEPWELL_GATEWAY_ENGINE_KEY to it")
    match answer.body:
        case {"data": [{"id": str(name), **rest}, *_]} if answer.status == 200:
            root, window = rest.get("root"), rest.get("max_model_len")
            return ServedModel(
                name=name,
                root=root if isinstance(root, str) and root else None,
                window=window if isinstance(window, int) else None,
            )
    raise EngineUnavailable(
        f"{address} lists no models at /v1/models ({answer.message}): is it an OpenAI-compatible server?"
    )


def tokenizer_of(model: ServedModel) -> str | None:
    """Path or name of its tokenizer for this machine; None if it is not known."""
    root = model.root
    is_path = root is not None and root.startswith(("/", "./", "../", "~"))
    return None if root is None or (is_path and not Path(root).expanduser().exists()) else root
