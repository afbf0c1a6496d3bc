"""What a redaction function finds is in no file: a real gateway, shard, journal, archive and spool, the fake engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pyarrow.parquet as pq
import pytest
from stepwell.gateway.bridge.recorded_turns import ThinkingPolicy

from rig import forgetting as rig
from rig.fake_engine import FakeEngine, Faults, Reply
from rig.gateways import serve_gateway
from rig.local_pool import LocalTransport
from rig.openai_agent import Agent, agent_of
from rig.redactions import SECRET
from rig.vocabulary import encode
from rig.waiting import until
from stepwell.commands.export import ExportSettings, export_steps
from stepwell.gateway.recording.redaction import Redactor
from stepwell.gateway.recording.spool import Spool
from stepwell.pool.api.leasing import BatchRequest
from stepwell.pool.client import PoolClient
from stepwell.pool.shard.archive import ParquetArchive
from stepwell.pool.shard.service import ShardService
from stepwell.steps.columns import unpack
from stepwell.steps.rows import merge_rows
from stepwell.steps.step import Exactness, Step

MODULE = "rig.redactions"
ANSWER = f"I will write to {SECRET} at once"
USER = {"role": "user", "content": f"My address is {SECRET}, write to me."}
PATIENT = 60.0
FOR_EVER = 3600.0


@dataclass
class Place:
    """A pool with all its files."""

    pool: PoolClient
    shard: ShardService
    archive: ParquetArchive
    folder: Path
    engine: FakeEngine
    model: Path

    @asynccontextmanager
    async def agent(self, function: str | None, *, timeout: float = PATIENT, **more: Any) -> AsyncIterator[Agent]:
        """Of a gateway that redacts with this function."""
        redactor = None if function is None else Redactor(f"{MODULE}:{function}", str(self.model), timeout=timeout)
        options = {"bridge": ThinkingPolicy.TEMPLATE, "response_length": 400, **more}
        async with (
            serve_gateway(self.pool, [self.engine.url], redactor=redactor, **options) as url,
            agent_of(url) as agent,
        ):
            if redactor is not None:
                await until(lambda: redactor.why_not_ready() is None, "the function to be loaded")
            yield agent

    async def taken(self, **wanted: Any) -> list[Step]:
        request = BatchRequest(count=1, channel="train", min_exactness=Exactness.ENGINE, **wanted)
        lease = await self.shard.take(request, 60.0, "lease")
        assert lease is not None
        self.columns = lease.columns
        return unpack(lease.columns, copy=True)

    def traces(self) -> set[str]:
        """Where the secret is, as text or as tokens."""
        found = set()
        for file in (file for file in self.folder.rglob("*") if file.is_file()):
            content = file.read_bytes()
            if file.suffix in (".parquet", ".part"):
                columns = pq.read_table(file).columns
                content += b"".join(str(column.to_pylist()).replace(", ", ",").encode() for column in columns)
            found |= {f"{file.name}: {what}" for what, needle in needles().items() if needle in content}
        return found


def needles() -> dict[str, bytes]:
    name = SECRET.partition("@")[0]
    some = encode(name)
    found = {width: np.array(some, width).tobytes() for width in ("u1", "<i2", "<i4", "<i8", ">i4")}
    return {**found, "list": ",".join(map(str, some)).encode(), "json": ", ".join(map(str, some)).encode()}


@pytest.fixture
async def place(tmp_path: Path, engine: FakeEngine, tiny_model: Path) -> AsyncIterator[Place]:
    folder = tmp_path / "files"
    folder.mkdir()
    journal = rig.open_journal(str(folder / "journal"))
    shard, archive = rig.open_shard(journal, str(folder / "archive"))
    pool = PoolClient(rig.PLAN.name, transport=LocalTransport({rig.PLAN.name: shard}))
    yield Place(pool, shard, archive, folder, engine, tiny_model)
    journal.close()


async def talk(agent: Agent, engine: FakeEngine, *, stream: bool = False) -> list[str]:
    """Two turns; what the agent hears."""
    engine.replies.extend([Reply(ANSWER), Reply("done")])
    first = await agent.ask(messages=[USER], stream=stream, max_tokens=200)
    history = [USER, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    second = await agent.ask(messages=history, stream=stream, max_tokens=200)
    return [first.text, second.text]


async def export(place: Place, name: str) -> None:
    settings = ExportSettings(to=str(place.folder / name))
    await export_steps(settings, place.pool, None, lambda _: None)


@pytest.mark.parametrize("stream", [False, True])
async def test_no_file_has_what_is_redacted_and_the_agent_hears_all_of_it(place: Place, stream: bool) -> None:
    with closing(Spool(place.folder / "spool")) as spool:
        async with place.agent("mails", spool=spool) as agent:
            assert await talk(agent, place.engine, stream=stream) == [ANSWER, "done"]
            assert await agent.complete(reward=1.0)
            assert await agent.metric('stepwell_untrainable_total{reason="redacted"}') == 2
            assert await agent.metric('stepwell_bridge_total{outcome="bridged"}') == 1
        assert place.traces() == set()
    await export(place, "export.jsonl")
    await export(place, "export.parquet")
    steps = await place.taken(untrainable=True)
    await place.shard.ack("lease")
    place.shard.pool.state.retire_history()
    place.archive.flush()
    assert len(list(place.folder.rglob("*.parquet"))) >= 2
    assert place.traces() == set()
    assert len(steps) == 2


async def test_the_needles_find_what_is_not_redacted(place: Place) -> None:
    """So the search above can fail."""
    with closing(Spool(place.folder / "spool")) as spool:
        async with place.agent(None, spool=spool) as agent:
            await talk(agent, place.engine)
            await agent.complete(reward=1.0)
        assert place.traces() != set()


async def test_a_trainer_gets_a_redacted_step_only_if_it_asks_and_never_its_masked_tokens(place: Place) -> None:
    async with place.agent("mails") as agent:
        await talk(agent, place.engine)
        await agent.complete(reward=1.0)
    first, second = await place.taken(untrainable=True)
    assert all(step.untrainable is not None and step.untrainable.startswith("redacted: ") for step in (first, second))
    assert first.response_mask is not None
    assert first.response_logprobs is not None
    masked = ~first.response_mask
    assert masked.sum() == len(SECRET)
    assert set(first.response_ids[masked].tolist()) == {ord("*")}
    assert not first.response_logprobs[masked].any()
    tokens = [*first.prompt_ids, *first.response_ids]
    assert second.prompt_ids[: len(tokens)].tolist() == tokens
    rows = merge_rows(place.columns, np.zeros(2, np.int64), np.zeros(1, np.int64))
    assert len(rows) == 1
    assert rows.loss_mask.sum() == first.response_mask.sum() + len(second.response_ids)


async def test_a_redacted_step_is_left_out_of_batches(place: Place) -> None:
    async with place.agent("mails") as agent:
        await agent.ask()
        await agent.ask(messages=[USER])
        await agent.complete(reward=1.0)
    (step,) = await place.taken(untrainable=False)
    assert step.untrainable is None


async def test_another_gateway_does_not_continue_from_masked_tokens(place: Place) -> None:
    """The engine renders the messages, in which nothing is masked."""
    place.engine.replies.extend([Reply(ANSWER), Reply("done")])
    async with place.agent("mails") as agent:
        await agent.ask(messages=[USER], max_tokens=200)
        await agent.until_metric('stepwell_delivered_steps_total{verdict="accepted"}', 1)
        path = agent.path
        async with serve_gateway(
            place.pool, [place.engine.url], bridge=ThinkingPolicy.TEMPLATE, response_length=400
        ) as other:
            history = [USER, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And then?"}]
            body = {"model": "tiny", "messages": history, "max_tokens": 200}
            async with aiohttp.ClientSession() as http:
                answer = await http.post(f"{other}{path}/v1/chat/completions", json=body)
                assert answer.status == 200
        await agent.complete(reward=1.0)
    first, second = await place.taken(untrainable=True)
    assert first.lineage == {}, "nobody finds it as the step that a call continues"
    assert second.prompt_made.startswith("rendered: ")
    assert SECRET.encode() in bytes(token for token in second.prompt_ids.tolist() if token < 256)


@pytest.mark.parametrize("function", ["raising", "hanging", "dying"])
@pytest.mark.parametrize("is_durable", [False, True])
async def test_a_step_over_which_the_function_fails_is_answered_and_not_stored(
    place: Place, function: str, is_durable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    place.engine.replies.append(Reply(ANSWER))
    with closing(Spool(place.folder / "spool")) as spool:
        async with place.agent(function, timeout=1.0, spool=spool, is_durable=is_durable) as agent:
            heard = await agent.ask(messages=[USER], max_tokens=200)
            assert heard.text == ANSWER
            assert await agent.metric('stepwell_lost_steps_total{cause="redaction_failed"}') == 1
            assert await agent.metric('stepwell_delivered_steps_total{verdict="accepted"}') is None
    assert place.traces() == set()
    assert "1 steps of trajectory" in caplog.text
    assert "are not stored" in caplog.text
    assert SECRET not in caplog.text


async def test_an_answer_that_its_agent_does_not_read_to_its_end_is_redacted_too(place: Place) -> None:
    place.engine.replies.append(Reply(f"{ANSWER} and so on"))
    place.engine.faults = Faults(silent_s=FOR_EVER, silent_at_token=len(ANSWER) + 4)
    with closing(Spool(place.folder / "spool")) as spool:
        async with place.agent("mails", spool=spool) as agent:
            body = {"model": "tiny", "messages": [USER], "max_tokens": 300, "stream": True}
            async with agent.http.post(agent.chat, json=body) as answer:
                heard = 0
                while heard < len(ANSWER):
                    heard += (await answer.content.readline()).startswith(b"data:")
                answer.close()
            await agent.until_metric('stepwell_delivered_steps_total{verdict="accepted"}', 1)
            await agent.complete(reward=1.0)
            _, trajectory_uid, prompt_uid = agent.path.split("/")
            (step,) = unpack(await place.pool.read([(trajectory_uid, prompt_uid)]), copy=True)  # no trainer gets it
        assert place.traces() == set()
    assert (step.finish_reason, step.quarantine) == ("cut_short", None)
    assert step.response_mask is not None
    assert (~step.response_mask).sum() == len(SECRET)


async def test_a_stored_response_is_continued_as_it_was_and_only_by_its_gateway(place: Place) -> None:
    place.engine.replies.extend([Reply(ANSWER), Reply("done")])
    with closing(Spool(place.folder / "spool")) as spool:
        async with place.agent("mails", spool=spool) as agent:
            first = await agent.client.responses.create(model="tiny", input=USER["content"], max_output_tokens=200)
            second = await agent.client.responses.create(
                model="tiny", input="And then?", previous_response_id=first.id, max_output_tokens=200
            )
            assert (first.output_text, second.output_text) == (ANSWER, "done")
            async with serve_gateway(place.pool, [place.engine.url]) as other:
                client = openai.AsyncOpenAI(base_url=f"{other}{agent.path}/v1", api_key="none", max_retries=0)
                with pytest.raises(openai.BadRequestError, match="send the whole input"):
                    await client.responses.create(model="tiny", input="?", previous_response_id=first.id)
                await client.close()
    assert place.traces() == set()


async def test_steps_that_a_client_submits_are_redacted_or_refused(place: Place) -> None:
    step = {
        "prompt_ids": encode(str(USER["content"])),
        "response_ids": encode("ok"),
        "trajectory_uid": "t",
        "prompt_uid": "p",
        "step_index": 0,
        "is_last": True,
        "reward": 1.0,
        "metadata": {"note": SECRET},
    }
    async with (
        place.agent("raising", timeout=5.0) as agent,
        agent.http.post("/submit_steps", json={"steps": [step]}) as no,
    ):
        assert no.status == 503
    async with place.agent("mails") as agent, agent.http.post("/submit_steps", json={"steps": [step]}) as answer:
        assert (await answer.json())["accepted"] == 1
    assert place.traces() == set()
