"""RegMean (Jin et al., ICLR 2023) and RegMean++ (Nguyen et al., 2025), written from their papers.

    W = (Σ_t W_t G_t)(Σ_t G_t)⁻¹,      G_t = the mean of x xᵀ with its off-diagonals times 0.95

for the weights of Linear layers; all else, their biases too, is averaged. RegMean takes every
layer's inputs x in model t; RegMean++ goes block by block: x stands behind the merged blocks below,
in model t's own block. The factor and the treatment of biases are fusion-bench's (0.2.33); here x
are those of all training examples, and padding counts, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.merging.cases import Case
from blr_analysis.merging.at_weights import at_weights

SHRINK = 0.95
State = dict[str, Tensor]


def regmean(c: Case) -> State:
    return _merged(c, [[n for n, _ in c.model.named_modules()]], below={})


def regmean_plus_plus(c: Case) -> State:
    inside = {f"{m}." for block in c.blocks for m in block}
    average = _average(c)
    below = {n: v for n, v in average.items() if not any(n.startswith(m) for m in inside)}
    return _merged(c, c.blocks, below)


def _average(c: Case) -> State:
    models = list(c.models.values())
    return {n: torch.stack([m[n] for m in models]).mean(0) for n in models[0]}


def _merged(c: Case, blocks: Sequence[Sequence[str]], below: State) -> State:
    average, merged = _average(c), dict(below)
    for block in blocks:
        inside = [n for n in average if any(n.startswith(f"{m}.") for m in block if m)]
        grams = [
            _grams(task, {**model, **merged}, block)
            for task, model in zip(c.train.values(), c.models.values(), strict=True)
        ]
        for name in inside:
            layer = name.removesuffix(".weight")
            merged[name] = average[name]
            if name.endswith(".weight") and layer in grams[0]:
                total = torch.stack([g[layer] for g in grams]).sum(0)
                pairs = zip(grams, c.models.values(), strict=True)
                right = torch.stack([g[layer] @ m[name].mT.double() for g, m in pairs]).sum(0)
                unseen = total.diagonal() == 0  # these weights are averaged
                solved = torch.linalg.solve(total + torch.diag(unseen.double()), right)
                solved[unseen] = average[name].mT.double()[unseen]
                merged[name] = solved.mT.to(average[name])
    return merged


@torch.no_grad()
def _grams(task: blr.Task, state: State, block: Sequence[str]) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def seen(name: str) -> Any:
        def hook(_: nn.Module, given: tuple[Tensor, ...], __: Tensor) -> None:
            x = given[0].detach().flatten(0, -2).double()
            sums[name] = sums.get(name, 0) + x.mT @ x
            counts[name] = counts.get(name, 0) + len(x)

        return hook

    handles = [
        module.register_forward_hook(seen(name))
        for name, module in task.model.named_modules()
        if isinstance(module, nn.Linear)
        and f"{name}.weight" in state
        and any(name == m or not m or name.startswith(f"{m}.") for m in block)
    ]
    with at_weights(task, state, "a model") as params, task.evaluation():
        for chosen in torch.arange(task.n_data).split(task.batch_size):
            task.run(task.fetch(chosen), params, chosen)
    for handle in handles:
        handle.remove()
    return {n: torch.lerp(torch.diag(g.diagonal()), g, SHRINK) / counts[n] for n, g in sums.items()}
