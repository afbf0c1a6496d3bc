"""What serves the policy: its version and the engines. A pool's first shard holds it for gateways and trainers."""

from dataclasses import dataclass

from stepwell.common.message_format import message


@message
@dataclass(frozen=True, slots=True)
class Serving:
    policy_version: int = 0
    engines: tuple[str, ...] | None = None
    """Addresses, in the order in which they joined; None if nobody has named one yet."""
    revision: int = 0
    """Grows with every change, as long as the shard's process lives."""
    epoch: str = ""
    """Names the shard's process. One without a journal begins again, so revisions of two processes do not compare."""

    def is_older_than(self, other: "Serving") -> bool:
        return self.epoch == other.epoch and self.revision < other.revision

    def changed(self, add: tuple[str, ...], remove: tuple[str, ...]) -> tuple[str, ...]:
        """The engines after some have joined and others have left."""
        return tuple(address for address in dict.fromkeys((*(self.engines or ()), *add)) if address not in remove)
