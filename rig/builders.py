"""Steps for tests, with as little as the test at hand cares about."""

import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from stepwell.steps.trainable import StepFilter

from stepwell.pool.api.leasing import BatchRequest, ExactFill, LeasedGroups, Settlement
from stepwell.pool.api.plan import Limits
from stepwell.pool.api.producing import EndResult, Registration, SubmitVerdict
from stepwell.pool.api.scoring import Attempt, Judgement, JudgementOutcome, Score
from stepwell.pool.rules.exact_batch import choose_groups
from stepwell.pool.rules.pool import Pool
from stepwell.pool.slices.curation import Curator
from stepwell.pool.state.journal import StateJournal
from stepwell.pool.state.slice import Slice
from stepwell.steps.columns import pack, unpack
from stepwell.steps.step import Exactness, Step, ids_array, logprobs_array

EVERYTHING = StepFilter(Exactness.RETOKENIZED, untrainable=True)
"""The filter of a consumer that takes all there is."""
MEMORY = Path("/dev/shm")


def new_folder() -> Path:
    """In memory where there is such a file system: a journal that is opened a thousand times waits for no disk."""
    return Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))


def make_step(trajectory_uid: str = "t", prompt_uid: str = "p", **fields: Any) -> Step:
    response = fields.pop("response_ids", [3, 4])
    fields.setdefault("response_logprobs", logprobs_array([-0.5] * len(response)))
    return Step(
        trajectory_uid=trajectory_uid,
        prompt_uid=prompt_uid,
        prompt_ids=ids_array(fields.pop("prompt_ids", [1, 2])),
        response_ids=ids_array(response),
        **fields,
    )


def make_group(
    prompt: str, size: int, source: str = "", *, channel: str = "train", **step: Any
) -> tuple[list[Step], list[Registration]]:
    """A scored group as an environment sends it: whole trajectories of one step each, and their registrations."""
    uids = [f"{prompt}-{n}" for n in range(size)]
    fields = {"step_index": 0, "is_last": True, "reward": 1.0, **step}
    steps = [make_step(uid, prompt, uid=f"{uid}-0", **fields) for uid in uids]
    return steps, [Registration(uid, prompt, channel, size, source=source) for uid in uids]


def same_step(a: Step, b: Step) -> bool:
    """Equal in every field, arrays by value, dtype and length."""

    def comparable(value: object) -> object:
        return (value.dtype, value.tolist()) if hasattr(value, "dtype") and hasattr(value, "tolist") else value

    return all(comparable(getattr(a, name)) == comparable(getattr(b, name)) for name in Step.__dataclass_fields__)


