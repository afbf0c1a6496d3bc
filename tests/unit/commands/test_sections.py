import pytest

from stepwell.commands.atropos import AtroposSettings
from stepwell.commands.doctor import DoctorSettings
from stepwell.commands.export import ExportSettings
from stepwell.commands.gateway import GatewaySettings
from stepwell.commands.pool import PoolSettings
from stepwell.commands.rewards import RescoreSettings, RewardSettings, TrySettings
from stepwell.commands.sections import read_settings
from stepwell.commands.status import StatusSettings
from stepwell.errors import BadRequest
from stepwell.pool.api.leasing import Order
from stepwell.pool.api.plan import Limits, OnDeadline, OnRewardFailure, Overflow

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
        "link_secret_file": None,
        "link_ca_file": None,
        "control_keys": (),
        "insecure": False,
        "allowed_hosts": (),
        "tls_cert": None,
        "tls_key": None,
        "keys_file": None,
        "audit_log": None,
        "engine_key": None,
        "routing": "round_robin",
        "durability": "async",
        "unchecked_calls": "answer",
        "bridge": "on",
        "thinking": "template",
        "sampling": ("train=on_policy",),
        "temperature": 1.0,
        "model": "",
        "other_models": (),
        "marked_side_calls": (),
        "forward_fields": (),
        "quota": (),
        "tool_calls": "parsed",
        "media_hosts": (),
        "session_sample": 1.0,
        "redact": None,
        "spool": None,
        "spool_bytes": 16 * 2**30,
        "atropos": False,
        "atropos_state": None,
        "host": "0.0.0.0",
        "port": 8100,
        "workers": 1,
    }


def test_optional_settings_have_the_documented_defaults() -> None:
    settings = read_settings(GatewaySettings, REQUIRED, "gateway")
    assert (settings.ray_address, settings.host, settings.port) == ("auto", "127.0.0.1", 8100)
    assert settings.reward_worker_name is None


def test_each_worker_has_a_port_a_spool_and_an_audit_log_of_its_own() -> None:
    files = ["--spool", "/s", "--audit-log", "/a", "--keys-file", "/k"]
    settings = read_settings(GatewaySettings, [*SEED_FLAGS, "--workers", "3", *files], "gateway")
    workers = [settings.of_worker(number) for number in range(3)]
    assert [(worker.port, worker.spool) for worker in workers] == [(8101, "/s"), (8102, "/s-1"), (8103, "/s-2")]
    assert [(worker.audit_log, worker.keys_file) for worker in workers] == [
        ("/a", "/k"),
        ("/a-1", "/k"),
        ("/a-2", "/k"),
    ]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--atropos", "--atropos needs one process; with --workers, start `stepwell atropos` besides"),
        ("--port 0", "--workers 2 needs a --port with as many free ports after it"),
        ("--port 65534", "--workers 2 needs a --port with as many free ports after it"),
    ],
)
def test_what_several_workers_cannot_do_is_refused(flags: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        read_settings(GatewaySettings, [*REQUIRED, "--workers", "2", *flags.split()], "gateway")


@pytest.mark.parametrize("flag", ["--tls-cert", "--tls-key"])
def test_a_certificate_and_its_key_belong_together(flag: str) -> None:
    with pytest.raises(BadRequest, match="--tls-cert and --tls-key belong together"):
        read_settings(AtroposSettings, [flag, "file.pem"], "atropos")
    both = read_settings(AtroposSettings, ["--tls-cert", "cert.pem", "--tls-key", "key.pem"], "atropos")
    assert (both.scheme, read_settings(AtroposSettings, [], "atropos").scheme) == ("https", "http")


def test_each_channel_is_told_whose_sampling_counts() -> None:
    settings = read_settings(GatewaySettings, [*REQUIRED, "--sampling", "train=as_asked,live=all_on_policy"], "gateway")
    assert settings.sampling == ("train=as_asked", "live=all_on_policy")
    for wrong in ("on_policy", "train=greedy", "=as_asked"):
        with pytest.raises(BadRequest, match="is not CHANNEL=as_asked or CHANNEL=on_policy or"):
            read_settings(GatewaySettings, [*REQUIRED, "--sampling", wrong], "gateway")


def test_flags_override_the_environment_which_overrides_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert {line.split()[0] for line in lines} == {*REQUIRED[::2], "--port"}


def test_an_unknown_flag_is_an_error() -> None:
    with pytest.raises(BadRequest, match=r"^unrecognized arguments: --nmae x; did you mean --name\?$"):
        read_settings(PoolSettings, ["--nmae", "x"], "stepwell pool")


def test_a_flag_may_be_written_with_underscores_and_not_be_shortened() -> None:
    assert read_settings(PoolSettings, ["--group_size", "3", "--journal=a_b"], "pool").journal == "a_b"
    with pytest.raises(BadRequest, match="unrecognized arguments: --group 3"):
        read_settings(PoolSettings, ["--group", "3"], "pool")


def test_the_pools_limits_are_set_by_flags_in_the_words_of_the_documentation() -> None:
    flags = (
        "--overflow refuse --on-deadline refill --on-stale mask --max-staleness 4 --require-reward --max-bytes 1000 "
        "--order strict --reward-attempts 5 --on-reward-failure drop_group --max-share-per-user 0.1 "
        "--unfinished-reward drop"
    )
    limits = read_settings(PoolSettings, flags.split(), "pool").limits()
    assert limits == Limits(
        order=Order.STRICT,
        overflow=Overflow.REFUSE,
        on_deadline=OnDeadline.REFILL,
        on_stale="mask",
        max_staleness=4,
        require_reward=True,
        max_bytes=1000,
        reward_attempts=5,
        on_reward_failure=OnRewardFailure.DROP_GROUP,
        max_share_per_user=0.1,
        unfinished_reward=None,
    )
    assert read_settings(PoolSettings, ["--unfinished-reward", "-1.5"], "pool").limits().unfinished_reward == -1.5
    assert read_settings(PoolSettings, [], "pool").limits() == Limits()


@pytest.mark.parametrize("share", ["0", "1.1"])
def test_a_share_per_user_is_more_than_nothing_and_at_most_all(share: str) -> None:
    with pytest.raises(BadRequest, match="--max-share-per-user"):
        read_settings(PoolSettings, ["--max-share-per-user", share], "pool")


def test_an_archive_needs_a_journal() -> None:
    with pytest.raises(BadRequest, match="--archive needs --journal"):
        read_settings(PoolSettings, ["--archive", "somewhere"], "pool")


def test_a_resource_of_ray_itself_is_refused() -> None:
    assert read_settings(PoolSettings, ["--resource", "journals"], "pool").resource == "journals"
    with pytest.raises(BadRequest, match="--resource: CPU is a resource of Ray itself"):
        read_settings(PoolSettings, ["--resource", "CPU"], "pool")


def test_reward_workers_have_the_name_that_gateways_expect() -> None:
    flags = '--function exact_match --workers 4 --options {"answer_key":"gold"} --tokenizer-path model --timeout 5'
    settings = read_settings(RewardSettings, flags.split(), "rewards")
    assert (settings.name, settings.data_pool_name, settings.workers) == ("reward_loop_worker", "data_pool", 4)
    assert (settings.function, settings.options, settings.timeout) == ("exact_match", {"answer_key": "gold"}, 5.0)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("[1]", "'\\[1\\]' is not a JSON object"),
        ("{", "'{' is not JSON: "),
        ("a=1", "'a=1' is not JSON: "),
    ],
)
def test_options_that_are_not_an_object_are_refused(given: str, why: str) -> None:
    with pytest.raises(BadRequest, match=f"--options: {why}"):
        read_settings(RewardSettings, ["--function", "exact_match", "--options", given], "rewards")


