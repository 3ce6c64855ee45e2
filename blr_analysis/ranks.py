"""The processes that ``torchrun`` starts: each visits its share of the examples, once.

All ranks run the same program on the same model and data. Rank r of R visits the examples
r, r + R, r + 2R, …; what is summed over examples is added up over the ranks, and what is a row
per example is put together in dataset order, so that every rank holds what one process would.

In Python the process group is the one that ``torch.distributed.init_process_group`` opened; where
there is none, or inside of :func:`alone`, nothing here does anything.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blr_analysis.errors import BLRError, InputError, ModelError

WAIT = timedelta(hours=2)  # for a slower rank; one that dies is noticed at once
NO_PIECE = -1  # what a rank names in a round if it needs no weight
_alone = False
_pieces: list[
    weakref.ref[Tensor]
] = []  # the divided weights of all tasks, in one order on all ranks
_piece_numbers: dict[int, int] = {}  # their places in this list, by id


def count() -> int:
    """How many ranks work together."""
    together = dist.is_available() and dist.is_initialized() and not _alone
    return dist.get_world_size() if together else 1


def rank() -> int:
    """Which of them this is."""
    return dist.get_rank() if count() > 1 else 0


def first() -> bool:
    """Whether this is the one that writes."""
    return rank() == 0


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process works as if it were the only one: for analyses of a single rank.

    >>> with alone():
    ...     count()
    1
    """
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def share(indices: Tensor, *same: float) -> Tensor:
    """Those of the indices, the same ones on all ranks, that this rank visits.

    Args:
        same: numbers that tell models and data apart.

    Raises:
        InputError: ranks with other indices or numbers.
    """
    if count() == 1:
        return indices
    _agree(len(indices), float(indices.double().sum()), *same)
    return indices[rank() :: count()]


def check_enough(n_data: int) -> None:
    """Raise :class:`InputError` where there are more ranks than examples."""
    if n_data < count():
        raise InputError(f"{count()} ranks for {n_data} examples: start fewer processes")


def total(tensors: Iterable[Tensor]) -> None:
    """Make every tensor its sum over the ranks, in place."""
    if count() == 1:
        return
    own = list(tensors)
    _agree(len(own), sum(t.numel() for t in own))
    for t in own:
        _reduce(t, dist.ReduceOp.SUM)


def gathered(rows: Tensor, indices: Tensor, n_data: int) -> Tensor:
    """Rows ``[n_data, ...]`` of all ranks in dataset order; ``indices``: of this rank's.

    >>> gathered(torch.tensor([3.0, 4.0]), torch.arange(2), 2)
    tensor([3., 4.])
    """
    if count() == 1:
        return rows
    whole = rows.new_zeros((n_data, *rows.shape[1:]))
    whole[indices.to(rows.device)] = rows
    total([whole])
    return whole


def rows(indices: Tensor) -> slice:
    """Where consecutive examples of a share stand in the whole."""
    return slice(int(indices[0]), int(indices[-1]) + 1, count())


def wait() -> None:
    """Until all ranks are here."""
    if count() > 1:
        _agree(0)


def _agree(*numbers: float) -> None:
    """Raise :class:`InputError` unless all ranks name the same numbers."""
    own = torch.tensor(numbers, dtype=torch.float64)
    both = torch.cat([own, -own])
    _reduce(both, dist.ReduceOp.MAX)
    most, least = both[: len(own)], -both[len(own) :]
    if bool((most - least > 1e-6 * most.abs()).any()):
        raise InputError("the ranks hold different models or data; see ranks.alone()")


def _reduce(tensor: Tensor, how: Any) -> None:
    _finish_rounds()
    where = "cuda" if dist.get_backend() == "nccl" else tensor.device
    moved = tensor.to(where).contiguous()
    try:
        dist.all_reduce(moved, how)
    except RuntimeError as error:  # what gloo and nccl raise where a connection breaks
        raise BLRError(f"another rank is gone, start again: {error}") from error
    if moved is not tensor:
        tensor.copy_(moved)


def launched() -> bool:
    """Whether ``torchrun`` started this process beside others."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def opened() -> Iterator[None]:
    """Under ``torchrun`` a process group until the block ends: nccl for CUDA, gloo for the rest."""
    if not launched() or dist.is_initialized():
        yield
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=WAIT)
    yield
    dist.destroy_process_group()  # after an error the others may not be there to take leave


def is_sharded(tensor: Any) -> bool:
    """Whether this process holds a piece of it alone."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Any:
    """All of a tensor that several processes hold in pieces; what is no such tensor as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def divided(model: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` divides, their weights in pieces: after a forward pass some
    may still be whole."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody loaded it, there are none
    modules: list[Any] = [m for m in model.modules() if fsdp and isinstance(m, fsdp.FSDPModule)]
    for module in modules:
        module.reshard()
    return modules


def check_divided(model: nn.Module) -> None:
    """Let the ranks gather the weights that ``fully_shard`` divides. All ranks call this.

    Raises:
        ModelError: this rank works :func:`alone`, or weights are divided otherwise.
    """
    modules = divided(model)
    pieces: list[Any] = [p for p in model.parameters() if is_sharded(p)]
    if not pieces:
        return
    by_fully_shard = {id(p) for module in modules for p in module.parameters()}
    n_processes = dist.get_world_size()
    if any(id(p) not in by_fully_shard or p.device_mesh.size() != n_processes for p in pieces):
        raise ModelError(
            "weights are divided by parallelize_module, or among some of the processes; load the "
            "full state dict into a plain model"
        )
    if n_processes > 1:
        _check_together()
    for piece in pieces:
        if not _is_known(piece):
            _piece_numbers[id(piece)] = len(_pieces)
            _pieces.append(weakref.ref(piece))


def gathered_piece(piece: Tensor) -> Tensor:
    """All of a divided weight, without gradient; other tensors as they are.

    All ranks take part: see the top of this module.

    Raises:
        ModelError: this rank works :func:`alone`.
    """
    if not is_sharded(piece):
        return piece
    if not _is_known(piece):
        raise ModelError("the model was divided after its Task was made; make the Task anew")
    if dist.get_world_size() == 1:
        return _whole_piece(_piece_numbers[id(piece)])
    _check_together()
    own = _piece_numbers[id(piece)]
    result = piece
    for number in _round(own):
        weight = _whole_piece(number)
        if number == own:
            result = weight
    return result


def _is_known(piece: Tensor) -> bool:
    number = _piece_numbers.get(id(piece))
    return number is not None and _pieces[number]() is piece


def _check_together() -> None:
    if _alone:
        raise ModelError("the model is divided among processes: leave ranks.alone()")


def _round(number: int) -> list[int]:
    """The numbers of the weights that some rank needs, where this one needs ``number``."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    with torch.inference_mode(False):
        own = torch.tensor([number], device=device)
        named = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        try:
            dist.all_gather(named, own)
        except RuntimeError as error:
            raise BLRError(f"another rank is gone, start again: {error}") from error
    return sorted({int(number) for number in named} - {NO_PIECE})


def _whole_piece(number: int) -> Tensor:
    """All of the weight with this number. All ranks call this."""
    piece: Any = _pieces[number]()
    with torch.inference_mode(False), torch.no_grad():
        return piece.full_tensor()


def _finish_rounds() -> None:
    """Take part in rounds until no rank needs a weight."""
    if not _pieces:
        return
    while needed := _round(NO_PIECE):
        for number in needed:
            _whole_piece(number)
