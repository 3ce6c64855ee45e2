"""What a plan is held against: plain autograd on a handful of examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.fallback import pulled
from blr_analysis.backprop.layout import LARGER
from blr_analysis.backprop.record import fetched, rounding
from blr_analysis.data import check_rows
from blr_analysis.errors import ModelError
from blr_analysis.task import Task

WEIGHTS = (1.0, -0.6, 1.7)  # s_i of the probe's examples


@dataclass(frozen=True)
class Truth:
    """Σ_i s_i J_iᵀ c_i over the probe's examples, for random c_i and an s_i for each of them.

    A rule gives every J_iᵀ c_i without knowing s: what it says of the wrong example, or of several
    at once, shows in the sum.
    """

    sums: dict[str, Tensor]  # in the model's dtype
    weights: Tensor  # s
    eps: float  # of the coarsest dtype on the way


def cotangent_of(outputs: Tensor) -> Tensor:
    """c, in the shape of the outputs: the same ones on every call, so that nobody keeps them."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(outputs.shape, generator=generator).sub_(0.5).to(outputs)


def autograd_gradients(
    task: Task, params: Mapping[str, Tensor], probe: Tensor
) -> tuple[Truth, tuple[Tensor, Tensor]]:
    """One forward and one backward pass by plain autograd: the truth, and outputs and targets.

    Raises:
        ModelError: autograd cannot differentiate the model.
    """
    with torch.enable_grad(), task.evaluation():
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        outputs, targets = task.run(fetched(task, probe), leaves, probe)
    weights = torch.tensor(WEIGHTS[: len(probe)]).to(outputs)
    scaled = cotangent_of(outputs).mul_(weights.view(-1, *[1] * (outputs.ndim - 1)))
    eps = rounding(outputs)
    with no_backward_inside(task, leaves):
        try:
            sums = pulled([outputs], [scaled], leaves, last=True)
        except RuntimeError as error:
            raise not_differentiable(error) from error
    truth = Truth(dict(zip(leaves, sums, strict=True)), weights, eps)
    return truth, (outputs.detach(), targets)


@contextmanager
def no_backward_inside(task: Task, leaves: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse a model whose backward pass calls ``backward()`` itself, as reentrant checkpointing of
    one's own does: what that adds to ``p.grad`` is missing from the gradients asked for.

    Gradients that lie in the model's ``p.grad`` come back as they were.

    Raises:
        ModelError: some ``p.grad`` was written to.
    """
    own = dict(task.model.named_parameters())
    before = {name: p.grad for name, p in own.items()}
    for p in own.values():
        p.grad = None
    try:
        yield
        written = [n for n, p in own.items() if p.grad is not None]
        written += [n for n, p in leaves.items() if p.grad is not None and n not in written]
    finally:
        for name, p in own.items():
            p.grad = before[name]
    if written:
        raise ModelError(
            f"the model's backward pass runs its own backward() for {written[:5]}: switch off "
            "gradient checkpointing"
        )


def not_differentiable(error: RuntimeError) -> ModelError:
    return ModelError(
        f"autograd cannot differentiate the model: {error}; operations in place on what the "
        "backward pass needs, and gradient checkpointing, must be switched off for the analysis"
    )


def check_independent(
    task: Task,
    params: Mapping[str, Tensor],
    probe: Tensor,
    plain: tuple[Tensor, Tensor],
    larger: Tensor,
    eps: float,
) -> None:
    """Raise :class:`ModelError` when an example's output depends on its batch or on chance: beside
    itself alone, and in a larger batch where it comes more often and at other places.

    Args:
        plain: outputs and targets of the probe.
        larger: outputs of the larger batch.
    """
    together, targets = plain
    with torch.no_grad(), task.evaluation():
        alone, target = task.run(fetched(task, probe[:1]), params, probe[:1])
    check_rows(alone, 1)
    first, single = together[0], alone[0]
    counted = task.likelihood.counted(targets)
    own = task.likelihood.counted(target)
    if counted is not None and own is not None:  # padding may be longer in company
        first, single = first[counted[0]], single[own[0]]
    if first.shape != single.shape or together.shape[1:] != larger.shape[1:]:
        raise ModelError("the number of outputs of an example changes with its batch")
    scale = together.abs().amax().clamp_min(1e-30)
    again = ((row, together[k]) for row, k in zip(larger, LARGER, strict=True))
    gaps = [(a - b).abs().amax() for a, b in ((first, single), *again)]
    if bool(torch.stack(gaps).amax() > min(30 * eps**0.5, 0.1) * scale):
        padding = "" if counted is None else "pad on the right, or with mask and position_ids; "
        raise ModelError(
            "an example's output changes with its batch, its place there, or from call to call; "
            f"{padding}make dataset and model deterministic, example by example"
        )
