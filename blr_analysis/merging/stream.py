"""Carrying a plan out: pieces of tensors through threads, from the sources into a sink."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Joint, MatrixShape
from blr_analysis.errors import ModelError
from blr_analysis.files import Scratch, Source
from blr_analysis.merging import sparse
from blr_analysis.merging.formula import PrecisionValue, combine_into
from blr_analysis.merging.items import AVERAGED, BASE, COPIED, OWN, Item, MergePlan
from blr_analysis.merging.layers import Part, Solved, solver
from blr_analysis.merging.plan import rows_at_once


class Sink(Protocol):
    """Where merged pieces go; called by several threads, never twice for one entry."""

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Take entries ``[start, start + len(values))`` of a tensor, in its dtype."""


class Memory:
    """Whole tensors in memory; a sink like :class:`blr_analysis.files.Shards`."""

    def __init__(self, items: Sequence[Item], devices: Mapping[str, torch.device]) -> None:
        self.tensors = {
            i.name: torch.empty(i.spec.shape, dtype=i.spec.dtype, device=devices[i.name])
            for i in items
        }

    def put(self, name: str, start: int, values: Tensor) -> None:
        self.tensors[name].view(-1)[start : start + len(values)] = values


@dataclass
class Outcome:
    """What streaming met: by tensor the entries without a precision, by layer how it was solved."""

    fallback: Counter[str] = field(default_factory=Counter)
    solves: dict[str, Solved] = field(default_factory=dict)


def stream(plan: MergePlan, sink: Sink, tell: Callable[[int], object]) -> Outcome:
    """Merge every tensor of the plan; the result does not depend on threads or piece lengths.

    Args:
        plan: what to do.
        sink: where the result goes.
        tell: called with the bytes read, after every piece.

    Returns:
        The entries where task arithmetic stands, and the layers' residuals.

    Raises:
        ModelError: NaN or inf in a model or in the result.
        PosteriorError: NaN, inf or negative numbers in a precision.
        StorageError: a file that cannot be read or written.
    """
    own, met, threads = threading.local(), Outcome(), torch.get_num_threads()

    def work(piece: tuple[Item, int, int]) -> tuple[Item, int, int, Solved | None]:
        own.worker = worker = getattr(own, "worker", None) or _Worker(plan, sink)
        item, start, stop = piece
        read = plan.bytes_of(item) * (stop - start) // max(item.spec.numel, 1)
        if item.layer:
            solved = worker.layer(item.layer)
            return item, read, solved.undefined, solved
        known = worker.measured(item)
        cuts = ((low, min(low + plan.chunk, stop)) for low in range(start, stop, plan.chunk))
        return item, read, sum(worker.merge(item, *cut, known) for cut in cuts), None

    torch.set_num_threads(1)  # pieces run side by side already
    pool = ThreadPoolExecutor(plan.workers)
    try:
        for item, read, undefined, solved in pool.map(work, _pieces(plan)):
            if undefined:
                met.fallback[item.name] += undefined
            met.solves |= {} if solved is None else {item.layer: solved}
            tell(read)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
    return met


def _pieces(plan: MergePlan) -> Iterator[tuple[Item, int, int]]:
    for item in plan.items:
        if item.layer and item.layer != item.name:
            continue
        whole = item.layer or plan.passes(item) > 1
        step = max(item.spec.numel, 1) if whole else plan.chunk
        for start in range(0, item.spec.numel, step):
            yield item, start, min(start + step, item.spec.numel)


@dataclass(frozen=True)
class _Inputs:
    """A piece of a tensor in all models, with what stands for its precisions."""

    base: Tensor | None
    models: list[Tensor]
    first: PrecisionValue
    curved: list[PrecisionValue]

    def steps(self, dtype: torch.dtype) -> list[Tensor]:
        """θ_t − θ_0, or θ_t."""
        start = 0.0 if self.base is None else self.base.to(dtype)
        return [m.to(dtype) - start for m in self.models]

    def cut(self, part: slice) -> _Inputs:
        curved: list[PrecisionValue] = [
            h[part] if isinstance(h, Tensor) else h for h in self.curved
        ]
        base = None if self.base is None else self.base[part]
        return _Inputs(base, [m[part] for m in self.models], 0.0, curved)


