"""Exponential-family likelihoods of a target, given a model's output.

Each likelihood is written with its natural link, so that with f = f_θ(x) the model output

    ℓ(y, f) = A(f) − fᵀy + const,   e = ∂ℓ/∂f = E[y|f] − y,   Λ = ∂²ℓ/∂f² = Cov[y|f] ⪰ 0

(the Gaussian divides both by its noise variance σ²). Losses that people train with are read from
their ``torch.nn`` modules, with weights, smoothing and soft targets; any other is a
:class:`Function`, with e and Λ by automatic differentiation. Shapes: outputs ``[B, C]``, error
``[B, C]``, hessian ``[B, C, C]``, nll ``[B]``. For sequences, one softmax for each token,
see :mod:`blr_analysis.likelihoods.tokens`.

    >>> import torch
    >>> from blr_analysis.likelihoods import Categorical
    >>> f, y = torch.zeros(1, 2), torch.tensor([1])
    >>> Categorical().error(f, y)
    tensor([[ 0.5000, -0.5000]])
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches

from torch import Tensor, nn

from blr_analysis.errors import InputError
from blr_analysis.likelihoods.base import MIN_TO_TELL_LOGITS, Likelihood
from blr_analysis.likelihoods.categorical import Categorical
from blr_analysis.likelihoods.functions import Function
from blr_analysis.likelihoods.independent import Bernoulli, Gaussian, Poisson
from blr_analysis.likelihoods.modules import read_module
from blr_analysis.likelihoods.reduction import Reduction, reduction_of
from blr_analysis.likelihoods.tokens import CausalLM, TokenCategorical
from blr_analysis.likelihoods.variances import MeanAndVariance
from blr_analysis.likelihoods.weighted import Weighted

__all__ = [
    "BY_NAME",
    "MIN_TO_TELL_LOGITS",
    "Bernoulli",
    "Categorical",
    "CausalLM",
    "Function",
    "Gaussian",
    "Likelihood",
    "MeanAndVariance",
    "Poisson",
    "Reduction",
    "TokenCategorical",
    "Weighted",
    "reduction_of",
    "resolve",
]

BY_NAME: dict[str, type[Likelihood]] = {
    kind.name: kind
    for kind in (Categorical, Bernoulli, Gaussian, Poisson, TokenCategorical, CausalLM)
}

# Other words for a likelihood, in small letters alone.
OTHER_NAMES = {
    "categorical": "crossentropy ce xent nll softmax multiclass classification logsoftmax",
    "bernoulli": "bce bcewithlogits binarycrossentropy binarycrossentropywithlogits binary sigmoid "
    "logistic multilabel",
    "gaussian": "mse l2 squarederror meansquarederror regression normal gaussiannll",
    "poisson": "poissonnll count counts",
    "causal_lm": "causal lm clm causallanguagemodel languagemodel languagemodeling",
}

Loss = str | Likelihood | nn.Module | Callable[[Tensor, Tensor], Tensor]


def resolve(likelihood: Loss) -> Likelihood:
    """The likelihood of this name, the object itself, or the loss that is given.

    >>> resolve("poisson").name
    'poisson'
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str) and likelihood in BY_NAME:
        return BY_NAME[likelihood]()
    if isinstance(likelihood, nn.Module):
        return read_module(likelihood)
    if callable(likelihood) and not isinstance(likelihood, type):
        return Function(likelihood)
    if isinstance(likelihood, str):
        raise InputError(f"likelihood {likelihood!r} is unknown: {remedy_for(likelihood)}")
    if isinstance(likelihood, type) and issubclass(likelihood, (nn.Module, Likelihood)):
        raise InputError(f"likelihood= is a class; call it: {likelihood.__name__}()")
    raise InputError(
        'likelihood must be a name such as "categorical", a loss of torch.nn or a function '
        f"(outputs, targets) -> loss of each example, got {likelihood!r}"
    )


def remedy_for(name: str) -> str:
    """What to write instead of an unknown name.

    >>> remedy_for("cross_entropy")
    'write "categorical"'
    """
    plain = re.sub(r"loss$", "", re.sub(r"[^a-z0-9]", "", name.lower()))
    for likelihood, other_names in OTHER_NAMES.items():
        if plain in other_names.split():
            return f'write "{likelihood}"'
    close = get_close_matches(name.lower(), BY_NAME, n=1)
    if close:
        return f'did you mean "{close[0]}"?'
    return f"take one of {', '.join(map(repr, BY_NAME))}, or the loss itself"
