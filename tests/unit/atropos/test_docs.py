"""What docs/atropos.md and docs/coming-from-atropos.md say, held against the code."""

import json
import re
from pathlib import Path
from typing import cast

from stepwell.atropos.app import AtroposRoutes
from stepwell.atropos.registry import AtroposMetrics, Registries
from stepwell.pool.client import PoolClient
from tests.originals.atropos.baseline import BASELINE, STARTS
from tests.originals.atropos.table import TABLE

PAGE = (Path(__file__).parents[3] / "docs" / "atropos.md").read_text()


def test_every_call_of_the_atropos_server_is_listed() -> None:
    metrics = AtroposMetrics(lambda: (), lambda: ())
    served = AtroposRoutes(cast("PoolClient", None), Registries(None, 0.0), metrics)
    table = PAGE.partition("## Calls")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(?:GET |POST )?(/[a-z_/-]*)`", table))
    assert listed == {path for _, path in served.routes} | {"/", "/health", "/ready", "/metrics"}


def test_the_python_on_the_page_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, {})


def test_the_figures_of_atropos_own_environments_are_those_of_their_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "coming-from-atropos.md").read_text()
    (figures,) = re.findall(r"Figures: (\d+) files start .* (\d+) of the (\d+) with a group", page)
    run = [row for row in TABLE if not row.skip]
    starts = list(json.loads(BASELINE.read_text()).values()).count(STARTS)
    assert tuple(map(int, figures)) == (starts, len([row for row in run if row.makes_group]), len(run))
    assert len(TABLE) - len(run) == 1
