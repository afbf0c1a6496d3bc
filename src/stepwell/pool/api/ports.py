"""How other rooms see the pool and the reward workers, as Protocols. wiring/ hands the implementations in.

Every call to the pool raises PoolUnavailable instead of waiting without end.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from stepwell.pool.api.calls import CallBegun, HeldCalls
from stepwell.pool.api.curation import AuditPage, Curation, CurationOutcome
from stepwell.pool.api.leasing import HasLeases, LeasedGroups, ReadyGroups
from stepwell.pool.api.pacing import Pacing
from stepwell.pool.api.policy import PolicyStatus
from stepwell.pool.api.preview import BatchPreview
from stepwell.pool.api.producing import TRAIN, EndResult, RecordedTurn, Registration, RewardGiven, SubmitVerdict
from stepwell.pool.api.scoring import Judgement, RewardRequest, RewardScore
from stepwell.pool.api.series import TimeSeries
from stepwell.pool.api.serving_state import Serving
from stepwell.pool.api.sessions import SessionCall, SessionPlace
from stepwell.pool.api.stats import PoolStats
from stepwell.pool.api.watching import Changes, Cursor
from stepwell.steps.columns import Columns
from stepwell.steps.step import JsonObject, Step


class EngineDirectory(Protocol):
    """The policy version and the list of engines, which all gateways and trainers share."""

    @property
    def serving(self) -> Serving | None:
        """The newest that the pool has reported; None before its first answer."""

    async def serving_after(self, seen: Serving | None) -> Serving:
        """As soon as the pool reports another than `seen`."""

    async def change_engines(self, *, add: tuple[str, ...] = (), remove: tuple[str, ...] = ()) -> None:
        """Engines join and leave, for all gateways and trainers."""

    async def report_engines(self, versions: Mapping[str, int | None]) -> bool | None:
        """Tell the pool which version each engine reports, by address: 0 are the weights that it was started with, None
        is unknown. The answer: whether a trainer lives that syncs weights, True also if the pool cannot be asked; None
        if this process is not known to the pool yet."""


class StepSink(EngineDirectory, Protocol):
    """The DataPool, as a gateway sees it."""

    @property
    def policy_version(self) -> int:
        """The newest version that the pool has reported."""

    async def knows(self, trajectory_uid: str, prompt_uid: str) -> str | None:
        """The channel of an open trajectory; None if it is not open."""

    async def channel_of(self, trajectory_uid: str, prompt_uid: str) -> str | None:
        """The channel of a trajectory that the pool holds, open or ended; None if it holds no such one."""

    async def place_session(self, call: SessionCall) -> SessionPlace | None:
        """The trajectory that a session is in. If none is open, one is opened, unless the call says otherwise."""

    async def find_session(self, user: str, replied: str) -> str:
        """The id of this user's session that a call continues whose history has this digest; empty if there is none."""

    async def turns(self, trajectory_uid: str, prompt_uid: str, replied: str) -> list[RecordedTurn]:
        """The steps of an open trajectory that a call continues whose history has this digest."""

    async def step_extras(self, trajectory_uid: str, prompt_uid: str, name: str, uid: str) -> dict[str, JsonObject]:
        """What the steps of an open trajectory have under this name in their extras, by the steps' uids. If the step
        `uid` is not among them, other gateways are asked whether they hold it."""

    async def register_trajectory(self, registration: Registration) -> None: ...

    async def move_trajectory(self, trajectory_uid: str, prompt_uid: str, to_prompt_uid: str) -> None:
        """An open trajectory joins another group. Conflict if it has steps."""

    async def pool_uid(self) -> str:
        """Another pool of the same name has another one. Empty for a pool without journals."""

    async def shard_finder(self) -> Callable[[str], str]:
        """Which shard has the groups of a prompt_uid, so that what is sent to one need not wait for another."""

    async def submit_steps(
        self, steps: Sequence[Step], *, channel: str | None = None, group_size: int | None = None
    ) -> list[SubmitVerdict]:
        """One verdict per step, in order. Safe to repeat: a step is accepted once."""

    async def complete_trajectory(
        self, trajectory_uid: str, prompt_uid: str, reward: float | None, failure: str = ""
    ) -> EndResult:
        """A rollout in which the policy failed counts in its group even if no call of it was recorded."""

    async def begin_call(self, call: CallBegun) -> None:
        """An engine was asked for a step of an open trajectory. The pool's answer may wait for other announcements."""

    async def end_call(self, trajectory_uid: str, prompt_uid: str, uid: str, *, is_lost: bool) -> None:
        """An announced call brings no step. `is_lost`: it had one, which the gateway has given up."""

    def hurry(self) -> None:
        """Send announcements that wait for others now."""

    async def follow_flushes(
        self, flush: Callable[[str], Awaitable[None]], held: Callable[[], HeldCalls] = HeldCalls, gateway: str = ""
    ) -> None:
        """Serve trajectories as a gateway, until cancelled. `flush` is called with a trajectory_uid when the pool needs
        all steps that are held here; it returns when the pool has them. `held` is what it knows of its
        calls. The name of this process begins with `gateway`."""

    async def stop_serving(self) -> None:
        """This gateway ends, and holds nothing."""

    async def give_reward(self, reward: RewardGiven) -> bool:
        """True if it is kept: for training, or, after the trajectory was handed out, in the archive."""

    async def mark_unseen(self, trajectory_uid: str, prompt_uid: str, step_uids: Sequence[str], reason: str) -> None:
        """What is known of who read these steps (see MarkUnseen). Safe to repeat."""

    async def abort_trajectory(self, trajectory_uid: str, prompt_uid: str) -> EndResult: ...

    async def forget(self, subject: str | None, older_than: float = 0.0) -> dict[str, Any]:
        """Remove everything of a subject, or everything that is older than so many seconds, for good. The receipt."""

    async def pacing(self, channel: str) -> Pacing: ...

    async def check(self) -> None:
        """Raise PoolUnavailable, with the reason, if the pool cannot be used now."""

    async def follow(self) -> None:
        """Keep `policy_version` and `serving` fresh, until cancelled."""


