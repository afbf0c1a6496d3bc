"""What gateways last reported of their engines, and whether a trainer brings weights to them. Only in memory.

- A version that no engine reports is refused, because engines without a known version get no calls.
- Where nobody knows what the engines have, nothing is refused: without gateways, while an engine is paused or changes
  its weights, and with engines that never report a version.
- A trainer that syncs weights announces itself. As long as it is heard, versions are not refused, and gateways hold
  calls until engines have weights.
"""

from collections.abc import Callable, Collection, Mapping

ANNOUNCED_FOR = 90.0
"""Seconds. A trainer announces itself each second, but rests up to 60 after failures."""

MOST_REPORTS = 10_000
"""Of gateways. A gateway reports when its engines have changed, so what one reported counts whenever it lives."""


class EngineReports:
    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds, and never goes back."""
        self._clock = clock
        self._reports: dict[str, Mapping[str, int | None]] = {}
        """By gateway: the version of each engine that answers."""
        self._announced_at: float | None = None

    @property
    def is_sync_expected(self) -> bool:
        """A trainer that syncs weights was heard lately."""
        return self._announced_at is not None and self._clock() - self._announced_at < ANNOUNCED_FOR

    def announce_sync(self) -> None:
        self._announced_at = self._clock()

    def note(self, gateway: str, versions: Mapping[str, int | None]) -> None:
        """`versions` by the engines' addresses: 0 are the weights that an engine was started with, None is unknown."""
        self._reports.pop(gateway, None)
        self._reports[gateway] = versions
        if len(self._reports) > MOST_REPORTS:
            del self._reports[next(iter(self._reports))]

    def why_unreported(self, version: int, living: Collection[str]) -> str | None:
        """Why the policy cannot have this version, with what to do; None if it can. `living` are the gateways."""
        told = [versions for gateway, versions in self._reports.items() if gateway in living]
        reported = {engine: found for versions in told for engine, found in versions.items()}
        known = set(reported.values())
        if not known or None in known or version in known or self.is_sync_expected:
            return None
        shown = "; ".join(f"{engine} has {_named(found)}" for engine, found in sorted(reported.items()))
        return (
            f"no engine reports version {version}: {shown}. Engines without a known version would get no calls. "
            "WeightSync brings weights to the engines and then sets their version; if something else does, give the "
            f'engine its version first, by POST /update_weight_version {{"new_version": "{version}"}}. '
            f"set_policy_version({version}, check=False) sets it all the same"
        )


def _named(version: int | None) -> str:
    return f"version {version}" if version else "the weights that it was started with"
