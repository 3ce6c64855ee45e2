"""Losses of every kind, as plain torch writes them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from models import normal
from torch import Tensor, nn
from torch import distributions as d

from blr_analysis.likelihoods import (
    Bernoulli,
    Categorical,
    CausalLM,
    Gaussian,
    Likelihood,
    Poisson,
    TokenCategorical,
    resolve,
)

N = 8
C = 4
T = 5
W = torch.tensor([0.5, 15.0, 1.0, 2.0], dtype=torch.float64)
Loss = Callable[[Tensor, Tensor], Tensor]


def focal(f: Tensor, y: Tensor) -> Tensor:
    """Lin et al., 2017, with γ = 2."""
    logp = f.log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)
    return -((1 - logp.exp()) ** 2) * logp


def whole(high: int, *shape: int, seed: int = 3) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


CLASSES = whole(C, N)
TOKENS = whole(C, N, T)
TOKENS[0, 2:] = -100
TOKENS[1, 0] = -100
SOFT = normal(N, C, seed=5).softmax(-1)
BITS = (normal(N, C, seed=6) > 0).double()
NUMBERS = normal(N, C, seed=7)
COUNTS = whole(6, N, C, seed=8).double()


def each(module: nn.Module) -> Loss:
    """torch's own loss of every example, from the outputs that our likelihood takes."""
    per_example = copy.copy(module)
    per_example.reduction = "none"

    def loss(f: Tensor, y: Tensor) -> Tensor:
        if isinstance(module, nn.GaussianNLLLoss):
            n_outputs = y.shape[1]
            losses = per_example(f[:, :n_outputs], y, f[:, n_outputs:])
        else:
            losses = per_example(f, y)
        return losses.flatten(1).sum(1) if losses.ndim > 1 else losses

    return loss


def of_tokens(likelihood: TokenCategorical) -> Loss:
    """Each sequence's summed cross-entropy by torch, from raw outputs and labels."""
    w = None if likelihood.weight is None else torch.tensor(likelihood.weight).double()
    smoothing = likelihood.label_smoothing
    ignored = likelihood.ignore_index
    token_loss = nn.CrossEntropyLoss(
        w, label_smoothing=smoothing, ignore_index=ignored, reduction="none"
    )

    def loss(f: Tensor, y: Tensor) -> Tensor:
        if isinstance(likelihood, CausalLM):
            f, y = f[:, :-1], y[:, 1:]
        return token_loss(f.mT, y).sum(1)

    return loss


def density(make: Callable[[Tensor], d.Distribution]) -> Loss:
    return lambda f, y: -make(f).log_prob(y)


# What torch.distributions calls p(y | f), and targets; then torch's own loss modules.
KINDS: list[tuple[Likelihood, Callable[[Tensor], d.Distribution], Tensor]] = [
    (Categorical(), lambda f: d.Categorical(logits=f), CLASSES),
    (Bernoulli(), lambda f: d.Independent(d.Bernoulli(logits=f), 1), BITS),
    (Gaussian(), lambda f: d.Independent(d.Normal(f, 1.0), 1), NUMBERS),
    (Gaussian(0.3), lambda f: d.Independent(d.Normal(f, 0.3**0.5), 1), NUMBERS),
    (Gaussian(W), lambda f: d.Independent(d.Normal(f, W.to(f).sqrt()), 1), NUMBERS),
    (Poisson(), lambda f: d.Independent(d.Poisson(f.exp()), 1), COUNTS),
]
MODULES: list[tuple[nn.Module, Tensor]] = [
    (nn.CrossEntropyLoss(weight=W, reduction="sum"), CLASSES),
    (nn.CrossEntropyLoss(label_smoothing=0.2), CLASSES),
    (nn.CrossEntropyLoss(ignore_index=2), CLASSES),
    (nn.CrossEntropyLoss(weight=W, label_smoothing=0.2, ignore_index=1), CLASSES),
    (nn.CrossEntropyLoss(reduction="none"), SOFT),
    (nn.CrossEntropyLoss(weight=W, label_smoothing=0.1), SOFT),
    (nn.NLLLoss(weight=W, ignore_index=2), CLASSES),
    (nn.BCEWithLogitsLoss(weight=W, pos_weight=W.flip(0)), BITS),
    (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0).double()), SOFT),
    (nn.MSELoss(), NUMBERS),
    (nn.PoissonNLLLoss(), COUNTS),
    (nn.PoissonNLLLoss(full=True), COUNTS),
    (nn.HuberLoss(delta=0.7), NUMBERS),
    (nn.BCELoss(), BITS),
    (nn.PoissonNLLLoss(log_input=False), COUNTS),
    (nn.GaussianNLLLoss(full=True, eps=1e-3), NUMBERS),
]
SEQUENCES = [
    TokenCategorical(),
    CausalLM(),
    TokenCategorical(ignore_index=0),
    TokenCategorical(weight=W, label_smoothing=0.2),
    CausalLM(label_smoothing=0.1),
]


def members() -> dict[str, tuple[Likelihood, Tensor, Tensor, Loss]]:
    """By name: a likelihood, outputs, targets, and torch's loss of every example."""
    f = 2 * normal(N, C)
    spread = torch.cat((f, normal(N, C, seed=2).exp()), -1)
    spread[0, C] = 1e-9  # below eps
    outputs_of = {
        "NLLLoss": f.log_softmax(-1),
        "BCELoss": f.sigmoid(),
        "GaussianNLLLoss": spread,
    }
    cases = {repr(loss): (loss, f, y, density(make)) for loss, make, y in KINDS}
    for k, (module, y) in enumerate(MODULES):  # numbered, as their names do not tell their settings
        rates = isinstance(module, nn.PoissonNLLLoss) and not module.log_input
        outputs = f.exp() if rates else outputs_of.get(type(module).__name__, f)
        cases[f"{type(module).__name__} {k}"] = (resolve(module), outputs, y, each(module))
    for loss in SEQUENCES:
        y = TOKENS.masked_fill(TOKENS == -100, loss.ignore_index)
        cases[repr(loss)] = (loss, normal(N, T, C), y, of_tokens(loss))
    return cases


MEMBERS = members()
