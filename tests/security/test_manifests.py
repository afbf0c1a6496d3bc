"""deploy/kuberay: every pod fits the Pod Security Standard "restricted", and talks only to those that it has to.

Sources of the rules: https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted and the semantics
of NetworkPolicy: a pod that a policy selects for a direction is closed in it, except for what any policy allows.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

Manifest = Mapping[str, Any]

KUBERAY = Path(__file__).parents[2] / "deploy" / "kuberay"
VOLUMES = {"configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim", "projected", "secret", "ephemeral", "csi"}
"""The types that "restricted" allows."""
FLOWS = {
    ("gateway", "vllm", 8001),
    ("dashboard", "gateway", 8100),
    ("head", "redis", 6379),
    ("gateway", "link", 8300),
    ("dashboard", "link", 8300),
    *product(("link", "pool-keeper", "head", "pool"), repeat=2),
}
"""Who connects to whom: to a port, or between nodes of Ray to any."""


@cache
def manifests() -> list[Manifest]:
    files = sorted(KUBERAY.glob("*.yaml"))
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def pods() -> dict[str, Manifest]:
    """Every pod template, by the name of what makes it."""
    found = {}
    for made in manifests():
        if made["kind"] in ("Deployment", "StatefulSet", "Job", "DaemonSet"):
            found[made["metadata"]["name"]] = made["spec"]["template"]
        if made["kind"] == "RayCluster":
            found["head"] = made["spec"]["headGroupSpec"]["template"]
            found |= {group["groupName"]: group["template"] for group in made["spec"]["workerGroupSpecs"]}
    return found


def policies() -> list[Manifest]:
    return [made for made in manifests() if made["kind"] == "NetworkPolicy"]


def faults_of(pod: Manifest) -> Iterator[str]:
    """Where a pod's specification is against the rules of "restricted", and our own: a root file system that is
    read-only, and no token of the cluster's API."""
    spec = pod["spec"]
    whole = spec.get("securityContext", {})
    if whole.get("runAsNonRoot") is not True or whole.get("runAsUser") == 0:
        yield "it may run as root"
    if whole.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "no seccomp profile"
    if spec.get("automountServiceAccountToken") is not False:
        yield "a token of the cluster's API"
    yield from (f"{name}" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    for volume in spec.get("volumes", ()):
        if not volume.keys() - {"name"} <= VOLUMES:
            yield f"volume {volume['name']}"
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        yield from _faults_of_container(container, {volume["name"] for volume in spec.get("volumes", ())})


def _faults_of_container(container: Manifest, volumes: set[str]) -> Iterator[str]:
    own = container.get("securityContext", {})
    if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
        yield "it may get privileges"
    if own.get("capabilities") != {"drop": ["ALL"]}:
        yield "capabilities"
    if own.get("readOnlyRootFilesystem") is not True:
        yield "a root file system that it can write to"
    if own.get("runAsUser") == 0 or own.get("runAsNonRoot") is False:
        yield "it may run as root"
    yield from (
        f"port {port['containerPort']} of the host" for port in container.get("ports", ()) if "hostPort" in port
    )
    writable = {mount["mountPath"] for mount in container.get("volumeMounts", ()) if mount["name"] in volumes}
    if "shm" in volumes and not {"/tmp", "/dev/shm"} <= writable:
        yield "nowhere to write temporary files"


@pytest.mark.parametrize("name", pods())
def test_a_pod_is_restricted(name: str) -> None:
    assert list(faults_of(pods()[name])) == []


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        (("securityContext", "runAsNonRoot"), False, "it may run as root"),
        (("securityContext", "seccompProfile"), {"type": "Unconfined"}, "no seccomp profile"),
        (("automountServiceAccountToken",), True, "a token of the cluster's API"),
        (("hostNetwork",), True, "hostNetwork"),
        (("containers", 0, "securityContext", "allowPrivilegeEscalation"), True, "it may get privileges"),
        (("containers", 0, "securityContext", "capabilities"), {"drop": ["ALL"], "add": ["SYS_ADMIN"]}, "capabilities"),
        (("containers", 0, "securityContext", "readOnlyRootFilesystem"), False, "a root file system that it can write"),
        (("volumes", 0), {"name": "shm", "hostPath": {"path": "/"}}, "volume shm"),
    ],
)
def test_a_pod_that_is_not_restricted_is_noticed(place: tuple[Any, ...], value: object, fault: str) -> None:
    pod: Any = deepcopy(pods()["gateway"])
    at = pod["spec"]
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    assert any(found.startswith(fault) for found in faults_of(pod))


