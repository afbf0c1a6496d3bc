"""A model that has learned its chat template: it writes a reply as the template shows it, and ends it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from benchmarks.bridge_rig.public_templates import END, NotRendered, PublicTemplate
from benchmarks.bridge_rig.tokenizing import Tokens

NEXT_OPENER = {True: "<|observation|>", False: "<|user|>"}
"""With what a model ends its calls, or else its answer, if its template does not end messages."""
AFTER_CLOSING_TAGS = ("<|end_of_msg|>",)
"""Ends of replies that are not the first control token after an answer: Kimi K3 closes tags before."""


@dataclass(frozen=True)
class Written:
    """The text of a reply as the model samples it."""

    text: str
    end: str
    """Its last word and what follows, to the token that ends the reply; empty if the template does not show it."""


@dataclass(frozen=True)
class TemplateWriter:
    template: PublicTemplate
    tokens: Tokens

    def write(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], last: str) -> Written:
        """The last of these messages, a reply that says that word last. NotRendered if the template refuses them."""
        whole = self.template.render(messages, tools, add_generation_prompt=False)
        at = whole.rfind(last)
        calls = bool(messages[-1].get("tool_calls"))
        if at < 0:
            return Written(last + self._stop("", calls=calls), "")
        end = last + self._ended(whole[at + len(last) :], calls=calls)
        return Written(whole[self._begin(messages[:-1], tools, whole, at) : at] + end, end)

    def _begin(self, asked: Sequence[Mapping[str, Any]], tools: Sequence[Any], whole: str, at: int) -> int:
        """Where the model begins to write the reply that says its last word at that place."""
        prompt = self.template.render(asked, tools)
        before = self.template.render(asked, tools, add_generation_prompt=False)
        opener = prompt.removeprefix(before)
        opened_at = len(before) if whole.startswith(before) else whole.rfind(opener.strip(), 0, at)
        if opened_at < 0:
            return at
        pairs = zip(whole[opened_at:at], opener, strict=False)
        return opened_at + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _ended(self, after: str, *, calls: bool) -> str:
        """What the template writes after the last word of a reply, to the token that ends it."""
        stop = self._stop(after, calls=calls)
        until = after.rfind(stop) if calls else after.find(stop)
        return (after.rstrip() if until < 0 else after[:until]) + stop

    def _stop(self, after: str, *, calls: bool) -> str:
        shown = self.tokens.controls_in(after)
        if not shown:
            opener = NEXT_OPENER[calls]
            return opener if opener in self.tokens.controls else END
        usual = self.usual_stop() if calls else _stop_in(shown)
        return usual if usual in shown else shown[-1]

    def usual_stop(self) -> str:
        """The token that ends an answer without calls."""
        asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "LASTWORD"}]
        try:
            after = self.template.render(asked, [], add_generation_prompt=False).rpartition("LASTWORD")[2]
        except NotRendered:
            return END
        return _stop_in(self.tokens.controls_in(after) or [END])


def _stop_in(controls: Sequence[str]) -> str:
    """The one of these control tokens, which follow an answer, with which the model ends it."""
    return next((control for control in controls if control in AFTER_CLOSING_TAGS), controls[0])
