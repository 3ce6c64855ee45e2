"""The divisor d of a training loss, which makes one number of a minibatch's losses.

    L = Σ_{i∈B} ℓ_i / d(B)

With reduction "sum", d = 1. With "mean", CrossEntropyLoss and NLLLoss of ``torch.nn`` have
d = Σ_{i∈B} w_{y_i} over the targets that count; for its other losses d is the number of entries
without a reduction, mostly |B| · C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blr_analysis.likelihoods.base import Likelihood

# Losses whose mean divides by the weights of the targets.
BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)
WORDS = ("mean", "sum", "entries", "weights")


@dataclass(frozen=True)
class Reduction:
    """How a training makes one number of a minibatch's losses.

    Attributes:
        word: the divisor. "sum": 1; "mean": the number of examples that count, of tokens of
            sequences, or the sum of the weights of their classes; "weights": the same with the
            examples' own weights; "entries": the number of outputs of all examples; "examples":
            the number of examples; "measured": it is found by calling ``loss``.
        loss: the user's module that reduces in its own way; None: there is no such module.

    >>> from blr_analysis.likelihoods import Categorical
    >>> f, y = torch.zeros(2, 2), torch.tensor([0, 1])
    >>> float(Reduction("mean").divisor(Categorical(weight=[1.0, 5.0]), f, y))
    6.0
    """

    word: str = "mean"
    loss: nn.Module | None = None

    def divisor(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
        """The part of these examples in d, which is the sum of such parts; not for "sum".

        Args:
            likelihood: of these examples.
            outputs, targets: as :meth:`~blr_analysis.Task.run` returns them.
        """
        if self.word == "mean":
            return likelihood.plain.mass(outputs, targets).sum()
        if self.word == "weights":
            return likelihood.mass(outputs, targets).sum()
        if self.word == "examples":
            return outputs.new_tensor(len(outputs))
        entries = outputs.new_tensor(likelihood.plain.entries(outputs, targets))
        if self.loss is None:
            return entries
        return self._measured(likelihood.plain, outputs, targets, entries)

    def _measured(
        self, likelihood: Likelihood, outputs: Tensor, targets: Tensor, entries: Tensor
    ) -> Tensor:
        """Σ_i ℓ_i divided by the module's own loss of the same examples.

        Where the module does not reduce, or that is no positive number, ``entries``.
        """
        assert self.loss is not None
        with torch.no_grad():
            total = likelihood.nll(outputs, targets).sum()
            reduced = self.loss(*likelihood.as_module_takes(outputs, targets))
        is_reduced = reduced.ndim == 0
        if not is_reduced:
            return entries
        divisor = total / reduced
        is_usable = bool(divisor.isfinite()) and float(divisor) > 0
        return divisor if is_usable else entries


def reduction_of(loss: object) -> Reduction:
    """The reduction of a task's ``likelihood=``.

    >>> reduction_of(nn.MSELoss()).word, reduction_of(nn.CrossEntropyLoss()).word
    ('entries', 'mean')
    """
    if not isinstance(loss, nn.Module):
        return Reduction("mean")
    setting = getattr(loss, "reduction", "none")
    if setting == "sum":
        return Reduction("sum")
    if setting == "none":
        return Reduction("entries")
    if type(loss).__module__ != "torch.nn.modules.loss":
        return Reduction("measured", loss)
    if setting == "batchmean":
        return Reduction("examples")
    return Reduction("mean" if isinstance(loss, BY_CLASS) else "entries")
