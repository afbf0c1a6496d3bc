"""Proof that an engine holds the weights that were sent: the SHA-256 of every tensor, computed at both ends.

- An engine keeps its weights in its own dtype, which these digests find out: those of one dtype match.
- An engine joins some tensors, and fills a vocabulary's last rows with zeros. The digest of what it joins is that of
  the bytes one after the other.
- An engine that splits its tensors over GPUs has other bytes. There, a tensor must change if and only if the tensors
  that it is made of have changed since the last sync.
- A module with tensors that nobody sent, such as the scales of a quantized layer, is in another form: it is left out.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from stepwell.errors import SyncFailed
from stepwell.trainers.transfers import WeightStream

if TYPE_CHECKING:
    import torch

Checksums: TypeAlias = Mapping[str, str]
"""An engine's digests, by names like dp0:pp0:pcp0:tp0:model.norm.weight."""

DTYPES = ("float32", "bfloat16", "float16")
JOINED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""The module of the engine that has the rows of a module of a checkpoint, and its place there."""
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
VOCABULARY_MULTIPLE = 64
EMPTY = hashlib.sha256().hexdigest()
"""The digest of a tensor that was replaced by a packed copy."""
SPLIT = re.compile(r"(tp|pcp)[1-9]\d*:")
"""A part of the name of a tensor of a rank that has only a part of it."""
NAMED = 3
"""Tensors that an error names."""


class SentDigests:
    """The digests of one stream of weights, by dtype and by the engine's names."""

    def __init__(self, dtypes: Sequence[str] = DTYPES) -> None:
        self._hashes = {dtype: defaultdict[str, "hashlib._Hash"](hashlib.sha256) for dtype in dtypes}
        self._parts: Counter[str] = Counter()
        self._unordered: set[str] = set()

    @property
    def dtypes(self) -> Sequence[str]:
        return tuple(self._hashes)

    def watch(self, weights: WeightStream) -> "Iterator[tuple[str, torch.Tensor]]":
        """The same stream, whose tensors are read on their way."""
        for name, tensor in weights:
            self._add(name, tensor)
            yield name, tensor

    def of(self, dtype: str) -> dict[str, str]:
        """The digests in this dtype, without tensors whose parts came in another order than the engine joins them."""
        hashes = self._hashes[dtype].items()
        return {name: found.hexdigest() for name, found in hashes if name not in self._unordered}

    def _add(self, name: str, tensor: "torch.Tensor") -> None:
        import torch

        types = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        module, _, kind = name.rpartition(".")
        parent, _, last = module.rpartition(".")
        joined, place = JOINED.get(last, (last, 0))
        target = ".".join(part for part in (parent, joined, kind) if part)
        if self._parts[target] != place:
            self._unordered.add(target)
        self._parts[target] += 1
        missing_rows = -len(tensor) % VOCABULARY_MULTIPLE if name.endswith(VOCABULARY) else 0
        for dtype, hashes in self._hashes.items():
            cast = tensor.to(types[dtype]) if tensor.is_floating_point() else tensor
            hashes[target].update(cast.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            if missing_rows:
                hashes[target].update(bytes(missing_rows * cast[0].nbytes))


class EngineProof:
    """The proven part of the weights of the engine at `url`."""

    def __init__(self, url: str) -> None:
        self.dtype: str | None = None
        """The dtype of its weights, once it was found."""
        self.has_checksums = True
        """Whether the engine reports checksums; vLLM before 0.32 does not."""
        self._url = url
        self._held: dict[str, list[str]] = {}
        self._sent: dict[str, str] = {}

    def check(self, sent: SentDigests, checksums: Checksums) -> int:
        """The number of the engine's tensors that are proven. SyncFailed names those that are not what was sent."""
        held: dict[str, list[str]] = defaultdict(list)
        for key in sorted(checksums):
            held[key.rpartition(":")[2]].append(checksums[key])
        dtype = self.dtype or max(sent.dtypes, key=lambda dtype: _count_equal(held, sent.of(dtype)))
        expected = sent.of(dtype)
        is_split = any(SPLIT.search(key) for key in checksums)
        other_form = {_module(name) for name, found in held.items() if name not in expected or EMPTY in found}
        known = [name for name in held if name in expected and _module(name) not in other_form]
        proven = {name for name in known if set(held[name]) == {expected[name]}}
        if is_split:
            unproven = [name for name in known if name not in proven and name in self._sent]
            proven |= {
                name for name in unproven if (held[name] == self._held[name]) == (expected[name] == self._sent[name])
            }
            wrong = [name for name in unproven if name not in proven]
        else:
            wrong = [name for name in known if name not in proven]
        if wrong:
            self.dtype = None  # it may have been restarted in another one
            raise SyncFailed(
                f"{self._url} does not hold the weights that were sent: {len(wrong)} of its {len(held)} tensors have "
                f"another checksum in {dtype}, such as {', '.join(wrong[:NAMED])}. It missed an update, or got other "
                f"weights; if it keeps them in a layout of its own, WeightSync(checksums=False) leaves this check out"
            )
        self.dtype, self._held, self._sent = (dtype if proven else None), held, expected
        return len(proven)


def _count_equal(held: Mapping[str, Sequence[str]], sent: Mapping[str, str]) -> int:
    return sum(sent.get(name) in found for name, found in held.items())


def _module(name: str) -> str:
    return name.rpartition(".")[0]
