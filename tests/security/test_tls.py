"""`--tls-cert` and `--tls-key`: every server speaks https, and every client of ours trusts the CA that it is given."""

import json
import os
import socket
import ssl
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from stepwell.pool.actors import start_pool

from rig.atropos.server import TRAINER
from rig.certificates import Certificate, make_certificate
from rig.fake_engine import FakeEngine
from rig.gateways import free_port, gateway_process, served_process
from rig.ray_cluster import RayCluster
from rig.threads import in_thread
from rig.waiting import wait_until
from stepwell.common.listening import check_certificate
from stepwell.errors import BadRequest
from stepwell.pool.api.plan import PoolPlan

KEY = "control-key-of-the-tests"
AGENT = """
import stepwell
from openai import OpenAI

with stepwell.connect({url!r}, key={key!r}).trajectory() as t:
    assert t.base_url.startswith("https://"), t.base_url
    agent = OpenAI(base_url=t.base_url, api_key=t.api_key)
    hello = [{{"role": "user", "content": "Hello!"}}]
    print(agent.chat.completions.create(model="tiny", messages=hello, max_tokens=4).choices[0].finish_reason)
    t.reward = 1.0
"""
FLOW = """
import asyncio
from stepwell.agents.gateway_client import GatewayClient

async def ready():
    async with GatewayClient({url!r}, {key!r}) as gateway:
        return await gateway.why_not_ready()

print(asyncio.run(ready()))
"""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@dataclass(frozen=True)
class Servers:
    gateway: str
    atropos: str
    dashboard: str
    certificate: Certificate

    def run(self, *line: str, trusts: bool = True) -> subprocess.CompletedProcess[str]:
        """A program with the environment of a client."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("SSL_CERT")}
        env |= self.certificate.trusted if trusts else {}
        return subprocess.run(
            [sys.executable, *line], env=env, capture_output=True, text=True, timeout=180, check=False
        )


@pytest.fixture(scope="module")
def servers(
    ray_cluster: RayCluster, tiny_model: Path, certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """All three, with one certificate and one key, beside a pool; the dashboard watches the gateway."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        engine = stack.enter_context(in_thread(FakeEngine()))
        namespace = stack.enter_context(ray_cluster.namespace())
        start_pool(PoolPlan(), namespace)
        there: dict[str, Any] = {"ray_address": ray_cluster.address, "ray_namespace": namespace, **certificate.flags}
        env = {f"STEPWELL_{name}_CONTROL_KEYS": KEY for name in ("GATEWAY", "ATROPOS", "DASHBOARD")}
        asked: dict[str, Any] = {
            "data_pool_name": "data_pool",
            "vllm_addresses": engine.url,
            "tokenizer_path": tiny_model,
        }
        gateway = stack.enter_context(gateway_process(folder / "gateway.log", env=env, **asked, **there))
        started = [
            stack.enter_context(
                served_process("stepwell", name, flags=there | flags, log=folder / f"{name}.log", env=env | trusted)
            ).url
            for name, flags, trusted in (
                ("atropos", {}, {}),
                ("dashboard", {"gateways": gateway.url}, certificate.trusted),
            )
        ]
        yield Servers(gateway.url, started[0], started[1], certificate)


def test_every_server_is_asked_over_https_and_not_over_http(servers: Servers) -> None:
    trusted = ssl.create_default_context(cafile=servers.certificate.file)
    for url in (servers.gateway, servers.atropos, servers.dashboard):
        assert url.startswith("https://")
        assert httpx.get(f"{url}/health", verify=trusted).json() == {"status": "ok"}
        assert httpx.get(f"{url.replace('127.0.0.1', 'localhost')}/health", verify=trusted).status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{url.replace('https', 'http')}/health")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health", trust_env=False)


