"""The bridge with public chat templates: in each way of continuing a conversation, and with each tokenizer, a call is
bridged as the template itself would render it, or refused with a reason.

The templates and three tokenizers are fetched from the package index on first use (scripts/chat_templates.py). The
decision, the probes and the new tokens are the gateway's own; what renders is transformers, as in vLLM. The judge of a
bridged call is in bridge_rig/talk.py, the cases are in bridge_rig/cases.py. Where the package `renderers` is installed
(scripts/renderers_env.py), it gives a second opinion on the calls of templates that it knows.

    python -m benchmarks.bridge_matrix
    python -m benchmarks.bridge_matrix --docs          # and write the result into docs/bridge.md
    python -m benchmarks.bridge_matrix --only gemma    # templates whose name has this word
"""

import argparse
import asyncio
from collections.abc import Sequence

from stepwell.gateway.bridge.recorded_turns import BridgeOutcome

from benchmarks.bridge_rig.cases import CASES, NEVER_BRIDGED
from benchmarks.bridge_rig.matrix_tables import BRIDGED, NOT_RENDERED, TEXT, WRONG, Cell, count, write_docs
from benchmarks.bridge_rig.public_templates import NotRendered, PublicTemplate, public_templates
from benchmarks.bridge_rig.second_opinion import DISAGREES, second_opinions, summary
from benchmarks.bridge_rig.talk import Judged, Talk
from benchmarks.bridge_rig.tokenizing import TOKENIZERS, Tokens
from benchmarks.report import report
from stepwell.gateway.bridge.template_probes import TemplateProbes

SENTINELS = ("qvkzxwpfgdjbkqxz", "mzjxqpwvkgfdbzkqvm")
"""Fixed, so that two runs give the same."""
EVERYTHING = (TEXT, *TOKENIZERS)


async def fill(template: PublicTemplate, tokens: Tokens, probes: TemplateProbes, case: str) -> Cell:
    talk = Talk(template, tokens, probes)
    try:
        await CASES[case](talk)
    except NotRendered:
        if not talk.judged.faults:
            return Cell(template.name, template.family, case, tokens.name, NOT_RENDERED)
    judged = talk.judged
    if case in NEVER_BRIDGED and BridgeOutcome.BRIDGED in judged.outcomes:
        judged.faults.append("such a call must not be bridged")
    if BridgeOutcome.FAILED in judged.outcomes:
        judged.faults.append("the bridge failed")
    faults = tuple(dict.fromkeys(judged.faults))
    outcome = WRONG if faults else _outcome(judged)
    return Cell(template.name, template.family, case, tokens.name, outcome, faults, tuple(judged.bridged))


def _outcome(judged: Judged) -> str:
    """The first reason for which a call of the case was not bridged."""
    return next((outcome for outcome in judged.outcomes if outcome is not BridgeOutcome.BRIDGED), BRIDGED)


async def fill_all(templates: Sequence[PublicTemplate], tokenizers: Sequence[str] = EVERYTHING) -> list[Cell]:
    cells: list[Cell] = []
    for template in templates:
        for name in tokenizers:
            tokens, probes = Tokens(name, template.controls), TemplateProbes(*SENTINELS)
            cells += [await fill(template, tokens, probes, case) for case in CASES]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="templates whose name has this word")
    parser.add_argument("--docs", action="store_true", help="write the result into docs/bridge.md")
    options = parser.parse_args()
    templates = [template for template in public_templates() if options.only in template.name.lower()]
    cells = asyncio.run(fill_all(templates))
    if options.only:
        for cell in cells:
            if cell.tokens == TEXT:
                print(f"{cell.template}, {cell.case}: {cell.outcome}")
    for case in CASES:
        counted = count(cell.outcome for cell in cells if cell.case == case and cell.tokens == TEXT)
        print(f"{case:27}", ", ".join(f"{outcome} {number}" for outcome, number in counted.items()))
    for cell in cells:
        if cell.faults:
            print(f"{cell.template}, {cell.case}, {cell.tokens}: {'; '.join(cell.faults)}")
    for cell in refused_by_tokenizer(cells):
        print(f"{cell.template}, {cell.case}: {cell.outcome} with {cell.tokens}")
    if options.docs:
        write_docs(cells)
    second = ask_renderers(cells)
    least = {} if options.only else {"templates": 130, "cases": 17, "tokenizers": 3}
    most = {"wrong": 0, **({"renderers_differs": 0} if second else {})}
    report(figures(cells) | second, at_most=most, at_least=least)


def ask_renderers(cells: Sequence[Cell]) -> dict[str, float]:
    """Figures of the second opinion; none if there is nobody to ask."""
    opinions = second_opinions(call for cell in cells for call in cell.bridged)
    if opinions is None:
        print("renderers is not installed (scripts/renderers_env.py): there is no second opinion")
        return {}
    for opinion in opinions:
        others = [f"{kind}: {', '.join(by)}" for kind in DISAGREES if (by := getattr(opinion, kind))]
        if others:
            roles = ", ".join(message["role"] for message in opinion.call.messages)
            print(f"{opinion.call.template}, {opinion.call.tokens}, {roles}: renderers {'; '.join(others)}")
    return summary(opinions)


def figures(cells: Sequence[Cell]) -> dict[str, float]:
    counted = count(cell.outcome for cell in cells)
    bridged, wrong, not_rendered = (counted.get(outcome, 0) for outcome in (BRIDGED, WRONG, NOT_RENDERED))
    return {
        "templates": len({cell.template for cell in cells}),
        "cases": len({cell.case for cell in cells}),
        "tokenizers": len({cell.tokens for cell in cells} - {TEXT}),
        "cells": len(cells),
        "bridged": bridged,
        "refused": len(cells) - bridged - wrong - not_rendered,
        "not_rendered": not_rendered,
        "wrong": wrong,
        "refused_by_tokenizer": len(refused_by_tokenizer(cells)),
    }


def refused_by_tokenizer(cells: Sequence[Cell]) -> list[Cell]:
    """Conversations that are bridged at the level of text, and not with a tokenizer."""
    bridged = {(cell.template, cell.case) for cell in cells if cell.tokens == TEXT and cell.outcome == BRIDGED}
    return [cell for cell in cells if cell.outcome != BRIDGED and (cell.template, cell.case) in bridged]


if __name__ == "__main__":
    main()
