"""A batch's rows as a trainer holds them: arrays that core/ computed, with a way into torch, which it must not know."""

from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from stepwell.pool.client.tensors import arrays_of, tensors
from stepwell.steps.padding import Overlong, PaddedSteps
from stepwell.steps.rows import MergedRows, PaddedRows, pad_rows

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance

V = TypeVar("V", bound="DataclassInstance")


class PaddedBatch(PaddedSteps):
    """One row a step; see PaddedSteps."""

    __slots__ = ()

    def to_torch(self) -> "dict[str, torch.Tensor]":
        """Every array under its name here; uids stay behind."""
        return tensors(arrays_of(self))


class PaddedMergedBatch(PaddedRows):
    """Merged rows in a rectangle; see PaddedRows."""

    __slots__ = ()

    def to_torch(self) -> "dict[str, torch.Tensor]":
        return tensors(arrays_of(self))


class MergedBatch(MergedRows):
    """Rows of steps that extend one another; see MergedRows."""

    __slots__ = ()

    def padded(self, length: int, *, pad_id: int = 0, overlong: Overlong = "raise") -> PaddedMergedBatch:
        """Rows of `length` tokens. A row that is longer raises, or is left out with `overlong="drop"`."""
        return as_a(PaddedMergedBatch, pad_rows(self, length, pad_id=pad_id, overlong=overlong))

    def to_torch(self) -> "dict[str, torch.Tensor]":
        return tensors(arrays_of(self))


def as_a(kind: type[V], computed: "DataclassInstance") -> V:
    """The same fields under a class that adds methods and no field."""
    return kind(**{field.name: getattr(computed, field.name) for field in fields(computed)})
