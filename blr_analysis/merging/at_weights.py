"""A task's model at weights that are not its own: by the model's names, checked, put in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import instance, some
from blr_analysis.errors import InputError, ModelError
from blr_analysis.merging.lora import open_model
from blr_analysis.task import Task

State = Mapping[str, Tensor]


def named_tasks(tasks: Any, name: str = "tasks") -> dict[str, Task]:
    """Tasks by name: as given, or ``"1"``, ``"2"``, … for a list; one task stands for a list.

    Raises:
        InputError: none at all, or something that is no task.
    """
    given = named([tasks] if isinstance(tasks, Task) else tasks, name, "blr_analysis.Task")
    for n, task in given.items():
        instance(f"task {n!r}", task, Task, "a blr_analysis.Task")
    return given


def named(given: Any, name: str, wanted: str = "state dict") -> dict[str, Any]:
    """The entries of a dict by name, or of a list by their numbers from 1."""
    if not isinstance(given, Mapping | list | tuple) or not given:
        raise InputError(
            f"{name} must be a list or dict of at least one {wanted}, got {given!r:.60}"
        )
    pairs = given.items() if isinstance(given, Mapping) else enumerate(given, 1)
    return {str(n): value for n, value in pairs}


def in_order(given: Any, names: Sequence[str], what: str = "precisions") -> list[Any]:
    """One entry per name, of a list in their order or a dict by them.

    Raises:
        InputError: another number of them, or other names.
    """
    held = named(given, what, "entry")
    if isinstance(given, Mapping) and held.keys() != set(names):
        raise InputError(f"{what} are of {some(sorted(held))}, wanted of {some(sorted(names))}")
    if len(held) != len(names):
        raise InputError(f"{what} must hold one for each of {len(names)}, got {len(held)}")
    return [held[n] for n in names] if isinstance(given, Mapping) else list(given)


def state_of(state: Any, name: str) -> State:
    """Detached tensors by name: of a mapping, a module, a folder or file of weights, or of what a
    merge of folders reported.

    Raises:
        InputError: something else, or nothing in it.
        StorageError: a folder that cannot be read.
    """
    place = getattr(state, "folder", state)
    return open_model(place, name).tensors()


@contextmanager
def at_weights(task: Task, state: State, name: str) -> Iterator[dict[str, Tensor]]:
    """The trainable parameters of a state dict, with all else that it names put into the model.

    What comes out is what :meth:`Task.run` takes: by the model's own names (tied tensors once),
    in its dtype, on its device. Frozen parameters and buffers (BatchNorm's statistics) cannot be
    handed over like that: inside, they stand in the model itself, and afterwards it has its own
    back, to the bit.

    Raises:
        InputError: names that the model does not have, trainable parameters that are missing,
            other shapes, NaN or inf, tied tensors that differ, complex or whole numbers where
            the model has real ones.
        ModelError: nothing in the model is trainable.
    """
    model = task.model
    own = model.state_dict(keep_vars=True)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise ModelError("the task's model has no trainable parameter: set requires_grad")
    task.check_parameters(trainable)
    given = _by_tensor(own, state, name)
    first = {id(t): n for n, t in reversed([*own.items(), *trainable.items()])}
    absent = [n for n, p in trainable.items() if id(p) not in given]
    if absent:
        raise InputError(
            f"{name} lacks trainable parameters of the task's model: {some(absent)}; freeze them, "
            "or merge whole models"
        )
    moving = {id(p): n for n, p in trainable.items()}
    params = {moving[key]: value for key, value in given.items() if key in moving}
    ordered = {n: params[n] for n in trainable}
    fixed = {first[key]: value for key, value in given.items() if key not in moving}
    held = {n: own[n].detach() for n, v in fixed.items() if not torch.equal(own[n].detach(), v)}
    before = {n: t.clone() for n, t in held.items()}
    try:
        for n, t in held.items():
            t.copy_(fixed[n])
        yield ordered
    finally:
        for n, t in held.items():
            t.copy_(before[n])


def _by_tensor(own: Mapping[str, Any], state: State, name: str) -> dict[int, Tensor]:
    """The given values by the identity of the model's tensor that they are for, checked."""
    strange = [n for n in state if n not in own]
    if strange:
        raise InputError(f"{name} belongs to another model: the task's has no {some(strange)}")
    given: dict[int, Tensor] = {}
    names: dict[int, str] = {}
    for n, value in state.items():
        like = own[n].detach()
        if value.shape != like.shape:
            shapes = f"{tuple(value.shape)}, the task's {tuple(like.shape)}"
            raise InputError(f"{name} belongs to another model: {n!r} is {shapes}")
        if value.is_floating_point() != like.is_floating_point():
            raise InputError(f"{name}: {n!r} is {value.dtype}, the task's model has {like.dtype}")
        if not bool(torch.isfinite(value).all()):
            raise InputError(f"{name}: {n!r} holds NaN or inf; no loss can be taken there")
        value, key = value.to(like), id(own[n])
        if value.is_inference() and not torch.is_inference_mode_enabled():
            value = value.clone()  # or autograd would not take it
        if key in given and not torch.equal(given[key], value):
            raise InputError(
                f"{name}: {names[key]!r} and {n!r} differ, but the task's model ties them"
            )
        given[key], names[key] = value, n
    return given
