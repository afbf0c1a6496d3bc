"""The outcome of a live run, and its picture: from the users' turns, the guard's decisions and the pool's snapshots of
all sessions."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stepwell.demo.live_outcome import WINDOW, UserTurn, acceptance, failures, recent_acceptance, running_acceptance
from stepwell.demo.screen import picture
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
    seconds: float | None = None
    """From the start of its canary to its rollback."""
    promoted: bool = False
    sessions: int = 0
    """Sessions of which it said something."""
    share: float = 0.0
    """The same as a share of all sessions."""
    reason: str = ""
    """The reason of the last decision about it."""

    def text(self) -> str:
        served = f"and served {self.sessions} sessions ({self.share:.1%})"
        if self.seconds is None:
            return f"the poisoned version {self.version} was not rolled back, {served}"
        return f"the poisoned version {self.version} was rolled back after {self.seconds:.1f} s, {served}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOutcome:
    task: str = "live"
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
        return "; ".join((*lines, "no update was poisoned" if self.poisoned is None else self.poisoned.text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")


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
        promotions = [decision.at for decision in self.decisions if decision.action == "promote"]
        promoted_at = promotions[1] if len(promotions) > 1 else None  # the first version is promoted before users come
        return LiveOutcome(
            seed=seed,
            updates=updates,
            seconds=seconds,
            start=acceptance(turn for turn in self.turns if promoted_at is None or turn.at < promoted_at),
            end=recent_acceptance(self.turns),
            goal_at=next((at - self.began_at for at, mean in running_acceptance(self.turns) if mean >= GOAL), None),
            sessions=len({turn.session for turn in self.turns}),
            replies=sum(not turn.failure for turn in self.turns),
            thumbs=sum(turn.thumb for turn in self.turns),
            failed_calls=dict(failures(self.turns)),
            decisions=dict(sorted(Counter(decision.action for decision in self.decisions).items())),
            poisoned=None if self.poisoned is None else self._poisoned_update(self.poisoned),
        )

    def write_picture(self, title: str, path: Path) -> None:
        """Acceptance over time, with the versions' promotions and rollbacks."""
        points = running_acceptance(self.turns)
        promoted = [decision.at - self.began_at for decision in self.decisions if decision.action == "promote"]
        with picture(title, "seconds", "acceptance by users", path) as axes:
            seconds, means = [at - self.began_at for at, _ in points], [mean for _, mean in points]
            axes.plot(seconds, means, color="tab:blue", label=f"of the last {WINDOW} replies")
            axes.axhline(GOAL, color="grey", linewidth=0.8, linestyle="--")
            axes.plot(promoted, [0.02] * len(promoted), "|", color="tab:green", markersize=10, label="version promoted")
            self._mark_rollbacks(axes)

    def _poisoned_update(self, version: int) -> PoisonedUpdate:
        decisions = [decision for decision in self.decisions if decision.version == version]
        at = {decision.action: decision.at for decision in decisions}
        canary_at, rolled_back_at = at.get("canary"), at.get("rollback")
        served = [snapshot for snapshot in self.snapshots if _is_served_by(snapshot, version, at)]
        sessions, of_it = ({snapshot.prompt_uid for snapshot in each} for each in (self.snapshots, served))
        return PoisonedUpdate(
            version=version,
            canary_at=None if canary_at is None else canary_at - self.began_at,
            rolled_back_at=None if rolled_back_at is None else rolled_back_at - self.began_at,
            seconds=None if canary_at is None or rolled_back_at is None else rolled_back_at - canary_at,
            promoted="promote" in at,
            sessions=len(of_it),
            share=len(of_it) / max(1, len(sessions)),
            reason=decisions[-1].reason if decisions else "",
        )

    def _mark_rollbacks(self, axes: Any) -> None:
        canaries = {decision.version: decision.at for decision in self.decisions if decision.action == "canary"}
        label: str | None = "canary rolled back"
        for decision in self.decisions:
            if decision.action == "rollback":
                began, ended = (at - self.began_at for at in (canaries.get(decision.version, decision.at), decision.at))
                axes.axvspan(began, ended, color="tab:red", alpha=0.3, label=label)
                axes.annotate(f"v{decision.version}", (ended, 0.1), color="tab:red", fontsize=8)
                label = None


def shown(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.3f}"


def _is_served_by(snapshot: TrajectorySnapshot, version: int, at: Mapping[PolicyAction, float]) -> bool:
    """A session that began before the rollback and whose versions are on both sides counts too: perhaps it was."""
    oldest, newest = snapshot.oldest_version, snapshot.newest_version
    if oldest is None or newest is None or not oldest <= version <= newest:
        return False
    return version in (oldest, newest) or snapshot.started_at <= at.get("rollback", snapshot.started_at)
