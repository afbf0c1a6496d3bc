"""What a preview says besides the batch; that it is the next fetch's is shown for random pools in
test_pool_properties.py."""

from typing import Any

import pytest

from rig.builders import EVERYTHING, EasyPool, make_step
from stepwell.pool.api.leasing import LATER, PREVIEWED, BatchRequest, ExactFill, Order, Unit
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.policy import Canary, PolicyDecision
from stepwell.pool.api.producing import Registration
from stepwell.pool.api.sessions import SESSION, session_metadata
from stepwell.pool.rules.batch_selection import MOST_PASSED
from stepwell.steps.step import Exactness


def request(count: int, **terms: Any) -> BatchRequest:
    return BatchRequest(count=count, channel="train", **terms)


def prompts(pool: EasyPool, wanted: BatchRequest) -> list[str]:
    return [item.prompt_uid for item in pool.preview("train", wanted).items]


def reasons(pool: EasyPool, wanted: BatchRequest) -> dict[str, str]:
    return {item.prompt_uid: item.why for item in pool.preview("train", wanted).waiting}


def taken(pool: EasyPool, count: int, **how: Any) -> list[str]:
    groups = pool.take(count, **how)
    assert groups is not None
    return [group[0].prompt_uid for group in groups]


def test_without_a_request_it_is_of_the_last_that_a_consumer_made() -> None:
    pool = EasyPool(Limits())
    for name in "abc":
        pool.rollout(name, name)
    unasked = pool.preview("train")
    assert (unasked.asked_at, unasked.request, unasked.count) == (0.0, request(8), 3)
    pool.advance(5.0)
    assert taken(pool, 2, min_exactness=Exactness.RETOKENIZED) == ["a", "b"]
    asked = pool.preview("train")
    assert (asked.asked_at, asked.request) == (5.0, request(2, min_exactness=Exactness.RETOKENIZED))
    assert [item.prompt_uid for item in asked.items] == ["c"]
    assert "2 ready groups in channel 'train'" in asked.waits_for
    assert pool.preview("of nobody").count == 0


def test_a_channel_of_which_nothing_is_known_has_no_batch() -> None:
    found = EasyPool(Limits()).preview("train")
    assert (found.items, found.waiting, found.count) == ([], [], 0)


def test_what_a_rolled_back_version_said_is_not_in_it() -> None:
    pool = EasyPool(Limits(max_staleness=0))
    pool.policy_version = 3
    for n, version in enumerate((3, 4, 3)):
        pool.rollout(f"t{n}", "p", size=3, policy_version=version)
    pool.rollout("bad", "q", policy_version=4)
    pool.rollout("good", "r", policy_version=3)
    pool.decide(PolicyDecision(4, "canary", "guard", "why", 1.0), Canary(4, ("http://b",), 0.1, began_at=1.0), None)
    pool.decide(PolicyDecision(4, "rollback", "guard", "why", 2.0), None, None)
    found = pool.preview("train", request(2))
    assert [(item.prompt_uid, item.trajectories) for item in found.items] == [("p", ("t0", "t2")), ("r", ("good",))]
    assert reasons(pool, request(2)) == {
        "q": "a version of the policy said it that was rolled back: the next fetch drops it"
    }
    assert taken(pool, 2) == ["p", "r"]


EXACT = ExactFill(trajectories=4, channel="train", shares={}, lease=60.0, step_filter=EVERYTHING)


@pytest.mark.parametrize(
    "wanted", [request(4), request(4, unit=Unit.TRAJECTORIES), EXACT], ids=["groups", "singly", "exact"]
)
@pytest.mark.parametrize("is_rolled_back", [False, True])
def test_what_is_packed_stays_packed(wanted: BatchRequest | ExactFill, is_rolled_back: bool) -> None:
    pool = EasyPool(Limits(max_staleness=9))
    pool.rollout("first", "first")
    if isinstance(wanted, BatchRequest):
        assert pool.take(1, unit=wanted.unit) is not None
    for n in range(20):
        pool.rollout(f"t{n}", f"p{n // 2}", size=2, policy_version=n % 4)
    if is_rolled_back:
        pool.decide(PolicyDecision(3, "canary", "guard", "why", 1.0), Canary(3, ("http://b",), 0.1, began_at=1.0), None)
        pool.decide(PolicyDecision(3, "rollback", "guard", "why", 2.0), None, None)
    pool.state.pack_at_rest(0)
    assert all(found.is_packed for found in pool.state.trajectories.values())
    assert pool.preview("train", wanted).count >= 2
    assert all(found.is_packed for found in pool.state.trajectories.values())


