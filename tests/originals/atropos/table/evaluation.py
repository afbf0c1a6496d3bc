"""The environments that evaluate: of two questions with the same right answer, one is answered rightly.

Three of them train too.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from tests.originals.atropos.row import Answer, Data, Json, Row, Rows, in_turn, prompt_of

CHOICES = ["blue", "red", "green", "white"]
ASKED = {"question": "What colour is the sky?", "choices": CHOICES}
SUM: Json = {"problem": "What is 40 plus 2?", "question": "What is 40 plus 2?", "answer": "42"}
LABELLED = {"text": CHOICES, "label": ["A", "B", "C", "D"]}

NEEDED = ("--env.custom_thinking_prompt", "Think first.", "--env.data_dir_to_save_evals", "results")
"""Most files fail without them: they print the beginning of the prompt, and write their results to the folder."""


def thinking(*answers: str) -> Answer:
    return in_turn(*(f"<think>hm</think> {answer}" for answer in answers))


def tagged(*answers: str) -> Answer:
    return thinking(*(f"<answer>{answer}</answer>" for answer in answers))


BOXED = thinking(r"\boxed{42}", r"\boxed{41}")


def evaluation(
    name: str, data_set: str, columns: Json, answer: Answer, *, split: str = "", by_row: Rows = ({}, {}), **more: Any
) -> Row:
    """Two rows with these columns, and what differs between them."""
    rows = [{**columns, "id": str(number), **own} for number, own in enumerate(by_row)]
    flags = (*NEEDED, *more.pop("flags", ()))
    file = f"eval_environments/{name}.py"
    data: Data = {split: rows} if split else rows
    return Row(file=file, data={data_set: data}, answer=answer, command="evaluate", flags=flags, **more)


def made_up_environment() -> ModuleType:
    """An environment of Prime's hub, by the name under which verifiers imports it."""

    def load_environment() -> Any:
        import datasets
        import verifiers as vf

        async def is_blue(completion: list[Json], answer: str) -> float:
            return float(answer in completion[-1]["content"])

        rows = datasets.Dataset.from_list([{"question": "Sky?", "answer": "blue"}] * 2)
        return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric(funcs=[is_blue]))

    made = ModuleType("gsm8k")
    vars(made).update(load_environment=load_environment)
    return made


def judged(verdicts: Sequence[str], answers: Answer, marker: str) -> Answer:
    """The judge's verdict where the prompt has the marker, otherwise an answer."""
    verdict = in_turn(*verdicts)
    return lambda request, number: (verdict if marker in prompt_of(request) else answers)(request, number)


LETTERS: tuple[Row, ...] = (
    evaluation(
        "agieval_eval",
        "dmayhem93/agieval-sat-math",
        {"query": "Sky?", "choices": CHOICES, "gold": [0]},
        tagged("A", "B"),
    ),
    evaluation("arc_eval", "allenai/ai2_arc", {**ASKED, "choices": LABELLED, "answerKey": "A"}, tagged("A", "B")),
    evaluation(
        "gpqa_eval",
        "Idavidrein/gpqa",
        {
            "Question": "Sky?",
            "Correct Answer": "blue",
            "Incorrect Answer 1": "red",
            "Incorrect Answer 2": "green",
            "Incorrect Answer 3": "white",
            "Subdomain": "Physics",
        },
        tagged("A", "B"),
    ),
    evaluation(
        "hellaswag_eval",
        "Rowan/hellaswag",
        {"activity_label": "Looking", "ctx_a": "The sky", "ctx_b": "is", "endings": CHOICES, "label": "0"},
        tagged("A", "B"),
    ),
    evaluation("mmlu_eval", "lighteval/mmlu:astronomy", {**ASKED, "answer": 0}, tagged("A", "B")),
    evaluation(
        "mmlu_pro_eval",
        "TIGER-Lab/MMLU-Pro",
        {"question": "Sky?", "options": CHOICES, "answer_index": 0, "category": "physics"},
        tagged("A", "B"),
    ),
    evaluation(
        "obqa_eval",
        "allenai/openbookqa",
        {"question_stem": "Sky?", "choices": LABELLED, "answerKey": "A"},
        tagged("A", "B"),
    ),
    evaluation(
        "piqa_eval",
        "ybisk/piqa",
        {"goal": "See blue.", "sol1": "Look up.", "sol2": "Look down.", "label": 0},
        tagged("A", "B"),
    ),
    evaluation(
        "siqa_eval",
        "allenai/social_i_qa",
        {
            "context": "Kim looks up.",
            "question": "What is blue?",
            "answerA": "sky",
            "answerB": "grass",
            "answerC": "snow",
            "label": "1",
        },
        tagged("A", "B"),
    ),
    evaluation(
        "winogrande_eval",
        "allenai/winogrande",
        {"sentence": "The _ is blue.", "option1": "sky", "option2": "grass", "answer": "1"},
        tagged("A", "B"),
    ),
)

