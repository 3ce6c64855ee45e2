"""δ found in the trained weights and the data, where nobody knows it.

Of the objective F(θ) = L(θ) + (δ/2)‖θ − θ₀‖², L = Σ_i ℓ_i, with d = θ̂ − θ₀, g = ∇L(θ̂) and the
curvature H = Σ_i J_iᵀ Λ_i J_i ≈ U diag(λ) Uᵀ:

    stationarity   dᵀ (H + δ)⁻¹ (g + δ d) = 0      F's Newton step from θ̂ leaves d's length alone
    evidence       δ ‖d‖² = Σ_k λ_k / (λ_k + δ)    MacKay's fixed point

The first is exact where θ̂ is the minimum of F, g = −δ d, whatever the curvature. Elsewhere
(minibatches, early stopping) (H + δ)⁻¹ takes the gradient that is left in stiff directions, which
is noise, for what it is worth: the plain projection −⟨g, d⟩/‖d‖², its limit of large δ, may be
negative. Where no δ solves it, as after training without any penalty, or one a hundred times below
the evidence's that explains little of the gradient, as before training, the evidence decides.

For finding sources δ may be the one under which one half of a training text finds its other half.
The gradient of a text is a_i + b_i, of the tokens that count the first half and the second. Under
H and Σ_δ = U diag(1 / (λ + δ)) Uᵀ the texts are ranked for each half,

    c_ij = a_iᵀ Σ_δ b_j / √(a_iᵀ Σ_δ a_i · b_jᵀ Σ_δ b_j),   MRR(δ) = mean of 1 / rank of c_ii

in its column and in its row. The δ of the largest MRR is taken where that is above the one of the
δ that was found otherwise by more than the standard error of their difference over texts; else the
latter. A smaller δ divides out more of what all texts have in common. It is chosen for rankings,
not for nats: what leaves examples out, or draws weights, wants the prior's own.

Sources: MacKay, "A practical Bayesian framework for backpropagation networks", 1992 (evidence).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import QUIET, Chunk, chunks
from blr_analysis.errors import PosteriorError
from blr_analysis.posterior.structures.contract import Spectral, Tree
from blr_analysis.task import Task

LEAST = 1e-7  # of the largest curvature: a smaller prior is lost in rounding
HALVINGS = 60
SINGLE = 2**22  # directions that are looked at one by one
BINS, OCTAVES = 2**14, 60  # of the curvature, below the largest
APART, EXPLAINED = 5, 0.5  # times between the two rules, so far off a minimum: both are said
FAR = 100  # times below the evidence's, so far off a minimum: a root that is chance
RULE = "retrieval"
TEXTS, FEWEST = 64, 8  # whose halves are compared; of fewer nothing is concluded
PIECE = 2**23  # numbers at a time
ROOM = 2**29  # bytes of their gradients: of larger models some layers speak for all
TIMES = (1e-4, 1e-3, 1e-2, 1e-1, 1e1)  # the δ that was found otherwise


def chosen_prior(form: Spectral, gap: Tree, gradient: Tree | None) -> tuple[float, dict[str, Any]]:
    """δ for the data's curvature ``form`` (no prior in it), and what the record says of it.

    Args:
        gap: d = θ̂ − θ₀.
        gradient: g, of the data alone; None: unknown, so that the evidence decides.

    Returns:
        δ, and ``rule`` ("stationarity" or "evidence"), δ by each (``stationarity``, None where
        there is none, and ``evidence``), ``apart``, their ratio, and ``explained``, the share of
        gᵀ(H + δ)⁻¹g that the prior's pull cancels: 1 at a minimum.

    Raises:
        PosteriorError: θ̂ = θ₀, or data without curvature.

    Example:
        >>> from blr_analysis.posterior.structures import Diagonal
        >>> H, d = Diagonal({"w": torch.tensor([4.0, 1.0])}), {"w": torch.tensor([1.0, 2.0])}
        >>> delta, about = chosen_prior(H, d, {"w": -3.0 * d["w"]})
        >>> round(delta, 4), about["rule"]
        (3.0, 'stationarity')
    """
    curved, count, dd, dg, gg = _directions(form, gap, gradient)
    size, top = float(dd.sum()), float(curved.max())
    if not top > 0:
        raise PosteriorError("the loss has no curvature; are the model's outputs detached?")
    if not size > 0:
        raise PosteriorError("the weights are the initial ones; give prior_precision")

    def excess(delta: float) -> float:
        return delta * size - float((count * curved / (curved + delta)).sum())

    evidence = _crossing(excess, low=0.0, high=float(count.sum()) / size)
    if gradient is None:
        return evidence, {"rule": "evidence", "stationarity": None, "evidence": evidence}

    def left(delta: float) -> float:
        return float(((dg + delta * dd) / (curved + delta)).sum())

    high = max(top, evidence, abs(float(dg.sum())) / size)
    while left(high) <= 0:
        high *= 2
    low = high
    while left(low) > 0 and low > LEAST * top:
        low /= 2
    stationary = _crossing(left, low=low, high=2 * low) if left(low) <= 0 else None

    def explained(delta: float) -> float:
        slope, pull, across = (float((x / (curved + delta)).sum()) for x in (gg, dd, dg))
        return across**2 / (slope * pull) if across < 0 else 0.0

    rule, delta = "evidence", evidence
    if stationary is not None and (
        FAR * stationary > evidence or explained(stationary) > EXPLAINED
    ):
        rule, delta = "stationarity", stationary
    return delta, {
        "rule": rule,
        "stationarity": stationary,
        "evidence": evidence,
        "apart": None if stationary is None else max(stationary / evidence, evidence / stationary),
        "explained": explained(delta),
    }


def in_words(choice: Mapping[str, Any]) -> str:
    """δ (the largest, of several), the rule that chose it, and what speaks for it or against: how
    well texts are retrieved, or the evidence's where that is far from it off a minimum."""
    delta, rule = choice["delta"], choice["rule"]
    if halves := choice.get("retrieval"):
        pair = [halves["mrr"].get(f"{d:.3g}") for d in (delta, halves["before"])]
        if None in pair:
            return f"{delta:.3g}: too few texts for {rule}"
        return "{:.3g} by {}: MRR {:.2f}, at {:.3g} {:.2f}".format(
            delta, rule, pair[0], halves["before"], pair[1]
        )
    said = f"{max(delta.values()) if isinstance(delta, Mapping) else delta:.3g} by {rule}"
    if (choice.get("apart") or 1.0) > APART and choice["explained"] < EXPLAINED:
        other = "evidence" if rule == "stationarity" else "stationarity"
        said += f" ({choice[other]:.3g} by {other})"
    return said


