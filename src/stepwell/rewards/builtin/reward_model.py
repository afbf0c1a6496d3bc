"""A reward model served by vLLM (`--runner pooling`) that scores a whole conversation."""

from collections.abc import Awaitable, Callable
from typing import Literal

from stepwell.errors import RewardFailed
from stepwell.rewards.builtin.judge import Endpoint
from stepwell.rewards.sample import Sample
from stepwell.steps.step import Json, JsonObject


def reward_model(
    *,
    url: str,
    model: str,
    route: Literal["classify", "pooling"] = "classify",
    label: int | None = None,
    activation: bool = False,
    key_variable: str | None = None,
    timeout: float = 60.0,
    concurrency: int = 32,
) -> Callable[[Sample], Awaitable[float]]:
    """The output of the model's head for the conversation, rendered by the reward model's own chat template.

    `url` is the server's, without a path. A head with several labels needs `label`, the index of the one to use.
    `activation`: the value after the model's sigmoid or softmax instead of before. If a model scores every token, which
    only /pooling serves, the last token's value is used.
    """
    endpoint = Endpoint(url, key_variable=key_variable, timeout=timeout, concurrency=concurrency)

    async def score(sample: Sample) -> float:
        body: JsonObject = {"model": model, "messages": _messages(sample), "use_activation": activation}
        async with endpoint.session() as session:
            reply = await endpoint.post(session, f"/{route}", body)
        return _chosen(_outputs(reply, "probs" if route == "classify" else "data"), label)

    return score


def _messages(sample: Sample) -> list[Json]:
    """A prompt that could not be read as messages becomes a message of the user."""
    return [
        {"role": "user" if message["role"] == "prompt" else message["role"], "content": message["content"]}
        for message in sample.messages
    ]


def _outputs(reply: JsonObject, field: str) -> list[Json]:
    match reply:
        case {"data": [{**item}]} if isinstance(outputs := item.get(field), list) and outputs:
            return outputs[-1] if isinstance(outputs[-1], list) else outputs
    raise RewardFailed(f"the reward model's answer has no data[0].{field}: {str(reply)[:300]}")


def _chosen(outputs: list[Json], label: int | None) -> float:
    if label is None and len(outputs) != 1:
        raise RewardFailed(f"the reward model returns {len(outputs)} numbers: choose one with 'label'")
    place = label or 0
    if not 0 <= place < len(outputs) or not isinstance(number := outputs[place], int | float):
        raise RewardFailed(f"the reward model returns {len(outputs)} labels, and no number as label {place}")
    return float(number)
