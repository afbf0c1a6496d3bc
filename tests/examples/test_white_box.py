"""examples/white_box as its README says, `stepwell up` with a reward worker included."""

from itertools import cycle
from pathlib import Path

from rig.fake_engine import Reply
from rig.fake_engine.asking import Json
from rig.gateways import free_port
from rig.shells import fresh_shell
from rig.threads import in_thread
from rig.vocabulary import END_OF_TURN, encode
from tests.examples.conftest import ScriptedEngine
from tests.examples.folders import EXAMPLES, addresses_replaced, missing_lines, shell_block

ENGINE = "http://127.0.0.1:8001"
"""As the README names it."""
RIGHT, WRONG, NOTHING = "It is 46.", "It is 45.", "I do not know."


class SumsEngine(ScriptedEngine):
    """Gets token ids. Each question has its own first answers; a wrong number is mended at the second try."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[list[int]] = []
        self.first = {word: cycle([RIGHT, WRONG, NOTHING, RIGHT]) for word in ("12", "27")}

    def reply_to(self, body: Json) -> Reply | None:
        asked: list[int] = body["token_ids"]
        self.prompts.append(asked)
        text = bytes(token for token in asked if token < 256).decode()
        if "That is wrong." in text:
            return Reply(RIGHT if WRONG in text else NOTHING)
        return Reply(next(self.first["12" if "12" in text else "27"]))


def test_white_box(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    ours = {
        "STEPWELL_UP_PORT": str(free_port()),
        "STEPWELL_UP_DASHBOARD_PORT": str(free_port()),
        "STEPWELL_UP_TOKENIZER_PATH": str(tiny_model),
        "MODEL": str(tiny_model),
    }
    up, agent = shell_block("white_box", "stepwell up"), shell_block("white_box", "agent.py")
    with in_thread(SumsEngine()) as engine, fresh_shell(tmp_path, **ours) as shell:
        printed = shell.run("bash", "-ec", addresses_replaced(up, {ENGINE: engine.url}) + agent, timeout=300)
        assert missing_lines("white_box", printed) == [], printed
        status = shell.run("stepwell", "status")
        assert "12 steps submitted" in status
        shell.run("stepwell", "down")
    sampled = [*encode(WRONG), END_OF_TURN]
    again = [prompt for prompt in engine.prompts if str(sampled)[1:-1] in str(prompt)]
    assert len(again) == 2, "the second prompt has the tokens of the first answer as they were sampled"
