"""The environments that evaluate: of two questions with the same right answer, one is answered rightly.

Three of them train too.
"""

from collections.abc import Sequence
from typing import Any

from tests.originals.atropos.row import Answer, Data, Json, Row, in_turn, prompt_of

CHOICES = ["blue", "red", "green", "white"]
ASKED = {"question": "What colour is the sky?", "choices": CHOICES}
SUMS: Json = {"problem": "What is 40 plus 2?", "question": "What is 40 plus 2?", "answer": "42"}
WORKED = {**SUMS, "answer": "40 + 2 = 42\n#### 42", "solution": r"It is \boxed{42}.", "type": "Algebra", "level": "1"}
LABELLED = {"text": CHOICES, "label": ["A", "B", "C", "D"]}


NEEDED = ("--env.custom_thinking_prompt", "Think first.", "--env.data_dir_to_save_evals", "results")
"""Most files fail without them: they write the beginning of the prompt to their log, and their results to the folder."""


def thinking(*answers: str) -> Answer:
    return in_turn(*(f"<think>hm</think> {answer}" for answer in answers))


def tagged(*answers: str) -> Answer:
    return thinking(*(f"<answer>{answer}</answer>" for answer in answers))


BOXED = thinking(r"\boxed{42}", r"\boxed{41}")


def evaluation(name: str, data_set: str, columns: Json, answer: Answer, split: str = "", **more: Any) -> Row:
    """Two rows with these columns, alike but for their number."""
    rows = [{**columns, "id": str(number)} for number in range(2)]
    data: Data = {split: rows} if split else rows
    return row_of(name, {data_set: data}, answer, **more)


def row_of(name: str, data: dict[str, Data], answer: Answer, **more: Any) -> Row:
    file = f"eval_environments/{name}.py"
    asked = {"command": "evaluate", **more, "flags": (*NEEDED, *more.get("flags", ()))}
    return Row(file=file, data=data, answer=answer, **asked)


def judged(verdicts: Sequence[str], answers: Answer, marker: str) -> Answer:
    """The judge's verdict where the prompt has the marker, otherwise an answer."""
    verdict = in_turn(*verdicts)
    return lambda request, number: (verdict if marker in prompt_of(request) else answers)(request, number)


LETTERS: tuple[Row, ...] = (
    evaluation("agieval_eval", "dmayhem93/agieval-sat-math", {"query": "Sky?", "choices": CHOICES, "gold": [0]}, tagged("A", "B")),
    evaluation("arc_eval", "allenai/ai2_arc", {**ASKED, "choices": LABELLED, "answerKey": "A"}, tagged("A", "B")),
    evaluation("bbh_eval", "lighteval/bbh:navigate",
        {"task_prefix": "Navigate.", "input": "Sky?", "choices": CHOICES, "target_idx": 0}, tagged("A", "B")),
    evaluation("gpqa_eval", "Idavidrein/gpqa",
        {"Question": "Sky?", "Correct Answer": "blue", "Incorrect Answer 1": "red", "Incorrect Answer 2": "green",
         "Incorrect Answer 3": "white", "Subdomain": "Physics"}, tagged("A", "B")),
    evaluation("hellaswag_eval", "Rowan/hellaswag",
        {"activity_label": "Looking", "ctx_a": "The sky", "ctx_b": "is", "endings": CHOICES, "label": "0"},
        tagged("A", "B")),
    evaluation("mmlu_eval", "lighteval/mmlu:astronomy", {**ASKED, "answer": 0}, tagged("A", "B")),
    evaluation("mmlu_pro_eval", "TIGER-Lab/MMLU-Pro",
        {"question": "Sky?", "options": CHOICES, "answer_index": 0, "category": "physics"}, tagged("A", "B")),
    evaluation("obqa_eval", "allenai/openbookqa",
        {"question_stem": "Sky?", "choices": LABELLED, "answerKey": "A"}, tagged("A", "B")),
    evaluation("piqa_eval", "ybisk/piqa", {"goal": "See blue.", "sol1": "Look up.", "sol2": "Look down.", "label": 0},
        tagged("A", "B")),
    evaluation("siqa_eval", "allenai/social_i_qa",
        {"context": "Kim looks up.", "question": "What is blue?", "answerA": "sky", "answerB": "grass", "answerC": "snow",
         "label": "1"}, tagged("A", "B")),
    evaluation("winogrande_eval", "allenai/winogrande",
        {"sentence": "The _ is blue.", "option1": "sky", "option2": "grass", "answer": "1"}, tagged("A", "B")),
)  # fmt: skip

ONE_WORKER = ("--env.max_math_workers", "1")

MATHS: tuple[Row, ...] = (
    evaluation("aime_eval", "HuggingFaceH4/aime_2024", SUMS, BOXED, flags=ONE_WORKER),
    evaluation("aimo_eval", "lighteval/aimo_progress_prize_1", SUMS, BOXED, flags=ONE_WORKER),
    evaluation("gsm8k_eval", "openai/gsm8k", WORKED, BOXED, flags=ONE_WORKER),
    evaluation("math500_eval", "HuggingFaceH4/MATH-500", {**SUMS, "subject": "Algebra", "level": 1}, BOXED, flags=ONE_WORKER),
    evaluation("math_eval", "DigitalLearningGmbH/MATH-lighteval:algebra", WORKED, BOXED, flags=ONE_WORKER),
    evaluation("olympiadbench_eval", "Hothan/OlympiadBench",
        {"question": "40 + 2?", "final_answer": ["42"], "subject": "Math", "language": "English",
         "answer_type": "Numerical", "is_multiple_answer": False, "unit": ""}, BOXED),
)  # fmt: skip

