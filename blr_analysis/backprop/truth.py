"""The truth that a plan is checked against: plain autograd on a handful of examples."""

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
from blr_analysis.backprop.layout import ORDER_IN_LARGER_BATCH
from blr_analysis.backprop.record import (
    Unit,
    inside_transform,
    is_floating,
    leaves_of,
    rounding,
    watched,
)
from blr_analysis.data.examples import evenly_spread
from blr_analysis.data.outputs import check_rows
from blr_analysis.errors import InputError, ModelError
from blr_analysis.task import ModelAt, Task

EXAMPLES_TO_MEASURE = 16  # the shortest and the longest of them are run alone
EXAMPLES_ALONE = 2  # that are run alone, where all are of one size

# How far an output may move before the model counts as mixing examples:
MAX_ROUNDINGS = 30  # times as far as it moves when the layers' outputs are rounded otherwise,
MIN_EPS = 8  # eps of the largest output at least,
MAX_OF_OUTPUT = 0.1  # of the largest output at most, as in half precision
OUTPUTS_CHANGE = "the number of outputs of an example changes with its batch"
EIGHT_BITS = "Linear8bitLt"  # the layer of bitsandbytes
WEIGHTS = (1.0, -0.6, 1.7)  # s_i of the probe's examples, any that differ


@dataclass(frozen=True)
class Truth:
    """Σ_i s_i J_iᵀ c_i over the probe's examples, for random c_i and an s_i for each of them.

    A rule gives every J_iᵀ c_i without knowing s. The sum is therefore wrong where a rule takes one
    example for another, or mixes several.
    """

    sums: dict[str, Tensor]  # in the model's dtype
    weights: Tensor  # s
    eps: float  # of the coarsest dtype on the way


def cotangent_of(outputs: Tensor) -> Tensor:
    """Random cotangents c in the shape of the outputs; every call gives the same ones."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(outputs.shape, generator=generator).sub_(0.5).to(outputs)


def autograd_gradients(
    task: Task, params: Mapping[str, Tensor], probe: Tensor
) -> tuple[Truth, tuple[Tensor, Tensor]]:
    """One forward and one backward pass by plain autograd: the truth, and outputs and targets.

    Raises:
        ModelError: autograd cannot differentiate the model.
    """
    leaves = leaves_of(params)
    with torch.enable_grad():
        outputs, targets = task.at(leaves).run(probe)
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
    """Refuse a model whose backward pass calls ``backward()`` itself.

    Reentrant checkpointing in a user's own code does so. What it adds to ``p.grad`` is missing from
    the gradients that ``torch.autograd.grad`` returns. Afterwards the model's ``p.grad`` are as
    they were before.

    Raises:
        ModelError: some ``p.grad`` was written to.
    """
    parameters = dict(task.model.named_parameters())
    before = {name: p.grad for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    try:
        yield
        pairs = [*parameters.items(), *leaves.items()]
        written = list(dict.fromkeys(name for name, p in pairs if p.grad is not None))
    finally:
        for name, p in parameters.items():
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
    """Raise :class:`ModelError` when an example's output depends on its batch or on chance.

    The probe's outputs are compared with those in a larger batch, where every example stands at
    another place and some come twice. Two examples are also run alone and compared with their
    outputs in a batch: the shortest and the longest of some examples, whose padding depends on the
    batch, or any two where all have one size. One would not do: an output that depends on the
    largest number of its batch stays the same for the example that has this number.

    How much rounding explains is measured: the same examples are run again with every layer's
    output rounded otherwise.

    Args:
        plain: outputs and targets of the probe.
        larger: outputs of the larger batch.
        eps: of the coarsest dtype on the way to the outputs.
    """
    outputs, targets = plain
    if outputs.shape[1:] != larger.shape[1:]:
        raise ModelError(OUTPUTS_CHANGE)
    examples = shortest_and_longest(task, probe)
    with torch.no_grad():
        if examples is None:
            beside = (outputs[:EXAMPLES_ALONE], targets[:EXAMPLES_ALONE])
            alone, rounded = _compared_alone(task, params, probe[:EXAMPLES_ALONE], beside, eps)
        else:
            beside = task.at(params).run(examples)
            alone, rounded = _compared_alone(task, params, examples, beside, eps)
    in_larger = [(row, outputs[k]) for row, k in zip(larger, ORDER_IN_LARGER_BATCH, strict=True)]
    scale = float(outputs.abs().amax().clamp_min(1e-30))
    by_rounding = max(MIN_EPS * eps * scale, MAX_ROUNDINGS * _largest_gap(rounded))
    if _largest_gap(in_larger + alone) > min(by_rounding, MAX_OF_OUTPUT * scale):
        raise ModelError(_mixes_examples(task, targets, padded=examples is not None))


Pairs = list[tuple[Tensor, Tensor]]


def _compared_alone(
    task: Task,
    params: Mapping[str, Tensor],
    examples: Tensor,
    beside: tuple[Tensor, Tensor],
    eps: float,
) -> tuple[Pairs, Pairs]:
    """Every example's outputs alone, in two lists of pairs.

    The first list pairs them with the outputs in a batch, the second with outputs that are rounded
    otherwise. ``beside``: outputs and targets of the examples in one batch.
    """
    model = task.at(params)
    in_company: Pairs = []
    rounded: Pairs = []
    for place, index in enumerate(examples.split(1)):
        outputs, targets = _run_alone(model, index)
        check_rows(outputs, 1)
        in_company.append(_counted_outputs(task, outputs, targets, beside, place))
        with rounding_otherwise(task.model, eps):
            rounded.append((model.run(index)[0], outputs))
    return in_company, rounded


def _run_alone(model: ModelAt, index: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets of one example, after the model has run on several."""
    try:
        return model.run(index)
    except InputError as error:
        raise ModelError(
            "the model mixes examples: it runs on several and fails on one alone (batch "
            "statistics, or squeeze()?); compute every output from its own example"
        ) from error


