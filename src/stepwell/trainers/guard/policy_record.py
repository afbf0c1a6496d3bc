"""The knowledge and the decisions of the guard: its state on disk, and what it tells the pool.

- A decision is told to the pool before it is written here. If the process dies between the two, the pool's decision is
  found and obeyed like an operator's.
- `lock` is held while the state changes. It is taken after all other locks.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stepwell.errors import BadRequest
from stepwell.pool.api.policy import Canary, PolicyAction, PolicyDecision
from stepwell.pool.client import DataPool
from stepwell.trainers.guard.guard_settings import GuardSettings
from stepwell.trainers.guard.statistics import mean_of

log = logging.getLogger("stepwell.trainers")

GUARD = "guard"


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
