"""A service of three engines and a pool, whose sessions are rewarded as a test says; all in the test's process."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from stepwell.pool.api.policy import PolicyAction, PolicyDecision
from stepwell.trainers.guard.guard_settings import GuardSettings
from stepwell.trainers.guard.guarded_sync import GuardedSync
from stepwell.trainers.transfers import CheckpointTransfer
from stepwell.trainers.weight_sync import VersionedPool, WeightSync
from tests.unit.trainers.models import one_turn
from tests.unit.trainers.scripted_engine import ScriptedEngine
from tests.unit.trainers.training_pool import TrainingPool


class Constant(torch.nn.Module):
    """A model with one weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([weight]))


class LoadedEngine(ScriptedEngine):
    """Knows the weight that it has loaded."""

    weight: float | None = None

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/collective_rpc":
            self.weight = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")["weight"].item()
        return super().answer(path, body)

    def die(self) -> None:
        """No version is told any more."""
        self.fails_at = "/weight_info"

    def restart(self) -> None:
        self.fails_at, self.weight, self.weight_version = None, None, "default"


class Service:
    def __init__(self, engines: list[LoadedEngine], folder: Path) -> None:
        self.engines = engines
        self.pool = TrainingPool()
        self.pool._run(self.pool.local.change_engines(add=tuple(engine.url for engine in engines)))
        self.folder = folder
        self.now = 1000.0
        self._sessions = 0

    def guard(self, **options: Any) -> GuardedSync:
        """As in a new process of the trainer."""
        options = {"settings": GuardSettings(engine_timeout=0.0), "background": False, **options}
        return GuardedSync(self.pool, self.folder, weight_sync, clock=self._tick, **options)

    def reward(self, version: int, *rewards: float) -> None:
        """Sessions of this version."""
        for reward in rewards:
            self._sessions += 1
            uid = f"session-{self._sessions}"
            self.pool.add_group(uid, [([one_turn(uid, uid, [1], [2], policy_version=version)], reward)])

    def operator(self, version: int, action: PolicyAction, policy_version: int | None = None) -> None:
        decision = PolicyDecision(version, action, "ada", "users complain", self._tick())
        self.pool.decide(decision, None, policy_version)

    def versions(self) -> list[str]:
        return [engine.weight_version for engine in self.engines]

    def weights(self) -> list[float | None]:
        return [engine.weight for engine in self.engines]

    def actions(self) -> list[tuple[int, str]]:
        return [(decision.version, decision.action) for decision in self.pool.decisions()]

    def _tick(self) -> float:
        self.now += 0.01
        return self.now


def weight_sync(engines: VersionedPool, folder: Path) -> WeightSync:
    return WeightSync(transfer=CheckpointTransfer(folder), pool=engines, probe=(), background=False)
