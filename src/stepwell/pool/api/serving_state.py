"""What serves the policy: its version and the engines. A pool's first shard holds it for gateways and trainers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Serving:
    policy_version: int = 0
    engines: tuple[str, ...] | None = None
    """Addresses, in the order in which they joined; None if nobody has named one yet."""

    def changed(self, add: tuple[str, ...], remove: tuple[str, ...]) -> tuple[str, ...]:
        """The engines after some have joined and others have left."""
        return tuple(address for address in dict.fromkeys((*(self.engines or ()), *add)) if address not in remove)
