"""Gradients of the training data on disk, small enough to be searched without another pass.

The influence of i on j is g_iᵀ Σ g_j, for gradients g and posterior covariance Σ. What is stored
of each g, and whose products are these influences but for an error: ``sketch.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import instance, one_of, path_of, positive_int
from blr_analysis.errors import InputError, PosteriorError, StorageError
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.recognition import differs
from blr_analysis.posterior.recognition import fingerprint as fingerprint_of_task
from blr_analysis.posterior.structures.contract import Spectral
from blr_analysis.sensitivity.door import checked_posterior
from blr_analysis.sensitivity.index.build import Heard, fingerprint, of_one_checkpoint, write
from blr_analysis.sensitivity.index.projection import DTYPES, Projection, values_of
from blr_analysis.sensitivity.index.sketch import Sketch
from blr_analysis.sensitivity.index.stored import POSTERIOR, Records, Store
from blr_analysis.sensitivity.influence.blocks import Budget, matrix_of, pieces
from blr_analysis.sensitivity.influence.results import (
    SHOWN,
    Best,
    Matches,
    Normalize,
    ProjectionError,
    check_k,
    quantity_of,
    rooted,
)
from blr_analysis.sensitivity.training_errors import mean_errors
from blr_analysis.task import Task

COMPUTED = ("index", "self_influence")  # columns of the examples that are no metadata


@dataclass(frozen=True)
class Index:
    """Projected gradients of every training example, in a folder; see :meth:`build`.

    Attributes:
        path: the folder.
        posterior: the posterior under which gradients are compared.
        error: how far its influence is from the exact one, on pairs of training examples.
        n_data: the number of examples.
        numbers: how many numbers are stored of each.
    """

    path: Path
    posterior: Posterior = field(repr=False)
    error: ProjectionError
    n_data: int
    numbers: int
    _rank: int = field(repr=False)
    _store: Store = field(repr=False)
    _task: Task | None = field(default=None, repr=False)

    @classmethod
    @torch.inference_mode(False)
    def build(
        cls,
        task: Task,
        posterior: Posterior,
        path: str | os.PathLike[str],
        *,
        rank: int = 32768,
        dtype: str = "int8",
        error: ProjectionError | None = None,
        heard: Heard | None = None,
    ) -> Index:
        """Visit the training data once, and store ``rank`` numbers of each example.

        A build that was killed continues file by file, and ends with the same bits. An index of the
        same data is opened instead of built; all data are then read and compared by their sha256.

        Args:
            task, posterior: as for :func:`blr_analysis.influence`; of structure "diag", "kron" or
                "gram". If the posterior has earlier ones, the index takes the one nearest to the
                middle of the training.
            path: a folder, made if need be.
            rank: how many numbers to store of each example. Each matrix gets a share of them by its
                part of Σ^½ g. Smaller gradients are stored whole.
            dtype: "int8", "float16", "float32" or "float64"; with int8 ``rank=32768`` is 32 kB per
                example.
            error: how far an index of this rank errs, where it was measured before, such as to
                choose the rank; None: it is measured.
            heard: a function that gets the error of the index, before the pass over all data.

        Under ``torchrun`` the ranks share the files, 256 examples each, in a folder that all see.
        A posterior that another number of ranks fitted in float32 has the same exact influence up
        to rounding. That of the index may differ more.

        Raises:
            PosteriorError: a posterior of another model, number of examples or structure.
            StorageError: the folder holds something else, or the index of another posterior, or
                other data or settings; or the disk is full.
            DataError, ModelError: as :func:`blr_analysis.influence`.

        Example:
            >>> import tempfile, torch, blr_analysis as blr
            >>> X, y = torch.randn(30, 2), torch.randint(3, (30,))
            >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
            >>> q = blr.fit_laplace(task, structure="kron", prior_precision=1.0)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     index = Index.build(task, q, folder + "/index")
            ...     index.influence(task).shape, index.top(task, 2).helpful.shape
            (torch.Size([30, 30]), torch.Size([30, 2]))
        """
        q = of_one_checkpoint(checked_posterior(task, posterior))
        if not isinstance(q.form, Spectral):
            raise PosteriorError(f"an index takes 'diag', 'kron' or 'gram', not {q.structure!r}")
        positive_int("rank", rank)
        one_of("dtype", dtype, tuple(DTYPES))
        folder = Path(path_of(path)).expanduser()
        task_at_buffers = task.holding(q.buffers).quiet
        write(task_at_buffers, q, folder, rank, dtype, error, heard)
        return cls._opened(folder, task_at_buffers, q)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, task: Task | None = None) -> Index:
        """The index in this folder; with the training ``task``, its answers can be refined.

        Raises:
            StorageError: nothing there, an index that is not complete or is damaged.
            PosteriorError: the task does not belong to its posterior, or has other data or other
                metadata. Data are compared by the sha256 of all examples; of texts that
                ``language_task`` read from a file, that of the file is enough, and of a
                ``datasets.Dataset`` its fingerprint with the sizes and times of its files.
        """
        index = cls._opened(Path(path_of(path)).expanduser(), task)
        if task is not None and not _has_data_of(task, index._store.config):
            raise PosteriorError("the index is of other data or metadata than the task's.")
        return index

    @classmethod
    def _opened(cls, path: Path, task: Task | None, built_of: Posterior | None = None) -> Index:
        """``built_of``: the posterior that it was just built of, which knows the task."""
        store = Store.open(path)
        config = store.config
        posterior = built_of
        if posterior is None:
            stored_posterior = Posterior.load(path / POSTERIOR)
            if fingerprint(stored_posterior) != config["posterior"]:
                raise StorageError(f"{str(path)!r} holds a posterior that is not its index's.")
            posterior = _of_task(stored_posterior, task)
        return cls(
            path,
            posterior,
            ProjectionError.of_entry(config["error"]),
            n_data=config["n_data"],
            numbers=config["numbers"],
            _rank=config["rank"],
            _store=store,
            _task=task,
        )

    @torch.inference_mode(False)
    def influence(self, test_task: Task, *, normalize: Normalize = False) -> Tensor:
        """``[N, M]`` in nats: the estimate of :func:`blr_analysis.influence` on these examples, of
        the one network that it was built of (``influence`` averages over more of a small one).

        Args:
            normalize: as there; the lengths are those of ``self_influence``.

        Raises:
            InputError: another ``normalize``.
            PosteriorError: a task of another model.
        """
        quantity_of(normalize)
        questions, _ = self._projected(test_task, normalize)
        parts = self._values(questions, normalize)
        return torch.cat([values for _, values in parts]) * self._scale(normalize)

    @torch.inference_mode(False)
    def top(
        self,
        test_task: Task,
        k: int = SHOWN,
        *,
        refine: int = 0,
        normalize: Normalize = False,
        harmful: bool = True,
    ) -> Matches:
        """The k most helpful and most harmful of every question, without the matrix.

        Args:
            refine: how many of the most helpful and of the most harmful to compute again exactly,
                and to choose from. It takes one gradient of each, and needs ``Index.open(path,
                task=task)``.
            normalize: as for :func:`blr_analysis.influence`. If long texts lead every list, True or
                "cosine" finds what a question came from.
            harmful: False leaves these out, ``[M, 0]``.

        Raises:
            InputError: k above the number of examples, ``refine`` below k or without the task,
                another ``normalize``.
            PosteriorError: a task of another model.
        """
        check_k(k, self.n_data)
        if refine and (refine < k or self._task is None):
            raise InputError("refine= must be at least k, and the index opened with task=")
        quantity = quantity_of(normalize)
        questions, lengths = self._projected(test_task, normalize)
        candidates = self._best(questions, min(max(k, refine), self.n_data), normalize, harmful)
        if refine:
            candidates = {
                sign: (self._refined(test_task, rows, lengths, normalize), rows)
                for sign, (_, rows) in candidates.items()
            }
        helpful, helpful_values = self._strongest(k, *candidates[1], sign=1, normalize=normalize)
        harmful_rows = helpful[:, :0]
        harmful_values = helpful_values[:, :0]
        if harmful:
            harmful_rows, harmful_values = self._strongest(
                k, *candidates[-1], sign=-1, normalize=normalize
            )
        return Matches(
            helpful,
            helpful_values,
            harmful_rows,
            harmful_values,
            metadata={n: column for n, column in self.examples.items() if n not in COMPUTED},
            quantity=quantity,
            note=self.posterior.note,
        )

    def _refined(
        self, test_task: Task, rows: Tensor, lengths: Tensor, normalize: Normalize
    ) -> Tensor:
        """The exact values of these candidates ``[r, M]``."""
        exact = self._exact(test_task, rows)
        return exact / lengths.to(exact) / self._lengths(normalize)[rows]

    def _strongest(
        self, k: int, values: Tensor, rows: Tensor, *, sign: int, normalize: Normalize
    ) -> tuple[Tensor, Tensor]:
        """Rows and values ``[M, k]`` of the best of these candidates."""
        best = values.topk(k, dim=0, largest=sign > 0)
        scaled = best.values * self._scale(normalize)
        return rows.gather(0, best.indices).mT.contiguous(), scaled.mT.contiguous()

    @cached_property
    def self_influence(self) -> Tensor:
        """g_iᵀ Σ g_i of every stored example, ``[N]``: exact where gradients are stored whole, else
        z_iᵀ z_i of what is stored."""
        return torch.tensor(self.examples["self_influence"], dtype=torch.float64)

    @cached_property
    def examples(self) -> dict[str, list[Any]]:
        """The table of the examples by column: index, self_influence, and the task's metadata."""
        return self._store.examples()

    def _scale(self, normalize: Normalize) -> float:
        """τ, or 1 where values are normalized."""
        return 1.0 if normalize else self.posterior.temperature

    def _lengths(self, normalize: Normalize) -> Tensor:
        """What the values of stored examples are divided by, ``[N]``."""
        return rooted(self.self_influence) if normalize else torch.ones(self.n_data)

    def _projected(self, task: Task, normalize: Normalize) -> tuple[Tensor, Tensor]:
        """Sketches of the questions ``[M, size]``, divided by the lengths ``[M]`` that they count
        with; and these lengths."""
        instance("test_task", task, Task, "a blr_analysis.Task with the questions")
        q = self.posterior.on(task, same_data=False)
        if self._task is not None:
            task = task.with_model(self._task)
            q = self.posterior.on(task, same_data=False)
        z = Projection(q.judging(task), Sketch.of(q, self._rank)).whole()
        lengths = torch.ones(len(z), dtype=torch.float64)
        if normalize == "cosine":
            lengths = rooted(z.double().square().sum(1))
        return z / lengths.to(z).unsqueeze(1), lengths

    def _values(self, questions: Tensor, normalize: Normalize) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and their influence on the questions, file by file."""

        def compute(records: Records) -> Tensor:
            return values_of(records, questions)

        lengths = self._lengths(normalize)
        for rows, values in self._store.read(compute, threads=torch.get_num_threads()):
            yield rows, values / lengths[rows].to(values).unsqueeze(1)

    def _best(
        self, questions: Tensor, k: int, normalize: Normalize, harmful: bool
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Values and rows ``[k, M]`` of the largest (1) and, if asked for, the smallest (−1)."""
        best = Best(k)
        for rows, values in self._values(questions, normalize):
            best.add(rows, values)
        largest, smallest = best.sides()
        return {1: largest, -1: smallest} if harmful else {1: largest}

    def _exact(self, test_task: Task, rows: Tensor) -> Tensor:
        """The exact influence of these candidates ``[r, M]`` on each question.

        The questions come in blocks whose gradients fit into memory. For each block the gradients
        of its own candidates are computed, each once.
        """
        assert self._task is not None
        task = self._task.quiet
        questions = test_task.with_model(self._task)
        errors = mean_errors(task, self.posterior)
        blocks = []
        for block in blocks_of_questions(questions, self.posterior):
            candidates, places = rows[:, block].unique(return_inverse=True)
            exact = pieces(
                task,
                self.posterior,
                questions,
                train_cotangent=errors,
                indices=candidates,
                test_indices=block,
            )
            blocks.append(matrix_of(exact).gather(0, places))
        return torch.cat(blocks, dim=1)


def blocks_of_questions(questions: Task, q: Posterior) -> tuple[Tensor, ...]:
    """The indices of questions whose gradients fit into memory together."""
    n_questions = questions.n_data
    size = Budget.of(questions, q, n_questions).vectors
    return torch.arange(n_questions).split(size)


def _has_data_of(task: Task, config: Mapping[str, Any]) -> bool:
    """Whether a task has the data and metadata of the index with this record."""
    mark = task.examples.mark(task.metadata)
    if mark is not None and mark == config.get("mark"):
        return True
    return config.get("data") == task.examples.sha256(task.metadata)


def _of_task(posterior: Posterior, task: Task | None) -> Posterior:
    """The stored posterior on this task, whose model and data it must know.

    Raises:
        PosteriorError: another model, or other data.
    """
    if task is None:
        return posterior
    if posterior.fingerprint is not None:
        mean = posterior.on(task).mean
        difference = differs(posterior.fingerprint, fingerprint_of_task(task, mean))
        if difference:
            raise PosteriorError(difference)
    return checked_posterior(task, posterior)
