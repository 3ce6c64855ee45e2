"""One of C classes for each example, or a share of each of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blr_analysis.checks import tolerance, whole
from blr_analysis.errors import DataError, InputError
from blr_analysis.likelihoods.base import Likelihood, numbers

SHORT = 16  # numbers of a row from which on torch goes through it by vectors


class Classes(Likelihood):
    """Targets that number one of C classes, or are ``ignore_index`` where they do not count."""

    ignore_index: Any = None  # a whole number; None: all targets count

    def classes(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """The targets as int64, checked."""
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise DataError(
                f"{self.name} targets must be integers, got {targets.dtype}; use y.long()"
            )
        targets = targets.long()
        self.check_values(targets, outputs)
        return targets

    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        ignored, c = self.ignore_index, outputs.shape[-1]
        kept = targets if ignored is None else targets[targets != ignored]
        if kept.numel():
            low, high = (int(v) for v in torch.aminmax(kept))
            if low < 0 or high >= c:
                wanted = f"0 … {c - 1}" if ignored is None else f"0 … {c - 1}, or be {ignored}"
                raise DataError(
                    f"{self.name} targets must lie in {wanted} (the model has {c} logits), "
                    f"found {low if low < 0 else high}"
                )


class Categorical(Classes):
    """Softmax classification, C ≥ 2 logits; the loss of ``torch.nn.CrossEntropyLoss``.

    Targets are classes 0 … C−1, whole numbers ``[B]``, or soft ones ``[B, C]`` whose rows sum to
    one (mixup). With class weights w, smoothing ε and the target as a row y of shares

        ℓ = −Σ_c t_c log p_c,   t_c = w_c ((1−ε) y_c + ε/C),   s = Σ_c t_c
        e = s p − t,   Λ = s (diag(p) − ppᵀ) = LLᵀ with L = √s (diag(√p) − p√pᵀ)

    and so e = p − onehot(y), Λ = diag(p) − ppᵀ without settings.

    Args:
        weight: w ≥ 0, one per class.
        label_smoothing: ε in 0 … 1.
        ignore_index: the class of examples that do not count: their ℓ, e and Λ are 0, and they are
            left out of the accuracy.

    The objective is the SUM of ℓ over the examples. ``CrossEntropyLoss(weight=w)`` with its
    reduction "mean" divides by Σ_i w_{y_i}, not by N: with an L2 penalty ``weight_decay``,
    δ = weight_decay · Σ_i w_{y_i} (without weights, of the N that count: weight_decay · N).

    Raises:
        InputError: weights below 0, a smoothing outside 0 … 1.
        DataError: as many weights as there are classes are needed; soft targets below 0, or not
            summing to one.

    Example:
        >>> f, y = torch.zeros(1, 2), torch.tensor([1])
        >>> Categorical(weight=[1.0, 15.0]).error(f, y)
        tensor([[ 7.5000, -7.5000]])
    """

    name = "categorical"
    is_classification = True
    integer_targets = True

    def __init__(
        self, weight: Any = None, label_smoothing: float = 0.0, ignore_index: int | None = None
    ) -> None:
        self.weight = numbers("weight", weight)
        self.label_smoothing = tolerance("label_smoothing", label_smoothing)
        if self.label_smoothing > 1:
            raise InputError(f"label_smoothing must lie in 0 … 1, got {label_smoothing!r}")
        if ignore_index is not None and whole(ignore_index) is None:
            raise InputError(f"ignore_index must be a whole number, got {ignore_index!r}")
        self.ignore_index = ignore_index

    def check_outputs(self, outputs: Tensor) -> None:
        if outputs.ndim == 3:
            raise DataError(
                "the categorical likelihood needs outputs of shape [batch, C], got "
                f'{tuple(outputs.shape)}; of tokens use likelihood="tokens" or "causal_lm", with '
                "settings CausalLM(label_smoothing=...)"
            )
        super().check_outputs(outputs)
        c = outputs.shape[-1]
        if c < 2:
            raise DataError(
                "the categorical likelihood needs at least 2 logits per example, got 1; "
                'use likelihood="bernoulli" for a single logit'
            )
        if self.weight is not None and len(self.weight) != c:
            raise DataError(f"weight has {len(self.weight)} entries for {c} classes")

    def looks_normalised(self, outputs: Tensor) -> bool:
        return bool((outputs >= 0).all()) and bool(((outputs.sum(-1) - 1).abs() < 1e-4).all())

    def prepare_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        if targets.shape == outputs.shape and targets.is_floating_point():
            return _soft(targets.to(outputs.dtype))
        if targets.ndim == 2 and targets.shape[-1] == 1:
            targets = targets.squeeze(-1)
        if targets.shape != outputs.shape[:1]:
            raise DataError(
                "categorical targets must be one class index per example, got "
                f"{tuple(targets.shape)}; of one-hot ones take y.argmax(-1)"
            )
        return self.classes(targets, outputs)

    def shares(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """t, what the loss asks of every class, ``[B, C]``."""
        c = outputs.shape[-1]
        ignored = self._ignored(targets)
        known = targets if ignored is None else targets.masked_fill(ignored, 0)
        if known.ndim == 2:
            t = known.to(outputs.dtype)
        else:
            t = torch.zeros_like(outputs).scatter_(1, known.unsqueeze(1), 1)
        if self.label_smoothing:
            t = (1 - self.label_smoothing) * t + self.label_smoothing / c
        if self.weight is not None:
            t = t * outputs.new_tensor(self.weight)
        return t if ignored is None else t.masked_fill(ignored.unsqueeze(-1), 0.0)

    def _ignored(self, targets: Tensor) -> Tensor | None:
        if self.ignore_index is None or targets.ndim == 2:
            return None
        return targets == self.ignore_index

    def mass(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """s = Σ_c t_c, ``[B, 1]``."""
        return self.shares(outputs, targets).sum(-1, keepdim=True)

    def _times_mass(
        self, plain: Tensor, outputs: Tensor, targets: Tensor, *, root: bool = False
    ) -> Tensor:
        """s or √s times ``[…, B, numbers]``; s = 1 of classes that count alike."""
        if targets.ndim == 1 and self.weight is None and self.ignore_index is None:
            return plain
        s = self.mass(outputs, targets)
        return (s.sqrt() if root else s) * plain

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        p = self._times_mass(_softmax(outputs), outputs, targets)
        return p - self.shares(outputs, targets)

    def hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        p = _softmax(outputs)
        plain = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
        return self._times_mass(plain.flatten(1), outputs, targets).view_as(plain)

    def hessian_times(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        p = _softmax(outputs)
        plain = p * (vectors - (p * vectors).sum(-1, keepdim=True))
        return self._times_mass(plain, outputs, targets)

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The Cholesky factor, whose last column is 0 and left out, ``[B, C, C − 1]``: column c is
        √(p_c r_c / (p_c + r_c)) (1 at c, −p_d / r_c at d > c), with r_c = Σ_{d>c} p_d.

        Source: Tanabe & Sagae, "An exact Cholesky decomposition and the generalized inverse of the
        variance-covariance matrix of the multinomial distribution", 1992.
        """
        p = _softmax(outputs)
        left = p @ p.new_ones(p.shape[-1], p.shape[-1]).tril()  # p_c + r_c
        rest, tiny = left[:, 1:], torch.finfo(p.dtype).tiny
        below = (p.unsqueeze(-1) / rest.clamp_min(tiny).unsqueeze(-2)).tril(-1)
        size = (p[:, :-1] / left[:, :-1].clamp_min(tiny) * rest).sqrt()
        columns = torch.eye(*below.shape[-2:], dtype=p.dtype, device=p.device) - below
        plain = columns * size.unsqueeze(-2)
        return self._times_mass(plain.flatten(1), outputs, targets, root=True).view_as(plain)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        soft = targets.ndim == 2
        weight = None if self.weight is None else outputs.new_tensor(self.weight)
        return F.cross_entropy(
            outputs,
            targets,
            weight=weight,
            ignore_index=-100 if soft or self.ignore_index is None else self.ignore_index,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )

    def mean(self, outputs: Tensor) -> Tensor:
        return _softmax(outputs)

    def prediction(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Whether the largest logit is of the target's class (or largest share), ``[B]``; NaN if
        ignored."""
        right = outputs.argmax(-1) == (targets.argmax(-1) if targets.ndim == 2 else targets)
        ignored = self._ignored(targets)
        if ignored is None or not bool(ignored.any()):
            return right
        return right.to(outputs.dtype).masked_fill(ignored, torch.nan)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.multinomial(_softmax(outputs), 1, generator=generator).squeeze(-1)

    def drawn_error(self, outputs: Tensor, targets: Tensor, drawn: Tensor) -> Tensor:
        """√s (p − onehot(ŷ)), whose mean square over ŷ ~ p is Λ."""
        plain = _softmax(outputs) - F.one_hot(drawn, outputs.shape[-1]).to(outputs.dtype)
        return self._times_mass(plain, outputs, targets, root=True)


def _softmax(outputs: Tensor) -> Tensor:
    """Over the classes; few of them for all examples at once: torch's is slow along short rows."""
    if outputs.shape[-1] >= SHORT:
        return outputs.softmax(-1)
    return outputs.mT.softmax(-2).mT.contiguous()


def _soft(targets: Tensor) -> Tensor:
    sums = targets.sum(-1)
    if not bool(((sums - 1).abs() < 1e-3).all()) or bool((targets < 0).any()):
        raise DataError("soft targets must be 0 or more and sum to one in every row")
    return targets
