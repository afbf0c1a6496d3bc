import pytest

from stepwell.config import GatewaySettings, PoolSettings, read_settings
from stepwell.core.limits import Limits, OnDeadline, OnStale, Overflow
from stepwell.errors import BadRequest

SEED_FLAGS = (
    "--data-pool-name data_pool --vllm-addresses http://host1:8001,http://host2:8001 --tokenizer-path /path/to/model "
    "--prompt-length 4096 --response-length 1024 --reward-worker-name reward_loop_worker --ray-address auto "
    "--ray-namespace default --host 0.0.0.0 --port 8100"
).split()
REQUIRED = SEED_FLAGS[:10]


def test_the_documented_command_line_is_understood() -> None:
    settings = read_settings(GatewaySettings, SEED_FLAGS, "gateway")
    assert settings.model_dump() == {
        "data_pool_name": "data_pool",
        "vllm_addresses": ("http://host1:8001", "http://host2:8001"),
        "tokenizer_path": "/path/to/model",
        "prompt_length": 4096,
        "response_length": 1024,
        "reward_worker_name": "reward_loop_worker",
        "ray_address": "auto",
        "ray_namespace": "default",
        "control_keys": (),
        "engine_key": None,
        "routing": "round_robin",
        "durability": "async",
        "spool": None,
        "host": "0.0.0.0",
        "port": 8100,
    }


def test_what_may_be_left_out_has_the_documented_defaults() -> None:
    settings = read_settings(GatewaySettings, REQUIRED, "gateway")
    assert (settings.ray_address, settings.host, settings.port) == ("auto", "0.0.0.0", 8100)
    assert settings.reward_worker_name is None


def test_flags_win_over_the_environment_which_wins_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_GATEWAY_PORT", "8200")
    monkeypatch.setenv("STEPWELL_GATEWAY_VLLM_ADDRESSES", "http://a:1,http://b:2")
    monkeypatch.setenv("STEPWELL_POOL_NAME", "other")
    without_addresses = [*REQUIRED[:2], *REQUIRED[4:]]
    settings = read_settings(GatewaySettings, without_addresses, "gateway")
    assert (settings.port, settings.vllm_addresses) == (8200, ("http://a:1", "http://b:2"))
    assert read_settings(GatewaySettings, [*without_addresses, "--port", "8300"], "gateway").port == 8300
    assert read_settings(PoolSettings, [], "pool").name == "other"


def test_every_missing_flag_is_named() -> None:
    with pytest.raises(BadRequest) as info:
        read_settings(GatewaySettings, ["--port", "99999"], "gateway")
    lines = str(info.value).splitlines()
    assert {line.split(":")[0] for line in lines} == {*REQUIRED[::2], "--port"}


def test_an_unknown_flag_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        read_settings(PoolSettings, ["--nmae", "x"], "stepwell pool")
    assert info.value.code == 2
    assert "unrecognized arguments: --nmae" in capsys.readouterr().err


def test_the_pools_limits_are_set_by_flags_in_the_words_of_the_documentation() -> None:
    flags = "--overflow refuse --on-deadline refill --on-stale mask --max-staleness 4 --require-reward --max-bytes 1000"
    limits = read_settings(PoolSettings, flags.split(), "pool").limits()
    assert limits == Limits(
        overflow=Overflow.REFUSE,
        on_deadline=OnDeadline.REFILL,
        on_stale=OnStale.MASK,
        max_staleness=4,
        require_reward=True,
        max_bytes=1000,
    )
    assert read_settings(PoolSettings, [], "pool").limits() == Limits()


def test_an_archive_needs_a_journal() -> None:
    with pytest.raises(BadRequest, match="--archive needs --journal"):
        read_settings(PoolSettings, ["--archive", "somewhere"], "pool")
