"""Atropos' other calls of servers, over real HTTP: dedicated servers, ids and log-probabilities, a teacher's scores."""

import pytest

from rig.fake_engine import FakeEngine, Reply
from rig.fake_engine.scoring import logprobs_of
from rig.vocabulary import END_OF_TURN, encode
from stepwell.envs.config import APIServerConfig
from stepwell.envs.servers import ManagedServer, ManagedServerAdapter, ServerManager
from stepwell.errors import BadRequest
from tests.integration.envs.test_servers import CALLING, TOOL, USER, Letters, exactly, servers_behind, servers_of


@exactly
async def test_tokens_and_logprobs_of_a_completion(kind: str, engine: FakeEngine) -> None:
    engine.replies.extend([Reply(" more."), Reply(" more.")])
    async with servers_behind(kind, engine) as servers:
        by_text = await servers.tokens_and_logprobs_completion(prompt="Once", max_tokens=24)
        by_ids = await servers.tokens_and_logprobs_completion(input_ids=encode("Once"), max_tokens=24, split="eval")
    prompt, (output,), (logprobs,), (reason,) = by_text
    assert (prompt, output, reason) == (encode("Once"), [*encode(" more."), END_OF_TURN], "stop")
    assert logprobs == pytest.approx(logprobs_of(output, len(prompt)))
    assert by_ids[:2] == by_text[:2]


async def test_n_choices_have_their_own_tokens_and_logprobs(engine: FakeEngine) -> None:
    async with servers_of(engine.url) as servers:
        _, outputs, logprobs, reasons = await servers.tokens_and_logprobs_completion(prompt="Once", n=3, max_tokens=8)
    assert len(outputs) == len(logprobs) == len(reasons) == 3
    assert list(map(len, outputs)) == list(map(len, logprobs))


async def test_a_server_without_ids_says_so_instead_of_making_them_up() -> None:
    async with FakeEngine(plain=True) as engine, servers_of(engine.url) as servers:
        with pytest.raises(BadRequest, match="gives no token ids with log-probabilities; vLLM does"):
            await servers.tokens_and_logprobs_completion(prompt="Once", max_tokens=8)


async def test_a_teacher_scores_a_sequence(engine: FakeEngine) -> None:
    ids = encode("Once upon")
    async with servers_of(engine.url) as servers, servers.managed_server() as managed:
        for scored in (await servers.get_logprobs(input_ids=ids), await managed.get_logprobs(prompt="Once upon")):
            assert scored["prompt_tokens"] == ids
            assert scored["prompt_topk_token_ids"] == [[], *([token] for token in ids[1:])]
            of_tokens = [value for (value,) in scored["prompt_topk_logprobs"][1:]]
            assert of_tokens == pytest.approx(logprobs_of(ids[1:], 1))


async def test_a_gateway_is_no_teacher(engine: FakeEngine) -> None:
    async with servers_behind("gateway", engine) as servers:
        with pytest.raises(BadRequest, match="gives no log-probabilities of the prompt; vLLM itself does"):
            await servers.get_logprobs(prompt="Once upon")


async def test_a_dedicated_server_has_the_calls_and_the_metrics_of_one(engine: FakeEngine) -> None:
    async with FakeEngine() as other, servers_of(engine.url, other.url) as servers:
        async with servers.dedicated_server() as server:
            for _ in range(2):
                reply = await server.chat_completion(messages=[USER], max_tokens=8)
                assert reply.choices[0].message.content
            await server.completion(prompt="Once", max_tokens=8, split="eval")
            metrics = await server.wandb_metrics({"mine": 1}, "server_0")
        idle = next(each for each in servers.servers if each is not server)
        assert await idle.wandb_metrics({}, "server_1") == {}
    names = [f"{kind}request_time_{statistic}" for kind in ("", "eval_") for statistic in ("avg", "std", "99p")]
    assert set(metrics) == {"mine", *(f"server/server_0_{name}" for name in names)}
    assert 0 < metrics["server/server_0_request_time_avg"] <= metrics["server/server_0_request_time_99p"]


async def test_a_tree_keeps_the_sequences_that_a_turn_has_continued(engine: FakeEngine) -> None:
    engine.replies.extend([Reply(" upon"), Reply(" a time")])
    async with servers_of(engine.url) as servers:
        managed = ManagedServer(server=servers.servers[0], tokenizer=Letters(), track_tree=True)
        first = await managed.completion(prompt="Once", max_tokens=5)
        await managed.completion(prompt="Once" + first.choices[0].text, max_tokens=7)
        state = managed.get_state()
    assert list(state["sequences"]) == ["Once upon", "Once upon a time"]
    assert state["tree"] == state["sequences"]


async def test_a_session_is_a_client_for_libraries_that_want_one(engine: FakeEngine) -> None:
    async with servers_of(engine.url) as servers, servers.managed_server() as managed:
        client = ManagedServerAdapter(managed, base_url=engine.url)
        await client.chat.completions.create(messages=[USER], max_tokens=8)
        await client.completions.create(prompt="Once", max_tokens=8)
        assert len(managed.get_state()["nodes"]) == 2


async def test_arguments_of_atropos_manager_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    config = APIServerConfig()
    await ServerManager([config], slurm=False, testing=False, max_n_completions=4, tool_parser="hermes").close()
    assert [record.message for record in caplog.records] == ["ServerManager: max_n_completions changes nothing here"]


async def test_with_a_tool_parser_tool_calls_are_dictionaries(engine: FakeEngine) -> None:
    engine.replies.append(CALLING)
    async with servers_of(engine.url) as servers:
        servers.tool_parser = "hermes"
        async with servers.managed_server() as managed:
            reply = await managed.chat_completion(messages=[USER], tools=[TOOL], max_tokens=64)
    ((call,),) = [choice.message.tool_calls or [] for choice in reply.choices]
    assert isinstance(call, dict)
    assert (call["type"], call["function"]["name"]) == ("function", "add")


async def test_ids_in_stop_reach_vllm_as_stop_token_ids(engine: FakeEngine) -> None:
    async with servers_of(engine.url) as servers:
        await servers.completion(prompt="Once", max_tokens=4, stop=["</s>", END_OF_TURN])
    body = engine.requests[-1].body
    assert (body["stop"], body["stop_token_ids"]) == (["</s>"], [END_OF_TURN])
