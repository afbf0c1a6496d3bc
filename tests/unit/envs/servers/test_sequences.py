from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from stepwell.envs.servers.sequences import SampledTurn, SequenceNode, TurnTree
from stepwell.steps.step import Exactness
from tests.unit.envs.servers.sampled import turn


def tree_of(*turns: SampledTurn) -> TurnTree:
    tree = TurnTree()
    for each in turns:
        tree.add(each)
    return tree


def spelt(*turns: SampledTurn) -> list[str]:
    """The sequences that come of them: what is trained in capitals."""
    tree = tree_of(*turns)
    return [shown(tree.node(sequence, "")) for sequence in tree.ends]


def shown(node: SequenceNode) -> str:
    pairs = zip(node.tokens, node.masked_tokens, strict=True)
    return "".join(chr(token) if mask == -100 else chr(mask).upper() for token, mask in pairs)


def test_a_turn_whose_prompt_begins_with_the_line_continues_it_and_all_the_model_wrote_is_trained() -> None:
    assert spelt(turn("q.", "a"), turn("q.a|r.", "b"), turn("q.a|r.b|s.", "c")) == ["q.A|r.B|s.C"]


def test_a_prompt_that_tells_the_history_otherwise_begins_a_sequence_and_the_first_is_kept() -> None:
    assert spelt(turn("q.", "xa"), turn("q.a|r.", "b")) == ["q.XA", "q.a|r.B"]


def test_a_prompt_that_is_the_line_itself_but_for_its_end_begins_a_sequence() -> None:
    assert spelt(turn("q.", "ab"), turn("q.a", "c")) == ["q.AB", "q.aC"]


def test_a_sequence_that_two_models_wrote_is_left_out_of_training() -> None:
    """It has the name of one model, and tokens of both."""
    tree = tree_of(replace(turn("q.", "a"), model="other"), replace(turn("q.a|r.", "b"), model="tiny"))
    (sequence,) = tree.ends
    node = tree.node(sequence, "")
    assert (node.model, node.untrainable) == ("tiny", "model: the turns were written by other, tiny")


def test_choices_of_one_call_are_sequences_of_their_own() -> None:
    assert spelt(turn("q.", "a"), turn("q.", "b"), turn("q.", "c")) == ["q.A", "q.B", "q.C"]


def test_several_continuations_of_one_line_each_have_all_that_came_before() -> None:
    assert spelt(turn("q.", "a"), turn("q.a|", "b"), turn("q.a|", "c")) == ["q.A|B", "q.A|C"]


def test_sequences_of_several_speakers_stay_in_the_order_in_which_they_were_begun() -> None:
    assert spelt(turn("x.", "a"), turn("y.", "b"), turn("x.a|", "c"), turn("y.b|", "d")) == ["x.A|C", "y.B|D"]


def test_the_longest_line_that_fits_is_continued() -> None:
    assert spelt(turn("q", "a"), turn("qa|", "b"), turn("qa|b|", "c"), turn("qa|x", "d")) == ["qA|B|C", "qA|xD"]


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=6), st.text("ab", min_size=1, max_size=3)), max_size=8))
def test_every_turn_is_trained_in_some_sequence_and_none_is_trained_at_what_no_turn_wrote(
    given: list[tuple[str, str]],
) -> None:
    turns = [turn(prompt, response) for prompt, response in given]
    tree = tree_of(*turns)
    assert {id(each) for sequence in tree.ends for each in sequence.turns} == {id(each) for each in turns}
    for sequence in tree.ends:
        node = tree.node(sequence, "")
        written = {
            place
            for each in sequence.turns
            for place in range(len(each.prompt_ids), len(each.prompt_ids) + len(each.response_ids))
        }
        assert [place for place, mask in enumerate(node.masked_tokens) if mask != -100] == sorted(written)
        for each in sequence.turns:
            start = len(each.prompt_ids)
            assert node.tokens[:start] == each.prompt_ids.tolist()
            assert node.tokens[start : start + len(each.response_ids)] == each.response_ids.tolist()


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=6), st.text("ab", min_size=1, max_size=3)), max_size=8))
def test_the_sequences_are_those_of_a_search_through_all_texts(given: list[tuple[str, str]]) -> None:
    texts, ends = list[str](), list[int]()
    for number, (prompt, response) in enumerate(given):
        prefixes = [n for n in reversed(range(number)) if prompt.startswith(texts[n])]
        parent = max(prefixes, key=lambda n: len(texts[n]), default=-1)
        texts.append(prompt + response)
        if parent in ends:
            ends[ends.index(parent)] = number
        else:
            ends.append(number)
    assert [text.lower() for text in spelt(*(turn(*each) for each in given))] == [texts[n] for n in ends]


def node(*turns: SampledTurn) -> SequenceNode:
    tree = tree_of(*turns)
    (sequence,) = tree.ends
    return tree.node(sequence, "text")


def test_logprobs_are_those_of_each_turn_and_one_elsewhere() -> None:
    got = node(turn("q", "aa", logprob=-0.25), turn("qaa|", "b", logprob=-0.75))
    assert got.logprobs == [1.0, -0.25, -0.25, 1.0, -0.75]


def test_a_sequence_with_a_turn_without_logprobs_has_none() -> None:
    assert node(turn("q", "a"), turn("qa|", "b", logprob=None)).logprobs is None


def test_a_sequence_is_as_old_as_its_oldest_turn_and_as_exact_as_its_least_exact() -> None:
    old = node(turn("q", "a", version=3), turn("qa", "b", version=2), turn("qab", "c"))
    assert (old.policy_version, old.exactness) == (2, "engine")
    text = node(turn("q", "a", exactness=Exactness.RETOKENIZED), turn("qa", "b", finish_reason="length"))
    assert (text.policy_version, text.exactness) == (None, "retokenized")
    assert text.metadata == {"finish_reason": "length", "turns": 2}


def test_a_node_makes_the_rollout_that_a_group_is_gathered_from() -> None:
    item = node(turn("q", "a", version=3)).item(0.5, messages=[{"role": "user", "content": "q"}])
    assert item == {
        "tokens": [113, 97],
        "masks": [-100, 97],
        "scores": 0.5,
        "inference_logprobs": [1.0, -0.5],
        "policy_version": 3,
        "exactness": "engine",
        "messages": [{"role": "user", "content": "q"}],
    }
