"""`/v1/chat/completions`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from rig.chatml import render_chat
from rig.fake_engine.asking import Ask, Json, ToolChoice, common_fields, required, whole
from rig.fake_engine.generation import FINGERPRINT, Generation, others
from rig.fake_engine.sampling import Output, ToolCall
from rig.vocabulary import encode, token_name

Template = Callable[[list[Json], list[Json], bool], str]
"""Renders messages and tools, with the beginning of a reply or without."""
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Chat:
    template: Template = render_chat
    takes_prompt_ids: Callable[[], bool] = lambda: True
    encode: Encode = encode

    def parse(self, body: Json) -> Ask:
        tools = body.get("tools") or []
        return Ask(
            model=required(body, "model"),
            prompt_ids=self._reused_ids(body) or self.render(body),
            max_tokens=whole(body, "max_completion_tokens") or whole(body, "max_tokens"),
            top_logprobs=(whole(body, "top_logprobs") or 0) if body.get("logprobs") else None,
            include_reasoning=body.get("include_reasoning") is not False,
            tool_choice=_tool_choice(body) if tools else "none",
            demanded=tools[0]["function"] if tools and _tool_choice(body) in ("required", "named") else None,
            **common_fields(body, body),
        )

    def render(self, body: Json) -> list[int]:
        gives_prompt = body.get("add_generation_prompt") is not False
        return self.encode(self.template(required(body, "messages"), body.get("tools") or [], gives_prompt))

    def _reused_ids(self, body: Json) -> list[int] | None:
        """As in vLLM, the ids for a prompt are ignored without a word where content is not text."""
        contents = [message.get("content") for message in required(body, "messages")]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        if not self.takes_prompt_ids() or any(part.get("type") != "text" or "uuid" in part for part in parts):
            return None
        return (body.get("kv_transfer_params") or {}).get("prompt_token_ids")

    def answer(self, generation: Generation) -> Json:
        ask = generation.ask
        return {
            "id": f"chatcmpl-{generation.id}",
            "object": "chat.completion",
            "created": generation.created,
            "model": ask.model,
            "choices": [_choice(generation, output) for output in generation.outputs],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": generation.full_usage(),
            "prompt_logprobs": None,
            "prompt_token_ids": ask.prompt_ids if ask.return_ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self, generation: Generation) -> list[Json]:
        ask, delta = generation.ask, {"role": "assistant", "content": ""}
        choices = [
            {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for output in generation.outputs
        ]
        prompt = {"prompt_token_ids": ask.prompt_ids if ask.return_ids else None, "prompt_text": None}
        return [_chunk(generation, choice) | prompt for choice in choices]

    def chunks(self, generation: Generation, output: Output) -> Iterator[Json | None]:
        ask, calls = generation.ask, _call_deltas(generation, output)
        for k in generation.steps(output):
            finish_reason = generation.finish_at(output, k)
            if _hides_reasoning(ask, output) and k < output.thought and not finish_reason:
                yield None
                continue
            choice: Json = {
                "index": output.index,
                "delta": calls[k] if k in calls and k < len(output.ids) else _text_delta(ask, output, k),
                "logprobs": _logprobs(ask, output, k, k + 1),
                "finish_reason": finish_reason and _finish_reason(generation, output),
                "token_ids": _shown_ids(ask, output, k, k + 1),
            }
            chunk = _chunk(generation, choice)
            if finish_reason:
                choice["stop_reason"] = output.stop_reason
                chunk |= {} if ask.include_usage else {"system_fingerprint": FINGERPRINT}
            yield chunk

    def closing(self, generation: Generation) -> Json:
        return _chunk(generation) | {"usage": generation.usage(), "system_fingerprint": FINGERPRINT}


def _tool_choice(body: Json) -> ToolChoice:
    choice = body.get("tool_choice") or "auto"
    return choice if isinstance(choice, str) else "named"  # type: ignore[return-value]


def _chunk(generation: Generation, *choices: Json) -> Json:
    return {
        "id": f"chatcmpl-{generation.id}",
        "object": "chat.completion.chunk",
        "created": generation.created,
        "model": generation.ask.model,
        "choices": list(choices),
    }


def _choice(generation: Generation, output: Output) -> Json:
    return {
        "index": output.index,
        "message": _message(generation, output),
        "logprobs": _logprobs(generation.ask, output, 0, len(output.ids)),
        "finish_reason": _finish_reason(generation, output),
        "stop_reason": output.stop_reason,
        "token_ids": _shown_ids(generation.ask, output, 0, len(output.ids)),
        "routed_experts": None,
    }


def _message(generation: Generation, output: Output) -> Json:
    message: Json = {
        "role": "assistant",
        "content": output.text if output.text or not output.thought else None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": output.reasoning if generation.ask.include_reasoning else None,
    }
    if calls := _calls(generation, output):
        text = output.reply.text if output.reply else ""
        message["content"] = text or (None if generation.ask.tool_choice == "auto" else "")
        message["tool_calls"] = [
            {
                "id": _call_id(generation, output, i),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json()},
            }
            for i, call in enumerate(calls)
        ]
    return message


def _calls(generation: Generation, output: Output) -> tuple[ToolCall, ...]:
    return output.reply.tool_calls if generation.ask.tool_choice != "none" and output.reply else ()


def _finish_reason(generation: Generation, output: Output) -> str:
    """As in OpenAI's API, calling the tool that the client named is an ordinary stop."""
    lifted = _calls(generation, output) and generation.ask.tool_choice != "named"
    return "tool_calls" if lifted else output.finish_reason


