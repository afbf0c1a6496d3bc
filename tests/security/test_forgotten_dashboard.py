"""A dashboard that has read a subject's conversations loses them when the subject is forgotten."""

from stepwell.dashboard.follower import ConversationTexts, PoolFollower, keys_with_text

from rig.builders import make_step
from rig.local_pool import LocalPool
from stepwell.dashboard.index import TrajectoryIndex
from stepwell.pool.api.sessions import SessionCall, session_prompt_uid

ALICE, BOB = "alice@example.org", "bob@example.org"


async def test_texts_and_rows_of_a_forgotten_subject_leave_the_dashboard() -> None:
    pool = LocalPool(uid="pool")
    for user in (ALICE, BOB):
        session = user.partition("@")[0]
        await pool.place_session(SessionCall(session, "new", user))
        await pool.submit_steps([make_step(session, session_prompt_uid(session), uid="1")])
        await pool.complete_trajectory(session, session_prompt_uid(session), 1.0)
    await pool.fetch_batch(2)
    index, texts = TrajectoryIndex(), ConversationTexts()
    follower = PoolFollower(pool, index, texts)
    await follower.poll()
    for snapshot in (await pool.changes({})).snapshots:
        texts.put(snapshot, f"{snapshot.trajectory_uid} wrote this")
    assert len(keys_with_text(texts.copy(), "wrote this")) == 2
    await pool.forget(ALICE)
    await follower.poll()
    assert keys_with_text(texts.copy(), "wrote this") == [("bob", session_prompt_uid("bob"))]
    assert index.get(("alice", session_prompt_uid("alice"))) is None
    assert index.get(("bob", session_prompt_uid("bob"))) is not None
