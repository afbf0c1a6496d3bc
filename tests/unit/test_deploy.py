"""deploy/ compared with the code: settings of the commands, ports and names, metrics."""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import kubernetes_validate
import pytest
import yaml
from pydantic_settings import BaseSettings
from stepwell.gateway.asgi import access_table

from rig.dashboard import MadeUpPool, make_dashboard
from rig.docs_pages import CHECKOUT, DOCS, commands
from stepwell import commands as stepwell_commands
from stepwell.access.access_keys import AccessKeys
from stepwell.atropos.app import create_atropos
from stepwell.commands.sections import read_settings
from stepwell.common.listening import require_safe_address
from stepwell.common.tokenizers import BackgroundTokenizer, load_tokenizer
from stepwell.engines.fleet import EngineFleet
from stepwell.engines.vllm_control import base_flags
from stepwell.gateway.app import GatewayApp
from stepwell.gateway.dialects import DIALECTS
from stepwell.gateway.recording.spool import Spool
from stepwell.pool.client import PoolClient

Manifest = Mapping[str, Any]

DEPLOY = CHECKOUT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
LINK_PORT = 8300
PORTS = {"gateway": 8100, "dashboard": 8200}
SECRETS = {"control-keys", "link-secret", "ray-token", "redis-password"}


def compose() -> Manifest:
    return cast("Manifest", yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


@cache
def manifests() -> list[Manifest]:
    files = sorted((DEPLOY / "kuberay").glob("*.yaml"))
    documents = [document for file in files for document in yaml.safe_load_all(file.read_text())]
    return [document for document in documents if document["kind"] != "Kustomization"]


def manifest(kind: str, name: str) -> Manifest:
    (found,) = [made for made in manifests() if made["kind"] == kind and made["metadata"]["name"] == name]
    return found


def pods() -> Iterator[tuple[str, Manifest]]:
    """Every pod template, by the name of what makes it."""
    for made in manifests():
        if made["kind"] in ("Deployment", "StatefulSet"):
            yield made["metadata"]["name"], made["spec"]["template"]
        if made["kind"] == "RayCluster":
            yield "head", made["spec"]["headGroupSpec"]["template"]
            for group in made["spec"]["workerGroupSpecs"]:
                yield group["groupName"], group["template"]


def containers() -> Iterator[tuple[str, Manifest]]:
    for name, pod in pods():
        (container,) = pod["spec"]["containers"]
        yield name, container


def container(name: str) -> Manifest:
    return dict(containers())[name]


def kube_settings() -> dict[str, str]:
    lines = (DEPLOY / "kuberay" / "stepwell.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def filled(value: object) -> str:
    return re.sub(r"\$\{\w+[^}]*\}", "given", str(value))


def settings_of(command: str, env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> BaseSettings:
    """What the command makes of that environment. Every setting of its own in there must be one that it takes."""
    settings = stepwell_commands.settings_of(command)
    prefix = str(settings.model_config["env_prefix"])
    with monkeypatch.context() as patch:
        for variable, value in env.items():
            if variable.startswith(prefix):
                assert variable.removeprefix(prefix).lower() in settings.model_fields, variable
                patch.setenv(variable, value)
        return read_settings(settings, [], command)


def started(words: list[str]) -> list[str]:
    """The stepwell commands that a container's command comes to."""
    if words[:1] == ["join-ray"]:
        words = words[1:]
    shell = words[2] if words[:2] == ["sh", "-c"] else " ".join(words)
    return [" ".join(command.words).replace("exec ", "") for command in commands(shell)]


def test_compose_starts_commands_with_settings_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    services = compose()["services"]
    for name in ("gateway", "dashboard"):
        env = {key: filled(value) for key, value in services[name]["environment"].items()}
        assert started(services[name]["command"]) == [f"stepwell {name}"]
        settings = settings_of(name, env, monkeypatch)
        made = settings.model_dump()
        assert made["port"] == PORTS[name]
        assert getattr(settings, "link", None) == ("link", LINK_PORT)
        assert made["control_keys"] == ("given",)
        assert services[name]["ports"] == [f"127.0.0.1:{PORTS[name]}:{PORTS[name]}"]
        assert made["host"] == "0.0.0.0"
        require_safe_address(made["host"], has_keys=bool(made["control_keys"]), insecure=made["insecure"], variable="")
        assert not made["insecure"]


def test_a_keeper_creates_the_pool_with_settings_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    service = compose()["services"]["pool"]
    env = {key: filled(value) for key, value in service["environment"].items()}
    for words, given in ((service["command"], env), (container("pool-keeper")["args"], kube_settings())):
        assert started(words) == ["stepwell pool --keep"]
        assert settings_of("pool", given, monkeypatch).model_dump()["journal"] == "/var/lib/stepwell/journal"
    assert container("pool-keeper")["envFrom"] == [{"configMapRef": {"name": "stepwell"}}]


def test_the_head_keeps_its_state_in_the_redis_that_is_there() -> None:
    options = manifest("RayCluster", "ray")["spec"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis:6379"
    (port,) = manifest("Service", "redis")["spec"]["ports"]
    assert port["port"] == 6379
    (password,) = container("redis")["env"]
    assert options["redisPassword"]["valueFrom"] == password["valueFrom"]
    assert f"$({password['name']})" in container("redis")["args"]


def test_compose_names_what_it_has() -> None:
    made = compose()
    services = made["services"]
    env = services["gateway"]["environment"]
    assert env["STEPWELL_GATEWAY_VLLM_ADDRESSES"] == "http://vllm:8001"
    assert "--port=8001" in services["vllm"]["command"]
    assert services["dashboard"]["environment"]["STEPWELL_DASHBOARD_GATEWAYS"] == "http://gateway:8100"
    assert services["link"]["environment"]["RAY_HEAD"] == "ray:6379"
    assert "--port=6379" in services["ray"]["command"]
    mounted = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())}
    assert mounted == made["volumes"].keys()
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= services.keys(), name
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def test_gateways_and_dashboards_have_no_part_in_ray() -> None:
    services = compose()["services"]
    for name in ("gateway", "dashboard"):
        made = container(name)
        assert made["args"][0] == services[name]["command"][0] == "stepwell"
        assert not [key for key in services[name]["environment"] if key.startswith("RAY_")]
        assert not [variable for variable in made["env"] if variable["name"].startswith("RAY_")]
        assert "ray-token" not in str(dict(pods())[name])
    assert not [key for key in kube_settings() if key.startswith("RAY_")]


def test_a_link_is_started_with_settings_that_it_takes_and_its_clients_find_their_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, made = compose()["services"]["link"], container("link")
    env = {key: filled(value) for key, value in service["environment"].items()}
    for words, given in ((service["command"], env), (made["args"], kube_settings())):
        assert words[0] == "join-ray"
        assert started(words) == ["stepwell link"]
        assert settings_of("link", given, monkeypatch).model_dump()["listen"] == f"0.0.0.0:{LINK_PORT}"
    assert made["ports"] == [{"name": "link", "containerPort": LINK_PORT}]
    files = {key: value for key, value in kube_settings().items() if value.startswith("/etc/stepwell/link/")}
    for name in ("link", "gateway", "dashboard"):
        (volume,) = [volume for volume in dict(pods())[name]["spec"]["volumes"] if volume["name"] == "link"]
        there = {
            item["path"] for source in volume["projected"]["sources"] for item in source["secret"].get("items", ())
        }
        there |= {"tls.crt", "tls.key"} if name == "link" else set()
        named = {value for key, value in files.items() if key.startswith(f"STEPWELL_{name.upper()}_")}
        assert {f"/etc/stepwell/link/{path}" for path in there} == named, name
        assert {"name": "link", "mountPath": "/etc/stepwell/link", "readOnly": True} in container(name)["volumeMounts"]


def test_the_key_of_the_links_certificate_is_with_the_link_alone() -> None:
    services = compose()["services"]
    holders = {name for name, made in services.items() if "link-server" in str(made.get("volumes"))}
    assert holders == {"link", "link-files"}
    assert "tls.key" not in str([dict(pods())[name] for name in ("gateway", "dashboard")])


def test_the_shards_are_not_the_last_to_get_a_core() -> None:
    for made in (container("head"), container("pool")):
        assert {"name": "RAY_worker_niceness", "value": "0"} in made["env"]
    assert compose()["services"]["ray"]["environment"]["RAY_worker_niceness"] == "0"


def test_only_what_is_meant_to_be_reached_is_published() -> None:
    published = {name for name, service in compose()["services"].items() if "ports" in service}
    assert published == {"gateway", "dashboard"}


def test_journals_are_on_a_volume_of_the_one_node_that_offers_the_pools_resource() -> None:
    services = compose()["services"]
    for env in (services["pool"]["environment"], kube_settings()):
        assert env["STEPWELL_POOL_RESOURCE"] == "pool"
        assert env["STEPWELL_POOL_JOURNAL"].startswith("/var/lib/stepwell/")
        assert env["STEPWELL_POOL_ARCHIVE"].startswith("/var/lib/stepwell/")
    assert '--resources={"pool": 1}' in services["ray"]["command"]
    assert "pool:/var/lib/stepwell" in services["ray"]["volumes"]
    (group,) = manifest("RayCluster", "ray")["spec"]["workerGroupSpecs"]
    assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {"pool": 1}
    assert group["replicas"] == group["maxReplicas"] == 1
    mount = {"name": "pool", "mountPath": "/var/lib/stepwell"}
    assert [name for name, made in containers() if mount in made["volumeMounts"]] == ["pool"]
    assert manifest("PersistentVolumeClaim", "pool")["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_no_volume_is_one_that_many_nodes_write() -> None:
    assert not [file for file in (DEPLOY / "kuberay").glob("*.yaml") if "ReadWriteMany" in file.read_text()]


def test_kubernetes_starts_commands_with_settings_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gateway", "dashboard"):
        made = container(name)
        env = kube_settings() | {variable["name"]: variable.get("value", "given") for variable in made["env"]}
        assert started(made["args"]) == [f"stepwell {name}"]
        settings = settings_of(name, env, monkeypatch)
        read = settings.model_dump()
        assert getattr(settings, "link", None) == (manifest("Service", "link")["metadata"]["name"], LINK_PORT)
        assert read["port"] == PORTS[name] == made["ports"][0]["containerPort"]
        assert read["control_keys"] == ("given",)
        assert read["host"] == "0.0.0.0"
        require_safe_address(read["host"], has_keys=bool(read["control_keys"]), insecure=read["insecure"], variable="")
        assert not read["insecure"]
        assert made["envFrom"] == [{"configMapRef": {"name": "stepwell"}}]


def test_every_setting_is_of_a_command_that_is_started() -> None:
    named = {name.split("_")[1] for name in kube_settings()}
    assert named == {"POOL", "LINK", "GATEWAY", "DASHBOARD"}


def test_gateways_are_named_as_many_times_as_there_are() -> None:
    spec = manifest("StatefulSet", "gateway")["spec"]
    names = [f"http://gateway-{n}.{spec['serviceName']}:8100" for n in range(spec["replicas"])]
    assert kube_settings()["STEPWELL_DASHBOARD_GATEWAYS"] == ",".join(names)


def test_engines_are_found_by_the_name_of_a_headless_service() -> None:
    service = manifest("Service", manifest("StatefulSet", "vllm")["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None"  # so DNS lists its pods
    (port,) = (port["port"] for port in service["spec"]["ports"])
    assert kube_settings()["STEPWELL_GATEWAY_VLLM_ADDRESSES"] == f"dns://{service['metadata']['name']}:{port}"


def test_services_and_budgets_select_pods_that_there_are() -> None:
    labels = [pod.get("metadata", {}).get("labels", {}) for _, pod in pods()]
    rays = {"ray.io/cluster": manifest("RayCluster", "ray")["metadata"]["name"], "ray.io/group": "pool"}
    for made in manifests():
        if made["kind"] in ("Service", "PodDisruptionBudget", "StatefulSet", "Deployment"):
            wanted = made["spec"]["selector"].get("matchLabels", made["spec"]["selector"])
            assert any(wanted.items() <= have.items() for have in [*labels, rays]), made["metadata"]
    names = {made["metadata"]["name"]: made["spec"] for made in manifests() if made["kind"] == "Service"}
    for made in manifests():
        if made["kind"] == "StatefulSet":
            assert names[made["spec"]["serviceName"]]["clusterIP"] == "None"


def test_volumes_and_secrets_that_are_used_are_there() -> None:
    claims = {made["metadata"]["name"] for made in manifests() if made["kind"] == "PersistentVolumeClaim"}
    for name, pod in pods():
        volumes = pod["spec"].get("volumes", ())
        used = {v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v}
        assert used <= claims, name
        own = [made for made in manifests() if made["metadata"].get("name") == name and "spec" in made]
        templates = {t["metadata"]["name"] for made in own for t in made["spec"].get("volumeClaimTemplates", ())}
        mounted = {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in volumes} | templates, name
    wanted = {
        variable["valueFrom"]["secretKeyRef"]["key"]
        for _, made in containers()
        for variable in made["env"]
        if "valueFrom" in variable
    }
    assert wanted | {"link-secret"} == SECRETS
    written = re.findall(r"(?:'|\\n)([a-z-]+)=%s", (DOCS / "operations" / "deploy.md").read_text())
    assert set(written) == SECRETS


def test_probes_ask_what_answers_without_a_key() -> None:
    ways = {"gateway": {"/ready", "/health"}, "dashboard": {"/health"}, "vllm": {"/health"}}
    for name, paths in ways.items():
        probes = [probe for key, probe in container(name).items() if key.endswith("Probe")]
        assert {probe["httpGet"]["path"] for probe in probes} == paths
        assert len(probes) == 3
    assert all(access_table(DIALECTS).find("GET", path).is_open for path in ways["gateway"])


def test_vllm_is_started_with_flags_that_the_tests_start_it_with() -> None:
    """It listens to other containers, which a network policy or compose's own network bounds."""
    words = [word.partition("=")[0] for word in base_flags("PARSER")]
    base = {word for word in words if word.startswith("--")}
    for given in (compose()["services"]["vllm"]["command"], container("vllm")["args"]):
        assert {flag.partition("=")[0] for flag in given} == base | {"--model", "--port"}


def test_kustomize_lists_every_manifest() -> None:
    made = yaml.safe_load((DEPLOY / "kuberay" / "kustomization.yaml").read_text())
    files = {file.name for file in (DEPLOY / "kuberay").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(made["resources"]) == files
    assert made["configMapGenerator"] == [{"name": "stepwell", "envs": ["stepwell.env"]}]
    ignored = (DEPLOY / "kuberay" / ".gitignore").read_text().split()
    generated = [file for made_of in made["secretGenerator"] for file in made_of.get("envs", made_of.get("files"))]
    assert ignored == generated == ["keys.env", "tls.crt", "tls.key"]


def test_manifests_fit_kubernetes_schemas() -> None:
    for made in manifests():
        if made["kind"] != "RayCluster":
            kubernetes_validate.validate(made, kubernetes_validate.latest_version(), strict=True)


def test_the_image_runs_as_no_one_special_and_is_watched() -> None:
    assert re.search(r"^USER 10001$", DOCKERFILE, re.M)
    assert "HEALTHCHECK" in DOCKERFILE
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for sources in re.findall(r"^COPY (?!--from)(?:--\S+ )?(.+) \S+$", DOCKERFILE, re.M):
        for source in sources.split():
            assert (CHECKOUT / source).exists()
            assert f"!{source}" in ignored


def test_ray_has_one_version() -> None:
    (version,) = re.findall(r"^ray==(\S+)", (CHECKOUT / "locks" / "container.txt").read_text(), re.M)
    assert manifest("RayCluster", "ray")["spec"]["rayVersion"] == version


async def exposed() -> set[str]:
    """The names at /metrics of a gateway with a spool, of an Atropos server, and of a dashboard."""
    with tempfile.TemporaryDirectory() as folder:
        gateway = GatewayApp(
            pool=cast("PoolClient", None),
            engines=EngineFleet([]),
            tokenizer=BackgroundTokenizer("", load_tokenizer),
            rewards=None,
            prompt_length=1,
            response_length=1,
            keys=AccessKeys(()),
            spool=Spool(Path(folder) / "spool"),
        ).asgi()
        server = create_atropos(pool=cast("PoolClient", None), keys=AccessKeys(()), state=None)
        shown = [await _metrics(app) for app in (gateway, server, make_dashboard(MadeUpPool(8)))]
    names = re.findall(r"^# TYPE (\w+) (\w+)$", "\n".join(shown), re.M)
    return {f"{name}{part}" for name, kind in names for part in PARTS.get(kind, ("",))}


PARTS = {"histogram": ("_bucket", "_sum", "_count")}


async def _metrics(app: Any) -> str:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    return answer.text


def grafana() -> Manifest:
    return cast("Manifest", json.loads((DEPLOY / "grafana" / "dashboard.json").read_text()))


def rules() -> list[Manifest]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def expressions() -> list[str]:
    drawn = [target["expr"] for panel in grafana()["panels"] for target in panel.get("targets", ())]
    return [*drawn, *(rule["expr"] for rule in rules())]


async def test_every_metric_in_grafana_and_alerts_exists() -> None:
    there = await exposed()
    named = {name for text in expressions() for name in re.findall(r"\b(?:stepwell|process)_\w+", text)}
    assert len(named) > 20
    assert named <= there


def test_every_label_in_grafana_and_alerts_exists() -> None:
    reference = (DOCS / "reference" / "metrics.md").read_text()
    labels = dict(re.findall(r"^\| `(\w+)` \| \w+ \| (.*?) \|", reference, re.M))
    for text in expressions():
        (name, *_) = re.findall(r"stepwell_\w+|process_\w+|\bup\b", text)
        known = {*re.findall(r"\w+", labels.get(name.removesuffix("_bucket"), "")), "instance", "job", "le"}
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", text))
        for grouped in re.findall(r"(?:by|ignoring) \(([^)]*)\)", text):
            used |= set(re.findall(r"\w+", grouped))
        assert used <= known, text


def test_the_grafana_dashboard_is_whole() -> None:
    made = grafana()
    ids = [panel["id"] for panel in made["panels"]]
    assert len(set(ids)) == len(ids)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in made["panels"]]
    assert len(set(places)) == len(places)
    assert {variable["name"] for variable in made["templating"]["list"]} == {"datasource", "instance"}


def test_every_alert_says_what_to_do_and_is_on_the_page() -> None:
    page = (DOCS / "operations" / "metrics.md").read_text()
    listed = re.findall(r"^\| `(Stepwell\w+)` \|", page, re.M)
    assert listed == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