def _directions(form: Spectral, gap: Tree, gradient: Tree | None) -> list[Tensor]:
    """λ of the directions, how many have it, and their sums of d², g d and g²; of a large model
    directions of nearly the same λ together, under its mean."""
    d = form.forward(gap)
    g = {k: torch.zeros(()) for k in d} if gradient is None else form.forward(gradient)
    few = sum(s.numel() for s in form.values.values()) <= SINGLE
    top = max(float(s.max()) for s in form.values.values())
    parts: list[list[Tensor]] = []
    sums = torch.zeros(5, BINS, dtype=torch.float64)
    for values, x, y in _pieces(form, d, g):
        curved, x, y = values.double().clamp_min(0), x.double(), y.double()
        rows = [curved, torch.ones_like(curved), x * x, x * y, y * y]
        if few:
            parts.append(rows)
        elif top > 0:
            octaves = (curved / top).clamp_min(2.0**-OCTAVES).log2() / OCTAVES + 1
            place = (octaves * (BINS - 1)).round().long()
            for k, row in enumerate(rows):
                sums[k] += torch.bincount(place, row, BINS).cpu()
    if few:
        return [torch.cat(row) for row in zip(*parts, strict=True)]
    curved, count, *rest = sums[:, sums[1] > 0] if top > 0 else sums
    return [curved / count.clamp_min(1), count, *rest]


def _pieces(form: Spectral, *others: Tree) -> Iterator[tuple[Tensor, ...]]:
    """λ and these in its directions, flat, some at a time: of a large table copies in double
    precision are many."""
    for key, values in form.values.items():
        held = (values, *(other[key].expand_as(values) for other in others))
        yield from zip(*(t.flatten().split(PIECE) for t in held), strict=True)


