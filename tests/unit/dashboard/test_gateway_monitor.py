import math

import pytest

from stepwell.dashboard.gateway_monitor import LatencyHistogram, from_cumulative, merge_histograms, read_metrics

INF = math.inf


@pytest.mark.parametrize(
    ("counts", "share", "seconds"),
    [
        ((10, 0, 0), 0.5, 0.5),
        ((10, 10, 0), 0.5, 1.0),
        ((10, 10, 0), 0.75, 1.5),
        ((0, 4, 0), 0.5, 1.5),
        ((0, 0, 3), 0.5, 2.0),
        ((0, 0, 0), 0.5, None),
    ],
)
def test_percentiles_are_read_from_buckets(counts: tuple[int, ...], share: float, seconds: float | None) -> None:
    assert LatencyHistogram((1.0, 2.0, INF), counts).percentile(share) == seconds


def test_an_interval_is_what_was_added_and_all_after_a_restart() -> None:
    before, now = LatencyHistogram((1.0, INF), (3, 1)), LatencyHistogram((1.0, INF), (5, 1))
    assert now.since(before) == LatencyHistogram((1.0, INF), (2, 0))
    assert before.since(now) == before, "a process that counts less than before was restarted"
    assert now.since(None) == now
    assert now.since(LatencyHistogram((2.0, INF), (1, 1))) == now


def test_intervals_add_up() -> None:
    assert merge_histograms(
        [LatencyHistogram((1.0, INF), (3, 1)), LatencyHistogram((1.0, INF), (5, 0))]
    ) == LatencyHistogram((1.0, INF), (8, 1))
    assert merge_histograms([]).percentile(0.5) is None
    assert from_cumulative({INF: 9.0, 1.0: 4.0, 2.0: 6.0}) == LatencyHistogram((1.0, 2.0, INF), (4, 2, 3))


def test_what_a_gateway_shows_is_read() -> None:
    text = """\
# TYPE stepwell_call_seconds histogram
stepwell_call_seconds_bucket{kind="chat",le="0.1"} 2.0
stepwell_call_seconds_bucket{kind="chat",le="+Inf"} 3.0
stepwell_call_seconds_bucket{kind="completion",le="0.1"} 1.0
stepwell_call_seconds_bucket{kind="completion",le="+Inf"} 1.0
# TYPE stepwell_in_flight gauge
stepwell_in_flight 4.0
# TYPE stepwell_lost_steps counter
stepwell_lost_steps_total{cause="full"} 5.0
"""
    metrics = read_metrics(text)
    assert metrics.calls == LatencyHistogram((0.1, INF), (3, 1))
    assert (metrics.in_flight, metrics.waiting_steps, metrics.lost) == (4, 0, {"full": 5})
