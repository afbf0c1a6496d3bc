"""One name for one thing: class names are unique, and a module name means the same in every package."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "stepwell"

SHARED_MODULES: Mapping[str, str] = {
    "__main__": "the package as a program: python -m",
    "app": "builds the ASGI application of a server",
    "client": "how another process reaches a service",
    "engine": "an inference engine",
    "http": "the requests and responses of the package",
    "journal": "what a pool's state writes to survive a restart",
    "leasing": "batches under lease",
    "lineage": "what a version of the policy was trained on",
    "link": "the process that joins Ray for others",
    "metrics": "Prometheus metrics",
    "openai": "OpenAI's API, and servers that have only that",
    "policy": "the versions of the policy, and decisions about them",
    "pool": "the DataPool",
    "processes": "child processes",
    "producing": "what gateways, environments and reward workers give to a pool",
    "rows": "sequences to train on",
    "sessions": "conversations of users, whose ends nobody declares",
    "watching": "reading a pool by its changes",
}
"""Module names that appear in several packages, with the one meaning they have in all of them."""

OF_OTHERS: Mapping[str, set[str]] = {"agents/claw_r1.py": {"AgentFlowBase", "Step"}}
"""Class names that another project's programs ask for."""


def modules() -> Iterator[Path]:
    return (path for path in sorted(ROOT.rglob("*.py")) if path.name != "__init__.py")


def classes(module: Path) -> Iterator[str]:
    tree = ast.parse(module.read_text())
    return (node.name for node in tree.body if isinstance(node, ast.ClassDef))


def several(found: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in found.items() if len(places) > 1}


def test_a_class_name_is_used_once() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        place = str(module.relative_to(ROOT))
        for name in set(classes(module)) - OF_OTHERS.get(place, set()):
            found[name].append(place)
    assert several(found) == {}


def test_a_module_name_in_several_packages_is_listed_with_its_meaning() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        found[module.stem].append(str(module.parent.relative_to(ROOT)))
    repeated = several(found)
    assert {name: places for name, places in repeated.items() if name not in SHARED_MODULES} == {}
    assert sorted(SHARED_MODULES) == sorted(repeated), "no name is listed that is not shared"
