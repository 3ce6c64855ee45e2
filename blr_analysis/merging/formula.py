"""The merge of one tensor: gradient matching, and what it becomes where precisions are missing.

With θ_0 the base, H_0 its precision plus δ, and for task t the weights θ_t, the precision H_t of
its data alone (summed over its examples, no prior in it) and the task weight α_t, entry by entry

    θ = θ_0 + Σ_t α_t H̄⁻¹ (H_0 + H_t) (θ_t − θ_0),      H̄ = H_0 + Σ_t α_t H_t

(Daheim et al., ICLR 2024, "Model merging by uncertainty-based gradient matching", Eq. 12). As
sums of natural parameters: λ = λ_prior + Σ_t α_t (λ_t − λ_prior). Special cases:

* all H_t = 0 and H_0 > 0: θ_0 + Σ_t α_t (θ_t − θ_0), task arithmetic;
* H_0 = 0: Σ_t α_t H_t θ_t / Σ_t α_t H_t, the Fisher-weighted average, whatever θ_0 is;
* H_0 = 0 and all H_t equal: the average with weights α_t / Σ_t α_t;
* quadratic losses with Hessians H_t, α_t = 1, θ_t the minimum of task t's loss plus the base's:
  the minimum of all tasks' losses together.

An entry with H̄ ≤ 0 (no precision at all, or α_t < 0) has no such step. Task arithmetic stands
there instead, and the entry is counted. So is an entry where negative α_t leave less of H̄ than a
tenth of H_0 + Σ_t |α_t| H_t: divided by so small a number, the step would grow without bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.files import Scratch

BOUND = 0.1  # of H_0 + Σ|α|H: a smaller H̄ is no precision to divide by
BLOCK = 2**17  # entries at a time, which fit into a core's cache
# The integers of a float's size, by its bytes: torch's with a sign, numpy's without.
WORDS = {
    2: (torch.int16, "uint16"),
    4: (torch.int32, "uint32"),
    8: (torch.int64, "uint64"),
}
PrecisionValue = Tensor | float


def combine_into(
    out: Tensor,
    base: Tensor | None,
    models: Sequence[Tensor],
    weights: Sequence[float],
    precisions: Sequence[PrecisionValue],
    base_precision: PrecisionValue,
    scratch: Scratch | None = None,
    *,
    counts: bool = True,
) -> int:
    """Merge one tensor of several models, all flat, into ``out``; see the module for the formula.

    The dtype of ``out`` is that of the arithmetic. Without a base, the average Σα θ / Σα is the
    reference of precisions; without these, too, the result is the plain sum Σα θ. It works through
    blocks of :data:`BLOCK` entries, so that the result has the same bits however a tensor is cut at
    multiples of it. ``base_precision`` holds δ already.

    Args:
        counts: whether entries without a precision are counted, where all precisions are numbers.

    Returns:
        The number of entries where task arithmetic stands, see the module; what no model has
        changed is not counted.
    """
    if scratch is None:
        scratch = Scratch()
    all_precisions = (base_precision, *precisions)
    numbers_only = not any(isinstance(precision, Tensor) for precision in all_precisions)
    fallback = 0
    for low in range(0, len(out), BLOCK):
        piece = slice(low, low + BLOCK)
        block = _Workspace(out[piece], scratch)
        parts = [model[piece] for model in models]
        start = None if base is None else base[piece]
        if numbers_only:
            shares, undefined = _shares(weights, precisions, base_precision)
            block.add_up(start, parts, shares)
            if undefined and counts:
                fallback += int(_moved(start, parts).sum())
        else:
            cut = [_entries(precision, piece) for precision in precisions]
            fallback += block.match(start, parts, weights, cut, _entries(base_precision, piece))
    return fallback


def _moved(base: Tensor | None, models: Sequence[Tensor]) -> Tensor:
    """Which entries a model has changed, or, without a base, has another number in."""
    reference = models[0] if base is None else base
    return torch.stack([model != reference for model in models]).any(0)


def _entries(precision: PrecisionValue, piece: slice) -> PrecisionValue:
    """A precision of some entries; a number is that of all."""
    return precision[piece] if isinstance(precision, Tensor) else precision


def _shares(
    weights: Sequence[float], precisions: Sequence[PrecisionValue], base_precision: PrecisionValue
) -> tuple[list[float], bool]:
    """α_t (H_0 + H_t) / H̄ of precisions that are numbers, or α_t itself where H̄ is too small.

    Returns:
        The shares, and whether H̄ was too small.
    """
    h_0 = float(base_precision)
    pairs = [(a, float(h)) for a, h in zip(weights, precisions, strict=True)]
    total = h_0 + sum(a * h for a, h in pairs)
    size = h_0 + sum(abs(a) * h for a, h in pairs)
    negative_weights_leave_too_little = total < size and total <= BOUND * size
    if not total > 0 or negative_weights_leave_too_little:
        return list(weights), True
    return [a * (h_0 + h) / total for a, h in pairs], False


class _Sums(NamedTuple):
    """The sums of one block.

    Attributes:
        step: Σ_t α_t (H_0 + H_t)(θ_t − θ_0).
        total: H̄.
        size: H_0 + Σ_t |α_t| H_t; None where it is the total, because no α_t is negative.
    """

    step: Tensor
    total: Tensor
    size: Tensor | None


class _Workspace:
    """The arithmetic of one block, in buffers that are used again.

    Attributes:
        out: where the result is written.
    """

    def __init__(self, out: Tensor, scratch: Scratch) -> None:
        self.out = out
        self._scratch = scratch

    def _buffer(self, key: str) -> Tensor:
        if self.out.device.type != "cpu":
            return torch.empty_like(self.out)
        return self._scratch.array(("merge", key), len(self.out), self.out.dtype)

    def _converted(self, key: str, values: Tensor) -> Tensor:
        """Values in the dtype of the arithmetic, copied only if they have another."""
        return values if values.dtype == self.out.dtype else self._buffer(key).copy_(values)

    def add_up(
        self, base: Tensor | None, models: Sequence[Tensor], shares: Sequence[float]
    ) -> None:
        """θ_0 + Σ_t c_t (θ_t − θ_0), or Σ_t c_t θ_t without a base."""
        start = None if base is None else self._converted("start", base)
        step = self.out
        for k, (model, share) in enumerate(zip(models, shares, strict=True)):
            gap = self._buffer("gap").copy_(model) if k else step.copy_(model)
            if start is not None:
                gap.sub_(start)
            if k:
                step.add_(gap, alpha=share)
            elif share != 1:
                step.mul_(share)
        if start is not None:
            step.add_(start)

    def match(
        self,
        base: Tensor | None,
        models: Sequence[Tensor],
        weights: Sequence[float],
        precisions: Sequence[PrecisionValue],
        base_precision: PrecisionValue,
    ) -> int:
        """The module's formula; the number of entries where task arithmetic stands."""
        if base is None:
            self.add_up(None, models, [a / sum(weights) for a in weights])
            start = self._buffer("start").copy_(self.out)
        else:
            start = self._converted("start", base)
        step, total, size = self._sums(start, models, weights, precisions, base_precision)
        if size is None and is_precision(total):
            torch.addcdiv(start, step, total, out=self.out)
            no_total_is_zero = bool(self.out.sum().isfinite())
            if no_total_is_zero:
                return 0
        if float(total.max()) == torch.inf:
            raise InputError(
                f"the precisions' sum exceeds {total.dtype}: scale them and delta, or use "
                "dtype=torch.float64"
            )
        smallest = 0 if size is None else size.mul_(BOUND)
        is_undefined = total <= smallest
        arithmetic = self._arithmetic(start, models, weights)
        step.div_(total)
        torch.add(start, torch.where(is_undefined, arithmetic, step), out=self.out)
        return int((is_undefined & _moved(base, models)).sum())

    def _sums(
        self,
        start: Tensor,
        models: Sequence[Tensor],
        weights: Sequence[float],
        precisions: Sequence[PrecisionValue],
        base_precision: PrecisionValue,
    ) -> _Sums:
        """The sums over the models, each model read once."""
        if isinstance(base_precision, Tensor):
            h_0 = self._converted("first", base_precision)
        else:
            h_0 = self._buffer("first").fill_(base_precision)
        step = self._buffer("step").zero_()
        total = self._buffer("total")
        size = self._buffer("size").copy_(h_0) if min(weights) < 0 else None
        gap = self._buffer("gap")
        h_both = self._buffer("both")  # H_0 + H_t
        total_so_far = h_0  # the first addition copies it into the buffer of the total
        for model, alpha, precision in zip(models, weights, precisions, strict=True):
            h_t = precision
            if isinstance(precision, Tensor):
                h_t = self._converted("curved", precision)
            gap.copy_(model).sub_(start)
            torch.add(h_0, h_t, out=h_both)
            _add_scaled(total_so_far, h_t, alpha, out=total)
            step.addcmul_(h_both, gap, value=alpha)
            total_so_far = total
            if size is not None:
                _add_scaled(size, h_t, abs(alpha), out=size)
        return _Sums(step, total, size)

    def _arithmetic(
        self, start: Tensor, models: Sequence[Tensor], weights: Sequence[float]
    ) -> Tensor:
        """Σ_t α_t (θ_t − θ_0)."""
        gap = self._buffer("gap")
        total = torch.zeros_like(start)
        for model, alpha in zip(models, weights, strict=True):
            total.add_(gap.copy_(model).sub_(start), alpha=alpha)
        return total


def _add_scaled(values: Tensor, precision: PrecisionValue, alpha: float, *, out: Tensor) -> None:
    """values + α H, written into ``out``."""
    if isinstance(precision, Tensor):
        torch.add(values, precision, alpha=alpha, out=out)
    else:
        torch.add(values, alpha * precision, out=out)


def is_precision(values: Tensor) -> bool:
    """Whether no entry is negative, NaN or inf.

    Read as integers without a sign, the bits of numbers from 0 on have the order of the numbers.
    Those of inf, NaN and negative numbers are larger. So the largest integer decides, which is
    found in a quarter of the time that comparing floats takes.

    >>> [is_precision(torch.tensor([x, 2.0])) for x in (0.0, -0.0, -0.5, torch.inf, torch.nan)]
    [True, True, False, False, False]
    """
    if values.is_floating_point() and values.device.type == "cpu" and values.itemsize in WORDS:
        signed, unsigned = WORDS[values.itemsize]
        bits_of_infinity = int(torch.tensor(torch.inf, dtype=values.dtype).view(signed))
        if values.view(signed).numpy().view(unsigned).max() < bits_of_infinity:
            return True
    low, high = torch.aminmax(values)
    return bool(low >= 0) and bool(high < torch.inf)
