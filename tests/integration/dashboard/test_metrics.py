"""The dashboard's /metrics, scraped over HTTP."""

import httpx

from rig.dashboard import MadeUpPool, serve_dashboard
from tests.integration.dashboard.client import BEARER, KEY, eventually, known


async def test_the_pools_figures_need_the_key_and_go_when_the_pool_is_away(pool: MadeUpPool) -> None:
    async with serve_dashboard(pool, control_keys=[KEY]) as url, httpx.AsyncClient(base_url=url) as client:
        refused = await client.get("/metrics")
        assert (refused.status_code, "stepwell_pool" in refused.text) == (401, False)
        client.headers.update(BEARER)
        await known(client, trajectories=400)
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        assert "stepwell_pool_up 1.0\n" in answer.text
        assert 'stepwell_pool_oldest_group_age_seconds{channel="train"} ' in answer.text
        assert 'stepwell_pool_wasted_steps_total{cause="left out: greedy",channel="train"} 3.0\n' in answer.text

        async def is_away() -> bool:
            return "stepwell_pool_up 0.0\n" in (await client.get("/metrics")).text

        pool.away = True
        await eventually(is_away, "the scrape to say so")
        lines = [line for line in (await client.get("/metrics")).text.splitlines() if not line.startswith("#")]
        assert [line for line in lines if line.startswith("stepwell_")] == ["stepwell_pool_up 0.0"]
