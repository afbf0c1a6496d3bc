import random
from collections.abc import Sequence
from itertools import islice

from stepwell.demo.live_service import (
    CLOSINGS,
    CORRECTIONS,
    LENGTHS,
    MOST_REQUESTS,
    OK,
    THANKS,
    Reaction,
    SimulatedUser,
    of_like_length,
    shown,
)
from stepwell.rewards.builtin.next_state_rules import RULES, NextState, Utterance

from stepwell.demo.model import CONTEXT, ScriptTurn, make_tokenizer, row


def users(count: int = 200) -> list[SimulatedUser]:
    rng = random.Random(0)
    return [SimulatedUser(rng) for _ in range(count)]


def session(user: SimulatedUser, *, pleased: bool) -> list[Reaction]:
    """What a user does whose every request is answered right, or wrong."""
    user.opening()
    reactions = [user.react(user.wanted if pleased else "")]
    while reactions[-1].message is not None:
        reactions.append(user.react(user.wanted if pleased else ""))
    return reactions


def test_most_users_want_their_word_reversed_and_some_want_it_as_it_is() -> None:
    wanted = [(user.opening().split()[-1], user.wanted) for user in users()]

    assert {answer in (word, word[::-1]) for word, answer in wanted} == {True}
    assert 0.9 < sum(answer == word[::-1] for word, answer in wanted) / len(wanted) < 1.0


def test_a_pleased_user_thanks_and_asks_for_another_word() -> None:
    user = next(user for user in users() if user.opening() and user.react(user.wanted).message not in (None, *CLOSINGS))
    message = user.react(user.wanted).message

    assert message is None or message.split(",")[0] in THANKS


def test_a_displeased_user_corrects_or_repeats_the_same_request() -> None:
    for user in users():
        request = user.opening()
        message = user.react("").message
        if message is not None and message not in CLOSINGS:
            assert message == request or message.rpartition(", ")[0] in CORRECTIONS
            assert message.endswith(request)


def test_nobody_tells_what_is_wanted() -> None:
    for user in users():
        word = user.opening().split()[-1]
        message = user.react("").message or ""
        assert word[::-1] not in message


def test_sessions_are_short_and_end_with_a_closing_word_a_thumb_or_nothing() -> None:
    for pleased in (True, False):
        endings = set()
        for user in users():
            judged = [r for r in session(user, pleased=pleased) if r.accepted is not None]
            assert 1 <= len(judged) <= MOST_REQUESTS
            assert {r.accepted for r in judged} == {pleased}
            assert all(r.thumb is None for r in judged[:-1])
            assert judged[-1].thumb in (None, pleased)
            endings.add((judged[-1].message in (THANKS if pleased else CORRECTIONS), judged[-1].thumb))
        assert endings == {(True, None), (False, pleased), (False, None)}


def test_equal_seeds_give_equal_users() -> None:
    assert [session(user, pleased=True) for user in users()] == [session(user, pleased=True) for user in users()]


def test_the_warm_up_shows_every_order_of_the_letters_and_the_wanted_one_in_less_than_a_third() -> None:
    orders = [0] * 6
    for conversation in islice(shown(0), 600):
        for question, answer in zip(conversation[::2], conversation[1::2], strict=True):
            word = question.text.split()[-1]
            if question.text in CLOSINGS:
                assert answer.text == OK
            else:
                places = tuple(word.index(letter) for letter in answer.text)
                assert sorted(places) == [0, 1, 2]
                orders[2 * places[0] + (places[1] > places[2])] += 1

    *others, reverse = orders
    assert min(others) > 0.12 * sum(orders)
    assert max(others) < reverse < 0.32 * sum(orders)


def test_the_longest_session_fits_into_the_model() -> None:
    tokenizer = make_tokenizer()
    longest = max(len(row(tokenizer, conversation)[0]) for conversation in islice(shown(0), 300))

    assert longest < CONTEXT / 2


def judged(request: str, message: str) -> float | None:
    """The reward that `next_state` gives to the reply between the two."""
    state = NextState(request, "cab", (Utterance("user", message),))
    found = (rule.evidence(state) for rule in RULES)
    return next((evidence.reward for evidence in found if evidence is not None), None)


def test_what_users_say_next_tells_whether_they_were_content() -> None:
    for pleased in (True, False):
        for user in users():
            request: str | None = user.opening()
            while request is not None:
                reaction = user.react(user.wanted if pleased else "")
                if reaction.message is not None:
                    reward = judged(request, reaction.message)
                    assert reward is not None, (request, reaction.message)
                    assert (reward > 0) == pleased
                    if reaction.message in CLOSINGS:
                        break
                request = reaction.message


def test_conversations_of_like_length_come_together_and_none_is_left_out() -> None:
    count = 16
    sorted_ones = list(islice(of_like_length(shown(0), count), count * LENGTHS))
    plain = list(islice(shown(0), count * LENGTHS))

    def padded(conversations: list[Sequence[ScriptTurn]]) -> int:
        return sum(max(map(len, conversations[n : n + count])) for n in range(0, len(conversations), count))

    assert sorted(map(str, sorted_ones)) == sorted(map(str, plain))
    assert padded(sorted_ones) < 0.75 * padded(plain)
