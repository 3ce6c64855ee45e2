"""Carrying a plan out: pieces of tensors through threads, from the sources into a sink."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Joint, MatrixShape
from blr_analysis.errors import ModelError
from blr_analysis.files import Scratch, Source
from blr_analysis.merging import sparse
from blr_analysis.merging.formula import PrecisionValue, combine_into
from blr_analysis.merging.items import AVERAGED, BASE, COPIED, OWN, Item
from blr_analysis.merging.layers import Part, Solved, solver
from blr_analysis.merging.plan import MergePlan, rows_at_once


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


Piece = tuple[Item, int, int]


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

    def work(piece: Piece) -> tuple[Piece, int, Solved | None]:
        own.scratch = scratch = getattr(own, "scratch", None) or Scratch()
        item, start, stop = piece
        if item.layer:
            solved = _merge_layer(plan, item.layer, sink, scratch)
            return piece, solved.undefined, solved
        known = _measured(plan, item, scratch)
        cuts = ((low, min(low + plan.chunk, stop)) for low in range(start, stop, plan.chunk))
        undefined = sum(_merge(plan, item, *cut, sink, scratch, known) for cut in cuts)
        return piece, undefined, None

    torch.set_num_threads(1)  # pieces run side by side already
    pool = ThreadPoolExecutor(plan.workers)
    try:
        for (item, start, stop), undefined, solved in pool.map(work, _pieces(plan)):
            met.fallback += Counter({item.name: undefined})
            met.solves |= {} if solved is None else {item.layer: solved}
            tell(plan.bytes_of(item) * (stop - start) // max(item.spec.numel, 1))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
    return met


def _pieces(plan: MergePlan) -> Iterator[Piece]:
    for item in plan.items:
        if item.layer:
            if item.layer == item.name:
                yield item, 0, item.spec.numel
            continue
        step = plan.chunk if plan.passes(item) == 1 else item.spec.numel
        for start in range(0, item.spec.numel, step):
            yield item, start, min(start + step, item.spec.numel)


@dataclass(frozen=True)
class _Inputs:
    """A piece of a tensor in all models, with what stands for its precisions."""

    base: Tensor | None
    models: list[Tensor]
    first: PrecisionValue
    curved: list[PrecisionValue]


def _read(plan: MergePlan, item: Item, start: int, stop: int, scratch: Scratch) -> _Inputs:
    base = None if plan.base is None else plan.base.read(item.name, start, stop, scratch)
    models = [
        part.source.read(name, start, stop, scratch)
        for part, name in zip(plan.parts, item.reads, strict=True)
    ]
    device = (models[0] if base is None else base).device
    models = [m.to(device) for m in models]
    first = _first(plan, item, start, stop, scratch, device)
    curved: list[PrecisionValue] = []
    for part, kind in zip(plan.parts, item.curved, strict=True):
        if kind == OWN:
            assert part.precision is not None
            h = part.precision.read(item.name, start, stop, scratch, plan.job.dtype)
            curved.append(h.to(device))
        else:
            curved.append(first if kind == BASE else 0.0)
    return _Inputs(base, models, first, curved)


def _merge(
    plan: MergePlan, item: Item, start: int, stop: int, sink: Sink, scratch: Scratch,
    known: Sequence[float] | None,
) -> int:  # fmt: skip
    if item.fate == COPIED:
        sink.put(item.name, start, plan.reference.read(item.name, start, stop, scratch))
        return 0
    given = _read(plan, item, start, stop, scratch)
    base, models = given.base, given.models
    result = scratch.array("result", stop - start, plan.job.dtype, models[0].device)
    undefined = 0
    if item.fate == AVERAGED:
        combine_into(result, None, models, item.weights, [0.0] * len(models), 0.0, scratch)
    elif plan.method.thinned:
        _merge_sparse(plan, item, start, given, known, result)
    else:
        weights = item.weights if known is None else known
        undefined = combine_into(result, base, models, weights, given.curved, given.first, scratch)
    rounded = _rounded(result, item.spec.dtype, scratch)
    if not bool(rounded.sum().isfinite()):  # or no entry of it is NaN or inf
        _check_finite(plan, item, result, [*([] if base is None else [base]), *models])
    sink.put(item.name, start, rounded)
    return undefined if plan.method.uses_precisions else 0


def _measured(plan: MergePlan, item: Item, scratch: Scratch) -> list[float] | None:
    """What must be known of a whole tensor before its merge: the coefficients of its sum, or the
    size from which on entries stay."""
    if plan.passes(item) == 1:
        return None

    def walk() -> Iterator[_Inputs]:
        for start, stop in sparse.blocks(0, item.spec.numel):
            yield _read(plan, item, start, stop, scratch)

    if plan.method.span is not None:
        count = len(plan.parts)
        gram = torch.zeros(count, count, dtype=torch.float64)
        for given in walk():
            rows = [
                scratch.array(("row", k), len(m), plan.job.dtype).copy_(m)
                for k, m in enumerate(given.models)
            ]
            if given.base is not None:
                for row in rows:
                    row.sub_(given.base.cpu())
            for k, row in enumerate(rows):
                for t, other in enumerate(rows[: k + 1]):
                    gram[k, t] += torch.dot(row, other)
        gram += gram.tril(-1).T
        weights = torch.tensor(item.weights, dtype=torch.float64)
        return plan.method.span(gram, weights).tolist()

    def sizes() -> Iterator[list[Tensor]]:
        for given in walk():
            pairs = zip(_steps(plan, given), _precisions(plan, given), strict=True)
            yield [sparse.sizes(step, h).cpu() for step, h in pairs]

    counts = [max(1, int(d * item.spec.numel)) for d in item.densities]
    return list(sparse.limits(sizes, counts))


def _steps(plan: MergePlan, given: _Inputs) -> list[Tensor]:
    assert given.base is not None
    start = given.base.to(plan.job.dtype)
    return [m.to(plan.job.dtype) - start for m in given.models]


def _precisions(plan: MergePlan, given: _Inputs) -> list[PrecisionValue]:
    return given.curved if plan.method.uses_precisions else [1.0] * len(given.models)


def _merge_sparse(
    plan: MergePlan, item: Item, start: int, given: _Inputs, known: Sequence[float] | None,
    result: Tensor,
) -> None:  # fmt: skip
    """:func:`blr_analysis.merging.sparse.combine_sparse`, block by block."""
    assert given.base is not None
    for low, high in sparse.blocks(0, len(result)):
        part = slice(low, high)
        cut = _Inputs(
            given.base[part],
            [m[part] for m in given.models],
            0.0,
            [h[part] if isinstance(h, Tensor) else h for h in given.curved],
        )
        steps, curved = _steps(plan, cut), _precisions(plan, cut)
        for t, (step, h, density) in enumerate(zip(steps, curved, item.densities, strict=True)):
            if plan.method.thinned == "chance":
                seed = plan.job.seed
                stays = sparse.drawn(density, high - low, seed, t, item.name, start + low)
                step *= stays.to(step)
                if plan.job.rescale:
                    step /= density
            elif known is not None:
                sparse.keep(step, sparse.sizes(step, h), int(known[t]))
        sparse.combine_sparse(
            result[part], given.base[part].to(plan.job.dtype), steps, item.weights, curved,
            elect=plan.method.elect, normalize=plan.job.divides, scale=item.scale,
        )  # fmt: skip


def _merge_layer(plan: MergePlan, key: str, sink: Sink, scratch: Scratch) -> Solved:
    """Solve one layer's equation, some rows of its matrix at a time."""
    joint, held = plan.layers[key], plan.held
    items = {item.name: item for item in plan.items if item.layer == key}
    parts: list[Part] = []
    for part, alpha, kind in zip(plan.parts, items[key].weights, items[key].curved, strict=True):
        own = part.precision if kind == OWN else None
        h = None if own is None else own.factors(key, *plan.family(key))
        parts.append((alpha, h, kind == BASE))
    first = plan.base_precision
    start = first.factors(key, *plan.family(key)) if first and key in first.layers else None
    o = joint.layout.rows
    shape = (joint.layout.groups, o, joint.layout.columns + (joint.bias is not None))
    solve = solver(parts, start, plan.delta, shape)
    step = o if any(p.has_outputs(key) for p in held) else rows_at_once(joint)
    solved = Solved()
    for low in range(0, o, step):
        piece = joint if step == o else _rows_of(joint, min(step, o - low))
        at = {n: low * math.prod(s) // s[0] if low else 0 for n, s in piece.shapes.items()}

        def matrix(
            source: Source, reads: Mapping[str, str], piece: Joint = piece, at: Any = at
        ) -> Tensor:
            flat = {
                n: source.read(reads[n], at[n], at[n] + math.prod(s), scratch)
                .to("cpu", torch.float64, copy=True)
                .view(s)
                for n, s in piece.shapes.items()
            }
            return piece.join(flat)

        base = None if plan.base is None else matrix(plan.base, {n: n for n in items})
        models = [
            matrix(part.source, {n: item.reads[k] for n, item in items.items()})
            for k, part in enumerate(plan.parts)
        ]
        result, met = solve(base if plan.method.uses_base_precision else None, models, low)
        solved = replace(met, undefined=solved.undefined + met.undefined)
        _check_finite(plan, items[key], result, [*([] if base is None else [base]), *models])
        for n, value in piece.split(result).items():
            sink.put(n, at[n], value.reshape(-1).to(items[n].spec.dtype))
    return solved


def _rows_of(joint: Joint, count: int) -> Joint:
    """Some rows of a layer's one matrix as a layer of their own."""
    columns = joint.layout.columns
    return replace(joint, layout=MatrixShape(1, count, columns, (count, columns)))


def _first(
    plan: MergePlan, item: Item, start: int, stop: int, scratch: Scratch, device: torch.device
) -> PrecisionValue:
    """H_0 + δ."""
    own = plan.base_precision
    if own is None or own.spec(item.name) is None:
        return plan.delta
    values = own.read(item.name, start, stop, scratch, plan.job.dtype).to(device)
    if not plan.delta:
        return values
    total = scratch.array("first", len(values), plan.job.dtype, device)
    if values.dtype == plan.job.dtype:
        return torch.add(values, plan.delta, out=total)
    return total.copy_(values).add_(plan.delta)


def _rounded(result: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    if result.dtype == dtype:
        return result
    return scratch.array("rounded", len(result), dtype, result.device).copy_(result)


def _check_finite(plan: MergePlan, item: Item, result: Tensor, inputs: list[Tensor]) -> None:
    limit = torch.finfo(item.spec.dtype).max
    low, high = torch.aminmax(result)
    if bool(low >= -limit) and bool(high <= limit):
        return
    names = [] if plan.base is None else [plan.base.name]
    names += [part.source.name for part in plan.parts]
    for name, values in zip(names, inputs, strict=True):
        if not bool(values.isfinite().all()):
            raise ModelError(
                f"{item.name!r} of {name!r} holds NaN or inf: a diverged training, or a damaged "
                "file"
            )
    raise ModelError(
        f"the merge of {item.name!r} does not fit into {item.spec.dtype}: give a delta, other "
        "weights or a wider out_dtype"
    )