class RewardSource(Protocol):
    """The DataPool, as a reward worker sees it."""

    async def take_unscored(
        self, count: int, *, lease: float, timeout: float, by_step: bool = False
    ) -> tuple[str, list[list[Step]]] | None:
        """A reward lease, and the steps of up to `count` trajectories in order; None if there is none for `timeout`.

        A trajectory without a judgement after `lease` seconds is offered to other workers. `by_step` asks for open
        trajectories too, each time they have grown.
        """

    async def give_judgements(self, judgements: Sequence[Judgement]) -> list[bool]:
        """For each, whether it counted. Safe to repeat."""

    async def check(self) -> None: ...


class GroupExchange(Protocol):
    """The DataPool, as the Atropos server sees it."""

    @property
    def policy_version(self) -> int:
        """The newest version that the pool has reported."""

    async def submit_columns(self, columns: Columns, registrations: Sequence[Registration]) -> list[SubmitVerdict]:
        """Register trajectories and submit their steps, many groups in one call. One verdict per step, in order.

        Safe to repeat: a step is accepted once.
        """

    async def fill_batch(
        self,
        trajectories: int,
        *,
        channel: str,
        shares: Mapping[str, float],
        lease: float,
        min_exactness: str = "retokenized",
        untrainable: bool = True,
        heartbeats: bool = True,
    ) -> LeasedGroups | None:
        """The oldest groups with exactly that many trajectories, or None. Shares: see pool/rules/exact_batch.py.

        With `heartbeats` they go back to the queue soon after the death of this process. Without, they do unless they
        are acknowledged within `lease` seconds, by whatever process.
        """

    async def ack(self, leased: HasLeases) -> None:
        """It is delivered. LeaseExpired if that took too long: then some of it is handed out again."""

    async def nack(self, leased: HasLeases) -> None:
        """It is not delivered: it goes back to the head of the queue."""

    async def ready_groups(self, channel: str) -> ReadyGroups: ...

    async def clear(self, channel: str) -> int:
        """Drop every group that is not under lease. Returns their number."""

    async def check(self) -> None: ...

    async def follow(self) -> None: ...


class PoolReader(Protocol):
    """The DataPool, as a watcher sees it: the dashboard, an export. Reading changes nothing.

    Answers about the whole pool name the shards that did not answer, and do without them.
    """

    async def stats(self) -> PoolStats: ...

    async def series(self, *, seconds: float) -> TimeSeries:
        """What happened in the last `seconds`. The shorter the time, the finer the intervals."""

    async def changes(self, cursors: Mapping[str, Cursor], limit: int = 2_000) -> Changes:
        """At most about `limit`. Without cursors, from the start: all that is held and the last that are gone."""

    async def policy_status(self, channel: str = TRAIN) -> PolicyStatus:
        """Which version serves which sessions, the last decisions, and what the versions earned in that channel."""

    async def preview(self, channel: str) -> BatchPreview:
        """The batch that a fetch would get now, as the channel's trainer asked for it last."""

    async def read(self, uids: Sequence[tuple[str, str]]) -> Columns:
        """The steps of these (trajectory_uid, prompt_uid), in order; none for what the pool no longer holds."""

    async def curate(self, curation: Curation) -> CurationOutcome: ...

    async def audit(self, limit: int = 200, trajectory_uid: str | None = None) -> AuditPage:
        """The last decisions, newest first."""

    async def check(self) -> None: ...


class RayLinkStatus(Protocol):
    """The link to Ray, as a gateway shows it."""

    @property
    def is_joined(self) -> bool: ...

    @property
    def starts(self) -> int:
        """How often its process was started."""


class RewardScorer(Protocol):
    """A reward worker, as a gateway sees it. A failure raises RewardFailed; it is never a score of zero."""

    async def compute_reward(self, request: RewardRequest) -> RewardScore: ...

    async def check(self) -> None: ...