TEXTS: tuple[Row, ...] = (
    evaluation("arc_agi_eval", "arc-agi-community/arc-agi-2",
        {"fewshots": [{"input": [[0]], "output": [[1]]}], "question": [{"input": [[0, 0]], "output": [[1, 1]]}]},
        tagged("[[1, 1]]", "[[0, 1]]")),
    evaluation("boolq_eval", "lighteval/boolq_helm",
        {"passage": "The sky is blue.", "question": "is the sky blue", "answer": "Yes"}, tagged("Yes", "No")),
    evaluation("drop_eval", "lighteval/drop_harness",
        {"passage": "The sky has 42 clouds.", "question": "How many clouds?",
         "answer": {"number": "42", "date": {"day": "", "month": "", "year": ""}, "spans": []}},
        tagged("42", "no idea")),
    evaluation("hle_eval", "cais/hle", {"question": "40 + 2?", "answer": "42", "image": "", "category": "Math"}, BOXED),
    evaluation("ifeval_eval", "google/IFEval",
        {"prompt": "Write without a comma.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "key": 1},
        thinking("no comma here", "one, two")),
    evaluation("musr_eval", "TAUR-Lab/MuSR",
        {"narrative": "Kim did it.", "question": "Who did it?", "choices": "['Kim', 'Lee']", "answer_index": 0},
        tagged("1", "2"), split="murder_mysteries"),
    evaluation("pubmedqa_eval", "pubmed_qa",
        {"QUESTION": "Does it work?", "CONTEXTS": ["It does."], "final_decision": "yes", "PUBID": 1}, tagged("yes", "no")),
    evaluation("simpleqa_eval", "lighteval/SimpleQA",
        {"problem": "Sky?", "answer": "blue", "metadata": {"topic": "Science"}}, tagged("blue", "red")),
)  # fmt: skip

JUDGE = ("--env.judge_base_url", "{engine}", "--env.judge_model_name", "judge", "--env.judge_api_key_env", "OPENAI_API_KEY")
AT_ONCE = (*JUDGE, "--env.judge_rate_limit_delay", "0")
PHYSICS = [{"id": str(n), "tag": "MECHANICS", "content": f"Work no. {n}?", "solution": "m g h", "answer": "$m g h$"} for n in (1, 2)]
REWARDED = {"prompt": "Sky?", "chosen": ["It is blue."], "rejected": ["Red.", "Green.", "White."], "subset": "Math",
            "id": "1", "num_correct": 1, "num_incorrect": 3}
ASKED_TO_HELP = {"prompt": "How to boil an egg?", "overarching_category": "Food", "specific_category": "Eggs", "danger": 1}
LONG = "It takes ten minutes in boiling water."
REFUSED = "I cannot help you with boiling an egg."

JUDGED: tuple[Row, ...] = (
    evaluation("mtbench_eval", "lighteval/mt-bench",
        {"category": "writing", "turns": ["Name a colour.", "Another?"], "reference": [], "question_id": 1},
        judged(("<score>5</score>", "<score>2</score>"), thinking("blue", "red"), "<score>"),
        models=("judge",), flags=AT_ONCE),
    row_of("mixeval_eval",
        {"MixEval/MixEval": {
            "free_form": [{"prompt": "Sky?", "target": ["blue"], "context": "", "benchmark_name": "TriviaQA", "problem_type": "free-form"}],
            "multiple_choice": [{"prompt": "Sky?", "options": CHOICES, "target": ["0"], "context": "", "benchmark_name": "ARC", "problem_type": "single-choice"}]}},
        judged(("[[1]]",), thinking("blue"), "Your Judgment:"), models=("judge",), flags=AT_ONCE),
    row_of("phybench_eval", {"Eureka-Lab/PHYBench": PHYSICS}, thinking(r"\boxed{m g h}", r"\boxed{m g}")),
)  # fmt: skip

TRAIN: tuple[Row, ...] = (
    Row(file="eval_environments/arena_hard_environment.py",
        data={"NousResearch/arena-hard-v1-prompts": [{"uid": "1", "prompt": "How to boil an egg?", "category": "food", "cluster": "eggs"}],
              "NousResearch/gpt-4-0314-baseline-arenahard": [{"uid": "1", "answer": "Boil it."}]},
        answer=judged(("[[A>B]]", "[[A>B]]", "[[B>A]]"), in_turn(LONG, REFUSED), "Start of Assistant A"),
        models=("judge",), flags=JUDGE),
    Row(file="eval_environments/pairwise_judgement_environment.py",
        data={"dummy/dataset": [{"prompt": "Sky?", "category": "science"}], "allenai/reward-bench-2": [REWARDED]},
        answer=in_turn("It is A, by far. [[A]]", "It is B, by far. [[B]]")),
    Row(file="eval_environments/refusalbench_environment.py",
        data={"NousResearch/RefusalDataset": [ASKED_TO_HELP]},
        answer=judged(("True", "False"), in_turn(LONG, REFUSED), "Your answer:"), models=("judge",), flags=AT_ONCE),
)  # fmt: skip

ROWS: tuple[Row, ...] = (*LETTERS, *MATHS, *TEXTS, *JUDGED, *TRAIN)
