"""The losses of ``torch.nn`` as likelihoods, with their settings.

The reduction of a loss gives the divisor of a training by a recipe
(:mod:`blr_analysis.likelihoods.reduction`), and with it δ, from a weight decay. The objective of an
analysis is the SUM of the losses. With "sum", δ = weight_decay. With "mean", δ = weight_decay times
the divisor of the mean: N (CrossEntropyLoss: Σ_i w_{y_i} over the examples that count), or N·C for
losses that have a value for every output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from blr_analysis.likelihoods.base import Likelihood
from blr_analysis.likelihoods.categorical import Categorical
from blr_analysis.likelihoods.functions import Function
from blr_analysis.likelihoods.independent import Bernoulli, Gaussian, Poisson
from blr_analysis.likelihoods.variances import MeanAndVariance


def _poisson(loss: nn.PoissonNLLLoss) -> Likelihood:
    """The likelihood of log-rates; of rates themselves, a ``Function``."""
    if not loss.log_input:
        return Function(Summed(loss), lowest=0.0)
    return Poisson(constant="stirling" if loss.full else "none")


READ: dict[type[nn.Module], Callable[..., Likelihood]] = {
    nn.CrossEntropyLoss: lambda loss: Categorical(
        loss.weight, loss.label_smoothing, loss.ignore_index
    ),
    nn.NLLLoss: lambda loss: Categorical(  # softmax(log p) = p
        loss.weight, ignore_index=loss.ignore_index
    ),
    nn.BCELoss: lambda loss: Function(Summed(loss), lowest=0.0, highest=1.0),
    nn.BCEWithLogitsLoss: lambda loss: Bernoulli(loss.pos_weight, loss.weight),
    nn.MSELoss: lambda loss: Gaussian(0.5, normalized=False),
    nn.GaussianNLLLoss: lambda loss: MeanAndVariance(full=loss.full, eps=loss.eps),
    nn.PoissonNLLLoss: _poisson,
}


def read_module(loss: nn.Module) -> Likelihood:
    """The likelihood of a loss module; of a module that is not in the table, a ``Function``.

    >>> read_module(nn.CrossEntropyLoss(label_smoothing=0.1))
    Categorical(label_smoothing=0.1, ignore_index=-100)
    """
    to_likelihood = READ.get(type(loss))
    if to_likelihood is None:
        return Function(Summed(loss))
    return to_likelihood(loss)


def is_mean_over_outputs(loss: object) -> bool:
    """Whether this is a loss of torch.nn whose reduction divides by N·C.

    >>> is_mean_over_outputs(nn.MSELoss()), is_mean_over_outputs(nn.CrossEntropyLoss())
    (True, False)
    """
    is_mean = isinstance(loss, nn.Module) and getattr(loss, "reduction", None) == "mean"
    is_over_classes = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    return is_mean and _is_of_torch(loss) and not is_over_classes


def _is_of_torch(loss: object) -> bool:
    """Whether a loss is one of ``torch.nn``, and not a subclass."""
    return type(loss).__module__ == "torch.nn.modules.loss"


class Summed:
    """A module's loss of every example: without its reduction, summed over the outputs.

    The modules of ``torch.nn`` get targets ``[B]`` as ``[B, 1]`` if the outputs are ``[B, 1]``.
    """

    def __init__(self, loss: nn.Module) -> None:
        self.unreduced = copy.copy(loss)
        if hasattr(loss, "reduction"):
            self.unreduced.__dict__["reduction"] = "none"
        self.is_of_torch = _is_of_torch(loss)
        self.__qualname__ = repr(loss)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = self.unreduced(*self.as_module_takes(outputs, targets))
        return losses.flatten(1).sum(-1) if losses.ndim > 1 else losses

    def as_module_takes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets as the module takes them."""
        lacks_last_axis = outputs.shape[-1] == 1 and targets.ndim == 1
        if self.is_of_torch and lacks_last_axis:
            targets = targets.to(outputs).unsqueeze(-1)
        return outputs, targets

    def entries(self, outputs: Tensor, targets: Tensor) -> int:
        """The number of losses of the module before it reduces them."""
        with torch.no_grad():
            losses = self.unreduced(*self.as_module_takes(outputs, targets))
        return losses.numel()
