"""Weights and buffers along a training, read from wherever they were kept.

A state is a model's trainable parameters and its persistent buffers, by the model's own names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import bare_name, instance, some
from blr_analysis.errors import InputError, ModelError, StorageError
from blr_analysis.files import Folder

PARTS = (1 / 8, 1 / 4, 1 / 2)  # of the steps up to the weights that were kept
State = dict[str, Tensor]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's own trainable parameters and persistent buffers."""
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return trained | buffers_of(model)


def buffers_of(model: nn.Module) -> State:
    """A model's persistent buffers."""
    kept = model.state_dict()
    return {n: b for n, b in model.named_buffers() if n in kept}


class Snapshots:
    """Checkpoints of one training, oldest first, each read when it is asked for.

    Args:
        given: state dicts, safetensors files, folders that a trainer wrote, or one folder of
            ``checkpoint-*``; what keeps checkpoints itself answers ``states(model)``.
        model: the trained model, whose own weights are the last.

    Raises:
        InputError: something else. ModelError: another model's, or NaN. StorageError: no file.
    """

    def __init__(self, given: Any, model: nn.Module) -> None:
        self._model = model
        self._sources: list[Any] = _sources(given, model)
        last = state_of(model)
        alike = [equal(state, last) for state in self]
        if any(alike):  # what came after the weights that were kept is no part of their run
            self._sources = self._sources[: alike.index(True)]

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[State]:
        for k, source in enumerate(self._sources):
            yield checked_state(read(source), self._model, f"checkpoints[{k}]")


def thinned(steps: Sequence[int], end: int) -> list[int]:
    """Of these steps those nearest 1/8, 1/4 and 1/2 of the last, on a log scale; each once.

    >>> thinned([1, 2, 4, 8, 16, 32, 64, 100], 100)
    [16, 32, 64]
    """
    before = [step for step in steps if 0 < step < end]
    if not before:
        return []
    wanted = (max(1.0, part * end) for part in PARTS)
    return sorted({min(before, key=lambda s: abs(log(s / at))) for at in wanted})


def _sources(given: Any, model: nn.Module) -> list[Any]:
    if callable(kept := getattr(given, "states", None)):
        given = kept(model)
    if isinstance(given, str | os.PathLike):
        return _folder(Path(given), model)
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise InputError("checkpoints must be a list of state dicts or files, or a folder")
    return list(given)


def read(one: Any) -> Any:
    """The state by name, as it was kept."""
    if isinstance(one, nn.Module):
        return one.state_dict()
    if isinstance(one, Mapping):
        return one
    instance("a checkpoint", one, str | os.PathLike, "a state dict or a file")
    adapter = (Path(one) / "adapter_model.safetensors").is_file()
    return Folder.open(one, stem="adapter_model" if adapter else "model").tensors()


def _folder(path: Path, model: nn.Module) -> list[Any]:
    """Those of a trainer's ``checkpoint-*``, or of the files that :class:`blr_analysis.Checkpoints`
    writes, that are nearest 1/8, 1/4 and 1/2 of the run."""
    numbered = {
        int(found.group(1) or found.group(2)): one
        for one in path.glob("*-*")
        if (found := re.fullmatch(r"checkpoint-(\d+)|step-(\d+)\.safetensors", one.name))
    }
    if not numbered:
        if [*path.glob("_run/step-*.safetensors")]:  # what callbacks keep in a trainer's output
            return _folder(path / "_run", model)
        raise StorageError(f"{str(path)!r} holds no checkpoint-* folders")
    steps = sorted(numbered)
    last = state_of(model)

    def kept(step: int) -> bool:
        return equal(checked_state(read(numbered[step]), model, f"checkpoint-{step}"), last)

    after = 2 * steps[-1] if numbered[steps[-1]].is_file() else steps[-1] + 1
    end = next((step for step in reversed(steps) if kept(step)), after)
    return [numbered[step] for step in thinned(steps, end)]


def checked_state(held: Mapping[str, Any], model: nn.Module, where: str) -> State:
    """The state by the model's own names."""

    def plain(name: str) -> str:
        return bare_name(name).replace(".default.", ".")

    places = {plain(n): t for n, t in held.items()}
    aliases: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(p), []).append(name)
    own, state, wrong = dict(model.named_parameters()), {}, []
    for name, tensor in state_of(model).items():
        names = map(plain, aliases.get(id(own.get(name)), [name]))
        found = next((places[n] for n in names if n in places), None)
        if isinstance(found, Tensor) and found.shape == tensor.shape:
            state[name] = found.detach().to(tensor.device)
        else:
            wrong.append(name)
    if wrong:
        raise ModelError(f"{where} is another model's: no {some(wrong)} of this model's shape")
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ModelError(f"{where} holds NaN or inf in {name!r}; was training stable?")
    return state


def equal(one: State, other: State) -> bool:
    """Whether two states are the same, bit by bit."""
    return all(torch.equal(t.to(one[n]), one[n]) for n, t in other.items())
