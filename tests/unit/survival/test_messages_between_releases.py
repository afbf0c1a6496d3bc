"""D15: messages were pickled by position, so a field added in the middle moved values without an error."""

import base64
import dataclasses
import importlib
import inspect
import os
import pickle
import pkgutil
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import cloudpickle
from stepwell.pool.actors import ShardActor

import stepwell
from stepwell.common.message_format import FORMAT, MESSAGES, portable_actor, restore
from stepwell.errors import IncompatibleMessage, PoolUnavailable
from stepwell.pool import api
from stepwell.pool.api.plan import PoolPlan
from stepwell.pool.api.policy import Serving
from stepwell.pool.api.producing import Pacing
from stepwell.pool.client.shards import ShardSet
from stepwell.pool.shard.service import ShardService
from stepwell.steps.columns import Columns, pack, restore_columns, unpack
from stepwell.steps.step import Step, VersionSpan, ids_array

OWN_FORM = (Columns, VersionSpan)
"""Columns follow the table of columns; a span is sent by the thousand and has three fields for good."""

NEIGHBOUR = """
import base64, pickle, sys
from stepwell.pool.api.policy import Serving
if sys.argv[1] == "send":
    serving = Serving(added="x", policy_version=7, engines=("http://a",), epoch="e")
    print(base64.b64encode(pickle.dumps(serving)).decode())
else:
    serving = pickle.loads(base64.b64decode(sys.argv[2]))
    found = (serving.added, serving.policy_version, serving.engines, serving.epoch)
    assert found == ("", 7, ("http://a",), "e"), serving
    assert not hasattr(serving, "revision")
"""
"""A process of a release whose Serving has one field more, before all others, and one less in the middle."""


def parts_of(annotation: Any) -> Iterator[type]:
    """The classes of ours that an annotation names."""
    if isinstance(annotation, type):
        if annotation.__module__.startswith("stepwell"):
            yield annotation
        return
    for part in typing.get_args(annotation):
        if not isinstance(part, str | typing.ForwardRef):  # JSON, which is recursive
            yield from parts_of(part)


def sent_classes() -> set[type]:
    """All classes of ours in the calls of a shard and in their answers."""
    names: dict[str, Any] = {}
    for module in pkgutil.iter_modules(api.__path__):
        names |= vars(importlib.import_module(f"{api.__name__}.{module.name}"))
    names |= vars(importlib.import_module("stepwell.steps.columns")) | vars(
        importlib.import_module("stepwell.steps.step")
    )
    found: set[type] = set()
    waiting = [
        part
        for name, call in inspect.getmembers(ShardService, inspect.isfunction)
        if not name.startswith("_")
        for annotation in typing.get_type_hints(call, localns=names).values()
        for part in parts_of(annotation)
    ]
    while waiting:
        cls = waiting.pop()
        if cls in found or issubclass(cls, Enum):
            continue
        found.add(cls)
        hints = typing.get_type_hints(cls, localns=names)
        waiting += [part for annotation in hints.values() for part in parts_of(annotation)]
    return found


