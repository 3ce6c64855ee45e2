"""A fit that stores its progress in a folder, so that a fit that was ended can go on.

    FOLDER/KEY.safetensors                 a finished posterior, one for each checkpoint
    FOLDER/KEY.factors, KEY.kron.values    the sums of an unfinished sweep, written every minute

KEY is a digest of all that a posterior depends on: weights, data, loss and settings.
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

Fit = Callable[[Mapping[str, Unfinished] | None], Posterior]  # takes the files of sums, by sweep
KEY_LENGTH = 16  # hexadecimal digits of the digest: 64 bits


@dataclass(frozen=True)
class ResumableFit:
    """A folder in which a fit stores its progress.

    Attributes:
        folder: the folder; the fit makes it where it is missing.
        structure: the structure of the posterior.
        settings: further choices on which the posterior depends.
    """

    folder: Path
    structure: str
    settings: tuple[Any, ...]

    def fitted(self, task: Task, weights: Mapping[str, Tensor], fit: Fit) -> Posterior:
        """The posterior at these weights: read from the folder, or fitted and written there.

        Sums of unfinished sweeps are stored for sequences in a single process; the sweeps of other
        fits are short, or shared by several processes.

        Args:
            fit: makes the posterior; it stores its sums in the files that it is passed.
        """
        key = self._key(task, weights)
        path = self.folder / f"{key}.safetensors"
        if path.is_file():
            return Posterior.load(path)
        files_of_sums = {sweep: self._file_of_sums(key, sweep) for sweep in self._sweeps}
        stores_sums = task.likelihood.is_sequence and ranks.count() == 1
        if ranks.first():
            self.folder.mkdir(parents=True, exist_ok=True)
        posterior = fit(files_of_sums if stores_sums else None)
        if ranks.first():
            posterior.save(path)
            for file in files_of_sums.values():
                file.remove()
        ranks.wait()
        return posterior

    @property
    def _sweeps(self) -> tuple[str, ...]:
        """The sweeps whose sums are stored: "inputs" of "gram", the others of other structures.

        A fit of any structure that looks for δ first makes a "kron" fit, with values of its own.
        """
        return ("inputs", "factors", "kron values", f"{self.structure} values")

    def _file_of_sums(self, key: str, sweep: str) -> Unfinished:
        """The file of the sums of a sweep; nothing is written yet."""
        suffix = sweep.replace(" ", ".")
        return Unfinished(self.folder / f"{key}.{suffix}", key)

    def _key(self, task: Task, weights: Mapping[str, Tensor]) -> str:
        """A digest of all that the posterior depends on."""
        initial = None if task.recipe is None else task.recipe.initial
        dependencies = (
            self.structure,
            self.settings,
            task.likelihood.recorded,
            task.prior_precision,
            task.examples.sha256(task.metadata),
            frozen_numbers(task, weights),
            initial,
            torch.__version__,
            narrow(weights),
        )
        digest = hashlib.sha256()
        _add(digest, dependencies)
        return digest.hexdigest()[:KEY_LENGTH]


def _add(digest: Any, value: Any) -> None:
    """Add a value to a digest: tensors by their bytes, collections part by part, others as text."""
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
