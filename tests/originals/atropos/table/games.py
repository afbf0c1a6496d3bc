"""The environments of games. Those named `…_local_server.py` play one game at a fixed address, and send nothing."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.originals.atropos.row import Json, Row, in_turn

GYMNASIUM = "game_environments/gymnasium"
DIPLOMACY = "game_environments/diplomacy_environment"
TEXTWORLD = "game_environments/textworld_env"
OPENAI, OPENROUTER = "https://api.openai.com/v1", "https://openrouter.ai/api/v1"


def tool_call(action: str) -> str:
    return f"<tool_call>\n{json.dumps({'arguments': {'action': action}, 'name': 'take_action'})}\n</tool_call>"


def west_or_not(request: Json, number: int) -> str:
    """Every second taxi goes west once, where it may; the others stop at once."""
    (*before, last) = request["messages"]
    return "3" if number % 2 == 0 and not before and "- 3: west" in last["content"] else "stop"


def at_the_engine(address: str) -> Callable[[Path], None]:
    """Clients of this address ask the engine."""

    def prepare(folder: Path) -> None:
        import openai

        original = openai.AsyncOpenAI.__init__

        def init(self: Any, *args: Any, **options: Any) -> None:
            if str(options.get("base_url")).rstrip("/") == address:
                options["base_url"] = os.environ["ENGINE"]
            original(self, *args, **options)

        openai.AsyncOpenAI.__init__ = init  # type: ignore[method-assign]

    return prepare


def local(file: str, address: str, **more: Any) -> Row:
    return Row(
        file=file,
        prepare=at_the_engine(address),
        tokenizers=("NousResearch/DeepHermes-3-Llama-3-8B-Preview",),
        variables={"ENGINE": "{engine}", "OPENROUTER_API_KEY": "none"},
        only_starts="sends nothing: it plays one game by itself",
        **more,
    )


def diplomacy() -> dict[str, ModuleType]:
    """AI_Diplomacy, a submodule that the source distribution does not have: one order decides the game."""

    class BaseModelClient:
        def __init__(self, model_name: str) -> None:
            self.model_name = model_name

    def load_model_client(model_id: str, prompts_dir: str | None = None) -> BaseModelClient:
        return BaseModelClient(model_id)

    async def main() -> None:
        options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
        france = clients.load_model_client(options["--models"].split(",")[2])
        order = await france.generate_response("You are FRANCE. Submit your orders for S1901M.")
        centers = ["PAR", "BRE", "MAR", *(["SPA"] if "SPA" in order else [])]
        write_game(Path(options["--output"]), centers)

    def write_game(folder: Path, centers: list[str]) -> None:
        folder.mkdir(parents=True)
        game = {"winner": None, "phases": [{"state": {"centers": {"FRANCE": centers}}}]}
        (folder / "lmvsgame.json").write_text(json.dumps(game))

    clients: Any = ModuleType("clients")
    vars(clients).update(BaseModelClient=BaseModelClient, load_model_client=load_model_client)
    players, games = ModuleType("ai_diplomacy"), ModuleType("lm_game")
    vars(players).update(clients=clients)
    vars(games).update(main=main)
    folder = "environments.game_environments.diplomacy_environment.AI_Diplomacy"
    return {
        folder: ModuleType("AI_Diplomacy"),
        f"{folder}.ai_diplomacy": players,
        f"{folder}.ai_diplomacy.clients": clients,
        "lm_game": games,
    }


COMPILING_S = 240.0
"""A game is compiled by Inform, which takes 5 s of a core."""
SIMPLE_GAME = ("--env.challenge_names", '["tw-simple"]')
ORDERS = in_turn("A MAR - SPA", "A MAR H")
STICK_OR_NOT = in_turn(tool_call("stick"), "hm")
STICK_OR_HIT = in_turn(f"odds </think>{tool_call('stick')}", f"odds </think>{tool_call('hit')}")

ROWS: tuple[Row, ...] = (
    Row(file=f"{GYMNASIUM}/gym_taxi.py", answer=west_or_not),
    Row(file=f"{GYMNASIUM}/blackjack/blackjack_env_no_thinking.py", answer=STICK_OR_NOT),
    Row(
        file=f"{GYMNASIUM}/blackjack/blackjack_env_thinking.py",
        answer=STICK_OR_HIT,
    ),
    local(
        f"{GYMNASIUM}/blackjack/blackjack_local_server.py",
        OPENAI,
        answer=STICK_OR_HIT,
        models=("gpt-4.1-nano",),
        arguments=(),
    ),
    local(
        f"{GYMNASIUM}/blackjack/blackjack_local_server_no_thinking.py",
        OPENAI,
        answer=STICK_OR_NOT,
        models=("gpt-4.1-nano",),
        arguments=(),
    ),
    Row(
        file=f"{DIPLOMACY}/diplomacy_env_minimal.py",
        answer=ORDERS,
        packages=diplomacy(),
        flags=("--env.start_diplomacy_server", "false"),
    ),
    local(
        f"{DIPLOMACY}/diplomacy_local_server.py",
        OPENROUTER,
        answer=ORDERS,
        packages=diplomacy(),
        models=("openai/gpt-oss-120b",),
        arguments=("1",),
    ),
    Row(
        file=f"{TEXTWORLD}/textworld_env.py",
        answer=in_turn("look", "inventory"),
        flags=(*SIMPLE_GAME, "--env.max_steps", "2", "--env.ensure_scores_are_not_same", "false"),
        timeout=COMPILING_S,
    ),
    local(
        f"{TEXTWORLD}/textworld_local_server.py",
        OPENAI,
        answer=in_turn("look", "inventory"),
        models=("gpt-4.1",),
        arguments=("tw-simple",),
        timeout=COMPILING_S,
    ),
)
