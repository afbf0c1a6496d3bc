from stepwell.doctor.engine_checks import ReceivedStream, StreamPatience, judge
from stepwell.doctor.findings import Grade

PATIENCE = StreamPatience(first=1.0, token=0.5, silence=2.0)
DONE = b"data: [DONE]\n\n"


def stream(*pieces: tuple[float, bytes]) -> ReceivedStream:
    return ReceivedStream(0.0, list(pieces))


def token(at: float) -> tuple[float, bytes]:
    return at, b"data: {}\n\n"


def test_a_whole_stream_is_fine() -> None:
    finding = judge(stream(token(0.25), token(0.3), (0.4, DONE)), PATIENCE)
    assert (finding.grade, finding.what) == (Grade.OK, "complete; begins after 0.25 s")


def test_each_kind_of_slowness_is_named() -> None:
    assert "nothing came for 1.50 s" in judge(stream(token(1.5), (1.6, DONE)), PATIENCE).what
    slow = [token(0.6 * k) for k in range(1, 5)]
    assert judge(stream(*slow, (3.0, DONE)), PATIENCE).what == "a token takes 0.60 s"
    silent = [token(0.1), token(0.2), token(3.2), token(3.3), token(3.4), (3.5, DONE)]
    assert judge(stream(*silent), PATIENCE).what == "it was silent for 3.00 s after 2 events"


def test_cut_events_are_a_warning_and_a_missing_end_a_fault() -> None:
    assert judge(stream((0.1, b"da"), (0.1, b"ta: {}\n\n"), (0.1, DONE)), PATIENCE).grade is Grade.WARNING
    assert "without [DONE]" in judge(stream(token(0.1)), PATIENCE).what
    assert "not UTF-8" in judge(stream((0.1, b"data: \xff\n\n"), (0.1, DONE)), PATIENCE).what
    assert judge(stream(), PATIENCE).grade is Grade.FAULT
