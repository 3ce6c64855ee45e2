"""Which parameter is number k of a saved optimizer?

A saved state numbers its parameters by their place in the optimizer's groups and names none of
them (``torch.distributed.checkpoint.state_dict`` exports states by name: those are believed).
``torch.optim`` takes them as they were passed, usually ``model.parameters()``; Hugging
Face's Trainer passes two groups, first what decays and then the rest (biases and the parameters
of normalisation layers). Numbering them otherwise gives tensors the wrong names, often of the
right shape, so every rule that could have made the file is tried, and one is believed only if
it alone agrees with every group's size and weight decay and every shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import some
from blr_analysis.errors import OptimizerError
from blr_analysis.posterior.capture.readers import State

TRAINER = "Trainer's groups"
SPARED: dict[str, tuple[str, Callable[[nn.Module], bool]]] = {
    # What each generation of Trainer spares from weight decay: names that match the pattern,
    # and everything inside such a layer.
    "LayerNorm, bias": ("bias", lambda layer: isinstance(layer, nn.LayerNorm)),
    "LayerNorm, bias, layernorm, rmsnorm": (
        "(?i)bias|layernorm|rmsnorm",
        lambda layer: isinstance(layer, nn.LayerNorm),
    ),
    "LayerNorm, bias, layernorm, rmsnorm, norm": (
        r"(?i)bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)",
        lambda layer: isinstance(layer, nn.LayerNorm),
    ),
    "classes called …Norm, bias": ("bias", lambda layer: type(layer).__name__.endswith("Norm")),
}
BY_NAME = "Pass names=[...], in the order in which the optimizer got them."


@dataclass(frozen=True)
class Order:
    """Parameter names group by group, and the rule that put them there."""

    rule: str
    groups: list[list[str]]

    @property
    def names(self) -> list[str]:
        """All names, in the order of the numbers."""
        return [name for run in self.groups for name in run]


def name_states(
    model: nn.Module,
    saved: Mapping[str, Any],
    *,
    key: str,
    names: Sequence[str] | None,
    trainer: bool,
) -> Order:
    """The parameter names behind a saved optimizer's numbers.

    Args:
        saved: an optimizer's ``state_dict()``.
        key: the entry of each state that has its parameter's shape.
        names: given by the user, for every number in turn; None finds them.
        trainer: the file is from a Trainer folder, whose two groups follow Trainer's rule only.

    Raises:
        OptimizerError: no rule agrees with the file, or several do that name tensors differently.
    """
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    orders = _candidates(model, saved["param_groups"], sizes, names, trainer)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    checked = [(order, _complaint(order, saved, key, shapes)) for order in orders]
    different = {tuple(order.names): order for order, text in reversed(checked) if not text}
    if len(different) == 1:
        return next(iter(different.values()))
    if different:
        one, two, *_ = different.values()
        pairs = list(zip(one.names, two.names, strict=True))
        k = next(k for k, (a, b) in enumerate(pairs) if a != b)
        raise OptimizerError(
            f"the saved optimizer's parameters can be named in {len(different)} ways; number {k} "
            f"is {pairs[k][0]!r} by {one.rule!r} and {pairs[k][1]!r} by {two.rule!r}. {BY_NAME}"
        )
    complaints = {text: order.rule for order, text in reversed(checked)}
    listed = "; ".join(f"by {rule!r}: {text}" for text, rule in complaints.items())
    raise OptimizerError(
        f"the saved optimizer (groups of {sizes} parameters) does not fit this model "
        f"({len(shapes)} parameters): {listed}. Freeze what was frozen. {BY_NAME}"
    )


def _candidates(
    model: nn.Module,
    groups: Sequence[State],
    sizes: Sequence[int],
    names: Sequence[str] | None,
    trainer: bool,
) -> list[Order]:
    if names is not None:
        return [Order("names as given", _cut(names, sizes))]
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        return [Order("names in the file", [list(group["params"]) for group in groups])]
    if all("param_names" in group for group in groups):
        return [Order("param_names in the file", [list(group["param_names"]) for group in groups])]
    every = [name for name, _ in model.named_parameters()]
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    orders = []
    if not (trainer and len(sizes) == 2):
        orders.append(Order("the model's parameters in turn", _cut(every, sizes)))
        orders.append(Order("the model's trainable parameters in turn", _cut(trainable, sizes)))
    if len(sizes) == 2:
        around = _layers_around(model)
        for rule, (pattern, is_norm) in SPARED.items():
            spared = {
                name: bool(re.search(pattern, name)) or any(map(is_norm, around[name]))
                for name in trainable
            }
            runs = [[name for name in trainable if spared[name] is rest] for rest in (False, True)]
            orders.append(Order(f"{TRAINER} ({rule} apart)", runs))
    return orders


def _layers_around(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The modules around each parameter, the model itself left out."""
    modules = dict(model.named_modules(remove_duplicate=False))
    result = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")[:-1]
        result[name] = [modules[".".join(parts[: k + 1])] for k in range(len(parts))]
    return result


def _cut(names: Sequence[str], sizes: Sequence[int]) -> list[list[str]]:
    """Runs of the given sizes; what is left over, or missing, shows in the last run."""
    runs, start = [], 0
    for size in sizes[:-1]:
        runs.append(list(names[start : start + size]))
        start += size
    return [*runs, list(names[start:])]


def _complaint(
    order: Order, saved: Mapping[str, Any], key: str, shapes: Mapping[str, torch.Size]
) -> str:
    """What speaks against an order; nothing if all agrees."""
    groups = saved["param_groups"]
    unknown = [name for run in order.groups for name in run if name not in shapes]
    if unknown:
        return f"the model has no parameters {some(unknown)}"
    sizes = [len(group["params"]) for group in groups]
    counts = [len(run) for run in order.groups]
    if counts != sizes:
        k = next((k for k, (a, b) in enumerate(zip(counts, sizes, strict=False)) if a != b), 0)
        return f"groups of {counts} parameters (group {k}: {some(order.groups[k])})"
    if len(set(order.names)) != sum(sizes):
        return "a name occurs twice"
    if order.rule.startswith(TRAINER) and float(groups[1].get("weight_decay", 0.0)) != 0:
        return f"the second group must not decay, but has {groups[1]['weight_decay']}"
    wrong = []
    for group, run in zip(groups, order.groups, strict=True):
        flat = group.get("hess")
        if isinstance(flat, Tensor) and flat.numel() != sum(shapes[name].numel() for name in run):
            return f"a flat Hessian of {flat.numel()} entries for {some(run)}"
        for number, name in zip(group["params"], run, strict=True):
            held = saved["state"].get(number, {}).get(key)
            if isinstance(held, Tensor) and held.shape != shapes[name]:
                wrong.append(f"{name} {tuple(shapes[name])} with a state of {tuple(held.shape)}")
    return f"{len(wrong)} shapes differ ({some(wrong)})" if wrong else ""
