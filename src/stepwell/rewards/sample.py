"""The Sample: one trajectory as a reward function sees it.

What always holds: ids are the engine's own; texts are decoded from them when they are first read, and a function that
reads none costs no decoding; what the model wrote is never read for the marks of a chat template, so that it cannot put
words into someone else's mouth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from stepwell.common.tokenizers import Decode, no_tokenizer
from stepwell.pool.api.scoring import RewardRequest
from stepwell.steps.step import IntArray, Json, JsonObject, Step, ids_array
from stepwell.steps.templates import Message, read_messages, without_end

SIDE_CALL = "side_call:"


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleStep:
    """One LLM call of the trajectory."""

    prompt_ids: IntArray
    response_ids: IntArray
    finish_reason: str | None = None
    untrainable: str | None = None
    """Why it is not trained; None for an ordinary step."""
    texts: tuple[str, str] | None = field(default=None, repr=False)
    """Prompt and response, where someone has decoded them already."""
    decode: Decode = field(default=no_tokenizer, repr=False)

    @cached_property
    def prompt_text(self) -> str:
        """As the engine read it, the chat template's marks included."""
        return self.texts[0] if self.texts else self.decode(self.prompt_ids.tolist())

    @cached_property
    def response_text(self) -> str:
        """What the model wrote, without the mark that ends its turn."""
        return without_end(self.texts[1] if self.texts else self.decode(self.response_ids.tolist()))


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    trajectory_uid: str
    prompt_uid: str
    metadata: JsonObject
    """Dataset fields, data source and the like."""
    steps: tuple[SampleStep, ...]
    """In order; all that are held, those that will not be trained too."""
    num_turns: int

    @property
    def prompt_text(self) -> str:
        """What the conversation began with."""
        return self._conversation[0].prompt_text

    @property
    def response_text(self) -> str:
        """What the conversation ended with."""
        return self._conversation[-1].response_text

    @cached_property
    def messages(self) -> list[Message]:
        """The conversation in its last state, as {"role": …, "content": …}."""
        last = self._conversation[-1]
        return read_messages(last.prompt_text, last.response_text)

    @cached_property
    def _conversation(self) -> tuple[SampleStep, ...]:
        """Without the harness's side calls (titles, summaries), unless there is nothing else."""
        kept = tuple(step for step in self.steps if not (step.untrainable or "").startswith(SIDE_CALL))
        return kept or self.steps

    def decoded_by(self, decode: Decode) -> "Sample":
        return replace(self, steps=tuple(replace(step, decode=decode) for step in self.steps))


def sample_of(steps: Sequence[Step], decode: Decode = no_tokenizer) -> Sample:
    """The sample of a trajectory's steps, which come in order; there is at least one."""
    metadata: dict[str, Json] = {}
    for step in steps:
        metadata.update(step.metadata)
    return Sample(
        trajectory_uid=steps[0].trajectory_uid,
        prompt_uid=steps[0].prompt_uid,
        metadata=metadata,
        steps=tuple(
            SampleStep(
                prompt_ids=step.prompt_ids,
                response_ids=step.response_ids,
                finish_reason=step.finish_reason,
                untrainable=step.untrainable,
                decode=decode,
            )
            for step in steps
        ),
        num_turns=len(steps),
    )


def sample_of_request(request: RewardRequest) -> Sample:
    """The sample of a trajectory that is in no pool. What the dataset says stands above what the agent says."""
    step = SampleStep(
        prompt_ids=ids_array(request.prompt_ids),
        response_ids=ids_array(request.response_ids),
        texts=(request.prompt_text, request.response_text),
    )
    metadata = {**request.extra_fields, **request.dataset_fields}
    return Sample(trajectory_uid="", prompt_uid="", metadata=metadata, steps=(step,), num_turns=request.num_turns)
