from dataclasses import replace
from typing import Any, cast

import pytest

from rig.builders import make_step
from rig.local_pool import LocalPool
from stepwell.errors import PreviousResponseNotFound
from stepwell.gateway.dialects.dialect import ModelCall
from stepwell.gateway.recording.outbox import Outbox
from stepwell.gateway.stored_conversations import STORED, StoredConversations, store_turn
from stepwell.pool.api.producing import Registration, TrajectoryRef
from stepwell.steps.step import Step
from tests.unit.gateway.dialects.responses.asking_responses import SEAL, Json, ask, called, returned, tool_calls, user

REF = TrajectoryRef("t", "p")


class NothingHeld:
    """As much of the outbox as is used: all steps are delivered."""

    async def settle(self, trajectory_uid: str, timeout: float) -> None: ...


@pytest.fixture
async def pool() -> LocalPool:
    pool = LocalPool()
    await pool.register_trajectory(Registration("t", "p"))
    return pool


def stored(pool: LocalPool) -> StoredConversations:
    return StoredConversations(pool, cast("Outbox", NothingHeld()))


def kept(call: ModelCall, **reply: Any) -> Step:
    step = make_step(REF.trajectory_uid, REF.prompt_uid, uid=call.uid)
    (kept,) = store_turn(call, [step], lambda: [reply])
    return kept


def after(call: ModelCall) -> Json:
    return {"previous_response_id": SEAL.attach("resp", call.uid)}


async def test_a_call_gets_all_turns_before_it_and_its_own_instructions(pool: LocalPool) -> None:
    first = ask({"role": "developer", "content": "You add."}, user("one"), instructions="Old.")
    second = ask(user("two"), **after(first))
    await pool.submit_steps([kept(first, content="1", reasoning="hm"), kept(second, content="2")])
    third = ask(user("three"), instructions="New.", **after(second))
    call = await stored(pool).complete(third, REF)
    assert call.request["messages"] == [
        {"role": "system", "content": "New.\n\nYou add."},
        user("one"),
        {"role": "assistant", "content": "1", "reasoning": "hm", "reasoning_content": "hm"},
        user("two"),
        {"role": "assistant", "content": "2"},
        user("three"),
    ]
    assert call.echoed == (first.uid, second.uid)
    assert call.request["max_tokens"] == third.request["max_tokens"]


async def test_two_calls_may_continue_one_step(pool: LocalPool) -> None:
    first = ask(user("one"))
    await pool.submit_steps([kept(first, content="1")])
    for text in ("left", "right"):
        call = await stored(pool).complete(ask(user(text), **after(first)), REF)
        assert [message["content"] for message in call.request["messages"]] == ["one", "1", text]


async def test_the_output_of_a_tool_follows_its_stored_call_and_bad_arguments_are_counted(pool: LocalPool) -> None:
    first = ask(user("one"))
    calls = tool_calls(1)
    calls[0]["function"]["arguments"] = '{"a": '
    await pool.submit_steps([kept(first, content=None, tool_calls=calls)])
    for _ in range(2):  # what is stored does not change
        call = await stored(pool).complete(ask(returned(1), **after(first)), REF)
        assert call.malformed_history == 1
        assert [message["role"] for message in call.request["messages"]] == ["user", "assistant", "tool"]


async def test_a_turn_is_unknown_if_one_before_it_is_not_stored(pool: LocalPool) -> None:
    first, second = ask(user("one")), ask(user("two"), **after(ask(user("lost"))))
    await pool.submit_steps([kept(first, content="1"), kept(second, content="2")])
    with pytest.raises(PreviousResponseNotFound, match="send the whole input"):
        await stored(pool).complete(ask(user("three"), **after(second)), REF)
    with pytest.raises(PreviousResponseNotFound):
        await stored(pool).complete(ask(user("x"), **after(first)), TrajectoryRef("another", "p"))


async def test_nothing_is_kept_of_a_call_that_is_not_stored(pool: LocalPool) -> None:
    for call in (ask(user(), store=False), ask(user(), called(1), returned(1))):
        assert STORED not in kept(call, content="1").extras
        assert await stored(pool).complete(call, REF) is call


async def test_a_turn_that_is_masked_is_continued_from_memory_and_not_stored(pool: LocalPool) -> None:
    conversations, first = stored(pool), ask(user("my secret"))
    step = kept(first, content="1")
    masked = replace(step, extras={STORED: {"masked": True}})
    (redacted,) = conversations.keep_masked([step], [masked])
    assert redacted.extras == {}
    await pool.submit_steps([redacted])
    second = ask(user("two"), **after(first))
    call = await conversations.complete(second, REF)
    assert [message["content"] for message in call.request["messages"]] == ["my secret", "1", "two"]
    for other in (stored(pool), conversations):
        conversations.drop(REF.trajectory_uid)
        with pytest.raises(PreviousResponseNotFound):
            await other.complete(second, REF)


async def test_a_step_that_was_dropped_is_continued_and_one_that_is_not_masked_is_stored(pool: LocalPool) -> None:
    conversations, first = stored(pool), ask(user("one"))
    step = kept(first, content="1")
    assert conversations.keep_masked([step], [step]) == [step]
    with pytest.raises(PreviousResponseNotFound):
        await conversations.complete(ask(user("two"), **after(first)), REF)
    assert conversations.keep_masked([step], []) == []
    call = await conversations.complete(ask(user("two"), **after(first)), REF)
    assert [message["content"] for message in call.request["messages"]] == ["one", "1", "two"]


async def test_the_oldest_masked_turns_are_given_up_beyond_the_bound(pool: LocalPool) -> None:
    conversations = StoredConversations(pool, cast("Outbox", NothingHeld()), max_kept_bytes=300)
    calls = [ask(user(f"{n}" * 100)) for n in range(2)]
    for call in calls:
        conversations.keep_masked([kept(call, content="1")], [])
    with pytest.raises(PreviousResponseNotFound):
        await conversations.complete(ask(user("two"), **after(calls[0])), REF)
    assert await conversations.complete(ask(user("two"), **after(calls[1])), REF)
