import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rig.large_tokenizer import write_large_tokenizer
from rig.made_up_rollouts import RigTokenizer
from rig.vocabulary import ADDED_IDS, CONTROL_TOKENS, encode
from rig.waiting import until
from stepwell.common.tokenizers import (
    NO_TOKENIZER,
    BackgroundTokenizer,
    LoadedTokenizer,
    OnDemandTokenizer,
    TokenDecoder,
    load_decode,
    load_tokenizer,
)
from stepwell.errors import BadRequest, NotReady


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


async def test_a_tokenizer_that_is_loaded_in_the_background_says_what_it_lacks() -> None:
    tokenizer = BackgroundTokenizer("./none", load_tokenizer)
    assert tokenizer.why_not_ready() == "still loading from ./none"
    with pytest.raises(NotReady, match="the tokenizer is not ready: still loading"):
        tokenizer.decode([1])
    tokenizer.start()
    await until(
        lambda: (tokenizer.why_not_ready() or "").startswith("no tokenizer could be loaded from ./none: "), "it"
    )
    ready = BackgroundTokenizer("rig", lambda _: RigTokenizer())
    ready.start()
    await until(lambda: ready.why_not_ready() is None, "the tokenizer")
    assert ready.decode(encode("a")) == "a"


def test_decoding_by_a_folder_keeps_special_tokens_and_a_missing_one_is_an_error(tiny_model: Path) -> None:
    ids = encode("<|im_start|>user")
    assert load_decode(str(tiny_model))(ids) == load_tokenizer(str(tiny_model)).decode(ids) == "<|im_start|>user"
    with pytest.raises(BadRequest, match="no tokenizer could be loaded from ./none"):
        load_decode("./none")
    with pytest.raises(NotReady, match="2 tokens cannot be shown as text"):
        load_decode(None)([1, 2])


def test_a_tokenizer_is_the_same_with_and_without_transformers(tiny_model: Path) -> None:
    fast, slow = LoadedTokenizer.load(str(tiny_model)), LoadedTokenizer.of_transformers(load_tokenizer(str(tiny_model)))
    ids = encode("a ü<|im_end|> b .")
    assert fast.decode(ids) == slow.decode(ids) == "a ü<|im_end|> b ."
    assert fast.special_ids == slow.special_ids == {ADDED_IDS[token] for token in CONTROL_TOKENS}
    assert fast.id_of("*") == slow.id_of("*") == ord("*")
    assert fast.id_of("no such token") is slow.id_of("no such token") is None


KEEPS_NOTHING = """
import sys
from pathlib import Path
from tokenizers import Tokenizer
from stepwell.common.tokenizers import OnDemandTokenizer


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


start = resident()
tokenizer = OnDemandTokenizer.load(sys.argv[1])
checked = resident()
assert tokenizer.decode([0, 62]) == "a aa"
assert checked - start < (resident() - start) / 3, (start, checked, resident())
"""


def test_a_tokenizer_that_is_not_used_takes_no_memory(tmp_path: Path) -> None:
    write_large_tokenizer(tmp_path)
    subprocess.run([sys.executable, "-c", KEEPS_NOTHING, tmp_path], check=True)


BY_NAME = """
import sys
from stepwell.common.tokenizers import OnDemandTokenizer

assert OnDemandTokenizer.load("org/model").decode([97, 98]) == "ab"
assert not {"transformers", "torch"} & sys.modules.keys()
"""


def test_a_model_by_its_name_is_read_from_the_hubs_cache_without_transformers(tmp_path: Path, tiny_model: Path) -> None:
    kept = tmp_path / "models--org--model"
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    shutil.copy(tiny_model / "tokenizer.json", kept / "snapshots" / "abc")
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", BY_NAME], check=True, env=env)


def test_a_tokenizer_file_that_cannot_be_read_is_told_before_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadRequest, match="no tokenizer could be loaded from"):
        OnDemandTokenizer.load(str(tmp_path))


SERVES = """
import sys
from stepwell.common.tokenizers import BackgroundTokenizer, LoadedTokenizer, OnDemandTokenizer

for load in (LoadedTokenizer.load, OnDemandTokenizer.load):
    tokenizer = BackgroundTokenizer(sys.argv[1], load)
    tokenizer._run()
    assert tokenizer.decode([97, 98]) == "ab"
assert not {"transformers", "torch"} & sys.modules.keys()
assert tokenizer.encoder().encode("ab") == [97, 98]
assert "transformers" in sys.modules
"""


def test_a_server_that_only_decodes_does_not_import_transformers(tiny_model: Path) -> None:
    subprocess.run([sys.executable, "-c", SERVES, tiny_model], check=True)


def test_a_folder_that_does_not_exist_is_told_at_once(tiny_model: Path) -> None:
    for path in ("./none", "/no/such", "no/such/folder"):
        with pytest.raises(BadRequest, match=f"no tokenizer could be loaded from {path}: there is no such folder"):
            OnDemandTokenizer.load(path)


def test_a_tokenizer_that_decodes_and_cannot_encode_says_why(tmp_path: Path, tiny_model: Path) -> None:
    shutil.copy(tiny_model / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    tokenizer = OnDemandTokenizer.load(str(tmp_path))
    assert tokenizer.decode(encode("a")) == "a"
    with pytest.raises(BadRequest, match="no tokenizer could be loaded from"):
        tokenizer.encoder()
