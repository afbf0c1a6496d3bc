"""An environment's servers, over real HTTP with the real openai package: vLLM, the gateway, a plain OpenAI server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from rig.chatml import render_chat
from rig.fake_engine import FakeEngine, Faults, Reply, ToolCall
from rig.gateways import free_port, serve_gateway
from rig.local_pool import LocalPool
from rig.vocabulary import END_OF_TURN, encode, pieces
from rig.waiting import until
from stepwell.envs.config import APIServerConfig
from stepwell.envs.servers import SequenceNode, ServerManager
from stepwell.errors import BadRequest, EngineUnavailable

USER = {"role": "user", "content": "What is 1 + 1?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLING = Reply("Let me see: ", (ToolCall("add", {"a": 1, "b": 1}),))


class Letters:
    """A tokenizer that is there at once."""

    eos_token_id = END_OF_TURN

    def encode(self, text: str, **_: object) -> list[int]:
        return encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(pieces(list(ids)))

    def apply_chat_template(self, messages: Any, tools: Any, **_: object) -> str:
        return render_chat(messages, tools or ())


@asynccontextmanager
async def servers_of(*urls: str, **changes: Any) -> AsyncIterator[ServerManager]:
    given = {"model_name": "tiny", "timeout": 20.0, **changes}
    servers = ServerManager([APIServerConfig(base_url=f"{url}/v1", **given) for url in urls])
    try:
        yield servers
    finally:
        await servers.close()


@asynccontextmanager
async def servers_behind(kind: str, engine: FakeEngine) -> AsyncIterator[ServerManager]:
    """The engine itself, or a gateway before it."""
    if kind == "vllm":
        async with servers_of(engine.url) as servers:
            yield servers
    else:
        async with serve_gateway(LocalPool(), [engine.url]) as url, servers_of(f"{url}/unrecorded") as servers:
            yield servers


exactly = pytest.mark.parametrize("kind", ["vllm", "gateway"])


def trained(node: SequenceNode) -> list[int]:
    return [mask for mask in node.masked_tokens if mask != -100]


def check_shape(node: SequenceNode) -> None:
    assert len(node.tokens) == len(node.masked_tokens)
    assert node.logprobs is not None
    for token, mask, logprob in zip(node.tokens, node.masked_tokens, node.logprobs, strict=True):
        assert (mask == -100) == (logprob == 1.0)
        assert mask in (-100, token)


# --- a session


@exactly
async def test_a_tool_conversation_of_two_turns_is_one_sequence_trained_at_what_the_model_wrote(
    kind: str, engine: FakeEngine
) -> None:
    engine.replies.extend([CALLING, Reply("It is 2.")])
    async with servers_behind(kind, engine) as servers, servers.managed_server() as managed:
        first = await managed.chat_completion(messages=[USER], tools=[TOOL], max_tokens=64)
        message = first.choices[0].message
        assert message.tool_calls is not None
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
        history = [USER, message, result]
        second = await managed.chat_completion(messages=history, tools=[TOOL], max_tokens=64)
        (node,) = managed.get_state()["nodes"]
    assert second.choices[0].message.content == "It is 2."
    called = {"role": "assistant", "content": CALLING.text, "tool_calls": [message.tool_calls[0].model_dump()]}
    prompt = encode(render_chat([USER, called, result], [TOOL]))
    assert node.tokens == [*prompt, *encode("It is 2."), END_OF_TURN]
    assert trained(node) == [*CALLING.ids(), *encode("It is 2."), END_OF_TURN]
    assert (node.exactness, node.metadata) == ("engine", {"finish_reason": "stop", "turns": 2})
    check_shape(node)


@exactly
async def test_a_history_told_otherwise_begins_a_sequence_and_none_is_lost(kind: str, engine: FakeEngine) -> None:
    engine.replies.extend([Reply("two", reasoning="1 + 1"), Reply("yes")])
    async with servers_behind(kind, engine) as servers, servers.managed_server() as managed:
        first = await managed.chat_completion(messages=[USER], max_tokens=64)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        await managed.chat_completion(messages=[USER, said, {"role": "user", "content": "Sure?"}], max_tokens=64)
        one, other = managed.get_state()["nodes"]
    assert trained(one) == [*encode("<think>1 + 1</think>two"), END_OF_TURN]
    assert trained(other) == [*encode("yes"), END_OF_TURN]
    check_shape(one)
    check_shape(other)


@exactly
async def test_choices_are_sequences_with_logprobs_of_their_own(kind: str, engine: FakeEngine) -> None:
    async with servers_behind(kind, engine) as servers, servers.managed_server() as managed:
        reply = await managed.chat_completion(messages=[USER], n=3, max_tokens=24)
        nodes = managed.get_state()["nodes"]
    assert len(nodes) == len(reply.choices) == 3
    told = [choice.logprobs.content for choice in reply.choices if choice.logprobs and choice.logprobs.content]
    for node, entries in zip(nodes, told, strict=True):
        check_shape(node)
        assert node.logprobs is not None
        sampled = [value for value in node.logprobs if value != 1.0]
        assert sampled == pytest.approx([entry.logprob for entry in entries])


@exactly
async def test_completions_of_text_are_kept_too(kind: str, engine: FakeEngine) -> None:
    engine.replies.append(Reply(" upon a time"))
    async with servers_behind(kind, engine) as servers, servers.managed_server() as managed:
        reply = await managed.completion(prompt="Once", max_tokens=24)
        (node,) = managed.get_state()["nodes"]
    assert reply.choices[0].text == " upon a time"
    assert node.tokens == [*encode("Once upon a time"), END_OF_TURN]
    assert trained(node) == [*encode(" upon a time"), END_OF_TURN]


async def test_the_gateway_tells_the_version_and_nothing_is_recorded(engine: FakeEngine) -> None:
    pool = LocalPool()
    engine.weight_version = "5"
    await pool.set_policy_version(5)
    gateway = serve_gateway(pool, [engine.url])
    async with gateway as url, servers_of(f"{url}/unrecorded") as servers, servers.managed_server() as managed:
        await managed.chat_completion(messages=[USER])
        (node,) = managed.get_state()["nodes"]
    assert node.policy_version == 5
    assert pool.rules.stats().submitted == 0


async def test_vllm_itself_tells_no_version(engine: FakeEngine) -> None:
    async with servers_of(engine.url) as servers, servers.managed_server() as managed:
        await managed.chat_completion(messages=[USER])
        assert managed.get_state()["nodes"][0].policy_version is None


async def test_a_tokenizer_makes_text_of_a_sequence_and_is_not_needed(engine: FakeEngine) -> None:
    async with servers_of(engine.url) as servers:
        for tokenizer, text in ((None, ""), (Letters(), "Once more.")):
            engine.replies.append(Reply(" more."))
            async with servers.managed_server(tokenizer) as managed:
                await managed.completion(prompt="Once", max_tokens=6)
                assert managed.get_state()["nodes"][0].full_text == text


async def test_a_session_that_is_reset_has_nothing_left(engine: FakeEngine) -> None:
    async with servers_of(engine.url) as servers, servers.managed_server() as managed:
        await managed.chat_completion(messages=[USER])
        managed.reset()
        assert managed.get_state() == {"nodes": []}


@pytest.mark.parametrize("faults", [Faults(short_ids=True), Faults(logprob_value=-9999.0)])
async def test_tokens_that_do_not_add_up_fail_the_rollout(engine: FakeEngine, faults: Faults) -> None:
    engine.faults = faults
    async with servers_of(engine.url) as servers, servers.managed_server() as managed:
        with pytest.raises(EngineUnavailable, match="cannot be trained on"):
            await managed.chat_completion(messages=[USER])
        assert managed.get_state() == {"nodes": []}


async def test_a_stream_in_a_session_is_refused(engine: FakeEngine) -> None:
    async with servers_of(engine.url) as servers, servers.managed_server() as managed:
        with pytest.raises(BadRequest, match="leave stream out"):
            await managed.chat_completion(messages=[USER], stream=True)


# --- a server that gives text only


@pytest.mark.parametrize("behind", ["", "gateway"])
async def test_text_only_is_encoded_again_and_says_so(
    behind: str, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        FakeEngine(plain=True, replies=[CALLING, Reply("It is 2.")]) as engine,
        plain_url(behind, engine) as url,
        servers_of(f"{url}/unrecorded" if behind else url, tokenizer_name=str(tiny_model)) as servers,
        servers.managed_server() as managed,
    ):
        first = await managed.chat_completion(messages=[USER], tools=[TOOL], max_tokens=64)
        message = first.choices[0].message
        assert message.tool_calls is not None
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
        await managed.chat_completion(messages=[USER, message, result], tools=[TOOL], max_tokens=64)
        (node,) = managed.get_state()["nodes"]
    assert trained(node) == [*CALLING.ids(), *encode("It is 2."), END_OF_TURN]
    assert node.exactness == "retokenized"
    assert "What is 1 + 1?" in node.full_text
    check_shape(node)
    warnings = [record for record in caplog.records if "gives no token ids" in record.message]
    assert len(warnings) == 1


@asynccontextmanager
async def plain_url(behind: str, engine: FakeEngine) -> AsyncIterator[str]:
    """The gateway encodes what is text alone; for the tool call, the environment's own tokenizer must do."""
    if behind:
        async with serve_gateway(LocalPool(), [engine.url], load_tokenizer=lambda _: Letters()) as url:
            yield url
    else:
        yield engine.url


