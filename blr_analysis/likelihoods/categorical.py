"""One of C classes for each example, or a share of each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import tolerance, whole
from blr_analysis.errors import DataError, InputError
from blr_analysis.likelihoods.base import Likelihood, numbers

SHORT = 16  # numbers of a row from which on torch goes through it by vectors


class Categorical(Likelihood):
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
        self.ignore_index: Any = ignore_index

    def check_outputs(self, outputs: Tensor) -> None:
        shape = tuple(outputs.shape)
        if outputs.ndim == 3:
            raise DataError(f'outputs of shape {shape} need likelihood="tokens" or "causal_lm"')
        super().check_outputs(outputs)
        if shape[1] < 2:
            raise DataError('a single logit per example needs likelihood="bernoulli"')
        self.check_weight(outputs)

    def check_weight(self, outputs: Tensor) -> None:
        """Raise :class:`DataError` unless there is a weight for every class."""
        c = outputs.shape[-1]
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

    def classes(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """The targets as int64, checked."""
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise DataError(f"{self.name} targets must be integers, got {targets.dtype}; y.long()")
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

    def _ignored(self, targets: Tensor) -> Tensor | None:
        """Which targets do not count, as they; None where all do."""
        if self.ignore_index is None or targets.is_floating_point():
            return None
        ignored = targets == self.ignore_index
        return ignored if bool(ignored.any()) else None

    def _plain(self, targets: Tensor) -> bool:
        """Whether the loss asks of every example for one class, with weight 1 if it counts."""
        return not (targets.is_floating_point() or self.weight or self.label_smoothing)

    def _shares(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """t, what the loss asks of every class, in the shape of the outputs."""
        t, ignored = targets, self._ignored(targets)
        if not t.is_floating_point():
            t = torch.zeros_like(outputs).scatter_(-1, _known(targets, ignored), 1)
        t = (1 - self.label_smoothing) * t + self.label_smoothing / outputs.shape[-1]
        if self.weight is not None:
            t = t * outputs.new_tensor(self.weight)
        return t if ignored is None else t.masked_fill(ignored.unsqueeze(-1), 0.0)

    def _times_mass(
        self, values: Tensor, outputs: Tensor, targets: Tensor, power: float = 1.0
    ) -> Tensor:
        """Values ``[..., numbers]`` times s^power."""
        if not self._plain(targets):
            return self._shares(outputs, targets).sum(-1, keepdim=True) ** power * values
        ignored = self._ignored(targets)
        return values if ignored is None else values.masked_fill(ignored.unsqueeze(-1), 0.0)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        p = _softmax(outputs)
        if self._plain(targets):
            return _less_one(p, targets, self._ignored(targets))
        return self._times_mass(p, outputs, targets) - self._shares(outputs, targets)

    def drawn_error(self, outputs: Tensor, targets: Tensor, drawn: Tensor) -> Tensor:
        """√s (p − onehot(ŷ)), whose mean square over ŷ ~ p is Λ."""
        e = _less_one(_softmax(outputs), drawn, self._ignored(targets))
        return e if self._plain(targets) else self._times_mass(e, outputs, targets, 0.5)

    def hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        p = _softmax(outputs)
        sp = self._times_mass(p, outputs, targets)
        return torch.diag_embed(sp) - sp.unsqueeze(-1) * p.unsqueeze(-2)

    def hessian_times(self, outputs: Tensor, targets: Tensor, vectors: Tensor) -> Tensor:
        p = _softmax(outputs)
        sp = self._times_mass(p, outputs, targets)
        return sp * (vectors - (p * vectors).sum(-1, keepdim=True))

    def hessian_parts(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        p = _softmax(outputs)
        scale = self._times_mass(p, outputs, targets)
        return scale, self._times_mass(p, outputs, targets, 0.5)

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
        return columns * self._times_mass(size, outputs, targets, 0.5).unsqueeze(-2)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logp = outputs.log_softmax(-1)
        if not self._plain(targets):
            return -(self._shares(outputs, targets) * logp).sum(-1)
        losses = -logp.gather(-1, _known(targets, self._ignored(targets)))
        return self._times_mass(losses, outputs, targets).squeeze(-1)

    def mass(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """w_{y_i}, 0 where the target is ignored; 1 of soft targets, as torch has it."""
        if targets.is_floating_point():
            return super().mass(outputs, targets)
        ignored = self._ignored(targets)
        weight = torch.ones_like(outputs[..., 0])
        if self.weight is not None:
            weight = outputs.new_tensor(self.weight)[_known(targets, ignored).squeeze(-1)]
        return weight if ignored is None else weight.masked_fill(ignored, 0.0)

    def mean(self, outputs: Tensor) -> Tensor:
        return _softmax(outputs)

    def prediction(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Whether the largest logit is of the target's class (or largest share), ``[B]``; NaN if
        ignored."""
        right = outputs.argmax(-1) == (targets.argmax(-1) if targets.ndim == 2 else targets)
        ignored = self._ignored(targets)
        return right if ignored is None else right.to(outputs.dtype).masked_fill(ignored, torch.nan)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.multinomial(_softmax(outputs), 1, generator=generator).squeeze(-1)


def _softmax(outputs: Tensor) -> Tensor:
    """Over the classes; few of them for all examples at once: torch's is slow along short rows."""
    if outputs.shape[-1] >= SHORT:
        return outputs.softmax(-1)
    return outputs.mT.softmax(-2).mT.contiguous()


def _known(classes: Tensor, ignored: Tensor | None) -> Tensor:
    """The classes ``[..., 1]``, the first one where they are ignored."""
    return (classes if ignored is None else classes.masked_fill(ignored, 0)).unsqueeze(-1)


def _less_one(p: Tensor, classes: Tensor, ignored: Tensor | None) -> Tensor:
    """p − onehot(classes), 0 where they are ignored, in place."""
    p = p.scatter_add_(-1, _known(classes, ignored), -torch.ones_like(p[..., :1]))
    return p if ignored is None else p.masked_fill_(ignored.unsqueeze(-1), 0.0)


def _soft(targets: Tensor) -> Tensor:
    sums = targets.sum(-1)
    if not bool(((sums - 1).abs() < 1e-3).all()) or bool((targets < 0).any()):
        raise DataError("soft targets must be 0 or more and sum to one in every row")
    return targets
