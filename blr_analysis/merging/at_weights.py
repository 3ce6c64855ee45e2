"""A task's model is run at other weights: they are checked, and put into the model meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import instance, some
from blr_analysis.errors import InputError, ModelError
from blr_analysis.merging.sources import open_model
from blr_analysis.task import Task

State = Mapping[str, Tensor]


def named_tasks(tasks: Any, name: str = "tasks") -> dict[str, Task]:
    """Tasks by name; those of a list are named ``"1"``, ``"2"``, …

    Args:
        tasks: a dict, a list or a single task.

    Raises:
        InputError: there are no tasks, or one of them is no Task.
    """
    by_name = named([tasks] if isinstance(tasks, Task) else tasks, name, "blr_analysis.Task")
    for key, task in by_name.items():
        instance(f"task {key!r}", task, Task, "a blr_analysis.Task")
    return by_name


def named(entries: Any, name: str, kind: str = "state dict") -> dict[str, Any]:
    """The entries of a dict by name, or of a list by their numbers from 1."""
    if not isinstance(entries, Mapping | list | tuple) or not entries:
        raise InputError(
            f"{name} must be a list or dict of at least one {kind}, got {entries!r:.60}"
        )
    pairs = entries.items() if isinstance(entries, Mapping) else enumerate(entries, 1)
    return {str(key): value for key, value in pairs}


def in_order(entries: Any, names: Sequence[str], argument: str = "precisions") -> list[Any]:
    """One entry for each name, from a list in the same order or a dict with these names.

    Raises:
        InputError: the list has another length, or the dict other names.
    """
    by_name = named(entries, argument, "entry")
    if isinstance(entries, Mapping) and by_name.keys() != set(names):
        raise InputError(
            f"{argument} are of {some(sorted(by_name))}, wanted of {some(sorted(names))}"
        )
    if len(by_name) != len(names):
        raise InputError(f"{argument} must hold one for each of {len(names)}, got {len(by_name)}")
    return [by_name[name] for name in names] if isinstance(entries, Mapping) else list(entries)


def state_of(state: Any, name: str) -> State:
    """Detached tensors by name.

    Args:
        state: a mapping, a module, a folder or file of weights, or the report of a merge, whose
            folder is read.
        name: its name, for messages.

    Raises:
        InputError: it is none of these, or empty.
        StorageError: the folder cannot be read.
    """
    place = getattr(state, "folder", state)
    return open_model(place, name).tensors()


@contextmanager
def at_weights(task: Task, state: State, name: str) -> Iterator[dict[str, Tensor]]:
    """A context in which a task's model can be run at the weights of a state dict.

    :meth:`Task.run` is given trainable parameters alone. Frozen parameters and buffers (BatchNorm's
    statistics) are therefore copied into the model itself; when the context ends, the model has its
    own back, to the bit.

    Yields:
        The trainable parameters, for :meth:`Task.run`: by the model's names (tied tensors once), in
        its dtype, on its device.

    Raises:
        InputError: the state has names that the model lacks, or lacks trainable parameters; shapes
            differ; numbers are NaN or inf; tied tensors differ; numbers are complex or integers
            where the model's are real.
        ModelError: the model has no trainable parameter.
    """
    model_tensors = task.model.state_dict(keep_vars=True)
    trainable = {n: p for n, p in task.model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ModelError("the task's model has no trainable parameter: set requires_grad")
    task.check_parameters(trainable)
    values = _by_tensor(model_tensors, state, name)
    absent = [key for key, parameter in trainable.items() if id(parameter) not in values]
    if absent:
        raise InputError(
            f"{name} lacks trainable parameters of the task's model: {some(absent)}; freeze them, "
            "or merge whole models"
        )
    parameters = {key: values[id(parameter)] for key, parameter in trainable.items()}
    fixed = _fixed_tensors(model_tensors, trainable, values)
    before = [tensor.clone() for tensor, _ in fixed]
    try:
        for tensor, value in fixed:
            tensor.copy_(value)
        yield parameters
    finally:
        for (tensor, _), value in zip(fixed, before, strict=True):
            tensor.copy_(value)


def _fixed_tensors(
    model_tensors: Mapping[str, Tensor], trainable: Mapping[str, Tensor], values: dict[int, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """The model's frozen tensors that must be changed, each once, and their values."""
    trainable_ids = {id(parameter) for parameter in trainable.values()}
    tensors_by_id = {id(tensor): tensor.detach() for tensor in model_tensors.values()}
    return [
        (tensors_by_id[key], value)
        for key, value in values.items()
        if key not in trainable_ids and not torch.equal(tensors_by_id[key], value)
    ]


def _by_tensor(model_tensors: Mapping[str, Tensor], state: State, name: str) -> dict[int, Tensor]:
    """The values of a state, checked, by the ``id`` of the model's tensor that each is for."""
    unknown = [key for key in state if key not in model_tensors]
    if unknown:
        raise InputError(f"{name} belongs to another model: the task's has no {some(unknown)}")
    values: dict[int, Tensor] = {}
    names: dict[int, str] = {}
    for key, value in state.items():
        tensor = model_tensors[key]
        _check_value(f"{name}: {key!r}", value, tensor.detach())
        value = value.to(tensor.detach())
        if value.is_inference() and not torch.is_inference_mode_enabled():
            value = value.clone()  # autograd refuses tensors of inference mode
        if id(tensor) in values and not torch.equal(values[id(tensor)], value):
            raise InputError(
                f"{name}: {names[id(tensor)]!r} and {key!r} differ, but the task's model ties them"
            )
        values[id(tensor)] = value
        names[id(tensor)] = key
    return values


def _check_value(name: str, value: Tensor, tensor: Tensor) -> None:
    """Raise where a value cannot replace a tensor of the task's model."""
    if value.shape != tensor.shape:
        raise InputError(
            f"{name} is {tuple(value.shape)}, the task's {tuple(tensor.shape)}: it belongs to "
            "another model"
        )
    if value.is_floating_point() != tensor.is_floating_point():
        raise InputError(f"{name} is {value.dtype}, the task's model has {tensor.dtype}")
    if not bool(torch.isfinite(value).all()):
        raise InputError(f"{name} holds NaN or inf; no loss can be taken there")
