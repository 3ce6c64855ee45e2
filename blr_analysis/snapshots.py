"""Weights and buffers along a training, from memory, files or folders.

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
from blr_analysis.files import Folder, drafted
from blr_analysis.files.headers import read_record, record_text
from blr_analysis.ranks import whole

PARTS = (1 / 8, 1 / 4, 1 / 2)  # of the steps up to the model's weights
CHECKPOINT = re.compile(r"checkpoint-(\d+)|step-(\d+)\.safetensors")
WEIGHTS = "weights.json"  # beside a run's snapshots: numbers of the weights at its saves and end
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of saved weights
State = dict[str, Tensor]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's own trainable parameters and persistent buffers."""
    trained = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return trained | buffers_of(model)


def buffers_of(model: nn.Module) -> State:
    """A model's persistent buffers."""
    persistent = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


class Snapshots:
    """Checkpoints of one training, oldest first; each is read when the iteration reaches it.

    Args:
        checkpoints: state dicts, safetensors files, folders that a trainer wrote, or one folder of
            ``checkpoint-*``; or an object with a method ``states(model)`` that lists them.
        model: the trained model, whose own weights are the last.

    Raises:
        InputError: something else.
        ModelError: checkpoints of another model, or NaN in them.
        StorageError: no such file.
    """

    def __init__(self, checkpoints: Any, model: nn.Module) -> None:
        self._model = model
        self._sources: list[Any] = _sources(checkpoints, model)
        last = state_of(model)
        are_last = [equal(state, last) for state in self]
        if any(are_last):  # the run of the model's weights ends here
            self._sources = self._sources[: are_last.index(True)]

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[State]:
        for place, source in enumerate(self._sources):
            yield checked_state(read(source), self._model, f"checkpoints[{place}]")


def note_weights(run: Path, model: nn.Module, step: int) -> None:
    """Note some numbers of a model's weights after a step, in the folder of its run.

    What was noted of this step and later ones is dropped: it is of a training before this one.
    """
    file = run / WEIGHTS
    noted = read_record(file) if file.is_file() else {}
    steps = {earlier: numbers for earlier, numbers in noted.items() if int(earlier) < step}
    steps[str(step)] = _numbers_of(model)
    with drafted(file) as draft:
        draft.write_text(record_text(steps), encoding="utf-8")


def noted_step(run: Path, model: nn.Module) -> int | None:
    """The step of a run after which it had a model's weights; None where nothing tells.

    Weights that were rounded to half precision since are recognised too.

    Raises:
        InputError: the run had none of these weights at its saves and its end.
    """
    file = run / WEIGHTS
    if not file.is_file():
        return None
    present = _numbers_of(model)
    steps = read_record(file)
    for step in sorted(steps, key=int, reverse=True):
        noted = steps[step]
        known = noted.keys() & present.keys()
        if not known:
            return None
        then = torch.tensor([noted[name] for name in known], dtype=torch.float64)
        now = torch.tensor([present[name] for name in known], dtype=torch.float64)
        if any(torch.equal(then.to(dtype).double(), now) for dtype in DTYPES):
            return int(step)
    raise InputError(
        f"{str(run)!r} was recorded by another training than that of these weights: remove it, "
        "or give checkpoints= and recipe= of their own"
    )


