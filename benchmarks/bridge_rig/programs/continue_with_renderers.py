"""What the package `renderers` says to calls that were bridged. Runs in the environment of renderers, without ours.

A renderer is hand-written for a family of models. Which of them knows a template is found out: one that renders the
whole conversation of a call to the very ids of the template. It is asked to continue the recorded step.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from renderers import config_from_name, create_renderer  # type: ignore[import-not-found]
from renderers.base import RENDERER_REGISTRY, _populate_registry  # type: ignore[import-not-found]
from tokenizers import Tokenizer

NOT_TRIED = ("default", "gpt-oss")
"""The first never bridges. The second has a vocabulary of its own, which must be downloaded."""
CONTROL_IDS, OTHER_IDS = 10_000_000, 20_000_000
STANDS_FOR = {
    "<bos>": "<s>",
    "<|begin_of_text|>": "<s>",
    "<｜begin▁of▁sentence｜>": "<s>",
    "<｜end▁of▁sentence｜>": "</s>",
}
"""Templates get the same begin and end in this benchmark, whatever their model has."""


class AnyTokenizer:
    """The tokenizer of a template in this benchmark, as renderers want it. Control tokens that the template does not
    have get ids too, and are spelled out in what is compared."""

    name_or_path, unk_token_id = "benchmark", -1

    def __init__(self, controls: Sequence[str], file: str | None) -> None:
        self._ids = {text: CONTROL_IDS + place for place, text in enumerate(controls)}
        self._texts = {number: text for text, number in self._ids.items()}
        self._split = re.compile("(" + "|".join(map(re.escape, controls)) + ")")
        self._encode, self._decode = PLAIN if file is None else real_tokenizer(file)
        self.bos_token_id, self.eos_token_id = map(self.convert_tokens_to_ids, ("<s>", "</s>"))

    def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
        ids: list[int] = []
        for piece in self._split.split(text):
            if (control := self._control(piece)) is not None:
                ids.append(control)
            elif piece:
                ids += self._encode(piece)
        return ids

    def decode(self, ids: Sequence[int] | int, *args: Any, **options: Any) -> str:
        given = [ids] if isinstance(ids, int) else ids
        return "".join(
            "".join(map(self._texts.__getitem__, run)) if is_control else self._decode([*run])
            for is_control, run in groupby(given, key=self._texts.__contains__)
        )

    def convert_tokens_to_ids(self, text: str) -> int:
        if (control := self._control(text)) is not None:
            return control
        self._ids[text] = number = OTHER_IDS + len(self._ids)
        self._texts[number] = text
        return number

    def spelled(self, ids: Sequence[int]) -> list[int]:
        spelled: list[int] = []
        for number in ids:
            spelled += [number] if number < OTHER_IDS else self._encode(self._texts[number])
        return spelled

    def _control(self, text: str) -> int | None:
        known = self._ids.get(text)
        return self._ids.get(STANDS_FOR.get(text, text)) if known is None else known


Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]
PLAIN: tuple[Encode, Decode] = (lambda text: [*map(ord, text)], lambda ids: "".join(map(chr, ids)))


@cache
def real_tokenizer(file: str) -> tuple[Encode, Decode]:
    tokenizer = Tokenizer.from_file(file)
    return (
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
    )


def opinions(calls: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, list[str]]]:
    """Of each call: the renderers that know it, by what they say."""
    known: dict[str, set[str]] = {}
    """The renderers that know any call of a template, at the level of text."""
    loaded: dict[tuple[str, str | None], dict[str, tuple[AnyTokenizer, Any]]] = {}
    for call in calls:
        template, file = call["template"], call["tokenizer"]
        if (template, file) not in loaded:
            loaded = {(template, file): load(call["controls"], file, known.get(template))}  # the calls are sorted
        said: dict[str, list[str]] = defaultdict(list)
        for name, (tokenizer, renderer) in loaded[template, file].items():
            if (opinion := opinion_of(tokenizer, renderer, call)) is not None:
                said[opinion].append(name)
                known.setdefault(template, set()).add(name)
        yield said


def load(controls: Sequence[str], file: str | None, known: set[str] | None) -> dict[str, tuple[AnyTokenizer, Any]]:
    """The renderers that can be made with the control tokens of a template."""
    found: dict[str, tuple[AnyTokenizer, Any]] = {}
    for name in RENDERER_REGISTRY:
        if name in NOT_TRIED or not (file is None or name in (known or ())):
            continue
        tokenizer = AnyTokenizer(controls, file)
        try:
            found[name] = tokenizer, create_renderer(tokenizer, config_from_name(name))
        except (AssertionError, ValueError):  # it wants a control token that the template does not have
            continue
    return found


def opinion_of(tokenizer: AnyTokenizer, renderer: Any, call: Mapping[str, Any]) -> str | None:
    """None if this renderer cannot tell: it renders the conversation in another way than the template, or the reply
    ends with a token that is none of its model's ends."""
    messages, tools = [*map(as_expected, call["messages"])], call["tools"] or None
    if call["response"][-1] not in renderer.get_stop_token_ids():
        return None
    try:
        whole = tokenizer.spelled(renderer.render_ids(messages, tools=tools, add_generation_prompt=True))
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError):  # it refuses the messages
        return None
    if whole != call["whole"]:
        return None
    new = messages[call["reply_at"] + 1 :]
    bridged = renderer.bridge_to_next_turn(call["prompt"], call["response"], new, tools=tools)
    if bridged is None:
        return "refused"
    ids = tokenizer.spelled(bridged.token_ids)
    if ids == call["ids"]:
        return "same"
    delta = ids[len(call["prompt"]) + len(call["response"]) :]
    return "differs" if whole[-len(delta) :] == delta else "contradicts_itself"


def as_expected(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name != "reasoning"}
    if message.get("reasoning") is not None:
        kept["reasoning_content"] = message["reasoning"]
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [{**call, "function": with_parsed_arguments(call["function"])} for call in calls]
    return kept


def with_parsed_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {**function, "arguments": json.loads(function["arguments"] or "{}")}
    except ValueError:
        return dict(function)


def main() -> None:
    asked, answer = map(Path, sys.argv[1:])
    _populate_registry()
    answer.write_text(json.dumps(list(opinions(json.loads(asked.read_text())))))


if __name__ == "__main__":
    main()
