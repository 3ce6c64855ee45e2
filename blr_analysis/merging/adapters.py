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
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blr_analysis.checks import some
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import Folder, Scratch, Source, Spec
from blr_analysis.files.shards import save_file
from blr_analysis.merging.job import Job
from blr_analysis.merging.lora import (
    CONFIG,
    TENSORS,
    Product,
    Streamed,
    is_adapter,
    is_place,
    open_adapter,
    pairs_of,
    read_entries,
    translate,
)

if TYPE_CHECKING:
    from blr_analysis.merging.plan import MergePlan

REAL = torch.float32
FLOOR = 1e-6  # of a metric's mean: directions that no example has count that much


class Zeros(Source):
    """A base whose adapted tensors are 0, of the shapes that adapters give them."""

    def __init__(self, base: Source, zeros: Mapping[str, Spec]) -> None:
        self.name, self._base, self._zeros = base.name, base, zeros
        self.specs = {**base.specs, **zeros}

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        if name not in self._zeros:
            return self._base.read(name, start, stop, scratch)
        return scratch.array((self, "zeros"), stop - start, self._zeros[name].dtype).zero_()


class Chosen(Source):
    """Some tensors of a source."""

    def __init__(self, source: Source, names: Mapping[str, object]) -> None:
        self.name, self.notes, self.origin, self._own = (
            source.name,
            source.notes,
            source.origin,
            source,
        )
        self.whole = source
        self.specs = {n: source.specs[n] for n in names}

    def words(self, name: str) -> str:
        return self._own.words(name)

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        return self._own.read(name, start, stop, scratch)


def open_products(job: Job, base: Source) -> tuple[Source, list[Source], dict[str, Product]]:
    """The base's adapted tensors as zeros, the adapters' products, and where each lies.

    Raises:
        InputError: a rank above every matrix, members that are no adapters, a longer vocabulary.
        ModelError: adapters with more than the matrices of plain LoRA.
    """
    assert job.rank is not None
    places = [m.model for m in job.members]
    plain = [str(p) for p in places if not (is_place(p) and is_adapter(p))]
    if plain or job.vocabulary is not None:
        raise InputError(f"a rank is for adapters of one vocabulary alone: {some(plain)} is none")
    files = {str(p): Folder.open(Path(p).expanduser(), stem="adapter_model") for p in places}
    zeros: dict[str, Spec] = {}
    for place, file in files.items():
        shapes = {
            f"{module}.weight": (file.specs[ab["B"]].shape[0], file.specs[ab["A"]].shape[1])
            for module, ab in (pairs_of(file) or {}).items()
        }
        for name, own in translate(shapes, base.specs, place).items():
            stored = base.specs[own]
            zeros[own] = Spec(
                stored.shape if stored.dtype.is_floating_point else shapes[name], REAL
            )
    start = Zeros(base, zeros)
    opened = [open_adapter(place, start, dtype=REAL) for place in files]
    products: dict[str, Product] = {}
    for source in opened:
        if not isinstance(source, Streamed):
            raise ModelError(
                f"{source.name!r} holds more than the matrices of LoRA: merge it into a model"
            )
        products = {**source.products, **products}
    most = max(min(p.rows, p.cols) for p in products.values())
    if not job.rank > 0 or job.rank > most or (job.rank >= 1 and job.rank % 1):
        raise InputError(
            f"rank must be a whole number up to {most}, or a share between 0 and 1, got {job.rank}"
        )
    return Chosen(start, zeros), [Chosen(source, zeros) for source in opened], products


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


