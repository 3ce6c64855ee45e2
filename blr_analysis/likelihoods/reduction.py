"""What a training loss divides by the sum of a minibatch's losses.

    L = Σ_{i∈B} ℓ_i / d(B)

of ``torch.nn``'s losses with reduction "sum": d = 1; "mean": Σ_{i∈B} w_{y_i} over the targets that
count of CrossEntropyLoss and NLLLoss, else the number of entries that the loss has without a
reduction, |B| · C for most of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blr_analysis.likelihoods.base import Likelihood

BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)  # whose mean is over the weights of the targets
WORDS = ("mean", "sum", "entries", "weights")


@dataclass(frozen=True)
class Reduction:
    """How a training makes one number of a minibatch's losses.

    Attributes:
        word: "sum"; "mean", over the examples that count, the tokens of sequences, or the weights
            of their classes; "weights", the same with the examples' own weights in the
            denominator too; "entries", over all outputs of all examples; "examples", over their
            number; or "measured", by ``loss`` itself.
        loss: a module that reduces in a way of its own.

    >>> from blr_analysis.likelihoods import Categorical
    >>> f, y = torch.zeros(2, 2), torch.tensor([0, 1])
    >>> float(Reduction("mean").divisor(Categorical(weight=[1.0, 5.0]), f, y))
    6.0
    """

    word: str = "mean"
    loss: nn.Module | None = None

    def divisor(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
        """The part of d that these examples bring; d is the sum over the parts, but of "sum".

        Args:
            likelihood: that of these examples.
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
        """Σ_i ℓ_i over what the module makes of the same examples."""
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
    """The reduction of the loss that a task has as ``likelihood=``.

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
