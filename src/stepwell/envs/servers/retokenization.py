"""Ids for the answers of servers that give text only: encoded again with the model's tokenizer. Worth less.

An answer that is text alone is encoded as it is. One with tool calls or thinking is encoded as the chat template would
show it in a history. The token that ends a turn is sampled but not shown, so it is added where the answer says that it
came to its end.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepwell.common.tokenizers import load_tokenizer
from stepwell.envs.servers.answers import turn_of
from stepwell.envs.servers.sequences import Turn
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.steps.step import Exactness, IntArray, ids_array
from stepwell.wire.openai import Sampled, read_ids, read_sampled

MORE_THAN_TEXT = ("tool_calls", "reasoning", "reasoning_content")


class TokenizerCache:
    """Each loaded when first asked for, once."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        self._loading = asyncio.Lock()

    async def named(self, name: str) -> Any:
        async with self._loading:
            if name not in self._loaded:
                try:
                    self._loaded[name] = await asyncio.to_thread(load_tokenizer, name)
                except BadRequest as failure:
                    raise BadRequest(f"{failure}; name the model's own in tokenizer_name") from None
            return self._loaded[name]


def encoded_turn(tokenizer: Any, asked: Mapping[str, Any], choice: dict[str, Any], place: int) -> Turn:
    """The choice at `place` of the answer to what was asked."""
    try:
        prompt, text = _prompt_and_text(tokenizer, asked, choice, place)
    except EngineUnavailable:
        raise
    except Exception as failure:  # noqa: BLE001 - chat templates raise anything
        why = " ".join(str(failure).split())
        raise EngineUnavailable(f"the server gives no token ids, and the chat cannot be encoded again: {why}") from None
    sampled = replace(read_sampled({}, choice), prompt_ids=prompt)
    ended = replace(sampled, response_ids=_response_ids(tokenizer, sampled, text))
    return turn_of(ended, Exactness.RETOKENIZED, choice)


def _prompt_and_text(
    tokenizer: Any, asked: Mapping[str, Any], choice: Mapping[str, Any], place: int
) -> tuple[IntArray, str]:
    if "messages" not in asked:
        prompt = _prompt_at(asked, place)
        ids = ids_array(tokenizer.encode(prompt)) if isinstance(prompt, str) else read_ids(list(prompt))
        return ids, str(choice.get("text") or "")
    shown = _rendered(tokenizer, asked, (), add_generation_prompt=True)
    message = choice.get("message") or {}
    text = str(message.get("content") or "")
    if any(message.get(name) for name in MORE_THAN_TEXT):
        text = _rest(shown, _rendered(tokenizer, asked, (message,), add_generation_prompt=False))
    return ids_array(tokenizer.encode(shown, add_special_tokens=False)), text


def _prompt_at(asked: Mapping[str, Any], place: int) -> str | Sequence[int]:
    """Of several prompts, that of the choice: choices stand prompt by prompt."""
    prompt: Any = asked["prompt"]
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return prompt  # type: ignore[no-any-return]
    return prompt[place // (asked.get("n") or 1)]  # type: ignore[no-any-return]


def _rest(prompt: str, whole: str) -> str:
    if not whole.startswith(prompt):
        raise EngineUnavailable("the chat template does not show an answer as it asks for one: it cannot be encoded")
    return whole[len(prompt) :]


def _response_ids(tokenizer: Any, sampled: Sampled, text: str) -> IntArray:
    """Up to the end of the turn. What was cut off has none; nor has an answer with a log-probability for all else."""
    ids, end = list(tokenizer.encode(text, add_special_tokens=False)), tokenizer.eos_token_id
    if end in ids:
        ids = ids[: ids.index(end)]
    counted = None if sampled.logprobs is None else len(sampled.logprobs)
    is_ended = sampled.finish_reason not in (None, "length") and end is not None and counted != len(ids)
    return ids_array([*ids, end] if is_ended else ids)


def _rendered(tokenizer: Any, asked: Mapping[str, Any], more: Sequence[Any], **how: bool) -> str:
    messages = [_for_template(message) for message in (*asked["messages"], *more)]
    return str(tokenizer.apply_chat_template(messages, tools=asked.get("tools") or None, tokenize=False, **how))


def _for_template(message: Any) -> dict[str, Any]:
    """Arguments of tool calls as objects, as engines hand them to templates."""
    plain = dict(message if isinstance(message, Mapping) else message.model_dump(exclude_none=True))
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_with_object(call) for call in plain["tool_calls"]]
    return plain


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}
