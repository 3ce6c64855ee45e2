"""Which parameter is number k of a saved optimizer?

A saved state names no parameters. It numbers them by their place in the optimizer's groups.
(States that ``torch.distributed.checkpoint.state_dict`` exported have names, which are accepted.)
``torch.optim`` numbers parameters as they were passed, usually by ``model.parameters()``. Hugging
Face's Trainer passes two groups: first the parameters with weight decay, then the others (biases
and the parameters of normalisation layers).

A wrong numbering gives tensors the wrong names, often with the right shapes. So every rule that
could have made the file is tried. One is accepted only if it alone agrees with every group's size
and weight decay, and with every shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.errors import OptimizerError
from blr_analysis.posterior.capture.readers import State, is_flat

TRAINER = "Trainer's groups"
SPARED = {
    # What each generation of Trainer spares from weight decay. Names that match the pattern are
    # spared, and everything inside a LayerNorm; by the last rule, inside a class called …Norm.
    "LayerNorm, bias": "bias",
    "LayerNorm, bias, layernorm, rmsnorm": r"(?i)bias|layernorm|rmsnorm",
    "LayerNorm, bias, layernorm, rmsnorm, norm": (
        r"(?i)bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"
    ),
    "classes called …Norm, bias": "bias",
}
BY_NAME = "Pass names=[...], in the order in which the optimizer got them."


@dataclass(frozen=True)
class Order:
    """One way to name the parameters of a saved optimizer.

    Attributes:
        rule: the rule that gave these names, for messages and records.
        groups: the names of the parameters of each group.
    """

    rule: str
    groups: list[list[str]]

    @property
    def names(self) -> list[str]:
        """All names, in the order of the numbers."""
        return [name for group in self.groups for name in group]


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
        model: the model that was trained.
        saved: an optimizer's ``state_dict()``.
        key: the entry of each state that has its parameter's shape.
        names: of the parameters as the user gave them, in the order of the numbers; None: they are
            found.
        trainer: whether the file is from a Trainer folder, where two groups follow Trainer's rules
            alone.

    Raises:
        OptimizerError: no rule agrees with the file, or several do that name tensors differently.
    """
    groups = saved["param_groups"]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    orders = _candidates(model, groups, names, trainer)
    fitting: dict[tuple[str, ...], Order] = {}
    for order in orders:
        if _fits(order, saved, key, shapes):
            fitting.setdefault(tuple(order.names), order)
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    if fitting:
        first, second, *_ = fitting.values()
        pairs = zip(first.names, second.names, strict=True)
        first_name, second_name = next(pair for pair in pairs if pair[0] != pair[1])
        raise OptimizerError(
            f"the saved optimizer's parameters can be named in {len(fitting)} ways: a parameter is "
            f"{first_name!r} by {first.rule!r} and {second_name!r} by {second.rule!r}. {BY_NAME}"
        )
    sizes = [len(group["params"]) for group in groups]
    raise OptimizerError(
        f"the saved optimizer (groups of {sizes} parameters) does not fit this model "
        f"({len(shapes)} parameters) in any order: freeze what was frozen. {BY_NAME}"
    )


def _candidates(
    model: nn.Module, groups: Sequence[State], names: Sequence[str] | None, trainer: bool
) -> list[Order]:
    """The orders in which the optimizer may have got its parameters."""
    ends = list(accumulate(len(group["params"]) for group in groups))

    def cut(names: Sequence[str]) -> list[list[str]]:
        """The names of each group; surplus names are added to the last group."""
        return [list(names[start:end]) for start, end in pairwise([0, *ends[:-1], None])]

    if names is not None:
        return [Order("names as given", cut(names))]
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        return [Order("names in the file", [list(group["params"]) for group in groups])]
    if all("param_names" in group for group in groups):
        return [Order("param_names in the file", [list(group["param_names"]) for group in groups])]
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    has_two_groups = len(ends) == 2
    orders = []
    if not (trainer and has_two_groups):
        everything = [name for name, _ in model.named_parameters()]
        orders.append(Order("the model's parameters in turn", cut(everything)))
        orders.append(Order("the model's trainable parameters in turn", cut(trainable)))
    if has_two_groups:
        for rule, pattern in SPARED.items():
            groups_of_names = _decayed_and_spared(model, trainable, rule, pattern)
            orders.append(Order(f"{TRAINER} ({rule} apart)", groups_of_names))
    return orders


def _decayed_and_spared(
    model: nn.Module, trainable: Sequence[str], rule: str, pattern: str
) -> list[list[str]]:
    """Trainer's two groups under one of its rules: with weight decay, and without."""
    norms = [path for path, layer in model.named_modules() if path and _is_norm(layer, rule)]
    inside_a_norm = tuple(f"{path}." for path in norms)
    decayed = []
    spared = []
    for name in trainable:
        if re.search(pattern, name) or name.startswith(inside_a_norm):
            spared.append(name)
        else:
            decayed.append(name)
    return [decayed, spared]


def _is_norm(layer: nn.Module, rule: str) -> bool:
    """Whether a rule of Trainer's takes a layer for a normalisation layer."""
    if rule.startswith("classes"):
        return type(layer).__name__.endswith("Norm")
    return isinstance(layer, nn.LayerNorm)


def _fits(
    order: Order, saved: Mapping[str, Any], key: str, shapes: Mapping[str, torch.Size]
) -> bool:
    """Whether a saved optimizer has the names, sizes, weight decays and shapes of an order."""
    groups = saved["param_groups"]
    names = set(order.names)
    same_sizes = [len(g) for g in order.groups] == [len(g["params"]) for g in groups]
    are_of_model = names <= shapes.keys() and len(names) == len(order.names)
    if not same_sizes or not are_of_model:
        return False
    if order.rule.startswith(TRAINER):
        decay_of_spared = float(groups[1].get("weight_decay", 0.0))
        if decay_of_spared != 0:
            return False
    for group, group_names in zip(groups, order.groups, strict=True):
        sizes = [shapes[name].numel() for name in group_names]
        if is_flat(group) and len(group[key]) != sum(sizes):
            return False
        for name, number in zip(group_names, group["params"], strict=True):
            moment = saved["state"].get(number, {}).get(key)
            if isinstance(moment, Tensor) and moment.shape != shapes[name]:
                return False
    return True
