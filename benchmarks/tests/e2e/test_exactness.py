"""The exactness matrix in short: some families of chat templates with all tools and dialects, whole and streamed. All
are tried by `python -m benchmarks.exactness`, and some on real vLLM."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.exactness import ExactnessTrial
from benchmarks.exactness_rig.clients import Packages
from benchmarks.exactness_rig.conversations import exactness_lab
from benchmarks.exactness_rig.exactness_tables import CHAT, DIALECTS, EXACT, ExactnessCell
from benchmarks.exactness_rig.families import FAMILIES, Family
from benchmarks.exactness_rig.observed_engines import ObservedFake, observed_fake
from benchmarks.exactness_rig.scripts import NONE, ONE, PARALLEL
from rig.fake_engine import Faults

BY_NAME = {family.name: family for family in FAMILIES}
TRIED = ("ChatML", "Qwen 3, thinking kept", "Llama 3.1", "gpt-oss")


@pytest.fixture(scope="module")
def cells() -> list[ExactnessCell]:
    return asyncio.run(ExactnessTrial().fill_all([BY_NAME[name] for name in TRIED], show=lambda _: None))


def outcomes(cells: list[ExactnessCell], family: str, tools: str) -> set[str]:
    return {cell.outcome for cell in cells if (cell.family, cell.tools) == (family, tools)}


def test_every_conversation_is_exact_or_refused_for_its_template(cells: list[ExactnessCell]) -> None:
    assert len(cells) == len(TRIED) * 3 * len(DIALECTS) * 2
    assert [(cell, cell.faults) for cell in cells if cell.faults] == []


@pytest.mark.parametrize("family", ["ChatML", "Qwen 3, thinking kept"])
@pytest.mark.parametrize("tools", [NONE, ONE, PARALLEL])
def test_templates_of_chatml_are_exact_in_every_dialect(cells: list[ExactnessCell], family: str, tools: str) -> None:
    assert outcomes(cells, family, tools) == {EXACT}


def test_what_a_template_cannot_show_is_refused_in_every_dialect(cells: list[ExactnessCell]) -> None:
    assert outcomes(cells, "Llama 3.1", PARALLEL) == {"refused: not rendered"}
    assert outcomes(cells, "gpt-oss", NONE) == {"refused: close_differs"}


@asynccontextmanager
async def with_wrong_ids(family: Family) -> AsyncIterator[ObservedFake]:
    async with observed_fake(family) as engine:
        engine.fake.faults = Faults(wrong_id=True)
        yield engine


async def test_an_engine_that_tells_other_tokens_than_it_sampled_is_seen() -> None:
    family, packages = BY_NAME["ChatML"], Packages.new()
    trial = ExactnessTrial(with_wrong_ids)
    async with with_wrong_ids(family) as engine, exactness_lab(engine, family.policy, packages) as lab:
        found = await trial.fill(lab, family, NONE, CHAT)
    await packages.close()
    told = "the step has another response than the engine sampled"
    assert [any(fault.endswith(told) for fault in cell.faults) for cell in found] == [True, True]
