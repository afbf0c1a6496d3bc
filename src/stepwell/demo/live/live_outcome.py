"""The outcome of a live run: from the users' turns, the guard's decisions and the pool's snapshots of all sessions."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stepwell.demo.live.turns import UserTurn, acceptance, failures, recent_acceptance, running_acceptance
from stepwell.pool.api.policy import PolicyAction, PolicyDecision
from stepwell.pool.api.watching import TrajectorySnapshot

GOAL = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonedUpdate:
    """What became of the update that was spoiled on purpose."""

    version: int
    canary_at: float | None = None
    """Seconds after the start of the run; None if no session got it."""
    rolled_back_at: float | None = None
    """The same; None if it was not rolled back."""
    promoted: bool = False
    sessions: int = 0
    """Sessions of which it said something."""
    share: float = 0.0
    """The same as a share of all sessions."""
    reason: str = ""
    """Of the last decision about it."""

    @property
    def seconds(self) -> float | None:
        """From the start of its canary to its rollback."""
        if self.canary_at is None or self.rolled_back_at is None:
            return None
        return self.rolled_back_at - self.canary_at


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOutcome:
    seed: int
    updates: int
    seconds: float
    """Duration of the whole run, with the start of vLLM and the warm-up."""
    start: float | None
    """Acceptance before the first update reached all users."""
    end: float | None
    """Acceptance of the last replies."""
    goal: float = GOAL
    goal_at: float | None = None
    """Seconds after the start of the run at which the running acceptance first reached the goal."""
    sessions: int
    replies: int
    thumbs: int
    failed_calls: Mapping[str, int] = field(default_factory=dict)
    """By cause."""
    decisions: Mapping[str, int] = field(default_factory=dict)
    """Of the guard, by action."""
    poisoned: PoisonedUpdate | None = None

    def text(self) -> str:
        """A sentence for each fact."""
        lines = [
            f"acceptance by users: {shown(self.start)} before, {shown(self.end)} after {self.updates} updates",
            f"{self.goal:g} was reached after {self.goal_at:.0f} s"
            if self.goal_at is not None
            else f"{self.goal:g} was not reached",
            f"{self.sessions} sessions, {self.replies} replies, {self.thumbs} thumbs, "
            f"{sum(self.failed_calls.values())} failed calls",
        ]
        return "; ".join((*lines, self._poison_text()))

    def write(self, path: Path) -> None:
        poisoned = self.poisoned and {**asdict(self.poisoned), "seconds": self.poisoned.seconds}
        path.write_text(json.dumps({"task": "live", **asdict(self), "poisoned": poisoned}, indent=2) + "\n")

    def _poison_text(self) -> str:
        update = self.poisoned
        if update is None:
            return "no update was poisoned"
        served = f"{update.sessions} sessions ({update.share:.1%})"
        if update.seconds is None:
            return f"the poisoned version {update.version} was not rolled back, and served {served}"
        return (
            f"the poisoned version {update.version} was rolled back after {update.seconds:.1f} s, and served {served}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRecord:
    """What is known at the end of a run."""

    began_at: float
    """Seconds since 1970."""
    turns: Sequence[UserTurn]
    decisions: Sequence[PolicyDecision]
    snapshots: Sequence[TrajectorySnapshot]
    poisoned: int | None
    """The version that was spoiled."""

    def outcome(self, *, seed: int, updates: int, seconds: float) -> LiveOutcome:
        return LiveOutcome(
            seed=seed,
            updates=updates,
            seconds=seconds,
            start=acceptance(self._before_first_promotion()),
            end=recent_acceptance(self.turns),
            goal_at=next((at - self.began_at for at, mean in running_acceptance(self.turns) if mean >= GOAL), None),
            sessions=len({turn.session for turn in self.turns}),
            replies=sum(not turn.failure for turn in self.turns),
            thumbs=sum(turn.thumb for turn in self.turns),
            failed_calls=dict(failures(self.turns)),
            decisions=self._actions(),
            poisoned=None if self.poisoned is None else self._poisoned_update(self.poisoned),
        )

    def _before_first_promotion(self) -> Iterable[UserTurn]:
        promotions = [decision.at for decision in self.decisions if decision.action == "promote"]
        promoted_at = promotions[1] if len(promotions) > 1 else None  # the first version is promoted before users come
        return (turn for turn in self.turns if promoted_at is None or turn.at < promoted_at)

    def _actions(self) -> dict[str, int]:
        actions = [decision.action for decision in self.decisions]
        return {action: actions.count(action) for action in sorted(set(actions))}

    def _poisoned_update(self, version: int) -> PoisonedUpdate:
        at = {d.action: d.at for d in self.decisions if d.version == version}
        reasons = [d.reason for d in self.decisions if d.version == version]
        sessions = [session_of(snapshot) for snapshot in self.snapshots]
        served = {session_of(snapshot) for snapshot in self.snapshots if _is_served_by(snapshot, version, at)}
        return PoisonedUpdate(
            version=version,
            canary_at=self._since_start(at.get("canary")),
            rolled_back_at=self._since_start(at.get("rollback")),
            promoted="promote" in at,
            sessions=len(served),
            share=len(served) / max(1, len(set(sessions))),
            reason=reasons[-1] if reasons else "",
        )

    def _since_start(self, at: float | None) -> float | None:
        return None if at is None else at - self.began_at


def session_of(snapshot: TrajectorySnapshot) -> str:
    """All trajectories of a session have the same prompt_uid."""
    return snapshot.prompt_uid


def shown(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.3f}"


def _is_served_by(snapshot: TrajectorySnapshot, version: int, at: Mapping[PolicyAction, float]) -> bool:
    """A session that began before the rollback and whose versions are on both sides counts too: perhaps it was."""
    oldest, newest = snapshot.oldest_version, snapshot.newest_version
    if oldest is None or newest is None or not oldest <= version <= newest:
        return False
    return version in (oldest, newest) or snapshot.started_at <= at.get("rollback", snapshot.started_at)
