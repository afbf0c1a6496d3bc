"""What the doctor says of a harness: not installed, not connected, refused, not recorded, not joined."""

from pathlib import Path
from typing import Any

import pytest
from stepwell.gateway.bridge.recorded_turns import BridgeOutcome

from stepwell.agents.cli_agents import HARNESSES, ClaudeCode
from stepwell.commands.doctor import DoctorSettings
from stepwell.doctor.findings import Finding, Grade
from stepwell.doctor.harness_trial import LONGER_CONTEXT, check_start, harness_named, judge_calls, judge_turns
from stepwell.doctor.local_gateway import AgentCall
from stepwell.errors import BadRequest
from stepwell.steps.step import BRIDGED, RENDERED, Exactness, Step, ids_array, logprobs_array

MESSAGES = "/v1/messages"
TOO_LONG = b'{"error": {"message": "This model\'s maximum context length is 2048 tokens."}}'


def turn(at: int, prompt: list[int], response: list[int], **fields: Any) -> Step:
    return Step(
        prompt_ids=ids_array(prompt),
        response_ids=ids_array(response),
        response_logprobs=logprobs_array([-0.5] * len(response)),
        trajectory_uid="t",
        prompt_uid="p",
        started_at=float(at),
        exactness=Exactness.ENGINE,
        **fields,
    )


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """The only command in PATH."""
    (claude := folder / "claude").write_text(f"#!/bin/sh\n{script}\n")
    claude.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return claude


async def test_a_harness_that_is_not_installed_is_a_fault_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await check_start(ClaudeCode, timeout=10) == Finding(
        Grade.FAULT,
        "not installed: there is no command claude in PATH",
        "npm install -g @anthropic-ai/claude-code",
    )


async def test_an_installed_harness_is_told_with_its_path_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program(tmp_path, monkeypatch, '[ "$1" = --version ] && echo 2.1.325')
    assert await check_start(ClaudeCode, timeout=10) == Finding(Grade.OK, f"{path}, 2.1.325")


async def test_a_harness_that_does_not_start_is_a_fault_with_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, monkeypatch, "echo it needs Node 24 >&2; exit 3")
    found = await check_start(ClaudeCode, timeout=10)
    assert found.grade is Grade.FAULT
    assert found.what.endswith("claude ended with exit code 3: it needs Node 24")


async def test_a_harness_that_hangs_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, "exec /bin/sleep 60")
    found = await check_start(ClaudeCode, timeout=0.2)
    assert (found.grade, found.what.endswith("did not end within 0.2 s")) == (Grade.FAULT, True)


def test_an_unknown_name_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(BadRequest, match="there is no 'clippy'; there are: claude-code, codex, "):
        harness_named("clippy")


def test_the_help_names_every_harness() -> None:
    told = DoctorSettings.model_fields["harness"].description or ""
    assert [name for name in HARNESSES if name not in told] == []


def test_no_call_is_a_fault_with_what_the_harness_wrote() -> None:
    found = judge_calls([], "claude ended with exit code 1: no such model")
    assert found.grade is Grade.FAULT
    assert found.what == "no call reached the gateway: claude ended with exit code 1: no such model"
    assert "it ended without an error" in judge_calls([], "").what


def test_calls_are_counted_by_path() -> None:
    calls = [AgentCall(MESSAGES, 200), AgentCall("/v1/messages/count_tokens", 200), AgentCall(MESSAGES, 200)]
    expected = "it made 3 calls: 2 to /v1/messages, 1 to /v1/messages/count_tokens"
    assert judge_calls(calls, "") == Finding(Grade.OK, expected)


def test_a_prompt_beyond_the_context_is_a_fault_that_says_so() -> None:
    found = judge_calls([AgentCall(MESSAGES, 400, TOO_LONG)], "claude ended with exit code 1: Prompt is too long")
    assert (found.grade, found.remedy) == (Grade.FAULT, LONGER_CONTEXT)
    assert "1 refused, the last with 400: This model's maximum context length is 2048 tokens." in found.what


def test_a_refusal_after_which_the_harness_went_on_is_a_warning() -> None:
    calls = [AgentCall(MESSAGES, 502, b"gone"), AgentCall(MESSAGES, 200)]
    found = judge_calls(calls, "")
    assert (found.grade, "1 refused, the last with 502: b'gone'" in found.what) == (Grade.WARNING, True)
    assert judge_calls(calls[:1], "").grade is Grade.FAULT


def test_turns_that_extend_one_another_are_one_row_and_side_calls_are_counted() -> None:
    first = turn(1, [1, 2], [3], untrainable="greedy: temperature is 0")
    second = turn(3, [1, 2, 3, 4], [5], prompt_made=BRIDGED)
    aside = turn(2, [9], [9], untrainable="side_call: title")
    found = judge_turns([second, first, aside], answered=3)
    assert found == Finding(Grade.EXACT, "2 turns recorded, 1 side call: one row to train on")


def test_turns_that_are_not_joined_are_a_warning_with_the_reason() -> None:
    reason = f"{RENDERED}: {BridgeOutcome.NO_RENDERER}"
    found = judge_turns([turn(1, [1, 2], [3]), turn(2, [1, 2, 7, 4], [5], prompt_made=reason)], answered=2)
    assert (found.grade, found.what) == (
        Grade.WARNING,
        "2 turns recorded: 2 rows to train on; not joined: no_renderer",
    )
    assert "--enable-scale-out" in found.remedy


def test_one_turn_does_not_show_whether_turns_join() -> None:
    found = judge_turns([turn(1, [1, 2], [3])], answered=1)
    assert (found.grade, found.what.startswith("1 turn recorded: the model used no tool")) == (Grade.UNKNOWN, True)


def test_an_answered_call_that_is_not_recorded_is_a_fault() -> None:
    found = judge_turns([turn(1, [1, 2], [3])], answered=2)
    assert (found.grade, found.what) == (Grade.FAULT, "1 of 2 answered calls recorded")
    assert judge_turns([], answered=0).grade is Grade.UNKNOWN


def test_a_turn_without_the_engines_ids_is_a_fault() -> None:
    broken = turn(1, [1, 2], [3], quarantine="no_response_ids: none")
    assert judge_turns([broken], answered=1).what == "no_response_ids: none"
