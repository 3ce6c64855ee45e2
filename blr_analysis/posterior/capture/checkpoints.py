"""Reading a diagonal posterior precision out of what a training run saved: the files of the
optimizer's state and of the weights.

Which parameter is number k of a saved optimizer? A saved state numbers its parameters by their
place in the optimizer's groups and names none of them (``torch.distributed.checkpoint.state_dict``
exports states by name: those are believed). ``torch.optim`` takes them as they were passed, usually
``model.parameters()``; Hugging Face's Trainer passes two groups, first what decays and then the
rest (biases and the parameters of normalisation layers). Numbering them otherwise gives tensors the
wrong names, often of the right shape, so every rule that could have made the file is tried, and one
is believed only if it alone agrees with every group's size and weight decay and every shape.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import some
from blr_analysis.errors import ModelError, OptimizerError, StorageError, told_as
from blr_analysis.files import Folder
from blr_analysis.files.headers import read_record
from blr_analysis.posterior.capture.assemble import Captured, Facts, Slot, assemble, tied_names
from blr_analysis.posterior.capture.readers import State, is_flat, reader_of_saved, split_flat
from blr_analysis.posterior.prior import differences

OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
RECIPE = "recipe.json"  # that a callback of the package left there
LAYOUTS = {
    # A checkpoint in one file, as (weights, optimizer); Lightning's first.
    "lightning": ("state_dict", "optimizer_states"),
    "pair": ("model_state_dict", "optimizer_state_dict"),
    "short pair": ("model", "optimizer"),
}
TRAINER = "Trainer's groups"
SPARED = {
    # What each generation of Trainer spares from weight decay: names that match the pattern, and
    # everything inside a LayerNorm, in the last a layer whose class is called …Norm.
    "LayerNorm, bias": "bias",
    "LayerNorm, bias, layernorm, rmsnorm": r"(?i)bias|layernorm|rmsnorm",
    "LayerNorm, bias, layernorm, rmsnorm, norm": (
        r"(?i)bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"
    ),
    "classes called …Norm, bias": "bias",
}
BY_NAME = "Pass names=[...], in the order in which the optimizer got them."


def from_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    names: Sequence[str] | None = None,
    facts: Facts | None = None,
    **options: Any,
) -> Captured:
    """The posterior that a training run saved: as :func:`from_optimizer`, from disk.

    ``path`` is one of

    * a checkpoint folder of Hugging Face's Trainer (``optimizer.pt`` beside
      ``model.safetensors``, sharded or not);
    * a Lightning ``.ckpt``, or another file with the weights and the optimizer under
      ``model_state_dict`` and ``optimizer_state_dict``, or ``model`` and ``optimizer``;
    * a file saved with ``torch.save(optimizer.state_dict(), path)``.

    The mean is the checkpoint's weights; with the optimizer's state alone it is the model's own.
    Of several networks of the same names and shapes in one file (a moving average beside it) it is
    the one with nothing before its names.
    Files are read with ``weights_only=True`` and nothing else. A saved state numbers its
    parameters; the names follow from the model and are believed only if group sizes, weight
    decays, every shape and the total agree. A different order with the very same shapes cannot
    be told: pass ``names`` if the optimizer was given the parameters in an order of your own.

    Args:
        path: see above.
        model: the model that was trained (it is read for names and shapes, not changed), with
            the same parameters frozen.
        names: every parameter's name, in the order in which the optimizer got them.
        facts, options: ``n_data`` and so on, as in :func:`from_optimizer`.

    Raises:
        StorageError: files are missing, truncated, or hold more than tensors and containers.
        OptimizerError: an unknown optimizer, one in half precision, or one that does not fit
            the model in exactly one way.
        ModelError: the weights are not this model's, or not finite; the file holds several such
            networks.

    Example:
        >>> import tempfile, torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> model(torch.ones(5, 2)).mean().backward()
        >>> optimizer.step()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(optimizer.state_dict(), f"{folder}/adam.pt")
        ...     captured = from_checkpoint(
        ...         f"{folder}/adam.pt", model, n_data=100, prior_precision=3.0
        ...     )
        >>> captured.precision["weight"].round()
        tensor([[103., 103.]])
    """
    place = Path(path).expanduser()
    saved = load_saved(place)
    reader = reader_of_saved(saved.optimizer["state"].values(), saved.optimizer["param_groups"])
    is_trainers = saved.source == "trainer"
    order = name_states(model, saved.optimizer, key=reader.key, names=names, trainer=is_trainers)
    record: dict[str, Any] = {
        "source": saved.source,
        "path": os.fspath(path),
        "order": order.rule,
        "mean_from": "model" if saved.weights is None else "checkpoint",
    }
    recipe = place / RECIPE
    if recipe.is_file():
        record["recipe"] = read_record(recipe)
    return assemble(_slots(saved, order, model), reader, model, facts or Facts(**options), record)


def _slots(saved: Saved, order: Order, model: nn.Module) -> list[Slot]:
    """What was saved of each trainable parameter."""
    parameters: Mapping[str, Tensor] = dict(model.named_parameters())
    values = parameters if saved.weights is None else _values(saved.weights, model)
    slots = []
    for group, names in zip(saved.optimizer["param_groups"], order.groups, strict=True):
        states = _states(group, saved.optimizer["state"], [parameters[n].shape for n in names])
        for name, state in zip(names, states, strict=True):
            if parameters[name].requires_grad:
                slots.append(Slot(name, values[name].detach(), state, group))
    return slots


def _states(group: State, states: State, shapes: Sequence[torch.Size]) -> list[State]:
    """The state of each parameter of a group, by its number or as a part of the group's vector."""
    if is_flat(group):
        return [*split_flat(group, shapes, None)]
    return [states.get(number, {}) for number in group["params"]]


