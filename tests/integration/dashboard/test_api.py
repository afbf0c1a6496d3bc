"""The dashboard over HTTP, with a pool in this process."""

import math
from typing import Any

import httpx
import pytest

from rig.dashboard import MadeUpPool, serve_dashboard
from rig.made_up_rollouts import DANGER, RigTokenizer, key_of, steps_of, summary_of
from rig.waiting import until
from tests.integration.dashboard.client import BEARER, KEY, curate, eventually, get, known

READY = 8
"""The number of a rollout that is ready."""


async def test_the_status_tells_of_everything(client: httpx.AsyncClient) -> None:
    status = await get(client, "status")
    assert status["pool"]["name"] == "data_pool"
    assert status["pool"]["policy_version"] == 12
    assert status["pool"]["refused"] == {"duplicate": 4, "late": 1}
    assert status["pool"]["scoring"]["failed"] == {"timeout": 1}
    assert [channel["name"] for channel in status["channels"]] == ["train", "validation"]
    train = status["channels"][0]
    assert set(train["dropped"]["stale"]) == {"steps", "tokens"}
    assert train["oldest_age"] > 0
    assert status["notes"] == []
    assert status["index"]["behind"] is False
    assert status["pool_error"] is None
    assert (status["gateways"], status["engines"]) == ([], [])


async def test_the_status_notes_a_channel_whose_steps_are_left_out_for_their_sampling(pool: MadeUpPool) -> None:
    pool.recent.update({"truncated": 620, "": 380})
    async with serve_dashboard(pool) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        (note,) = (await get(client, "status"))["notes"]
    assert note.startswith("62% of the last 1,000 steps of channel train are left out of training for their sampling")


async def test_the_status_says_which_version_serves_which_sessions_and_why(client: httpx.AsyncClient) -> None:
    policy = (await get(client, "status"))["policy"]
    stable, canary = policy["sides"]
    assert (stable["side"], stable["version"], stable["share"], stable["reward_mean"]) == ("stable", 12, 0.9, 0.75)
    assert (canary["side"], canary["version"], canary["share"], canary["rewards"]) == ("canary", 14, 0.1, 40)
    assert (canary["engines"], policy["withdrawn"]) == (["http://canary:8000"], [13])
    assert [decision["action"] for decision in policy["decisions"]] == ["overdue", "canary", "rollback"]
    assert policy["alarm"] == "no decision after 1 min"


async def test_the_series_are_passed_on_and_shared(client: httpx.AsyncClient, pool: MadeUpPool) -> None:
    series = await get(client, "series", seconds=900)
    await get(client, "series", seconds=600)
    assert series["interval"] == 5.0
    assert len(series["ends"]) == len(series["channels"]["train"]["steps"]) == 180
    assert series["channels"]["train"]["staleness"][0] == {"0": 10, "1": 6, "2": 3, "5": 1}
    assert pool.calls["series"] == 1


async def test_trajectories_are_filtered_sorted_and_paged(client: httpx.AsyncClient) -> None:
    found = await get(client, "trajectories", state="ready", channel="train", sort="-reward", limit=10)
    expected = [summary_of(n) for n in range(400)]
    ready = [row for row in expected if row.state == "ready" and row.channel == "train"]
    assert (found["total"], found["matched"], len(found["rows"])) == (400, len(ready), 10)
    assert [row["reward"] for row in found["rows"]] == sorted((row.reward or 0.0 for row in ready), reverse=True)[:10]
    assert found["facets"]["channels"]["train"] == len(ready)
    assert set(found["facets"]) == {"channels", "states", "causes", "exactness", "marks", "sources"}
    second = await get(client, "trajectories", state="ready", channel="train", sort="-reward", limit=10, offset=10)
    assert not {row["trajectory_uid"] for row in found["rows"]} & {row["trajectory_uid"] for row in second["rows"]}


async def test_texts_are_found_whatever_their_case(client: httpx.AsyncClient) -> None:
    await known(client, trajectories=400, texts=300)
    found = await get(client, "trajectories", text="WINDOW.hacked", reward_min="", channel="")
    assert {row["trajectory_uid"][2:8] for row in found["rows"]} <= {f"{n:06d}" for n in range(3, 400, 20)}
    assert found["matched"] > 10
    assert found["texts"]["of"] == 400
    assert (await get(client, "trajectories", text="nobody says this"))["matched"] == 0


