"""LoRA in, LoRA out: adapters of one base merged as the products s·B·A, and the best adapter of a
chosen rank of the result.

The base is 0 where adapters change it, so that θ_t − θ_0 = s_t B_t A_t exactly: its numbers are not
read, be they rounded or quantised, and stay as they are. Of each merged step ΔW the largest
singular values are kept.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path

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
    is_adapter,
    is_place,
    open_adapter,
    pairs_of,
    read_entries,
    translate,
)

REAL = torch.float32


class Zeros(Source):
    """A base whose adapted tensors are 0, of the shapes that adapters give them."""

    def __init__(self, base: Source, zeros: Mapping[str, Spec]) -> None:
        self.name, self._base, self._zeros = base.name, base, zeros
        self.specs = {**base.specs, **zeros}

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        if name not in self._zeros:
            return self._base.read(name, start, stop, scratch)
        return scratch.array((self, "zeros"), stop - start, self._zeros[name].dtype).zero_()


def open_products(job: Job, base: Source | None) -> tuple[list[Source], dict[str, Product]]:
    """The base's adapted tensors as zeros, the adapters' products, and where each lies.

    Raises:
        InputError: a rank above every matrix, members that are no adapters, a longer vocabulary.
        ModelError: adapters with more than the matrices of plain LoRA.
    """
    if base is None or job.rank is None:
        raise InputError("adapters are merged on a base: name base_model")
    places = [m.model for m in job.members]
    plain = [str(p) for p in places if not (is_place(p) and is_adapter(p))]
    if plain or job.vocabulary is not None:
        raise InputError(f"a rank is for adapters of one vocabulary alone: {some(plain)} is none")
    zeros: dict[str, Spec] = {}
    for place in places:
        file = Folder.open(Path(place).expanduser(), stem="adapter_model")
        shapes = {
            f"{module}.weight": (file.specs[ab["B"]].shape[0], file.specs[ab["A"]].shape[1])
            for module, ab in (pairs_of(file) or {}).items()
        }
        for name, own in translate(shapes, base.specs, str(place)).items():
            whole = base.specs[own].dtype.is_floating_point
            zeros[own] = Spec(base.specs[own].shape if whole else shapes[name], REAL)
    start = Zeros(base, zeros)
    opened = [open_adapter(place, start, dtype=REAL) for place in places]
    products: dict[str, Product] = {}
    for source in opened:
        if not source.products:
            raise ModelError(
                f"{source.name!r} holds more than the matrices of LoRA: merge it into a model"
            )
        products = {**source.products, **products}
    most = max(min(p.rows, p.cols) for p in products.values())
    if not job.rank > 0 or job.rank > most or (job.rank >= 1 and job.rank % 1):
        raise InputError(
            f"rank must be a whole number up to {most}, or a share between 0 and 1, got {job.rank}"
        )
    return [start, *opened], products


def low_rank(step: Tensor, rank: float) -> tuple[Tensor, Tensor, float]:
    """B [out, r], A [r, in] nearest to a step [out, in], and the part of it that is lost; a rank
    below 1 is the share of ‖ΔW‖² that is kept at least.

    >>> b, a, lost = low_rank(torch.diag(torch.tensor([3.0, 1.0])), 1)
    >>> b @ a, lost == 10 ** -0.5
    (tensor([[3., 0.],
            [0., 0.]], dtype=torch.float64), True)
    """
    u, s, v = torch.linalg.svd(step.double(), full_matrices=False)
    squares = s.square()
    if rank < 1:
        rank = 1 + int((squares.cumsum(0) < rank * squares.sum()).sum())
    kept = min(int(rank), max(1, int((s > 1e-7 * s[0]).sum())))
    lost = float((squares[kept:].sum() / squares.sum().clamp_min(1e-300)).sqrt())
    root = s[:kept].sqrt()
    return u[:, :kept] * root, root[:, None] * v[:kept], lost


class Decomposed:
    """A sink that keeps B and A of every tensor, and no tensor longer than until it is whole.

    Attributes:
        ranks, lost: by tensor, r and ‖ΔW − BA‖ / ‖ΔW‖.
    """

    def __init__(self, job: Job, products: Mapping[str, Product], folder: Path) -> None:
        self._job, self._products, self._folder, self.names = job, products, folder, [TENSORS]
        self._open: dict[str, tuple[Tensor, int]] = {}
        self._lock = threading.Lock()
        self._tensors: dict[str, Tensor] = {}
        self.ranks: dict[str, int] = {}
        self.lost: dict[str, float] = {}

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Take a piece; the last one of a tensor decomposes it."""
        product, dtype = self._products[name], self._job.out_dtype or REAL
        size = product.rows * product.cols
        with self._lock:
            whole, left = self._open.pop(name, None) or (torch.empty(size), size)
            whole[start : start + len(values)] = values
            if left > len(values):
                self._open[name] = whole, left - len(values)
                return
        step = whole.view(product.rows, product.cols)
        step = step.T if product.turned else step
        b, a, lost = low_rank(step, float(self._job.rank or 1))
        stored = {key: t.to(dtype).contiguous() for key, t in ((product.a, a), (product.b, b))}
        if not all(bool(t.isfinite().all()) for t in stored.values()):
            raise ModelError(f"the factors of {name!r} do not fit into {dtype}: widen out_dtype")
        with self._lock:
            self._tensors |= stored
            self.ranks[name], self.lost[name] = len(a), lost

    def finish(self) -> None:
        """Write what PEFT loads, with s = 1 everywhere: α is the rank of each module."""
        first = Path(self._job.members[0].model).expanduser()
        save_file(self._tensors, self._folder / TENSORS, {"format": "pt"})
        ranks = {self._products[n].module: r for n, r in self.ranks.items()}
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