def _values(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The mean by parameter name, from the weights that were saved.

    A tied tensor may be there under any of its names. Names may have a prefix (``model.``,
    ``_orig_mod.``). Of several networks that fit, the one without a prefix is taken.

    Raises:
        ModelError: no network fits, or several and each has a prefix.
    """
    parameters = dict(model.named_parameters())
    tied = tied_names(model)
    aliases = {name: [name, *tied.get(name, [])] for name in parameters}
    prefixes = _prefixes(weights, next(iter(aliases.values())))

    def misfit(network: Mapping[str, Tensor]) -> str:
        return differences(network, parameters, ("checkpoint", "model"))

    candidates = {prefix: _network(weights, prefix, aliases) for prefix in prefixes or [""]}
    fitting = {prefix: net for prefix, net in candidates.items() if not misfit(net)}
    if not fitting:
        nearest = max(candidates.values(), key=len)
        raise ModelError(
            f"the checkpoint's weights are not this model's: {misfit(nearest)}. Its tensors are "
            f"called {some(list(weights))}."
        )
    if len(fitting) > 1 and "" not in fitting:
        raise ModelError(
            f"the checkpoint holds several such networks, {some([*fitting])}: load the trained "
            "one, and name the optimizer's state alone"
        )
    network = fitting.get("") or next(iter(fitting.values()))
    return {n: network[n] if p.is_meta else network[n].to(p.device) for n, p in parameters.items()}


def _prefixes(weights: Mapping[str, Tensor], aliases: Sequence[str]) -> list[str]:
    """What may stand before the names of a network, by those of one parameter."""
    prefixes = set()
    for alias in aliases:
        for key in weights:
            if key == alias or key.endswith(f".{alias}"):
                prefixes.add(key.removesuffix(alias))
    return sorted(prefixes)


def _network(
    weights: Mapping[str, Tensor], prefix: str, aliases: Mapping[str, Sequence[str]]
) -> dict[str, Tensor]:
    """The parameters that are there with this prefix, by their first names."""
    network = {}
    for name, names in aliases.items():
        key = next((prefix + alias for alias in names if prefix + alias in weights), None)
        if key is not None:
            network[name] = weights[key]
    return network


@dataclass(frozen=True)
class Saved:
    """A training run's saved optimizer, and its weights where they were saved with it."""

    source: str
    optimizer: Mapping[str, Any]
    weights: Mapping[str, Tensor] | None


def load_saved(path: Path) -> Saved:
    """What a Trainer folder, a Lightning checkpoint or a saved optimizer state holds.

    Raises:
        StorageError: files are missing, truncated, or hold more than tensors and containers.
        OptimizerError: several optimizers in one file.
    """
    if path.is_dir():
        file = next((path / name for name in OPTIMIZERS if (path / name).is_file()), None)
        if file is None:
            names = some(sorted(os.listdir(path)), 8)
            raise StorageError(
                f"{str(path)!r} holds no {OPTIMIZERS[0]}: {names}; name a checkpoint that holds "
                "its optimizer, by torch.save"
            )
        return Saved("trainer", _checked(_torch_load(file), file), Folder.open(path).tensors())
    if not path.exists():
        raise StorageError(f"nothing is stored at {str(path)!r}.")
    content = _torch_load(path)
    for source, (weights, optimizer) in LAYOUTS.items():
        if isinstance(content, Mapping) and weights in content and optimizer in content:
            states = content[optimizer]
            states = states if isinstance(states, list | tuple) else [states]
            if len(states) != 1:
                raise OptimizerError(
                    f"{str(path)!r} holds {len(states)} optimizers: save the one that trained the "
                    "model alone"
                )
            return Saved(source, _checked(states[0], path), _tensors(content[weights], path))
    return Saved("optimizer state", _checked(content, path), None)


def _torch_load(path: Path) -> Any:
    failed = f"{str(path)!r} cannot be read with weights_only=True"
    with told_as(StorageError, failed, "it is truncated, or holds more than tensors."):
        return torch.load(path, map_location="cpu", weights_only=True)


def _tensors(weights: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(weights, Mapping):
        raise StorageError(f"{str(path)!r} holds no state_dict but a {type(weights).__name__}")
    return {str(name): value for name, value in weights.items() if isinstance(value, Tensor)}


def _checked(optimizer: Any, path: Path) -> Mapping[str, Any]:
    """The optimizer's state dict, or :class:`StorageError` where it is none."""
    if not isinstance(optimizer, Mapping):
        raise StorageError(f"{str(path)!r} holds no optimizer's state_dict but {type(optimizer)}")
    groups = optimizer.get("param_groups")
    has_groups = bool(groups) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )
    if not has_groups or not isinstance(optimizer.get("state"), Mapping):
        keys = sorted(map(str, optimizer)) or type(optimizer)
        raise StorageError(f"{str(path)!r} holds no optimizer's state_dict but {keys}")
    return optimizer


@dataclass(frozen=True)
class Order:
    """Parameter names group by group, and the rule that put them there."""

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
        saved: an optimizer's ``state_dict()``.
        key: the entry of each state that has its parameter's shape.
        names: given by the user, for every number in turn; None finds them.
        trainer: the file is from a Trainer folder, whose two groups follow Trainer's rule only.

    Raises:
        OptimizerError: no rule agrees with the file, or several do that name tensors differently.
    """
    groups = saved["param_groups"]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    orders = _candidates(model, groups, names, trainer)
    fitting: dict[tuple[str, ...], Order] = {}
    for order in reversed(orders):  # the first rule stands for all that name alike
        if _fits(order, saved, key, shapes):
            fitting[tuple(order.names)] = order
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    if fitting:
        first, second, *_ = fitting.values()
        pairs = zip(first.names, second.names, strict=True)
        name, other_name = next(pair for pair in pairs if pair[0] != pair[1])
        raise OptimizerError(
            f"the saved optimizer's parameters can be named in {len(fitting)} ways: a parameter is "
            f"{name!r} by {first.rule!r} and {other_name!r} by {second.rule!r}. {BY_NAME}"
        )
    sizes = [len(group["params"]) for group in groups]
    raise OptimizerError(
        f"the saved optimizer (groups of {sizes} parameters) does not fit this model "
        f"({len(shapes)} parameters) in any order: freeze what was frozen. {BY_NAME}"
    )


def _candidates(
    model: nn.Module, groups: Sequence[State], names: Sequence[str] | None, trainer: bool
) -> list[Order]:
    """The orders in which the optimizer may have been given its parameters."""
    ends = list(accumulate(len(group["params"]) for group in groups))

    def cut(names: Sequence[str]) -> list[list[str]]:
        """One list a group; names that are too many stand in the last."""
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
    if rule.startswith("classes"):
        return type(layer).__name__.endswith("Norm")
    return isinstance(layer, nn.LayerNorm)


def _fits(
    order: Order, saved: Mapping[str, Any], key: str, shapes: Mapping[str, torch.Size]
) -> bool:
    """Whether names, group sizes, weight decays and shapes all agree with an order."""
    groups = saved["param_groups"]
    names = set(order.names)
    has_the_sizes = [len(g) for g in order.groups] == [len(g["params"]) for g in groups]
    is_of_the_model = names <= shapes.keys() and len(names) == len(order.names)
    if not has_the_sizes or not is_of_the_model:
        return False
    if order.rule.startswith(TRAINER) and float(groups[1].get("weight_decay", 0.0)) != 0:
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
