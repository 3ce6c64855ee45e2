"""Reads a diagonal posterior from the files of a training run: its optimizer's state and weights.

:mod:`blr_analysis.posterior.capture.order` finds out which parameter each saved state is of.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import some
from blr_analysis.errors import ModelError, OptimizerError, StorageError, told_as
from blr_analysis.files import Folder
from blr_analysis.files.headers import read_record
from blr_analysis.posterior.capture.assemble import Captured, Slot, assemble, tied_names
from blr_analysis.posterior.capture.order import Order, name_states
from blr_analysis.posterior.capture.readers import State, is_flat, reader_of_saved, split_flat
from blr_analysis.posterior.capture.scale import TrainingFacts
from blr_analysis.posterior.prior import differences

OPTIMIZERS = ("optimizer.pt", "optimizer.bin")  # the optimizer's file in a Trainer folder
RECIPE = "recipe.json"  # written by a callback of this package
NAMES_LISTED = 8  # in a message
LAYOUTS = {
    # The keys of the weights and of the optimizer in a checkpoint of one file; Lightning's first.
    "lightning": ("state_dict", "optimizer_states"),
    "pair": ("model_state_dict", "optimizer_state_dict"),
    "short pair": ("model", "optimizer"),
}


def from_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    names: Sequence[str] | None = None,
    facts: TrainingFacts | None = None,
    **options: Any,
) -> Captured:
    """The posterior that a training run saved: as :func:`from_optimizer`, from disk.

    ``path`` is one of

    * a checkpoint folder of Hugging Face's Trainer (``optimizer.pt`` beside
      ``model.safetensors``, sharded or not);
    * a Lightning ``.ckpt``, or another file with the weights and the optimizer under
      ``model_state_dict`` and ``optimizer_state_dict``, or ``model`` and ``optimizer``;
    * a file saved with ``torch.save(optimizer.state_dict(), path)``.

    The mean is the checkpoint's weights, or the model's own where the file has the optimizer's
    state alone. A file may hold several networks of the same names and shapes, such as a moving
    average; the one without a prefix to its names is taken.

    Files are read with ``weights_only=True`` and nothing else. A saved state numbers its
    parameters. Their names follow from the model, and are accepted only if group sizes, weight
    decays, every shape and the total agree. Another order with exactly the same shapes cannot be
    detected: pass ``names`` if the optimizer got the parameters in an order of your own.

    Args:
        path: see above.
        model: the model that was trained, with the same parameters frozen. Its names and shapes
            are read; it is not changed.
        names: every parameter's name, in the order in which the optimizer got them.
        facts, options: ``n_data`` and so on, as in :func:`from_optimizer`.

    Raises:
        StorageError: files are missing, truncated, or hold more than tensors and containers.
        OptimizerError: the optimizer is unknown, in half precision, or does not fit the model in
            exactly one way.
        ModelError: the weights are not this model's, or not finite; or several networks in the file
            are, and each has a prefix.

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
    is_from_trainer = saved.source == "trainer"
    order = name_states(
        model, saved.optimizer, key=reader.key, names=names, trainer=is_from_trainer
    )
    record: dict[str, Any] = {
        "source": saved.source,
        "path": os.fspath(path),
        "order": order.rule,
        "mean_from": "model" if saved.weights is None else "checkpoint",
    }
    recipe = place / RECIPE
    if recipe.is_file():
        record["recipe"] = read_record(recipe)
    return assemble(
        _slots(saved, order, model), reader, model, facts or TrainingFacts(**options), record
    )


def _slots(saved: Saved, order: Order, model: nn.Module) -> list[Slot]:
    """Each trainable parameter of the saved optimizer with its value, its state and its group."""
    parameters: Mapping[str, Tensor] = dict(model.named_parameters())
    values = parameters if saved.weights is None else _values(saved.weights, model)
    slots = []
    for group, names in zip(saved.optimizer["param_groups"], order.groups, strict=True):
        shapes = [parameters[n].shape for n in names]
        states = _states(group, saved.optimizer["state"], shapes)
        for name, state in zip(names, states, strict=True):
            if parameters[name].requires_grad:
                slots.append(Slot(name, values[name].detach(), state, group))
    return slots


def _states(group: State, states: State, shapes: Sequence[torch.Size]) -> list[State]:
    """The state of each parameter of a group: by its number, or cut from the group's vector."""
    if is_flat(group):
        return [*split_flat(group, shapes, None)]
    return [states.get(number, {}) for number in group["params"]]


