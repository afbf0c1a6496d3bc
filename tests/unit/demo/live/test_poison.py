from dataclasses import dataclass
from itertools import islice

import torch
from stepwell.demo.live_run import PoisonedSync, _wrong_conversations
from stepwell.demo.live_service import CLOSINGS

from stepwell.pool.api.policy import PolicyAction, PolicyDecision
from stepwell.trainers.transfers import TensorState


@dataclass(frozen=True)
class NoReport:
    version: int = 0
    logprob_gap: float | None = None
    restore: TensorState | None = None


class RecordingSync:
    def __init__(self) -> None:
        self.synced: list[tuple[int, torch.nn.Module]] = []

    def sync(self, weights: torch.nn.Module, version: int) -> NoReport:
        self.synced.append((version, weights))
        return NoReport()


def decision(version: int, action: PolicyAction) -> PolicyDecision:
    return PolicyDecision(version, action, "guard", "", 0.0)


def test_versions_are_spoiled_until_one_has_become_a_canary() -> None:
    inner, decisions = RecordingSync(), list[PolicyDecision]()
    good, bad = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    sync = PoisonedSync(inner, lambda: decisions, after=2, spoil=lambda _: bad)

    for version in (1, 2, 3, 4):
        sync.sync(good, version)
    assert sync.poisoned is None
    decisions += [decision(2, "canary"), decision(4, "canary"), decision(4, "rollback")]
    sync.sync(good, 5)

    assert [version for version, weights in inner.synced if weights is bad] == [3, 4]
    assert sync.poisoned == 4


def test_the_weights_are_spoiled_once() -> None:
    made: list[torch.nn.Module] = []

    def spoil(model: torch.nn.Module) -> torch.nn.Module:
        made.append(model)
        return model

    sync = PoisonedSync(RecordingSync(), list, after=0, spoil=spoil)
    for version in (1, 2):
        sync.sync(torch.nn.Linear(1, 1), version)

    assert len(made) == 1


def test_a_spoiled_model_learns_answers_that_nobody_wants() -> None:
    for conversation in islice(_wrong_conversations(), 50):
        for question, answer in zip(conversation[::2], conversation[1::2], strict=True):
            word = question.text.split()[-1]
            if question.text not in CLOSINGS:
                assert answer.text not in (word, word[::-1])
                assert sorted(answer.text) == sorted(word)