class _Worker:
    """A thread with its buffers."""

    def __init__(self, plan: MergePlan, sink: Sink) -> None:
        self.plan, self.sink, self.scratch = plan, sink, Scratch()
        self.dtype, self.method = plan.job.dtype, plan.method

    def read(self, item: Item, start: int, stop: int) -> _Inputs:
        plan, at = self.plan, (start, stop, self.scratch)
        base = None if plan.base is None else plan.base.read(item.name, *at)
        named = zip(plan.parts, item.reads, strict=True)
        models = [part.source.read(name, *at) for part, name in named]
        device = (models[0] if base is None else base).device
        first = self._first(item, start, stop, device)
        curved: list[PrecisionValue] = []
        for part, kind in zip(plan.parts, item.curved, strict=True):
            if kind == OWN and part.precision is not None:
                curved.append(part.precision.read(item.name, *at, self.dtype).to(device))
            else:
                curved.append(first if kind == BASE else 0.0)
        return _Inputs(base, [m.to(device) for m in models], first, curved)

    def _first(self, item: Item, start: int, stop: int, device: torch.device) -> PrecisionValue:
        """H_0 + δ."""
        own, delta = self.plan.base_precision, self.plan.delta
        if own is None or own.spec(item.name) is None:
            return delta
        values = own.read(item.name, start, stop, self.scratch, self.dtype).to(device)
        return values.to(self.dtype) + delta if delta else values

    def merge(self, item: Item, start: int, stop: int, known: Sequence[float] | None) -> int:
        """Merge and put a piece; how many entries have no precision to weigh by."""
        if item.fate == COPIED:
            values = self.plan.reference.read(item.name, start, stop, self.scratch)
            self.sink.put(item.name, start, values)
            return 0
        given, scratch, undefined = self.read(item, start, stop), self.scratch, 0
        base, models = given.base, given.models
        result = scratch.array("result", stop - start, self.dtype, models[0].device)
        if item.fate == AVERAGED:
            combine_into(result, None, models, item.weights, [0.0] * len(models), 0.0, scratch)
        elif self.method.thinned:
            self._thinned(item, start, given, known, result)
        else:
            weights = item.weights if known is None else known
            pairs = given.curved, given.first
            undefined = combine_into(result, base, models, weights, *pairs, scratch)
        rounded = result
        if result.dtype != item.spec.dtype:
            dtype = item.spec.dtype
            rounded = scratch.array("rounded", len(result), dtype, result.device).copy_(result)
        if not bool(rounded.sum().isfinite()):  # or no entry of it is NaN or inf
            self._check_finite(item, result, base, models)
        self.sink.put(item.name, start, rounded)
        return undefined if self.method.uses_precisions else 0

    def measured(self, item: Item) -> list[float] | None:
        """What must be known of a whole tensor before its merge: the coefficients of its sum, or
        the size from which on entries stay."""
        if self.plan.passes(item) == 1:
            return None

        def walk() -> Iterator[tuple[list[Tensor], list[PrecisionValue]]]:
            for start, stop in sparse.blocks(0, item.spec.numel):
                given = self.read(item, start, stop)
                yield given.steps(self.dtype), self._curved(given)

        if self.method.span is not None:
            gram = torch.zeros(len(item.weights), len(item.weights), dtype=torch.float64)
            for steps, _ in walk():
                rows = torch.stack(steps).cpu()
                gram += rows @ rows.mT
            weights = torch.tensor(item.weights, dtype=torch.float64)
            return self.method.span(gram, weights).tolist()

        def sizes() -> Iterator[list[Tensor]]:
            for each in walk():
                yield [sparse.sizes(step, h).cpu() for step, h in zip(*each, strict=True)]

        counts = [max(1, int(d * item.spec.numel)) for d in item.densities]
        return list(sparse.limits(sizes, counts))

    def _curved(self, given: _Inputs) -> list[PrecisionValue]:
        return given.curved if self.method.uses_precisions else [1.0] * len(given.models)

    def _thinned(
        self, item: Item, start: int, given: _Inputs, known: Sequence[float] | None, result: Tensor
    ) -> None:
        """:func:`blr_analysis.merging.sparse.combine_sparse`, block by block."""
        job = self.plan.job
        for low, high in sparse.blocks(0, len(result)):
            cut = given.cut(slice(low, high))
            steps, curved = cut.steps(self.dtype), self._curved(cut)
            for t, (step, h, density) in enumerate(zip(steps, curved, item.densities, strict=True)):
                if self.method.thinned == "chance":
                    place = (t, item.name, start + low)
                    step *= sparse.drawn(density, high - low, job.seed, *place).to(step)
                    step /= density if job.rescale else 1.0
                elif known is not None:
                    sparse.keep(step, sparse.sizes(step, h), int(known[t]))
            assert cut.base is not None
            sparse.combine_sparse(
                result[low:high], cut.base.to(self.dtype), steps, item.weights, curved,
                elect=self.method.elect, normalize=job.divides, scale=item.scale,
            )  # fmt: skip

    def layer(self, key: str) -> Solved:
        """Solve one layer's equation, some rows of its matrix at a time."""
        plan, joint = self.plan, self.plan.layers[key]
        items = {item.name: item for item in plan.items if item.layer == key}
        parts: list[Part] = []
        for part, alpha, kind in zip(
            plan.parts, items[key].weights, items[key].curved, strict=True
        ):
            own = part.precision if kind == OWN else None
            h = None if own is None else own.factors(key, *plan.family(key))
            parts.append((alpha, h, kind == BASE))
        first, o = plan.base_precision, joint.layout.rows
        start = first.factors(key, *plan.family(key)) if first and key in first.layers else None
        shape = (joint.layout.groups, o, joint.layout.columns + (joint.bias is not None))
        solve, solved = solver(parts, start, plan.delta, shape), Solved()
        step = o if any(p.has_outputs(key) for p in plan.held) else rows_at_once(joint)
        for low in range(0, o, step):
            piece = joint if step == o else _rows_of(joint, min(step, o - low))
            base = None if plan.base is None else self._matrix(plan.base, piece, low)
            models = [
                self._matrix(part.source, piece, low, {n: i.reads[k] for n, i in items.items()})
                for k, part in enumerate(plan.parts)
            ]
            result, met = solve(base if self.method.uses_base_precision else None, models, low)
            solved = replace(met, undefined=solved.undefined + met.undefined)
            self._check_finite(items[key], result, base, models)
            for n, value in piece.split(result).items():
                at = _offset(piece, n, low)
                self.sink.put(n, at, value.reshape(-1).to(items[n].spec.dtype))
        return solved

    def _matrix(
        self, source: Source, piece: Joint, low: int, reads: Mapping[str, str] | None = None
    ) -> Tensor:
        """Rows of a layer's matrix in one model, in float64."""
        flat = {}
        for n, shape in piece.shapes.items():
            at, own = _offset(piece, n, low), n if reads is None else reads[n]
            values = source.read(own, at, at + math.prod(shape), self.scratch)
            flat[n] = values.to("cpu", torch.float64, copy=True).view(shape)
        return piece.join(flat)

    def _check_finite(
        self, item: Item, result: Tensor, base: Tensor | None, models: Sequence[Tensor]
    ) -> None:
        limit = torch.finfo(item.spec.dtype).max
        low, high = torch.aminmax(result)
        if bool(low >= -limit) and bool(high <= limit):
            return
        held = {} if self.plan.base is None or base is None else {self.plan.base.name: base}
        held |= {p.source.name: m for p, m in zip(self.plan.parts, models, strict=True)}
        wild = next((name for name, t in held.items() if not bool(t.isfinite().all())), None)
        if wild is not None:
            raise ModelError(
                f"{item.name!r} of {wild!r} holds NaN or inf: a diverged training, a damaged file"
            )
        raise ModelError(
            f"the merge of {item.name!r} does not fit into {item.spec.dtype}: give a delta, other "
            "weights or a wider out_dtype"
        )


def _offset(piece: Joint, name: str, low: int) -> int:
    """Where row ``low`` of a layer begins in one of its parameters."""
    shape = piece.shapes[name]
    return low * math.prod(shape) // shape[0] if low else 0


def _rows_of(joint: Joint, count: int) -> Joint:
    """Some rows of a layer's one matrix as a layer of their own."""
    columns = joint.layout.columns
    return replace(joint, layout=MatrixShape(1, count, columns, (count, columns)))
