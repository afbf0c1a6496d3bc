"""The environments that stand in no family's folder."""

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from rig.fake_engine.sampling import Reply, ToolCall
from tests.originals.atropos.row import Answer, Json, Row, in_turn, prompt_of

GSM8K = [{"question": "What is 40 plus 2?", "answer": "40 + 2 = 42\n#### 42"}] * 8
DEEP_MATH = [{"question": "What is 40 plus 2?", "final_answer": "42"}] * 8
PROBLEMS = [
    {"problem": "What is 40 plus 2?", "question": "What is 40 plus 2?", "answer": "42", "final_answer": ["42"]}
] * 2
MATH_TESTS = {"HuggingFaceH4/aime_2024": PROBLEMS, "HuggingFaceH4/math-500": PROBLEMS, "math-ai/amc23": PROBLEMS}
MORE_MATH_TESTS = {"math-ai/minervamath": PROBLEMS, "math-ai/olympiadbench": PROBLEMS}
BOXED = in_turn("<think>easy</think> It is \\boxed{42}.", "<think>hard</think> It is \\boxed{41}.")


def judged(marker: str, verdict: str, answers: Answer) -> Answer:
    """The verdict where the prompt has the marker, otherwise an answer."""
    return lambda request, number: verdict if marker in prompt_of(request) else answers(request, number)


CALLED = '<think>hm</think> <tool_call>{{"name": "{name}", "arguments": {{"x": 40, "y": 2}}}}</tool_call>'
PATCH = "### sums.py\n<<<<<<< SEARCH\n    print(x + y)\n=======\n    {word} x + y\n>>>>>>> REPLACE"
FAULTS = [
    {
        "problem_statement": "add prints its sum.",
        "text": "[start of sums.py]\ndef add(x, y):\n    print(x + y)\n[end of sums.py]",
        "patch": PATCH.format(word="return"),
    }
] * 4
SEARCH = ToolCall("search_hotels", {"city": "Bern"})


def module(name: str, **names: Any) -> ModuleType:
    """A module with these names and no others."""
    made = ModuleType(name)
    vars(made).update(names)
    return made


class Words:
    """NLTK's list of English words, which is no part of its package."""

    def words(self) -> list[str]:
        return ["heron", "stork", "crane", "ibis", "egret", "bittern"] * 10


def english_words(work: Path) -> None:
    from nltk import corpus  # type: ignore[import-not-found]

    corpus.words = Words()


def count_letters(request: Json, number: int) -> str:
    """Rightly and wrongly in turn."""
    question = prompt_of(request)
    if one := re.search(r"How many (\w)s are in the string (\w+)\?", question):
        answer: Any = one[2].count(one[1]) + number % 2
    else:
        letters = re.findall(r"'(\w)'", question.partition("in the string")[0])
        text = re.findall(r"in the string (\w+)", question)[0]
        answer = json.dumps({letter: text.count(letter) + number % 2 for letter in letters})
    return f"<think>I count.</think> <answer>{answer}</answer>"


def only_sums(work: Path) -> None:
    from reasoning_gym.factory import DATASETS  # type: ignore[import-not-found]

    for name in set(DATASETS) - {"chain_sum"}:
        del DATASETS[name]


def do_sums(request: Json, number: int) -> str:
    """Rightly and wrongly in turn."""
    terms = re.findall(r"[+-]?\s*\d+", re.findall(r"[\d+\- ]*\d[\d+\- ]* =", prompt_of(request))[-1])
    total = sum(int(term.replace(" ", "")) for term in terms)
    return f"<think>I add.</think> <answer>{total + number % 2}</answer>"


def t1_conversations(work: Path) -> None:
    """The files of the data set capitalone/T1, in the hub package's place."""
    import huggingface_hub

    rows = ["1,user: A hotel in Bern please.,\"search_hotels(city='Bern')\"", "1,assistant: Here you are.,"]
    turns = (
        "ID,Filled_Template,Filled_Plan\n" + "\n".join(rows) + "\n" + "\n".join(r.replace("1,", "2,", 1) for r in rows)
    )
    (work / "t1.csv").write_text(turns)
    names = [f"{domain}/train/1.csv" for domain in ("hotel", "flight", "restaurant", "attraction")]
    files = [module(name, path=name, size=1) for name in names]
    vars(huggingface_hub).update(
        list_repo_tree=lambda *_, **__: files, hf_hub_download=lambda *_, **__: str(work / "t1.csv")
    )