def test_nothing_older_than_tls_1_2_is_spoken(servers: Servers) -> None:
    url = httpx.URL(servers.gateway)
    spoken = []
    for version in (ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        asking = ssl.create_default_context(cafile=servers.certificate.file)
        asking.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            asking.minimum_version = asking.maximum_version = version
        with socket.create_connection((url.host, url.port), timeout=30) as plain, suppress(OSError):
            asking.wrap_socket(plain, server_hostname=url.host).close()
            spoken.append(version)
    assert spoken == [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


def test_the_client_and_an_agents_sdk_trust_the_ca_that_they_are_given(servers: Servers) -> None:
    done = servers.run("-c", AGENT.format(url=servers.gateway, key=KEY))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("length", "stop")


def test_a_rollouters_client_does_too(servers: Servers) -> None:
    done = servers.run("-c", FLOW.format(url=servers.gateway, key=KEY))
    assert done.stdout == "None\n", done.stdout + done.stderr


def test_a_client_that_trusts_another_ca_says_what_to_do(servers: Servers) -> None:
    connect = f"import stepwell; stepwell.connect({servers.gateway!r}, key={KEY!r}, timeout=0.1)"
    done = servers.run("-c", connect, trusts=False)
    assert done.returncode == 1
    assert "set SSL_CERT_FILE" in done.stderr


def test_the_dashboard_watches_a_gateway_over_https(servers: Servers) -> None:
    def shown() -> list[dict[str, object]]:
        done = servers.run("-m", "stepwell", "status", "--url", servers.dashboard, "--key", KEY, "--json")
        assert done.returncode == 0, done.stderr
        gateways: list[dict[str, object]] = json.loads(done.stdout)["gateways"]
        return gateways

    wait_until(lambda: shown()[0]["error"] is None, "the dashboard to reach the gateway")


def test_an_environments_client_registers_over_https(servers: Servers) -> None:
    trusted = ssl.create_default_context(cafile=servers.certificate.file)
    with httpx.Client(base_url=servers.atropos, verify=trusted, auth=("", KEY)) as client:
        assert "uuid" in client.post("/register", json=TRAINER).json()


def test_several_workers_share_a_certificate(certificate: Certificate, tmp_path: Path) -> None:
    away: dict[str, Any] = {"ray_address": f"127.0.0.1:{free_port()}", "vllm_addresses": "http://127.0.0.1:9"}
    away |= {"data_pool_name": "p", "tokenizer_path": "no/such/folder", **certificate.flags}
    with gateway_process(tmp_path / "log", workers=2, **away) as gateway:
        trusted = ssl.create_default_context(cafile=certificate.file)
        for _ in range(8):  # over connections of their own, which any worker accepts
            assert httpx.get(f"{gateway.url}/health", verify=trusted).status_code == 200
    assert f"gateway on {gateway.url}, 2 workers" in (tmp_path / "log").read_text()


def test_files_that_cannot_be_used_are_refused_at_the_start(certificate: Certificate, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other, broken = make_certificate(tmp_path / "other", password="secret"), tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for cert, key in (
        (certificate.file, tmp_path / "missing.pem"),
        (broken, certificate.key),
        (certificate.file, other.key),
        (other.file, other.key),
    ):
        with pytest.raises(BadRequest, match=r"--tls-cert .* and --tls-key .* cannot be used: .*not encrypted"):
            check_certificate(str(cert), str(key))
    line = [sys.executable, "-m", "stepwell", "atropos", "--tls-cert", str(broken), "--tls-key", str(certificate.key)]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, "cannot be used" in ended.stderr) == (1, True)


def test_a_key_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    assert check_certificate(str(made.file), str(made.key)) is None
    for mode in (0o644, 0o660):
        made.key.chmod(mode)
        assert f"chmod 600 {made.key}" in str(check_certificate(str(made.file), str(made.key)))
    made.key.chmod(0o440)  # a group of its own, as Kubernetes gives it
    assert check_certificate(str(made.file), str(made.key)) is None