def test_the_draw_from_history_is_foreseen() -> None:
    pool = EasyPool(Limits(history_size=20))
    for n in range(20):
        pool.rollout(f"old{n}", f"old{n}")
    pool.take(20)
    for n in range(2):
        pool.rollout(f"new{n}", f"new{n}")
    foreseen = pool.preview("train", request(4, history=0.5)).items
    assert [item.from_history for item in foreseen] == [False, False, True, True]
    assert [item.prompt_uid for item in foreseen] == taken(pool, 4, history=0.5)


def test_what_waits_says_why() -> None:
    pool = EasyPool(Limits(max_staleness=1, require_reward=True))
    pool.policy_version = 5
    pool.rollout("s", "stale", policy_version=1)
    pool.rollout("g", "greedy", untrainable="greedy: test", policy_version=5)
    pool.rollout("h", "half", size=3, policy_version=5)
    pool.register(Registration("h2", "half", group_size=3))
    pool.rollout("u", "unscored", None, policy_version=5)
    pool.rollout("a", "first", policy_version=5)
    pool.rollout("b", "second", policy_version=5)
    assert prompts(pool, request(1)) == ["first"]
    assert reasons(pool, request(1)) == {
        "stale": "too old (max_staleness 1): the next fetch drops it",
        "greedy": "the trainer wants none of its steps (greedy): the next fetch leaves it out",
        "half": "1 of 3 rollouts are complete, 1 running, 1 not started",
        "unscored": "1 of 1 rollouts are complete, 1 without a reward",
        "second": LATER,
    }


def test_in_strict_order_what_is_ready_waits_for_what_is_older() -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "running", group_size=1))
    pool.submit([make_step("t", "running", uid="t-0")])
    pool.rollout("r", "ready")
    strict = request(2, order=Order.STRICT)
    assert prompts(pool, strict) == ["ready"]
    pool.rollout("r2", "late")
    assert reasons(pool, strict) == {
        "running": "0 of 1 rollouts are complete, 1 running",
        "late": "in strict order it waits for an older group",
    }
    assert pool.take(2, order=Order.STRICT) is None


def test_more_of_one_user_than_a_batch_may_have_says_so() -> None:
    pool = EasyPool(Limits(max_share_per_user=0.5))
    for n, user in enumerate(("ann", "ann", "bob")):
        pool.register(Registration(str(n), f"p{n}", group_size=1, metadata={SESSION: session_metadata(str(n), user)}))
        pool.submit([make_step(str(n), f"p{n}", uid=str(n))])
        pool.complete(str(n), f"p{n}", 1.0)
    assert reasons(pool, request(2)) == {"p1": "the batch has as much of its user as --max-share-per-user allows"}
    assert prompts(pool, request(2)) == taken(pool, 2) == ["p0", "p2"]


@pytest.mark.parametrize("stale", [MOST_PASSED - 1, MOST_PASSED + 50])
def test_it_looks_at_no_more_than_it_may_and_describes_no_more(stale: int) -> None:
    pool = EasyPool(Limits(max_staleness=0))
    for n in range(stale):
        pool.rollout(f"old{n}", f"old{n}")
    pool.policy_version = 1
    for n in range(PREVIEWED + 10):
        pool.rollout(f"t{n}", f"t{n}", policy_version=1)
    found = pool.preview("train", request(PREVIEWED + 10))
    assert len(found.items) <= PREVIEWED
    assert all(item.prompt_uid.startswith("t") for item in found.items)
    assert found.count == PREVIEWED + 10 or stale > MOST_PASSED
    assert len(found.waiting) <= 20
