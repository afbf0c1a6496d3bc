"""The outcome of a live run, and its picture: from the users' turns, the guard's decisions and the pool's snapshots of
all sessions.

What the users saw, reply by reply, is in a file that their process writes and the trainer's process follows. Each line
is one call of a session. A call that failed has its cause.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TextIO

from stepwell.demo.screen import DemoScreen, bar, picture, redrawn_chart
from stepwell.pool.api.policy import Canary, PolicyAction, PolicyDecision
from stepwell.pool.api.watching import TrajectorySnapshot

EVERY = 4
"""Updates per line."""
AGAINST = {"rollback": "rolled back", "refuse": "refused"}
"""The guard\'s decisions against a version."""
WINDOW = 200
"""Judged replies in a running acceptance."""
GOAL = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTurn:
    at: float
    """Seconds since 1970."""
    session: str
    accepted: bool | None = None
    """None: the user did not judge the reply, or there was none."""
    thumb: bool = False
    """The user pressed a thumb."""
    failure: str = ""
    """Why there was no reply."""


def write_turn(file: TextIO, turn: UserTurn) -> None:
    """The line is in the file at once."""
    file.write(json.dumps(asdict(turn)) + "\n")
    file.flush()


class TurnReader:
    """Reads a file that grows; `turns` has all that was read."""

    def __init__(self, path: Path) -> None:
        self.turns: list[UserTurn] = []
        self._path = path
        self._offset = 0

    def read(self) -> Sequence[UserTurn]:
        """The new turns. A line that is not whole yet is left for the next time."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        self._offset += len(whole) + 1 if whole else 0
        new = [UserTurn(**json.loads(line)) for line in whole.splitlines()]
        self.turns += new
        return new


def acceptance(turns: Iterable[UserTurn]) -> float | None:
    """The share of judged replies that users accepted; None if none was judged."""
    judged = [turn.accepted for turn in turns if turn.accepted is not None]
    return sum(judged) / len(judged) if judged else None


def recent_acceptance(turns: Sequence[UserTurn], window: int = WINDOW) -> float | None:
    return acceptance([turn for turn in turns[-2 * window :] if turn.accepted is not None][-window:])


def running_acceptance(turns: Sequence[UserTurn], window: int = WINDOW) -> list[tuple[float, float]]:
    """For each judged reply after the first `window`: its time, and the acceptance of the `window` up to it."""
    judged = [turn for turn in turns if turn.accepted is not None]
    sums = list(accumulate((bool(turn.accepted) for turn in judged), initial=0))
    return [(judged[end - 1].at, (sums[end] - sums[end - window]) / window) for end in range(window, len(judged) + 1)]


def failures(turns: Iterable[UserTurn]) -> Counter[str]:
    """Failed calls by cause."""
    return Counter(turn.failure for turn in turns if turn.failure)


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
    """The number of the guard's decisions, by action."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStatus:
    """One moment of a live run."""

    update: int
    updates: int
    acceptance: float | None
    """The share of the last replies that users accepted."""
    version: int
    """The version that all users get, except those of the canary."""
    canary: Canary | None
    decisions: Sequence[PolicyDecision] = ()
    """The guard's decisions since the moment before."""

    def text(self) -> str:
        canary, seen = self.canary, f"acceptance {shown(self.acceptance)}"
        tried = f", canary {canary.version} for {canary.share:.0%} of sessions" if canary is not None else ""
        return f"update {self.update:3d} of {self.updates}  {seen}  version {self.version}{tried}"


@contextmanager
def showing_acceptance(
    screen: DemoScreen, updates: int, *, is_plotting: bool
) -> Iterator[Callable[[LiveStatus], None]]:
    """Shows the acceptance by users with each update. A rollback or a refusal is always a line."""
    shares: list[float] = []
    with redrawn_chart(updates, is_plotting=is_plotting) as redraw:

        def show(status: LiveStatus) -> None:
            for decision in status.decisions:
                if (what := AGAINST.get(decision.action)) is not None:
                    screen.say(f"version {decision.version} was {what} by {decision.by}: {decision.reason}")
            shares.append(status.acceptance or 0.0)
            if redraw is not None:
                redraw(shares, status.text())
            elif status.update % EVERY == 0:
                screen.say(f"{status.text()}  {bar(shares[-1], 20)}")

        yield show
