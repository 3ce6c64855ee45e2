"""What a plan is held against: plain autograd on a handful of examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from blr_analysis.backprop.fallback import pulled
from blr_analysis.backprop.record import fetched
from blr_analysis.errors import ModelError
from blr_analysis.task import Task


def autograd_gradients(
    task: Task, params: Mapping[str, Tensor], probe: Tensor
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Every probe example's gradients of two random combinations of outputs.

    ``[k, 2, *shape]`` per name, and the combinations, in the shape of the outputs.

    Raises:
        ModelError: autograd cannot differentiate the model.
    """
    with torch.enable_grad(), task.evaluation():
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        outputs, _ = task.run(fetched(task, probe), leaves, probe)
    generator = torch.Generator().manual_seed(0)
    cotangents = [
        torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs)
        for _ in range(2)
    ]
    shape = (len(probe), len(cotangents))
    truth = {n: p.new_empty(*shape, *p.shape) for n, p in params.items()}
    with no_backward_inside(task, leaves):
        for i in range(len(probe)):
            for j, cotangent in enumerate(cotangents):
                try:
                    row = pulled([outputs[i]], [cotangent[i]], leaves)
                except RuntimeError as error:
                    raise not_differentiable(error) from error
                for name, gradient in zip(leaves, row, strict=True):
                    truth[name][i, j] = gradient
    return truth, cotangents


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


def check_independent(task: Task, params: Mapping[str, Tensor], probe: Tensor) -> None:
    """Raise :class:`ModelError` when an example's output depends on its batch or on chance."""
    with torch.no_grad(), task.evaluation():
        together, targets = task.run(task.fetch(probe), params, probe)
        alone, target = task.run(task.fetch(probe[:1]), params, probe[:1])
        turned, _ = task.run(task.fetch(probe.roll(1)), params, probe.roll(1))
    if len(together) != len(probe) or len(alone) != 1:
        raise ModelError(
            f"the model returned {len(together)} rows of outputs for {len(probe)} examples; "
            "reshape them in forward="
        )
    counted, own = task.likelihood.counted(targets), task.likelihood.counted(target)
    first, single = together[0], alone[0]
    if counted is not None and own is not None:  # padding may be longer in company
        first, single = first[counted[0]], single[own[0]]
    if first.shape != single.shape:
        raise ModelError("the number of outputs of an example changes with its batch")
    scale = together.abs().amax().clamp_min(1e-30)
    tolerance = 30 * torch.finfo(scale.dtype).eps ** 0.5
    gaps = torch.cat([(first - single).flatten(), (together - turned.roll(-1, 0)).flatten()])
    if bool(gaps.abs().amax() > tolerance * scale):
        raise ModelError(
            "an example's output changes with its batch, its place there, or from call to call; "
            "make dataset and model deterministic, example by example"
        )