def mcp_data_set(work: Path) -> None:
    row = {"user_prompt_text": "What is 40 plus 2?", "expected_mcp_call": {"tool_name": "add", "arguments": {"x": 40}}}
    (work / "my_mcp_dataset.json").write_text(json.dumps([row] * 50))


def prefer_the_first(request: Json, number: int) -> str:
    """As a judge, of two answers; as the judged, one of two."""
    _, _, answers = prompt_of(request).partition("[Response A]")
    if not answers:
        return ("Ia! Ia! Fhtagn!", "Hello to you.")[number % 2]
    return "<think>hm</think> \\boxed{A}" if answers.lstrip().startswith("Ia!") else "<think>hm</think> \\boxed{B}"


CONVERSATIONS = [
    {
        "conversations": [
            {"from": "system", "value": "Call a tool."},
            {"from": "human", "value": f"What is 40 plus 2, number {number}?"},
            {"from": "gpt", "value": CALLED.format(name="add")},
            {"from": "tool", "value": "<tool_response>42</tool_response>"},
            {"from": "gpt", "value": "<think>It is done.</think> It is 42."},
        ]
    }
    for number in range(40)
]
TASKS = [{"problem": "Print 42.", "problem_type": "stdin_stdout", "tests": '{"input": [""], "output": ["42"]}'}] * 4


def verifiers_environment(name: str, **options: Any) -> Any:
    """An environment of the verifiers package, as the file uses it: rollouts that ask its client once."""

    async def one(given: Json, client: Any, model: str, sampling_args: Json) -> Json:
        answered = await client.chat.completions.create(model=model, messages=given["prompt"], **sampling_args)
        text = answered.choices[0].message.content
        said = [{"role": "assistant", "content": text}]
        return {
            **given,
            "completion": said,
            "reward": float("42" in text),
            "trajectory": said,
            "metrics": {"right": 1.0},
        }

    async def generate(inputs: list[Json], client: Any, model: str, sampling_args: Json, **_: Any) -> Json:
        return {"state": [await one(given, client, model, sampling_args) for given in inputs]}

    row = {"prompt": [{"role": "user", "content": "What is 40 plus 2?"}], "answer": "42", "example_id": 0, "task": name}
    made = module(
        name, rubric=module("rubric", _get_reward_func_names=lambda: ["right"]), system_prompt="", max_turns=1
    )
    vars(made).update(get_dataset=lambda: module("data", to_list=lambda: [row]), generate=generate)
    return made


def bootcamps() -> dict[str, ModuleType]:
    """InternBootcamp, which no package index has, with one task."""

    class Sumbootcamp:
        def case_generator(self) -> Json:
            return {"x": 40, "y": 2}

        def prompt_func(self, identity: Json) -> str:
            return f"What is {identity['x']} plus {identity['y']}?"

        @classmethod
        def verify_score(cls, output: str, identity: Json, format_score: float = 0.0, *_: Any) -> float:
            return 1.0 if f"[answer]{identity['x'] + identity['y']}[" in output else format_score

    inner = module("internbootcamp.bootcamp", Sumbootcamp=Sumbootcamp)
    return {"internbootcamp": module("internbootcamp", bootcamp=inner), inner.__name__: inner}


def sandbox() -> dict[str, ModuleType]:
    """Modal's sandbox: what the code prints decides."""

    async def run_test(tests: Json, code: str) -> tuple[list[bool], Json]:
        return [f"print({tests['tests']['output'][0]})" in code], {}

    class Function:
        @staticmethod
        def from_name(app: str, name: str) -> ModuleType:
            return module(name, remote=module("remote", aio=run_test))

    exception = module("modal.exception", RemoteError=RuntimeError)
    return {"modal": module("modal", Function=Function, exception=exception), exception.__name__: exception}


def gaia(work: Path) -> None:
    """GAIA's questions, in the folder in which the environment looks for them."""
    folder = work / "data" / "gaia" / "2023" / "validation"
    folder.mkdir(parents=True)
    row = {"Question": "Which bird is grey?", "Final answer": "heron", "Level": "1", "task_id": "1", "file_name": ""}
    (folder / "metadata.jsonl").write_text(json.dumps(row) + "\n")
    (work / "data" / "gaia" / "GAIA.py").write_text("")


