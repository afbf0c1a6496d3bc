"""The gradients that trainers compute from a batch: ours with its own code, TRL and verl as their losses are defined.

TRL's AsyncGRPOTrainer and verl both take the clipped objective, summed over the trained tokens and divided by their
number, with logits divided by the temperature of their configuration. Their own code is in other_trainers.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from stepwell.trainers.trl_groups import PolicyVersions

from benchmarks.truth_rig.policy import TreePolicy
from stepwell.pool.api.leasing import HasLeases
from stepwell.pool.client import DataPool
from stepwell.pool.client.batch import Batch
from stepwell.steps.advantages import AdvantageKind
from stepwell.steps.credit import CreditKind
from stepwell.trainers.learner import Learner, OldPolicies
from stepwell.trainers.loader import pool_loader
from stepwell.trainers.rows import choose_rows
from stepwell.trainers.settings import RowSettings, Settings
from stepwell.trainers.trl import samples_of
from stepwell.trainers.verl import verl_rows

CLIP = 0.2
PAD = 7


@dataclass(frozen=True, slots=True)
class Case:
    """What a trainer of another project is given."""

    batch: Batch
    table: torch.Tensor
    """The weights that are trained."""
    advantage: AdvantageKind
    temperature: float
    merged: bool = False
    """For verl: one row per chain of steps."""
    credit: CreditKind = "root"

    @property
    def rows(self) -> RowSettings:
        return RowSettings(advantage=self.advantage, credit=self.credit, temperature=self.temperature)


def ours(batch: Batch, table: torch.Tensor, settings: Settings) -> torch.Tensor:
    policy = TreePolicy(table)
    Learner(policy, None, settings).learn(choose_rows(batch, (), settings), 0)
    return uphill(policy)


def silent(batch: Batch, every: int = 1) -> Batch:
    """The batch as one whose steps, or every second one, were recorded without log-probabilities."""
    columns = batch.columns
    is_silent = np.repeat(np.arange(len(columns)) % every == 0, columns.response_lengths_S)
    return replace(batch, columns=replace(columns, logprobs=np.where(is_silent, np.float32(np.nan), columns.logprobs)))


def recomputed(batch: Batch, tables: Sequence[torch.Tensor], settings: Settings) -> torch.Tensor:
    """Ours for data of two weights, versions 0 and 1, after an update from one to the other."""
    old, new = tables
    policy = TreePolicy(old)
    policies = OldPolicies(policy, settings)
    policies.set_current(0)
    policies.fill(choose_rows(batch, (), settings))
    policies.before_update()
    with torch.no_grad():
        policy.table.copy_(new)
    policies.set_current(1)
    rows = policies.fill(choose_rows(batch, (), settings))
    Learner(policy, None, settings).learn(rows, 0)
    return uphill(policy)


class OneBatch(DataPool):
    """A pool that has this batch and no other."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def fetch_batch(self, *args: object, **terms: object) -> Batch:
        return self._batch

    def ack(self, leased: HasLeases) -> None: ...

    def nack(self, leased: HasLeases) -> None: ...

    def stats(self) -> Any:
        return SimpleNamespace(policy_version=1)


def with_loader(case: Case) -> torch.Tensor:
    """As a loop of one's own does it, with the tensors of `pool_loader`."""
    policy = TreePolicy(case.table)
    rows = RowSettings(advantage=case.advantage, credit=case.credit)
    (tensors,) = pool_loader(OneBatch(case.batch), 1, batches=1, rows=rows)
    _add_loss(
        policy,
        tensors["input_ids"],
        tensors["attention_mask"],
        tensors["trained"],
        tensors["logprobs"],
        tensors["advantages"],
        tensors["temperatures"][:, 1:, None],
    )
    return uphill(policy)


def with_trl(case: Case, *, divided_by: float | None = None) -> torch.Tensor:
    """`divided_by` is the temperature that the loss uses, if it is another one."""
    policy = TreePolicy(case.table)
    rows = choose_rows(case.batch, (), case.rows)
    for sample in samples_of(rows, 0, PolicyVersions()):
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        is_trained = torch.from_numpy(sample.completion_mask).bool()[None]
        old_logprobs = torch.from_numpy(sample.old_log_probs)[None]
        advantages = torch.full(ids.shape, sample.advantage)
        used = divided_by or case.temperature
        _add_loss(policy, ids, torch.ones_like(ids), is_trained, old_logprobs, advantages, used)
    return uphill(policy)


def with_verl(case: Case) -> torch.Tensor:
    policy = TreePolicy(case.table)
    length = int(case.batch.columns.lengths_S.max())
    rows = verl_rows(
        case.batch,
        case.rows,
        prompt_length=length,
        response_length=length,
        pad_id=PAD,
        merged=case.merged,
        overlong="raise",
    )
    tensors = {name: torch.from_numpy(array) for name, array in rows.tensors.items()}

    def whole(name: str) -> torch.Tensor:
        """Of prompts and responses."""
        return torch.cat([torch.zeros(len(tensors[name]), length), tensors[name].float()], dim=1)

    _add_loss(
        policy,
        tensors["input_ids"],
        tensors["attention_mask"],
        whole("response_mask").bool(),
        whole("rollout_log_probs")
        if "rollout_log_probs" in tensors
        else torch.full_like(whole("responses"), torch.nan),
        whole("advantages"),
        case.temperature,
    )
    return uphill(policy)


def _add_loss(
    policy: TreePolicy,
    ids: torch.Tensor,
    attention: torch.Tensor,
    is_trained: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    temperature: float | torch.Tensor,
) -> None:
    """Adds the gradient of a sum over tokens; how it is scaled does not matter here."""
    logprobs = (policy(ids, attention).logits[:, :-1] / temperature).log_softmax(-1)
    at = is_trained[:, 1:]
    chosen = logprobs[at].gather(1, ids[:, 1:][at][:, None])[:, 0]
    old = old_logprobs[:, 1:][at]
    old = old.where(~old.isnan(), chosen.detach())  # what is missing is that of the current weights
    ratios, wanted = (chosen - old).exp(), advantages[:, 1:][at]
    (-torch.min(ratios * wanted, ratios.clamp(1 - CLIP, 1 + CLIP) * wanted).sum()).backward()


def uphill(policy: TreePolicy) -> torch.Tensor:
    """The gradient of what is to grow, as the exact one is."""
    return torch.zeros_like(policy.table) if policy.table.grad is None else -policy.table.grad