def test_the_namespace_enforces_it() -> None:
    (namespace,) = (made for made in manifests() if made["kind"] == "Namespace")
    labels = namespace["metadata"]["labels"]
    assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "audit", "warn")} == {"restricted"}


def test_everything_is_denied_unless_it_is_allowed() -> None:
    (deny,) = (policy for policy in policies() if policy["metadata"]["name"] == "default-deny")
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_policies_fit_the_schema_and_allow_by_selectors() -> None:
    """An empty rule, or one without `from` or `to`, allows everyone."""
    for policy in policies():
        kubernetes_validate.validate(policy, kubernetes_validate.latest_version(), strict=True)
        spec = policy["spec"]
        assert {"ingress": "Ingress", "egress": "Egress"}.keys() >= spec.keys() - {"podSelector", "policyTypes"}
        for rule in spec.get("ingress", ()):
            assert rule["from"], policy["metadata"]
        for rule in spec.get("egress", ()):
            assert rule["to"], policy["metadata"]


def labels(name: str) -> Mapping[str, str]:
    found: Mapping[str, str] = pods()[name].get("metadata", {}).get("labels", {})
    return found


def selects(selector: Manifest, name: str) -> bool:
    wanted: Mapping[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels(name).items()


def allowed_ports(direction: str, name: str, other: str) -> set[int | None]:
    """To which ports of the target the pod may connect, or be connected to; None stands for all."""
    found: set[int | None] = set()
    for policy in policies():
        if not selects(policy["spec"]["podSelector"], name):
            continue
        for rule in policy["spec"].get(direction, ()):
            for peer in rule["from" if direction == "ingress" else "to"]:
                if peer.keys() == {"podSelector"} and selects(peer["podSelector"], other):
                    target = name if direction == "ingress" else other
                    found |= {_number(port["port"], target) for port in rule.get("ports", ())} or {None}
    return found


def _number(port: int | str, target: str) -> int:
    named = {p["name"]: p["containerPort"] for p in pods()[target]["spec"]["containers"][0].get("ports", ())}
    return port if isinstance(port, int) else named[port]


def test_pods_talk_only_to_those_that_they_have_to() -> None:
    """Both ends have to allow it."""
    found: set[tuple[str, str] | tuple[str, str, int]] = set()
    for source, target in product(pods(), repeat=2):
        out, into = allowed_ports("egress", source, target), allowed_ports("ingress", target, source)
        if None in out and None in into:
            found.add((source, target))
            continue
        assert None not in out & into
        both = into if None in out else out if None in into else out & into
        found |= {(source, target, port) for port in both if port is not None}
    within_ray = {flow[:2] for flow in FLOWS if len(flow) == 2}
    assert {flow for flow in found if flow[:2] not in within_ray} == {f for f in FLOWS if f[:2] not in within_ray}
    assert within_ray <= found


def test_names_of_engines_and_of_the_outside_are_resolved_by_the_clusters_dns_only() -> None:
    (names,) = (policy for policy in policies() if policy["metadata"]["name"] == "names")
    (rule,) = names["spec"]["egress"]
    assert {port["port"] for port in rule["ports"]} == {53}
    (peer,) = rule["to"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "kube-system"}


def test_only_downloads_leave_the_cluster_and_not_to_private_addresses() -> None:
    """169.254.169.254 is where clouds keep the credentials of a machine."""
    leaving = [
        (policy, rule, peer["ipBlock"])
        for policy in policies()
        for rule in policy["spec"].get("egress", ())
        for peer in rule["to"]
        if "ipBlock" in peer
    ]
    ((policy, rule, block),) = leaving
    assert policy["spec"]["podSelector"]["matchLabels"] == {"stepwell/downloads-models": "true"}
    assert rule["ports"] == [{"port": 443, "protocol": "TCP"}]
    assert {"10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"} <= set(block["except"])
    assert {name for name in pods() if selects(policy["spec"]["podSelector"], name)} == {"gateway", "dashboard", "vllm"}
