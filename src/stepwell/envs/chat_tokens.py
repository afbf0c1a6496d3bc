"""A chat as tokens and masks, for environments that sample text and tokenize it themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

from stepwell.envs.scored_data import UNTRAINED

WRITTEN_BY_THE_MODEL = ("assistant", "agent")


def tokenize_for_trainer(
    tokenizer: Any,
    chat: Sequence[Mapping[str, Any]],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """`tokens` and `masks` of the chat. The last message is trained, or every message of the model.

    Such tokens may differ from those that were sampled; a managed server keeps the sampled ones.
    """

    def ids(messages: Sequence[Mapping[str, Any]], **options: bool) -> list[int]:
        return list(tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **options))

    tokens = ids(chat)
    masks = [UNTRAINED] * len(tokens)
    written = [place for place, message in enumerate(chat) if message["role"] in WRITTEN_BY_THE_MODEL]
    for place in written if train_on_all_assistant_turns else [len(chat) - 1]:
        start, so_far = len(ids(chat[:place], add_generation_prompt=True)), ids(chat[: place + 1])
        masks[start : len(so_far)] = so_far[start:]
    if finish_reason == "length" and tokens[-1] == tokenizer.eos_token_id:
        tokens, masks = tokens[:-1], masks[:-1]
    return {"tokens": tokens, "masks": masks} | ({"messages": chat} if include_messages else {})
