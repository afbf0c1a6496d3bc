"""The environments of games."""

import json

from tests.originals.atropos.row import Json, Row, in_turn


def tool_call(action: str) -> str:
    return f"<tool_call>\n{json.dumps({'arguments': {'action': action}, 'name': 'take_action'})}\n</tool_call>"


def west_or_not(request: Json, number: int) -> str:
    """Every second taxi goes west once, where it may; the others stop at once."""
    (*before, last) = request["messages"]
    return "3" if number % 2 == 0 and not before and "- 3: west" in last["content"] else "stop"


ROWS: tuple[Row, ...] = (
    Row(file="game_environments/gymnasium/gym_taxi.py", answer=west_or_not),
    Row(
        file="game_environments/gymnasium/blackjack/blackjack_env_no_thinking.py",
        answer=in_turn(tool_call("stick"), "hm"),
    ),
    Row(
        file="game_environments/gymnasium/blackjack/blackjack_env_thinking.py",
        answer=in_turn(f"odds </think>{tool_call('stick')}", f"odds </think>{tool_call('hit')}"),
        flags=("--env.top_p", "1.0"),
    ),  # groups of a truncated sampling are left out of training
)
