"""LoRA in, LoRA out: adapters of one base merged as the products s·B·A, and the best adapter of a
chosen rank of the result.

The base is 0 where adapters change it, so that θ_t − θ_0 = s_t B_t A_t exactly: its numbers are not
read, be they rounded or quantised, and stay as they are. Of each merged step ΔW

    B A = argmin ‖L^½ (ΔW − B A) R^½‖,    by the singular values of L^½ ΔW R^½,

with R the tasks' second moments of the layer's inputs (precisions of structure "gram", where this
is the precision itself), or the means of H over rows (L) and columns (R); L = R = 1 without.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from blr_analysis.checks import some
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import (
    Folder,
    Scratch,
    Source,
    Spec,
    check_free,
    check_room,
    drafted,
)
from blr_analysis.files.shards import save_file
from blr_analysis.merging.fates import Item, OpenModel
from blr_analysis.merging.folders import Documents, MergeReport, copy_files
from blr_analysis.merging.job import Job
from blr_analysis.merging.lora import CONFIG, TENSORS, is_adapter, open_adapter
from blr_analysis.merging.lora.changes import LoraUpdate, group, read_entries, translate
from blr_analysis.merging.lora.source import Streamed
from blr_analysis.merging.plan import MAX_MEMORY, MergePlan, make_plan
from blr_analysis.merging.precisions import check_belongs, open_precision
from blr_analysis.merging.stream import stream
from blr_analysis.merging.vocabularies import Arranged, Place

REAL = torch.float32
FLOOR = 1e-6  # of a metric's mean: directions that no example has count that much


@dataclass(frozen=True)
class AdapterPlan(MergePlan):
    """A merge into an adapter.

    Attributes:
        updates: where the product lies that makes each tensor.
        rank: r, or below 1 the share of each step's square that is kept.
        ranks: of each tensor: at most, until it is known.
    """

    updates: Mapping[str, LoraUpdate] = field(default_factory=dict)
    rank: float = 1.0
    ranks: Mapping[str, int] = field(default_factory=dict)
    library: ClassVar[str] = "peft"

    def bytes_for(self, item: Item) -> int:
        """Of both matrices."""
        update = self.updates[item.name]
        return self.ranks[item.name] * (update.rows + update.cols) * item.spec.dtype.itemsize


@dataclass(frozen=True)
class MergedAdapter(MergeReport):
    """An adapter that was written.

    Attributes:
        ranks: of each module.
        lost: of each module, ‖ΔW − BA‖ / ‖ΔW‖ in the metric.
    """

    ranks: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, float] = field(default_factory=dict)

    @property
    def remarks(self) -> list[str]:
        """How much of the steps the ranks hold."""
        ranks, worst = sorted(set(self.ranks.values())), max(self.lost.values())
        return [
            f"adapter of {len(self.ranks)} modules, ranks {ranks[0]} to {ranks[-1]}, "
            f"{worst:.2g} of a step lost at most"
        ]

    def __repr__(self) -> str:
        return f"{self.remarks[0]}, in {self.folder}"


class Shaped(Source):
    """A base whose named tensors are 0, of the shapes that adapters give them."""

    def __init__(self, base: Source, zeros: Mapping[str, Spec]) -> None:
        self.name, self._base, self._zeros = base.name, base, zeros
        self.specs = {**base.specs, **zeros}

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        """Zeros, or what the base has."""
        if name not in self._zeros:
            return self._base.read(name, start, stop, scratch)
        return scratch.array((self, "zeros"), stop - start, self._zeros[name].dtype).zero_()


def low_rank(
    step: Tensor, rank: float, left: Tensor | None = None, right: Tensor | None = None
) -> tuple[Tensor, Tensor, float]:
    """B [out, r], A [r, in] nearest to a step [out, in], and the part of it that is lost.

    Args:
        step: ΔW.
        rank: r; below 1, the share of ‖ΔW‖² that is kept at least.
        left: the diagonal of L, [out].
        right: R, [in, in].

    >>> b, a, lost = low_rank(torch.diag(torch.tensor([3.0, 1.0])), 1)
    >>> b @ a, lost == 10 ** -0.5
    (tensor([[3., 0.],
            [0., 0.]], dtype=torch.float64), True)
    """
    rows = torch.ones(len(step), dtype=torch.float64) if left is None else left.double()
    rows = (rows + FLOOR * rows.mean()).sqrt() if float(rows.sum()) else torch.ones_like(rows)
    turned = rows[:, None] * step.double()
    back = None
    if right is not None and float(right.diagonal().sum()):
        values, vectors = torch.linalg.eigh(right.double())
        roots = (values.clamp_min(0) + FLOOR * values.mean()).sqrt()
        turned = turned @ (vectors * roots)
        back = (vectors / roots).T
    u, s, v = torch.linalg.svd(turned, full_matrices=False)
    total = float((s**2).sum())
    real = max(1, int((s > 1e-7 * s[0]).sum()))
    if rank < 1:
        rank = 1 + int((s.square().cumsum(0) < rank * total).sum())
    kept = min(int(rank), real)
    lost = float((s[kept:] ** 2).sum() / total) ** 0.5 if total else 0.0
    root = s[:kept].sqrt()
    a = root[:, None] * v[:kept]
    return u[:, :kept] * root / rows[:, None], a if back is None else a @ back, lost


def plan_adapters(
    job: Job, rank: float, *, max_memory: int = MAX_MEMORY, threads: int | None = None
) -> AdapterPlan:
    """Open and check everything that a merge of adapters into one needs; nothing is written.

    Args:
        job: the merge; its members are plain LoRA adapters of its base. What is written is
            float32, unless its ``out_dtype`` is another.
        rank: of every module, at most, and where a matrix is smaller that is its own; below 1,
            the share of each step's square that is kept.
        max_memory, threads: as for other merges; on top come the largest matrix and its
            decomposition, once for every thread.

    Raises:
        InputError: a rank above every matrix, no base, members that are no adapters, a union of
            vocabularies.
        ModelError: adapters with more than the matrices of plain LoRA.
        Others as :func:`blr_analysis.merging.plan.make_plan`.
    """
    if isinstance(rank, bool) or not rank > 0 or (rank >= 1 and rank % 1):
        raise InputError(f"rank must be a whole number, or a share between 0 and 1, got {rank!r}")
    if job.base is None:
        raise InputError("adapters are merged on a base: name base_model")
    if job.vocabulary is not None:
        raise InputError("an adapter has its base's tokens: no union")
    plain = [str(m.model) for m in job.members if not is_adapter(m.model)]
    if plain:
        raise InputError(f"a rank is for adapters alone: {some(plain)} is none")
    plan, updates = _plan(job, max_memory, threads)
    whole = {n: min(u.rows, u.cols) for n, u in updates.items()}
    if rank > max(whole.values()):
        raise InputError(f"rank {rank:g} is above the matrix of every module: give less")
    ranks = {n: most if rank < 1 else min(most, int(rank)) for n, most in whole.items()}
    same = {f.name: getattr(plan, f.name) for f in fields(plan)}
    return AdapterPlan(**same, updates=updates, rank=rank, ranks=ranks)


@torch.no_grad()
def write_adapter(
    plan: AdapterPlan, out: str | os.PathLike[str], *, documents: Documents | None = None
) -> MergedAdapter:
    """Write an adapter that PEFT loads, with the tokenizer of the first one where it has any.

    Args:
        plan: of :func:`plan_adapters`.
        out: a folder that is new or empty.
        documents: as of :func:`blr_analysis.merging.folders.execute`.

    Raises:
        ModelError, PosteriorError, StorageError: as there; a factor that the dtype cannot hold.
    """
    started = time.perf_counter()
    job, target = plan.job, Path(out).expanduser()
    check_free(target)
    check_room(target, plan.bytes_written)
    sink = _Decomposed(plan)
    exact = [replace(item, spec=Spec(item.spec.shape, REAL)) for item in plan.items]
    met = stream(replace(plan, items=tuple(exact)), sink, lambda count: None)
    first, source = job.members[0].model, job.tokenizer_source
    with drafted(target) as draft:
        draft.mkdir()
        save_file(sink.tensors, draft / TENSORS, {"format": "pt"})
        config = json.dumps(_config(read_entries(first), sink.ranks), indent=2)
        (draft / CONFIG).write_text(config, "utf-8")
        files = copy_files(first, first if source == "base" else Path(source), draft, None)
        report = MergedAdapter(
            target,
            replace(plan, ranks=sink.ranks_by_tensor),
            dict(met.fallback),
            files,
            (TENSORS,),
            time.perf_counter() - started,
            dict(met.solves),
            gap_ratios=met.lost,
            ranks=sink.ranks,
            lost=sink.lost,
        )
        for name, text in documents(report).items() if documents is not None else ():
            (draft / name).write_text(text, encoding="utf-8")
        check_free(target)
    return report


def _config(entries: Mapping[str, object], ranks: Mapping[str, int]) -> dict[str, object]:
    """Settings under which s = 1 everywhere: α is the rank of each module."""
    usual = max(ranks.values())
    odd = {f"^{re.escape(name)}": r for name, r in ranks.items() if r != usual}
    mine = {
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": odd,
        "alpha_pattern": odd,
        "use_rslora": False,
        "target_modules": sorted(ranks),
        "init_lora_weights": True,
        "inference_mode": True,
    }
    dropped = ("exclude_modules", "layers_to_transform", "layers_pattern")
    return {k: v for k, v in entries.items() if k not in dropped} | mine


def _plan(
    job: Job, max_memory: int, threads: int | None
) -> tuple[MergePlan, dict[str, LoraUpdate]]:
    """The merge of the products alone, and where each lies."""
    assert job.base is not None
    base: Source = Folder.open(job.base)
    base = Shaped(base, _quantised(job, base))
    updates: dict[str, LoraUpdate] = {}
    opened: list[Streamed] = []
    for member in job.members:
        source = open_adapter(member.model, base, dtype=REAL)
        if not isinstance(source, Streamed) or any(c.whole for c in source.how.values()):
            raise ModelError(
                f"{str(member.model)!r} holds more than LoRA's matrices: merge it into a model"
            )
        opened.append(source)
        for name, change in source.how.items():
            assert change.low_rank is not None
            # the name of A without what follows the module's
            module = re.sub(r"\.lora_(embedding_)?A(\.weight)?$", "", change.low_rank.a)
            updates.setdefault(name, replace(change.low_rank, a=module))
    zeros = {n: Spec(base.specs[n].shape, REAL) for n in updates}
    start = Shaped(base, zeros)

    def among(source: Source) -> Source:
        return Arranged(source.name, {n: Place(source, n) for n in updates}, source.notes)

    parts = []
    for member, source in zip(job.members, opened, strict=True):
        own = Streamed(source.name, start, source.file, source.how, REAL, source.notes)
        precision = None
        if job.row.uses_precisions and member.precision is not None:
            precision = open_precision(member.precision, member.n_data)
            if not job.trust:
                check_belongs(precision, source)
            for key, (joint, _) in precision.layers.items():
                if key in updates and joint.bias is not None:
                    precision = precision.of_weights(key)
            layers = {k: v for k, v in precision.layers.items() if k in updates}
            stored = {n: s for n, s in precision.stored.items() if n in updates}
            precision = replace(precision, stored=stored, layers=layers)
        parts.append(OpenModel(among(own), precision, member.weight, member.density))
    settings = replace(job, out_dtype=job.out_dtype or REAL)
    plan = make_plan(settings, among(start), parts, max_memory=max_memory, threads=threads)
    return plan, updates


def _quantised(job: Job, base: Source) -> dict[str, Spec]:
    """The shapes of adapted weights that the base stores in few bits, from the matrices."""
    shapes: dict[str, Spec] = {}
    for member in job.members:
        file = Folder.open(member.model / TENSORS)
        pairs = {f"{m}.weight": ab for m, ab in group(file.specs, file.name).matrices.items()}
        for name, own in translate(pairs, base.specs, str(member.model)).items():
            if not base.specs[own].dtype.is_floating_point:
                a, b = (file.specs[pairs[name][letter]].shape for letter in "AB")
                shapes[own] = Spec((b[0], *a[1:]), REAL)
    return shapes


class _Decomposed:
    """A sink that keeps B and A of every tensor, and no tensor longer than until it is whole."""

    def __init__(self, plan: AdapterPlan) -> None:
        self._plan = plan
        self._open: dict[str, tuple[Tensor, int]] = {}
        self._lock = threading.Lock()
        self.tensors: dict[str, Tensor] = {}
        self.ranks: dict[str, int] = {}
        self.ranks_by_tensor: dict[str, int] = {}
        self.lost: dict[str, float] = {}

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Take a piece; the last one of a tensor decomposes it."""
        update, dtype = self._plan.updates[name], self._plan.job.out_dtype or REAL
        with self._lock:
            whole, left = self._open.get(name) or (
                torch.empty(update.rows * update.cols),
                update.rows * update.cols,
            )
            whole[start : start + len(values)] = values
            left -= len(values)
            self._open[name] = whole, left
            if left:
                return
            del self._open[name]
        step = whole.view(update.rows, update.cols)
        step = step.T if update.transposed else step
        b, a, lost = low_rank(step, self._plan.rank, *self._metric(name, update))
        prefix, module = update.a, update.a.removeprefix("base_model.model.")
        embedding = update.transposed and ".lora_embedding_B" in update.b
        made = (
            {"lora_embedding_A": a, "lora_embedding_B": b}
            if embedding
            else {"lora_A.weight": a, "lora_B.weight": b}
        )
        if kernel := update.kernel:
            ones = [1] * len(kernel)
            made = {
                "lora_A.weight": a.reshape(len(a), -1, *kernel),
                "lora_B.weight": b.reshape(*b.shape, *ones),
            }
        stored = {f"{prefix}.{k}": t.to(dtype).contiguous() for k, t in made.items()}
        if not all(bool(t.isfinite().all()) for t in stored.values()):
            raise ModelError(f"the factors of {name!r} do not fit into {dtype}: widen out_dtype")
        with self._lock:
            self.tensors |= stored
            self.ranks[module], self.lost[module] = len(a), lost
            self.ranks_by_tensor[name] = len(a)

    def _metric(self, name: str, update: LoraUpdate) -> tuple[Tensor | None, Tensor | None]:
        """L and R from the tasks' precisions, weighted as in the merge."""
        item = next(item for item in self._plan.items if item.name == name)
        left: Tensor | None = None
        right: Tensor | None = None
        for part, alpha in zip(self._plan.parts, item.weights, strict=True):
            p = part.precision
            if p is None or not p.covers(name):
                continue
            if name in p.layers:
                factors = p.factors(name, *self._plan.family(name))
                if factors.by_rows:
                    own = factors.matrix()[0] * abs(alpha)
                    right = own if right is None else right + own
                    continue
                h = factors.diagonal[0]
            else:
                h = p.read(name, 0, item.spec.numel, Scratch(), REAL).double()
                h = h.view(update.rows, update.cols)
                h = h.T if update.transposed else h
            rows, columns = abs(alpha) * h.mean(1), torch.diag(h.mean(0)) * abs(alpha)
            left = rows if left is None else left + rows
            right = columns if right is None else right + columns
        return left, right
