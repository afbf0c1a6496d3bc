"""A harness of this machine, tried with the engine: is it installed, does it connect, do its turns join?

- It works on a small task as it does in a rollout, and its calls go to the doctor's gateway.
- How well the model does the task is not judged.
"""

import asyncio
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepwell.agents.cli_agents import HARNESSES, CommandLineHarness
from stepwell.agents.rollout import Rollout, Sample
from stepwell.common.processes import CommandFailed, plain_environment, run_command
from stepwell.doctor.findings import Check, Finding, Grade
from stepwell.doctor.local_gateway import AgentCall, LocalGateway
from stepwell.doctor.replies import CHAT, COMPLETIONS, MESSAGES, RESPONSES, ExaminedAnswer, ParsedReply
from stepwell.doctor.verdicts import BRIDGE_REMEDIES, NOT_BRIDGED, SEE_LOG, judge_ids, judge_logprobs
from stepwell.errors import BadRequest
from stepwell.gateway.error_responses import is_context_overflow
from stepwell.steps.columns import pack
from stepwell.steps.rows import merge_rows
from stepwell.steps.step import BRIDGED, RENDERED, Step
from stepwell.steps.trainable import SIDE_CALL

NOTE = "The word is heron.\n"
TASK = "Read the file note.txt with one of your tools. Then answer with the word that it keeps."
SHOWN = 400
"""Characters shown of what a harness wrote."""
RECORDED = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
LONGER_CONTEXT = "serve the model with a longer context (vLLM: --max-model-len): harnesses send 10,000 tokens and more"
TESTED = "docs/agents.md has the versions that were tested"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTimeouts:
    """The timeouts of a trial, in seconds."""

    version: float = 60.0
    task: float = 600.0


TIMEOUTS = TrialTimeouts()


def harness_named(name: str, harnesses: Mapping[str, type[CommandLineHarness]] = HARNESSES) -> type[CommandLineHarness]:
    if name not in harnesses:
        raise BadRequest(f"--harness: there is no {name!r}; there are: {', '.join(harnesses)}")
    return harnesses[name]


async def try_harness(
    doctor: LocalGateway, kind: type[CommandLineHarness], timeouts: TrialTimeouts = TIMEOUTS
) -> list[Check]:
    """The checks of one program; there is only one if it does not start."""
    start = await check_start(kind, timeouts.version)
    if start.grade is Grade.FAULT:
        return [Check("harness", start)]
    failure = ""

    async def work(rollout: Rollout) -> None:
        nonlocal failure
        failure = await _work(kind, rollout, timeouts.task)

    seen = await doctor.observe(work)
    return [
        Check("harness", start),
        Check("harness calls", judge_calls(seen.calls, failure)),
        Check("harness turns", judge_turns(seen.steps, _answered(seen.calls))),
    ]


async def check_start(kind: type[CommandLineHarness], timeout: float) -> Finding:
    """Finds out which program it is, and its version."""
    install = f"npm install -g {kind.package}"
    if (path := shutil.which(kind.program)) is None:
        return Finding(Grade.FAULT, f"not installed: there is no command {kind.program} in PATH", install)
    try:
        async with asyncio.timeout(timeout):
            version = await run_command([path, "--version"], env=plain_environment(), stdin=b"")
    except CommandFailed as failure:
        return Finding(Grade.FAULT, _shortened(str(failure)), f"install it anew: {install}")
    except TimeoutError:
        return Finding(Grade.FAULT, f"{path} --version did not end within {timeout:g} s", "try it by hand")
    return Finding(Grade.OK, f"{path}, {_shortened(version)}")


async def _work(kind: type[CommandLineHarness], rollout: Rollout, timeout: float) -> str:
    """How the harness failed; empty if it did not."""
    try:
        async with asyncio.timeout(timeout):
            await kind(lambda sample: TASK, _write_note)(rollout)
    except CommandFailed as failure:
        return _shortened(str(failure))
    except TimeoutError:
        return f"{kind.program} did not end within {timeout:g} s"
    return ""


def _write_note(sample: Sample, folder: Path) -> None:
    (folder / "note.txt").write_text(NOTE)


def judge_calls(calls: Sequence[AgentCall], failure: str) -> Finding:
    """`failure`: how the harness failed; empty if it did not."""
    if not calls:
        ended = failure or "it ended without an error"
        return Finding(Grade.FAULT, f"no call reached the gateway: {ended}", TESTED)
    counts = Counter(call.path for call in calls)
    made = ", ".join(f"{count} to {path}" for path, count in counts.items())
    refused = [call for call in calls if call.status >= 400]
    what = f"it made {_counted(len(calls), 'call')}: {made}"
    if refused:
        what += f"; {len(refused)} refused, the last with {refused[-1].refusal_text()}"
    if failure:
        what += f"; {failure}"
    if not failure and not refused:
        return Finding(Grade.OK, what)
    grade = Grade.FAULT if failure or not _answered(calls) else Grade.WARNING
    overflow = any(is_context_overflow({"message": call.refusal_text()}) for call in refused)
    return Finding(grade, what, LONGER_CONTEXT if overflow else SEE_LOG if refused else TESTED)


def judge_turns(steps: Sequence[Step], answered: int) -> Finding:
    """Whether the calls that were `answered` are steps with the engine's ids, and the turns among them one row."""
    if len(steps) < answered or not steps:
        what = f"{len(steps)} of {_counted(answered, 'answered call')} recorded"
        return Finding(Grade.FAULT if answered else Grade.UNKNOWN, what)
    examined = ExaminedAnswer(tuple(ParsedReply() for _ in steps), tuple(steps))
    for finding in (judge_ids(examined), judge_logprobs(examined)):
        if finding.grade is Grade.FAULT:
            return finding
    turns = sorted((step for step in steps if not _is_aside(step)), key=lambda step: step.started_at)
    aside = len(steps) - len(turns)
    recorded = f"{_counted(len(turns), 'turn')} recorded" + (f", {_counted(aside, 'side call')}" if aside else "")
    if len(turns) < 2:
        what = f"{recorded}: the model used no tool, so it was not seen whether turns join"
        return Finding(Grade.UNKNOWN, what, "try a model that calls tools")
    rows = len(merge_rows(pack(turns), np.zeros(len(turns), np.int64), np.zeros(1, np.int64)))
    if rows == 1:
        return Finding(Grade.EXACT, f"{recorded}: one row to train on")
    reasons = [turn.prompt_made.removeprefix(f"{RENDERED}: ") for turn in turns[1:] if turn.prompt_made != BRIDGED]
    what = f"{recorded}: {rows} rows to train on; not joined: {', '.join(dict.fromkeys(reasons))}"
    return Finding(Grade.WARNING, what, BRIDGE_REMEDIES.get(reasons[0], NOT_BRIDGED) if reasons else NOT_BRIDGED)


def _is_aside(step: Step) -> bool:
    """A turn may be untrainable, too, by its sampling; a gateway's --sampling decides that."""
    return (step.untrainable or "").startswith(SIDE_CALL)


def _answered(calls: Sequence[AgentCall]) -> int:
    """How many calls that are recorded were answered."""
    return sum(call.status == 200 and call.path.removeprefix("/v1").lstrip("/") in RECORDED for call in calls)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun if count == 1 else noun + 's'}"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} …"
