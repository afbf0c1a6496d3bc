"""The examples, against a real gateway before an engine whose answers are chosen: what they ask, score and send."""

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rig.fake_engine import FakeEngine, Reply, ToolCall
from rig.gateways import serve_gateway
from rig.group_files import read_lines, read_table
from rig.local_pool import LocalPool
from rig.threads import in_thread
from rig.vocabulary import pieces
from stepwell.envs import APIServerConfig, BaseEnv
from stepwell.envs.scored_data import ScoredDataItem

FOLDER = Path(__file__).parents[3] / "examples" / "envs"
NAMES = ("arithmetic", "calculator", "word_game")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def serving(*replies: str | Reply) -> AsyncIterator[str]:
    async with (
        FakeEngine(replies=replies) as engine,
        serve_gateway(LocalPool(), [engine.url], response_length=256) as url,
    ):
        yield url


@asynccontextmanager
async def opened(kind: type[BaseEnv], url: str, **config: Any) -> AsyncIterator[Any]:
    """The environment, set up, with answers from the server at `url`."""
    server = APIServerConfig(base_url=f"{url}/unrecorded/v1", model_name="tiny", api_key="not-needed")
    env = kind(kind.env_config_cls(**config), [server])
    try:
        await env.setup()
        yield env
    finally:
        await env.server.close()


def trained(rollout: ScoredDataItem) -> str:
    return "".join(pieces([token for token in rollout["masks"] if token != -100]))


def text(rollout: ScoredDataItem) -> str:
    return "".join(pieces(rollout["tokens"]))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 100


@pytest.mark.parametrize("name", NAMES)
def test_an_example_makes_groups_from_the_command_line(name: str, tmp_path: Path) -> None:
    flags = "process --groups 2 --group-size 3 --env.ensure-scores-are-not-same false --openai.model-name tiny".split()
    with in_thread(serving()) as url:
        command = [sys.executable, str(FOLDER / f"{name}.py"), *flags, "--openai.base-url", f"{url}/unrecorded/v1"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("groups in groups; to read: groups/groups.html\n")
    groups = list(read_lines(tmp_path / "groups" / "groups.jsonl"))
    assert len(groups) == 2
    assert list(read_table(tmp_path / "groups" / "groups.parquet")) == groups
    for group in groups:
        assert len(group["scores"]) == 3
        assert group["exactness"] == ["engine"] * 3
        assert group["policy_versions"] == [0] * 3
        assert list(map(len, group["inference_logprobs"])) == list(map(len, group["tokens"]))


async def test_sums_are_scored_by_the_number_at_the_end() -> None:
    arithmetic = load("arithmetic")
    async with serving("4 and 5 make 9.", "9? No: 10", "nothing") as url, opened(arithmetic.Arithmetic, url) as env:
        sum_of_nine = {"text": "What is 4 + 5?", "sum": 9}
        rollouts = [(await env.collect_trajectory(sum_of_nine))[0] for _ in range(3)]
    assert [rollout["scores"] for rollout in rollouts] == [1.0, 0.0, 0.0]
    assert trained(rollouts[0]) == "4 and 5 make 9."
    assert "What is 4 + 5?" in text(rollouts[0])


async def test_questions_go_on_where_a_checkpoint_left_them_and_evaluations_ask_others() -> None:
    arithmetic = load("arithmetic")
    async with serving() as url, opened(arithmetic.Arithmetic, url, eval_questions=3) as env:
        asked = [await env.get_next_item() for _ in range(3)]
        env.asked = 1
        assert await env.get_next_item() == asked[1]
        assert asked[0] != asked[1]
        assert set(await env.evaluate()) == {"eval/right"}


async def test_a_conversation_with_the_calculator_is_one_sequence() -> None:
    calculator = load("calculator")
    call = Reply(tool_calls=(ToolCall("calculator", {"expression": "12 * 34"}),))
    async with serving(call, "So it is\nAnswer: 401") as url, opened(calculator.Calculator, url) as env:
        rollout, _ = await env.collect_trajectory({"task": "What is 12 * 34 - 7?", "answer": 401})
    assert rollout["scores"] == 1.0
    assert '"12 * 34"' in trained(rollout)
    assert trained(rollout).endswith("Answer: 401")
    assert "408" in text(rollout)
    assert "408" not in trained(rollout)
    assert [message["role"] for message in rollout["messages"]] == ["system", "user", "assistant", "tool", "assistant"]


async def test_a_model_without_a_call_or_an_answer_is_reminded_until_its_turns_are_used_up() -> None:
    calculator = load("calculator")
    async with serving("Let me see", "Well", "Hm") as url, opened(calculator.Calculator, url, turns=3) as env:
        rollout, _ = await env.collect_trajectory({"task": "What is 12 * 34 - 7?", "answer": 401})
    assert rollout["scores"] == 0.0
    assert text(rollout).count(calculator.HINT) == 2
    assert trained(rollout) == "Let me seeWellHm"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"expression": "12 * 34"}', "408"),
        ('{"expression": "-2--3"}', "1"),
        ('{"expression": "__import__(1)"}', "Not understood: write an expression like 12 * 34"),
        ('{"expression": 3}', "Not understood: write an expression like 12 * 34"),
        ("[]", "Not understood: write an expression like 12 * 34"),
        ("{", "Not understood: write an expression like 12 * 34"),
    ],
)
def test_the_calculator_reads_sums_and_nothing_else(arguments: str, said: str) -> None:
    class Call:
        id = "c1"

        class function:  # noqa: N801 - the openai package's name
            pass

    Call.function.arguments = arguments  # type: ignore[attr-defined]
    assert load("calculator").result(Call)["content"] == said


async def test_every_player_has_a_sequence_and_a_score_of_its_own() -> None:
    word_game = load("word_game")
    replies = ("Eagle.", "eel", "lemon", "eagle", "no word")  # a word beyond the third is said by no one
    async with serving(*replies) as url, opened(word_game.WordGame, url, rounds=2) as env:
        first, second = await env.play("apple")
    assert (first["scores"], second["scores"]) == (1.0, 0.5)
    assert trained(first) == "Eagle.lemon"
    assert trained(second) == "eeleagle"
    assert "New words: apple. Yours begins with e." in text(first)
    assert "New words: apple, eagle. Yours begins with e." in text(second)
    assert "New words: eel. Yours begins with l." in text(first)
    assert "New words: lemon. Yours begins with n." in text(second)


async def test_the_sequences_of_one_seat_make_a_group() -> None:
    word_game = load("word_game")
    async with serving() as url, opened(word_game.WordGame, url, group_size=3, players=2, rounds=1) as env:
        groups, backlog = await asyncio.wait_for(env.collect_trajectories("apple"), 30)
    assert [len(group["scores"]) for group in groups] == [3, 3]
    assert backlog == []
    assert all("You are player 1 of 2" in text({"tokens": tokens}) for tokens in groups[0]["tokens"])
    assert all("You are player 2 of 2" in text({"tokens": tokens}) for tokens in groups[1]["tokens"])
