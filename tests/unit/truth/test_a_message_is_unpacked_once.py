"""T12: a message with quarantined steps is not unpacked whole for each of them."""

from typing import Any

import pytest

from rig.builders import EasyPool, make_step, same_step
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import Registration, SubmitVerdict
from stepwell.steps.columns import pack
from stepwell.steps.step import Step


@pytest.mark.parametrize("count", [10, 200])
def test_the_work_for_quarantined_steps_grows_with_their_number(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    pool = EasyPool(Limits())
    pool.register(Registration("t", "p"))
    steps = [make_step("t", "p", uid=f"t-{n}", quarantine="logprob_count", started_at=float(n)) for n in range(count)]
    message, built, build = pack(steps), 0, Step.__init__

    def counted(self: Step, *args: Any, **fields: Any) -> None:
        nonlocal built
        built += 1
        build(self, *args, **fields)

    monkeypatch.setattr(Step, "__init__", counted)
    assert pool.ingest.submit(message) == [SubmitVerdict.QUARANTINED] * count
    assert built <= 2 * count, "each is unpacked once, and copied once"
    kept = list(pool.state.quarantine)
    assert all(same_step(a, b) for a, b in zip(kept, steps, strict=True))
