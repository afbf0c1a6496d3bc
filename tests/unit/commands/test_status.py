"""The screen of `stepwell status`."""

from stepwell.commands.status import ShownStatus, status_text

STATUS: dict[str, object] = {
    "now": 1.0,
    "version": "0.1.0",
    "pool": {
        "name": "data_pool",
        "shards": 1,
        "journal": "/j",
        "archive": None,
        "policy_version": 3,
        "submitted": 1234,
        "leases": 1,
        "forks": 0,
        "refused": {"late": 2},
        "quarantined": {"no_logprobs": 1},
        "scoring": {"waiting": 1, "under_way": 1, "resting": 0, "scored": 5, "failed": {"error": 1}, "late": 0},
    },
    "channels": [
        {
            "name": "train",
            "groups": 2,
            "ready_groups": 1,
            "trajectories": 8,
            "nbytes": 10,
            "history_groups": 0,
            "held": {"steps": 16, "tokens": 4096},
            "accepted": {"steps": 20, "tokens": 5000},
            "shipped": {"steps": 3, "tokens": 700},
            "dropped": {"stale": {"steps": 1, "tokens": 204}, "evicted": {"steps": 0, "tokens": 0}},
            "left_out": {"greedy": {"steps": 1, "tokens": 9}},
            "oldest_age": 90.0,
        }
    ],
    "gateways": [
        {
            "url": "http://127.0.0.1:8100",
            "ready": True,
            "missing": [],
            "in_flight": 0,
            "waiting_steps": 2,
            "calls": 1,
            "p50": 0.25,
            "p95": 0.5,
            "lost": {"pool_refused": 4},
            "error": None,
        },
        {"url": "http://127.0.0.1:8101", "ready": False, "missing": [], "error": "no answer", "lost": {}},
    ],
    "engines": [
        {
            "address": "http://e:1",
            "state": "up",
            "why": "",
            "in_flight": 0,
            "weight_version": "3",
            "server": "0.32.0",
            "gateway": "http://127.0.0.1:8100",
        }
    ],
    "index": {"trajectories": 8, "texts": 8, "behind": False},
    "pool_error": None,
}


def test_one_screen_shows_the_state_and_the_losses_by_cause() -> None:
    assert status_text(ShownStatus.model_validate(STATUS)) == (
        "stepwell 0.1.0\n"
        "pool      data_pool · 1 shard · policy version 3 · journal /j\n"
        "          1,234 steps submitted · 1 lease\n"
        "          5 scored · 2 wait to be scored · 1 could not be scored\n"
        "channels         groups  ready  trajectories  steps  tokens  trained   oldest\n"
        "          train       2      1             8     16   4,096        3  1.5 min\n"
        "gateways  http://127.0.0.1:8100 · ready · 1 call · 0 in flight · p50 0.25 s, p95 0.5 s · "
        "2 steps not delivered yet\n"
        "          http://127.0.0.1:8101 · not ready: no answer\n"
        "engines   http://e:1 · up · version 3 · server 0.32.0\n"
        "lost      train: dropped, stale: 1 step, 204 tokens\n"
        "          train: left out, greedy: 1 step, 9 tokens\n"
        "          pool: refused, late: 2 steps\n"
        "          pool: quarantined, no_logprobs: 1 step\n"
        "          http://127.0.0.1:8100: lost, pool_refused: 4 steps\n"
        "errors    http://127.0.0.1:8101: no answer"
    )


def test_shards_that_do_not_answer_are_named() -> None:
    assert isinstance(STATUS["pool"], dict)
    shown = status_text(ShownStatus.model_validate(STATUS | {"pool": STATUS["pool"] | {"missing": ["data_pool-2"]}}))
    assert "not counted, because it does not answer: data_pool-2\n" in shown


def test_an_archive_in_trouble_is_an_error_and_what_it_drops_is_lost() -> None:
    assert isinstance(STATUS["pool"], dict)
    archive = {"waiting_groups": 7, "failures": 2, "dropped_groups": 1}
    shown = status_text(ShownStatus.model_validate(STATUS | {"pool": STATUS["pool"] | {"archiving": archive}}))
    assert "archive: 1 group, because too many waited\n" in shown
    assert "archive: 2 failed writes; 7 groups wait\n" in shown


def test_what_cannot_be_removed_and_what_a_person_must_decide_are_errors() -> None:
    assert isinstance(STATUS["pool"], dict)
    waits = {"removal_waits": 1, "overdue_by_clock": 1_200}
    shown = status_text(ShownStatus.model_validate(STATUS | {"pool": STATUS["pool"] | waits}))
    assert "forgetting: 1 shard cannot go on now; the log says why\n" in shown
    assert "retention: 1,200 trajectories are too old by the clock alone: stepwell forget --overdue\n" in shown


def test_what_a_gateway_lacks_is_an_error() -> None:
    why = "weights: http://e:1: its weights are 'default' …, run: stepwell policy set 0"
    lacking = {"url": "http://g", "ready": False, "missing": [why], "error": None, "lost": {}}
    shown = status_text(ShownStatus.model_validate(STATUS | {"gateways": [lacking]}))
    assert shown.endswith(f"errors    http://g: {why}")


def test_a_pool_that_cannot_be_reached_is_the_error() -> None:
    away = STATUS | {"pool": None, "channels": [], "gateways": [], "pool_error": "it is away"}
    shown = status_text(ShownStatus.model_validate(away))
    assert "pool      not reached\n" in shown
    assert "lost      nothing\nerrors    pool: it is away" in shown


def test_a_note_of_the_dashboard_stands_with_the_losses() -> None:
    alarmed = STATUS | {"policy": {"alarm": "no decision after 10 min"}}
    assert "errors    canary: no decision after 10 min" in status_text(ShownStatus.model_validate(alarmed))
    shown = status_text(ShownStatus.model_validate(STATUS | {"notes": ["62% of the last 100 steps are left out"]}))
    assert "          62% of the last 100 steps are left out\nerrors" in shown
