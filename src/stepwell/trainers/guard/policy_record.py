"""The knowledge and the decisions of the guard: its state and the weights of the last versions on disk, and what it
tells the pool.

    guard.json      what the guard knows (GuardState)
    version-7.pt    the state_dict of the model at version 7
    scores-7.json   what version 7 earned in validation, by task

- Each file is whole or absent, at whatever moment the process dies.
- A decision is told to the pool before it is written here. If the process dies between the two, the pool's decision is
  found and obeyed like an operator's.
- `lock` is held while the state changes. It is taken after all other locks.
"""

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stepwell.common.files import SUFFIX, replacing_file
from stepwell.errors import BadRequest
from stepwell.pool.api.policy import Canary, PolicyAction, PolicyDecision
from stepwell.pool.client import DataPool
from stepwell.trainers.guard.guard_settings import GuardSettings
from stepwell.trainers.guard.statistics import ComparisonState, Scores, mean_of
from stepwell.trainers.transfers import TensorState

if TYPE_CHECKING:
    import torch

log = logging.getLogger("stepwell.trainers")

STATE_FILE = "guard.json"
WEIGHTS = "version-"
ENDING = ".pt"
SCORES = "scores-"
Phase: TypeAlias = Literal["idle", "placing", "testing", "promoting"]
"""`placing`: the candidate's weights are on their way to the canary's engines. `testing`: they serve sessions.
`promoting`: the weights are on their way to all engines."""
GUARD = "guard"


@dataclass(frozen=True, slots=True)
class GuardState:
    """The part of the guard's state that outlives the process."""

    stable: int | None = None
    """The version that all sessions get, but for the canary's."""
    candidate: int | None = None
    """The version that is placed, tested or promoted."""
    newest: int | None = None
    """The newest version that passed validation and waits to become the candidate."""
    last: int = -1
    """The largest number that a version has had."""
    phase: Phase = "idle"
    reason: str = ""
    """Why the candidate is promoted."""
    engines: Sequence[str] = ()
    """The addresses of the engines of the canary."""
    began_at: float = 0.0
    """When the canary began, in seconds since 1970."""
    alarmed_at: float = 0.0
    """The age of the canary at its last alarm, in seconds."""
    test: ComparisonState = field(default_factory=ComparisonState)
    cursor: dict[str, str] | None = None
    """Where the pool's rewards that were read end."""
    restores: bool = False
    """The trainer must start again from the stable version."""
    refusals: int = 0
    """Versions in a row that did not pass validation, until now."""

    def engines_of(self, version: int, listed: Sequence[str]) -> list[str]:
        """Which of the listed engines shall have the weights of this version."""
        if self.stable is None or (self.phase == "promoting" and version == self.candidate):
            return list(listed)
        has_canary = self.phase in ("placing", "testing")
        if version == self.candidate and has_canary:
            return [engine for engine in listed if engine in self.engines]
        if version == self.stable and self.phase != "promoting":
            return [engine for engine in listed if not (has_canary and engine in self.engines)]
        return []


class VersionStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self._folder.glob(f"*{SUFFIX}"):
            unfinished.unlink()

    def write_state(self, state: GuardState) -> None:
        with replacing_file(self._folder / STATE_FILE) as file:
            file.write(json.dumps(asdict(state)).encode())

    def read_state(self) -> GuardState:
        """A new one if there is none."""
        path = self._folder / STATE_FILE
        if not path.exists():
            return GuardState()
        try:
            found = json.loads(path.read_bytes())
            test = _known(ComparisonState, found.pop("test", {}))
            return GuardState(**_known(GuardState, found), test=ComparisonState(**test))
        except (ValueError, TypeError, AttributeError) as failure:
            raise BadRequest(
                f"{path} cannot be read ({failure}); bring it back, or remove it: the next start says what to do"
            ) from None

    def save(self, model: "torch.nn.Module", version: int) -> None:
        import torch

        with replacing_file(self._path(version)) as file:
            torch.save({name: value.detach().cpu() for name, value in model.state_dict().items()}, file)

    def load(self, version: int) -> TensorState:
        import torch

        if version not in self.versions():
            raise BadRequest(
                f"{self._folder} does not have the weights of version {version}; bring them back, or remove its "
                f"{STATE_FILE}: the next start says what to do"
            )
        state: TensorState = torch.load(self._path(version), map_location="cpu", weights_only=True)
        return state

    def save_scores(self, scores: Scores | None, version: int) -> None:
        if scores is None:
            return
        with replacing_file(self._scores_path(version)) as file:
            file.write(json.dumps(dict(scores)).encode())

    def scores(self, version: int) -> Scores | None:
        """The scores of a version; None if it was not validated."""
        path = self._scores_path(version)
        scores: Scores | None = json.loads(path.read_bytes()) if path.exists() else None
        return scores

    def versions(self) -> list[int]:
        names = [path.name[len(WEIGHTS) : -len(ENDING)] for path in self._folder.glob(f"{WEIGHTS}*{ENDING}")]
        return sorted(int(name) for name in names if name.isdecimal())

    def prune(self, keep: int, needed: Sequence[int]) -> None:
        """Removes all but `keep` versions: those that are needed, and the newest ones."""
        others = [version for version in self.versions() if version not in needed]
        for version in others[: max(0, len(others) + len(needed) - keep)]:
            self._path(version).unlink()
            self._scores_path(version).unlink(missing_ok=True)

    def _scores_path(self, version: int) -> Path:
        return self._folder / f"{SCORES}{version}.json"

    def _path(self, version: int) -> Path:
        return self._folder / f"{WEIGHTS}{version}{ENDING}"


