"""How an index is built: file by file, by one process or several, from where a killed build ended.

The plan says what the index will hold, so that a build goes on with the same settings wherever it
is started again, and ends in the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.record import indices_of_rank
from blr_analysis.backprop.terms import Term
from blr_analysis.errors import StorageError
from blr_analysis.files.placing import check_free, check_room, held
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.sensitivity.corrections import check_finite
from blr_analysis.sensitivity.index.projection import (
    DTYPES,
    Projection,
    joined,
    records_of,
    values_of,
)
from blr_analysis.sensitivity.index.sketch import Sketch
from blr_analysis.sensitivity.index.stored import (
    FORMAT,
    PLAN,
    POSTERIOR,
    STEM,
    VERSION,
    Store,
    read_checked,
    write_record,
    write_shard,
)
from blr_analysis.sensitivity.influence.blocks import matrix_of, pieces
from blr_analysis.sensitivity.influence.results import ENOUGH_PAIRS, ProjectionError
from blr_analysis.sensitivity.training_errors import mean_errors
from blr_analysis.task import Task

NAMES = {"n_data": "number of examples", "last_loss": "model"}  # of entries of a plan
PROBE_ROWS = 32  # training examples whose exact influence measures the error …
PROBE_COLUMNS = 16  # … on so many others


Heard = Callable[[ProjectionError], None]  # hears how far an index will err


@dataclass(frozen=True)
class Builder:
    """What an index is built of.

    Attributes:
        store: its folder.
        projection: of the training examples.
        dtype: of the numbers that are stored.
    """

    store: Store
    projection: Projection
    dtype: torch.dtype

    def error(self, known: ProjectionError | None = None) -> ProjectionError:
        """How far the index errs, before it is written: as the plan says, as it is known, or else
        measured."""
        plan = self.store.plan
        if "error" not in plan:
            error = known or measured_error(self.projection, self.dtype)
            if ranks.first():
                write_record(self.store.path / PLAN, plan | {"error": error.entry})
            ranks.wait()
        return ProjectionError.of_entry(self.store.plan["error"])

    def write_files(self) -> None:
        """Write the files of records that are missing."""
        missing = self.store.missing()
        ranks.wait()  # no rank writes a file before all have looked for the missing ones
        n_examples = sum(len(self.store.files[name]) for name in missing)
        bytes_of_each = self.projection.sketch.size * self.dtype.itemsize
        check_room(self.store.path / STEM, n_examples * bytes_of_each)
        whole_turns = len(missing) // ranks.count() * ranks.count()
        for nth, name in enumerate(missing):
            divided = nth >= whole_turns  # too few are left: chunk by chunk
            if divided or nth % ranks.count() == ranks.rank():
                self._write_file(name, divided)

    def _write_file(self, name: str, divided: bool) -> None:
        rows = self.store.files[name]
        z = joined(self.projection.parts(rows, divided=divided), rows, divided=divided)
        if ranks.first() or not divided:
            write_shard(records_of(z, self.dtype), self.store.path / name, rows)

    def finish(self, claim: dict[str, Any]) -> None:
        """Write the files that are written last."""
        if not ranks.first():
            return
        entries = {"error": self.store.plan["error"], "numbers": self.projection.sketch.size}
        q = self.projection.sketch.posterior
        entries["coverage"] = q.coverage
        entries["mark"] = self.projection.task.examples.mark(self.projection.task.metadata)
        q.save(self.store.path / POSTERIOR)
        self.store.write_examples(self.projection.task.metadata)
        self.store.write_config(claim | entries)


def write(
    task: Task,
    q: Posterior,
    path: Path,
    rank: int,
    dtype: str,
    known_error: ProjectionError | None = None,
    heard: Heard | None = None,
) -> None:
    """Build the index of a task in this folder, or go on where a build ended.

    Args:
        known_error: how far the index errs, where it was measured before.
        heard: hears how far the index will err, before the pass over all data.
    """
    leads = ranks.first()
    claim: dict[str, Any] = {"posterior": fingerprint(q)}
    claim |= described(task, rank, dtype, q.mean, with_data=leads)
    indices_of_rank(task, q.mean)  # refuses ranks that differ
    store = Store(path, task.n_data)
    projection = Projection(task, Sketch.of(q, rank), mean_errors(task, q))
    builder = Builder(store, projection, DTYPES[dtype])
    with held(path) if leads else nullcontext(), _claimed(store, claim):
        ranks.wait()
        error = builder.error(known_error)
        if heard is not None and not store.is_complete:
            heard(error)
        builder.write_files()
        ranks.wait()
        if not store.is_complete:
            builder.finish(claim)
    ranks.wait()


def of_one_checkpoint(q: Posterior) -> Posterior:
    """The posterior of a run at the one checkpoint that an index takes, nearest the run's half."""
    return q.earlier[-1] if q.earlier else q