async def test_a_trajectory_is_told_step_by_step(client: httpx.AsyncClient) -> None:
    uid, prompt = key_of(READY + 2)
    view = await get(client, "trajectory", trajectory_uid=uid, prompt_uid=prompt)
    steps = steps_of(READY + 2)
    assert view["held"] is True
    assert "ready" in view["why"]
    assert view["metadata"]["number"] == READY + 2
    assert len(view["steps"]) == len(steps) == 2
    last = view["steps"][-1]
    assert last["new_from"] == len(steps[0].prompt_ids) + len(steps[0].response_ids)
    assert last["turns"][-1] == {"role": "assistant", "text": last["turns"][-1]["text"], "is_response": True}
    tokens = last["tokens"]
    assert len({len(tokens[name]) for name in ("ids", "texts", "logprobs", "trained", "versions")}) == 1
    assert "".join(tokens["texts"]).removesuffix("<|im_end|>") == last["turns"][-1]["text"]
    assert last["version_spans"][0][0] == last["policy_version"]


async def test_what_the_pool_no_longer_holds_is_told_without_its_steps(client: httpx.AsyncClient) -> None:
    uid, prompt = key_of(24)
    view = await get(client, "trajectory", trajectory_uid=uid, prompt_uid=prompt)
    assert (view["held"], view["steps"], view["summary"]["cause"]) == (False, [], "stale")
    assert "stale" in view["why"]


async def test_a_text_that_looks_like_html_stays_text(client: httpx.AsyncClient) -> None:
    uid, prompt = key_of(43)
    answer = await client.get("/api/trajectory", params={"trajectory_uid": uid, "prompt_uid": prompt})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert DANGER in answer.json()["steps"][0]["turns"][1]["text"]


async def test_a_group_is_shown_side_by_side_with_advantages(client: httpx.AsyncClient) -> None:
    _, prompt = key_of(READY)
    view = await get(client, "group", prompt_uid=prompt, group=READY // 4, shard="data_pool")
    rewards = [summary_of(n).reward or 0.0 for n in range(READY, READY + 4)]
    mean = sum(rewards) / 4
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 3)
    assert (view["size"], view["mean"], view["std"]) == (4, pytest.approx(mean), pytest.approx(std))
    assert [row["advantage"] for row in view["rows"]] == [pytest.approx((r - mean) / (std + 1e-4)) for r in rewards]
    assert all("The sum is" in row["last"] for row in view["rows"])


async def test_curation_reaches_the_pool_and_is_seen_at_once(client: httpx.AsyncClient, pool: MadeUpPool) -> None:
    rejected, trained = key_of(READY), key_of(16)
    outcomes = await curate(client, "reject", rejected, trained, ("unheard of", "p"), why="it cheats")
    assert outcomes == {rejected[0]: "done", trained[0]: "late", "unheard of": "unknown"}
    found = await get(client, "trajectories", cause="rejected")
    assert [row["trajectory_uid"] for row in found["rows"]] == [rejected[0]]
    entries = (await get(client, "audit", trajectory_uid=rejected[0]))["entries"]
    assert [(entry["by"], entry["action"], entry["why"]) for entry in entries] == [("ada", "reject", "it cheats")]
    assert len((await get(client, "audit"))["entries"]) == 3


async def test_marks_and_relabels_are_seen_at_once(client: httpx.AsyncClient) -> None:
    key = key_of(READY)
    assert await curate(client, "relabel", key, reward=-2) == {key[0]: "done"}
    assert await curate(client, "mark", key, mark="look") == {key[0]: "done"}
    assert await curate(client, "mark", key, mark="look") == {key[0]: "unchanged"}
    (row,) = (await get(client, "trajectories", mark="look"))["rows"]
    assert (row["reward"], row["reward_source"], row["marks"]) == (-2, "curation:ada", ["look"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"action": "mark"}, "needs a mark"),
        ({"action": "relabel"}, "needs a reward"),
        ({"action": "delete"}, "action"),
        ({"action": "reject", "by": ""}, "by"),
        ({"action": "reject", "trajectories": []}, "trajectories"),
        ({"action": "reject", "unheard": 1}, "unheard"),
    ],
)
async def test_a_curation_that_is_not_whole_is_refused(
    client: httpx.AsyncClient, pool: MadeUpPool, body: dict[str, Any], said: str
) -> None:
    named = [{"trajectory_uid": "t", "prompt_uid": "p"}]
    answer = await client.post("/api/curate", json={"by": "ada", "trajectories": named, **body})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert pool.calls["curate"] == 0


