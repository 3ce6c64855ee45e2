"""A user's own training on the changed data: exact answers, kept in a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from blr_analysis.checks import positive_int
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files.placing import drafted
from blr_analysis.files.shards import save_file
from blr_analysis.posterior.structures import Tree
from blr_analysis.task import Task

Train = Callable[[Any, int], "nn.Module | Mapping[str, Tensor]"]


@dataclass(frozen=True)
class Retrained:
    """Weights by name after the training with one seed."""

    weights: Tree
    seed: int


def retrained(
    parts: Sequence[tuple[Task, Tensor]],
    like: Mapping[str, Tensor],
    train: Train,
    seeds: int,
    cache: str | Path | None = None,
) -> list[Retrained]:
    """Call ``train(data, seed)`` for the seeds 0, 1, …; it returns the model or its state dict.

    Args:
        parts: a task and the examples of it that count; ``data`` is the dataset of them all.
        like: weights by name, whose names and shapes the answer must have.
        cache: a folder; what was trained there on the same examples with the same seed is read.

    Raises:
        InputError: no function, or a bad number of seeds.
        ModelError: the training returns another model, or something else.
    """
    if not callable(train):
        raise InputError("train must be a function (data, seed) -> model or state dict")
    positive_int("seeds", seeds)
    folder = None if cache is None else Path(cache)
    data = _dataset(parts)
    runs = []
    for seed in range(seeds):
        place = None if folder is None else folder / f"{_key(parts, data)}-{seed}.safetensors"
        if place is not None and place.exists():
            runs.append(Retrained(_fitting(load_file(place), like), seed))
            continue
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            result = train(data, seed)
        state = result.state_dict() if isinstance(result, nn.Module) else result
        _same_buffers(state, parts[0][0].model)
        weights = _fitting(state, like)
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            with drafted(place) as draft:
                save_file(weights, draft, {"format": "pt"})
        runs.append(Retrained(weights, seed))
    return runs


def _dataset(parts: Sequence[tuple[Task, Tensor]]) -> Dataset[Any]:
    sets = [Subset(task.dataset, indices.tolist()) for task, indices in parts]
    return sets[0] if len(sets) == 1 else ConcatDataset(sets)


def _key(parts: Sequence[tuple[Task, Tensor]], data: Any) -> str:
    """Of which examples count, and of the first and the last of them."""
    digest = hashlib.sha256(json.dumps([i.tolist() for _, i in parts]).encode())
    for example in (data[0], data[len(data) - 1]):
        for x in example if isinstance(example, (tuple, list)) else [example]:
            digest.update(repr(x.tolist() if isinstance(x, Tensor) else x).encode())
    return digest.hexdigest()[:24]


def _same_buffers(state: Any, model: nn.Module) -> None:
    """Answers are measured with the model's own buffers: running statistics must not differ."""
    for name, buffer in model.named_buffers():
        new = state.get(name) if isinstance(state, Mapping) else None
        if new is not None and not torch.equal(new.to(buffer), buffer):
            raise ModelError(f"train changed the buffer {name!r}; only parameters are compared")


def _fitting(result: Any, like: Mapping[str, Tensor]) -> Tree:
    if not isinstance(result, Mapping):
        raise ModelError(f"train must return a model or a state dict, got {type(result).__name__}")
    for name, tensor in like.items():
        if name not in result or tuple(result[name].shape) != tuple(tensor.shape):
            raise ModelError(f"train returned another model: no {name!r} of this shape")
    return {n: result[n].detach().to(t) for n, t in like.items()}
