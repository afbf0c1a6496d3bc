"""A second opinion on bridged calls: that of the package `renderers`, where it knows the chat template.

It renders and continues conversations of some model families by code that was written for each, without templates. The
calls go to one process in its environment (scripts/renderers_env.py), in a file, and its opinions come back in another.
"""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.bridge_rig.public_templates import fetched
from benchmarks.environments import installed_python
from stepwell.steps.step import IntArray

PROGRAM = Path(__file__).with_name("programs") / "continue_with_renderers.py"
ASKED_TOKENIZERS: Mapping[str, str | None] = {"text": None, "qwen": "qwen.json"}
"""The levels at which it is asked, with the files of their tokenizers."""
TIMEOUT = 3600.0
KINDS = ("differs", "same", "refused", "contradicts_itself")
DISAGREES = ("differs", "contradicts_itself")


@dataclass(frozen=True, eq=False)
class BridgedCall:
    template: str
    tokens: str
    controls: Sequence[str]
    prompt: IntArray
    """Of the step that is continued."""
    response: IntArray
    messages: Sequence[Mapping[str, Any]]
    """Of the call that continues it."""
    reply_at: int
    tools: Sequence[Any]
    whole: IntArray
    """As the template renders the call."""
    ids: IntArray
    """What the bridge sends."""


@dataclass(frozen=True)
class SecondOpinion:
    """Of one call, by renderers: each of them renders the whole conversation as the template does."""

    call: BridgedCall
    same: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    contradicts_itself: tuple[str, ...] = ()
    """It continues the conversation in another way than it renders it."""
    differs: tuple[str, ...] = ()


def second_opinions(calls: Iterable[BridgedCall]) -> list[SecondOpinion] | None:
    """Of the calls that a renderer knows. None if the package is not installed."""
    if (python := installed_python("renderers")) is None:
        return None
    asked = sorted((call for call in calls if call.tokens in ASKED_TOKENIZERS), key=_by_template_text_first)
    with TemporaryDirectory() as folder:
        question, answer = Path(folder, "calls"), Path(folder, "opinions")
        question.write_text(json.dumps([_as_json(call) for call in asked]))
        command = [str(python), str(PROGRAM), str(question), str(answer)]
        env = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)
        if done.returncode:
            raise RuntimeError(f"renderers has no opinions: {done.stderr[-4000:]}")
        told = json.loads(answer.read_text())
    said = zip(asked, told, strict=True)
    return [SecondOpinion(call, **{name: tuple(by) for name, by in of.items()}) for call, of in said if of]


def summary(opinions: Sequence[SecondOpinion]) -> dict[str, float]:
    """A call that renderers disagree about differs; otherwise one that continues it in the same way is enough."""
    counted = Counter(next(name for name in KINDS if getattr(opinion, name)) for opinion in opinions)
    return {
        "renderers_templates": len({opinion.call.template for opinion in opinions}),
        "renderers_calls": len(opinions),
        **{f"renderers_{kind}": counted[kind] for kind in KINDS},
    }


def _by_template_text_first(call: BridgedCall) -> tuple[str, int]:
    return call.template, list(ASKED_TOKENIZERS).index(call.tokens)


def _as_json(call: BridgedCall) -> dict[str, Any]:
    file = ASKED_TOKENIZERS[call.tokens]
    return {
        "template": call.template,
        "controls": call.controls,
        "tokenizer": None if file is None else str(fetched() / "tokenizers" / file),
        "prompt": call.prompt.tolist(),
        "response": call.response.tolist(),
        "messages": call.messages,
        "reply_at": call.reply_at,
        "tools": call.tools,
        "whole": call.whole.tolist(),
        "ids": call.ids.tolist(),
    }
