from pathlib import Path

from stepwell.demo.live.live_chart import write_picture
from stepwell.demo.live.live_outcome import LiveRecord
from stepwell.demo.live.turns import UserTurn
from stepwell.pool.api.policy import PolicyDecision


def test_a_run_with_a_rollback_is_drawn(tmp_path: Path) -> None:
    decisions = [
        PolicyDecision(1, "promote", "guard", "", 10.0),
        PolicyDecision(2, "canary", "guard", "", 20.0),
        PolicyDecision(2, "rollback", "guard", "", 30.0),
        PolicyDecision(3, "rollback", "operator", "", 40.0),
    ]
    turns = [UserTurn(at=float(at), session="s", accepted=at > 150) for at in range(300)]
    record = LiveRecord(began_at=0.0, turns=turns, decisions=decisions, snapshots=[], poisoned=2)
    write_picture(record, "live, seed 0", tmp_path / "acceptance.png")

    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")