def _known(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """The values without fields that another release wrote."""
    assert is_dataclass(cls)
    names = {each.name for each in fields(cls)}
    return {name: value for name, value in values.items() if name in names}


class PolicyRecord:
    def __init__(
        self, pool: DataPool, store: VersionStore, settings: GuardSettings, clock: Callable[[], float]
    ) -> None:
        self.state = store.read_state()
        """Replaced as a whole at each change."""
        self.lock = threading.RLock()
        self.clock = clock
        self.decisions: Counter[PolicyAction] = Counter()
        """The decisions that this process has made."""
        self.last_reason = ""
        self.is_restore_delivered = False
        """The trainer has got the weights that it must start again from."""
        self._pool = pool
        self._store = store
        self._settings = settings

    def set(self, **changes: Any) -> None:
        """Writes to disk first: a change that was not written did not happen."""
        changed = replace(self.state, **changes)
        self._store.write_state(changed)
        self.state = changed

    def decide(
        self,
        version: int,
        action: PolicyAction,
        reason: str,
        *,
        canary: Canary | None = None,
        policy_version: int | None = None,
    ) -> None:
        decision = PolicyDecision(version=version, action=action, by=GUARD, reason=reason, at=self.clock())
        self._pool.decide(decision, canary, policy_version)
        self.decisions[action] += 1
        self.last_reason = reason
        is_bad_news = action in ("refuse", "overdue", "rollback")
        log.log(logging.WARNING if is_bad_news else logging.INFO, "version %d: %s: %s", version, action, reason)

    def check_beginning(self, version: int) -> None:
        """BadRequest if the pool has decided about versions before, and does not know this one as good: the folder was
        lost, and nobody knows whether the trainer's weights come from a version that was rolled back."""
        decisions, served = self._pool.decisions(), self._pool.policy_version
        own = next((found for found in reversed(decisions) if found.version == version), None)
        if not decisions or (own is not None and own.action == "promote" and version >= served):
            return
        if own is None:
            why = f"it knows nothing of version {version}"
        elif own.action == "promote":
            why = f"version {version} is older than version {served}, which the pool serves"
        else:
            why = f"version {version}: {own.action} by {own.by}: {own.reason}"
        newest = max(served, *(found.version for found in decisions))
        allowed = max(version, newest + 1)
        raise BadRequest(
            f"the guard's folder has no stable version, and the pool has decided about versions before; {why}. Bring "
            "the folder back. If it is lost, start the trainer from weights that you trust, as a version that is new "
            f"(trainer.version = {allowed}), and allow it first: stepwell policy promote --version {allowed}"
        )

    def check_folder(self) -> None:
        """BadRequest if the folder is older than what the pool serves: engines would get older weights."""
        known = max(number for number in (self.state.stable, self.state.candidate, -1) if number is not None)
        if (served := self._pool.policy_version) > known:
            raise BadRequest(
                f"the guard's folder is an old one: it ends with version {known}, and the pool serves version {served}."
                " Bring back the newest folder. If it is lost, empty this one; the next start says what to do"
            )

    def is_withdrawn(self, version: int) -> bool:
        own = [found.action for found in self._pool.decisions() if found.version == version]
        return bool(own) and own[-1] in ("refuse", "rollback")

    def begin_canary(self, candidate: int, reason: str) -> None:
        known, now = self._pool.canary(), self.clock()
        cursor = self.state.cursor or self._pool.version_rewards(self._settings.channel).cursor
        if known is None or known.version != candidate:
            canary = Canary(candidate, tuple(self.state.engines), self._settings.canary_share, now)
            self.decide(candidate, "canary", reason, canary=canary)
        began_at = self.state.began_at if self.state.phase == "testing" else now
        self.set(phase="testing", began_at=began_at, cursor=cursor)

    def roll_back(self, reason: str, *, is_told: bool = False, is_bad: bool = True) -> None:
        """`is_told`: the pool knows it. A version that is not bad is tried again, unless there is a newer one."""
        version = self.state.candidate
        assert version is not None
        if not is_told:
            self.decide(version, "rollback", reason)
        newest = None if is_bad else self.newest_or(version)
        restores = self.state.restores or is_bad
        self.set(phase="idle", candidate=None, newest=newest, engines=(), cursor=None, restores=restores)
        self.is_restore_delivered = self.is_restore_delivered and not is_bad
        self.last_reason = reason

    def engines_of(self, version: int) -> Sequence[str]:
        return self.state.engines_of(version, self._pool.engines())

    def newest_or(self, version: int) -> int:
        return version if self.state.newest is None else self.state.newest

    def text_of(self, version: int, text: str) -> str:
        """The text of a decision, with what the version earned in validation."""
        scores = self._store.scores(version)
        return f"{text}, no validation" if scores is None else f"{text}, validation {mean_of(scores):.3f}"