def test_offline_commands_take_the_function_first() -> None:
    trying = read_settings(TrySettings, ["mine.py:score", "--on", "data.parquet", "--limit", "3"], "reward try")
    assert (trying.function, trying.on, trying.limit) == ("mine.py:score", "data.parquet", 3)
    rescoring = read_settings(RescoreSettings, ["mine.py:score", "--from", "old", "--to", "new"], "rescore")
    assert (rescoring.from_, rescoring.to) == ("old", "new")
    with pytest.raises(BadRequest, match="--from is missing"):
        read_settings(RescoreSettings, ["mine.py:score", "--to", "new"], "rescore")


def test_flags_named_by_an_alias_are_set_by_their_own_variable_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = ["--engine", "http://host:8001"]
    monkeypatch.setenv("FROM", "elsewhere")
    monkeypatch.setenv("JSON", "1")
    assert read_settings(ExportSettings, ["--to", "x"], "export").from_ is None
    with pytest.raises(BadRequest, match="--from is missing"):
        read_settings(RescoreSettings, ["mine.py:score", "--to", "new"], "rescore")
    assert not read_settings(StatusSettings, [], "status").as_json
    assert not read_settings(DoctorSettings, doctor, "doctor").as_json

    monkeypatch.setenv("STEPWELL_EXPORT_FROM", "here")
    monkeypatch.setenv("STEPWELL_REWARD_FROM", "here")
    monkeypatch.setenv("STEPWELL_STATUS_JSON", "1")
    monkeypatch.setenv("STEPWELL_DOCTOR_JSON", "1")
    assert read_settings(ExportSettings, ["--to", "x"], "export").from_ == "here"
    assert read_settings(RescoreSettings, ["mine.py:score", "--to", "new"], "rescore").from_ == "here"
    assert read_settings(StatusSettings, [], "status").as_json
    assert read_settings(DoctorSettings, doctor, "doctor").as_json
    assert read_settings(ExportSettings, ["--to", "x", "--from", "flag"], "export").from_ == "flag"
    assert not read_settings(StatusSettings, ["--no-json"], "status").as_json


def test_the_atropos_server_has_defaults_for_pool_and_port_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = read_settings(AtroposSettings, [], "atropos")
    assert (plain.data_pool_name, plain.port, plain.control_keys, plain.state) == ("data_pool", 8000, (), None)
    monkeypatch.setenv("STEPWELL_ATROPOS_CONTROL_KEYS", "one,two")
    assert read_settings(AtroposSettings, ["--port", "9"], "atropos").control_keys == ("one", "two")
