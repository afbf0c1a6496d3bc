"""D4: agents' calls are answered while Ray's head is away, and their steps are delivered when it is back."""

import re
from pathlib import Path

import httpx

from rig.fake_engine import FakeEngine
from rig.gateways import gateway_process
from rig.ray_nodes import ray_nodes
from rig.threads import in_thread
from rig.waiting import wait_until

KNOWN_CALLS = 5


def say(base_url: str) -> int:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    return httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=120).status_code


def reading(url: str, metric: str) -> float:
    """The sum of a metric's values, whatever their labels."""
    text = httpx.get(f"{url}/metrics", timeout=120).text
    return sum(float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def missing(url: str) -> dict[str, str]:
    ready = httpx.get(f"{url}/ready", timeout=120)
    assert ready.status_code == 503
    found: dict[str, str] = ready.json()["missing"]
    return found


def test_calls_are_answered_without_a_head_and_delivered_to_the_pool_of_the_next_one(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with ray_nodes() as nodes, in_thread(FakeEngine()) as engine:
        nodes.run("pool", journal=journal)
        with gateway_process(
            tmp_path / "gateway.log",
            data_pool_name="data_pool",
            vllm_addresses=engine.url,
            tokenizer_path="no/such/folder",
            ray_address=nodes.address,
            spool=tmp_path / "spool",
        ) as gateway:
            known = httpx.post(f"{gateway.url}/init_trajectory", json={}, timeout=120).json()["base_url"]
            named = {"trajectory_uid": "opened-elsewhere", "prompt_uid": "p"}
            unknown = httpx.post(f"{gateway.url}/init_trajectory", json=named, timeout=120).json()["base_url"]
            assert say(known) == 200
            nodes.kill_head()
            wait_until(lambda: reading(gateway.url, "stepwell_ray_joined") == 0, "the gateway to miss Ray")
            assert [say(known) for _ in range(KNOWN_CALLS)] == [200] * KNOWN_CALLS
            assert [say(unknown), say(unknown)] == [200, 200]
            assert reading(gateway.url, "stepwell_unchecked_calls_total") == 2
            why = f"no Ray cluster listens at {nodes.address}"
            wait_until(lambda: why in missing(gateway.url)["data_pool"], "the gateway to say what it misses")
            nodes.start_head()
            nodes.run("pool", journal=journal)
            wait_until(lambda: reading(gateway.url, "stepwell_waiting_steps") == 0, "the steps to be delivered")
            assert reading(gateway.url, "stepwell_delivered_steps_total") == 1 + KNOWN_CALLS + 2
            assert reading(gateway.url, "stepwell_lost_steps_total") == 0
            for base_url in (known, unknown):
                ended = httpx.post(f"{base_url}/complete_trajectory", json={"reward": 1.0}, timeout=120)
                assert ended.json() == {"status": "completed"}
