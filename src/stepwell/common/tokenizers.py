"""The tokenizer, loaded in a thread of its own so that the gateway serves at once.

It decodes text for rewards. Recording touches it only where an engine gives no token ids, and grades what comes of it.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepwell.errors import NotReady
from stepwell.steps.step import IntArray, ids_array
from stepwell.wire.openai import NO_IDS, Sampled, read_ids

log = logging.getLogger("stepwell.gateway")


class BackgroundTokenizer:
    def __init__(self, path: str, load: Callable[[str], Any]) -> None:
        self._path = path
        self._load = load
        self._tokenizer: Any = None
        self._why = f"still loading from {path}"

    def start(self) -> None:
        threading.Thread(target=self._run, name="tokenizer", daemon=True).start()

    def why_not_ready(self) -> str | None:
        return None if self._tokenizer is not None else self._why

    def decode(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            raise NotReady(f"the tokenizer is not ready: {self._why}")
        return str(self._tokenizer.decode(ids))

    def encode_again(
        self, request: Mapping[str, Any], choices: Sequence[Sampled], texts: Sequence[str | None]
    ) -> list[Sampled]:
        """The choices with ids made from their texts; without ids, which condemns a step, where that cannot be done."""
        try:
            prompt_ids = self._encode_prompt(request)
        except Exception as failure:  # noqa: BLE001 - chat templates raise anything; the agent has its answer already
            log.warning("a prompt could not be encoded again: %s", " ".join(str(failure).split()))
            prompt_ids = NO_IDS
        return [
            replace(choice, prompt_ids=prompt_ids, response_ids=NO_IDS if text is None else self._encode(choice, text))
            for choice, text in zip(choices, texts, strict=True)
        ]

    def _encode_prompt(self, request: Mapping[str, Any]) -> IntArray:
        if self._tokenizer is None:
            raise NotReady(self._why)
        if "messages" not in request:
            prompt = request["prompt"]
            return ids_array(self._tokenizer.encode(prompt)) if isinstance(prompt, str) else read_ids(prompt)
        text = self._tokenizer.apply_chat_template(
            request["messages"], tools=request.get("tools"), add_generation_prompt=True, tokenize=False
        )
        return ids_array(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode(self, choice: Sampled, text: str) -> IntArray:
        """With the end of the turn, which is sampled but not shown, unless the log-probabilities have none for it."""
        if self._tokenizer is None:
            return NO_IDS
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        counted = None if choice.logprobs is None else len(choice.logprobs)
        ended = choice.finish_reason == "stop" and self._tokenizer.eos_token_id is not None and counted != len(ids)
        return ids_array([*ids, self._tokenizer.eos_token_id] if ended else ids)

    def _run(self) -> None:
        try:
            self._tokenizer = self._load(self._path)
        except Exception as failure:  # noqa: BLE001 - loaders raise anything; /ready must say it
            self._why = f"could not be loaded from {self._path}: {' '.join(str(failure).split())}"


def load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
