"""Without keys a server listens on loopback only, unless its operator says --insecure."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rig.gateways import GatewayProcess, free_port, gateway_process
from stepwell.commands.atropos import AtroposSettings
from stepwell.commands.dashboard import DashboardSettings
from stepwell.commands.gateway import GatewaySettings
from stepwell.commands.sections import ServerSection, read_settings
from stepwell.common.listening import ServedHosts, is_loopback, require_safe_address
from stepwell.errors import BadRequest

GATEWAY = (
    *("--data-pool-name", "p", "--vllm-addresses", "http://127.0.0.1:9", "--tokenizer-path", "no/such/folder"),
    *("--prompt-length", "9", "--response-length", "9"),
)
COMMANDS: dict[str, tuple[type[ServerSection], Sequence[str]]] = {
    "gateway": (GatewaySettings, GATEWAY),
    "atropos": (AtroposSettings, ()),
    "dashboard": (DashboardSettings, ()),
}
KEY = "control-key-of-the-tests"


def stepwell(command: str, *flags: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "stepwell", command, *COMMANDS[command][1], *flags]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_server_listens_on_loopback_by_default(command: str) -> None:
    settings, flags = COMMANDS[command]
    assert read_settings(settings, flags, command).host == "127.0.0.1"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flags", [("--host", "0.0.0.0"), ("--host", "::", "--port", "0")])
def test_another_address_without_keys_is_refused_at_the_start(command: str, flags: Sequence[str]) -> None:
    ended = stepwell(command, *flags, "--ray-address", f"127.0.0.1:{free_port()}")
    assert ended.returncode == 1
    assert f"listening on {flags[1]} without keys" in ended.stderr
    assert f"STEPWELL_{command.upper()}_CONTROL_KEYS" in ended.stderr
    assert "--insecure" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_workers_do_not_start_either() -> None:
    ended = stepwell("gateway", "--host", "0.0.0.0", "--workers", "2")
    assert (ended.returncode, "without keys" in ended.stderr) == (1, True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    require_safe_address(host, has_keys=False, insecure=False, variable="KEYS")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "stepwell.example", "127.0.0.1.evil.example"])
def test_everything_else_needs_keys_or_to_be_said(host: str) -> None:
    with pytest.raises(BadRequest, match="without keys"):
        require_safe_address(host, has_keys=False, insecure=False, variable="KEYS")
    require_safe_address(host, has_keys=True, insecure=False, variable="KEYS")
    require_safe_address(host, has_keys=False, insecure=True, variable="KEYS")


@pytest.mark.parametrize(
    ("host", "allowed", "served", "refused"),
    [
        ("127.0.0.1", (), "localhost 127.0.0.1:8100 [::1]:8100", "stepwell.example 192.0.2.1 [2001:db8::1]"),
        ("127.0.0.1", ("Stepwell.Example",), "localhost stepwell.example:8100 STEPWELL.example.", "a.stepwell.example"),
        ("192.0.2.1", (), "192.0.2.1:8100 localhost", "192.0.2.2 stepwell.example"),
        ("0.0.0.0", (), "192.0.2.1:8100 [2001:db8::1] localhost", "stepwell.example 192.0.2.1.example 1.2.3"),
        ("::", ("2001:db8::1", "stepwell"), "stepwell:8100 [2001:db8::1]:8100", "stepwell.example [::1 ::1]x"),
    ],
)
def test_a_server_answers_to_names_that_no_other_site_can_have(
    host: str, allowed: Sequence[str], served: str, refused: str
) -> None:
    hosts = ServedHosts.of(host, allowed)
    assert [name for name in served.split() if name.encode() not in hosts] == []
    assert [name for name in refused.split() if name.encode() in hosts] == []


def test_the_name_of_this_machine_is_served_where_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Node-7")
    assert b"node-7:8100" in ServedHosts.of("0.0.0.0", ())
    assert b"node-7:8100" not in ServedHosts.of("127.0.0.1", ())


def test_names_that_were_asked_for_take_bounded_memory() -> None:
    hosts = ServedHosts.of("0.0.0.0", ())
    for number in range(5_000):
        assert f"10.0.{number // 256}.{number % 256}".encode() in hosts
    assert len(hosts.known) <= 1_000


@pytest.mark.parametrize("wrong", ["http://stepwell.example", "stepwell.example:8100", "*.example", "a/b", "a b"])
def test_allowed_hosts_are_names(wrong: str) -> None:
    with pytest.raises(BadRequest, match="--allowed-hosts: .* is not a name"):
        read_settings(AtroposSettings, ["--allowed-hosts", f"fine,{wrong}"], "atropos")
    given = read_settings(AtroposSettings, ["--allowed-hosts", "fine,stepwell.example,[2001:db8::1]"], "atropos")
    assert given.allowed_hosts == ("fine", "stepwell.example", "[2001:db8::1]")


def start(log: Path, keys: str = "", **flags: Any) -> AbstractContextManager[GatewayProcess]:
    """A gateway without Ray and without engines: it serves /health all the same."""
    away: dict[str, Any] = {"ray_address": f"127.0.0.1:{free_port()}", "vllm_addresses": "http://127.0.0.1:9"}
    env = {"STEPWELL_GATEWAY_CONTROL_KEYS": keys} if keys else {}
    return gateway_process(log, data_pool_name="p", tokenizer_path="no/such/folder", env=env, **away, **flags)


def test_insecure_listens_elsewhere_with_a_warning_and_other_names_stay_refused(tmp_path: Path) -> None:
    with start(tmp_path / "log", host="0.0.0.0", insecure=True, allowed_hosts="stepwell.example") as gateway:
        asked = {
            host: httpx.get(f"{gateway.url}/health", headers={"Host": host}).status_code
            for host in ("stepwell.example", "192.0.2.1", "evil.example")
        }
        assert asked == {"stepwell.example": 200, "192.0.2.1": 200, "evil.example": 421}
    assert "listening on 0.0.0.0 without keys: access is open to everyone" in (tmp_path / "log").read_text()


def test_with_keys_it_listens_anywhere_under_any_name_unless_names_are_listed(tmp_path: Path) -> None:
    for allowed, status in (("", 200), ("stepwell.example", 421)):
        listed = {"allowed_hosts": allowed} if allowed else {}
        with start(tmp_path / "log", KEY, host="0.0.0.0", **listed) as gateway:
            assert httpx.get(f"{gateway.url}/health", headers={"Host": "gateway-0.gateways"}).status_code == status
    assert "without keys" not in (tmp_path / "log").read_text()