def measured_error(projection: Projection, dtype: torch.dtype) -> ProjectionError:
    """Stored against exact influence, on random pairs of different training examples.

    The influence of examples on themselves is many times larger and stored best: it would hide the
    error.
    """
    (error,) = measured_errors([projection], dtype)
    return error


def measured_errors(projections: Sequence[Projection], dtype: torch.dtype) -> list[ProjectionError]:
    """:func:`measured_error` of projections that differ in their sketch alone.

    All sketches and the exact influence are computed from the same gradients, one of each example.
    """
    rows, columns = probe(projections[0].task.n_data)
    of_rows = [ProbeSketches.zeros(projection.sketch, rows) for projection in projections]
    of_columns = [ProbeSketches.zeros(projection.sketch, columns) for projection in projections]
    exact = _exact_on_probe(projections[0], of_rows, of_columns)
    if exact.numel() < ENOUGH_PAIRS:
        return [ProjectionError(math.nan, math.nan, exact.numel()) for _ in projections]
    errors = []
    for training, questions in zip(of_rows, of_columns, strict=True):
        values = values_of(records_of(training.z, dtype), questions.z)
        errors.append(ProjectionError.between(values.double(), exact))
    return errors


def _exact_on_probe(
    projection: Projection,
    of_rows: Sequence[ProbeSketches],
    of_columns: Sequence[ProbeSketches],
) -> Tensor:
    """The exact influence between the examples of :func:`probe`, in float64.

    Their sketches are filled in from the same gradients.
    """

    def add_rows(indices: Tensor, terms: list[Term]) -> None:
        for sketches in of_rows:
            sketches.add(indices, terms)

    def add_columns(indices: Tensor, terms: list[Term]) -> None:
        for sketches in of_columns:
            sketches.add(indices, terms)

    rows, columns = probe(projection.task.n_data)
    exact = torch.zeros(len(rows), len(columns), dtype=torch.float64)
    visited = ranks.share(torch.arange(len(rows)))
    if len(visited):
        parts = pieces(
            projection.task,
            projection.sketch.posterior,
            projection.task,
            train_cotangent=projection.cotangent,
            indices=rows[visited],
            test_indices=columns,
            watch=add_rows,
            watch_test=add_columns,
        )
        exact[visited] = matrix_of(parts).double()
    if not ranks.first():
        for sketches in of_columns:
            sketches.z.zero_()  # the ranks compute the same columns
    ranks.total([exact, *(sketches.z for sketches in (*of_rows, *of_columns))])
    return exact