def shortest_and_longest(task: Task, probe: Tensor) -> Tensor | None:
    """The shortest and the longest of some examples from all over the data, as indices.

    None where all examples are of one size.
    """
    if task.examples.is_tensors:
        return None
    spread = evenly_spread(task.n_data, EXAMPLES_TO_MEASURE)
    candidates = torch.cat([probe, spread]).unique()
    sizes = [batch_numbers(task.fetch(index)) for index in candidates.split(1)]
    if min(sizes) == max(sizes):
        return None
    return candidates[[sizes.index(min(sizes)), sizes.index(max(sizes))]]


@contextmanager
def rounding_otherwise(model: nn.Module, eps: float) -> Iterator[None]:
    """Inside, every number that a layer returns is multiplied by 1 + eps ξ with ξ ~ N(0, 1).

    This moves it about as far as another order of summation would.
    """
    layers = [
        Unit(path, module, {}, None)
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule) and not any(module.children())
    ]
    generator = torch.Generator().manual_seed(0)

    def moved(leaf: Any) -> Any:
        if not is_floating(leaf) or inside_transform(leaf):
            return leaf
        noise = torch.randn(leaf.shape, generator=generator).to(leaf)
        return leaf + leaf * noise * eps

    with watched(layers, lambda unit, args, kwargs, output: tree_map(moved, output)):
        yield


def _counted_outputs(
    task: Task, alone: Tensor, target: Tensor, beside: tuple[Tensor, Tensor], place: int
) -> tuple[Tensor, Tensor]:
    """An example's outputs alone and in a batch; those of a sequence at the tokens that count."""
    single = alone[0]
    in_batch = beside[0][place]
    counted_alone = task.likelihood.counted(target)
    counted_beside = task.likelihood.counted(beside[1])
    if counted_alone is not None and counted_beside is not None:  # padding depends on the batch
        single = single[counted_alone[0]]
        in_batch = in_batch[counted_beside[place]]
    if single.shape != in_batch.shape:
        raise ModelError(OUTPUTS_CHANGE)
    return single, in_batch


def _largest_gap(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    gaps = [(a - b).abs().amax() for a, b in pairs if a.numel()]
    return float(torch.stack(gaps).amax()) if gaps else 0.0


def _mixes_examples(task: Task, targets: Tensor, *, padded: bool) -> str:
    names_of_layers = {type(module).__name__ for module in task.model.modules()}
    if EIGHT_BITS in names_of_layers:
        return (
            "bitsandbytes rounds inputs by their batch: load its 8 bits with llm_int8_threshold=0"
        )
    remedy = "mask the padding; " if padded else ""
    if task.likelihood.counted(targets) is not None:
        remedy = "pad on the right, or with mask and position_ids; "
    return (
        "an example's output changes with its batch, its place there, or from call to call; "
        f"{remedy}make dataset and model deterministic, example by example"
    )
