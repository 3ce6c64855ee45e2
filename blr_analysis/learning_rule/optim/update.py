"""The step of a row on the estimates that the draws have gathered, group by group.

The arithmetic is :func:`blr_analysis.learning_rule.moves.step`; here it is decided which tensors
go through it together, with which evidence, at which scale.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.learning_rule.curvature import Curvature
from blr_analysis.learning_rule.moves import Block, Move, step
from blr_analysis.learning_rule.optim.blocks import for_blocks, group_by
from blr_analysis.learning_rule.optim.draws import GIVEN, state_dtype
from blr_analysis.learning_rule.optim.gathered import DEGREES, Estimate

State = Mapping[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Law:
    """What moves a group: curvature, move and settings; ``kept`` names the state that it needs.

    ``noisy`` says whether the looks were at samples.
    """

    curvature: Curvature
    move: Move
    settings: Mapping[str, Any]
    kept: Sequence[str]
    noisy: bool


def start_state(param: Tensor, law: Law) -> dict[str, Any]:
    """Before the first step: ``hess`` = ``hess_init``, no momentum."""
    like: dict[str, Any] = {"dtype": state_dtype(param), "memory_format": torch.preserve_format}
    values = {"hess": law.settings["hess_init"], "momentum": 0.0}
    return {"step": 0, **{name: torch.full_like(param, values[name], **like) for name in law.kept}}


def update_group(
    params: Sequence[Tensor],
    law: Law,
    state: State,
    estimates: Mapping[Tensor, Estimate],
    inverse_scale: float,
) -> None:
    """One step for those of ``params`` that have an estimate; the others stay.

    ``inverse_scale`` undoes a loss scale that still multiplies the gradients.
    """
    params = [p for p in params if p in estimates]
    for param in params:
        state[param]["step"] += 1
    alike = group_by(
        params,
        lambda p: (p.device, p.dtype, state[p]["step"], bool(_source(estimates[p], law.noisy))),
    )
    for batch in alike.values():
        _update(batch, law, state, estimates, inverse_scale)


def _update(
    params: Sequence[Tensor],
    law: Law,
    state: State,
    estimates: Mapping[Tensor, Estimate],
    inverse_scale: float,
) -> None:
    first, count = estimates[params[0]], state[params[0]]["step"]
    columns: dict[str, list[Tensor]] = {
        "theta": list(params),
        "grad": [estimates[p].grad.detach() for p in params],
        **{name: [state[p][name] for p in params] for name in law.kept},
    }
    if _source(first, law.noisy):
        columns["source"] = [s for p in params for s in _source(estimates[p], law.noisy)]
    settled, dtype = first.curvature is not None, state_dtype(params[0])
    factor = inverse_scale ** DEGREES[first.method]

    def move(*block: list[Tensor]) -> None:
        named = dict(zip(columns, block, strict=True))
        grad = _scaled([g.to(dtype) for g in named["grad"]], inverse_scale)
        evidence = named.get("source", [])
        if settled:
            evidence = _scaled(evidence, factor)
        elif evidence:  # noise, of one draw
            torch._foreach_mul_(evidence, grad)
        hess, momentum = named.get("hess", []), named.get("momentum", [])
        work = Block(named["theta"], grad, evidence, hess, momentum)
        step(work, law.curvature, law.move, law.settings, count)

    with torch.no_grad():
        for_blocks(move, list(columns.values()))


def _source(estimate: Estimate, noisy: bool) -> list[Tensor]:
    """What the curvature is made from beside the mean gradient: noise, or a mean of estimates.

    Nothing for squared gradients of one draw, and of draws at the mean, which are parts of one
    larger minibatch.
    """
    if not noisy and estimate.method not in GIVEN:
        return []
    found = estimate.noise if estimate.curvature is None else estimate.curvature
    return [] if found is None else [found]


def _scaled(tensors: list[Tensor], factor: float) -> list[Tensor]:
    return tensors if factor == 1 or not tensors else list(torch._foreach_mul(tensors, factor))