@dataclass(frozen=True)
class ProbeSketches:
    """Sketches of some examples, computed from gradients that somebody else needs, too.

    Attributes:
        sketch: how a gradient is projected.
        order: the indices of the examples, rising.
        z: their sketches ``[B, size]``; 0 for examples that were not added.
    """

    sketch: Sketch
    order: Tensor
    z: Tensor

    @classmethod
    def zeros(cls, sketch: Sketch, order: Tensor) -> ProbeSketches:
        like = next(iter(sketch.posterior.mean.values()))
        return cls(sketch, order, torch.zeros(len(order), sketch.size, dtype=like.dtype))

    def add(self, indices: Tensor, terms: list[Term]) -> None:
        z = self.sketch.of_terms(terms)
        check_finite(z, "projected gradient")
        self.z[torch.searchsorted(self.order, indices)] = z.cpu()


def probe(n_data: int) -> tuple[Tensor, Tensor]:
    """Random training examples, and others on which their influence is measured; of a single
    example, itself."""
    order = torch.randperm(n_data, generator=torch.Generator().manual_seed(1))
    count = min(PROBE_COLUMNS, n_data // 2)
    rows = order[count:][:PROBE_ROWS].sort().values
    columns = order[:count].sort().values if count else rows
    return rows, columns


def check_place(path: Path, task: Task, rank: int, *, at_model: bool) -> None:
    """Raise :class:`StorageError` where :func:`write` could not write, before a posterior is
    fitted; ``at_model``: at the weights that the model has."""
    claim: dict[str, Any] = {}
    if (path / PLAN).is_file():
        mean = task.parameters() if at_model else None
        claim = described(task, rank, "int8", mean, with_data=ranks.first())
    _check_claim(path, claim)


def fingerprint(q: Posterior) -> str:
    """The sha256 of a posterior's numbers, names and n_data."""
    digest = hashlib.sha256(f"{q.structure} {q.n_data}".encode())
    tensors = dict(q.mean)
    tensors |= {f"{name} S": tensor for name, tensor in q.form.tensors().items()}
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def described(
    task: Task, rank: int, dtype: str, mean: Mapping[str, Tensor] | None, *, with_data: bool
) -> dict[str, Any]:
    """What tells an index from others, without its posterior."""
    entries = {
        "format": FORMAT,
        "version": VERSION,
        "n_data": task.n_data,
        "rank": rank,
        "dtype": dtype,
        "likelihood": task.likelihood.recorded,
    }
    if with_data:
        entries["data"] = task.examples.sha256(task.metadata)
    if mean is not None:
        entries["last_loss"] = _last_loss(task, mean)
    return entries


def _last_loss(task: Task, mean: Mapping[str, Tensor]) -> float:
    """The loss of the last example, which tells models apart."""
    last = torch.tensor([task.n_data - 1])
    with torch.no_grad(), task.evaluation():
        outputs, targets = task.run(task.fetch(last), dict(mean), last)
    return float(task.likelihood.at(last).nll(outputs, targets))


@contextmanager
def _claimed(store: Store, claim: dict[str, Any]) -> Iterator[None]:
    """The first rank writes the plan, and takes it away where no file was written.

    Raises:
        StorageError: the folder holds something else.
    """
    if not ranks.first():
        yield
        return
    plan = store.path / PLAN
    _check_claim(store.path, claim)
    store.path.mkdir(parents=True, exist_ok=True)
    if not plan.is_file():
        write_record(plan, claim)
    try:
        yield
    except BaseException:
        if not any(store.path.glob(f"{STEM}-*")):
            plan.unlink(missing_ok=True)
            with suppress(OSError):
                store.path.rmdir()
        raise


def _check_claim(path: Path, claim: dict[str, Any]) -> None:
    """Raise :class:`StorageError` unless the folder is new, empty or holds this very index."""
    if not (path / PLAN).is_file():
        check_free(path)
        return
    plan = read_checked(path / PLAN)
    different = [name for name, value in claim.items() if plan.get(name) != value]
    if "data" in different and "last_loss" in different:
        different.remove("last_loss")  # other data have other losses
    if different:
        words = ", ".join(NAMES.get(name, name) for name in different)
        raise StorageError(f"{str(path)!r} holds an index with another {words}: name a new folder.")
