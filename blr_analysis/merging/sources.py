"""Models opened, and which tensor of one is which of another: all, or an error that lists why.

Nothing is dropped: a tensor that only one model has is accepted if it is a tied copy (the same
bytes as another tensor of that model, which the others have), and refused otherwise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.adapters import is_adapter, open_adapter
from blr_analysis.checks import some
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import Folder, Loaded, Owned, Scratch, Source, Spec, same_bytes
from blr_analysis.files.names import TOKEN_TABLES, module_word
from blr_analysis.models import unwrapped

FIRST_LOOK = 4096  # entries of each tensor that are compared first
MERGEABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Names = Mapping[str, str]


def is_place(model: Any) -> bool:
    """Whether a model or a precision is the name of a folder or file."""
    return isinstance(model, str | os.PathLike)


def open_model(model: Any, name: str, base: Source | None = None) -> Source:
    """A folder's tensors, an adapter's added to ``base``, or those of a state dict or module."""
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
    """What makes one tensor another than is expected, in words; "" where nothing does."""
    if expected.shape != spec.shape:
        only_rows_differ = expected.shape[1:] == spec.shape[1:]
        is_table = only_rows_differ and module_word(name) in TOKEN_TABLES
        hint = " (a vocabulary: set tokenizer_source)" if is_table else ""
        return f"{name!r} is {list(spec.shape)}, expected {list(expected.shape)}{hint}"
    if (expected.dtype in MERGEABLE) != (spec.dtype in MERGEABLE):
        return f"{name!r} is of {spec.dtype}, expected {expected.dtype}"
    return ""


def _twin(source: Source, name: str, fits: Callable[[str], bool]) -> str | None:
    """Another tensor of the same source with the very same bytes, such as a tied head."""
    spec = source.specs[name]
    if len(spec.shape) < 2:
        return None
    for twin, twin_spec in source.specs.items():
        is_candidate = twin != name and twin_spec == spec and fits(twin)
        if is_candidate and same_bytes(source, name, source, twin):
            return twin
    return None


def differs_somewhere(base: Source, other: Source, names: Names) -> bool:
    """Whether a model has any entry that its base has not: a look at every tensor's beginning
    finds nearly every fine-tune out at once; only if none differs is all of it read."""
    numbers = [name for name, spec in base.specs.items() if spec.dtype in MERGEABLE]
    return any(
        not same_bytes(base, name, other, names[name], limit)
        for limit in (FIRST_LOOK, None)
        for name in numbers
    )


Counted = tuple[Source, int]  # a model, and how many rows of its tables stand for tokens


def table_lengths(source: Source) -> frozenset[int]:
    """How many rows the tables of a model have, by the names of their modules."""
    tables = [
        spec
        for name, spec in source.specs.items()
        if spec.shape and module_word(name) in TOKEN_TABLES
    ]
    return frozenset(_length(table) for table in tables)


def token_tensors(models: Sequence[Counted]) -> frozenset[str]:
    """The tensors that have a row, or a number, for each token.

    These have one of the usual names. Where the models' tables differ in length, a tensor that is
    as long as the tables in every model is one of them, too.
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
    """Whether a tensor is named as a table, and long enough for the tokens."""
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
    """A model whose tables have as many rows as are asked for.

    A row is the model's own as far as it stands for a token, else that of the first lender that has
    the token, else what the model's own table has there.

    Args:
        rows: how many.
        own: the model.
        lenders: models that rows are borrowed from.
        tables: the names of the tensors with a row for each token.
        empty: by tensor, what stands where nobody has a row.
    """

    def __init__(
        self,
        rows: int,
        own: Counted,
        lenders: Sequence[Counted],
        tables: Collection[str],
        *,
        empty: Mapping[str, float] | None = None,
    ) -> None:
        model, _ = own
        self._own = model
        self.name = model.name
        self.origin = model.origin
        self.whole = model.whole or model
        self._empty = empty or {}
        self.specs = dict(model.specs)
        # By tensor: a source, its name of the tensor, and the end of the entries that it gives.
        self._owners: dict[str, list[tuple[Source, str, int]]] = {}
        for name in model.specs.keys() & tables:
            spec = model.specs[name]
            axis = spec.shape.index(_length(spec))
            shape = (*spec.shape[:axis], rows, *spec.shape[axis + 1 :])
            self.specs[name] = Spec(shape, spec.dtype)
            width = math.prod(shape[axis + 1 :])
            owners = [
                (source, _name_in(source, model, name), count) for source, count in (own, *lenders)
            ]
            if lenders:
                owners.append((model, name, rows))
            self._owners[name] = [
                (source, stored_name, min(count, _length(source.specs[stored_name])) * width)
                for source, stored_name, count in owners
                if stored_name is not None
            ]

    def words(self, name: str) -> str:
        return self._own.words(name)

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        if name not in self._owners:
            return self._own.read(name, start, stop, scratch)
        spec = self.specs[name]
        scratch = Owned(scratch, self)
        out = scratch.array("rows", stop - start, spec.dtype).fill_(self._empty.get(name, 0.0))
        low = start
        for source, stored_name, end in self._owners[name]:
            high = min(stop, end)
            if low < high:
                out[low - start : high - start] = source.read(stored_name, low, high, scratch)
                low = high
        return out


def _name_in(lender: Source, model: Source, name: str) -> str | None:
    """The lender's name of a model's table: its own, or that of the table it is tied to."""
    if name in lender.specs:
        return name
    return _twin(model, name, lambda twin: twin in lender.specs)
