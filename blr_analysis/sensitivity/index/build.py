"""How an index is built: file by file, by one process or several, from where a killed build ended.

The plan says what the index will hold, so that a build goes on with the same settings wherever it
is started again, and ends in the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.record import indices_of_rank
from blr_analysis.errors import StorageError
from blr_analysis.files.placing import check_free, check_room, held
from blr_analysis.posterior import Forecast
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.sensitivity.index.block_count import block_counts
from blr_analysis.sensitivity.index.blocks import BLOCK
from blr_analysis.sensitivity.index.compressed import Compressed, Compression
from blr_analysis.sensitivity.index.projection import (
    TRIED,
    Projection,
    joined,
    multiplies_half,
)
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
from blr_analysis.sensitivity.index.whitened import Roots
from blr_analysis.sensitivity.influence.blocks import Cotangent, matrix_of, pieces
from blr_analysis.sensitivity.influence.results import ProjectionError
from blr_analysis.sensitivity.training_errors import mean_errors
from blr_analysis.task import Task

DTYPES = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
NAMES = {"n_data": "number of examples", "last_loss": "model"}  # of entries of a plan
PROBE_ROWS = 64  # training examples whose exact influence measures the error …
PROBE_COLUMNS = 16  # … on so many others
QUESTION_BLOCKS = 8  # times as many blocks of a question as are stored


@dataclass(frozen=True)
class Builder:
    """What an index is built of.

    Attributes:
        rank: room per example, in numbers of ``dtype``.
        cotangent: ∂ℓ/∂f of the training examples.
    """

    task: Task
    posterior: Posterior
    store: Store
    rank: int
    dtype: torch.dtype
    cotangent: Cotangent

    def compression(self, blocks: int = 0) -> Compression:
        """With so many blocks of each example."""
        return Compression.of(self.posterior, self.rank, self.dtype, blocks)

    def projection(self, compression: Compression, roots: Roots, half: bool) -> Projection:
        """Of the training examples."""
        return Projection(self.task, self.posterior, compression, roots, self.cotangent, half)

    def write_files(self, missing: list[str]) -> dict[str, Any]:
        """Write the files of records that are missing; what was decided, as the plan says it."""
        plan = self.store.plan
        if not missing and "blocks" in plan:
            return plan
        compression = self.compression()
        examples = sum(len(self.store.files[name]) for name in missing)
        check_room(self.store.path / STEM, examples * compression.nbytes(self.dtype))
        half = self._decided_half(compression)
        roots = compression.roots(self.posterior)
        blocks = self._decided_blocks(self.projection(compression, roots, half))
        projection = self.projection(self.compression(blocks), roots, half)
        whole_turns = len(missing) // ranks.count() * ranks.count()
        for nth, name in enumerate(missing):
            divided = nth >= whole_turns  # too few are left: chunk by chunk
            if divided or nth % ranks.count() == ranks.rank():
                self._write_file(name, projection, divided)
        return {"half": half, "blocks": blocks}

    def _decided_half(self, compression: Compression) -> bool:
        """Whether gradients are turned in bfloat16: on any machine as the build was begun."""
        if ranks.first():
            plan = self.store.plan
            if "half" not in plan:
                half = compression.signs and multiplies_half(self.posterior)
                write_record(self.store.path / PLAN, plan | {"half": half})
        ranks.wait()
        return self.store.plan["half"]

    def _decided_blocks(self, projection: Projection) -> int:
        """How many blocks of each example are stored: as the build was begun."""
        plan = self.store.plan
        if "blocks" in plan:
            return plan["blocks"]
        blocks = projection.block_count(self.dtype.itemsize * self.rank)
        if ranks.first():
            write_record(self.store.path / PLAN, plan | {"blocks": blocks})
        return blocks

    def _write_file(self, name: str, projection: Projection, divided: bool) -> None:
        rows = self.store.files[name]
        parts = projection.parts(rows, divided=divided)
        records = ((chosen, self._records(projection, part)) for chosen, part in parts)
        whole = joined(records, rows, divided)
        if ranks.first() or not divided:
            write_shard(whole, self.store.path / name, rows)

    def _records(self, projection: Projection, part: Compressed) -> dict[str, Tensor]:
        """What files hold of these examples, and their self-influences."""
        records = projection.compression.records(part, self.dtype)
        return records | {"self_influence": part.squares}

    def finish(self, claim: dict[str, Any], decided: dict[str, Any]) -> None:
        """Measure the error, and write the files that are written last."""
        compression = self.compression(decided["blocks"])
        error = self.measured_error(compression)
        if not ranks.first():
            return
        entries = {
            "error": [error.relative_rms, error.spearman, error.pairs],
            "numbers": compression.size,
            "signs": compression.signs,
            "half": decided["half"],
            "blocks": decided["blocks"],
            "sums": compression.sums,
        }
        self.posterior.save(self.store.path / POSTERIOR)
        self.store.write_examples(self.task.metadata)
        self.store.write_config(claim | entries)

    def measured_error(self, compression: Compression) -> ProjectionError:
        """Stored against exact influence, on random pairs of different training examples.

        The influence of examples on themselves is many times larger and stored best: it would hide
        the error.
        """
        rows, columns = probe(self.task.n_data)
        roots = compression.roots(self.posterior)
        questions = Projection(self.task, self.posterior, compression, roots).compressed(
            columns, block_factor=QUESTION_BLOCKS, divided=True
        )
        estimate = torch.zeros(len(rows), len(columns), dtype=torch.float64)
        exact = torch.zeros_like(estimate)
        visited = ranks.share(torch.arange(len(rows)))
        if len(visited):
            read = self.store.read(
                lambda records: compression.values(records, questions), rows[visited]
            )
            estimate[visited] = torch.cat([values for _, values in read]).double()
            exact[visited] = matrix_of(
                pieces(
                    self.task,
                    self.posterior,
                    self.task,
                    train_cotangent=self.cotangent,
                    indices=rows[visited],
                    test_indices=columns,
                )
            ).double()
        ranks.total([estimate, exact])
        return ProjectionError.between(estimate, exact)


def write(task: Task, q: Posterior, path: Path, rank: int, dtype: str) -> None:
    """Build the index of a task in this folder, or go on where a build ended."""
    leads = ranks.first()
    claim: dict[str, Any] = {"posterior": fingerprint(q)}
    claim |= described(task, rank, dtype, q.mean, with_data=leads)
    indices_of_rank(task, q.mean)  # refuses ranks that differ
    store = Store(path, task.n_data)
    builder = Builder(task, q, store, rank, DTYPES[dtype], mean_errors(task, q))
    with held(path) if leads else nullcontext(), _claimed(store, claim):
        ranks.wait()
        decided = builder.write_files(store.missing())
        ranks.wait()
        if not store.is_complete:
            builder.finish(claim, decided)
    ranks.wait()


def probe(n_data: int) -> tuple[Tensor, Tensor]:
    """Random training examples, and others on which their influence is measured; of a single
    example, itself."""
    order = torch.randperm(n_data, generator=torch.Generator().manual_seed(1))
    count = min(PROBE_COLUMNS, n_data // 2)
    rows = order[count:][:PROBE_ROWS].sort().values
    columns = order[:count].sort().values if count else rows
    return rows, columns


def build_cost(task: Task, fit: int, rank: int, *, structure: str, saved: int = 0) -> Forecast:
    """What a build takes beside the ``fit`` examples of the posterior.

    Args:
        structure: of a posterior that is fitted.
        saved: bytes of a posterior that is there; 0 where it is fitted.
    """
    n = task.n_data
    itemsize = torch.float16.itemsize
    parameters = task.parameters().values()
    size = sum(p.numel() for p in parameters)
    rows, columns = probe(n)
    exact = len(rows) + len(columns)
    question_sums = len(columns)
    chooses_blocks = rank < size and block_counts(size // BLOCK, rank * itemsize)
    to_choose = min(TRIED, n) if chooses_blocks else 0
    posterior = saved or 2 * sum(p.nbytes for p in parameters)
    disk = n * min(rank, size) * itemsize + posterior
    examples = fit + to_choose + n + exact + question_sums
    return Forecast.of(task, examples, disk=disk, structure=structure)


def check_place(path: Path, task: Task, rank: int, *, at_model: bool) -> None:
    """Raise :class:`StorageError` where :func:`write` could not write, before a posterior is
    fitted; ``at_model``: at the weights that the model has."""
    claim: dict[str, Any] = {}
    if (path / PLAN).is_file():
        mean = task.parameters() if at_model else None
        claim = described(task, rank, "float16", mean, with_data=ranks.first())
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
