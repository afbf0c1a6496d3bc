"""What the engine reports of its model, and the settings that `stepwell up` gives to each part."""

from pathlib import Path

import pytest
from stepwell.common.http import JsonAnswer

from stepwell.commands.dashboard import DashboardSettings
from stepwell.commands.gateway import GatewaySettings
from stepwell.commands.launch_plan import LaunchPlan, ServedModel, UpSettings, environment, make_plan, read_model
from stepwell.commands.state_folder import StateFolder
from stepwell.errors import BadRequest, EngineUnavailable

KEY = "k" * 32
HUB = ServedModel(name="org/model", root="org/model", window=4096)
SILENT = ServedModel(name="gpt", root=None, window=None)
ELSEWHERE = ServedModel(name="m", root="/no/such/folder", window=4096)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(model: ServedModel = HUB, **settings: object) -> LaunchPlan:
    given = UpSettings(engine=("http://127.0.0.1:8001",), **settings)  # type: ignore[arg-type]
    return make_plan(given, model, StateFolder(Path("/state")), KEY)


def test_optional_fields_of_the_model_may_be_missing() -> None:
    listed = JsonAnswer(200, {"data": [{"id": "m", "root": "/m", "max_model_len": 8}]})
    assert read_model("http://e", listed) == ServedModel(name="m", root="/m", window=8)
    assert read_model("http://e", JsonAnswer(200, {"data": [{"id": "m"}]})) == ServedModel(
        name="m", root=None, window=None
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (JsonAnswer(401, {"error": "no"}), "requires a key: set STEPWELL_GATEWAY_ENGINE_KEY"),
        (JsonAnswer(404, "Not Found"), r"lists no models at /v1/models \(it answers 404\)"),
        (JsonAnswer(200, {"data": []}), "lists no models"),
    ],
)
def test_a_server_that_is_not_an_engine_is_refused_with_advice(answer: JsonAnswer, said: str) -> None:
    with pytest.raises(EngineUnavailable, match=said):
        read_model("http://e", answer)


def test_missing_settings_come_from_the_engine() -> None:
    gateway = plan().gateway
    assert (gateway.tokenizer_path, gateway.prompt_length, gateway.response_length) == ("org/model", 4096, 4096)
    told = plan(tokenizer_path="mine", response_length=100, gateway={"prompt_length": 200}).gateway
    assert (told.tokenizer_path, told.prompt_length, told.response_length) == ("mine", 200, 100)


def test_a_setting_that_the_engine_does_not_report_is_asked_for_by_its_flag() -> None:
    with pytest.raises(BadRequest, match="; give --tokenizer-path, --prompt-length, --response-length$"):
        plan(SILENT)
    with pytest.raises(
        BadRequest, match="its model is in /no/such/folder, which is not on this machine; give --tokenizer-path$"
    ):
        plan(ELSEWHERE)
    assert plan(ELSEWHERE, tokenizer_path="mine").gateway.tokenizer_path == "mine"
    assert plan(SILENT, gateway={"tokenizer_path": "t", "prompt_length": 1, "response_length": 2}).gateway.port == 8100


def test_the_defaults_are_loopback_a_key_a_journal_and_a_spool() -> None:
    made = plan()
    assert (made.gateway.host, made.gateway.control_keys, made.gateway.spool) == ("127.0.0.1", (KEY,), "/state/spool")
    assert (made.dashboard.host, made.dashboard.control_keys) == ("127.0.0.1", (KEY,))
    assert made.dashboard.gateways == (made.gateway.local_url,) == ("http://127.0.0.1:8100",)
    assert made.pool.journal == "/state/journal"
    assert plan(pool={"journal": "/volume"}).pool.journal == "/volume"


def test_with_a_reward_function_the_pool_requires_rewards() -> None:
    made = plan(reward="exact_match", rewards={"workers": 2}, pool={"name": "mine"})
    assert made.rewards is not None
    assert (made.rewards.function, made.rewards.workers, made.rewards.data_pool_name) == ("exact_match", 2, "mine")
    assert made.pool.require_reward
    assert made.gateway.reward_worker_name == made.rewards.name
    assert plan().rewards is None
    assert not plan().pool.require_reward


def test_every_part_is_on_the_same_ray() -> None:
    made = plan(reward="exact_match", ray_namespace="mine").on("127.0.0.1:6379")
    assert made.rewards is not None
    parts = (made.pool, made.gateway, made.dashboard, made.rewards)
    assert {(part.ray_address, part.ray_namespace) for part in parts} == {("127.0.0.1:6379", "mine")}


def test_a_process_reads_its_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(atropos=True, gateway={"routing": "sticky", "engine_key": "e"}).on("127.0.0.1:6379")
    for name, value in (environment(made.gateway) | environment(made.dashboard)).items():
        monkeypatch.setenv(name, value)
    assert GatewaySettings().model_dump() == made.gateway.model_dump()  # type: ignore[call-arg]
    assert DashboardSettings().model_dump() == made.dashboard.model_dump()


def test_parts_with_a_certificate_are_reached_by_https() -> None:
    made = plan(gateway={"tls_cert": "c", "tls_key": "k"}, dashboard={"tls_cert": "c", "tls_key": "k"})
    assert made.dashboard.gateways == (made.gateway.local_url,) == ("https://127.0.0.1:8100",)
    assert made.dashboard.local_url == "https://127.0.0.1:8200"


def test_a_server_on_all_addresses_is_reached_on_loopback() -> None:
    assert plan(host="0.0.0.0").gateway.local_url == "http://127.0.0.1:8100"
