"""Carrying a plan out: pieces of tensors through threads, from the sources into a sink."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm.auto import tqdm

from blr_analysis.errors import ModelError, StorageError
from blr_analysis.files import Folder, Scratch, fingerprint
from blr_analysis.merging.fates import BASE, COPIED, OWN, Item
from blr_analysis.merging.formula import PrecisionValue, combine_into
from blr_analysis.merging.plan import MergePlan


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


def stream(plan: MergePlan, sink: Sink, tell: Callable[[int], object]) -> Counter[str]:
    """Merge every tensor of the plan; the result does not depend on threads or piece lengths.

    Args:
        plan: what to do.
        sink: where the result goes.
        tell: called with the bytes read, after every piece.

    Returns:
        By tensor name, the entries where H̄ ≤ 0 and task arithmetic stands.

    Raises:
        ModelError: NaN or inf in a model or in the result.
        PosteriorError: NaN, inf or negative numbers in a precision.
        StorageError: a file that cannot be read or written.
    """
    pieces, lock = _pieces(plan), threading.Lock()
    fallback: Counter[str] = Counter()
    failed: list[BaseException] = []

    def work() -> None:
        scratch = Scratch()
        try:
            while not failed:
                with lock:
                    piece = next(pieces, None)
                if piece is None:
                    return
                item, start, stop = piece
                undefined = _merge(plan, item, start, stop, sink, scratch)
                with lock:
                    if undefined:
                        fallback[item.name] += undefined
                    tell(plan.bytes_of(item) * (stop - start) // max(item.spec.numel, 1))
        except BaseException as error:
            failed.append(error)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # pieces run side by side already
    helpers = [threading.Thread(target=work, daemon=True) for _ in range(plan.workers - 1)]
    try:
        for helper in helpers:
            helper.start()
        work()
        for helper in helpers:
            helper.join()
    except BaseException as error:  # such as Ctrl-C while the others finish
        failed.append(error)
    finally:
        for helper in helpers:
            if helper.ident is not None:
                helper.join()
        torch.set_num_threads(threads)
    if failed:
        raise failed[0]
    return fallback


def _pieces(plan: MergePlan) -> Iterator[Piece]:
    for item in plan.items:
        for start in range(0, item.spec.numel, plan.chunk):
            yield item, start, min(start + plan.chunk, item.spec.numel)


def _merge(plan: MergePlan, item: Item, start: int, stop: int, sink: Sink, scratch: Scratch) -> int:
    if item.fate == COPIED:
        sink.put(item.name, start, plan.reference.read(item.name, start, stop, scratch))
        return 0
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
            h = part.precision.read(item.name, start, stop, scratch, plan.dtype)
            curved.append(h.to(device))
        else:
            curved.append(first if kind == BASE else 0.0)
    if device.type == "cpu":
        result = scratch.array("result", stop - start, plan.dtype)
    else:
        result = torch.empty(stop - start, dtype=plan.dtype, device=device)
    undefined = combine_into(result, base, models, item.weights, curved, first, scratch)
    _check_finite(plan, item, result, [*([] if base is None else [base]), *models])
    sink.put(item.name, start, _rounded(result, item.spec.dtype, scratch))
    return undefined if plan.method.uses_precisions else 0


def _first(
    plan: MergePlan, item: Item, start: int, stop: int, scratch: Scratch, device: torch.device
) -> PrecisionValue:
    """H_0 + δ."""
    own = plan.base_precision
    if own is None or own.spec(item.name) is None:
        return plan.delta
    values = own.read(item.name, start, stop, scratch, plan.dtype).to(device)
    if not plan.delta:
        return values
    if device.type != "cpu":
        return values.to(plan.dtype) + plan.delta
    own = scratch.array("first", len(values), plan.dtype)
    if values.dtype == plan.dtype:
        return torch.add(values, plan.delta, out=own)
    return own.copy_(values).add_(plan.delta)


def _rounded(result: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
    if result.dtype == dtype:
        return result
    if result.device.type != "cpu":
        return result.to(dtype)
    return scratch.array("rounded", len(result), dtype).copy_(result)


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


class Compared:
    """A sink that writes nothing: every piece is compared, to the bit, with what was written."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._own = threading.local()

    def put(self, name: str, start: int, values: Tensor) -> None:
        if not hasattr(self._own, "scratch"):
            self._own.scratch = Scratch()
        stop = start + len(values)
        written = self._folder.read(name, start, stop, self._own.scratch)
        if not torch.equal(written.view(torch.uint8), values.contiguous().view(torch.uint8)):
            raise StorageError(
                f"{name!r} in {self._folder.name!r} is not what was merged: remove the folder and "
                "merge again"
            )


@torch.inference_mode()
def verify(plan: MergePlan, folder: Path, *, progress: bool | None = None) -> str:
    """Merge again, in memory, and compare every number with the files in ``folder``.

    Returns:
        The fingerprint of the merged weights, the same for any number of shards.

    Raises:
        StorageError: a tensor is missing, of another shape or dtype, or holds another number.
    """
    written = Folder.open(folder)
    specs = {item.name: item.spec for item in plan.items}
    if dict(written.specs) != specs:
        odd = sorted(n for n in {*specs, *written.specs} if specs.get(n) != written.specs.get(n))
        raise StorageError(
            f"{str(folder)!r} differs from the merge in {odd[0]!r}: remove the folder and merge "
            "again"
        )
    total, off = plan.bytes_read, None if progress is None else not progress
    with tqdm(
        total=total, desc="verifying", unit="B", unit_scale=True, disable=off, delay=1, leave=False
    ) as bar:
        stream(plan, Compared(written), bar.update)
    return fingerprint(written, progress=progress)