async def test_a_plain_server_is_asked_in_vllms_way_once(tiny_model: Path) -> None:
    async with FakeEngine(plain=True) as engine, servers_of(engine.url, tokenizer_name=str(tiny_model)) as servers:
        async with servers.managed_server() as managed:
            for _ in range(3):
                await managed.chat_completion(messages=[USER], max_tokens=8)
        assert len(managed.get_state()["nodes"]) == 0
    asked = ["return_token_ids" in request.body for request in engine.requests]
    assert asked == [True, False, False, False]


async def test_a_refusal_by_a_server_that_gives_ids_is_the_callers(engine: FakeEngine) -> None:
    async with servers_of(engine.url) as servers, servers.managed_server() as managed:
        await managed.chat_completion(messages=[USER])
        asked = engine.request_count
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await managed.chat_completion(messages=[USER], max_tokens=100_000)
        assert engine.request_count == asked + 1


# --- several servers


async def test_a_call_is_the_openai_packages_own(engine: FakeEngine) -> None:
    engine.replies.extend([Reply("chat"), Reply("text")])
    async with servers_of(engine.url) as servers:
        assert (await servers.chat_completion(messages=[USER])).choices[0].message.content == "chat"
        assert (await servers.completion(prompt="x")).choices[0].text == "text"
        with pytest.raises(openai.NotFoundError):
            await servers.chat_completion(messages=[USER], model="nope")
    assert engine.requests[0].body["model"] == "tiny"


