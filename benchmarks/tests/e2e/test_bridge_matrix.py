"""The bridge with public chat templates, one of each family and those that once were bridged wrongly; all of them are
tried by `python -m benchmarks.bridge_matrix`."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.bridge_matrix import fill_all
from benchmarks.bridge_rig.cases import CASES, NEVER_BRIDGED
from benchmarks.bridge_rig.matrix_tables import BRIDGED, NOT_RENDERED, Cell
from benchmarks.bridge_rig.public_templates import PublicTemplate, public_templates
from benchmarks.bridge_rig.second_opinion import second_opinions, summary

DIFFICULT = (
    "axolotl/pixtral",  # moves the system message
    "llama_cpp/Bielik-11B-v3.0-Instruct",  # results depend on earlier results
    "llama_cpp/Cohere2MoE",  # counts calls over the conversation
    "llama_cpp/Kimi-K3",  # closes tags with a token before it ends a reply
    "llama_cpp/NVIDIA-Nemotron-Nano-v2",  # ends a reply in two ways
    "trl/gemma4_v5",  # shows a reply's text after the results of its calls
    "vllm/tool_chat_template_functiongemma",  # lists the tools in every system message
    "vllm/tool_chat_template_mistral",  # moves the system message
)
PLAIN, GEMMA = "axolotl/qwen_25", "trl/gemma4_v5"
CHECKOUT = Path(__file__).parents[3]


def selected() -> list[PublicTemplate]:
    templates = public_templates()
    first = {template.family: template for template in reversed(templates)}
    chosen = {template.name: template for template in first.values()}
    return list((chosen | {t.name: t for t in templates if t.name in (*DIFFICULT, PLAIN)}).values())


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return asyncio.run(fill_all(selected()))


def test_no_call_is_bridged_in_another_way_than_its_template_renders_it(cells: list[Cell]) -> None:
    assert set(DIFFICULT) <= {cell.template for cell in cells}
    assert [cell for cell in cells if cell.faults] == []


def test_a_changed_or_cut_history_is_refused_for_its_own_reason(cells: list[Cell]) -> None:
    reasons = {
        case: {cell.outcome for cell in cells if cell.case == case and cell.outcome != NOT_RENDERED}
        for case in NEVER_BRIDGED
    }
    assert reasons == {
        "cut in thinking": {"cut_short"},
        "cut in a call": {"cut_short"},
        "edited reply": {"edited"},
        "compaction": {"no_parent"},
        "tools changed": {"tools_changed"},
        "image": {"media"},
    }


def test_chatml_is_bridged_in_every_case_that_may_be_and_has_no_thinking(cells: list[Cell]) -> None:
    outcomes = {cell.case: cell.outcome for cell in cells if cell.template == PLAIN and cell.tokens == "qwen"}
    with_thinking = {"user after thinking", "tool after thinking"}
    assert {case for case, outcome in outcomes.items() if outcome == BRIDGED} == (
        CASES.keys() - NEVER_BRIDGED - with_thinking
    )


def test_renderers_continues_the_conversations_that_it_knows_with_the_same_ids(cells: list[Cell]) -> None:
    subprocess.run([sys.executable, CHECKOUT / "scripts" / "renderers_env.py"], check=True)
    opinions = second_opinions(call for cell in cells for call in cell.bridged)
    assert opinions is not None
    assert summary(opinions)["renderers_differs"] == 0
    same = [opinion.call for opinion in opinions if opinion.same]
    assert {(call.template, call.tokens) for call in same} >= {(PLAIN, "text"), (PLAIN, "qwen"), (GEMMA, "text")}
    last_token_lost = replace(same[0], ids=same[0].ids[:-1])
    (opinion,) = second_opinions([last_token_lost]) or []
    assert opinion.differs
