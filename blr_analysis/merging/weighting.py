"""How much of each task? Weights α_t with a reason, without validation data.

Three ways of coming to α, from nothing to a quadratic model of the losses:

* :func:`default_weights`: what follows from the method alone.
* :func:`suggest_weights`: task arithmetic at the optimum that the precisions foretell.
* :func:`blr_analysis.merge_curve`: tried out on validation data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import positive_int, some
from blr_analysis.errors import InputError
from blr_analysis.merging.at_weights import State, named_states, state_of
from blr_analysis.merging.methods import method_of
from blr_analysis.posterior import Posterior
from blr_analysis.views import Tabular


def default_weights(method: str, n_models: int) -> list[float]:
    """α_t before anything is known of the tasks: what the method's own derivation asks for.

    ``gradient_matching`` and ``fisher``: 1 each. Their H_t are SUMS over the examples of a task,
    so α_t = 1 lets every example of every task count once: the objective is that of training on
    all data together, and for quadratic losses the merge is its optimum. α_t ≠ 1 answers another
    question: a task that counts α_t times, or (α_t = −1) one that is taken out.

    ``task_arithmetic`` and ``linear``: 1/T each. Without precisions nothing says where the tasks
    agree. If they all ask for the same change, Σ_t (θ_t − θ_0) overshoots T times and 1/T is
    exact; if each changes weights of its own, 1 is exact. 1/T never leaves the convex hull of
    the models; with precisions, :func:`suggest_weights` finds the place between the two.

    Args:
        method: a name of :data:`blr_analysis.merging.methods.METHODS`.
        n_models: T, how many fine-tuned models are merged.

    Raises:
        InputError: an unknown method, or T below 1.

    Example:
        >>> default_weights("gradient_matching", 4), default_weights("task_arithmetic", 4)
        ([1.0, 1.0, 1.0, 1.0], [0.25, 0.25, 0.25, 0.25])
    """
    count = positive_int("n_models", n_models)
    return [1.0 if method_of(method).uses_precisions else 1 / count] * count


@dataclass(frozen=True)
class SuggestedWeights(Tabular):
    """What :func:`suggest_weights` found.

    Attributes:
        weights: α_t for task arithmetic, by model.
        excess: how far above the optimum of the quadratic model the merge with these weights
            stays, in nats summed over all examples; gradient matching with the same precisions
            stays at 0.
        excess_of_average, excess_of_sum: the same for α_t = 1/T and for α_t = 1.
        diagonal_of: the models (and ``"base_precision"``) whose posterior knows how weights act
            together, "gram" or "kron" say, and of which only the diagonal was taken.
    """

    weights: dict[str, float]
    excess: float
    excess_of_average: float
    excess_of_sum: float
    diagonal_of: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shown = ", ".join(f"{n}: {a:.4g}" for n, a in self.weights.items())
        only = f"; of {some(self.diagonal_of)} the diagonal alone" if self.diagonal_of else ""
        return (
            f"SuggestedWeights({{{shown}}}; predicted {self.excess:.4g} nats above gradient "
            f"matching, average {self.excess_of_average:.4g}, sum {self.excess_of_sum:.4g}{only})"
        )


def suggest_weights(
    base: Any,
    models: Any,
    *,
    precisions: Any,
    base_precision: Any = None,
    delta: float = 0.0,
    each: bool = False,
) -> SuggestedWeights:
    """The α of task arithmetic that the precisions foretell to be best: no data, closed form.

    Around its own optimum, the loss of task t is read off its precision H_t (a SUM over its
    examples), and the joint objective is a quadratic of the whole step v = θ − θ_0:

        Q(v) = ½ vᵀ(H_0 + Σ_t H_t)v − vᵀ Σ_t (H_0 + H_t) τ_t,      τ_t = θ_t − θ_0

    Its optimum is the gradient-matching merge with α_t = 1. Task arithmetic can only choose among
    v = α Σ_t τ_t, or with ``each`` among v = Σ_t α_t τ_t, and the best of those is

        α* = dᵀ Σ_t(H_0 + H_t)τ_t / dᵀ(H_0 + Σ_t H_t) d,  d = Σ_t τ_t;      or  A α = b with
        A_st = τ_sᵀ(H_0 + Σ_r H_r)τ_t,  b_s = τ_sᵀ Σ_t(H_0 + H_t)τ_t

    A factor common to H_0 and all H_t changes nothing, so that mis-scaled Fishers do no harm as
    long as they are mis-scaled alike. As good as the diagonal is: weights that act together
    within a task (all do, in a network) make the true α* smaller or larger. Where validation
    data are at hand, :func:`blr_analysis.merge_curve` has the last word.

    Args:
        base: θ_0, a state dict or a module.
        models: the θ_t, a list or a dict by name.
        precisions: H_t of each, in that order or by those names: a diagonal by parameter name
            without the prior's share (sums over the examples), or a
            :class:`~blr_analysis.Posterior`, whose prior is taken off and, where it is "gram",
            "kron", "lowrank" or "full", all but its diagonal left out; ``diagonal_of`` of the
            result names those. Tensors without a precision take no part.
        base_precision: H_0 without δ, in the same form; None: 0.
        delta: δ, added to every entry of H_0.
        each: a weight for every model instead of one for all; the least-squares solution of
            smallest norm where task vectors are linearly dependent.

    Raises:
        InputError: other names or shapes, as many precisions as models are missing, NaN, inf or
            negative precisions, no model that differs from the base where precision is positive.

    Source: Daheim et al., "Model Merging by Uncertainty-Based Gradient Matching", ICLR 2024 (the
    quadratic model); its optimum along task vectors is worked out here.

    Example:
        >>> base = {"w": torch.zeros(2)}
        >>> a, b = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([1.0, 0.0])}
        >>> H = {"w": torch.ones(2)}
        >>> suggest_weights(base, [a, b], precisions=[H, H]).weights      # the same task twice
        {'1': 0.5, '2': 0.5}
        >>> c, G = {"w": torch.tensor([0.0, 2.0])}, {"w": torch.tensor([0.0, 1.0])}
        >>> suggest_weights(base, [a, c], precisions=[{"w": torch.tensor([1.0, 0.0])}, G]).weights
        {'1': 1.0, '2': 1.0}
    """
    start = state_of(base, "base")
    states = named_states(models, "models")
    curvatures = matched_precisions(precisions, list(states))
    prior = {} if base_precision is None else data_precision(base_precision, "base_precision")
    if not isinstance(delta, (int, float)) or not math.isfinite(delta) or delta < 0:
        raise InputError(f"delta must be a finite number, at least 0, got {delta!r}")
    size = len(states)
    gram = torch.zeros(size, size, dtype=torch.float64)
    pull, best = torch.zeros(size, dtype=torch.float64), 0.0
    for name in _covered(start, states, curvatures, prior):
        zero = start[name].double()
        steps = torch.stack([s[name].double() - zero for s in states.values()])
        h = torch.stack([c[name].double().expand_as(zero) for c in curvatures.values()])
        h0 = torch.full_like(zero, float(delta))
        h0 += prior[name].double() if name in prior else 0.0
        steps, h, h0 = steps.reshape(size, -1), h.reshape(size, -1), h0.reshape(-1)
        total, asked = h0 + h.sum(0), ((h0 + h) * steps).sum(0)
        gram += (steps * total) @ steps.T
        pull += steps @ asked
        curved = total > 0
        best -= 0.5 * float((asked[curved] ** 2 / total[curved]).sum())
    if not bool(gram.trace() > 0):
        raise InputError(
            "no model differs from the base where a precision is positive: do they belong together?"
        )
    if each:
        alphas = torch.linalg.lstsq(gram, pull[:, None], driver="gelsd").solution[:, 0]
    else:
        along = gram.sum()
        alphas = torch.full_like(pull, float(pull.sum() / along) if along > 0 else 0.0)

    def excess(weights: Tensor) -> float:
        return max(0.0, float(0.5 * weights @ gram @ weights - weights @ pull) - best)

    one = torch.ones_like(pull)
    given = dict(zip(states, in_order(precisions, list(states)), strict=True))
    return SuggestedWeights(
        dict(zip(states, alphas.tolist(), strict=True)),
        *map(excess, (alphas, one / size, one)),
        diagonal_of=tuple(
            name
            for name, p in [*given.items(), ("base_precision", base_precision)]
            if isinstance(p, Posterior) and p.structure != "diag"
        ),
    )


def data_precision(precision: Any, name: str) -> State:
    """The diagonal H by parameter name, without the prior's share, checked.

    Raises:
        InputError: neither tensors by name nor a posterior; NaN, inf or negative entries.
    """
    if isinstance(precision, Posterior):
        prior = precision.prior
        data_part = {n: (precision.precision(n) - prior.of(n)).clamp_min(0) for n in precision.mean}
    else:
        data_part = state_of(precision, name)
    for n, h in data_part.items():
        if not h.is_floating_point() or not bool((torch.isfinite(h) & (h >= 0)).all()):
            raise InputError(
                f"{name}: the precision of {n!r} must be finite and at least 0 everywhere"
            )
    return data_part


def in_order(given: Any, names: Sequence[str], what: str = "precisions") -> list[Any]:
    """One entry per name, of a list in their order or a dict by them.

    Raises:
        InputError: another number of them, or other names.
    """
    if isinstance(given, Mapping):
        named = {str(n): entry for n, entry in given.items()}
        if set(named) != set(names):
            raise InputError(
                f"{what} are of {some(sorted(named))}, wanted of {some(sorted(names))}: "
                "use the same names"
            )
        return [named[n] for n in names]
    if isinstance(given, (list, tuple)) and len(given) == len(names):
        return list(given)
    got = f"{len(given)}" if isinstance(given, (list, tuple)) else repr(given)
    raise InputError(f"{what} must hold one for each of {len(names)}, got {got:.80}")


def matched_precisions(precisions: Any, names: Sequence[str]) -> dict[str, State]:
    """H_t as tensors, by the names of the models; see :func:`in_order`, :func:`data_precision`."""
    given = zip(names, in_order(precisions, names), strict=True)
    return {n: data_precision(p, f"precisions[{n!r}]") for n, p in given}


def _covered(
    start: State, states: Mapping[str, State], curvatures: Mapping[str, State], prior: State
) -> list[str]:
    """The tensors that every precision covers, after a check of names, shapes and numbers."""
    covered = {n for c in curvatures.values() for n in c}
    given = [("the base", start, set(start)), ("base_precision", prior, set(prior))]
    given += [(f"model {n!r}", state, set(start)) for n, state in states.items()]
    given += [(f"the precision of {n!r}", c, covered) for n, c in curvatures.items()]
    for who, tensors, names in given:
        if set(tensors) != names:
            apart = some(sorted(set(tensors) ^ names))
            raise InputError(f"{who} and the others name different tensors: {apart}")
        for n, t in tensors.items():
            if n not in start or t.shape != start[n].shape:
                there = list(start[n].shape) if n in start else "absent"
                raise InputError(f"{who}: {n!r} has shape {list(t.shape)}, in the base {there}")
            if not bool(torch.isfinite(t).all()):
                raise InputError(f"{who}: {n!r} holds NaN or inf")
    return [n for n in start if n in covered]
