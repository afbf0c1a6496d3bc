"""Every row of the table in docs/coming-from-atropos.md that says where BaseEnv differs is so."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rig.docs_pages import DOCS
from stepwell.common.command_line import FlagParser
from stepwell.envs import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataItem, ServerBaseline, ServerManager
from stepwell.envs.config import EnvFlags, EnvSettings, ProcessFlags, read_flags, unknown_settings
from stepwell.envs.distillation import TeacherDistillationEnv
from stepwell.envs.loop.group_tasks import GroupTasks
from stepwell.envs.scored_data import TOO_LONG, ScoredDataGroup, group_fault
from stepwell.envs.servers import ManagedServer
from stepwell.envs.servers.sequences import add_temperatures, note_sampling, noting_sampling
from stepwell.errors import BadRequest
from stepwell.wire.openai import Upstream

PAGE = DOCS / "coming-from-atropos.md"
Check = Callable[[Path], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def row(beginning: str) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        CHECKS[beginning] = check
        return check

    return keep


class Numbers(BaseEnv):
    """Its items are numbers from 0 to 3; a gate holds its rollouts."""

    checkpoint_fields = ("asked",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked = 0
        self.begun: list[Item] = []
        self.fails = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def get_next_item(self) -> Item:
        self.asked += 1
        if self.asked > 4:
            raise StopAsyncIteration
        return self.asked - 1

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        self.begun.append(item)
        await self.gate.wait()
        if self.fails:
            self.fails -= 1
            raise ValueError("a bad moment")
        return {"tokens": [1, 2], "masks": [-100, 2], "scores": float(len(self.begun))}, []


def numbers(**config: Any) -> Numbers:
    return Numbers(
        BaseEnvConfig(**{"group_size": 1, "ensure_scores_are_not_same": False, **config}), [APIServerConfig()]
    )


class Decoding:
    def decode(self, ids: list[int]) -> str:
        return str(ids)


class Sent(list[ScoredDataGroup]):
    async def send(self, group: ScoredDataGroup) -> str:
        self.append(group)
        return ""


@row("an unknown setting")
async def _(_: Path) -> None:
    config = BaseEnvConfig(grup_size=3)  # type: ignore[call-arg]
    assert config.group_size == 4
    (note,) = unknown_settings(config, "env.")
    assert note.startswith("env.grup_size: there is no such setting; it changes nothing")


@row("`use_wandb` is on")
async def _(_: Path) -> None:
    assert not BaseEnvConfig().use_wandb


@row("the last item of the backlog")
async def _(_: Path) -> None:
    env, sent = numbers(), Sent()
    env.backlog += ["first", "last"]
    tasks = GroupTasks(env, sent.send)
    tasks.start(2)
    while len(sent) < 2:
        await tasks.wait_for_change(5)
    assert env.begun == ["first", "last"]


@row("one rollout that fails")
async def _(_: Path) -> None:
    env, sent = numbers(group_size=4), Sent()
    env.fails = 1
    tasks = GroupTasks(env, sent.send)
    tasks.start(1)
    await tasks.wait_for_change(5)
    assert [len(group["tokens"]) for group in sent] == [4]
    assert len(env.begun) == 5


@row("`include_messages` adds nothing")
async def _(_: Path) -> None:
    env, sent = numbers(include_messages=True), Sent()
    env.tokenizer = Decoding()
    tasks = GroupTasks(env, sent.send)
    tasks.start(1)
    await tasks.wait_for_change(5)
    assert [group["messages"] for group in sent] == [[[{"role": "user", "content": "[1, 2]"}]]]


@row("pausing cancels")
async def _(_: Path) -> None:
    env, sent = numbers(), Sent()
    env.gate.clear()
    tasks = GroupTasks(env, sent.send)
    tasks.start(1)
    while not env.begun:
        await asyncio.sleep(0)
    tasks.start(0)  # a pause starts nothing
    env.gate.set()
    await tasks.wait_for_change(5)
    assert len(sent) == 1


@row("a rollout as long as `max_token_len`")
async def _(_: Path) -> None:
    group: ScoredDataGroup = {"tokens": [[1, 2, 3]], "masks": [[-100, 2, 3]], "scores": [1.0]}
    assert group_fault(group, group_size=1, max_length=3, may_be_equal=True) is None
    assert (group_fault(group, group_size=1, max_length=2, may_be_equal=True) or ("",))[0] == TOO_LONG


@row("only the last step")
async def _(_: Path) -> None:
    env, sent = numbers(max_num_workers=8), Sent()
    tasks = GroupTasks(env, sent.send)
    for _round in range(5):
        tasks.start(1)
        await tasks.wait_for_change(5)
    assert (len(sent), tasks.has_ended) == (4, True)


@row("`setup` and `evaluate`")
async def _(_: Path) -> None:
    env = numbers()
    await env.setup()
    assert await env.evaluate() is None


@row("checkpoints have only")
async def _(_: Path) -> None:
    env = numbers()
    env.asked = 3
    assert env.checkpoint_data() == {"asked": 3}


@row("`slurm=True`")
async def _(_: Path) -> None:
    for flags in ((False, False), (True, True)):
        env = Numbers(BaseEnvConfig(), [APIServerConfig(base_url="http://one/v1")], *flags)
        assert [server.config.base_url for server in env.server.servers] == ["http://one/v1"]


@row("`ServerBaseline()`")
async def _(_: Path) -> None:
    (server,) = Numbers(BaseEnvConfig(), ServerBaseline(model_name="m", timeout=5)).server_configs
    assert (server.base_url, server.model_name, server.timeout) == ("http://localhost:8100/unrecorded/v1", "m", 5)


@row("`server_type`")
async def _(_: Path) -> None:
    kinds = {type(ServerManager([APIServerConfig(server_type=kind)]).servers[0]) for kind in ("openai", "sglang")}
    assert len(kinds) == 1


@row("`managed_server` needs")
async def _(_: Path) -> None:
    async with ServerManager([APIServerConfig(server_type="openai")]).managed_server() as session:
        assert isinstance(session, ManagedServer)


@row("`tokens_and_logprobs_completion`")
async def _(_: Path) -> None:
    manager = ServerManager([APIServerConfig()])

    async def without_logprobs(upstream: Upstream, request: dict[str, Any]) -> bytes:
        assert (upstream, request["extra_body"]["prompt_logprobs"]) == (Upstream.COMPLETIONS, 1)
        return b'{"choices": [{"text": "", "prompt_token_ids": [1, 2]}]}'

    manager.servers[0].raw_reply = without_logprobs  # type: ignore[method-assign]
    with pytest.raises(BadRequest, match="gives no log-probabilities of the prompt"):
        await manager.get_logprobs(input_ids=[1, 2])


@row("an evaluation may end")
async def _(_: Path) -> None:
    env = numbers()
    env.gate.clear()
    env.eval_workers.add(asyncio.create_task(env.collect_trajectory(0)))
    evaluation = asyncio.create_task(env.evaluate_to_end())
    while not env.begun:
        await asyncio.sleep(0)
    assert not evaluation.done()
    env.gate.set()
    await asyncio.wait_for(evaluation, 5)
    env.fails = 1
    env.eval_workers.add(asyncio.create_task(env.collect_trajectory(0)))
    with pytest.raises(ValueError, match="a bad moment"):
        await env.evaluate_to_end()


@row("`max_n_completions`")
async def _(_: Path) -> None:
    defaults = EnvSettings(BaseEnvConfig(), [APIServerConfig()], EnvFlags.model_construct())
    words = ("--max_n_completions", "4", "--proxy_url", "http://localhost:9100")
    assert len(read_flags(defaults, words, FlagParser("serve")).notes) == 2


@row("`tool_parser`")
async def _(_: Path) -> None:
    assert ServerManager([APIServerConfig()], tool_parser="hermes").servers


@row("the teacher of")
async def _(_: Path) -> None:
    for flags in (
        TeacherDistillationEnv.get_cli_serve_config_cls(),
        TeacherDistillationEnv.get_cli_process_config_cls(),
    ):
        assert "teacher" in flags.model_fields


@row("groups have no temperature")
async def _(_: Path) -> None:
    group: ScoredDataGroup = {"tokens": [[1], [2]], "masks": [[1], [2]], "scores": [0.0, 1.0]}
    with noting_sampling():
        note_sampling([(0.7, None)])
        add_temperatures(group)
    assert group["temperatures"] == [0.7, 0.7]


@row("`max_batches_offpolicy`")
async def _(_: Path) -> None:
    assert BaseEnvConfig.model_validate({"off_policy_tolerance": 5}).max_batches_offpolicy == 5


@row("`custom_thinking_prompt`")
async def _(_: Path) -> None:
    env = numbers(custom_thinking_prompt="think")
    assert env.config.custom_thinking_prompt == "think"


@row("`process` writes")
async def _(_: Path) -> None:
    assert {"groups", "out"} <= set(ProcessFlags.model_fields)
    assert BaseEnvConfig().ensure_scores_are_not_same


def rows() -> list[str]:
    table = PAGE.read_text().partition("Where it differs on purpose:")[2].strip().partition("\n\n")[0]
    return re.findall(r"^\| (.*?) \|", table, re.M)[1:]


@pytest.mark.parametrize("text", rows())
async def test_the_row_is_so(text: str, tmp_path: Path) -> None:
    (check,) = [check for beginning, check in CHECKS.items() if text.startswith(beginning)]
    await check(tmp_path)


def test_every_check_has_its_row() -> None:
    assert len(rows()) == len(CHECKS)
