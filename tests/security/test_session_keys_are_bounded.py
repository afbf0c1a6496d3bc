"""What the holder of a session key, or of a trajectory's key, may do at a gateway."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from stepwell.gateway.asgi import SESSION_BODY
from stepwell.gateway.calls import SESSION_IDS, SessionIds
from stepwell.gateway.dialects.request_rules import SamplingPolicy
from stepwell.gateway.requests import CallQuota

from rig.fake_engine import FakeEngine
from rig.gateways import serve_gateway
from rig.local_pool import LocalPool
from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import Role, SessionKey
from stepwell.access.key_file import KeyFile, create_key, read_keys, revoke_key
from stepwell.errors import RewardFailed
from stepwell.gateway.dialects.side_calls import SYSTEM_RULES
from stepwell.gateway.trajectory_lifecycle import SESSION_METADATA
from stepwell.pool.api.plan import Overflow
from stepwell.pool.api.sessions import subjects_of
from stepwell.rewards.builtin.matching import expected_of
from stepwell.rewards.sample import sample_of

CONTROL = "a-control-key-of-the-operator"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
MADE, ISSUED = "made from the control key", "issued in a key file"


@dataclass
class Client:
    """Somebody with a key, at a gateway."""

    http: httpx.AsyncClient
    key: str
    root: str = ""
    """The path of its session or trajectory."""

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return await self.http.post(
            self.root + path, json=body, headers={"Authorization": f"Bearer {self.key}", **headers}
        )

    async def open(self, **wanted: Any) -> "Client":
        """The agent in a new session."""
        answer = await self.post("/init_trajectory", wanted)
        assert answer.status_code == 200, answer.text
        opened = answer.json()
        return Client(self.http, opened["api_key"], "/{trajectory_uid}/{prompt_uid}".format(**opened))

    async def chat(self, path: str = "/v1", **headers: str) -> httpx.Response:
        return await self.post(f"{path}/chat/completions", CHAT, **headers)


@asynccontextmanager
async def holder(
    folder: Path, pool: LocalPool, engine: FakeEngine, kind: str = MADE, **settings: Any
) -> AsyncIterator[Client]:
    """The holder of a session key."""
    keys = folder / "keys.json"
    key = AccessKeys([CONTROL]).session_key(SessionKey("mallory"))
    if kind == ISSUED:
        key, _ = create_key(keys, Role.SESSION, name="mallory")
    async with (
        serve_gateway(
            pool, [engine.url], control_keys=[CONTROL], issued=KeyFile(keys, interval=0.0), **settings
        ) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        yield Client(http, key)


@pytest.mark.parametrize("kind", [MADE, ISSUED])
async def test_a_new_session_for_each_call_does_not_evade_the_users_quota(
    tmp_path: Path, pool: LocalPool, engine: FakeEngine, kind: str
) -> None:
    """A rate of 0.4 allows four calls at once."""
    async with holder(tmp_path, pool, engine, kind, quota=CallQuota(per_second=0.4)) as mallory:
        first, second = await mallory.open(), await mallory.open()
        assert [(await agent.chat()).status_code for agent in (first, second)] == [200, 200]
        refused = await first.chat()
        assert refused.status_code == 429
        assert "quota per_second=0.4 is used up" in refused.text
        assert (await second.chat()).status_code == 429
        assert (await mallory.chat("/session/v1")).status_code == 429
        assert (await mallory.post("/init_trajectory", {})).status_code == 429
        other = Client(mallory.http, AccessKeys([CONTROL]).session_key(SessionKey("bob")))
        assert (await (await other.open()).chat()).status_code == 200


async def test_the_key_of_a_session_is_void_when_the_session_key_is_revoked(
    tmp_path: Path, pool: LocalPool, engine: FakeEngine
) -> None:
    async with holder(tmp_path, pool, engine, ISSUED) as mallory:
        agent = await mallory.open()
        assert (await agent.chat()).status_code == 200
        (issued,) = read_keys(tmp_path / "keys.json")
        revoke_key(tmp_path / "keys.json", issued.id)
        assert (await agent.chat()).status_code == 401


async def test_each_rollout_of_a_runner_has_a_quota_of_its_own(
    tmp_path: Path, pool: LocalPool, engine: FakeEngine
) -> None:
    async with holder(tmp_path, pool, engine, quota=CallQuota(per_second=0.1)) as mallory:
        runner = Client(mallory.http, create_key(tmp_path / "keys.json", Role.RUNNER)[0])
        agents = [await runner.open() for _ in range(4)]
        assert [(await agent.chat()).status_code for agent in agents] == [200] * 4
        assert (await agents[0].chat()).status_code == 429


async def test_the_metadata_of_a_session_key_is_small(tmp_path: Path, pool: LocalPool, engine: FakeEngine) -> None:
    async with holder(tmp_path, pool, engine) as mallory:
        refused = await mallory.post("/init_trajectory", {"metadata": {"x": "m" * SESSION_METADATA}})
        assert refused.status_code == 413
        assert "at most 16 KiB of metadata" in refused.text
        unread = await mallory.post("/init_trajectory", {"metadata": {"x": "m" * SESSION_BODY}})
        assert unread.status_code == 413
        assert "larger than 64 KiB" in unread.text
        assert (await mallory.post("/init_trajectory", {"metadata": {"x": "m" * 8_000}})).status_code == 200
        operator = Client(mallory.http, CONTROL)
        assert (await operator.post("/init_trajectory", {"metadata": {"x": "m" * 2**20}})).status_code == 200


@pytest.mark.parametrize("overflow", list(Overflow))
async def test_metadata_counts_in_what_the_pool_holds(tmp_path: Path, engine: FakeEngine, overflow: Overflow) -> None:
    pool = LocalPool(max_bytes=2**20, overflow=overflow)
    async with holder(tmp_path, pool, engine) as mallory:
        opened = [await mallory.post("/init_trajectory", {"metadata": {"x": "m" * 15_000}}) for _ in range(100)]
    refused = sum(answer.status_code == 429 for answer in opened)
    assert (refused > 20) is (overflow is Overflow.REFUSE)
    held = (await pool.stats()).channels["train"]
    assert held.trajectories * 15_000 < held.nbytes < 2**20 + 20_000, "the next one makes room for the last one"


async def test_what_a_session_key_sends_is_apart_from_what_rewards_exports_and_forgetting_read(
    tmp_path: Path, pool: LocalPool, engine: FakeEngine
) -> None:
    sent = {"answer": "42", "reward_model": {"ground_truth": "42"}, "subject": "victim", "marks": ["gold"]}
    async with holder(tmp_path, pool, engine) as mallory:
        agent = await mallory.open(metadata=sent)
        assert (await agent.chat()).status_code == 200
        operator = Client(mallory.http, CONTROL, agent.root)
        assert (await operator.post("/v1/complete_trajectory", {})).status_code == 200
    sample = sample_of(pool.taken())
    assert sample.metadata["client"] == sent
    assert subjects_of(sample.metadata) == ("mallory",)
    assert not sent.keys() & sample.metadata.keys()
    with pytest.raises(RewardFailed, match="neither 'answer' nor"):
        expected_of(sample, "answer")


RANDOM = re.compile(r"[0-9a-f]{32}|sk-sw-[\w.~-]+")


def shape(value: Any) -> Any:
    """A JSON value, with what is sampled or random in it replaced by its type."""
    if isinstance(value, dict):
        return {name: shape(found) for name, found in value.items()}
    if isinstance(value, list):
        return [shape(found) for found in value]
    return RANDOM.sub("…", value) if "http" in str(value) or "@" in str(value) else type(value)


def seen(answer: httpx.Response) -> tuple[Any, ...]:
    """All that a client sees of an answer, without what differs in every one."""
    unlike = ("date", "content-length")
    headers = {name: RANDOM.sub("…", value) for name, value in answer.headers.items() if name not in unlike}
    return answer.status_code, headers, shape(answer.json())


@pytest.mark.parametrize("role", [Role.SESSION, Role.RUNNER, Role.ADMIN])
async def test_nobody_learns_who_was_forgotten(tmp_path: Path, pool: LocalPool, engine: FakeEngine, role: Role) -> None:
    async with holder(tmp_path, pool, engine) as mallory:
        operator = Client(mallory.http, CONTROL)
        assert (await operator.post("/forget", {"subject": "ann"})).status_code == 200
        answers: list[list[Any]] = []
        for who in ("ann", "bob"):
            match role:
                case Role.SESSION:
                    opener = Client(mallory.http, AccessKeys([CONTROL]).session_key(SessionKey(who)))
                    wanted: dict[str, Any] = {}
                case Role.RUNNER:
                    opener = Client(mallory.http, create_key(tmp_path / "keys.json", Role.RUNNER)[0])
                    wanted = {"session": True, "metadata": {"subject": who}}
                case _:
                    opener, wanted = operator, {"session": True, "user": who}
            opened = await opener.post("/init_trajectory", wanted)
            agent = Client(
                mallory.http, opened.json()["api_key"], "/{trajectory_uid}/{prompt_uid}".format(**opened.json())
            )
            calls = [await agent.chat(), await agent.chat()]
            if role is Role.SESSION:
                calls.append(await opener.chat("/session/v1", **{"x-session-id": "one"}))
            answers.append([seen(answer) for answer in (opened, *calls)])
        assert answers[0] == answers[1]
        metrics = await operator.http.get("/metrics", headers={"Authorization": f"Bearer {CONTROL}"})
        assert f'calls_unrecorded_total{{cause="forgotten"}} {len(answers[0]) - 1}.0' in metrics.text
    recorded = pool.rules.state.trajectories.values()
    assert {subject for found in recorded for subject in subjects_of(found.metadata)} == {"bob"}


async def test_a_session_of_a_forgotten_person_is_recorded_nowhere_whoever_calls_it_and_how(
    tmp_path: Path, pool: LocalPool, engine: FakeEngine
) -> None:
    async with holder(tmp_path, pool, engine) as mallory:
        operator = Client(mallory.http, CONTROL)
        assert (await operator.post("/forget", {"subject": "ann"})).status_code == 200
        chosen = await operator.open(session=True, user="ann", trajectory_uid="chosen")
        assert (await chosen.chat()).status_code == 200
        agent = await operator.open(session=True, user="ann")
        for client in (agent, Client(mallory.http, CONTROL, agent.root)):
            assert (await client.chat()).status_code == 200
        for name in (agent.root.split("/")[1], agent.root.removeprefix("/")):
            assert (await operator.chat("/v1", **{"x-session-id": name})).status_code == 200
    assert not pool.rules.state.trajectories


def test_every_gateway_with_the_same_control_key_knows_the_sessions_of_forgotten_people() -> None:
    first, same, other = (SessionIds(AccessKeys([key]).secrets(SESSION_IDS)) for key in (CONTROL, CONTROL, 2 * CONTROL))
    made = [first.new_unrecorded() for _ in range(100)]
    assert all(map(same.is_unrecorded, made))
    assert not any(map(other.is_unrecorded, made))
    assert not any(first.is_unrecorded(first.new()) for _ in range(100))
    assert {len(found) for found in made} == {len(first.new())}


@pytest.mark.parametrize("opener", ["session key", "control key"])
async def test_an_agent_cannot_hide_its_own_steps(
    tmp_path: Path, pool: LocalPool, engine: FakeEngine, opener: str
) -> None:
    off = {"x-stepwell-capture": "off"}
    async with holder(tmp_path, pool, engine) as mallory:
        operator = Client(mallory.http, CONTROL)
        agent = await (mallory if opener == "session key" else operator).open()
        answer = await agent.chat(**off)
        assert (answer.status_code, answer.headers["x-stepwell-capture"]) == (200, "on")
        assert "x-stepwell-unrecorded" not in answer.headers
        assert (await mallory.chat(**off)).headers["x-stepwell-capture"] == "on"
        hidden = await Client(mallory.http, CONTROL, agent.root).chat(**off)
        assert hidden.headers["x-stepwell-unrecorded"] == "header"
        refused = await mallory.post("/init_trajectory", {"capture": False})
        assert refused.status_code == 403
        assert "cannot choose capture" in refused.text
        metrics = await operator.http.get("/metrics", headers={"Authorization": f"Bearer {CONTROL}"})
        assert "stepwell_opt_outs_ignored_total 2.0" in metrics.text
    assert [len(found.steps) for found in pool.rules.state.trajectories.values()] == [1, 1]


async def test_an_agent_cannot_keep_its_steps_out_of_training_where_the_channel_counts_marked_side_calls_only(
    tmp_path: Path, pool: LocalPool, engine: FakeEngine
) -> None:
    titles = {"role": "system", "content": f"{SYSTEM_RULES[0].opening}. Nothing else."}
    as_title = {"messages": [titles, {"role": "user", "content": "hello"}], "max_tokens": 4}
    sampling = {"train": SamplingPolicy(on_policy=True)}
    async with holder(tmp_path, pool, engine, marked_side_calls=("train",), sampling=sampling) as mallory:
        agent = await Client(mallory.http, CONTROL).open()
        assert (await agent.post("/chat/completions", as_title)).status_code == 200
        longer = await agent.post("/chat/completions", {**CHAT, "min_tokens": 2})
        assert longer.headers["x-stepwell-sampling"] == "min_tokens=removed"
        assert (await agent.chat(**{"x-stepwell-call": "side"})).status_code == 200
        assert (await agent.chat(**{"x-stepwell-capture": "off"})).status_code == 200
        runner = Client(mallory.http, CONTROL, agent.root)
        assert (await runner.chat(**{"x-stepwell-call": "side"})).status_code == 200
        assert (await runner.post("/complete_trajectory", {"reward": 0.0})).status_code == 200
    assert [step.untrainable for step in pool.taken()] == [None, None, None, None, "side_call: marked"]
