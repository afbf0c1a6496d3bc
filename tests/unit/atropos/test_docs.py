"""What docs/atropos.md says, held against the code."""

import re
from pathlib import Path
from typing import cast

from stepwell.atropos.metrics import AtroposMetrics
from stepwell.atropos.registry import Registries
from stepwell.atropos.routes import AtroposRoutes
from stepwell.pool.api.ports import GroupExchange

PAGE = (Path(__file__).parents[3] / "docs" / "atropos.md").read_text()


def test_every_call_of_the_atropos_server_is_listed() -> None:
    metrics = AtroposMetrics(lambda: (), lambda: ())
    served = AtroposRoutes(cast("GroupExchange", None), Registries(None, 0.0), metrics)
    table = PAGE.partition("## Calls")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(?:GET |POST )?(/[a-z_/-]*)`", table))
    assert listed == {path for _, path in served.routes} | {"/", "/health", "/ready", "/metrics"}


def test_the_python_on_the_page_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, {})
