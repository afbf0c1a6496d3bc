import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rig.builders import make_step
from rig.redactions import SECRET
from rig.vocabulary import encode
from rig.waiting import until
from stepwell.errors import BadRequest
from stepwell.gateway.recording.redaction import RedactionFailed, Redactor, load_redaction
from stepwell.steps.step import Step

MODULE = "rig.redactions"
PATIENT = 60.0


@asynccontextmanager
async def redacting(function: str, model: Path, **more: Any) -> AsyncIterator[Redactor]:
    redactor = Redactor(f"{MODULE}:{function}", str(model), restart_pause=0.01, **{"timeout": PATIENT, **more})
    running = asyncio.create_task(redactor.run())
    try:
        yield redactor
    finally:
        running.cancel()
        await asyncio.wait([running])


def said(text: str) -> Step:
    return make_step(prompt_ids=encode(text))


async def test_steps_are_masked_in_another_process(tiny_model: Path) -> None:
    async with redacting("printing", tiny_model) as redactor:
        clear, masked = await redactor.redact([said("hello"), said(f"I am {SECRET}")])
    assert clear.prompt_ids.tolist() == encode("hello")
    assert bytes(masked.prompt_ids.tolist()) == b"I am " + b"*" * len(SECRET)


async def test_a_failure_names_the_exception_and_not_its_text(tiny_model: Path) -> None:
    async with redacting("raising", tiny_model) as redactor:
        with pytest.raises(RedactionFailed, match=f"^{MODULE}:raising failed with ValueError$"):
            await redactor.redact([said(SECRET)])


@pytest.mark.parametrize(("function", "words"), [("hanging", "took more than 1 s"), ("dying", "ended its process")])
async def test_a_function_that_hangs_or_dies_costs_one_call(tiny_model: Path, function: str, words: str) -> None:
    async with redacting(function, tiny_model, timeout=1.0) as redactor:
        for _ in range(2):
            await until(lambda: redactor.why_not_ready() is None, "the function to be loaded")
            with pytest.raises(RedactionFailed, match=re.escape(words)):
                await redactor.redact([said(SECRET)])
            await until(lambda: redactor.why_not_ready() is None, "the function to be loaded")
            assert await redactor.redact([said("hello")])


async def test_a_process_that_dies_between_two_calls_costs_none(tiny_model: Path) -> None:
    async with redacting("dying_later", tiny_model) as redactor:
        assert await redactor.redact([said(SECRET)])
        await until(lambda: redactor.why_not_ready() is not None, "its end to be seen")
        assert await redactor.redact([said("hello")])


async def test_nothing_is_redacted_without_the_function(tiny_model: Path) -> None:
    async with redacting("missing", tiny_model, timeout=0.2) as redactor:
        await until(lambda: "has no 'missing'" in str(redactor.why_not_ready()), "the reason")
        with pytest.raises(RedactionFailed, match="has no 'missing'"):
            await redactor.redact([said("hello")])


async def test_calls_at_the_same_time_get_their_own_answers(tiny_model: Path) -> None:
    async with redacting("mails", tiny_model) as redactor:
        texts = [f"{n} {SECRET}" if n % 2 else str(n) for n in range(8)]
        found = await asyncio.gather(*(redactor.redact([said(text)]) for text in texts))
    stored = [bytes(step.prompt_ids.tolist()).decode() for (step,) in found]
    assert stored == [text.replace(SECRET, "*" * len(SECRET)) for text in texts]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{MODULE}:missing", "has no 'missing'"),
        (f"{MODULE}:SECRET", "is no plain function"),
        (f"{MODULE}:waiting", "is no plain function"),
        ("mails", "names no function"),
        ("no_such_module:mails", "could not be imported"),
    ],
)
def test_a_name_without_a_function_is_refused(name: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        load_redaction(name)
