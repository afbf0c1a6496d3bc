"""Requests that schemathesis makes up from the gateway's own OpenAPI: whatever comes, it answers, and never with a 5xx.

About 1,500 of them, always the same; `STEPWELL_FUZZ=20000` makes that many.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from stepwell.pool.api.scoring import RewardRequest, RewardScore
from tests.rig.fake_engine import FakeEngine
from tests.rig.gateways import serve_gateway
from tests.rig.local_pool import LocalPool
from tests.rig.threads import in_thread
from tests.rig.vocabulary import pieces

Case = schemathesis.Case[Any]
WANTED = int(os.environ.get("STEPWELL_FUZZ", "1500"))
NOWHERE = "http://127.0.0.1:9"
CONTROL = "control-key-of-the-tests"
LONGEST_WAIT = 20.0
EACH = 6
"""Requests made up for an operation in one round, each of which is sent twice."""
AGENT_CALLS = ("chat/completions", "completions")
"""They get more, for most of the code is behind them."""
ENDINGS = ("complete_trajectory", "abort_trajectory")


class Words:
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(pieces([token for token in ids if token < 256]))


class Scorer:
    async def compute_reward(self, request: RewardRequest) -> RewardScore:
        return RewardScore(float(len(request.response_text)), {})

    async def check(self) -> None:
        return


@dataclass
class Target:
    """A gateway, and what must be known of it for requests to get past its door."""

    url: str
    engine: str
    http: requests.Session
    own: dict[str, str]
    """A trajectory that stays open."""
    keys: list[str]
    asked: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)

    def opened(self) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {CONTROL}"}
        opened = self.http.post(f"{self.url}/init_trajectory", json={}, headers=headers).json()
        return {name: opened[name] for name in ("trajectory_uid", "prompt_uid", "api_key")}

    def aim(self, case: Case) -> None:
        """Make it name an open trajectory, the right model and a key that fits, so that it gets past the door."""
        case.headers["Authorization"] = f"Bearer {CONTROL}"
        if "trajectory_uid" in case.path_parameters:
            named = self.opened() if case.path.endswith(ENDINGS) else self.own
            case.path_parameters = {name: named[name] for name in ("trajectory_uid", "prompt_uid")}
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "tiny"
        for mark in ("Idempotency-Key", "x-stepwell-call"):
            case.headers.pop(mark, None)

    def keep_at_home(self, case: Case) -> None:
        """No engine out in the world is added."""
        if case.path == "/engines" and isinstance(case.body, dict):
            address = case.body.get("address")
            if isinstance(address, str) and address.startswith("http"):
                case.body["address"] = NOWHERE if len(address) % 2 else self.engine

    def check(self, case: Case) -> None:
        asked = case.as_transport_kwargs(base_url=self.url)  # its own call leaves a stream after some events
        response = self.http.request(**asked, timeout=LONGEST_WAIT)
        self.asked[f"{case.method} {case.path}"] += 1
        self.statuses[response.status_code] += 1
        assert response.status_code < 500, f"{response.status_code} {response.text[:300]}\n{case.as_curl_command()}"
        if response.status_code >= 400 and case.method != "HEAD":
            error = response.json()["error"]
            assert error["message"], case.as_curl_command()
            assert error["type"], case.as_curl_command()
        elif response.headers.get("content-type", "").startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n"), case.as_curl_command()
            assert '\ndata: {"error"' not in "\n" + response.text, f"{response.text[-600:]}\n{case.as_curl_command()}"


@pytest.fixture
def target() -> Iterator[Target]:
    with ExitStack() as stack:
        engine = stack.enter_context(in_thread(FakeEngine()))
        gateway = serve_gateway(
            LocalPool(), [engine.url], control_keys=[CONTROL], rewards=Scorer(), load_tokenizer=lambda _: Words()
        )
        url = stack.enter_context(in_thread(gateway))
        target = Target(url, engine.url, stack.enter_context(requests.Session()), {}, [])
        target.own = target.opened()
        own, other = target.own["api_key"], target.opened()["api_key"]
        target.keys = [CONTROL, CONTROL, CONTROL, CONTROL, own, own, other, "wrong"]
        yield target


def fuzz(target: Target, operation: Any, mode: GenerationMode, number: int) -> None:
    times = 4 if operation.path.endswith(AGENT_CALLS) else 1

    @hypothesis.seed(number)
    @hypothesis.settings(
        max_examples=times * EACH,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), key=st.sampled_from([None, *target.keys]))
    def ask(case: Case, key: str | None) -> None:
        if key is not None:
            case.headers["Authorization"] = f"Bearer {key}"
        target.keep_at_home(case)
        target.check(case)
        target.aim(case)
        target.check(case)

    with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # it takes nothing that could be wrong
        ask()


def test_no_made_up_request_gets_a_5xx_hangs_or_loses_its_connection(target: Target) -> None:
    headers = {"Authorization": f"Bearer {CONTROL}"}
    document = target.http.get(f"{target.url}/openapi.json", headers=headers).json()
    for part, name in ((document, "security"), (document["components"], "securitySchemes")):
        del part[name]  # lest schemathesis take keys away that it was given
    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert len(operations) > 15, "the document could not be read"
    problems: list[str] = []
    number = 0
    while target.asked.total() < WANTED and not problems:
        for operation in operations:
            for mode in GenerationMode:
                number += 1
                try:
                    fuzz(target, operation, mode, number)
                except (AssertionError, requests.RequestException) as failure:
                    problems.append(f"{operation.method} {operation.path}: {failure}")
    assert not problems, "\n\n".join(problems)
    assert target.statuses[200] > WANTED // 10, f"most were refused at the door: {target.statuses}"
    assert target.http.get(f"{target.url}/ready").status_code == 200