ROWS: tuple[Row, ...] = (
    Row(file="gsm8k_server.py", data={"gsm8k:main": GSM8K}, answer=BOXED),
    Row(file="gsm8k_server_axolotl.py", data={"gsm8k:main": GSM8K}, answer=BOXED),
    Row(
        file="math_server.py",
        data={"zwhe99/DeepMath-103K": DEEP_MATH, **MATH_TESTS},
        answer=BOXED,
        flags=("--env.percent_to_judge", "0"),
    ),
    Row(
        file="math_server_zero.py",
        data={"zwhe99/DeepMath-103K": DEEP_MATH, **MATH_TESTS, **MORE_MATH_TESTS},
        answer=in_turn(*(f"it adds up</think> <answer>\\boxed{{{number}}}</answer>" for number in (42, 41))),
    ),
    Row(
        file="mcqa_thinking_env.py",
        data={
            "NousResearch/AcademicMCQA:default": [
                {"prompt": "What colour is the sky?", "answer": 0, "ground_truth": "A", "options": ["blue", "red"]}
            ]
            * 100
        },
        answer=in_turn(*(f"<think>hm</think> The best answer is: {letter}" for letter in "AB")),
    ),
    Row(
        file="fundamental_prediction_environment.py",
        data={
            "NousResearch/company-fundamentals-prediction-lite:default": [
                {
                    "context": "Sales grow.",
                    "answer": "raised",
                    "magnitude": "5",
                    "fundamental_metric": "revenue guidance",
                }
            ]
            * 40
        },
        answer=in_turn(
            *(
                f"<think>hm</think> The revenue guidance will be: {word} and the magnitude will be: 5%"
                for word in ("raised", "reduced")
            )
        ),
    ),
    Row(
        file="rlaif_server.py",
        group_size=2,
        data={
            "allenai/WildChat": [
                {"conversation": [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello."}]}
            ]
            * 4
        },
        answer=prefer_the_first,
    ),
    Row(
        file="tool_calling_server.py",
        data={
            "NousResearch/XLAM-Atropos:default": [
                {
                    "conversations": [
                        {"from": "system", "value": "Call a tool."},
                        {"from": "human", "value": "What is 40 plus 2?"},
                        {"from": "gpt", "value": CALLED.format(name="add")},
                    ]
                }
            ]
            * 110
        },
        answer=in_turn(CALLED.format(name="add"), CALLED.format(name="subtract")),
    ),
    Row(
        file="text_reversal_environment.py",
        data={"NousResearch/TextReversalDataset": [{"text": "drawer"}] * 4},
        answer=in_turn(*(f"<think>hm</think> <reversed_text>{text}</reversed_text>" for text in ("reward", "drawer"))),
    ),
    Row(
        file="instruction_following_algorithm_environment.py",
        data={
            "allenai/RLVR-IFeval": [
                {
                    "messages": [{"role": "user", "content": f"Say something with the word heron, number {number}."}],
                    "ground_truth": json.dumps({"func_name": "verify_keywords", "keyword_list": ["heron"]}),
                    "constraint": "with the word heron",
                }
                for number in range(8)
            ]
        },
        answer=in_turn(*(f"<think>hm</think> I saw a {bird} there." for bird in ("heron", "stork"))),
    ),
    Row(
        file="letter_counting_environment/letter_counting_environment.py",
        prepare=english_words,
        data={"NousResearch/Letter-Counting-Eval": [{"Prompt": "How many es are in the string heron?", "Answer": "1"}]},
        answer=count_letters,
    ),
    Row(
        file="reasoning_gym_environment/reasoning_gym_environment.py",
        prepare=only_sums,
        answer=do_sums,
    ),
    Row(
        file="swe_rl_env.py",
        data={"NousResearch/SWE-smith-oracle": FAULTS, "princeton-nlp/SWE-bench_Lite_oracle": FAULTS},
        answer=in_turn(*(f"<think>hm</think>\n{PATCH.format(word=word)}" for word in ("return", "yield"))),
    ),
    Row(
        file="t1_tool_planning/t1_env.py",
        prepare=t1_conversations,
        answer=in_turn(Reply(tool_calls=(SEARCH,)), "I would rather not."),
        flags=("--env.max_token_length", "90000"),
    ),
    Row(
        file="mcp_env.py",
        prepare=mcp_data_set,
        answer=in_turn(*(json.dumps({"tool_name": name, "arguments": {"x": 40}}) for name in ("add", "subtract"))),
    ),
    Row(
        file="kernelbench_env/kernelbench_env.py",
        skip="its 24 worker processes compile and time each answer on the GPU cuda:7",
    ),
    Row(
        file="tool_use_multiturn_server.py",
        data={"interstellarninja/toolace_hermes_sequential_tool_use": CONVERSATIONS},
        answer=in_turn(CALLED.format(name="add"), CALLED.format(name="subtract")),
        flags=("--env.scenario_category", "single", "--env.generate_all_gpt_turns", "false"),
    ),
    Row(
        file="tool_use_turnlevel_advantage_server.py",
        data={"interstellarninja/hermes_reasoning_tool_use": CONVERSATIONS},
        answer=in_turn(CALLED.format(name="add"), CALLED.format(name="add"), CALLED.format(name="subtract")),
        flags=("--env.min_tool_call_turns", "1", "--env.min_successful_turns", "0"),
    ),
    Row(
        file="tool_use_interleaved_thinking.py",
        data={"nvidia/AceReason-Math": [{"problem": "What is 40 plus 2?", "answer": "42"}] * 60},
        answer=in_turn(*(f"<think>\nI add.\n</think>\n\nIt is \\boxed{{{number}}}." for number in (42, 41))),
    ),
    Row(
        file="verifiers_server.py",
        packages={"verifiers": module("verifiers", load_environment=verifiers_environment)},
        answer=BOXED,
        flags=("--env.vf_env_name", "sums"),
    ),
    Row(
        file="intern_bootcamp/intern_bootcamp_env.py",
        packages=bootcamps(),
        answer=in_turn(*(f"<think>I add.</think> [answer]{number}[/answer]" for number in (42, 41))),
        flags=("--env.top_p", "1.0"),
    ),
    Row(
        file="infinimath/infinimath_env.py",
        only_starts="nothing in it scores what its collect_trajectories returns",
        packages={"mathgenerator": module("mathgenerator", genById=lambda _: ("$40+2=$", "$42$"), getGenList=list)},
        answer=BOXED,
        models=("gpt-4.1-mini",),
        flags=("--env.top_p", "1.0", "--env.word_problem_openai_base_url", "{engine}"),
    ),
    Row(
        file="answer_format_environment/answer_format_environment.py",
        data={
            "gsm8k:main": GSM8K,
            "teknium/OpenHermes-2.5": [
                {
                    "conversations": [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "It is."}],
                    "source": "made up",
                }
            ]
            * 8,
        },
        answer=in_turn("<think>hm</think> <answer>42</answer>", "<think>hm</think> It is 42, no doubt."),
        flags=("--env.supported_formats", '["xml"]'),
    ),
    Row(
        file="pydantic_schema_following_environment/pydantic_schema_following_environment.py",
        data={
            "justus27/pydantic-adherance-test": [
                {
                    "problem_id": str(number),
                    "task_type": "generation",
                    "prompt": "Name a bird.",
                    "verification_info": json.dumps(
                        {"pydantic_config": "class Bird(BaseModel):\n    name: str\n", "model_name": "Bird"}
                    ),
                }
                for number in range(8)
            ]
        },
        answer=in_turn(
            '<think>hm</think> <json_output>{"name": "heron"}</json_output>',
            '<think>hm</think> <json_output>{"bird": ["stork"]}</json_output>',
        ),
        flags=("--env.allowed_structured_formats", '["json"]', "--env.allowed_container_formats", '["tagged"]'),
    ),
    Row(
        file="code_execution_server/coding_server.py",
        packages=sandbox(),
        beside={"perfect_indices.txt": "1000\n", "train_logs/empty": ""},
        data={"NousResearch/RLVR_Coding_Problems": TASKS, "NousResearch/lcb_test": TASKS},
        answer=in_turn(*(f"So:\n```python\nprint({number})\n```\n" for number in (42, 41))),
        flags=("--env.top_p", "1.0"),
    ),
    Row(
        file="smolagents_integration/smolagents_env.py",
        prepare=gaia,
        answer=in_turn(
            *(f"Thought: I know it.\n<code>\nfinal_answer('{bird}')\n</code>" for bird in ("heron", "ibis"))
        ),
        flags=("--env.process_timeout", "20"),
        group_size=2,
    ),
)

DO_NOT_START = {
    "dataset_environment/dataset_env.py": "has no config_init, so that its configuration is one without its settings",
    "sft_loader_server.py": "imports OpenaiConfig, which atroposlib 0.4.0 does not have",
}
"""File → why it does not work with atroposlib itself."""
