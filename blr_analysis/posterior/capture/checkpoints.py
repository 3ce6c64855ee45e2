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
from blr_analysis.posterior.capture.assemble import Captured, Slot, Told, assemble, tied_names
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
    told: Told | None = None,
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
        told, options: ``n_data`` and so on, as in :func:`from_optimizer`.

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
    saved, told_of = load_saved(place), place / RECIPE
    groups, states = saved.optimizer["param_groups"], saved.optimizer["state"]
    reader = reader_of_saved(states.values(), groups)
    how: Any = {"key": reader.key, "names": names, "trainer": saved.source == "trainer"}
    order = name_states(model, saved.optimizer, **how)
    parameters = dict(model.named_parameters())
    values = parameters if saved.weights is None else _values(saved.weights, model)
    slots = []
    for group, run in zip(groups, order.groups, strict=True):
        if is_flat(group):
            group_states = split_flat(group, [parameters[name].shape for name in run], None)
        else:
            group_states = [states.get(number, {}) for number in group["params"]]
        for name, state in zip(run, group_states, strict=True):
            if parameters[name].requires_grad:
                slots.append(Slot(name, values[name].detach(), state, group))
    about = {
        "source": saved.source,
        "path": os.fspath(path),
        "order": order.rule,
        "mean_from": "model" if saved.weights is None else "checkpoint",
        **({"recipe": read_record(told_of)} if told_of.is_file() else {}),
    }
    return assemble(slots, reader, model, told or Told(**options), about)


def _values(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The mean by parameter name: from the weights saved, under any of a tied tensor's names, after
    what the checkpoint puts before all (``model.``, ``_orig_mod.``); of several such networks that
    with nothing before its names."""
    parameters, tied = dict(model.named_parameters()), tied_names(model)
    aliases = {name: [name, *tied.get(name, [])] for name in parameters}
    first = next(iter(aliases.values()))
    heads = {key.removesuffix(a) for a in first for key in weights if f".{key}".endswith(f".{a}")}

    def named(head: str) -> dict[str, Tensor]:
        keys = {n: [head + a for a in own if head + a in weights] for n, own in aliases.items()}
        return {n: weights[found[0]] for n, found in keys.items() if found}

    def wrong(held: Mapping[str, Tensor]) -> str:
        return differences(held, parameters, ("checkpoint", "model"))

    networks = {head: held for head in sorted(heads) if not wrong(held := named(head))}
    if not networks:
        best = max(map(named, sorted(heads) or [""]), key=len)
        said = f"the checkpoint's weights are not this model's: {wrong(best)}"
        raise ModelError(f"{said}. Its tensors are called {some(list(weights))}.")
    if len(networks) > 1 and "" not in networks:
        said = f"the checkpoint holds several such networks, {some([*networks])}"
        raise ModelError(f"{said}: load the trained one, and name the optimizer's state alone")
    held = networks.get("") or next(iter(networks.values()))
    return {n: held[n] if p.is_meta else held[n].to(p.device) for n, p in parameters.items()}


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
            said = f"{str(path)!r} holds no {OPTIMIZERS[0]}: {some(sorted(os.listdir(path)), 8)}"
            raise StorageError(f"{said}; name a checkpoint that holds its optimizer, by torch.save")
        return Saved("trainer", _checked(_torch_load(file), file), Folder.open(path).tensors())
    if not path.exists():
        raise StorageError(f"nothing is stored at {str(path)!r}.")
    content = _torch_load(path)
    for source, (weights, optimizer) in LAYOUTS.items():
        if isinstance(content, Mapping) and weights in content and optimizer in content:
            states = content[optimizer]
            states = states if isinstance(states, list | tuple) else [states]
            if len(states) != 1:
                said = f"{str(path)!r} holds {len(states)} optimizers"
                raise OptimizerError(f"{said}: save the one that trained the model alone")
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
    held: Any = optimizer if isinstance(optimizer, Mapping) else {}
    groups = held.get("param_groups") if isinstance(held.get("state"), Mapping) else None
    named = [isinstance(g, Mapping) and g.get("params") for g in groups or ()]
    if not named or not all(isinstance(numbers, list) for numbers in named):
        said = sorted(map(str, held)) or type(optimizer)
        raise StorageError(f"{str(path)!r} holds no optimizer's state_dict but {said}")
    return held


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
    groups = saved["param_groups"]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    orders = _candidates(model, groups, names, trainer)
    fitting = {
        tuple(order.names): order for order in reversed(orders) if _fits(order, saved, key, shapes)
    }
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    if fitting:
        one, two, *_ = fitting.values()
        a, b = next(pair for pair in zip(one.names, two.names, strict=True) if len({*pair}) > 1)
        said = f"a parameter is {a!r} by {one.rule!r} and {b!r} by {two.rule!r}"
        ways = f"the saved optimizer's parameters can be named in {len(fitting)} ways"
        raise OptimizerError(f"{ways}: {said}. {BY_NAME}")
    sizes = [len(group["params"]) for group in groups]
    raise OptimizerError(
        f"the saved optimizer (groups of {sizes} parameters) does not fit this model "
        f"({len(shapes)} parameters) in any order: freeze what was frozen. {BY_NAME}"
    )


def _candidates(
    model: nn.Module, groups: Sequence[State], names: Sequence[str] | None, trainer: bool
) -> list[Order]:
    ends = list(accumulate(len(group["params"]) for group in groups))

    def cut(names: Sequence[str]) -> list[list[str]]:  # what is too many shows in the last run
        return [list(names[a:b]) for a, b in pairwise([0, *ends[:-1], None])]

    if names is not None:
        return [Order("names as given", cut(names))]
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        return [Order("names in the file", [list(group["params"]) for group in groups])]
    if all("param_names" in group for group in groups):
        return [Order("param_names in the file", [list(group["param_names"]) for group in groups])]
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    orders = []
    if not (trainer and len(ends) == 2):
        every = [name for name, _ in model.named_parameters()]
        orders.append(Order("the model's parameters in turn", cut(every)))
        orders.append(Order("the model's trainable parameters in turn", cut(trainable)))
    for rule, pattern in SPARED.items() if len(ends) == 2 else ():
        apart = tuple(f"{path}." for path, m in model.named_modules() if path and _norm(m, rule))
        spared = {n: bool(re.search(pattern, n)) or n.startswith(apart) for n in trainable}
        runs = [[name for name in trainable if spared[name] is rest] for rest in (False, True)]
        orders.append(Order(f"{TRAINER} ({rule} apart)", runs))
    return orders


def _norm(layer: nn.Module, rule: str) -> bool:
    called = type(layer).__name__.endswith("Norm")
    return called if rule.startswith("classes") else isinstance(layer, nn.LayerNorm)


def _fits(
    order: Order, saved: Mapping[str, Any], key: str, shapes: Mapping[str, torch.Size]
) -> bool:
    """Whether names, group sizes, weight decays and shapes all agree with an order."""
    groups = saved["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    sizes = [len(group["params"]) for group in groups]
    if [*map(len, order.groups)] != sizes or not shapes.keys() >= {*order.names}:
        return False
    if order.rule.startswith(TRAINER) and float(groups[1].get("weight_decay", 0.0)) != 0:
        return False
    for group, names in zip(groups, order.groups, strict=True):
        if is_flat(group) and len(group[key]) != sum(shapes[name].numel() for name in names):
            return False
    held = [saved["state"].get(number, {}).get(key) for number in numbers]
    alike = (
        not isinstance(state, Tensor) or state.shape == shapes[name]
        for name, state in zip(order.names, held, strict=True)
    )
    return len({*order.names}) == len(numbers) and all(alike)
