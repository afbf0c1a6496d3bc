import asyncio
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from stepwell.gateway.metrics import MOST_NAMES, GatewayMetrics

from rig.builders import make_step
from rig.waiting import until
from stepwell.steps.step import Exactness


def shown(metrics: GatewayMetrics, name: str, **labels: str) -> float | None:
    """The value of one sample, as a scraper reads it."""
    families = text_string_to_metric_families(metrics.exposition()[0].decode())
    found = [s.value for family in families for s in family.samples if s.name == name and s.labels == labels]
    assert len(found) <= 1
    return found[0] if found else None


def test_a_call_is_counted_timed_and_its_tokens_added_up() -> None:
    metrics = GatewayMetrics()
    metrics.call_done("chat", 200, 1.5, 0.2, 100, 20)
    metrics.call_done("chat", 200, 2.5, None, 50, 5)
    metrics.call_done("completions", 400, 0.1, 0.1, 0, 0)
    assert shown(metrics, "stepwell_calls_total", kind="chat", status="200") == 2
    assert shown(metrics, "stepwell_calls_total", kind="completions", status="400") == 1
    assert shown(metrics, "stepwell_call_seconds_sum", kind="chat") == 4.0
    assert shown(metrics, "stepwell_call_seconds_bucket", kind="chat", le="1.0") == 0
    assert shown(metrics, "stepwell_call_seconds_bucket", kind="chat", le="2.5") == 2
    assert shown(metrics, "stepwell_first_byte_seconds_count", kind="chat") == 1
    assert shown(metrics, "stepwell_tokens_total", direction="prompt") == 150
    assert shown(metrics, "stepwell_tokens_total", direction="response") == 25


def test_steps_are_counted_by_exactness_and_by_why_they_are_not_trained() -> None:
    metrics = GatewayMetrics()
    metrics.steps_recorded(
        [
            make_step(exactness=Exactness.ENGINE),
            make_step(exactness=Exactness.ENGINE, quarantine="bad_logprob: a log-probability is not finite"),
            make_step(exactness=Exactness.RETOKENIZED, untrainable="greedy: temperature 0"),
        ]
    )
    assert shown(metrics, "stepwell_steps_total", exactness="engine") == 2
    assert shown(metrics, "stepwell_steps_total", exactness="retokenized") == 1
    assert shown(metrics, "stepwell_quarantined_total", reason="bad_logprob") == 1
    assert shown(metrics, "stepwell_untrainable_total", reason="greedy") == 1


def test_what_befalls_calls_is_counted_by_kind() -> None:
    metrics = GatewayMetrics()
    metrics.clients_gone["chat"].inc()
    metrics.calls_joined["completions"].inc()
    metrics.calls_continued["chat"].inc()
    assert shown(metrics, "stepwell_clients_gone_total", kind="chat") == 1
    assert shown(metrics, "stepwell_calls_joined_total", kind="completions") == 1
    assert shown(metrics, "stepwell_calls_continued_total", kind="chat") == 1


def test_what_has_its_value_elsewhere_is_read_at_each_scrape() -> None:
    metrics = GatewayMetrics()
    lost = {"shutdown": 1.0}
    metrics.read_from(
        "stepwell_lost_total", "Steps lost.", ["cause"], lambda: (((k,), v) for k, v in lost.items()), "counter"
    )
    metrics.read_from("stepwell_waiting", "Steps waiting.", [], lambda: [((), len(lost))])
    assert shown(metrics, "stepwell_lost_total", cause="shutdown") == 1
    lost["recorder_full"] = 7.0
    assert shown(metrics, "stepwell_lost_total", cause="recorder_full") == 7
    assert shown(metrics, "stepwell_waiting") == 2
    assert b"# TYPE stepwell_lost_total counter" in metrics.exposition()[0]
    assert b"# TYPE stepwell_waiting gauge" in metrics.exposition()[0]


def test_one_name_cannot_show_two_things() -> None:
    metrics = GatewayMetrics()
    with pytest.raises(ValueError, match="stepwell_calls"):
        metrics.read_from("stepwell_calls_total", "Again.", [], list, "counter")


def test_two_gateways_in_one_process_count_apart() -> None:
    one, other = GatewayMetrics(), GatewayMetrics()
    one.clients_gone["chat"].inc()
    assert shown(other, "stepwell_clients_gone_total", kind="chat") is None


def test_the_exposition_says_what_it_is_and_shows_the_process() -> None:
    metrics = GatewayMetrics()
    assert metrics.exposition()[1].startswith("text/plain; version=")
    assert shown(metrics, "process_resident_memory_bytes")


async def test_a_blocked_event_loop_is_seen() -> None:
    metrics = GatewayMetrics(lag_interval=0.001)
    watching = asyncio.create_task(metrics.watch_loop())
    await until(lambda: bool(shown(metrics, "stepwell_loop_lag_seconds_count")), "a first measurement")
    time.sleep(0.2)  # noqa: ASYNC251 (the fault itself)
    await until(lambda: lags_above_100_ms(metrics) > 0, "the lag")
    watching.cancel()
    assert (shown(metrics, "stepwell_loop_lag_seconds_sum") or 0) >= 0.19


def lags_above_100_ms(metrics: GatewayMetrics) -> float:
    seen, below = (shown(metrics, "stepwell_loop_lag_seconds_bucket", le=bound) or 0 for bound in ("+Inf", "0.1"))
    return seen - below


def test_ended_rollouts_are_counted_by_exception_and_callers_cannot_make_more_labels_without_end() -> None:
    metrics = GatewayMetrics()
    metrics.rollout_ended("")
    for n in range(MOST_NAMES + 6):
        metrics.rollout_ended(f"Error{n}")
    metrics.rollout_ended("Error0")
    assert shown(metrics, "stepwell_rollouts_ended_total", exception="Error0") == 2
    assert shown(metrics, "stepwell_rollouts_ended_total", exception="others") == 7
    assert shown(metrics, "stepwell_rollouts_ended_total", exception="none") == 1