def _call_id(generation: Generation, output: Output, i: int) -> str:
    return _calls(generation, output)[i].id or f"chatcmpl-tool-{generation.id}-{output.index}-{i}"


def _call_deltas(generation: Generation, output: Output) -> dict[int, Json]:
    """The deltas of the tokens that write tool calls: a call's name with its first token, its arguments with its last.

    The tokens between have empty deltas, as vLLM's have while its parser holds text back.
    """
    deltas: dict[int, Json] = {}
    calls = _calls(generation, output)
    spans = output.reply.call_spans() if output.reply and calls else []
    for i, (call, (start, end)) in enumerate(zip(calls, spans, strict=True)):
        named = {"id": _call_id(generation, output, i), "type": "function", "index": i, "function": {"name": call.name}}
        argued = {"index": i, "function": {"arguments": call.arguments_json()}}
        deltas |= {k: {} for k in range(start, end)}
        deltas[start] = {"content": None, "tool_calls": [named]}
        deltas[end - 1] = {"content": None, "tool_calls": [argued]}
    return deltas


def _text_delta(ask: Ask, output: Output, k: int) -> Json:
    if not any(output.pieces[k : k + 1]):
        return {}
    if k >= output.thought:
        return {"content": output.pieces[k]}
    return {} if k in output.marks or not ask.include_reasoning else {"reasoning": output.pieces[k]}


def _hides_reasoning(ask: Ask, output: Output) -> bool:
    """Then vLLM sends no ids and no log-probabilities either, of the whole reply."""
    return bool(output.thought) and not ask.include_reasoning


def _shown_ids(ask: Ask, output: Output, start: int, end: int) -> list[int] | None:
    if not ask.return_ids or output.shown_ids is None or _hides_reasoning(ask, output):
        return None
    return output.shown_ids[start:end]


def _logprobs(ask: Ask, output: Output, start: int, end: int) -> Json | None:
    if ask.top_logprobs is None or _hides_reasoning(ask, output):
        return None
    tokens = zip(output.ids[start:end], output.pieces[start:end], output.logprobs[start:end], strict=True)
    asked = ask.top_logprobs, output.temperature
    return {"content": [_entry(token_name(token, piece), value, *asked) for token, piece, value in tokens]}


@lru_cache(maxsize=100_000)
def _entry(name: str, logprob: float, top: int, temperature: float) -> Json:
    """One token's entry; kept, because load tests ask for the same few thousand over and over."""
    shown = [_named(name, logprob), *(_named(chr(token), value) for token, value in others(top, temperature))]
    return _named(name, logprob) | {"top_logprobs": shown[:top]}


def _named(name: str, logprob: float) -> Json:
    return {"token": name, "logprob": logprob, "bytes": list(name.encode())}
