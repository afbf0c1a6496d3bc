"""Which fields of a request reach an engine: those that are listed here, and no others.

A field that is not listed is removed: engines have fields by which a request reaches beyond itself, and every release
adds some. An operator may list more of them, but none of PRIVATE_FIELDS.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from stepwell.engines import PRIVATE_FIELDS
from stepwell.errors import BadRequest
from stepwell.steps.trainable import is_text_part
from stepwell.wire.openai import Upstream

COMMON = frozenset(
    (
        *("model", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "logprobs"),
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias", "bad_words", "allowed_token_ids"),
        *("response_format", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens"),
        "thinking_token_budget",
    )
)
CHAT = COMMON | {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "reasoning_effort"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
}
COMPLETIONS = COMMON | {"prompt", "suffix"}
LISTED: Mapping[Upstream, frozenset[str]] = {Upstream.CHAT: CHAT, Upstream.COMPLETIONS: COMPLETIONS}
FOR_THE_GATEWAY = frozenset(("return_token_ids", "include_reasoning"))
"""The agent's wishes to the gateway. An engine kind asks for ids and reasoning in its own way."""
WITHOUT_EFFECT = frozenset(
    (
        *("user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "verbosity"),
        *("safety_identifier", "prediction", "modalities", "web_search_options", "echo"),
    )
)
"""Fields of OpenAI's own API that engines do not know. Many clients send them; their removal needs no word."""
TEMPLATE_SWITCHES = frozenset(
    ("enable_thinking", "thinking", "preserve_thinking", "clear_thinking", "reasoning_effort", "thinking_budget")
)
"""The switches of a chat template that a request may set, to a plain value."""
MEDIA = "_url"
"""How the name of a part's field ends that holds an address: image_url, video_url, audio_url."""
SHOWN = 40
"""Characters of a field's name."""


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The fields that an operator allows beside the listed ones."""

    fields: frozenset[str] = frozenset()
    media_hosts: frozenset[str] = frozenset()
    """Hosts from which an engine may fetch what a message shows, over https. Without any, it must be in the request."""
    calls_as_text: bool = False
    """Chat clients parse the model's tool calls themselves: the engine leaves them in the text."""

    def __post_init__(self) -> None:
        if private := sorted(self.fields & PRIVATE_FIELDS):
            raise BadRequest(f"{', '.join(private)}: by this, a request reaches beyond itself; it is never forwarded")

    def apply(self, request: dict[str, Any], upstream: Upstream) -> tuple[str, ...]:
        """Change a request in place. Returns the names of what was removed and could have had an effect."""
        removed: list[str] = []
        listed, more = LISTED[upstream], self.fields
        for name in [name for name in request if name not in listed and name not in more]:
            del request[name]
            if name not in FOR_THE_GATEWAY and name not in WITHOUT_EFFECT:
                removed.append(name[:SHOWN])
        if "chat_template_kwargs" in request and "chat_template_kwargs" not in self.fields:
            removed += _keep_switches(request)
        if upstream is Upstream.CHAT:
            self._check_media(request["messages"])
        return tuple(sorted(removed)) if removed else ()

    def _check_media(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            content = message.get("content")
            if type(content) is list:
                for part in content:
                    self._check_part(part)

    def _check_part(self, part: object) -> None:
        if not isinstance(part, dict) or is_text_part(part):
            return
        for name, media in part.items():
            if name.endswith(MEDIA) and media is not None:
                self._check_address(media.get("url") if isinstance(media, dict) else media, name[:SHOWN])

    def _check_address(self, url: object, kind: str) -> None:
        if isinstance(url, str) and url[:5].lower() == "data:":
            return
        try:
            address = urlsplit(url) if isinstance(url, str) else None
            if address and address.scheme == "https" and address.netloc.lower() in self.media_hosts:
                return
        except ValueError:
            pass
        allowed = ", ".join(sorted(self.media_hosts))
        raise BadRequest(
            f"{kind} must be in the request, as a data: URL"
            + (f", or at https:// of one of these hosts: {allowed}" if allowed else "; other addresses are not fetched")
        )


NO_MORE = RequestRules()


def _keep_switches(request: dict[str, Any]) -> list[str]:
    given = request.pop("chat_template_kwargs")
    if not isinstance(given, dict):
        return [] if given is None else ["chat_template_kwargs"]
    kept = {
        name: value
        for name, value in given.items()
        if name in TEMPLATE_SWITCHES and isinstance(value, (str, int, float, bool, type(None)))
    }
    if kept:
        request["chat_template_kwargs"] = kept
    return [f"chat_template_kwargs.{name[:SHOWN]}" for name in given.keys() - kept.keys()]
