"""What docs/door.md says, held against the code."""

import re
from pathlib import Path
from typing import cast

from stepwell.atropos.metrics import Sight
from stepwell.atropos.registries import Registries
from stepwell.atropos.routes import Calls
from stepwell.pool.api.ports import GroupExchange

PAGE = (Path(__file__).parents[3] / "docs" / "door.md").read_text()


def test_every_call_of_the_door_is_listed() -> None:
    sight = Sight(lambda: (), lambda: ())
    calls = Calls(cast("GroupExchange", None), Registries(None, 0.0), sight)
    table = PAGE.partition("## Calls")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(?:GET |POST )?(/[a-z_/-]*)`", table))
    assert listed == {path for _, path in calls.routes} | {"/", "/health", "/ready", "/metrics"}


def test_the_python_on_the_page_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, {})
