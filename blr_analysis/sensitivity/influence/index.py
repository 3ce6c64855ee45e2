"""Gradients of the training data on disk, small enough to be searched: no pass for a question.

For gradients g and posterior covariance Σ, w = Σ^½ g in the posterior's own basis, and the
influence of i on j is w_iᵀ w_j. What is kept of each w: ``compressed.py``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import chunks
from blr_analysis.backprop.matrices import Basis
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.record import shared
from blr_analysis.backprop.terms import Term, slices
from blr_analysis.checks import instance, one_of, path_of, positive_int
from blr_analysis.errors import InputError, PosteriorError, StorageError
from blr_analysis.files import Folder
from blr_analysis.files.checksums import checksum_of
from blr_analysis.files.headers import CHECKSUM, FILES, damaged, read_json, record_text
from blr_analysis.files.placing import check_free, check_room, drafted, held
from blr_analysis.files.shards import save_file, shard_name
from blr_analysis.files.source import bytes_of
from blr_analysis.files.storage import file_checksum
from blr_analysis.posterior import Forecast
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.recognition import differs
from blr_analysis.posterior.recognition import fingerprint as fingerprint_of
from blr_analysis.posterior.structures.contract import Spectral
from blr_analysis.sensitivity.corrections import check_finite
from blr_analysis.sensitivity.door import checked_posterior
from blr_analysis.sensitivity.influence.blocks import (
    Cotangent,
    loss_gradient,
    loss_terms,
    matrix_of,
    pieces,
)
from blr_analysis.sensitivity.influence.compressed import (
    BLOCK,
    Compressed,
    Compression,
    Kept,
    Roots,
    best_blocks,
    block_counts,
    block_squares,
    whitened,
)
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
from blr_analysis.sensitivity.influence.search import best
from blr_analysis.sensitivity.run import mean_errors
from blr_analysis.task import Task

FORMAT, VERSION = "blr_analysis.index", 7
CONFIG, PLAN = "index_config.json", "index_plan.json"
NAMES = {"n_data": "number of examples", "last_loss": "model"}  # of what a plan says
EXAMPLES, POSTERIOR, STEM = "examples.parquet", "posterior.safetensors", "gradients"
DTYPES = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
TOGETHER = 2**22  # numbers of what is kept that are made at once
LARGE = 2**20  # parameters, from which on gradients are turned in bfloat16
PROBE = (64, 16)  # pairs of training examples whose exact influence measures the error
SHARD = 256  # examples per file: what a killed run loses at most
FEW = 8  # questions that are looked for together
MORE = 8  # times as many blocks of a question as of what is stored
TRIED = 16  # examples whose blocks tell how many are kept

Unread = dict[str, dict[str, str]]  # checksums of tensors that nobody read yet, by file and name


@dataclass(frozen=True)
class Index:
    """Projected gradients of every training example, in a folder; see :meth:`build`.

    Attributes:
        path: the folder.
        posterior: under which gradients are compared.
        error: how far its influence is from the exact one, on pairs of training examples.
        n_data: examples that are stored.
        numbers: kept of each.
        signs: whether they are signs, of random sums; else the gradient itself.
    """

    path: Path
    posterior: Posterior = field(repr=False)
    error: ProjectionError
    n_data: int
    numbers: int
    signs: bool
    _sums: int = field(repr=False)
    _blocks: int = field(repr=False)
    _files: Mapping[str, str] = field(default_factory=dict, repr=False)
    _unread: Unread = field(default_factory=dict, repr=False)
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
    ) -> Index:
        """Visit the training data once, and keep of every example as much as ``rank`` numbers take.

        A build that was killed goes on where it was, file by file, and ends in the same bits; one
        of the same data (all are read, and compared by their sha256) that is there is opened.

        Args:
            task, posterior: as for :func:`blr_analysis.influence`; of structure "diag", "kron" or
                "gram". Of a run the checkpoint nearest its half is taken, one for all.
            path: a folder, made if need be.
            rank: room per example, in numbers of this dtype. Models with no more parameters are
                kept whole; of others the longest blocks, as much of the room as 16 examples say
                (a quarter where words are trained, little or nothing of an adapter), and of the
                rest signs of random sums, 16 in the place of a float16.
            dtype: "float16", "float32" or "float64"; with float16 ``rank=32768`` is 64 kB per
                example.

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
            >>> q = blr.fit_laplace(task, structure="kron", prior_precision=1.0)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     index = Index.build(task, q, folder + "/index")
            ...     index.influence(task).shape, index.top(task, 2).helpful.shape
            (torch.Size([30, 30]), torch.Size([30, 2]))
        """
        q = checked_posterior(task, posterior)
        q = q.earlier[-1] if q.earlier else q
        task = task.holding(q.buffers).quiet
        if not isinstance(q.form, Spectral):
            raise PosteriorError(f"an index takes 'diag', 'kron' or 'gram', not {q.structure!r}")
        positive_int("rank", rank)
        one_of("dtype", dtype, tuple(DTYPES))
        place = Path(path_of(path)).expanduser()
        leads = ranks.first()
        described: dict[str, Any] = {"posterior": fingerprint(q)}
        described |= _described(task, rank, dtype, q.mean, data=leads)
        shared(task, q.mean)  # refuses ranks that differ
        own = mean_errors(task, q)
        compression, room = Compression.of(q, rank, DTYPES[dtype]), DTYPES[dtype].itemsize * rank
        with held(place) if leads else nullcontext(), _claimed(place, described, leads):
            ranks.wait()
            files = _files(task.n_data)
            missing = [n for n in files if not (place / n).is_file()]
            check_room(place / STEM, len(missing) * SHARD * compression.nbytes(DTYPES[dtype]))
            if leads and "half" not in (plan := _read_json(place / PLAN)):
                _write_json(place / PLAN, plan | {"half": compression.signs and multiplies_half(q)})
            ranks.wait()
            begun = _read_json(place / PLAN)  # on any machine as it was begun
            roots = compression.roots(q) if missing else {}
            how: dict[str, Any] = {"cotangent": own, "half": begun["half"]}
            if "blocks" not in begun:
                begun["blocks"] = _blocks(task, q, compression, roots, room, **how)
                if leads:
                    _write_json(place / PLAN, begun)
            compression = Compression.of(q, rank, DTYPES[dtype], begun["blocks"])
            whole = len(missing) // ranks.count() * ranks.count()
            for k, name in enumerate(missing):  # in turns; chunk by chunk where too few are left
                divided = k >= whole
                if divided or k % ranks.count() == ranks.rank():
                    each = _each(task, q, compression, roots, files[name], divided=divided, **how)
                    kept = _joined(_stored(compression, each, DTYPES[dtype]), files[name], divided)
                    if leads or not divided:
                        _write_shard(kept, place / name, files[name])
            del roots
            ranks.wait()
            if (place / CONFIG).is_file():
                return cls._opened(place, task, q)
            error = _measured(task, q, compression, place, own)
            if leads:
                q.save(place / POSTERIOR)
                _write_examples(place, task, list(files))
                sizes = {"numbers": compression.size, "signs": compression.signs}
                sizes |= {n: begun[n] for n in ("half", "blocks")} | {"sums": compression.sums}
                more = {"error": [error.relative_rms, error.spearman, error.pairs]}
                names = [*files, POSTERIOR, EXAMPLES]
                checksums = {name: file_checksum(place / name) for name in names}
                _write_json(place / CONFIG, described | more | sizes, checksums)
        ranks.wait()
        return cls._opened(place, task, q)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, task: Task | None = None) -> Index:
        """The index in this folder; with the training ``task``, its answers can be refined.

        Raises:
            StorageError: nothing there, an index that is not complete or is damaged.
            PosteriorError: the task does not belong to its posterior, or has other data (all are
                read, and compared by their sha256) or other metadata.
        """
        opened = cls._opened(Path(path_of(path)).expanduser(), task)
        if task is not None:
            data = _read_json(opened.path / CONFIG).get("data")
            if data != task.examples.sha256(task.metadata):
                raise PosteriorError("the index is of other data or metadata than the task's.")
        return opened

    @classmethod
    def _opened(cls, place: Path, task: Task | None, built: Posterior | None = None) -> Index:
        """``built``: the posterior that it was just built of, which knows the task."""
        if not (place / CONFIG).is_file():
            begun = (place / PLAN).is_file()
            what = "an index that is not complete: build it again, and it goes on"
            raise StorageError(f"{str(place)!r} holds {what if begun else 'no index: build one'}.")
        about = _read_json(place / CONFIG)
        files = about[FILES]
        absent = [n for n in _files(about["n_data"]) if not (place / n).is_file()]
        if absent:
            raise StorageError(f"{str(place)!r} lacks {absent[0]}: copy the whole folder.")
        unread = {}
        for name, rows in _files(about["n_data"]).items():
            unread[name] = _check_shard(place / name, rows, files.get(name))
        q = Posterior.load(place / POSTERIOR)
        if fingerprint(q) != about["posterior"]:
            raise StorageError(f"{str(place)!r} holds a posterior that is not its index's.")
        if built is not None:
            q = built
        elif task is not None:
            if q.fingerprint is not None:
                complaint = differs(q.fingerprint, fingerprint_of(task, q.on(task).mean))
                if complaint:
                    raise PosteriorError(complaint)
            q = checked_posterior(task, q)
        error = ProjectionError(*about["error"])
        kept = [about[n] for n in ("n_data", "numbers", "signs", "sums", "blocks")]
        return cls(place, q, error, *kept, _files=files, _unread=unread, _task=task)

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
        asked, _ = self._project(test_task, normalize)
        each = self._read(lambda own: self._compression.values(own, asked), normalize)
        return torch.cat([values for _, values in each]) * self._scale(normalize)

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
            refine: recompute so many of either side exactly, and choose among them: one gradient
                of each; needs ``Index.open(path, task=task)``.
            normalize: as for :func:`blr_analysis.influence`: True or "cosine" finds what a question
                came from, where long texts otherwise lead every list.
            harmful: False leaves these out, ``[M, 0]``: of large indexes that takes a fraction of
                the time, where nothing is as far below 0 as the best are above it.

        Raises:
            InputError: k above the number of examples, ``refine`` below k or without the task,
                another ``normalize``.
            PosteriorError: a task of another model.
        """
        check_k(k, self.n_data)
        if refine and (refine < k or self._task is None):
            raise InputError("refine= is k or more, of an index opened with task=")
        quantity = quantity_of(normalize)
        asked, lengths = self._project(test_task, normalize)
        most = min(max(k, refine), self.n_data)
        sides: list[Tensor] = []
        for sign, (values, names) in zip(
            (1, -1), self._best(asked, most, normalize, harmful=harmful), strict=False
        ):
            if refine:
                values = self._exact(test_task, names) / lengths.to(values)
                values = values / self._own(normalize)[names]
            chosen, places = values.topk(k, dim=0, largest=sign > 0)
            chosen = chosen * self._scale(normalize)
            sides += [names.gather(0, places).mT.contiguous(), chosen.mT.contiguous()]
        if not harmful:
            sides += [side[:, :0] for side in sides]
        computed = ("index", "self_influence")
        metadata = {n: column for n, column in self.examples.items() if n not in computed}
        return Matches(*sides, metadata=metadata, quantity=quantity, note=self.posterior.note)

    def _scale(self, normalize: Normalize) -> float:
        """τ, but of what is normalized."""
        return 1.0 if normalize else self.posterior.temperature

    @cached_property
    def self_influence(self) -> Tensor:
        """g_iᵀ Σ g_i of every stored example, ``[N]``: exact, but for some 1e-3 where signs are
        kept and the device multiplies bfloat16 faster than float32."""
        return torch.tensor(self.examples["self_influence"], dtype=torch.float64)

    @cached_property
    def examples(self) -> dict[str, list[Any]]:
        """The table of the examples by column: index, self_influence, and the task's metadata."""
        import pyarrow.parquet as parquet

        file = self.path / EXAMPLES
        if file_checksum(file) != self._files.get(EXAMPLES):
            raise StorageError(f"{damaged(file)[:-1]}, or delete it and build again.")
        try:
            return parquet.read_table(file).to_pydict()
        except (OSError, ValueError) as error:  # ArrowInvalid is one
            raise StorageError(f"{str(file)!r} is damaged: delete it and build again.") from error

    def _project(self, task: Task, normalize: Normalize) -> tuple[Compressed, Tensor]:
        """The questions, divided by the lengths ``[M]`` that they count with."""
        instance("test_task", task, Task, "a blr_analysis.Task with the questions")
        q = self.posterior.on(task, same_data=False)
        if self._task is not None:
            task = task.with_model(self._task)
            q = self.posterior.on(task, same_data=False)
        compression, task = self._compression, q.judging(task)
        asked = _projected(task, q, compression, compression.roots(q), more=MORE)
        ones = torch.ones_like(asked.squares)
        lengths = rooted(asked.squares) if normalize == "cosine" else ones
        return asked.over(lengths), lengths

    @property
    def _compression(self) -> Compression:
        return Compression(self.numbers, self.signs, self._sums, self._blocks)

    def _own(self, normalize: Normalize) -> Tensor:
        """What the stored examples are divided by, ``[N]``."""
        return rooted(self.self_influence) if normalize else torch.ones(self.n_data)

    def _read(
        self,
        compute: Callable[[Kept], Tensor],
        normalize: Normalize,
        rows: Tensor | None = None,
        *,
        threads: int = 1,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and what is computed from what is kept of them, file by file."""
        own = self._own(normalize)
        how = {"threads": threads, "unread": self._unread}
        for chosen, values in _read(self.path, self.n_data, compute, rows, **how):
            lengths = own[chosen].to(values)
            yield chosen, values / lengths.view(-1, *[1] * (values.ndim - 1))

    def _best(
        self, asked: Compressed, k: int, normalize: Normalize, *, harmful: bool = True
    ) -> list[tuple[Tensor, Tensor]]:
        """Values and rows ``[k, M]`` of the largest, then, if asked for, of the smallest."""
        signs, threads = [1, -1] if harmful else [1], torch.get_num_threads()

        def read(compute: Callable[[Kept], Tensor], rows: Tensor | None) -> Tensor:
            found = self._read(compute, normalize, rows, threads=threads)
            return torch.cat([values for _, values in found])

        if self.signs and hasattr(np, "bitwise_count"):  # of NumPy 2
            blocks = (asked.part(some) for some in slices(len(asked.z), FEW))
            each = [best(read, self._compression, b, self.n_data, k, signs) for b in blocks]
            parts = [list(zip(*side, strict=True)) for side in zip(*each, strict=True)]
            return [(torch.cat(values, 1), torch.cat(names, 1)) for values, names in parts]
        kept = Best(min(k, self.n_data))
        for rows, values in self._read(lambda own: self._compression.values(own, asked), normalize):
            kept.add(rows, values)
        return kept.sides()[: len(signs)]

    def _exact(self, test_task: Task, names: Tensor) -> Tensor:
        """The exact influence of these candidates ``[r, M]`` on each question."""
        assert self._task is not None
        union, places = names.unique(return_inverse=True)
        where = test_task.with_model(self._task)
        exact = pieces(
            self._task.quiet,
            self.posterior,
            where,
            train_cotangent=mean_errors(self._task, self.posterior),
            indices=union,
        )
        return matrix_of(exact).gather(0, places.view_as(names))


def build_cost(task: Task, fit: int, rank: int, *, structure: str, saved: int = 0) -> Forecast:
    """What :meth:`Index.build` takes beside the ``fit`` examples of the posterior; ``structure`` of
    one that is fitted, or ``saved``, the bytes of one that is there."""
    n = task.n_data
    columns = min(PROBE[1], n // 2)
    pairs = min(PROBE[0], n - columns) + 2 * (columns or n)  # exactly, and the questions' sums
    size = sum(p.numel() for p in task.parameters().values())
    chooses = rank < size and block_counts(size // BLOCK, rank * torch.float16.itemsize)
    examples = fit + (min(TRIED, n) if chooses else 0) + n + pairs
    each = min(rank, size) * torch.float16.itemsize
    posterior = saved or 2 * sum(p.nbytes for p in task.parameters().values())
    return Forecast.of(task, examples, disk=n * each + posterior, structure=structure)


def fingerprint(q: Posterior) -> str:
    """The sha256 of a posterior's numbers, names and n_data."""
    digest = hashlib.sha256(f"{q.structure} {q.n_data}".encode())
    for name, tensor in {**q.mean, **{f"{n} S": t for n, t in q.form.tensors().items()}}.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_place(path: Path, task: Task, rank: int, *, at_model: bool) -> None:
    """Raise :class:`StorageError` where :meth:`Index.build` could not write, before a posterior is
    fitted; ``at_model``: at the weights that the model has."""
    if (path / PLAN).is_file():
        mean = task.parameters() if at_model else None
        _check_claim(path, _described(task, rank, "float16", mean, data=ranks.first()))
    else:
        _check_claim(path, {})


def _described(
    task: Task, rank: int, dtype: str, mean: Mapping[str, Tensor] | None, *, data: bool
) -> dict[str, Any]:
    """What tells an index from others, without its posterior."""
    described = {
        "format": FORMAT,
        "version": VERSION,
        "n_data": task.n_data,
        "rank": rank,
        "dtype": dtype,
        "likelihood": task.likelihood.recorded,
    }
    if data:
        described["data"] = task.examples.sha256(task.metadata)
    if mean is not None:  # the loss of the last example, which tells models apart
        last = torch.tensor([task.n_data - 1])
        with torch.no_grad(), task.evaluation():
            outputs, targets = task.run(task.fetch(last), dict(mean), last)
        described["last_loss"] = float(task.likelihood.at(last).nll(outputs, targets))
    return described


def _files(n_data: int) -> dict[str, Tensor]:
    """The examples of each file, by its name."""
    parts = torch.arange(n_data).split(SHARD)
    return {shard_name(STEM, k, len(parts)): rows for k, rows in enumerate(parts, start=1)}


def _read(
    place: Path,
    n_data: int,
    compute: Callable[[Kept], Tensor],
    rows: Tensor | None = None,
    *,
    threads: int = 1,
    unread: Unread | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows, all or these, which rise, and what is computed from what is kept of them: file by file,
    read by memory map, or a file on each of so many threads.

    A tensor of which most is used is compared with its checksum, if it is ``unread``.
    """
    parts = [(name, of_file, of_file) for name, of_file in _files(n_data).items()]
    if rows is not None:
        counts = torch.bincount(rows // SHARD, minlength=len(parts)).tolist()
        chosen = zip(parts, rows.split(counts), strict=True)
        parts = [(name, of_file, own) for (name, of_file, _), own in chosen if len(own)]

    def of(part: tuple[str, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        name, of_file, own = part
        kept, chosen = _loaded(place / name), own - of_file[0]
        if 2 * len(own) > len(of_file):  # of most, no copies
            checked = Checked(place / name, kept, {} if unread is None else unread[name])
            return own, compute(checked)[chosen]
        return own, compute({n: t[chosen] for n, t in kept.items()})

    if threads == 1 or len(parts) == 1:
        yield from map(of, parts)
        return
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            found = list(pool.map(of, parts))
    finally:
        torch.set_num_threads(before)
    yield from found


class Checked(Mapping[str, Tensor]):
    """The tensors of one file, each compared with its checksum when it is first asked for.

    Args:
        file: where they are from.
        tensors: the same, mapped into memory.
        unread: the checksums of those that nobody asked for yet; they leave it.
    """

    def __init__(self, file: Path, tensors: Kept, unread: dict[str, str]) -> None:
        self._file = file
        self._tensors = tensors
        self._unread = unread

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        wanted = self._unread.get(name)
        if wanted is not None:
            if checksum_of(bytes_of(tensor)) != wanted:
                raise StorageError(f"{damaged(self._file)[:-1]}, or delete it and build again.")
            self._unread.pop(name, None)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _loaded(file: Path) -> Kept:
    """One file of what is kept."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{str(file)!r} is damaged: delete it and build again.") from error


@contextmanager
def _claimed(place: Path, described: dict[str, Any], leads: bool) -> Iterator[None]:
    """The folder says whose index it will hold; not where the work ended before a file was whole.

    Raises:
        StorageError: it holds something else.
    """
    if not leads:
        yield
        return
    _check_claim(place, described)
    place.mkdir(parents=True, exist_ok=True)
    if not (place / PLAN).is_file():
        _write_json(place / PLAN, described)
    try:
        yield
    except BaseException:
        if not any(place.glob(f"{STEM}-*")):
            (place / PLAN).unlink(missing_ok=True)
            with suppress(OSError):
                place.rmdir()
        raise


def _check_claim(place: Path, described: dict[str, Any]) -> None:
    """Raise :class:`StorageError` unless the folder is new, empty or holds this very index."""
    if not (place / PLAN).is_file():
        check_free(place)
        return
    before = _read_json(place / PLAN)
    differs = [n for n, value in described.items() if before.get(n) != value]
    if "data" in differs and "last_loss" in differs:
        differs.remove("last_loss")  # which may be theirs alone
    if differs:
        what = ", ".join(NAMES.get(n, n) for n in differs)
        raise StorageError(f"{str(place)!r} holds an index with another {what}: name a new folder.")


def multiplies_half(q: Posterior) -> bool:
    """Whether this device multiplies bfloat16 faster than the float32 that the posterior is in,
    of so many parameters that it counts."""
    m = next(iter(q.mean.values()))
    if m.dtype != torch.float32 or sum(m.numel() for m in q.mean.values()) < LARGE:
        return False
    if m.device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported())
    return m.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def _projected(
    task: Task,
    q: Posterior,
    compression: Compression,
    roots: Roots,
    indices: Tensor | None = None,
    *,
    divided: bool = False,
    **how: Any,
) -> Compressed:
    """All of :func:`_each`, on every rank."""
    order = torch.arange(task.n_data) if indices is None else indices
    each = _each(task, q, compression, roots, order, divided=divided, **how)
    return Compressed(**_joined(((rows, vars(part)) for rows, part in each), order, divided))


