"""The Sample: one trajectory as a reward function sees it.

- Ids are the engine's own. Texts are decoded when they are first read; a function that reads none costs no decoding.
- A response is never searched for chat template markers, so a model cannot forge messages of another role. Nor can
  what an agent or a tool says: a prompt whose messages write markers is one message.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from stepwell.common.tokenizers import Decode, no_tokenizer
from stepwell.pool.api.scoring import RewardRequest
from stepwell.steps.conversation import MARKERS_IN_TEXT, ChatMessage, read_messages, without_end
from stepwell.steps.step import IntArray, Json, JsonObject, Step, ids_array
from stepwell.steps.trainable import ASIDE, fault_kind


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleStep:
    """One LLM call of the trajectory."""

    prompt_ids: IntArray
    response_ids: IntArray
    finish_reason: str | None = None
    untrainable: str | None = None
    """The reason why the step is not trained; None if it is."""
    is_forgeable: bool = False
    """A message of the prompt writes a chat template's markers: what looks like turns may be none."""
    texts: tuple[str, str] | None = field(default=None, repr=False)
    """Prompt and response, if they are decoded already."""
    decode: Decode = field(default=no_tokenizer, repr=False)

    @property
    def is_aside(self) -> bool:
        """Whether the step is no part of the conversation: one of the harness's own calls (titles, summaries), an
        answer that nobody read, or a choice that was not continued."""
        return self.untrainable is not None and fault_kind(self.untrainable) in ASIDE

    @cached_property
    def prompt_text(self) -> str:
        """The prompt as the engine read it, with the chat template's markers."""
        return self.texts[0] if self.texts else self.decode(self.prompt_ids.tolist())

    @cached_property
    def response_text(self) -> str:
        """The text that the model wrote, without the marker that ends its turn."""
        return without_end(self.texts[1] if self.texts else self.decode(self.response_ids.tolist()))


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    trajectory_uid: str
    prompt_uid: str
    metadata: JsonObject
    """Dataset fields, data source and so on."""
    steps: tuple[SampleStep, ...]
    """The steps in order, untrained ones included."""
    num_turns: int

    @property
    def prompt_text(self) -> str:
        """The prompt of the first step."""
        return self._conversation[0].prompt_text

    @property
    def response_text(self) -> str:
        """The response of the last step."""
        return self._conversation[-1].response_text

    @cached_property
    def messages(self) -> list[ChatMessage]:
        """The whole conversation, each message as {"role": …, "content": …}."""
        last = self._conversation[-1]
        return read_messages(last.prompt_text, last.response_text, is_forgeable=last.is_forgeable)

    @cached_property
    def _conversation(self) -> tuple[SampleStep, ...]:
        """The steps of the conversation, without those aside, unless there is nothing else."""
        return tuple(step for step in self.steps if not step.is_aside) or self.steps

    def decoded_by(self, decode: Decode) -> "Sample":
        return replace(self, steps=tuple(replace(step, decode=decode) for step in self.steps))


def sample_of(steps: Sequence[Step], decode: Decode = no_tokenizer) -> Sample:
    """The sample of a trajectory's steps: at least one, in order."""
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
                is_forgeable=MARKERS_IN_TEXT in step.extras,
                decode=decode,
            )
            for step in steps
        ),
        num_turns=len(steps),
    )


def sample_of_request(request: RewardRequest) -> Sample:
    """The sample of a trajectory that is in no pool. A dataset field overrides an agent's field of the same name."""
    step = SampleStep(
        prompt_ids=ids_array(request.prompt_ids),
        response_ids=ids_array(request.response_ids),
        texts=(request.prompt_text, request.response_text),
    )
    metadata = {**request.extra_fields, **request.dataset_fields}
    return Sample(trajectory_uid="", prompt_uid="", metadata=metadata, steps=(step,), num_turns=request.num_turns)
