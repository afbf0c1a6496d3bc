"""Token ids for servers that return only text: the text is encoded with the model's tokenizer, and graded lower.

Plain text is encoded as it is. A message with tool calls or thinking is encoded as the chat template renders it in a
history. The token that ends a turn is sampled but not shown, so it is added if the reply was not cut off.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepwell.common.tokenizers import load_tokenizer
from stepwell.envs.servers.sequences import SampledTurn, turn_of
from stepwell.errors import BadRequest, EngineUnavailable
from stepwell.steps.step import Exactness, IntArray, ids_array
from stepwell.wire.openai import Sampled, read_ids, read_sampled

MORE_THAN_TEXT = ("tool_calls", "reasoning", "reasoning_content")


class TokenizerCache:
    """Each tokenizer is loaded once, when it is first needed."""

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


def encoded_turn(tokenizer: Any, request: Mapping[str, Any], choice: dict[str, Any], place: int) -> SampledTurn:
    """The choice at `place` of the reply to the request."""
    try:
        prompt, text = _prompt_and_text(tokenizer, request, choice, place)
    except EngineUnavailable:
        raise
    except Exception as failure:  # noqa: BLE001 - chat templates raise anything
        why = " ".join(str(failure).split())
        raise EngineUnavailable(f"the server gives no token ids, and the chat cannot be encoded again: {why}") from None
    sampled = replace(read_sampled({}, choice), prompt_ids=prompt)
    encoded = replace(sampled, response_ids=_response_ids(tokenizer, sampled, text))
    return turn_of(encoded, Exactness.RETOKENIZED, choice, request)


def _prompt_and_text(
    tokenizer: Any, request: Mapping[str, Any], choice: Mapping[str, Any], place: int
) -> tuple[IntArray, str]:
    if "messages" not in request:
        prompt = _prompt_at(request, place)
        ids = ids_array(tokenizer.encode(prompt)) if isinstance(prompt, str) else read_ids(list(prompt))
        return ids, str(choice.get("text") or "")
    rendered = _rendered(tokenizer, request, (), add_generation_prompt=True)
    message = choice.get("message") or {}
    text = str(message.get("content") or "")
    if any(message.get(name) for name in MORE_THAN_TEXT):
        text = _rest(rendered, _rendered(tokenizer, request, (message,), add_generation_prompt=False))
    return ids_array(tokenizer.encode(rendered, add_special_tokens=False)), text


def _prompt_at(request: Mapping[str, Any], place: int) -> str | Sequence[int]:
    """The prompt of the choice: choices come in the order of the prompts."""
    prompt: Any = request["prompt"]
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return prompt  # type: ignore[no-any-return]
    return prompt[place // (request.get("n") or 1)]  # type: ignore[no-any-return]


def _rest(prompt: str, whole: str) -> str:
    if not whole.startswith(prompt):
        raise EngineUnavailable("the chat template renders an answer in a history otherwise: it cannot be encoded")
    return whole[len(prompt) :]


def _response_ids(tokenizer: Any, sampled: Sampled, text: str) -> IntArray:
    """The ids before the end of the turn, then the end token, unless the reply was cut off or has exactly one
    log-probability for each of the other tokens."""
    ids, end = list(tokenizer.encode(text, add_special_tokens=False)), tokenizer.eos_token_id
    if end in ids:
        ids = ids[: ids.index(end)]
    logprob_count = None if sampled.logprobs is None else len(sampled.logprobs)
    is_ended = sampled.finish_reason not in (None, "length") and end is not None and logprob_count != len(ids)
    return ids_array([*ids, end] if is_ended else ids)


def _rendered(tokenizer: Any, request: Mapping[str, Any], more: Sequence[Any], **options: bool) -> str:
    messages = [_for_template(message) for message in (*request["messages"], *more)]
    return str(tokenizer.apply_chat_template(messages, tools=request.get("tools") or None, tokenize=False, **options))


def _for_template(message: Any) -> dict[str, Any]:
    """The message with the arguments of tool calls as objects, which templates expect."""
    plain = dict(message if isinstance(message, Mapping) else message.model_dump(exclude_none=True))
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_with_arguments_object(call) for call in plain["tool_calls"]]
    return plain


def _with_arguments_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}