def _each(
    task: Task,
    q: Posterior,
    compression: Compression,
    roots: Roots,
    indices: Tensor,
    *,
    cotangent: Cotangent = loss_gradient,
    half: bool = False,
    more: int = 1,
    divided: bool = False,
) -> Iterator[tuple[Tensor, Compressed]]:
    """None, and then some of these examples at a time, on the CPU; ``half``: turned and formed by
    products in bfloat16; ``more``: times as many blocks as are stored; ``divided``: chunk by chunk
    among the ranks."""
    yield indices[:0], compression.none(roots, more)
    how = task, q, roots, indices, cotangent, half, divided
    for chosen, tiles in _tiles(*how, compression.size):
        part = compression.compressed(len(chosen), tiles, more=more)
        check_finite(part.squares, "projected gradient")
        yield chosen, part


def _joined(
    each: Iterable[tuple[Tensor, Mapping[str, Tensor]]], order: Tensor, divided: bool
) -> dict[str, Tensor]:
    """The rows of all parts; if ``divided``, of all ranks, of these examples, which rise."""
    rows, parts = zip(*each, strict=True)
    joined = {n: torch.cat([part[n] for part in parts]) for n in parts[0]}
    if not divided:
        return joined
    places = torch.searchsorted(order, torch.cat(rows))
    return {n: ranks.gathered(t, places, len(order)) for n, t in joined.items()}


