"""The environments of the community, from A to M, and their kin."""

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.originals.atropos.row import Answer, Json, Row, in_turn, prompt_of
from tests.originals.atropos.table.made_up_packages import BLEUBERI

GSM8K = {"gsm8k:main": [{"question": f"What is {n} + 1?", "answer": f"It is one more.\n#### {n + 1}"} for n in (3, 4)]}
RIGHT, WRONG = "<think>one more</think> It is \\boxed{%s}", "<think>who knows</think> It is \\boxed{777}"
SIGMA_RULES = {
    "mmaisel1/nous-rl-hackathon-sigma": [{"prompt": "Find the login.", "rule": "detection: selection: EventID: 4624"}]
}
XLAM = {
    "NousResearch/XLAM-Atropos:default": [
        {
            "conversations": [
                {"from": "system", "value": "You may call functions."},
                {"from": "human", "value": f"Weather in {city}?"},
                {"from": "gpt", "value": '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'},
            ]
        }
        for city in ("Rome", "Oslo", "Bern")
    ]
}


def file(path: str, text: str) -> Callable[[Path], None]:
    """A file in the working folder, which is where the environment expects the root of its repository."""

    def write(work: Path) -> None:
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_text(text)

    return write


def one_right_sum(request: Json, number: int) -> str:
    """Of each four answers to 3 + 1 or 4 + 1."""
    right = RIGHT % (4 if "3 + 1" in prompt_of(request) else 5)
    return right if number % 4 == 0 else WRONG


def judged(marker: str, verdicts: tuple[str, ...], answer: Answer) -> Answer:
    """Of a model that also judges: a request with the marker asks for a verdict, and gets the next of them."""
    turns = itertools.cycle(verdicts)
    return lambda request, number: next(turns) if marker in prompt_of(request) else answer(request, number)


KINGDOM = {
    **{f"{side}_{what}": 5 for side in ("Left", "Right") for what in ("Piety", "Stability", "Power", "Wealth")},
    "Character": "A monk",
    "Prompt": "Build?",
    "Left_Choice": "No",
    "Right_Choice": "Yes",
    "category": "piety",
}


IMAGES = [{"html": f'<img src="{n}.png">', "issues_to_fix": ["missing_alt_text"]} for n in range(40)]


