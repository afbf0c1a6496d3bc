from typing import Any

import pytest

from stepwell.errors import BadRequest, RewardFailed
from stepwell.pool.api.scoring import Score
from stepwell.rewards.loading import load
from tests.unit.rewards.texts import answered, step, trajectory


def score(name: str, response: str, answer: object = None, **options: Any) -> float:
    result: Any = load(name, options).call(answered(response, answer))
    return result.value if isinstance(result, Score) else result


MATCHES: list[tuple[str, str, object]] = [
    ("exact_match", " Paris\n", "Paris"),
    ("exact_match", "7", 7),
    ("exact_match", "Lutetia", ["Paris", "Lutetia"]),
    ("exact_match", "<think>Lyon? No.</think>\nParis", "Paris"),
    ("normalised_match", "The  PARIS!", "paris"),
    ("normalised_match", "Ｐaris", "paris"),
    ("number_match", "3 apples and 4 pears make 7.", "7"),
    ("number_match", "about 1,234.50 euros", 1234.5),
    ("number_match", "x = −6e-3", -0.006),
    ("number_match", "three quarters, 3/4", 0.75),
    ("number_match", "It is 12; H2O has none", 12),
    ("number_match", ".5", "0.5"),
    ("math_equal", r"So it is \boxed{\frac{1}{2}}.", "0.5"),
    ("math_equal", "so $x^2 + 2x + 1$", "(x+1)^2"),
    ("math_equal", "The answer is 42", 42),
    ("math_equal", r"\boxed{\{2, 1\}}", r"\{1, 2\}"),
    ("regex_match", "Colour: red", r"colou?r: (?i:RED)|Colou?r: red"),
]
DIFFERENCES: list[tuple[str, str, object]] = [
    ("exact_match", "paris", "Paris"),
    ("exact_match", "", "Paris"),
    ("exact_match", "<think>Paris", "Paris"),
    ("normalised_match", "Paris, Texas", "Paris"),
    ("number_match", "3/2", "1/2"),
    ("number_match", "70", 7),
    ("number_match", "none", 0),
    ("number_match", "1/0", 1),
    ("math_equal", r"\boxed{0.51}", "1/2"),
    ("math_equal", "I do not know", "1/2"),
    ("math_equal", r"\boxed{\frac{", "1/2"),
    ("regex_match", "Colour: blue", "red"),
]


@pytest.mark.parametrize(("name", "response", "answer"), MATCHES)
def test_the_expected_answer_scores_one(name: str, response: str, answer: object) -> None:
    assert score(name, response, answer) == 1.0


@pytest.mark.parametrize(("name", "response", "answer"), DIFFERENCES)
def test_another_answer_scores_nought(name: str, response: str, answer: object) -> None:
    assert score(name, response, answer) == 0.0


@pytest.mark.parametrize("name", ["exact_match", "normalised_match", "number_match", "math_equal"])
def test_an_answer_is_taken_from_the_last_place_that_the_pattern_finds(name: str) -> None:
    assert score(name, "<a>1</a> no: <a>2</a> 3", "2", extract="<a>(.*?)</a>") == 1.0
    assert score(name, "2", "2", extract="<a>(.*?)</a>") == 0.0


def test_reasoning_that_the_prompt_began_and_nobody_ended_is_no_answer() -> None:
    unended = step("It may be 7")
    assert unended.texts is not None
    begun = step("It may be 7")
    object.__setattr__(begun, "texts", (unended.texts[0] + "<think>\n", "It may be 7"))
    function: Any = load("number_match").call
    assert function(trajectory(unended, metadata={"answer": 7})) == 1.0
    assert function(trajectory(begun, metadata={"answer": 7})) == 0.0


def test_the_answer_may_stand_where_datasets_of_verl_have_it() -> None:
    function: Any = load("exact_match").call
    assert function(answered("7", reward_model={"style": "rule", "ground_truth": "7"})) == 1.0


def test_the_answer_may_stand_under_another_name() -> None:
    function: Any = load("exact_match", {"answer_key": "gold"}).call
    assert function(answered("7", gold="7")) == 1.0


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("exact_match", None, "has neither 'answer' nor reward_model.ground_truth"),
        ("exact_match", [], "empty list of expected answers"),
        ("exact_match", {"a": 1}, "which is no text"),
        ("number_match", "seven", "'seven', which holds no number"),
        ("math_equal", r"\frac{", "math-verify cannot read"),
    ],
)
def test_an_expected_answer_that_cannot_be_used_is_an_error(name: str, answer: object, said: str) -> None:
    with pytest.raises(RewardFailed, match=said):
        score(name, "7", answer)


def test_a_format_is_met_only_by_the_whole_response() -> None:
    def form(response: str) -> Any:
        return load("format_match", {"tags": ["think", "answer"]}).call(answered(response))

    assert form("<think>a\nb</think>\n<answer>7</answer>\n").value == 1.0
    for response in (
        "<answer>7</answer><think>a</think>",
        "<think>a</think> so <answer>7</answer>",
        "<think>a</think><answer>7</answer>!",
        "<think>a</think><answer>7</answer><answer>8</answer>",
        "<think>a<answer>7</answer></think>",
    ):
        assert form(response).value == 0.0, response
    assert form("<think>a</think>7").parts == {"think": 1.0, "answer": 0.0}


@pytest.mark.parametrize("options", [{"pattern": "("}, {"extract": "x"}, {"pattern": 3}])
def test_options_that_do_not_fit_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        load("regex_match", options)
