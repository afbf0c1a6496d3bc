"""A generation on its way to the client, and what the three shapes of an answer have in common."""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from rig.fake_engine.asking import Ask, Json
from rig.fake_engine.faults import Faults
from rig.fake_engine.sampling import Output
from rig.fake_engine.scoring import scale_of

FINGERPRINT = "vllm-fake"


@dataclass(frozen=True, slots=True)
class Generation:
    ask: Ask
    faults: Faults
    outputs: list[Output]
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self) -> Json:
        """Token counts as a stream's last chunk has them."""
        prompt = len(self.ask.prompt_ids)
        completion = sum(len(output.ids) for output in self.outputs) + self.faults.wrong_usage
        return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}

    def full_usage(self) -> Json:
        """Token counts as an unstreamed answer has them."""
        return self.usage() | {"prompt_tokens_details": None, "completion_tokens_details": None}

    def is_last(self, output: Output, k: int) -> bool:
        return k >= len(output.ids) - 1

    def finish_at(self, output: Output, k: int) -> str | None:
        """The finish reason a chunk carries; vLLM sends an error as a payload of its own instead."""
        return output.finish_reason if self.is_last(output, k) and output.finish_reason != "error" else None

    def steps(self, output: Output) -> Iterator[int]:
        """One step a token. One without a token tells why there is none, or no further one (an error payload tells
        that by itself)."""
        if not output.ids and output.finish_reason == "error":
            return
        for k in count():
            is_last = self.is_last(output, k)
            yield k
            if is_last:
                return

    def longest(self) -> int:
        return max(max(len(output.ids), output.finish_reason != "error") for output in self.outputs)

    def abort(self, k: int) -> None:
        """End all choices before token k, unless they have ended already."""
        for output in self.outputs:
            if k < len(output.ids):
                output.cut(k, "abort")


class Shape(Protocol):
    """One way of asking, and the JSON of its answers. Chunks are made when sent, to show the weights in force; None
    stands for a token that is kept from the client."""

    def parse(self, body: Json) -> Ask: ...
    def answer(self, generation: Generation) -> Json: ...
    def opening(self, generation: Generation) -> list[Json]: ...
    def chunks(self, generation: Generation, output: Output) -> Iterator[Json | None]: ...
    def closing(self, generation: Generation) -> Json: ...


def others(count: int, temperature: float = 1.0) -> list[tuple[int, float]]:
    """Made-up alternatives that fill a list of `count` after the sampled token: capital letters, all unlikely."""
    return [(ord("A") + i, (-8.0 - i) / scale_of(temperature)) for i in range(min(max(count - 1, 0), 26))]
