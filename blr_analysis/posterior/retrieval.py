"""δ for finding sources: the one under which one half of a training text finds its other half.

The gradient of a text is a_i + b_i, of the tokens that count the first half and the second. Under
the curvature H = U diag(λ) Uᵀ and Σ_δ = U diag(1 / (λ + δ)) Uᵀ the texts are ranked for each half,

    c_ij = a_iᵀ Σ_δ b_j / √(a_iᵀ Σ_δ a_i · b_jᵀ Σ_δ b_j),   MRR(δ) = mean of 1 / rank of c_ii

in its column and in its row. The δ of the largest MRR is taken where that is above the one of the
δ that was found otherwise by more than the standard error of their difference over texts; else the
latter. A smaller δ divides out more of what all texts have in common. It is chosen for rankings,
not for nats: what leaves examples out, or draws weights, wants the prior's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import QUIET, Chunk, chunks
from blr_analysis.posterior.structures.contract import Spectral
from blr_analysis.task import Task

RULE = "retrieval"
TEXTS, FEWEST = 64, 8  # whose halves are compared; of fewer nothing is concluded
ROOM = 2**29  # bytes of their gradients: of larger models some layers speak for all
TIMES = (1e-4, 1e-3, 1e-2, 1e-1, 1e1)  # the δ that was found otherwise


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
        g = pairs.flatten(0, 1).to(form.values[name].dtype)
        gram += ((g / (form.values[name].flatten() + delta)) @ g.mT).cpu()
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
