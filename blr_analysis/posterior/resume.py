"""A fit that goes on where it was when its process was ended.

    FOLDER/KEY.safetensors                 a posterior that is whole, one for each checkpoint
    FOLDER/KEY.factors, KEY.kron.values    the sums of a sweep, every minute

The key is a digest of all that a posterior depends on: weights, data, loss and settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.files import Unfinished
from blr_analysis.half import narrow
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.recognition import frozen_numbers
from blr_analysis.task import Task

Fitting = Callable[[Mapping[str, Unfinished] | None], Posterior]


@dataclass(frozen=True)
class ResumableFit:
    """Keeps in a folder what a fit has done.

    Attributes:
        folder: made when the first posterior, or a minute's sums, are written.
        structure: of the posterior.
        settings: what else it depends on, beside a task and its weights.
    """

    folder: Path
    structure: str
    settings: tuple[Any, ...]

    def fitted(self, task: Task, weights: Mapping[str, Tensor], fit: Fitting) -> Posterior:
        """The posterior at these weights: read where it is whole, else fitted and written.

        Args:
            fit: makes it, and keeps its sums where it is told to.
        """
        key = self._key(task, weights)
        place = self.folder / f"{key}.safetensors"
        if place.is_file():
            return Posterior.load(place)
        sums = {sweep: self._sums(key, sweep) for sweep in self._sweeps}
        keeps_sums = task.likelihood.is_sequence and ranks.count() == 1
        if ranks.first():
            self.folder.mkdir(parents=True, exist_ok=True)
        posterior = fit(sums if keeps_sums else None)
        if ranks.first():
            posterior.save(place)
            for unfinished in sums.values():
                unfinished.remove()
        ranks.wait()
        return posterior

    @property
    def _sweeps(self) -> tuple[str, ...]:
        """The sweeps whose sums are kept; δ is found by a Kronecker fit."""
        return ("factors", "kron values", f"{self.structure} values")

    def _sums(self, key: str, sweep: str) -> Unfinished:
        return Unfinished(self.folder / f"{key}.{sweep.replace(' ', '.')}", key)

    def _key(self, task: Task, weights: Mapping[str, Tensor]) -> str:
        digest = hashlib.sha256()
        facts = (
            self.structure,
            self.settings,
            task.likelihood.recorded,
            task.prior_precision,
            task.examples.sha256(task.metadata),
            frozen_numbers(task, weights),
            None if task.recipe is None else task.recipe.initial,
            torch.__version__,
            narrow(weights),
        )
        _add(digest, facts)
        return digest.hexdigest()[:16]


def _add(digest: Any, value: Any) -> None:
    """Add tensors by their bytes, and what holds tensors by its parts."""
    if isinstance(value, Prior):
        value = (value.given, value.mean)
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if isinstance(value, tuple | list):
        digest.update(f"{len(value)} parts".encode())
        for part in value:
            _add(digest, part)
    elif isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        numbers = value.detach().cpu().contiguous().view(-1)
        digest.update(numbers.view(torch.uint8).numpy().data)
    else:
        digest.update(repr(value).encode())
