"""The engine's weights, changed while it serves, the way a trainer changes them."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from rig.calls import get, post
from rig.tiny_model import PADDING_MARK, make_tiny_model
from rig.vllm_server import VllmServer
from rig.vocabulary import VOCABULARY_SIZE

PLAIN = frozenset((ord("\n"), *range(ord(" "), ord("~") + 1)))
"""The ids that a plain model writes; the line feed, the last id of every prompt, must be among them."""
NEW_LETTER = "~"
"""Written by new weights only: what stops at it stops after they came."""


def make_plain_model(folder: Path, *, seed: int, without: str = "") -> Path:
    """A tiny model that writes printable ASCII and never ends its turn: its ids are its text's bytes.

    It never writes the letters of `without`.
    """
    file = make_tiny_model(folder, seed=seed) / "model.safetensors"
    arrays = load_file(file)
    unspoken = [token for token in range(VOCABULARY_SIZE) if token not in PLAIN - set(without.encode())]
    arrays["model.embed_tokens.weight"][unspoken, 0] = PADDING_MARK
    save_file(arrays, file, metadata={"format": "pt"})
    return folder


@asynccontextmanager
async def paused(vllm: VllmServer, mode: str = "keep") -> AsyncIterator[None]:
    """`mode` says what becomes of calls under way: keep or abort."""
    assert (await post(f"{vllm.url}/pause?mode={mode}")).status == 200
    try:
        yield
    finally:
        assert (await post(f"{vllm.url}/resume")).status == 200


async def take_time(vllm: VllmServer, seconds: float) -> None:
    """Let each token take the engine that much longer, from now on."""
    rpc = {"method": "take_time", "kwargs": {"seconds": seconds}}
    assert (await post(f"{vllm.url}/collective_rpc", rpc)).status == 200


async def reload_weights(vllm: VllmServer, model: Path, version: str, *, mode: str = "keep") -> None:
    """The pause also empties the engine's prefix cache."""
    async with paused(vllm, mode):
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        assert (await post(f"{vllm.url}/collective_rpc", rpc)).status == 200
        assert (await post(f"{vllm.url}/update_weight_version", {"new_version": version})).status == 200


class Weights:
    def __init__(self, vllm: VllmServer, gateway_url: str) -> None:
        self._vllm = vllm
        self._gateway_url = gateway_url

    async def load(self, model: Path, version: str) -> None:
        """Between two calls; returns once the gateway knows."""
        await self.update(model, version)
        await self.known(version)

    async def known(self, version: str) -> None:
        """Returns once the gateway knows of it."""
        await until(lambda: self._is_known(version), f"the gateway to know of version {version}")

    async def update(self, model: Path, version: str, *, mode: str = "keep") -> None:
        """While calls are under way."""
        await reload_weights(self._vllm, model, version, mode=mode)

    async def logprobs(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> NDArray[np.float64]:
        """Of each response token, under the weights that are loaded now."""
        ids = [*prompt_ids, *response_ids]
        asked = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
        answer = (await post(f"{self._vllm.url}/inference/v1/generate", asked)).json()
        told = zip(ids, answer["prompt_logprobs"], strict=True)
        return np.array([entry[str(token)]["logprob"] for token, entry in list(told)[len(prompt_ids) :]])

    async def _is_known(self, version: str) -> bool:
        (engine,) = (await get(f"{self._gateway_url}/engines")).json()["engines"]
        return bool(engine["weight_version"] == version)


async def metric(vllm: VllmServer, name: str) -> float:
    """One of the engine's own, summed over its labels."""
    told = (await get(f"{vllm.url}/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", told, re.M))


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout: float = 30.0) -> None:
    try:
        async with asyncio.timeout(timeout):
            while not await condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {timeout:g} s for {what}") from None