class EasyPool(Pool):
    """The pool's rules with the calls tests make most: steps unpacked, batches acknowledged as they are taken."""

    leases = 0

    def __init__(
        self, limits: Limits, journal: StateJournal | None = None, slices: Sequence[type[Slice]] | None = None
    ) -> None:
        """`slices` are all of a shard's unless others are given; they read archives, which not every test can."""
        if slices is None:
            from stepwell.pool.slices.all import SLICES

            slices = SLICES
        super().__init__(limits, journal, slices)

    @property
    def curator(self) -> Curator:
        return Curator(self.state)

    @classmethod
    def over(cls, pool: Pool) -> "EasyPool":
        """The same pool, with these calls."""
        easy = cls.__new__(cls)
        easy.__dict__ = pool.__dict__
        return easy

    def register(self, wanted: Registration) -> None:
        self.ingest.register(wanted)

    def submit(
        self, steps: Sequence[Step], *, channel: str | None = None, group_size: int | None = None
    ) -> list[SubmitVerdict]:
        return self.ingest.submit(pack(steps), channel=channel, group_size=group_size)

    def complete(self, trajectory_uid: str, prompt_uid: str, reward: float | None = None) -> EndResult:
        return self.ingest.complete(trajectory_uid, prompt_uid, reward)

    def abort(self, trajectory_uid: str, prompt_uid: str) -> EndResult:
        return self.ingest.abort(trajectory_uid, prompt_uid)

    def channel_if_open(self, trajectory_uid: str, prompt_uid: str) -> str | None:
        return self.ingest.channel_if_open(trajectory_uid, prompt_uid)

    def lease(
        self, count: int, channel: str = "train", *, seconds: float = 60.0, **how: Any
    ) -> tuple[str, LeasedGroups] | None:
        """A lease's name and what is under it."""
        self.leases += 1
        uid = f"lease-{self.leases}"
        taken = self.leasing.take(BatchRequest(count=count, channel=channel, **how), uid, self.state.now + seconds)
        return None if taken is None else (uid, taken)

    def take(self, count: int, channel: str = "train", **how: Any) -> list[list[Step]] | None:
        leased = self.lease(count, channel, **how)
        if leased is None:
            return None
        assert self.leasing.ack(leased[0]) is Settlement.DONE
        return in_groups(leased[1])

    def send_group(self, prompt: str, size: int, source: str = "", **how: Any) -> list[SubmitVerdict]:
        steps, registrations = make_group(prompt, size, source, **how)
        return self.ingest.submit_groups(pack(steps), registrations)

    def fill(
        self,
        trajectories: int,
        channel: str = "train",
        *,
        shares: Mapping[str, float] | None = None,
        seconds: float = 60.0,
        step_filter: StepFilter = EVERYTHING,
    ) -> tuple[str, LeasedGroups] | None:
        """A lease's name and what is under it: groups with exactly that many trajectories."""
        request = ExactFill(
            trajectories=trajectories, channel=channel, shares=shares or {}, lease=seconds, step_filter=step_filter
        )
        share = self.state.limits.max_share_per_user
        chosen = choose_groups(self.leasing.offers(request), trajectories, request.shares, share)
        if chosen is None:
            return None
        self.leases += 1
        uid = f"lease-{self.leases}"
        taken = self.leasing.take_offers(request, chosen, uid, self.state.now + seconds)
        assert taken is not None, "what was just offered is gone"
        return uid, taken

    def take_unscored(
        self, count: int = 100, lease_uid: str = "lease", *, seconds: float = 60.0, by_step: bool = False
    ) -> list[list[Step]]:
        """Trajectories for a reward worker, under that lease."""
        columns = self.rewards_due.take(count, lease_uid, self.state.now + seconds, by_step=by_step)
        steps = [] if columns is None else unpack(columns, copy=False)
        return [list(found) for _, found in groupby(steps, key=lambda step: step.trajectory_uid)]

    def judge(
        self,
        uid: str,
        prompt: str,
        score: Score | float | JudgementOutcome,
        lease_uid: str = "lease",
        steps: Sequence[str] = (),
    ) -> bool:
        """A worker's judgement: a score, or how it failed."""
        value = score if isinstance(score, Score) else None if isinstance(score, JudgementOutcome) else Score(score)
        judgement = Judgement(
            trajectory_uid=uid,
            prompt_uid=prompt,
            lease_uid=lease_uid,
            attempt=Attempt(score if isinstance(score, JudgementOutcome) else JudgementOutcome.SCORE, value),
            source="judge",
            steps=tuple(steps),
        )
        return self.rewards_due.settle([judgement])[0]

    def rollout(self, uid: str, prompt: str, reward: float | None = 1.0, *, size: int = 1, **step: Any) -> None:
        """One whole trajectory of one step, in the channel `train`."""
        self.register(Registration(uid, prompt, group_size=size))
        assert self.submit([make_step(uid, prompt, **{"uid": f"{uid}-0", **step})]) == [SubmitVerdict.ACCEPTED]
        assert self.complete(uid, prompt, reward) is EndResult.COMPLETED


def in_groups(taken: LeasedGroups) -> list[list[Step]]:
    steps = iter(unpack(taken.columns, copy=False))
    return [[next(steps) for _ in range(size)] for size in taken.group_sizes]
