import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepwell.gateway.dialects.responses_output import CustomInput, custom_input


@given(st.text(), st.booleans())
def test_the_input_is_the_text_that_the_arguments_hold(text: str, ascii_only: bool) -> None:
    assert custom_input(json.dumps({"input": text}, ensure_ascii=ascii_only)) == text


ARGUMENTS = st.text('{}":,\\ abu0dD8cEf\n').map('{"input": "'.__add__) | st.text('{}"input: \\')


@given(ARGUMENTS, st.lists(st.integers(0, 80)))
def test_pieces_make_no_difference(arguments: str, places: list[int]) -> None:
    decoder, bounds = CustomInput(), [0, *sorted(places), len(arguments)]
    pieces = [decoder.feed(arguments[start:end]) for start, end in pairwise(bounds)]
    assert "".join(pieces) + decoder.end() == custom_input(arguments)


@pytest.mark.parametrize(
    "arguments", ["", "ls -l", '{"command": "ls"}', '{"input": 5}', '{"inp', "[1]", " " * 70 + '{"input": "x"}']
)
def test_arguments_of_another_form_are_the_input(arguments: str) -> None:
    assert custom_input(arguments) == arguments


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "half', "half"),
        ('{"input": "end"} and more', "end"),
        ('{"input": "a\nb"}', "a\nb"),
        (r'{"input": "\q\ud83d"}', "\\q\ufffd"),
        ('{"input": "x\\', "x\\"),
        (r'{ "input" : "\u00e9\ud83d\ude42" }', "é🙂"),
    ],
)
def test_a_text_that_is_not_quite_json_is_read_as_far_as_it_goes(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text


def test_text_is_shown_before_the_arguments_have_ended() -> None:
    decoder = CustomInput()
    assert decoder.feed('{"input": "*** Begin') == "*** Begin"
    assert decoder.feed(" Patch") == " Patch"
