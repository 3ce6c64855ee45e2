"""Gradients of the training data on disk, small enough to be searched: no pass for a question.

For a layer with gradient G_i and posterior covariance Σ, what is kept of an example is

    z_i = Lᵀ (Σ^½ G_i) R,    z_iᵀ z_j ≈ G_iᵀ Σ G_j

with orthonormal L and R: the leading directions, on either side, of Σ^½ G over some of the training
examples, in the posterior's own basis (its Kronecker factors, where it has them). Layers get the
numbers that keep most of Σ ‖Σ^½ G_i‖². With as many numbers as parameters nothing is left out.
(Choe et al., 2024, project on both sides too, with the Fisher's factors.)

The gradient of a word table is large in few rows, those of the example's own rare words, and they
are other rows in every example. In the place of Lᵀ stand the example's largest rows, and which.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import Chunking, chunks
from blr_analysis.backprop.record import shared
from blr_analysis.backprop.terms import Term, slices
from blr_analysis.checks import instance, one_of, path_of, positive_int
from blr_analysis.errors import InputError, PosteriorError, StorageError
from blr_analysis.files import check_room, drafted, held
from blr_analysis.files.headers import read_json
from blr_analysis.files.shards import save_file, shard_name
from blr_analysis.posterior import Forecast, Stage
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.posterior.laplace import vocabulary_of
from blr_analysis.posterior.structures.contract import Spectral
from blr_analysis.sensitivity.corrections import check_finite
from blr_analysis.sensitivity.influence.blocks import loss_terms, pieces
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
from blr_analysis.sensitivity.scores import fitted
from blr_analysis.task import Task

FORMAT, VERSION = "blr_analysis.index", 2
CONFIG, PLAN, DIRECTIONS = "index_config.json", "index_plan.json", "directions.safetensors"
EXAMPLES, POSTERIOR, STEM = "examples.parquet", "posterior.safetensors", "gradients"
DTYPES = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
SAMPLE = 64  # training examples that the directions are found in
LONGEST = 1024  # rows of a word table that are looked at, of every example
WIDER = 4  # times the directions of an average matrix: how many are looked into
TOGETHER = 2**20  # numbers of a layer's gradients that are made at once
PRICES = 60  # halvings of the price of a number
PROBE = (64, 16)  # pairs of training examples whose exact influence measures the error
SHARD = 256  # examples per file: what a killed run loses at most
CACHED = 2**18  # stored numbers that are multiplied at once, so that they stay in the cache
FEW = 8  # questions that are asked one by one in half precision
SPARE = 64  # examples beyond those asked for, whose rank half precision could have changed


@dataclass(frozen=True)
class Sheet:
    """The directions of one matrix: L ``[g, O, a]`` and R ``[g, I, b]``, orthonormal; with a = 0,
    ``own`` of the O rows of each example in the place of L."""

    left: Tensor
    right: Tensor
    own: int = 0

    @property
    def size(self) -> int:
        """Numbers that are kept of a gradient."""
        return len(self.left) * (self.own or self.left.shape[-1]) * self.right.shape[-1]

    def like(self, q: Posterior) -> Sheet:
        """In the posterior's dtype, on its device."""
        other = next(iter(q.mean.values()))
        return Sheet(self.left.to(other), self.right.to(other), self.own)

    def largest(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """The ``own`` largest rows of W ``[B, 1, O, I]``: which, and WR there ``[B, m, b]``."""
        rows = w[:, 0].square().sum(-1).topk(self.own).indices
        taken = w[:, 0].gather(1, rows.unsqueeze(-1).expand(-1, -1, w.shape[-1]))
        return rows, taken @ self.right


@dataclass(frozen=True)
class Kept:
    """What is kept of some examples: LᵀWR of all matrices ``[n, K]``, and of those that have rows
    of their own which ``[n, m]`` and their numbers ``[n, m, b]``."""

    z: Tensor
    own: Mapping[str, tuple[Tensor, Tensor]]

    @classmethod
    def joined(cls, parts: Sequence[Kept]) -> Kept:
        """Those of several runs of examples."""
        pairs = {n: list(zip(*(p.own[n] for p in parts), strict=True)) for n in parts[0].own}
        own = {n: (torch.cat(rows), torch.cat(numbers)) for n, (rows, numbers) in pairs.items()}
        return cls(torch.cat([part.z for part in parts]), own)

    @classmethod
    def read(cls, stored: Mapping[str, Tensor]) -> Kept:
        """Of a file, unit vectors."""
        names = [n.removesuffix(".rows") for n in stored if n.endswith(".rows")]
        own = {n: (stored[f"{n}.rows"], stored[f"{n}.numbers"]) for n in names}
        return cls(stored["directions"], own)

    def tensors(self) -> dict[str, Tensor]:
        """For a file."""
        rows = {f"{n}.rows": rows.int() for n, (rows, _) in self.own.items()}
        numbers = {f"{n}.numbers": numbers for n, (_, numbers) in self.own.items()}
        return {"directions": self.z, **rows, **numbers}

    def norms(self) -> Tensor:
        """``[n]``, in double precision."""
        parts = [self.z, *(numbers.flatten(1) for _, numbers in self.own.values())]
        return torch.stack([torch.linalg.vector_norm(x.double(), dim=1) for x in parts]).norm(dim=0)

    def times(self, factors: Tensor, dtype: torch.dtype) -> Kept:
        """Every example by its factor ``[n]``, then in this dtype."""
        own = {
            n: (rows, (numbers * factors.view(-1, 1, 1).to(numbers)).to(dtype))
            for n, (rows, numbers) in self.own.items()
        }
        return Kept((self.z * factors.unsqueeze(1).to(self.z)).to(dtype), own)

    def part(self, rows: slice) -> Kept:
        """Some of the examples."""
        own = {n: (where[rows], numbers[rows]) for n, (where, numbers) in self.own.items()}
        return Kept(self.z[rows], own)

    def products(self, asked: Kept) -> Tensor:
        """With those of the questions, in their dtype, ``[n, M]``; in half precision as stored."""
        dtype = asked.z.dtype
        if dtype == torch.float16:
            values = torch.stack([torch.mv(self.z, q) for q in asked.z], dim=1)
        else:
            some = self.z.split(max(1, CACHED // max(1, self.z.shape[1])))
            values = torch.cat([part.to(dtype) @ asked.z.mT for part in some])
        for name, (rows, numbers) in self.own.items():
            for j, (places, theirs) in enumerate(zip(*asked.own[name], strict=True)):
                where = torch.full((1 + int(max(rows.max(), places.max())),), len(places))
                where[places.long()] = torch.arange(len(places))
                held = torch.cat([theirs, theirs.new_zeros(1, theirs.shape[1])])[where[rows.long()]]
                pairs = numbers.to(dtype).flatten(1).unsqueeze(1), held.flatten(1).unsqueeze(2)
                values[:, j] += torch.bmm(*pairs).view(-1)
        return values


@dataclass(frozen=True)
class Index:
    """Projected gradients of every training example, in a folder; see :meth:`build`.

    Attributes:
        path: the folder.
        posterior: under which gradients are compared.
        error: how far its influence is from the exact one, on pairs of training examples.
        n_data: examples that are stored.
        numbers: kept of each.
    """

    path: Path
    posterior: Posterior = field(repr=False)
    error: ProjectionError
    n_data: int
    numbers: int
    _sheets: Mapping[str, Sheet] = field(repr=False)
    _task: Task | None = field(default=None, repr=False)

    @classmethod
    @torch.inference_mode(False)
    def build(
        cls,
        task: Task,
        posterior: Posterior,
        path: str | os.PathLike[str],
        *,
        rank: int = 16384,
        dtype: str = "float16",
        memory_budget: int | None = None,
        progress: bool | None = None,
    ) -> Index:
        """Visit the training data once, and keep ``rank`` numbers of every example.

        A build that was killed goes on where it was, file by file, and ends in the same bits; one
        of the same data (all are read, and compared by their sha256) that is there is opened.

        Args:
            task, posterior: as for :func:`blr_analysis.influence`; of structure "diag", "kron" or
                "gram".
            path: a folder, made if need be.
            rank: numbers per example, shared out among the layers; every matrix gets one at least.
            dtype: of the numbers on disk, "float16", "float32" or "float64"; with float16,
                ``rank=32768`` is 64 kB per example.
            memory_budget: as for :func:`blr_analysis.influence`.

        Under ``torchrun`` the ranks share the files, 256 examples each, in a folder that all see.

        Raises:
            PosteriorError: a posterior of another model, number of examples or structure.
            StorageError: the folder holds something else, or the index of another posterior, or
                other data or settings; or the disk is full.
            DataError, ModelError: as :func:`blr_analysis.influence`.

        Example:
            >>> import tempfile, torch, blr_analysis as blr
            >>> X, y = torch.randn(30, 2), torch.randint(3, (30,))
            >>> task = blr.Task(torch.nn.Linear(2, 3), (X, y))
            >>> q = blr.fit_laplace(task, structure="kron", prior_precision=1.0, progress=False)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     index = Index.build(task, q, folder + "/index", progress=False)
            ...     index.influence(task).shape, index.top(task, 2).helpful.shape
            (torch.Size([30, 30]), torch.Size([30, 2]))
        """
        q = fitted(task, posterior)
        if not isinstance(q.form, Spectral):
            raise PosteriorError(f"an index takes 'diag', 'kron' or 'gram', not {q.structure!r}")
        positive_int("rank", rank)
        one_of("dtype", dtype, tuple(DTYPES))
        place = Path(path_of(path)).expanduser()
        described = {
            "format": FORMAT,
            "version": VERSION,
            "posterior": fingerprint(q),
            "n_data": task.n_data,
            "rank": rank,
            "dtype": dtype,
            "likelihood": task.likelihood.recorded,
            "last_loss": _last_loss(task, q),
        }
        if ranks.first():
            described["data"] = task.examples.sha256(task.metadata)
        chunking = Chunking(memory_budget=memory_budget, progress=False)
        leads = ranks.first()
        shared(task, q.mean)  # refuses ranks that differ
        with held(place) if leads else nullcontext():
            if leads:
                place.mkdir(parents=True, exist_ok=True)
                _claim(place, described)
                _find_directions(task, q, place, rank, chunking)
            ranks.wait()
            sheets = {n: s.like(q) for n, s in _read_sheets(place).items()}
            numbers = sum(sheet.size for sheet in sheets.values())
            files = _files(task.n_data)
            missing = [n for n in files if not (place / n).is_file()]
            check_room(place / STEM, len(missing) * SHARD * numbers * DTYPES[dtype].itemsize)
            for k in ranks.share(torch.arange(len(missing))).tolist():
                file, rows = place / missing[k], files[missing[k]]
                _write_shard(task, q, sheets, file, rows, DTYPES[dtype], chunking)
            ranks.wait()
            if leads and not (place / CONFIG).is_file():
                q.save(place / POSTERIOR)
                _write_examples(place, task, list(files))
                with ranks.alone():
                    error = _measured(task, q, place, list(files), chunking)
                more = {"error": [error.relative_rms, error.spearman, error.pairs]}
                _write_json(place / CONFIG, described | more | {"numbers": numbers})
        ranks.wait()
        return cls.open(place, task=task)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, task: Task | None = None) -> Index:
        """The index in this folder; with the training ``task``, its answers can be refined.

        Raises:
            StorageError: nothing there, an index that is not complete or is damaged.
            PosteriorError: the task does not belong to its posterior.
        """
        place = Path(path_of(path)).expanduser()
        if not (place / CONFIG).is_file():
            begun = (place / PLAN).is_file()
            what = "an index that is not complete: build it again, and it goes on"
            raise StorageError(
                f"{str(place)!r} holds {what if begun else 'no index: Index.build writes one'}."
            )
        about = _read_json(place / CONFIG)
        absent = [n for n in _files(about["n_data"]) if not (place / n).is_file()]
        if absent:
            raise StorageError(f"{str(place)!r} lacks {absent[0]}: copy the whole folder.")
        q = Posterior.load(place / POSTERIOR)
        if fingerprint(q) != about["posterior"]:
            raise StorageError(f"{str(place)!r} holds a posterior that is not its index's.")
        if task is not None:
            q = fitted(task, q)
        error = ProjectionError(*about["error"])
        sheets = _read_sheets(place)
        return cls(place, q, error, about["n_data"], about["numbers"], sheets, task)

    @torch.inference_mode(False)
    def influence(
        self, test_task: Task, *, normalize: Normalize = False, progress: bool | None = None
    ) -> Tensor:
        """``[N, M]`` in nats: the estimate of :func:`blr_analysis.influence` on these examples.

        Args:
            normalize: as there; the lengths are exact.

        Raises:
            InputError: another ``normalize``.
            PosteriorError: a task of another model.
        """
        quantity_of(normalize)
        asked, _ = self._project(test_task, normalize, progress)
        return torch.cat([values for _, values in self._products(asked, normalize)])

    @torch.inference_mode(False)
    def top(
        self,
        test_task: Task,
        k: int = SHOWN,
        *,
        refine: int = 0,
        normalize: Normalize = False,
        progress: bool | None = None,
    ) -> Matches:
        """The k most helpful and most harmful of every question, without the matrix.

        Args:
            refine: recompute so many of either side exactly, and choose among them: one gradient
                of each; needs ``Index.open(path, task=task)``.
            normalize: as for :func:`blr_analysis.influence`: True or "cosine" finds what a question
                came from, where long texts otherwise lead every list.

        Raises:
            InputError: k above the number of examples, ``refine`` below k or without the task,
                another ``normalize``.
            PosteriorError: a task of another model.
        """
        check_k(k, self.n_data)
        if refine and (refine < k or self._task is None):
            raise InputError("refine= is k or more, of an index opened with task=")
        quantity = quantity_of(normalize)
        asked, lengths = self._project(test_task, normalize, progress)
        most = min(max(k, refine), self.n_data)
        (high, helpful), (low, harmful) = self._best(asked, most, normalize)
        if refine:
            high, low = (
                self._exact(test_task, names) / lengths.to(high) / self._own(normalize)[names]
                for names in (helpful, harmful)
            )
        sides = []
        for values, names, largest in ((high, helpful, True), (low, harmful, False)):
            chosen, places = values.topk(k, dim=0, largest=largest)
            sides += [names.gather(0, places).mT.contiguous(), chosen.mT.contiguous()]
        computed = ("index", "self_influence")
        metadata = {n: column for n, column in self.examples.items() if n not in computed}
        return Matches(*sides, metadata=metadata, quantity=quantity)

    @cached_property
    def self_influence(self) -> Tensor:
        """g_iᵀ Σ g_i of every stored example, exact, ``[N]``."""
        return torch.tensor(self.examples["self_influence"], dtype=torch.float64)

    @cached_property
    def examples(self) -> dict[str, list[Any]]:
        """The table of the examples by column: index, self_influence, and the task's metadata."""
        import pyarrow.parquet as parquet

        return parquet.read_table(self.path / EXAMPLES).to_pydict()

    def _project(
        self, task: Task, normalize: Normalize, progress: bool | None
    ) -> tuple[Kept, Tensor]:
        """What is kept of the questions, divided by the lengths ``[M]`` that they count with."""
        instance("test_task", task, Task, "a blr_analysis.Task with the questions")
        q = self.posterior.on(task, same_data=False)
        if self._task is not None:
            task = task.with_model(self._task)
            q = self.posterior.on(task, same_data=False)
        sheets = {n: s.like(q) for n, s in self._sheets.items()}
        parts = list(_projected(task, q, sheets, Chunking(progress=progress), None))
        asked = Kept.joined([kept for kept, _ in parts])
        if normalize != "cosine":
            return asked, torch.ones(len(asked.z), dtype=torch.float64)
        lengths = rooted(torch.cat([squares for _, squares in parts]))
        return asked.times(1 / lengths, asked.z.dtype), lengths

    def _own(self, normalize: Normalize) -> Tensor:
        """What the stored examples are divided by, ``[N]``."""
        return rooted(self.self_influence) if normalize else torch.ones(self.n_data)

    def _products(
        self, asked: Kept, normalize: Normalize, *, rough: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and their values, file by file, read by memory map; ``rough``: in half precision,
        a file on each of torch's threads."""
        dtype, sizes = asked.z.dtype, asked.norms().clamp_min(torch.finfo(torch.float64).tiny)
        units = asked.times(1 / sizes, torch.float16 if rough else dtype)
        files, threads = _files(self.n_data), torch.get_num_threads()
        own = self._own(normalize)

        def values_of(name: str) -> Tensor:
            stored = load_file(self.path / name)
            values = Kept.read(stored).products(units).to(dtype)
            lengths = stored["norms"] / own[files[name]]
            return values * lengths.to(dtype).unsqueeze(1) * sizes.to(dtype)

        values: Iterable[Tensor] = map(values_of, files)
        if rough and threads > 1:  # a product of one file is too small for them all
            alone: dict[str, Any] = {"initializer": torch.set_num_threads, "initargs": (1,)}
            try:
                with ThreadPoolExecutor(threads, **alone) as pool:
                    values = list(pool.map(values_of, files))
            finally:
                torch.set_num_threads(threads)
        yield from zip(files.values(), values, strict=True)

    def _best(self, asked: Kept, k: int, normalize: Normalize) -> list[tuple[Tensor, Tensor]]:
        """Values and rows ``[k, M]`` of the largest, then of the smallest. Of a few questions they
        are looked for in half precision, with some to spare, whose values are then computed."""
        first = load_file(self.path / next(iter(_files(self.n_data))))["directions"]
        rough = first.dtype == torch.float16 and len(asked.z) <= FEW
        best = Best(min(k + SPARE if rough else k, self.n_data))
        for rows, values in self._products(asked, normalize, rough=rough):
            best.add(rows, values)
        if not rough:
            return best.sides()
        sides = []
        for (_, names), largest in zip(best.sides(), (True, False), strict=True):
            union, places = names.unique(return_inverse=True)
            stored = _stored(self.path, self.n_data, union)
            exact = stored.products(asked) / self._own(normalize)[union].unsqueeze(1)
            values, chosen = exact.gather(0, places.view_as(names)).topk(k, dim=0, largest=largest)
            sides.append((values, names.gather(0, chosen)))
        return sides

    def _exact(self, test_task: Task, names: Tensor) -> Tensor:
        """The exact influence of these candidates ``[r, M]`` on each question."""
        assert self._task is not None
        union, places = names.unique(return_inverse=True)
        where = test_task.with_model(self._task)
        found = pieces(self._task, self.posterior, where, indices=union, progress=False)
        exact = torch.cat([piece.values.cpu() for piece in found])
        return exact.gather(0, places.view_as(names))


def build_cost(task: Task, fit: Sequence[Stage], rank: int) -> Forecast:
    """What :meth:`Index.build` costs after the sweeps of ``fit``, if there are any."""
    n, probe = task.n_data, sum(min(task.n_data, count) for count in PROBE)
    stages = [
        *fit,
        Stage("directions", 2 * min(n, SAMPLE), rotated=True),  # how large, and which
        Stage("index", n, rotated=True),
        Stage("error", probe, rotated=True),
    ]
    parameters = task.parameters().values()
    each = min(rank, sum(p.numel() for p in parameters)) * torch.float16.itemsize
    posterior = 2 * sum(p.nbytes for p in parameters)
    return Forecast.of(task, stages, disk=n * each + posterior)


def fingerprint(q: Posterior) -> str:
    """The sha256 of a posterior's numbers, names and n_data."""
    digest = hashlib.sha256(f"{q.structure} {q.n_data}".encode())
    for name, tensor in {**q.mean, **{f"{n} S": t for n, t in q.form.tensors().items()}}.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _last_loss(task: Task, q: Posterior) -> float:
    """What tells these training data from others: the loss of the last example."""
    last = torch.tensor([task.n_data - 1])
    with torch.no_grad(), task.evaluation():
        outputs, targets = task.run(task.fetch(last), q.mean, last)
    return float(task.likelihood.at(last).nll(outputs, targets))


def _files(n_data: int) -> dict[str, Tensor]:
    """The examples of each file, by its name."""
    parts = torch.arange(n_data).split(SHARD)
    return {shard_name(STEM, k, len(parts)): rows for k, rows in enumerate(parts, start=1)}


def _stored(place: Path, n_data: int, rows: Tensor) -> Kept:
    """What is kept of these examples, in double precision."""
    files, each = [place / name for name in _files(n_data)], []
    for row in rows.tolist():
        stored = load_file(files[row // SHARD])
        one = slice(row % SHARD, row % SHARD + 1)
        kept = Kept.read(stored).part(one).times(torch.ones(1), torch.float64)
        each.append(kept.times(stored["norms"][one], torch.float64))
    return Kept.joined(each)


def _claim(place: Path, described: dict[str, Any]) -> None:
    """Raise :class:`StorageError` unless the folder is empty or holds this very index."""
    if (place / PLAN).is_file():
        before = _read_json(place / PLAN)
        differs = [n for n, value in described.items() if before.get(n) != value]
        if differs:
            if differs == ["data"] and "data" not in before:
                what = "an index of an earlier version, which does not say of what data"
            else:
                what = f"an index with another {', '.join(differs)}"
            raise StorageError(f"{str(place)!r} holds {what}: name a new folder.")
        return
    foreign = sorted(p.name for p in place.iterdir())
    if foreign:
        raise StorageError(f"{str(place)!r} holds {foreign[0]}, no index: name a new folder.")
    _write_json(place / PLAN, described)


def _roots(q: Posterior) -> Mapping[str, Tensor]:
    """Σ^½ in the posterior's basis, by name."""
    assert isinstance(q.form, Spectral)
    return {name: s.rsqrt() for name, s in q.form.values.items()}


def _scaled(
    q: Posterior, terms: list[Term], roots: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Σ^½ G of every matrix in the posterior's basis, ``[B, g, O, I]``, layer by layer."""
    for term, basis in q.form.paired(terms):
        turned = term if basis is None else term.rotated(basis)
        for name, gradients in turned.jacobian().items():
            scaled = gradients[:, 0].mul_(roots[name])  # nobody else reads these
            if basis is None:
                rows = scaled.shape[1] if scaled.ndim > 1 else 1
                scaled = scaled.reshape(len(scaled), 1, rows, -1)
            yield name, scaled


def _parts(q: Posterior, terms: list[Term]) -> Iterator[list[Term]]:
    """As many examples at once as have small gradients of a layer; one, where they are large."""
    assert isinstance(q.form, Spectral)
    largest = max(s.numel() for s in q.form.values.values())
    for some in slices(terms[0].n_examples, TOGETHER // largest):
        yield [term.part(some) for term in terms]


def _projected(
    task: Task,
    q: Posterior,
    sheets: Mapping[str, Sheet],
    chunking: Chunking,
    indices: Tensor | None,
) -> Iterator[tuple[Kept, Tensor]]:
    """What is kept and the exact ‖Σ^½ g‖² ``[B]`` of each chunk, on the CPU."""
    roots, like = _roots(q), next(iter(q.mean.values()))
    for chunk in chunks(task, q.mean, chunking, columns=1, indices=indices, label="index"):
        parts, squares = [], []
        for terms in _parts(q, loss_terms(task, chunk)):
            size = terms[0].n_examples
            found = {n: s.left.new_zeros(size, s.size) for n, s in sheets.items() if not s.own}
            own = {}
            for name, s in ((n, s) for n, s in sheets.items() if s.own):
                empty = s.right.new_zeros(size, s.own, s.right.shape[-1])
                own[name] = torch.arange(s.own).repeat(size, 1), empty
            square = torch.zeros(size, dtype=torch.float64)
            for name, w in _scaled(q, terms, roots):
                square += torch.linalg.vector_norm(w.flatten(1), dim=1).double().square().cpu()
                sheet = sheets[name]
                if sheet.own:
                    own[name] = sheet.largest(w)
                else:
                    found[name] = (sheet.left.mT @ (w @ sheet.right)).flatten(1)
            z = torch.cat([like.new_empty(size, 0), *found.values()], dim=1).cpu()
            parts.append(Kept(z, {n: (r.cpu(), x.cpu()) for n, (r, x) in own.items()}))
            squares.append(square)
        kept = Kept.joined(parts)
        check_finite(kept.norms(), "projected gradient")
        yield kept, torch.cat(squares)


def _find_directions(task: Task, q: Posterior, place: Path, rank: int, chunking: Chunking) -> None:
    """Write the directions, found in some of the examples, where no run before did."""
    if not (place / DIRECTIONS).is_file():
        found = _find_sheets(task, q, rank, chunking)
        tensors = {f"{n}.left": s.left for n, s in found.items()}
        tensors |= {f"{n}.right": s.right for n, s in found.items()}
        tensors |= {f"{n}.own": torch.tensor(s.own) for n, s in found.items()}
        with drafted(place / DIRECTIONS) as draft:
            save_file(tensors, draft, {"format": "pt", "order": json.dumps(list(found))})


def _read_sheets(place: Path) -> dict[str, Sheet]:
    stored = load_file(place / DIRECTIONS)
    names = sorted(n.removesuffix(".left") for n in stored if n.endswith(".left"))
    return {
        n: Sheet(stored[f"{n}.left"], stored[f"{n}.right"], int(stored[f"{n}.own"])) for n in names
    }


def _find_sheets(task: Task, q: Posterior, rank: int, chunking: Chunking) -> dict[str, Sheet]:
    """The directions of some of the examples."""
    generator = torch.Generator().manual_seed(0)
    some = torch.randperm(task.n_data, generator=generator)[:SAMPLE].sort().values
    roots = _roots(q)

    def sweep() -> Iterator[tuple[str, Tensor]]:
        for chunk in chunks(task, q.mean, chunking, columns=1, indices=some):
            for terms in _parts(q, loss_terms(task, chunk)):
                for name, each in _scaled(q, terms, roots):
                    for w in each:
                        yield name, w

    words = vocabulary_of(task, dict(q.mean))
    return leading(sweep, rank, WIDER * math.sqrt(rank / len(roots)), generator, words)


def leading(
    sweep: Callable[[], Iterator[tuple[str, Tensor]]],
    rank: int,
    wide: float,
    generator: torch.Generator,
    words: int = 0,
) -> dict[str, Sheet]:
    """Leading eigenvectors of Σ W Wᵀ and Σ Wᵀ W over the matrices W ``[g, O, I]`` of every name.

    They are found within a random range that is ``wide`` (Halko et al., 2011); the numbers go where
    they add most to Σ ‖Lᵀ W R‖². Of matrices with a row for each of ``words``, rows of each
    example's own.
    """
    energy: dict[str, float] = {}
    sums: dict[tuple[str, int], Tensor] = {}
    moments: dict[tuple[str, int], Tensor] = {}
    tables: dict[str, Tensor] = {}  # Σ of the squares of the largest row, the next, …
    for name, w in sweep():
        energy[name] = energy.get(name, 0.0) + float(w.square().sum())
        if words and w.shape[:2] == (1, words):
            sizes = w[0].square().sum(-1).sort(descending=True).values
            tables[name] = tables.get(name, 0) + sizes
            moments[name, 1] = moments.get((name, 1), 0) + w.mT @ w
            continue
        for side, x in enumerate((w, w.mT)):
            width = min(x.shape[1], math.ceil(max(wide, rank / (x.shape[0] * x.shape[2]))))
            drawn = torch.randn(len(x), x.shape[2], width, generator=generator).to(x)
            sums[name, side] = sums.get((name, side), x.new_zeros(())) + x @ drawn
    ranges = {key: torch.linalg.qr(y)[0] for key, y in sums.items()}
    moments |= dict.fromkeys(ranges, torch.zeros(()))
    for name, w in sweep():
        for side, x in enumerate((w, w.mT) if name not in tables else ()):
            inside = ranges[name, side].mT @ x
            moments[name, side] = moments[name, side].to(x) + inside @ inside.mT
    shares: dict[tuple[str, int], Tensor] = {}
    for key, moment in moments.items():
        values, vectors = torch.linalg.eigh(moment)
        ranges[key] = ranges[key] @ vectors.flip(-1) if key in ranges else vectors.flip(-1)
        shares[key] = values.flip(-1).sum(0).clamp_min(0).cumsum(0) / (energy[key[0]] or 1.0)
    for name, sizes in tables.items():
        most = max(LONGEST, rank // len(shares[name, 1]))
        shares[name, 0] = sizes.cumsum(0)[:most] / (energy[name] or 1.0)
    grids = {n: energy[n] * torch.outer(shares[n, 0], shares[n, 1]) for n in energy}
    groups = {n: len(ranges[n, 1]) for n in energy}
    return {
        n: Sheet(ranges[n, 1].new_empty(1, words, 0), ranges[n, 1][..., :b].contiguous(), a)
        if n in tables
        else Sheet(ranges[n, 0][..., :a].contiguous(), ranges[n, 1][..., :b].contiguous())
        for n, (a, b) in shared_out(grids, groups, rank, tables).items()
    }


def shared_out(
    grids: Mapping[str, Tensor],
    groups: Mapping[str, int],
    rank: int,
    tables: Container[str] = (),
) -> dict[str, tuple[int, int]]:
    """For each name the a and b that maximise Σ grid[a − 1, b − 1] with Σ g · a · b ≤ rank, by the
    price of a number; 1 and 1 at least. Of ``tables`` a row takes b + 2: it says which it is.

    >>> grids = {"steep": torch.tensor([[9.0], [9.1]]), "flat": torch.tensor([[2.0, 4.0]])}
    >>> shared_out(grids, {"steep": 1, "flat": 1}, 3)
    {'steep': (1, 1), 'flat': (1, 2)}
    """

    costs = {}
    for n, grid in grids.items():
        a, b = (torch.arange(1.0, k + 1) for k in grid.shape)
        costs[n] = groups[n] * torch.outer(a, b + 2.0 * (n in tables)).to(grid)

    def bought(price: float) -> dict[str, tuple[int, int]]:
        best = {n: int((grid - price * costs[n]).argmax()) for n, grid in grids.items()}
        return {n: (k // grids[n].shape[1] + 1, k % grids[n].shape[1] + 1) for n, k in best.items()}

    if sum(float(cost[-1, -1]) for cost in costs.values()) <= rank:
        return {n: (grid.shape[0], grid.shape[1]) for n, grid in grids.items()}
    low, high = 0.0, max(float(grid.max()) for grid in grids.values()) or 1.0
    chosen = bought(low)
    for _ in range(PRICES):
        price = (low + high) / 2 if not low else math.sqrt(low * high)
        tried = bought(price)
        if sum(float(costs[n][a - 1, b - 1]) for n, (a, b) in tried.items()) > rank:
            low = price
        else:
            high, chosen = price, tried
    return chosen


def _write_shard(
    task: Task,
    q: Posterior,
    sheets: Mapping[str, Sheet],
    file: Path,
    rows: Tensor,
    dtype: torch.dtype,
    chunking: Chunking,
) -> None:
    """The unit vectors of these examples, their lengths, and their exact self-influences."""
    parts, squares = zip(*_projected(task, q, sheets, chunking, rows), strict=True)
    kept = Kept.joined(parts)
    norms = kept.norms()
    units = kept.times(1 / norms.clamp_min(torch.finfo(torch.float64).tiny), dtype)
    stored = {**units.tensors(), "norms": norms, "self_influence": torch.cat(squares)}
    with drafted(file) as draft:
        save_file(stored, draft, {"format": "pt"})


def _write_examples(place: Path, task: Task, files: list[str]) -> None:
    """The Parquet table."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    squares = torch.cat([load_file(place / name)["self_influence"] for name in files])
    columns = {"index": list(range(task.n_data)), "self_influence": squares.tolist()}
    table = pa.table({**columns, **task.metadata})
    with drafted(place / EXAMPLES) as draft:
        parquet.write_table(table, draft)


def _measured(
    task: Task, q: Posterior, place: Path, files: list[str], chunking: Chunking
) -> ProjectionError:
    """What is stored against exact influence, on random pairs of training examples."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = (
        torch.randperm(task.n_data, generator=generator)[:most].sort().values for most in PROBE
    )
    one, two = (_stored(place, task.n_data, names) for names in (rows, columns))
    budget = chunking.memory_budget
    found = pieces(
        task, q, task, indices=rows, test_indices=columns, memory_budget=budget, progress=False
    )
    exact = torch.cat([piece.values.cpu() for piece in found])
    return ProjectionError.between(one.products(two), exact)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    with drafted(file) as draft:
        draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if content.get("format") != FORMAT:
        raise StorageError(f"{str(file)!r} is no index of this package.")
    if content.get("version") != VERSION:
        raise StorageError(f"{str(file)!r} is of another version than {VERSION}: build it again.")
    return content