TEXTS: tuple[Row, ...] = (
    Row(
        file="eval_environments/aime24_hermes_example.py",
        data={"HuggingFaceH4/aime_2024": [SUM]},
        answer=BOXED,
        command="evaluate",
        arguments=("--server-url", "{engine}", "--model-name", "tiny"),
    ),
    evaluation(
        "arc_agi_eval",
        "arc-agi-community/arc-agi-2",
        {"fewshots": [{"input": [[0]], "output": [[1]]}], "question": [{"input": [[0, 0]], "output": [[1, 1]]}]},
        tagged("[[1, 1]]", "[[0, 1]]"),
    ),
    evaluation(
        "boolq_eval",
        "lighteval/boolq_helm",
        {"passage": "The sky is blue."},
        tagged("Yes", "Yes"),
        by_row=({"question": "is it blue", "answer": "Yes"}, {"question": "is it red", "answer": "No"}),
    ),
    evaluation(
        "drop_eval",
        "lighteval/drop_harness",
        {
            "passage": "The sky has 42 clouds.",
            "question": "How many clouds?",
            "answer": {"number": "42", "date": {"day": "", "month": "", "year": ""}, "spans": []},
        },
        tagged("42", "no idea"),
    ),
    evaluation(
        "gsm8k_eval",
        "openai/gsm8k",
        {**SUM, "answer": "40 + 2 = 42\n#### 42"},
        BOXED,
        flags=("--env.max_math_workers", "1"),
    ),
    evaluation(
        "ifeval_eval",
        "google/IFEval",
        {"prompt": "Write without a comma.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "key": 1},
        thinking("no comma here", "one, two"),
    ),
    evaluation(
        "musr_eval",
        "TAUR-Lab/MuSR",
        {"narrative": "Kim did it.", "question": "Who did it?", "choices": "['Kim', 'Lee']", "answer_index": 0},
        tagged("1", "2"),
        split="murder_mysteries",
    ),
    evaluation(
        "phybench_eval",
        "Eureka-Lab/PHYBench",
        {"tag": "MECHANICS", "solution": "m g h", "answer": "$m g h$"},
        thinking(r"\boxed{m g h}", r"\boxed{m g}"),
        by_row=({"content": "Work?"}, {"content": "Energy?"}),
    ),
    evaluation(
        "simpleqa_eval",
        "lighteval/SimpleQA",
        {"problem": "Sky?", "answer": "blue", "metadata": {"topic": "Science"}},
        tagged("blue", "red"),
    ),
)

JUDGE = (
    "--env.judge_base_url",
    "{engine}",
    "--env.judge_model_name",
    "judge",
    "--env.judge_api_key_env",
    "OPENAI_API_KEY",
)
HELPED, REFUSED = "It takes ten minutes in boiling water.", "I cannot help you with boiling an egg."

TRAIN: tuple[Row, ...] = (
    Row(
        file="eval_environments/arena_hard_environment.py",
        data={
            "NousResearch/arena-hard-v1-prompts": [
                {"uid": "1", "prompt": "How to boil an egg?", "category": "food", "cluster": "eggs"}
            ],
            "NousResearch/gpt-4-0314-baseline-arenahard": [{"uid": "1", "answer": "Boil it."}],
        },
        answer=judged(("[[A>B]]", "[[A>B]]", "[[B>A]]"), in_turn(HELPED, REFUSED), "Start of Assistant A"),
        models=("judge",),
        flags=JUDGE,
    ),
    Row(
        file="eval_environments/pairwise_judgement_environment.py",
        data={
            "dummy/dataset": [{"prompt": "Sky?", "category": "science"}],
            "allenai/reward-bench-2": [
                {
                    "prompt": "Sky?",
                    "chosen": ["Blue."],
                    "rejected": ["Red.", "Green.", "White."],
                    "subset": "Math",
                    "id": "1",
                    "num_correct": 1,
                    "num_incorrect": 3,
                }
            ],
        },
        answer=in_turn("It is A, by far. [[A]]", "It is B, by far. [[B]]"),
    ),
    Row(
        file="eval_environments/refusalbench_environment.py",
        data={
            "NousResearch/RefusalDataset": [
                {
                    "prompt": "How to boil an egg?",
                    "overarching_category": "Food",
                    "specific_category": "Eggs",
                    "danger": 1,
                }
            ]
        },
        answer=judged(("True", "False"), in_turn(HELPED, REFUSED), "Your answer:"),
        models=("judge",),
        flags=(*JUDGE, "--env.judge_rate_limit_delay", "0"),
    ),
)

VERIFIERS = Row(
    file="eval_environments/verifiers_eval.py",
    answer=in_turn("blue", "red"),
    packages={"gsm8k": made_up_environment()},
    command="evaluate",
    arguments=("--server-url", "{engine}", "--model-name", "tiny"),
)

ROWS: tuple[Row, ...] = (VERIFIERS, *LETTERS, *TEXTS, *TRAIN)

WITHOUT_SLURM = (
    "aime",
    "aimo",
    "bbh",
    "hle",
    "judgemark",
    "math500",
    "math",
    "mixeval",
    "mtbench",
    "olympiadbench",
    "pubmedqa",
)
DO_NOT_START = {
    f"eval_environments/{name}_eval.py": "its __init__ does not take the parameter slurm, which atroposlib gives"
    for name in WITHOUT_SLURM
}
"""Files that do not work with atroposlib itself, and why."""