async def test_a_curation_is_not_taken_from_another_sites_form(client: httpx.AsyncClient, pool: MadeUpPool) -> None:
    body = '{"action": "reject", "by": "x", "trajectories": [{"trajectory_uid": "t", "prompt_uid": "p"}]}'
    answer = await client.post("/api/curate", content=body, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415
    assert pool.calls["curate"] == 0


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("trajectories?sort=unheard", 400),
        ("trajectories?unheard=1", 400),
        ("trajectories?reward_min=much", 400),
        ("series?seconds=1000000", 400),
        ("trajectory?trajectory_uid=unheard&prompt_uid=of", 404),
        ("group?prompt_uid=unheard", 404),
        ("unheard", 404),
    ],
)
async def test_failures_are_told_in_one_shape(client: httpx.AsyncClient, path: str, status: int) -> None:
    answer = await client.get(f"/api/{path}")
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


async def test_without_the_key_there_is_no_data_but_the_page_comes(pool: MadeUpPool) -> None:
    async with serve_dashboard(pool, control_keys=[KEY]) as url, httpx.AsyncClient(base_url=url) as client:
        for path in ("status", "series", "trajectories", "audit", "unheard"):
            answer = await client.get(f"/api/{path}")
            assert (answer.status_code, "control key" in answer.json()["error"]["message"]) == (401, True)
        assert (await client.post("/api/curate", json={})).status_code == 401
        assert (await client.get("/api/status", headers={"Authorization": "Bearer wrong"})).status_code == 401
        assert (await client.get("/api/status", headers=BEARER)).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_the_page_runs_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/unheard.js", "/static/"):
        assert (await client.get(path)).status_code == 404


async def test_a_pool_that_is_away_is_told_and_found_again(client: httpx.AsyncClient, pool: MadeUpPool) -> None:
    assert (await get(client, "status"))["pool"] is not None
    pool.away = True
    answer: dict[str, Any] = {}

    async def said() -> bool:
        answer.update(await get(client, "status"))
        return answer["pool_error"] is not None

    await eventually(said, "the status to say so")
    assert (answer["pool_error"], answer["pool"], answer["channels"]) == ("the pool is away", None, [])
    assert (await client.get("/api/audit")).status_code == 503
    assert (await get(client, "trajectories"))["total"] == 400, "the lists are here"
    pool.away = False

    async def is_back() -> bool:
        return (await get(client, "status"))["pool_error"] is None

    await eventually(is_back, "the pool to be found again")


async def test_a_shard_that_comes_back_with_less_is_believed(client: httpx.AsyncClient, pool: MadeUpPool) -> None:
    pool.restart(keeping=100)

    async def is_believed() -> bool:
        return bool((await get(client, "trajectories"))["total"] == 100)

    await eventually(is_believed, "the lists to follow")
    assert (await get(client, "status"))["index"]["texts"] <= 100


async def test_many_watchers_cost_the_pool_as_much_as_one(client: httpx.AsyncClient, pool: MadeUpPool) -> None:
    before = pool.calls["stats"]
    for _ in range(50):
        await get(client, "status")
    assert pool.calls["stats"] - before <= 5


async def test_without_a_tokenizer_there_are_ids_and_a_reason(pool: MadeUpPool) -> None:
    async with serve_dashboard(pool, tokenizer=None) as url, httpx.AsyncClient(base_url=url) as client:
        await known(client, trajectories=400)
        answer = await client.get("/api/trajectories", params={"text": "sum"})
        assert answer.status_code == 400
        assert "--tokenizer-path" in answer.json()["error"]["message"]
        uid, prompt = key_of(READY)
        view = await get(client, "trajectory", trajectory_uid=uid, prompt_uid=prompt)
        assert "--tokenizer-path" in view["why_no_text"]
        assert view["steps"][0]["tokens"]["ids"] == steps_of(READY)[0].response_ids.tolist()
        assert view["steps"][0]["turns"] == []


async def test_a_tokenizer_that_is_still_loading_is_waited_for(pool: MadeUpPool) -> None:
    tokenizer = RigTokenizer()
    tokenizer.missing = "still loading"
    async with serve_dashboard(pool, tokenizer=tokenizer) as url, httpx.AsyncClient(base_url=url) as client:
        await known(client, trajectories=400)
        assert "still loading" in (await client.get("/api/trajectories", params={"text": "sum"})).text
        assert pool.calls["read"] == 0
        tokenizer.missing = None
        await until(lambda: pool.calls["read"] > 0, "texts to be read")
