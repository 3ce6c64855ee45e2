"""Which tensor of one model is which of another: all of them, or an error that lists why.

Nothing is dropped: a tensor that only one model has is accepted if it is a tied copy (the same
bytes as another tensor of that model, which the others have), and refused otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

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


class Lengthened(Source):
    """A model whose tables have the rows that others appended: its own, else those of the first
    lender that has them; ``empty``: by tensor, what stands where nobody has any."""

    def __init__(
        self, rows: int, own: Known, *lenders: Known, empty: Mapping[str, float] | None = None
    ) -> None:
        model = self._own = own[0]
        self.name, self.origin = model.name, model.origin
        self.whole, self._empty = model.whole or model, empty or {}
        self.specs = dict(model.specs)
        self._held: dict[str, list[Known]] = {}
        for n, spec in model.specs.items():
            if spec.shape and layer_of(n) in TABLES:
                self.specs[n] = Spec((rows, *spec.shape[1:]), spec.dtype)
                width, having = math.prod(spec.shape[1:]), [own, *lenders]
                ends = [(s, min(k, s.specs[n].shape[0]) * width) for s, k in having if n in s.specs]
                self._held[n] = ends

    def words(self, name: str) -> str:
        return self._own.words(name)

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        if name not in self._held:
            return self._own.read(name, start, stop, scratch)
        spec, scratch, at = self.specs[name], Owned(scratch, self), start
        out = scratch.array("rows", stop - start, spec.dtype).fill_(self._empty.get(name, 0.0))
        for source, end in self._held[name]:
            until = min(stop, end)
            if at < until:
                out[at - start : until - start] = source.read(name, at, until, scratch)
                at = until
        return out
