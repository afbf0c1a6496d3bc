"""The Tinker part of docs/bring-your-own-trainer.md, as it stands there, with a service in this process."""

import re
import sys
from pathlib import Path

import pytest

from stepwell.pool.api.producing import Registration
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.scripted_engine import serve
from tests.unit.trainers.tinker.adapter_engine import AdapterEngine
from tests.unit.trainers.tinker.fake_tinker import FakeTinker, install, serve_archives
from tests.unit.trainers.training_pool import TrainingPool

PAGE = Path(__file__).parents[4] / "docs" / "bring-your-own-trainer.md"
OURS = {"updates=100": "updates=1", "groups=16": "groups=1"}


def snippet() -> str:
    (found,) = [part for part in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "import tinker" in part]
    for theirs, own in OURS.items():
        assert theirs in found
        found = found.replace(theirs, own)
    return str(found)


def test_the_page_trains_two_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    install(monkeypatch)
    pool = TrainingPool()
    with serve(AdapterEngine()) as engine, serve_archives(FakeTinker()) as service:
        monkeypatch.setattr(sys.modules["tinker"], "ServiceClient", lambda **_: service, raising=False)
        pool._run(pool.local.change_engines(add=(engine.url,)))
        for channel in ("east", "west"):
            for n in range(2):
                uid = f"{channel}-{n}"
                pool._run(pool.local.register_trajectory(Registration(uid, channel, channel, group_size=2)))
                pool._run(pool.local.submit_steps([one_turn(uid, channel, [1, 2], [3 + n])]))
                pool._run(pool.local.complete_trajectory(uid, channel, float(n)))
        exec(snippet(), {"pool": pool, "Path": Path})
        assert [pool.channel_policy(channel).version for channel in ("east", "west")] == [2, 2]
        assert len(engine.adapters) == 4
        assert sorted(place.name for place in (tmp_path / "runs").iterdir()) == ["east", "west"]
