from collections.abc import Sequence

from stepwell.common.tokenizers import NO_TOKENIZER, TokenDecoder
from tests.rig.made_up_rollouts import RigTokenizer
from tests.rig.vocabulary import encode


class Spaced:
    """As sentencepiece does: a word's space is lost where it comes first."""

    words = ("", " the", " sum", " is")

    def start(self) -> None:
        pass

    def why_not_ready(self) -> str | None:
        return None

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[token] for token in ids).removeprefix(" ")


def test_single_texts_joined_are_the_whole() -> None:
    decoder = TokenDecoder(RigTokenizer())
    ids = encode("<|im_start|>user\nçava 你好 🙂<|im_end|>")
    texts = decoder.texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == decoder.text(ids) == "<|im_start|>user\nçava 你好 🙂<|im_end|>"
    assert texts[0] == "<|im_start|>"


def test_a_character_stands_with_the_last_of_its_tokens() -> None:
    assert TokenDecoder(RigTokenizer()).texts(encode("a🙂b")) == ["a", "", "", "", "🙂", "b"]


def test_a_character_that_is_cut_off_is_shown_as_broken() -> None:
    texts = TokenDecoder(RigTokenizer()).texts(encode("a🙂")[:-1])
    assert texts[0] == "a"
    assert set("".join(texts[1:])) == {"\N{REPLACEMENT CHARACTER}"}


def test_bytes_that_are_no_text_keep_what_is_round_them() -> None:
    texts = TokenDecoder(RigTokenizer()).texts([97, 0xFF, 0xFF, 98])
    assert "".join(texts).startswith("a")
    assert "".join(texts).endswith("b")


def test_a_tokens_text_is_what_it_adds_where_it_stands() -> None:
    assert TokenDecoder(Spaced()).texts([1, 2, 3, 2]) == ["the", " sum", " is", " sum"]


def test_nothing_is_nothing() -> None:
    assert TokenDecoder(RigTokenizer()).texts([]) == []


def test_without_a_tokenizer_it_says_why() -> None:
    assert TokenDecoder(None).why_not() == NO_TOKENIZER
    loading = RigTokenizer()
    loading.missing = "still loading"
    assert TokenDecoder(loading).why_not() == "still loading"
    assert TokenDecoder(RigTokenizer()).why_not() == ""