def ask_the_engine(work: Path) -> None:
    """The service api.x.ai, which plays the patient, is the engine here."""
    import functools
    import os

    import openai

    original = openai.OpenAI

    @functools.wraps(original, updated=())
    def client(**options: Any) -> openai.OpenAI:
        return original(**options | {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": "x"})

    openai.OpenAI = client  # type: ignore[assignment,misc]


def doctor(diagnoses: tuple[str, ...]) -> Answer:
    turns = itertools.cycle(diagnoses)

    def answer(request: Json, number: int) -> str:
        return "I am hot" if request["model"].startswith("grok") else f"The diagnosis is: {next(turns)}"

    return answer


def lean(work: Path) -> None:
    """A checker that holds every proof with `trivial` to be right."""
    program = work / "lean"
    program.write_text('#!/bin/sh\nexec grep -q trivial "$1"\n')
    program.chmod(0o755)


ANVIL = """#!{python}
import http.server, json

class Chain(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({{"result": "0x1"}}).encode())

server = http.server.HTTPServer(("127.0.0.1", 8545), Chain)
print("Listening on 8545", flush=True)
server.serve_forever()
"""
TRANSFER = json.dumps({"to": "0x" + "00" * 20, "value": "1", "data": "0x"})


def foundry(work: Path) -> None:
    """The programs anvil and cast, of a chain on which every balance is 1; and no pauses for them."""
    (work / "bin").mkdir()
    for name, text in {"anvil": ANVIL.format(python=sys.executable), "cast": "#!/bin/sh\necho 0x1\n"}.items():
        (work / "bin" / name).write_text(text)
        (work / "bin" / name).chmod(0o755)
    time.sleep = lambda seconds: None


def soundings(work: Path) -> None:
    folder = work / "environments/community/meteorology_forecast/data/20250314/KAAA"
    folder.mkdir(parents=True)
    lines = [json.dumps({"tm": f"250314/{hour:02}00", "temperature": 20 + hour}) for hour in (6, 9)]
    (folder / "KAAA_RAP_20250314_00Z.buf_default_llm_optimized.jsonl").write_text("\n".join(lines))
    (folder / "AFD_1.txt").write_text("Sunny.")


ROWS: tuple[Row, ...] = (
    Row(
        file="community/accessibility_env/accessibility_env.py",
        beside={"data/accessibility_dataset.jsonl": "\n".join(map(json.dumps, IMAGES))},
        answer=in_turn('<img src="1.png" alt="a cat">', '<img src="1.png">'),
    ),
    Row(
        file="community/bleuberi/bleuberi_env.py",
        packages=BLEUBERI,
        data={
            "allenai/tulu-3-sft-mixture": [
                {
                    "id": f"row {n}",
                    "source": "made up",
                    "messages": [
                        {"role": "user", "content": f"Name animal {n}."},
                        {"role": "assistant", "content": "a small grey cat"},
                    ],
                }
                for n in range(4)
            ]
        },
        answer=in_turn("a small grey cat", "a dog"),
    ),
    Row(
        file="community/cat_behavior_env/cat_server.py",
        prepare=file(
            "environments/community/cat_behavior_env/cat_scenarios.json",
            json.dumps([{"scenario": "The bowl is empty."}]),
        ),
        answer=in_turn("purr", "meow"),
        only_starts="its score() returns None whatever it computes",
    ),
    Row(file="community/cat_behavior_env/catbot_arena.py", data=GSM8K, answer=one_right_sum),
    Row(
        file="community/conversational_style_dpo/gsmk8k_conversational_style_dpo_env.py",
        answer=in_turn("I feel well", "fine"),
        flags=("--env.max_token_length", "2000", "--env.ensure_scores_are_not_same", "false"),  # it pads to that length
        group_size=1,
    ),
    Row(
        file="community/cybersecurity_sigma/jaccard_reward_env.py",
        data=SIGMA_RULES,
        answer=in_turn("\\boxed{detection: selection: EventID: 4624}", "There is no such rule."),
    ),
    Row(
        file="community/cybersecurity_sigma/llm_judge_env.py",
        data=SIGMA_RULES,
        answer=judged(
            "gold standard", ("1",), in_turn("\\boxed{detection: selection: EventID: 4624}", "There is no such rule.")
        ),
    ),
    Row(
        file="community/dynastai/dynastai_server.py",
        beside={"dynastai_cards.json": json.dumps([{"input": {"choice_history": []}}])},
        answer=in_turn(json.dumps(KINGDOM), "A monk asks for a tower, and you cannot decide."),
    ),
    Row(
        file="community/ethereum_virtual_machine/evm_server.py",
        prepare=foundry,
        variables={"PATH": "{work}/bin:/usr/bin:/bin", "OPENAI_BASE_URL": "{engine}"},
        models=("gpt-4o-mini",),
        answer=in_turn(f"<think>Send one.</think>{TRANSFER}", "I have no money to send."),
    ),
    Row(file="community/goofy_math/goofy_math_server.py", data=GSM8K, answer=one_right_sum),
    Row(
        file="community/helpful_doctors/doctor.py",
        data={"GBaker/MedQA-USMLE-4-options": [{"question": "Fever?", "answer": "Flu"}]},
        prepare=ask_the_engine,
        variables={"OPENAI_BASE_URL": "{engine}", "XAI_API_KEY": "x"},
        models=("grok-3-latest",),
        answer=doctor(("Flu", "Mumps")),
    ),
    Row(
        file="community/humor_generation/humor_env.py",
        prepare=file(
            "environments/community/humor_generation/humor_dataset.jsonl",
            json.dumps({"comedian": "nobody", "format": "one line", "question": "Be funny."}),
        ),
        answer=judged("Score: X (0-2)", ("Score: 2\nScore: 3", "Score: 1"), in_turn("A cat walks into a bar.", "No.")),
    ),
    Row(
        file="community/lean_proof_env/lean_env.py",
        data={
            "brando/minif2f-lean4": [{"id": "a", "header": "import Mathlib", "formal_statement": "theorem a : True"}]
        },
        answer=in_turn("theorem simple_theorem_correct : True := trivial", "theorem simple_theorem_error : True := 1"),
    ),
    Row(
        file="community/lean_proof_env/lean_proof_env.py",
        prepare=lean,
        variables={"OPENAI_API_KEY": "x"},
        flags=("--env.lean_executable_path", "./lean"),
        answer=in_turn("trivial", "obvious"),
    ),
    Row(
        file="community/mcp_tool_calling/tool_calling_server.py",
        data=XLAM,
        answer=in_turn('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', "It rains, I suppose."),
    ),
    Row(
        file="community/meteorology_forecast/meteorology_env.py",
        prepare=soundings,
        flags=("--env.wandb_name", "weather"),  # without one, atroposlib cannot register
        answer=judged(
            "AI Assistant's Output:",
            ("REASONING_SCORE: 3\nTOTAL_SCORE: 3", "REASONING_SCORE: 1\nTOTAL_SCORE: 1"),
            in_turn("<think>warm</think>\nFORECAST_SUMMARY: sunny", "FORECAST_SUMMARY: rain"),
        ),
    ),
    Row(
        file="community/metric_card_generator/metric_card_generator.py",
        answer=in_turn('{"componentType": "metricCard", "props": {"title": "Users", "value": "1"}}'),
    ),
)