def _numbers_of(model: nn.Module) -> dict[str, list[float]]:
    """The first, middle and last number of every trained parameter, by all its plain names."""
    names = _plain_names(model)
    numbers = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter.numel() == 0:
            continue
        flat = parameter.detach().flatten()
        places = [0, len(flat) // 2, len(flat) - 1]
        for plain_name in names[name]:
            numbers[plain_name] = flat[places].tolist()
    return numbers


def thinned(steps: Sequence[int], end: int) -> list[int]:
    """The steps before ``end`` that are nearest 1/8, 1/4 and 1/2 of it, on a log scale; each once.

    >>> thinned([1, 2, 4, 8, 16, 32, 64, 100], 100)
    [16, 32, 64]
    """
    before = [step for step in steps if 0 < step < end]
    if not before:
        return []
    targets = [max(1.0, part * end) for part in PARTS]
    return sorted({_nearest(before, target) for target in targets})


def _nearest(steps: Sequence[int], target: float) -> int:
    """The step nearest a target on a log scale."""
    return min(steps, key=lambda step: abs(log(step / target)))


def _sources(checkpoints: Any, model: nn.Module) -> list[Any]:
    """The checkpoints as a list of what :func:`read` takes.

    Raises:
        InputError: neither a list nor a folder.
    """
    states = getattr(checkpoints, "states", None)
    if callable(states):
        checkpoints = states(model)
    if isinstance(checkpoints, str | os.PathLike):
        return _in_folder(Path(checkpoints), model)
    if isinstance(checkpoints, Mapping) or not isinstance(checkpoints, Iterable):
        raise InputError("checkpoints must be a list of state dicts or files, or a folder")
    return list(checkpoints)


def read(checkpoint: Any) -> Any:
    """A checkpoint's tensors by its own names: of a module, a state dict, a file or a folder."""
    if isinstance(checkpoint, nn.Module):
        return checkpoint.state_dict()
    if isinstance(checkpoint, Mapping):
        return checkpoint
    instance("a checkpoint", checkpoint, str | os.PathLike, "a state dict or a file")
    is_adapter = (Path(checkpoint) / "adapter_model.safetensors").is_file()
    stem = "adapter_model" if is_adapter else "model"
    return Folder.open(checkpoint, stem=stem).tensors()


def _in_folder(path: Path, model: nn.Module) -> list[Any]:
    """The checkpoints in a folder nearest 1/8, 1/4 and 1/2 of the steps up to the model's weights.

    They are a trainer's ``checkpoint-*``, or files that :class:`blr_analysis.Checkpoints` wrote.
    """
    checkpoints = _numbered(path)
    if not checkpoints:
        written_by_callbacks = [*path.glob("_run/step-*.safetensors")]
        if written_by_callbacks:
            return _in_folder(path / "_run", model)
        raise StorageError(f"{str(path)!r} holds no checkpoint-* folders")
    steps = sorted(checkpoints)
    last = state_of(model)

    def has_last_weights(step: int) -> bool:
        tensors = read(checkpoints[step])
        return equal(checked_state(tensors, model, f"checkpoint-{step}"), last)

    end = next((step for step in reversed(steps) if has_last_weights(step)), None)
    if end is None:
        end = noted_step(path, model)
    if end is None:  # the training went on after the last checkpoint
        are_at_powers_of_two = checkpoints[steps[-1]].is_file()
        end = 2 * steps[-1] if are_at_powers_of_two else steps[-1] + 1
    return [checkpoints[step] for step in thinned(steps, end)]


def _numbered(path: Path) -> dict[int, Path]:
    """The checkpoints in a folder, by step."""
    checkpoints = {}
    for checkpoint in path.glob("*-*"):
        match = CHECKPOINT.fullmatch(checkpoint.name)
        if match:
            step = match.group(1) or match.group(2)
            checkpoints[int(step)] = checkpoint
    return checkpoints


def checked_state(tensors: Mapping[str, Any], model: nn.Module, label: str) -> State:
    """A checkpoint's state by the model's own names.

    Args:
        label: the checkpoint's name in messages.

    Raises:
        ModelError: tensors are missing or of another shape; NaN or inf.
    """
    by_plain_name = {_plain(name): tensor for name, tensor in tensors.items()}
    plain_names = _plain_names(model)
    state = {}
    missing = []
    for name, present in state_of(model).items():
        candidates = [by_plain_name[p] for p in plain_names[name] if p in by_plain_name]
        stored = candidates[0] if candidates else None
        if isinstance(stored, Tensor) and stored.shape == present.shape:
            state[name] = whole(stored.detach()).to(present.device)
        else:
            missing.append(name)
    if missing:
        raise ModelError(f"{label} is another model's: no {some(missing)} of this model's shape")
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ModelError(f"{label} holds NaN or inf in {name!r}; was training stable?")
    return state


def _plain(name: str) -> str:
    """A tensor's name without the parts that wrappers and adapters put into it."""
    return bare_name(name).replace(".default.", ".")


def _plain_names(model: nn.Module) -> dict[str, list[str]]:
    """The plain names of every parameter and buffer; several where a parameter is tied."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(_plain(name))
    names = {name: [_plain(name)] for name in buffers_of(model)}
    for name, parameter in model.named_parameters():
        names[name] = aliases[id(parameter)]
    return names


def equal(state: State, reference: State) -> bool:
    """Whether a state has the same tensors as the reference, bit for bit."""
    return all(
        torch.equal(whole(tensor).to(state[name]), state[name])
        for name, tensor in reference.items()
    )
