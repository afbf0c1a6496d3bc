"""What a guard did, seen from outside: its state on disk as it changes, and its decisions in the pool's audit trail."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepwell.pool.api.policy import PolicyDecision
from stepwell.trainers.guard.policy_record import STATE_FILE

LOOK_INTERVAL = 0.05


@dataclass(slots=True)
class GuardHistory:
    """Follows the state on disk. A test whose counts fall, or a stable version that falls, has forgotten something."""

    folder: Path
    state: dict[str, Any] = field(default_factory=dict)
    """The last one that was seen."""
    went_back: list[str] = field(default_factory=list)

    async def follow(self) -> None:
        while True:
            file = self.folder / STATE_FILE
            if file.exists():
                self.note(json.loads(await asyncio.to_thread(file.read_bytes)))
            await asyncio.sleep(LOOK_INTERVAL)

    async def is_testing(self) -> bool:
        """Does a canary serve sessions now?"""
        return self.state.get("phase") == "testing"

    def note(self, state: dict[str, Any]) -> None:
        before, self.state = self.state, state
        if not before:
            return
        for name in ("stable", "last"):
            if (state[name] or 0) < (before[name] or 0):
                self.went_back.append(f"{name} from {before[name]} to {state[name]}")
        if _test_of(state) != _test_of(before) or _test_of(state) is None:
            return
        for name in ("comparisons", "canary_rewards", "stable_rewards"):
            if state["test"][name] < before["test"][name]:
                self.went_back.append(f"{name} of version {state['candidate']}")


def _test_of(state: dict[str, Any]) -> tuple[int, float] | None:
    return (state["candidate"], state["began_at"]) if state["phase"] == "testing" else None


def contradictions(decisions: Iterable[PolicyDecision]) -> list[str]:
    """Decisions that cannot follow those before them."""
    stable, canary, found = -1, None, list[str]()
    for number, decision in enumerate(decisions):
        version = decision.version
        match decision.action:
            case "canary":
                is_possible, canary = canary is None and version > stable, version
            case "promote":
                is_possible = version > stable and (canary == version or number == 0)
                stable, canary = version, None
            case "rollback":
                is_possible, canary = canary == version, None
            case "overdue":
                is_possible = canary == version
            case "refuse":
                is_possible = version > stable and canary != version
        if not is_possible:
            found.append(f"{decision.action} {version} ({decision.by}: {decision.reason})")
    return found