def test_all_that_shards_are_sent_and_answer_is_sent_by_field_names() -> None:
    sent = sent_classes()
    assert len(sent) > 20
    plain = {cls for cls in sent if not (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields"))}
    assert sent - plain - set(MESSAGES.values()) - set(OWN_FORM) == set()


@pytest.fixture(scope="module")
def neighbour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of another release."""
    source = tmp_path_factory.mktemp("neighbour")
    (package,) = stepwell.__path__
    shutil.copytree(package, source / "stepwell", ignore=shutil.ignore_patterns("__pycache__", "static"))
    file = source / "stepwell" / "pool" / "api" / "policy.py"
    code, added = re.subn(r"(class Serving:\n)", r'\1    added: str = ""\n', file.read_text())
    code, removed = re.subn(r'    revision: int = 0\n    """.*?"""\n', "", code, flags=re.DOTALL)
    assert (added, removed) == (1, 1)
    file.write_text(code)
    return source


def told_by(neighbour: Path, *words: str) -> bytes:
    command = [sys.executable, "-c", NEIGHBOUR, *words]
    environment = {**os.environ, "PYTHONPATH": str(neighbour)}
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout


def test_a_message_of_another_release_keeps_the_fields_that_both_have(neighbour: Path) -> None:
    received = pickle.loads(base64.b64decode(told_by(neighbour, "send")))
    assert received == Serving(policy_version=7, engines=("http://a",), revision=0, epoch="e")


def test_another_release_reads_the_fields_that_both_have(neighbour: Path) -> None:
    serving = Serving(policy_version=7, engines=("http://a",), revision=3, epoch="e")
    told_by(neighbour, "receive", base64.b64encode(pickle.dumps(serving)).decode())


def test_columns_without_a_column_that_came_later_have_its_default() -> None:
    step = Step(
        prompt_ids=ids_array([1, 2]), response_ids=ids_array([3]), trajectory_uid="t", prompt_uid="p", temperature=0.5
    )
    _, (sent_format, values) = pack([step, step]).__reduce__()
    older = {name: value for name, value in values.items() if name not in ("rewards_of", "temperatures_S")}
    received = restore_columns(sent_format, {**older, "added_later": np.zeros(2)})
    assert [(step.reward_of, step.temperature) for step in unpack(received, copy=True)] == [("", None)] * 2


def test_a_message_that_cannot_be_read_says_what_to_do() -> None:
    with pytest.raises(
        IncompatibleMessage, match="Pacing came without batches_ahead, in_flight, queued: its sender is"
    ):
        restore("Pacing", Pacing.__module__, FORMAT, {"batch": 1})
    with pytest.raises(IncompatibleMessage, match=f"message format {FORMAT + 1}, here {FORMAT}.*the same release"):
        restore("Pacing", Pacing.__module__, FORMAT + 1, {})
    with pytest.raises(IncompatibleMessage, match="cannot read Unheard of another one"):
        restore("Unheard", "stepwell.unheard", FORMAT, {})


class UpgradedTransport:
    """A shard of a pool that is created again from its journals, by another release."""

    connections = 1

    def __init__(self) -> None:
        self.plan = PoolPlan(journal="/journals")
        self.calls = 0

    async def call(self, shard: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.calls += method != "plan"
        return self.plan if method == "plan" else None

    def upgrade(self, uid: str) -> None:
        self.plan = replace(self.plan, uid=uid)
        self.connections += 1


async def test_a_client_of_a_pool_without_a_uid_goes_on_with_the_upgraded_pool_and_with_no_other() -> None:
    transport = UpgradedTransport()
    shard = ShardSet("data_pool", transport, timeout=0.1).at("data_pool")
    for uid in ("", "first"):
        transport.upgrade(uid)
        await shard.leave("gateway")
    assert transport.calls == 2
    transport.upgrade("second")
    with pytest.raises(PoolUnavailable, match="created again with other journals"):
        await shard.leave("gateway")


@pytest.mark.parametrize("call", ["answer", "submit_steps", "submit_groups", "give_reward"])
async def test_a_gateway_of_the_release_before_operations_keeps_its_steps_and_says_why(call: str) -> None:
    shard = ShardService(PoolPlan(), "data_pool")
    with pytest.raises(PoolUnavailable, match="is of 0.2: bring it to the release of the pool; its steps wait"):
        await getattr(shard, call)([], revision=1)


LOADING = """
import pickle, sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # as if it did not exist
    actor = pickle.load(sys.stdin.buffer)
    print(actor.__name__, "run" in vars(actor), actor.__mro__[1:])
"""


def test_the_class_of_an_actor_is_loaded_where_none_of_our_modules_exists() -> None:
    """Who finds an actor by name loads its class, which Ray has pickled with the modules of its release."""
    exported: Any = ray.remote(portable_actor(ShardActor))
    pickled = cloudpickle.dumps(exported.__ray_metadata__.modified_class)  # type: ignore[no-untyped-call]
    command = [sys.executable, "-c", LOADING, "stepwell"]
    loaded = subprocess.run(command, input=pickled, capture_output=True, timeout=180, check=False)
    assert loaded.returncode == 0, loaded.stderr.decode()
    assert loaded.stdout.decode().startswith("ShardActor True")


async def test_a_portable_actor_has_the_calls_of_its_class() -> None:
    actor = portable_actor(ShardService)(PoolPlan(), "data_pool")
    assert await actor.plan() == PoolPlan()
    with pytest.raises(TypeError, match="unexpected keyword argument 'unheard'"):
        await actor.stats(unheard=1)
