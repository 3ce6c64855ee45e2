"""Models are opened here, and their tensors matched: which tensor of one is which of another.

No tensor is dropped. A tensor that only one model has is accepted if it is a tied copy: if another
tensor of that model has the same bytes, and the other models have that one. Otherwise the models
are refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blr_analysis.adapters import is_adapter, open_adapter
from blr_analysis.checks import some
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import Folder, Loaded, Owned, Scratch, Source, Spec, same_bytes
from blr_analysis.files.names import TOKEN_TABLES, module_word
from blr_analysis.models import unwrapped

FIRST_LOOK = 4096  # entries at the start of each tensor that are compared before the others
# Dtypes of numbers that are merged; tensors of others must be the same in all models.
MERGEABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Names = Mapping[str, str]


def is_place(model: Any) -> bool:
    """Whether a model or a precision is the name of a folder or file."""
    return isinstance(model, str | os.PathLike)


def open_model(model: Any, name: str, base: Source | None = None) -> Source:
    """The tensors of a folder or file, an adapter added to its base, a state dict or a module.

    Args:
        name: of a model in memory, for messages.
        base: the base of an adapter.
    """
    if isinstance(model, nn.Module):
        return Loaded(name, unwrapped(model).state_dict())
    if not is_place(model):
        return Loaded(name, model)
    if not is_adapter(model):
        return Folder.open(model)
    if base is None:
        raise InputError(f"{str(model)!r} is an adapter: name its base model")
    return open_adapter(model, base, dtype=torch.float32)


def match(reference: Source, other: Source) -> dict[str, str]:
    """The name in ``other`` of every tensor of ``reference``.

    Raises:
        ModelError: tensors that only one of them has, of another shape, or numbers against
            integers.
    """
    names = {name: name for name in reference.specs if name in other.specs}
    for name in reference.specs.keys() - names.keys():
        twin = _twin(reference, name, lambda candidate: candidate in other.specs)
        if twin is not None:
            names[name] = twin
    missing = [name for name in reference.specs if name not in names]
    extra = [
        name
        for name in other.specs
        if name not in reference.specs
        and not _twin(other, name, lambda candidate: candidate in reference.specs)
    ]
    if missing or extra:
        raise ModelError(
            f"{other.name!r} and {reference.name!r} are not the same model: missing in the first: "
            f"{some(missing)}; only there: {some(extra)}. Save both with the same class"
        )
    differences = [
        _difference(name, spec, other.specs[names[name]]) for name, spec in reference.specs.items()
    ]
    differences = [difference for difference in differences if difference]
    if differences:
        raise ModelError(
            f"{other.name!r} does not fit {reference.name!r}: {'; '.join(differences[:5])}"
        )
    return {name: names[name] for name in reference.specs}


def _difference(name: str, expected: Spec, spec: Spec) -> str:
    """How a tensor differs from the one that is expected, in words; "" where it does not."""
    if expected.shape != spec.shape:
        only_rows_differ = expected.shape[1:] == spec.shape[1:]
        is_table = only_rows_differ and module_word(name) in TOKEN_TABLES
        hint = " (a vocabulary: set tokenizer_source)" if is_table else ""
        return f"{name!r} is {list(spec.shape)}, expected {list(expected.shape)}{hint}"
    if (expected.dtype in MERGEABLE) != (spec.dtype in MERGEABLE):
        return f"{name!r} is of {spec.dtype}, expected {expected.dtype}"
    return ""


def _twin(source: Source, name: str, fits: Callable[[str], bool]) -> str | None:
    """Another tensor with the same bytes, such as a tied head, whose name ``fits``; or None."""
    spec = source.specs[name]
    if len(spec.shape) < 2:
        return None
    for twin, twin_spec in source.specs.items():
        is_candidate = twin != name and twin_spec == spec and fits(twin)
        if is_candidate and same_bytes(source, name, source, twin):
            return twin
    return None


def differs_somewhere(base: Source, other: Source, names: Names) -> bool:
    """Whether some entry of a model differs from its base.

    The start of every tensor is compared first, which is enough for nearly every fine-tuned model.
    Only if all starts are equal are the tensors read as a whole.
    """
    mergeable = [name for name, spec in base.specs.items() if spec.dtype in MERGEABLE]
    return any(
        not same_bytes(base, name, other, names[name], limit)
        for limit in (FIRST_LOOK, None)
        for name in mergeable
    )


Counted = tuple[Source, int]  # a model, and the number of its tokens


def table_lengths(source: Source) -> frozenset[int]:
    """The numbers of rows of a model's token tables, which their modules' names tell."""
    tables = [
        spec
        for name, spec in source.specs.items()
        if spec.shape and module_word(name) in TOKEN_TABLES
    ]
    return frozenset(_length(table) for table in tables)


def token_tensors(models: Sequence[Counted]) -> frozenset[str]:
    """The names of the tensors that have a row, or a number, for each token.

    Most are recognised by their usual names. Where the models' tables differ in length, tensors
    that are as long as the tables in every model count too.
    """
    lengths = [max(table_lengths(source), default=0) for source, _ in models]
    names = {name for source, _ in models for name, spec in source.specs.items() if spec.shape}
    by_name = {name for name in names if _is_table(name, models)}
    lengths_differ = len(set(lengths)) > 1
    if not lengths_differ:
        return frozenset(by_name)
    by_length = {name for name in names if _has_length_of_tables(name, models, lengths)}
    return frozenset(by_name | by_length)


def _is_table(name: str, models: Sequence[Counted]) -> bool:
    """Whether a tensor has the name of a table, and is long enough for the tokens."""
    return module_word(name) in TOKEN_TABLES and all(
        _length(source.specs[name]) >= min(count, max(table_lengths(source)))
        for source, count in models
        if name in source.specs
    )


def _has_length_of_tables(name: str, models: Sequence[Counted], lengths: Sequence[int]) -> bool:
    """Whether a tensor is as long as the tables in every model."""
    return all(
        name not in source.specs or _length(source.specs[name]) == length
        for (source, _), length in zip(models, lengths, strict=True)
    )


def _length(spec: Spec) -> int:
    """The first size that is not 1: a bias may have the shape [1, length]."""
    return next((size for size in spec.shape if size != 1), 1)


class Lengthened(Source):
    """A model whose token tables have a new number of rows.

    A row that stands for one of the model's tokens is its own. Another row is that of the first
    lender that has the token. If no lender has it, the row is what the model's own table holds
    there.

    Args:
        rows: the number of rows.
        borrower: the model.
        lenders: models that rows are borrowed from.
        tables: the names of the tensors with a row for each token.
        empty: by tensor, the number that fills rows that no model has.
    """

    def __init__(
        self,
        rows: int,
        borrower: Counted,
        lenders: Sequence[Counted],
        tables: Collection[str],
        *,
        empty: Mapping[str, float] | None = None,
    ) -> None:
        model, _ = borrower
        self._model = model
        self.name = model.name
        self.origin = model.origin
        self.whole = model.whole or model
        self._empty = empty or {}
        self.specs = dict(model.specs)
        self._owners: dict[str, list[_Owner]] = {}
        for name in model.specs.keys() & tables:
            spec = model.specs[name]
            axis = spec.shape.index(_length(spec))
            shape = (*spec.shape[:axis], rows, *spec.shape[axis + 1 :])
            self.specs[name] = Spec(shape, spec.dtype)
            entries_per_row = math.prod(shape[axis + 1 :])
            counted = [borrower, *lenders]
            if lenders:
                counted.append((model, rows))
            self._owners[name] = _owners_of(name, model, counted, entries_per_row)

    def words(self, name: str) -> str:
        return self._model.words(name)

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        if name not in self._owners:
            return self._model.read(name, start, stop, scratch)
        spec = self.specs[name]
        scratch = Owned(scratch, self)
        values = scratch.array("rows", stop - start, spec.dtype).fill_(self._empty.get(name, 0.0))
        low = start
        for owner in self._owners[name]:
            high = min(stop, owner.end)
            if low < high:
                borrowed = owner.source.read(owner.name, low, high, scratch)
                values[low - start : high - start] = borrowed
                low = high
        return values


class _Owner(NamedTuple):
    """A model that gives the next rows of a lengthened table.

    Attributes:
        source: the model.
        name: its name of the table.
        end: the entry before which its rows end.
    """

    source: Source
    name: str
    end: int


def _owners_of(
    name: str, model: Source, counted: Sequence[Counted], entries_per_row: int
) -> list[_Owner]:
    """The owners of a table's rows, in the order in which they give rows.

    Args:
        name: the name of the table in ``model``.
        counted: the models, and up to which row each has rows.
    """
    owners = []
    for source, count in counted:
        stored_name = _name_in(source, model, name)
        if stored_name is not None:
            n_rows = min(count, _length(source.specs[stored_name]))
            owners.append(_Owner(source, stored_name, n_rows * entries_per_row))
    return owners


def _name_in(lender: Source, model: Source, name: str) -> str | None:
    """The lender's name of a model's table, or of a table that the model ties it to.

    None where the lender has neither.
    """
    if name in lender.specs:
        return name
    return _twin(model, name, lambda twin: twin in lender.specs)