def _crossing(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f rises through 0 between these."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return high


def chosen_by_retrieval(
    task: Task, params: Mapping[str, Tensor], form: Spectral, delta: float
) -> tuple[float, dict[str, Any]]:
    """δ, and for the record: how many ``texts`` were halved, the ``mrr`` of every δ, and the best
    one's ``gain`` over the one ``before`` with its standard ``error``.

    Args:
        form: the data's curvature, no prior in it.
        delta: what the weights and the data say, which stays where nothing is clearly better.
    """
    halves = _halves(task, params, form)
    count = next(iter(halves.values())).shape[1]
    if count < FEWEST:
        return delta, {"texts": count, "before": delta, "mrr": {}}
    ranks = {d: reciprocal_ranks(halves, form, d) for d in (delta, *(delta * t for t in TIMES))}
    best = max(ranks, key=lambda d: float(ranks[d].mean()))
    change = ranks[best] - ranks[delta]
    gain, error = float(change.mean()), float(change.std()) / count**0.5
    mrr = {f"{d:.3g}": float(ranks[d].mean()) for d in sorted(ranks)}
    about = {"texts": count, "before": delta, "mrr": mrr, "gain": gain, "error": error}
    return best if gain > error else delta, about


def halved(chunk: Chunk) -> Tensor:
    """∂ℓ/∂f of the first and of the second half of the tokens that count, ``[B, 2, T, C]``."""
    counted = chunk.likelihood.counted(chunk.targets)
    assert counted is not None
    first = 2 * counted.cumsum(1) <= counted.sum(1, keepdim=True)
    error = chunk.likelihood.error(chunk.outputs, chunk.targets)
    return torch.stack([error * half.unsqueeze(-1) for half in (first, ~first)], dim=1)


def reciprocal_ranks(halves: Mapping[str, Tensor], form: Spectral, delta: float) -> Tensor:
    """1 / rank of each text's one half for the other, in the mean of both ways, ``[n]``."""
    n = next(iter(halves.values())).shape[1]
    gram = torch.zeros(2 * n, 2 * n)
    for name, pairs in halves.items():
        values = form.values[name].flatten().split(PIECE // len(gram))
        for own, half in zip(values, pairs.flatten(0, 1).split(len(values[0]), dim=1), strict=True):
            g = half.to(own.dtype)
            gram += ((g / (own + delta)) @ g.mT).cpu()
    lengths = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).sqrt()
    cosines = (gram / lengths / lengths.unsqueeze(1))[:n, n:]
    own = cosines.diagonal()
    better = torch.stack([(cosines > own).sum(0), (cosines > own.unsqueeze(1)).sum(1)])
    return (1 / (1.0 + better)).mean(0)


def _layers(form: Spectral, count: int) -> list[str]:
    """As many, at random, as there is room for; the smallest at least."""
    sizes = {n: s.numel() for n, s in form.values.items()}
    names, left = [], ROOM // (2 * count * torch.bfloat16.itemsize)
    for k in torch.randperm(len(sizes), generator=torch.Generator().manual_seed(0)).tolist():
        name = list(sizes)[k]
        if sizes[name] <= left:
            names.append(name)
            left -= sizes[name]
    return names or [min(sizes, key=lambda n: sizes[n])]


def _halves(task: Task, params: Mapping[str, Tensor], form: Spectral) -> dict[str, Tensor]:
    """Uᵀ a_i and Uᵀ b_i of some texts, ``[2, n, P]`` for some layers."""
    generator = torch.Generator().manual_seed(0)
    some = torch.randperm(task.n_data, generator=generator)[:TEXTS].sort().values
    held = {
        n: form.values[n].new_zeros(2, len(some), form.values[n].numel(), dtype=torch.bfloat16)
        for n in _layers(form, len(some))
    }
    whole, start = [], 0
    for chunk in chunks(task, params, QUIET, columns=2, indices=some):
        cotangents = halved(chunk)
        whole.append(cotangents.flatten(2).any(2).all(1))
        rows = slice(start, start + len(chunk.indices))
        for term, basis in form.paired(chunk.terms(cotangents, last=True)):
            if basis is None or basis.key in held:
                turned = term if basis is None else term.rotated(basis)
                for name, g in turned.jacobian().items():
                    if name in held:
                        held[name][:, rows] = g.flatten(2).transpose(0, 1).to(torch.bfloat16)
        start = rows.stop
    kept = torch.cat(whole)  # one token has no halves
    return {n: g[:, kept] for n, g in held.items()}