def _values(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The mean by parameter name, from the weights that were saved.

    A tied tensor may be stored under any of its names. Names may have a prefix (``model.``,
    ``_orig_mod.``). If several networks fit, the one without a prefix is taken.

    Raises:
        ModelError: no network fits, or several do and each has a prefix.
    """
    parameters = dict(model.named_parameters())
    tied = tied_names(model)
    aliases = {name: [name, *tied.get(name, [])] for name in parameters}
    aliases_of_first = next(iter(aliases.values()))
    prefixes = _prefixes(weights, aliases_of_first) or [""]

    def misfit(network: Mapping[str, Tensor]) -> str:
        return differences(network, parameters, ("checkpoint", "model"))

    candidates = {prefix: _network(weights, prefix, aliases) for prefix in prefixes}
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
    """The prefixes under which one parameter, with these aliases, is stored."""
    prefixes = set()
    for alias in aliases:
        for key in weights:
            if key == alias or key.endswith(f".{alias}"):
                prefixes.add(key.removesuffix(alias))
    return sorted(prefixes)


def _network(
    weights: Mapping[str, Tensor], prefix: str, aliases: Mapping[str, Sequence[str]]
) -> dict[str, Tensor]:
    """The parameters that are stored with this prefix, by their first names."""
    network = {}
    for name, names in aliases.items():
        keys = [prefix + alias for alias in names if prefix + alias in weights]
        if keys:
            network[name] = weights[keys[0]]
    return network


@dataclass(frozen=True)
class Saved:
    """What a training run saved.

    Attributes:
        source: the kind of file, such as "trainer" or "lightning".
        optimizer: the state dict of the optimizer.
        weights: by name; None where the file has none.
    """

    source: str
    optimizer: Mapping[str, Any]
    weights: Mapping[str, Tensor] | None


def load_saved(path: Path) -> Saved:
    """Read a Trainer folder, a Lightning checkpoint, or a saved optimizer state.

    Raises:
        StorageError: files are missing, truncated, or hold more than tensors and containers.
        OptimizerError: the file has several optimizers.
    """
    if path.is_dir():
        return _load_trainer_folder(path)
    if not path.exists():
        raise StorageError(f"nothing is stored at {str(path)!r}.")
    content = _torch_load(path)
    for source, (weights_key, optimizer_key) in LAYOUTS.items():
        if not isinstance(content, Mapping):
            break
        if weights_key in content and optimizer_key in content:
            state = _only_optimizer(content[optimizer_key], path)
            weights = _tensors(content[weights_key], path)
            return Saved(source, _checked(state, path), weights)
    return Saved("optimizer state", _checked(content, path), None)


def _load_trainer_folder(path: Path) -> Saved:
    files = [path / name for name in OPTIMIZERS if (path / name).is_file()]
    if not files:
        names = some(sorted(os.listdir(path)), NAMES_LISTED)
        raise StorageError(
            f"{str(path)!r} holds no {OPTIMIZERS[0]}: {names}; name a checkpoint that holds "
            "its optimizer, by torch.save"
        )
    file = files[0]
    return Saved("trainer", _checked(_torch_load(file), file), Folder.open(path).tensors())


def _only_optimizer(states: Any, path: Path) -> Any:
    """The state of an optimizer, which may be the only one of a list."""
    if not isinstance(states, list | tuple):
        return states
    if len(states) != 1:
        raise OptimizerError(
            f"{str(path)!r} holds {len(states)} optimizers: save the one that trained the "
            "model alone"
        )
    return states[0]


def _torch_load(path: Path) -> Any:
    """The content of a file that ``torch.save`` wrote, on the CPU."""
    failed = f"{str(path)!r} cannot be read with weights_only=True"
    with told_as(StorageError, failed, "it is truncated, or holds more than tensors."):
        return torch.load(path, map_location="cpu", weights_only=True)


def _tensors(weights: Any, path: Path) -> dict[str, Tensor]:
    """The tensors of a state dict by name."""
    if not isinstance(weights, Mapping):
        raise StorageError(f"{str(path)!r} holds no state_dict but a {type(weights).__name__}")
    return {str(name): value for name, value in weights.items() if isinstance(value, Tensor)}


def _checked(optimizer: Any, path: Path) -> Mapping[str, Any]:
    """The same value, if it is an optimizer's state dict; else :class:`StorageError`."""
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
