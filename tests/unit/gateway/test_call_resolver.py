"""What a gateway remembers of trajectories, sessions and turns, and what it asks the pool."""

from stepwell.gateway.calls import Unrecorded
from stepwell.gateway.requests import read_call_headers

from rig.local_pool import LocalPool
from stepwell.access.caller import Caller, Role, SessionKey
from stepwell.gateway.call_resolver import ASK_PAUSE, UNCHECKED, CallResolver
from stepwell.pool.api.producing import TRAIN, Registration, TrajectoryRef
from stepwell.pool.api.sessions import session_prompt_uid
from tests.unit.gateway.dialects.asking import HELLO, chat

HEADERS = read_call_headers([])
NAMED = read_call_headers([(b"x-session-id", b"mine")])
ANN = Caller("ann's", Role.SESSION, session=SessionKey("ann"))
BOB = Caller("bob's", Role.SESSION, session=SessionKey("bob"))
REPLY = {"role": "assistant", "content": "hello to you"}
NEXT = [*HELLO, REPLY, {"role": "user", "content": "and now?"}]


async def test_a_session_is_placed_without_the_pool_until_its_trajectory_is_dropped() -> None:
    pool = LocalPool()
    resolver, ref = CallResolver(pool, ask_timeout=0.05), TrajectoryRef("s", session_prompt_uid("s"))
    dropped: list[str] = []
    resolver.on_drop = dropped.append
    first = await resolver.by_url(ref, HEADERS)
    assert (first.channel, first.is_rollout, first.unrecorded) == (TRAIN, False, None)
    pool.away = True
    assert await resolver.by_url(ref, HEADERS) == first
    resolver.drop(first.ref.trajectory_uid)
    unchecked = await resolver.by_url(ref, HEADERS)
    assert (unchecked.ref, unchecked.channel, resolver.unchecked) == (first.ref, UNCHECKED, 1)
    assert dropped == [first.ref.trajectory_uid]


async def test_a_pool_that_is_away_for_sessions_is_still_asked_for_trajectories() -> None:
    now = 0.0
    pool = LocalPool()
    await pool.register_trajectory(Registration("t", "p", "math"))
    resolver = CallResolver(pool, ask_timeout=0.05, clock=lambda: now)
    pool.away = True
    new = await resolver.by_key(ANN, NAMED, chat())
    assert (new.unrecorded, new.shown) == (Unrecorded.POOL, None)
    pool.away = False
    assert (await resolver.by_key(ANN, NAMED, chat())).unrecorded is Unrecorded.POOL, "it is not asked at once again"
    assert (await resolver.by_url(TrajectoryRef("t", "p"), HEADERS)).channel == "math"
    now = ASK_PAUSE
    assert (await resolver.by_key(ANN, NAMED, chat())).unrecorded is None


async def test_a_conversation_goes_on_by_its_messages_for_its_user_alone() -> None:
    resolver = CallResolver(LocalPool())
    first = await resolver.by_key(ANN, HEADERS, chat())
    assert first.conversation is not None
    resolver.note_answer(first.conversation, "step", lambda: [REPLY])
    assert (await resolver.by_key(ANN, HEADERS, chat(messages=NEXT))).ref == first.ref
    assert (await resolver.by_key(BOB, HEADERS, chat(messages=NEXT))).ref != first.ref
    assert (await resolver.by_key(ANN, HEADERS, chat())).ref != first.ref, "without a reply it is a new one"


async def test_a_conversation_with_a_name_is_the_same_session_at_every_gateway() -> None:
    pool = LocalPool()
    one = await CallResolver(pool).by_key(ANN, NAMED, chat())
    other = await CallResolver(pool).by_key(ANN, NAMED, chat(messages=NEXT))
    assert one.ref == other.ref
    assert (await CallResolver(pool).by_key(BOB, NAMED, chat())).ref != one.ref
