"""The environments that stand in no family's folder."""

from tests.originals.atropos.row import Row, in_turn

GSM8K = [{"question": "What is 40 plus 2?", "answer": "40 + 2 = 42\n#### 42"}] * 8

ROWS: tuple[Row, ...] = (
    Row(
        file="gsm8k_server.py",
        data={"gsm8k:main": GSM8K},
        answer=in_turn("<think>easy</think> \\boxed{42}", "<think>easy</think> \\boxed{41}"),
    ),
)
