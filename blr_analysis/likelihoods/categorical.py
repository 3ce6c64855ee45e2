"""One of C classes for each example, or shares of the classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import tolerance, whole
from blr_analysis.errors import DataError, InputError
from blr_analysis.likelihoods.base import Likelihood, numbers

MIN_VECTORISED_ROW = 16  # numbers in a row; torch's softmax is slow on shorter ones
SHARES_TOLERANCE = 1e-3  # of the sum of soft targets
PROBABILITY_TOLERANCE = 1e-4  # of the sum of outputs that look like probabilities


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
        ignore_index: the class of examples that do not count: their ℓ, e and Λ are 0, and the
            accuracy leaves them out.

    The objective is the SUM of ℓ over the examples. ``CrossEntropyLoss(weight=w)`` with its
    reduction "mean" divides by Σ_i w_{y_i}, not by N: with an L2 penalty ``weight_decay``,
    δ = weight_decay · Σ_i w_{y_i}; without weights that is weight_decay · N, for the N examples
    that count.

    Raises:
        InputError: weights below 0, a smoothing outside 0 … 1.
        DataError: another number of weights than of classes; soft targets below 0, or whose sum is
            not 1.

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
        is_sequence = outputs.ndim >= 3
        if is_sequence:
            raise DataError(f'outputs of shape {shape} need likelihood="tokens" or "causal_lm"')
        super().check_outputs(outputs)
        if shape[1] < 2:
            raise DataError('a single logit per example needs likelihood="bernoulli"')
        self.check_weight(outputs)

    def check_weight(self, outputs: Tensor) -> None:
        """Raise :class:`DataError` unless there is a weight for every class."""
        n_classes = outputs.shape[-1]
        if self.weight is not None and len(self.weight) != n_classes:
            raise DataError(f"weight has {len(self.weight)} entries for {n_classes} classes")

    def looks_normalised(self, outputs: Tensor) -> bool:
        if not bool((outputs >= 0).all()):
            return False
        deviations = (outputs.sum(-1) - 1).abs()
        return bool((deviations < PROBABILITY_TOLERANCE).all())

    def are_one_hot(self, targets: Tensor) -> bool:
        are_shares = targets.ndim == 2 and targets.is_floating_point()
        if not are_shares:
            return False
        return bool(((targets == 1).sum(1) == 1).all() and ((targets != 0).sum(1) == 1).all())

    def prepare_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        are_shares = targets.shape == outputs.shape and targets.is_floating_point()
        if are_shares:
            return _soft(targets.to(outputs.dtype))
        if targets.ndim == 2 and targets.shape[-1] == 1:
            targets = targets.squeeze(-1)
        if targets.shape != outputs.shape[:1]:
            raise DataError(
                "categorical targets must be one class index per example, got "
                f"{tuple(targets.shape)}; pass one-hot targets as y.argmax(-1)"
            )
        return self.classes(targets, outputs)

    def classes(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Targets that are classes as int64, checked."""
        is_real_or_complex = targets.is_floating_point() or targets.is_complex()
        if is_real_or_complex or targets.dtype == torch.bool:
            raise DataError(
                f"{self.name} targets must be integers, got {targets.dtype}; pass y.long()"
            )
        targets = targets.long()
        self.check_values(targets, outputs)
        return targets

    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        n_classes = outputs.shape[-1]
        valid = f"0 … {n_classes - 1}"
        if self.ignore_index is not None:
            targets = targets[targets != self.ignore_index]
            valid = f"{valid}, or be {self.ignore_index}"
        if targets.numel() == 0:
            return
        low, high = (int(extreme) for extreme in torch.aminmax(targets))
        if low < 0 or high >= n_classes:
            wrong = low if low < 0 else high
            starts_at_one = low == 1 and high == n_classes
            remedy = "; count classes from 0: y - 1" if starts_at_one else ""
            raise DataError(
                f"{self.name} targets must lie in {valid} (the model has {n_classes} logits), "
                f"found {wrong}{remedy}"
            )

    def _ignored(self, targets: Tensor) -> Tensor | None:
        """Which targets do not count, bool in their shape; None where all count."""
        if self.ignore_index is None or targets.is_floating_point():
            return None
        ignored = targets == self.ignore_index
        return ignored if bool(ignored.any()) else None

    def _plain(self, targets: Tensor) -> bool:
        """Whether every example that counts has one class as its target, and weight 1: t = y."""
        return not (targets.is_floating_point() or self.weight or self.label_smoothing)

    def _shares(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """t, the weighted share of every class in the target, in the shape of the outputs."""
        ignored = self._ignored(targets)
        if targets.is_floating_point():
            y = targets
        else:
            y = torch.zeros_like(outputs).scatter_(-1, _valid(targets, ignored), 1)
        t = (1 - self.label_smoothing) * y + self.label_smoothing / outputs.shape[-1]
        if self.weight is not None:
            t = t * outputs.new_tensor(self.weight)
        return t if ignored is None else t.masked_fill(ignored.unsqueeze(-1), 0.0)

    def _times_mass(
        self, values: Tensor, outputs: Tensor, targets: Tensor, power: float = 1.0
    ) -> Tensor:
        """Values ``[..., numbers]`` times s^power."""
        if not self._plain(targets):
            s = self._shares(outputs, targets).sum(-1, keepdim=True)
            return s**power * values
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
        if self._plain(targets):
            return e
        return self._times_mass(e, outputs, targets, 0.5)

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
        diagonal = self._times_mass(p, outputs, targets)
        vector = self._times_mass(p, outputs, targets, 0.5)
        return diagonal, vector

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The Cholesky factor without its last column, which is 0, ``[B, C, C − 1]``.

        With r_c = Σ_{d>c} p_d, column c is √(p_c r_c / (p_c + r_c)) times 1 at c and −p_d / r_c at
        d > c.

        Source: Tanabe & Sagae, "An exact Cholesky decomposition and the generalized inverse of the
        variance-covariance matrix of the multinomial distribution", 1992.
        """
        p = _softmax(outputs)
        tiny = torch.finfo(p.dtype).tiny
        n_classes = p.shape[-1]
        tails = p @ p.new_ones(n_classes, n_classes).tril()  # p_c + r_c
        r = tails[:, 1:]
        below = (p.unsqueeze(-1) / r.clamp_min(tiny).unsqueeze(-2)).tril(-1)
        lengths = (p[:, :-1] / tails[:, :-1].clamp_min(tiny) * r).sqrt()
        columns = torch.eye(*below.shape[-2:], dtype=p.dtype, device=p.device) - below
        return columns * self._times_mass(lengths, outputs, targets, 0.5).unsqueeze(-2)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logp = outputs.log_softmax(-1)
        if not self._plain(targets):
            return -(self._shares(outputs, targets) * logp).sum(-1)
        classes = _valid(targets, self._ignored(targets))
        losses = -logp.gather(-1, classes)
        return self._times_mass(losses, outputs, targets).squeeze(-1)

    def mass(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """w_{y_i}, or 0 where the target is ignored; 1 for soft targets, as torch has it."""
        if targets.is_floating_point():
            return super().mass(outputs, targets)
        ignored = self._ignored(targets)
        weight = torch.ones_like(outputs[..., 0])
        if self.weight is not None:
            classes = _valid(targets, ignored).squeeze(-1)
            weight = outputs.new_tensor(self.weight)[classes]
        return weight if ignored is None else weight.masked_fill(ignored, 0.0)

    def mean(self, outputs: Tensor) -> Tensor:
        return _softmax(outputs)

    def prediction(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(-1)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Whether the largest logit is that of the target's class, ``[B]``.

        Of a soft target that is the class with the largest share; NaN for ignored targets.
        """
        classes = targets.argmax(-1) if targets.ndim == 2 else targets
        right = outputs.argmax(-1) == classes
        ignored = self._ignored(targets)
        if ignored is None:
            return right
        return right.to(outputs.dtype).masked_fill(ignored, torch.nan)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.multinomial(_softmax(outputs), 1, generator=generator).squeeze(-1)


def _softmax(outputs: Tensor) -> Tensor:
    """The softmax over the classes; of short rows along columns, which torch computes faster."""
    if outputs.shape[-1] >= MIN_VECTORISED_ROW:
        return outputs.softmax(-1)
    return outputs.mT.softmax(-2).mT.contiguous()


def _valid(classes: Tensor, ignored: Tensor | None) -> Tensor:
    """The classes ``[..., 1]``, with class 0 where they are ignored."""
    if ignored is not None:
        classes = classes.masked_fill(ignored, 0)
    return classes.unsqueeze(-1)


def _less_one(p: Tensor, classes: Tensor, ignored: Tensor | None) -> Tensor:
    """p − onehot(classes), 0 where they are ignored, in place."""
    minus_one = -torch.ones_like(p[..., :1])
    e = p.scatter_add_(-1, _valid(classes, ignored), minus_one)
    return e if ignored is None else e.masked_fill_(ignored.unsqueeze(-1), 0.0)


def _soft(targets: Tensor) -> Tensor:
    """Shares of classes, checked."""
    deviations = (targets.sum(-1) - 1).abs()
    sum_to_one = bool((deviations < SHARES_TOLERANCE).all())
    if not sum_to_one or bool((targets < 0).any()):
        raise DataError("soft targets must be 0 or more and sum to one in every row")
    return targets
