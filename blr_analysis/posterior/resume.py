"""A fit that can be ended and goes on where it was.

    FOLDER/KEY.safetensors                 a finished posterior, one for each checkpoint
    FOLDER/KEY.factors, KEY.kron.values    the sums of an unfinished sweep, written every minute

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

Fitting = Callable[[Mapping[str, Unfinished] | None], Posterior]  # from the files of its sums
KEY_LENGTH = 16  # hexadecimal digits of the digest: 64 bits


@dataclass(frozen=True)
class ResumableFit:
    """A folder in which a fit stores its progress.

    Attributes:
        folder: is made when the first posterior, or the first sums, are written.
        structure: of the posterior.
        settings: further choices on which the posterior depends.
    """

    folder: Path
    structure: str
    settings: tuple[Any, ...]

    def fitted(self, task: Task, weights: Mapping[str, Tensor], fit: Fitting) -> Posterior:
        """The posterior at these weights: read from the folder, or fitted and written there.

        Args:
            fit: makes the posterior; it stores its sums in the files that it is passed.
        """
        key = self._key(task, weights)
        place = self.folder / f"{key}.safetensors"
        if place.is_file():
            return Posterior.load(place)
        unfinished = {sweep: self._file_of(key, sweep) for sweep in self._sweeps}
        stores_sums = task.likelihood.is_sequence and ranks.count() == 1
        if ranks.first():
            self.folder.mkdir(parents=True, exist_ok=True)
        posterior = fit(unfinished if stores_sums else None)
        if ranks.first():
            posterior.save(place)
            for file in unfinished.values():
                file.remove()
        ranks.wait()
        return posterior

    @property
    def _sweeps(self) -> tuple[str, ...]:
        """The sweeps whose sums are stored; "kron values" are those of the fit that finds δ."""
        return ("factors", "kron values", f"{self.structure} values")

    def _file_of(self, key: str, sweep: str) -> Unfinished:
        suffix = sweep.replace(" ", ".")
        return Unfinished(self.folder / f"{key}.{suffix}", key)

    def _key(self, task: Task, weights: Mapping[str, Tensor]) -> str:
        """A digest of all that the posterior depends on."""
        digest = hashlib.sha256()
        dependencies = (
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
        _add(digest, dependencies)
        return digest.hexdigest()[:KEY_LENGTH]


def _add(digest: Any, value: Any) -> None:
    """Add a value to a digest: tensors by their bytes, collections part by part."""
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
