"""The exactness matrix: families of chat templates × tools (none, one call, parallel calls) × streamed or not × dialect
(chat, Messages, Responses).

Each cell is a conversation of three or four turns through a real gateway with the bridge on, by an agent that uses the
vendor's package. It is
- `exact` if every recorded step has the prompt that the engine was sent, the tokens and the log-probabilities that it
  sampled, and every turn continues the tokens of the one before;
- `refused: reason` if the same is true, and the engine rendered a prompt anew because of its chat template;
- WRONG otherwise, also if streaming changes anything that the engine itself has not read otherwise.

The engine is a fake one with public chat templates and real tokenizers, which are fetched on first use
(scripts/chat_templates.py), and a model that writes as its template does. With --vllm it is real vLLM with a tiny model
(exactness_rig/observed_vllm.py).

    python -m benchmarks.exactness
    python -m benchmarks.exactness --vllm
    python -m benchmarks.exactness --docs          # and write the result into docs/bridge.md; also with --vllm
    python -m benchmarks.exactness --only llama    # families whose name has this word
    python -m benchmarks.exactness --all           # every public template, some 160
"""

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.exactness_rig.clients import Packages
from benchmarks.exactness_rig.conversations import ExactnessLab, exactness_lab
from benchmarks.exactness_rig.exactness_tables import DIALECTS, ExactnessCell, fault_lines, figures, lines, write_docs
from benchmarks.exactness_rig.families import FAMILIES, Family, all_templates, named
from benchmarks.exactness_rig.judge import differences, faults_of, outcome_of
from benchmarks.exactness_rig.observed_engines import ObservedEngine, observed_fake
from benchmarks.exactness_rig.observed_vllm import observed_vllm, shared_vllm
from benchmarks.exactness_rig.scripts import SCRIPTS, script, tools_of
from benchmarks.report import report

ROUNDING = 1e-3
"""On vLLM. Its sums depend on what the prefix cache has."""
OpenEngine = Callable[[Family], AbstractAsyncContextManager[ObservedEngine]]


@dataclass(frozen=True)
class ExactnessTrial:
    """How the cells are tried."""

    open_engine: OpenEngine = observed_fake
    options: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the agents."""
    rounding: float = 0.0
    """How much log-probabilities differ between two calls with the same prompt."""

    async def fill(self, lab: ExactnessLab, family: Family, kind: str, dialect: str) -> list[ExactnessCell]:
        """Whole and streamed."""
        turns, tools = script(kind, thinks=family.thinks), tools_of(kind)
        whole = await lab.converse(dialect, turns, tools, stream=False, **self.options)
        streamed = await lab.converse(dialect, turns, tools, stream=True, **self.options)
        found = {False: faults_of(whole), True: faults_of(streamed) + differences(whole, streamed, self.rounding)}
        return [
            ExactnessCell(family.name, kind, dialect, is_streamed, outcome_of(talk), tuple(found[is_streamed]))
            for is_streamed, talk in ((False, whole), (True, streamed))
        ]

    async def fill_family(self, family: Family, packages: Packages, show: Callable[[str], None]) -> list[ExactnessCell]:
        cells: list[ExactnessCell] = []
        async with self.open_engine(family) as engine, exactness_lab(engine, family.policy, packages) as lab:
            for kind in SCRIPTS:
                found = [cell for dialect in DIALECTS for cell in await self.fill(lab, family, kind, dialect)]
                show("\n".join([*lines(found), *fault_lines(found)]))
                cells += found
        return cells

    async def fill_all(self, families: Sequence[Family], show: Callable[[str], None]) -> list[ExactnessCell]:
        """`show` is told of each line when its cells are there."""
        packages = Packages.new()
        try:
            return [cell for family in families for cell in await self.fill_family(family, packages, show)]
        finally:
            await packages.close()


def try_on_vllm(families: Sequence[Family], show: Callable[[str], None]) -> list[ExactnessCell]:
    with shared_vllm(families) as vllm:
        trial = ExactnessTrial(partial(observed_vllm, vllm), {"temperature": 0.0}, ROUNDING)
        return asyncio.run(trial.fill_all(families, show))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families whose name has this word")
    parser.add_argument("--all", action="store_true", help="every public template as a family of its own")
    parser.add_argument("--vllm", action="store_true", help="real vLLM with a tiny model, for some of the families")
    parser.add_argument("--docs", action="store_true", help="write the result into docs/bridge.md")
    options = parser.parse_args()
    show = partial(print, flush=True)
    families = named(options.only, all_templates() if options.all else FAMILIES)
    if options.vllm:
        families = [family for family in families if family.on_vllm]
        cells = try_on_vllm(families, show)
    else:
        cells = asyncio.run(ExactnessTrial().fill_all(families, show))
    if options.docs:
        write_docs(cells, on_vllm=options.vllm)
    least = {} if options.only else {"families": 7}
    report(figures(cells), at_most={"wrong": 0}, at_least=least)


if __name__ == "__main__":
    main()