class Decomposed:
    """A sink that keeps B and A of every tensor, and no tensor longer than until it is whole.

    Attributes:
        ranks, lost: by tensor, r and ‖ΔW − BA‖ / ‖ΔW‖ in the metric.
    """

    def __init__(self, plan: MergePlan, folder: Path) -> None:
        self._plan, self._folder, self.names = plan, folder, [TENSORS]
        self._open: dict[str, tuple[Tensor, int]] = {}
        self._lock = threading.Lock()
        self._tensors: dict[str, Tensor] = {}
        self.ranks: dict[str, int] = {}
        self.lost: dict[str, float] = {}

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Take a piece; the last one of a tensor decomposes it."""
        product, dtype = self._plan.products[name], self._plan.job.out_dtype or REAL
        size = product.rows * product.cols
        with self._lock:
            whole, left = self._open.pop(name, None) or (torch.empty(size), size)
            whole[start : start + len(values)] = values
            if left > len(values):
                self._open[name] = whole, left - len(values)
                return
        step = whole.view(product.rows, product.cols)
        step = step.T if product.turned else step
        b, a, lost = low_rank(step, float(self._plan.job.rank or 1), *self._metric(name, product))
        stored = {key: t.to(dtype).contiguous() for key, t in ((product.a, a), (product.b, b))}
        if not all(bool(t.isfinite().all()) for t in stored.values()):
            raise ModelError(f"the factors of {name!r} do not fit into {dtype}: widen out_dtype")
        with self._lock:
            self._tensors |= stored
            self.ranks[name], self.lost[name] = len(a), lost

    def _metric(self, name: str, product: Product) -> tuple[Tensor | None, Tensor | None]:
        """L and R from the tasks' precisions, weighted as in the merge."""
        item = next(item for item in self._plan.items if item.name == name)
        sides: list[tuple[Tensor | None, Tensor]] = []
        for part, alpha in zip(self._plan.parts, item.weights, strict=True):
            p = part.precision
            if p is None or not p.covers(name):
                continue
            if name in p.layers:
                factors = p.factors(name, *self._plan.family(name))
                if factors.by_rows:
                    sides.append((None, abs(alpha) * factors.matrix()[0]))
                    continue
                h = factors.diagonal[0]
            else:
                h = p.read(name, 0, item.spec.numel, Scratch(), REAL).double()
                h = h.view(product.rows, product.cols)
                h = h.T if product.turned else h
            sides.append((abs(alpha) * h.mean(1), torch.diag(abs(alpha) * h.mean(0))))
        if not sides:
            return None, None
        lefts = [left for left, _ in sides if left is not None]
        return torch.stack(lefts).sum(0) if lefts else None, torch.stack([r for _, r in sides]).sum(
            0
        )

    def finish(self) -> None:
        """Write what PEFT loads, with s = 1 everywhere: α is the rank of each module."""
        first = Path(self._plan.job.members[0].model).expanduser()
        save_file(self._tensors, self._folder / TENSORS, {"format": "pt"})
        ranks = {self._plan.products[n].module: r for n, r in self.ranks.items()}
        usual = max(ranks.values())
        odd = {f"^{re.escape(name)}": r for name, r in ranks.items() if r != usual}
        dropped = ("exclude_modules", "layers_to_transform", "layers_pattern")
        entries = {k: v for k, v in read_entries(first).items() if k not in dropped}
        entries |= {"r": usual, "lora_alpha": usual, "rank_pattern": odd, "alpha_pattern": odd}
        entries |= {"use_rslora": False, "target_modules": sorted(ranks), "inference_mode": True}
        entries |= {"init_lora_weights": True}
        (self._folder / CONFIG).write_text(json.dumps(entries, indent=2), "utf-8")


def bytes_of(product: Product, rank: float, dtype: torch.dtype) -> int:
    """What both matrices take, at most, where the rank is not yet known."""
    most = min(product.rows, product.cols)
    kept = most if rank < 1 else min(most, int(rank))
    return kept * (product.rows + product.cols) * dtype.itemsize


def check_unbiased(layers: Mapping[str, Sequence[str]], products: Mapping[str, Product]) -> None:
    """Raise :class:`InputError` where a layer's precision holds a bias, which no adapter moves."""
    biased = [key for key, names in layers.items() if key in products and len(names) > 1]
    if biased:
        raise InputError(f"the factors of {some(biased)} hold a bias: take --structure diag")