def _tiles(
    task: Task,
    q: Posterior,
    roots: Roots,
    indices: Tensor,
    cotangent: Cotangent,
    half: bool,
    divided: bool,
    size: int,
) -> Iterator[tuple[Tensor, Iterator[tuple[slice, int, Tensor]]]]:
    """Some examples at a time, as many as of such a size are made at once, and their w by tiles."""

    def turned(term: Term, basis: Basis | None) -> Term:
        if basis is None:
            return term
        if not (half and isinstance(term, Outer)):
            return term.rotated(basis)
        return term.cast(torch.bfloat16).rotated(basis.to(basis.right.device, torch.bfloat16))

    order = {"indices": indices, "divided": divided}
    for chunk in chunks(task, q.mean, columns=1, label="index", **order):
        whole = loss_terms(task, chunk, cotangent)
        for some in slices(whole[0].n_examples, TOGETHER // size):
            paired = q.form.paired([term.part(some) for term in whole])
            yield chunk.indices[some], whitened((turned(*pair) for pair in paired), roots)


def _blocks(
    task: Task,
    q: Posterior,
    compression: Compression,
    roots: Roots,
    room: int,
    *,
    cotangent: Cotangent,
    half: bool,
) -> int:
    """How many blocks of each example are best kept in so many bytes, as some of them tell."""
    if not compression.signs:
        return 0
    some = torch.linspace(0, task.n_data - 1, min(TRIED, task.n_data)).round().long()
    each = _tiles(task, q, roots, some, cotangent, half, True, size=1)
    rows = (row for chosen, tiles in each for row in block_squares(len(chosen), tiles))
    count = sum(-(-root.numel() // BLOCK) for _, root in roots.values())
    return best_blocks(rows, len(some), count, room)


def _stored(
    compression: Compression, each: Iterable[tuple[Tensor, Compressed]], dtype: torch.dtype
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """What files hold of these examples, and their self-influences."""
    for rows, own in each:
        yield rows, {**compression.stored(own, dtype), "self_influence": own.squares}


def _write_shard(kept: dict[str, Tensor], file: Path, rows: Tensor) -> None:
    with drafted(file) as draft:
        save_file(kept, draft, {"format": "pt", "first": str(int(rows[0]))})


def _check_shard(file: Path, rows: Tensor, checksum: str | None) -> dict[str, str]:
    """The checksums of a file's tensors that were not read yet: all but the self-influences.

    Raises:
        StorageError: a damaged file, or one of other examples or of another index.
    """
    try:
        source = Folder.open(file)
        squares = source.tensor("self_influence")
    except (KeyError, StorageError) as error:
        raise StorageError(f"{str(file)!r} is damaged: delete it and build again.") from error
    header = source.headers[file]
    begins = source.metadata.get("first") == str(int(rows[0]))
    if not begins or len(squares) != len(rows) or header.checksum != checksum:
        raise StorageError(f"{str(file)!r} is another file of an index: copy the whole folder.")
    return {name: c for name, c in header.checksums.items() if name != "self_influence"}


def _write_examples(place: Path, task: Task, files: list[str]) -> None:
    """The Parquet table."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    squares = torch.cat([_loaded(place / name)["self_influence"] for name in files])
    columns = {"index": list(range(task.n_data)), "self_influence": squares.tolist()}
    table = pa.table({**columns, **task.metadata})
    with drafted(place / EXAMPLES) as draft:
        parquet.write_table(table, draft)


def _measured(
    task: Task,
    q: Posterior,
    compression: Compression,
    place: Path,
    cotangent: Cotangent,
) -> ProjectionError:
    """What is stored against exact influence, on random pairs of different training examples: each
    on itself, many times larger and stored best, would hide the error."""
    order, most = torch.randperm(task.n_data, generator=torch.Generator().manual_seed(1)), PROBE
    count = min(most[1], task.n_data // 2)
    rows = order[count:][: most[0]].sort().values
    columns = order[:count].sort().values if count else rows
    how: dict[str, Any] = {"more": MORE, "divided": True}
    asked = _projected(task, q, compression, compression.roots(q), columns, **how)
    values = torch.zeros(2, len(rows), len(columns), dtype=torch.float64)
    if len(own := ranks.share(torch.arange(len(rows)))):
        read = _read(place, task.n_data, lambda kept: compression.values(kept, asked), rows[own])
        values[0, own] = torch.cat([part for _, part in read]).double()
        exact = pieces(
            task,
            q,
            task,
            train_cotangent=cotangent,
            indices=rows[own],
            test_indices=columns,
        )
        values[1, own] = matrix_of(exact).double()
    ranks.total([values])
    return ProjectionError.between(*values)


def _write_json(
    file: Path, content: dict[str, Any], files: Mapping[str, str] | None = None
) -> None:
    with drafted(file) as draft:
        draft.write_text(record_text(content, files), encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if content.get("format") != FORMAT:
        raise StorageError(f"{str(file)!r} is no index of this package.")
    if content.get("version") != VERSION:
        raise StorageError(
            f"{str(file)!r} is of another version than {VERSION}: delete the folder, build again."
        )
    if CHECKSUM not in content:
        raise StorageError(damaged(file))
    return content
