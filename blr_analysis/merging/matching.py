"""Which tensor of one model is which tensor of another: all of them, or an error that lists why.

Nothing is dropped: a tensor that only one model has is accepted if it is a tied copy (the same
bytes as another tensor of that model, which the others have), and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from blr_analysis.checks import some
from blr_analysis.errors import ModelError
from blr_analysis.files import Scratch, Source, Spec

PIECE = 2**20  # entries compared at a time
MERGEABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Reads = Mapping[str, str]
# The modules whose weights have a row for each token.
INPUTS = {"embed", "embed_in", "embed_tokens", "embedding", "embeddings", "shared", "wte"}
INPUTS |= {"tok_embeddings", "token_embedding", "word_embedding", "word_embeddings"}
OUTPUTS = {"decoder", "embed_out", "lm_head", "output", "output_projection"}


def match(reference: Source, other: Source) -> dict[str, str]:
    """The name in ``other`` of every tensor of ``reference``.

    Raises:
        ModelError: tensors that only one of them has, of another shape, or numbers against
            integers.
    """
    reads = {name: name for name in reference.specs if name in other.specs}
    missing = [name for name in reference.specs if name not in reads]
    extra = [name for name in other.specs if name not in reference.specs]
    for name in list(missing):
        twin = twin_of(reference, name, lambda n: n in reads)
        if twin is not None:
            reads[name] = twin
            missing.remove(name)
    extra = [n for n in extra if twin_of(other, n, lambda t: t in reference.specs) is None]
    if missing or extra:
        raise ModelError(
            f"{other.name!r} and {reference.name!r} are not the same model: missing in the first: "
            f"{some(missing)}; only there: {some(extra)}.{_hint(missing, extra)}"
        )
    odd = [
        _difference(name, reference.specs[name], other.specs[reads[name]])
        for name in reference.specs
    ]
    wrong = [text for text in odd if text]
    if wrong:
        more = "" if len(wrong) <= 5 else f"; and {len(wrong) - 5} more"
        raise ModelError(
            f"{other.name!r} does not fit {reference.name!r}: {'; '.join(wrong[:5])}{more}"
        )
    return {name: reads[name] for name in reference.specs}


def twin_of(source: Source, name: str, wanted: Callable[[str], bool]) -> str | None:
    """Another tensor of the same source with the very same bytes, such as a tied head."""
    spec = source.specs[name]
    if len(spec.shape) < 2:
        return None
    for twin, other in source.specs.items():
        if (
            twin != name
            and other == spec
            and wanted(twin)
            and same_bytes(source, name, source, twin)
        ):
            return twin
    return None


def same_bytes(one: Source, name: str, two: Source, other: str) -> bool:
    """Whether two tensors of one spec agree to the bit."""
    spec = one.specs[name]
    if spec != two.specs[other]:
        return False
    mine, theirs = Scratch(), Scratch()
    for start in range(0, spec.numel, PIECE):
        stop = min(start + PIECE, spec.numel)
        a = one.read(name, start, stop, mine).contiguous().view(torch.uint8)
        b = two.read(other, start, stop, theirs).contiguous().view(torch.uint8)
        if not torch.equal(a, b):
            return False
    return True


def differs_somewhere(base: Source, other: Source, reads: Reads) -> bool:
    """Whether a model has any entry that its base has not: a look at every tensor's beginning
    finds nearly every fine-tune out at once; only if none differs is all of it read."""
    floats = [n for n, s in base.specs.items() if s.dtype in MERGEABLE]
    for most in (4096, None):
        for name in floats:
            numel = base.specs[name].numel
            end = numel if most is None else min(most, numel)
            for start in range(0, end, PIECE):
                stop = min(start + PIECE, end)
                mine = base.read(name, start, stop, Scratch())
                theirs = other.read(reads[name], start, stop, Scratch())
                if not torch.equal(mine.double(), theirs.double().to(mine.device)):
                    return True
    return False


def _difference(name: str, mine: Spec, theirs: Spec) -> str:
    if mine.shape != theirs.shape:
        text = f"{name!r} is {list(theirs.shape)}, expected {list(mine.shape)}"
        if len(mine.shape) == 2 and mine.shape[1:] == theirs.shape[1:] and _is_vocabulary(name):
            text += " (a vocabulary: set tokenizer_source)"
        return text
    if (mine.dtype in MERGEABLE) != (theirs.dtype in MERGEABLE):
        return f"{name!r} is of {theirs.dtype}, expected {mine.dtype}"
    return ""


def _is_vocabulary(name: str) -> bool:
    return any(part in name for part in ("embed", "lm_head", "wte", "output_projection"))


def _hint(missing: list[str], extra: list[str]) -> str:
    for names, others in ((missing, extra), (extra, missing)):
        tails = {n: next((o for o in others if o.endswith(f".{n}")), None) for n in names}
        if names and all(tails.values()):
            return " One has a prefix that the other has not: save both with the same class."
    return " Give models of one architecture, saved by the same class."