async def test_the_least_busy_server_gets_the_next_call(engine: FakeEngine) -> None:
    async with FakeEngine() as other, servers_of(engine.url, other.url) as servers:
        engine.pause()
        other.pause()
        calls = [asyncio.create_task(servers.chat_completion(messages=[USER])) for _ in range(6)]
        await until(lambda: engine.in_flight + other.in_flight == 6, "all to be under way")
        assert (engine.in_flight, other.in_flight) == (3, 3)
        engine.resume()
        other.resume()
        await asyncio.gather(*calls)


async def test_evaluations_have_a_bound_of_their_own_and_weights_move_both(engine: FakeEngine) -> None:
    engine.pause()
    async with servers_of(engine.url, num_max_requests_at_once=4, num_requests_for_eval=2) as servers:
        calls = [asyncio.create_task(servers.chat_completion(messages=[USER])) for _ in range(8)]
        calls += [asyncio.create_task(servers.chat_completion(messages=[USER], split="eval")) for _ in range(8)]
        server = servers.servers[0]
        await until(lambda: (server.load("train"), server.load("eval")) == (2.0, 4.0), "all calls to run or wait")
        await until(lambda: engine.in_flight == 6, "the bounds to be reached")
        servers.update_weight(1.5)
        await until(lambda: engine.in_flight == 9, "the new bounds to be reached")
        engine.resume()
        await asyncio.gather(*calls)
    assert engine.request_count == 16


async def test_a_session_stays_with_its_server_while_that_is_well(engine: FakeEngine) -> None:
    async with (
        FakeEngine() as other,
        servers_of(engine.url, other.url) as servers,
        servers.managed_server() as managed,
    ):
        for _ in range(4):
            await managed.chat_completion(messages=[USER])
    assert sorted((engine.request_count, other.request_count)) == [0, 4]


async def test_calls_go_elsewhere_while_a_server_is_away_and_back_when_it_is_there_again() -> None:
    port = free_port()
    async with FakeEngine() as other, servers_of(f"http://127.0.0.1:{port}", other.url) as servers:
        for _ in range(2):
            await servers.chat_completion(messages=[USER])
        assert other.request_count == 2
        async with FakeEngine(port=port) as engine:
            await until(lambda: servers.servers[0].up.is_set(), "the server to be found again")
            await servers.chat_completion(messages=[USER])
        assert engine.request_count == 1


async def test_a_call_waits_for_the_only_server_to_come_back() -> None:
    port = free_port()
    async with servers_of(f"http://127.0.0.1:{port}") as servers:
        call = asyncio.create_task(servers.chat_completion(messages=[USER]))
        await until(lambda: not servers.servers[0].up.is_set(), "the server to be found away")
        async with FakeEngine(port=port):
            assert (await call).choices


async def test_a_server_that_stays_away_fails_the_call_in_time() -> None:
    async with servers_of(f"http://127.0.0.1:{free_port()}", timeout=0.5) as servers:
        with pytest.raises(EngineUnavailable, match="no server answered for 0.5 s"):
            await servers.chat_completion(messages=[USER])


async def test_without_health_checks_the_failure_is_the_callers_at_once() -> None:
    async with servers_of(f"http://127.0.0.1:{free_port()}", health_check=False) as servers:
        with pytest.raises(openai.APIConnectionError):
            await servers.chat_completion(messages=[USER])


def test_no_server_at_all_is_refused() -> None:
    with pytest.raises(BadRequest, match="needs a server"):
        ServerManager([])


async def test_a_gateway_that_records_the_calls_itself_is_refused(engine: FakeEngine) -> None:
    """Each answer would be trained twice: by its session, and by the environment's group."""
    async with serve_gateway(LocalPool(), [engine.url]) as url, servers_of(url) as servers:
        with pytest.raises(BadRequest, match=r"records each call as a session.* use http://.*/unrecorded/v1$"):
            async with servers.managed_server() as managed:
                await managed.chat_completion(messages=[USER])
