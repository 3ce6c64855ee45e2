"""Which tensor of one model is which of another: all of them, or an error that lists why.

Nothing is dropped: a tensor that only one model has is accepted if it is a tied copy (the same
bytes as another tensor of that model, which the others have), and refused otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from blr_analysis.checks import some
from blr_analysis.errors import ModelError
from blr_analysis.files import Owned, Scratch, Source, Spec

PIECE = 2**20  # entries compared at a time
# The modules whose weights have a row for each token.
TABLES = {
    *("embed", "embed_in", "embed_tokens", "embedding", "embeddings", "shared", "wte"),
    *("tok_embeddings", "token_embedding", "word_embedding", "word_embeddings"),
    *("decoder", "embed_out", "lm_head", "output", "output_projection"),
}
MERGEABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Reads = Mapping[str, str]


def match(reference: Source, other: Source) -> dict[str, str]:
    """The name in ``other`` of every tensor of ``reference``.

    Raises:
        ModelError: tensors that only one of them has, of another shape, or numbers against
            integers.
    """
    reads = {name: name for name in reference.specs if name in other.specs}
    for name in reference.specs.keys() - reads.keys():
        if twin := _twin(reference, name, lambda n: n in other.specs and n in reference.specs):
            reads[name] = twin
    missing = [n for n in reference.specs if n not in reads]
    extra = [n for n in other.specs if n not in reference.specs]
    extra = [n for n in extra if not _twin(other, n, lambda t: t in reference.specs)]
    if missing or extra:
        raise ModelError(
            f"{other.name!r} and {reference.name!r} are not the same model: missing in the first: "
            f"{some(missing)}; only there: {some(extra)}. Save both with the same class"
        )
    pairs = ((n, reference.specs[n], other.specs[reads[n]]) for n in reference.specs)
    if wrong := [text for pair in pairs if (text := _difference(*pair))]:
        raise ModelError(f"{other.name!r} does not fit {reference.name!r}: {'; '.join(wrong[:5])}")
    return {name: reads[name] for name in reference.specs}


def _difference(name: str, mine: Spec, theirs: Spec) -> str:
    if mine.shape != theirs.shape:
        table = mine.shape[1:] == theirs.shape[1:] and layer_of(name) in TABLES
        hint = " (a vocabulary: set tokenizer_source)" if table else ""
        return f"{name!r} is {list(theirs.shape)}, expected {list(mine.shape)}{hint}"
    if (mine.dtype in MERGEABLE) != (theirs.dtype in MERGEABLE):
        return f"{name!r} is of {theirs.dtype}, expected {mine.dtype}"
    return ""


def layer_of(name: str) -> str:
    """The last word of a tensor's module."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _twin(source: Source, name: str, wanted: Callable[[str], bool]) -> str | None:
    """Another tensor of the same source with the very same bytes, such as a tied head."""
    spec = source.specs[name]
    alike = (n for n, s in source.specs.items() if n != name and s == spec and wanted(n))
    twins = (n for n in alike if same_bytes(source, name, source, n))
    return next(twins, None) if len(spec.shape) > 1 else None


def same_bytes(one: Source, name: str, two: Source, other: str, most: int | None = None) -> bool:
    """Whether two tensors, or their beginnings, agree to the bit, dtype and shape too."""
    spec = one.specs[name]
    if spec != two.specs[other]:
        return False
    mine, theirs, end = Scratch(), Scratch(), spec.numel if most is None else min(most, spec.numel)
    for start in range(0, end, PIECE):
        stop = min(start + PIECE, end)
        a = one.read(name, start, stop, mine).contiguous().view(torch.uint8)
        b = two.read(other, start, stop, theirs).contiguous().view(torch.uint8)
        if not torch.equal(a, b):
            return False
    return True


def differs_somewhere(base: Source, other: Source, reads: Reads) -> bool:
    """Whether a model has any entry that its base has not: a look at every tensor's beginning
    finds nearly every fine-tune out at once; only if none differs is all of it read."""
    floats = [n for n, s in base.specs.items() if s.dtype in MERGEABLE]
    pairs = ((n, most) for most in (4096, None) for n in floats)
    return any(not same_bytes(base, n, other, reads[n], most) for n, most in pairs)


Known = tuple[Source, int]  # a model, and how many rows of its tables stand for tokens


def table_lengths(source: Source) -> frozenset[int]:
    """How many rows the tables of a model have, by the names of their modules."""
    specs = source.specs.items()
    return frozenset(_length(s) for name, s in specs if s.shape and layer_of(name) in TABLES)


def token_tensors(models: Sequence[Known]) -> frozenset[str]:
    """The tensors that have a row, or a number, for each token: those of the usual names, and those
    that are as long as the tables in every model where the models' tables differ in length."""
    lengths = [max(table_lengths(source), default=0) for source, _ in models]
    names = {name for source, _ in models for name, spec in source.specs.items() if spec.shape}
    return frozenset(
        name
        for name in names
        if _is_table(name, models) or (len({*lengths}) > 1 and _follows(name, models, lengths))
    )


def _is_table(name: str, models: Sequence[Known]) -> bool:
    """Whether a tensor is named as a table, and long enough for the tokens."""
    return layer_of(name) in TABLES and all(
        _length(source.specs[name]) >= min(count, max(table_lengths(source)))
        for source, count in models
        if name in source.specs
    )


def _follows(name: str, models: Sequence[Known], lengths: Sequence[int]) -> bool:
    """Whether a tensor is as long as the tables in every model."""
    return all(
        name not in source.specs or _length(source.specs[name]) == length
        for (source, _), length in zip(models, lengths, strict=True)
    )


def _length(spec: Spec) -> int:
    """The first size that is not 1: that of a bias may stand behind one."""
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
        own: Known,
        lenders: Sequence[Known],
        tables: Collection[str],
        *,
        empty: Mapping[str, float] | None = None,
    ) -> None:
        model, _ = own
        self._own = model
        self.name, self.origin = model.name, model.origin
        self.whole, self._empty = model.whole or model, empty or {}
        self.specs = dict(model.specs)
        # By tensor, who has the entries up to which end, and under which name.
        self._owners: dict[str, list[tuple[Source, str, int]]] = {}
        for name in model.specs.keys() & tables:
            spec = model.specs[name]
            axis = spec.shape.index(_length(spec))
            shape = (*spec.shape[:axis], rows, *spec.shape[axis + 1 :])
            self.specs[name] = Spec(shape, spec.dtype)
            width = math.prod(shape[axis + 1 :])
            owners = [(source, _lent(model, name, source), k) for source, k in (own, *lenders)]
            if lenders:
                owners.append((model, name, rows))
            self._owners[name] = [
                (source, lent, min(count, _length(source.specs[lent])) * width)
                for source, lent, count in owners
                if lent is not None
            ]

    def words(self, name: str) -> str:
        return self._own.words(name)

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        if name not in self._owners:
            return self._own.read(name, start, stop, scratch)
        spec = self.specs[name]
        scratch = Owned(scratch, self)
        out = scratch.array("rows", stop - start, spec.dtype).fill_(self._empty.get(name, 0.0))
        at = start
        for source, lent, end in self._owners[name]:
            until = min(stop, end)
            if at < until:
                out[at - start : until - start] = source.read(lent, at, until, scratch)
                at = until
        return out


def _lent(model: Source, name: str, lender: Source) -> str | None:
    """The lender's name of a model's table: its own, or that of the table it is tied to."""
    if name in lender.specs:
        return name
    return _twin(model, name, lambda twin: twin in lender.specs)
