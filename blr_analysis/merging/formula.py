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

An entry with H̄ ≤ 0 (no precision at all, or α_t < 0) has no such step: task arithmetic stands
there instead, and the entry is counted; and so it is where α_t < 0 leave less of H̄ than a tenth of
H_0 + Σ_t |α_t| H_t, by which the step would grow without bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.files import Scratch

BOUND = 0.1  # of H_0 + Σ|α|H: a smaller H̄ is no precision to divide by
BLOCK = 2**17  # entries at a time: what fits into a core's cache
WORDS = {  # by bytes
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
) -> int:
    """Merge one tensor of several models, all flat, into ``out``; see the module for the formula.

    The dtype of ``out`` is that of the arithmetic. Without a base, the average Σα θ / Σα is the
    reference of precisions; without these, too, the result is the plain sum Σα θ. It works through
    blocks of :data:`BLOCK` entries, so that the result has the same bits however a tensor is cut at
    multiples of it. ``base_precision`` holds δ already.

    Returns:
        The number of entries where task arithmetic stands, see the module.
    """
    scratch = Scratch() if scratch is None else scratch
    fixed = not any(isinstance(c, Tensor) for c in (base_precision, *precisions))
    fallback = 0
    for low in range(0, len(out), BLOCK):
        piece = slice(low, low + BLOCK)
        block = _Workspace(out[piece], scratch)
        parts = [m[piece] for m in models]
        if fixed:
            assert isinstance(base_precision, float | int)
            numbers = [c for c in precisions if isinstance(c, float | int)]
            shares, undefined = _shares(weights, numbers, base_precision)
            block.add_up(None if base is None else base[piece], parts, shares)
            fallback += len(block.out) if undefined else 0
        else:
            curved = [c[piece] if isinstance(c, Tensor) else c for c in precisions]
            start = base_precision[piece] if isinstance(base_precision, Tensor) else base_precision
            at = None if base is None else base[piece]
            fallback += block.match(at, parts, weights, curved, start)
    return fallback


def _shares(
    weights: Sequence[float], precisions: Sequence[float], base_precision: float
) -> tuple[list[float], bool]:
    """α_t (H_0 + H_t) / H̄ where all of them are numbers, or α_t itself where H̄ is too small."""
    pairs = list(zip(weights, precisions, strict=True))
    total = base_precision + sum(a * h for a, h in pairs)
    size = base_precision + sum(abs(a) * h for a, h in pairs)
    if not total > 0 or (total < size and total <= BOUND * size):
        return list(weights), True
    return [a * (base_precision + h) / total for a, h in pairs], False


class _Workspace:
    """The arithmetic of one block, in buffers that are used again."""

    def __init__(self, out: Tensor, scratch: Scratch) -> None:
        self.out, self._scratch = out, scratch

    def _buffer(self, key: str) -> Tensor:
        if self.out.device.type != "cpu":
            return torch.empty_like(self.out)
        return self._scratch.array(("merge", key), len(self.out), self.out.dtype)

    def _own(self, key: str, values: Tensor) -> Tensor:
        """Values in the dtype of the arithmetic, copied only if they have another."""
        return values if values.dtype == self.out.dtype else self._buffer(key).copy_(values)

    def add_up(
        self, base: Tensor | None, models: Sequence[Tensor], shares: Sequence[float]
    ) -> None:
        """θ_0 + Σ_t c_t (θ_t − θ_0), or Σ_t c_t θ_t without a base."""
        start = None if base is None else self._own("start", base)
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
            start = self._own("start", base)
        if isinstance(base_precision, Tensor):
            first = self._own("first", base_precision)
        else:
            first = self._buffer("first").fill_(base_precision)
        step, gap, both = self._buffer("step").zero_(), self._buffer("gap"), self._buffer("both")
        total, so_far = self._buffer("total"), first  # H_0, then the sum as far as it is formed
        size = self._buffer("size").copy_(first) if min(weights) < 0 else None  # H_0 + Σ|α|H
        for model, alpha, curved in zip(models, weights, precisions, strict=True):
            gap.copy_(model).sub_(start)
            if isinstance(curved, Tensor):
                own = self._own("curved", curved)
                torch.add(first, own, out=both)
                torch.add(so_far, own, alpha=alpha, out=total)
            else:
                torch.add(first, curved, out=both)
                torch.add(so_far, alpha * curved, out=total)
            step.addcmul_(both, gap, value=alpha)
            so_far = total
            if size is not None:
                size.add_(curved, alpha=abs(alpha)) if isinstance(curved, Tensor) else size.add_(
                    abs(alpha) * curved
                )
        if size is None and is_precision(total):
            torch.addcdiv(start, step, total, out=self.out)
            if bool(self.out.sum().isfinite()):  # or some total is 0
                return 0
        if float(total.max()) == torch.inf:
            raise InputError(
                f"the precisions' sum exceeds {total.dtype}: scale them and delta, or use "
                "dtype=torch.float64"
            )
        bad = total <= (0 if size is None else size.mul_(BOUND))
        arithmetic = torch.zeros_like(step)
        for model, alpha in zip(models, weights, strict=True):
            arithmetic.add_(gap.copy_(model).sub_(start), alpha=alpha)
        torch.add(start, torch.where(bad, arithmetic, step.div_(total)), out=self.out)
        return int(bad.sum())


def is_precision(values: Tensor) -> bool:
    """Whether no entry is negative, NaN or inf. Bits without a sign stand in the order of the
    numbers, those of inf and NaN above, and the greatest is found in a quarter of the time.

    >>> [is_precision(torch.tensor([x, 2.0])) for x in (0.0, -0.0, -0.5, torch.inf, torch.nan)]
    [True, True, False, False, False]
    """
    if values.is_floating_point() and values.device.type == "cpu" and values.itemsize in WORDS:
        whole, unsigned = WORDS[values.itemsize]
        limit = torch.tensor(torch.inf, dtype=values.dtype).view(whole)
        if values.view(whole).numpy().view(unsigned).max() < int(limit):
            return True
    low, high = torch.aminmax(values)
    return bool(low >= 0) and bool(high < torch.inf)
