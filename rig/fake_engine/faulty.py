"""The faults that are a matter of reading a request: it is refused, or its history forgotten."""

from dataclasses import replace

from rig.fake_engine.asking import Ask, RefusedError
from rig.fake_engine.faults import Faults
from rig.vocabulary import encode

NO_PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
TURN = encode("<|im_start|>assistant\n")


def faulty_asked(ask: Ask, faults: Faults) -> Ask:
    if faults.no_tool_parser and ask.tool_choice != "none":
        raise RefusedError(400, "BadRequestError", NO_PARSER)
    return replace(ask, prompt_ids=_forgetful(ask.prompt_ids)) if faults.forget_history else ask


def _forgetful(ids: list[int]) -> list[int]:
    """Without the first token of each turn of the assistant's; the last one is yet to be written."""
    starts = [k for k in range(len(TURN), len(ids)) if ids[k - len(TURN) : k] == TURN]
    return [token for k, token in enumerate(ids) if k not in starts]
