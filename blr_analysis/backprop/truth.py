"""What a plan is held against: plain autograd on a handful of examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from blr_analysis.backprop.cost import batch_numbers
from blr_analysis.backprop.fallback import pulled
from blr_analysis.backprop.layout import LARGER
from blr_analysis.backprop.record import Unit, fetched, inside_transform, rounding, watched
from blr_analysis.data import check_rows
from blr_analysis.errors import InputError, ModelError
from blr_analysis.task import Task

LOOKED_AT = 16  # examples whose sizes are compared
ROUNDINGS = 30  # times that an output may move as far as by another rounding of the layers' outputs
LEAST_ROUNDING = 8  # times the eps, at least
MOST_ROUNDING = 0.1  # of the largest output: half precision
OTHER_OUTPUTS = "the number of outputs of an example changes with its batch"
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
    """Raise :class:`ModelError` when an example's output depends on its batch or on chance: in a
    larger batch, where it comes more often and at other places, and alone, which the shortest and
    the longest of some examples are, without the padding that they have in company.

    What rounding explains is measured: the same examples are run again with every layer's output
    rounded otherwise.

    Args:
        plain: outputs and targets of the probe.
        larger: outputs of the larger batch.
        eps: of the coarsest dtype on the way to the outputs.
    """
    together, targets = plain
    if together.shape[1:] != larger.shape[1:]:
        raise ModelError(OTHER_OUTPUTS)
    pairs = [(row, together[k]) for row, k in zip(larger, LARGER, strict=True)]
    rounded: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), task.evaluation():
        examples = shortest_and_longest(task, probe)
        beside = together[:1], targets[:1]
        if examples is not None:
            beside = task.run(fetched(task, examples), params, examples)
        for place, index in enumerate((probe[:1] if examples is None else examples).split(1)):
            alone, target = _run_alone(task, params, index)
            check_rows(alone, 1)
            pairs.append(_counted_outputs(task, alone, target, beside, place))
            with rounding_otherwise(task.model, eps):
                rounded.append((task.run(fetched(task, index), params, index)[0], alone))
    scale = float(together.abs().amax().clamp_min(1e-30))
    explained = max(LEAST_ROUNDING * eps * scale, ROUNDINGS * _largest_gap(rounded))
    if _largest_gap(pairs) > min(explained, MOST_ROUNDING * scale):
        raise ModelError(_mixes_examples(task, targets, padded=examples is not None))


def _run_alone(task: Task, params: Mapping[str, Tensor], index: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets of one example, of which the model has run several together."""
    try:
        return task.run(fetched(task, index), params, index)
    except InputError as error:
        raise ModelError(
            "the model mixes examples: it runs on several and fails on one alone (batch "
            "statistics, or squeeze()?); compute every output from its own example"
        ) from error


def shortest_and_longest(task: Task, probe: Tensor) -> Tensor | None:
    """The two among some examples from all over the data; None: all are of one size."""
    if task.examples.is_tensors:
        return None
    spread = torch.linspace(0, task.n_data - 1, LOOKED_AT).long()
    candidates = torch.cat([probe, spread]).unique()
    sizes = [batch_numbers(fetched(task, index)) for index in candidates.split(1)]
    if min(sizes) == max(sizes):
        return None
    return candidates[[sizes.index(min(sizes)), sizes.index(max(sizes))]]


@contextmanager
def rounding_otherwise(model: nn.Module, eps: float) -> Iterator[None]:
    """Inside, every output of a layer is multiplied by 1 + eps ξ, with a ξ ~ N(0, 1) for each of
    its numbers, as if it had been rounded otherwise."""
    layers = [
        Unit(path, module, {}, None)
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule) and not any(module.children())
    ]
    generator = torch.Generator().manual_seed(0)

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or inside_transform(leaf):
            return leaf
        noise = torch.randn(leaf.shape, generator=generator).to(leaf)
        return leaf + leaf * noise * eps

    with watched(layers, lambda unit, args, kwargs, output: tree_map(moved, output)):
        yield


def _counted_outputs(
    task: Task, alone: Tensor, target: Tensor, beside: tuple[Tensor, Tensor], place: int
) -> tuple[Tensor, Tensor]:
    """An example's outputs alone and in company; of a sequence, of the tokens that count."""
    single, company = alone[0], beside[0][place]
    counted = task.likelihood.counted(beside[1])
    counted_alone = task.likelihood.counted(target)
    if counted is not None and counted_alone is not None:  # padding may be longer in company
        single = single[counted_alone[0]]
        company = company[counted[place]]
    if single.shape != company.shape:
        raise ModelError(OTHER_OUTPUTS)
    return single, company


def _largest_gap(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    gaps = [(a - b).abs().amax() for a, b in pairs if a.numel()]
    return float(torch.stack(gaps).amax()) if gaps else 0.0


def _mixes_examples(task: Task, targets: Tensor, *, padded: bool) -> str:
    remedy = "mask the padding; " if padded else ""
    if task.likelihood.counted(targets) is not None:
        remedy = "pad on the right, or with mask and position_ids; "
    return (
        "an example's output changes with its batch, its place there, or from call to call; "
        f"{remedy}make dataset and model deterministic, example by example"
    )
