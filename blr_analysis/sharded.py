"""A model that ``fully_shard`` divides, run with our own weights.

Each process holds a piece of every weight. While a module that ``fully_shard`` was called on runs,
the process holds its weights whole, as in training. Then they are freed. What autograd saves of
them is freed, too, and gathered again, one weight at a time, in the backward pass.

The hooks of ``fully_shard`` itself do not run: they would put the model's own weights in place of
ours, and expect that all processes run the same modules at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from blr_analysis.ranks import gathered_piece, is_sharded

FSDP = "torch.distributed.fsdp"


@contextmanager
def gathering(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, these modules, which ``fully_shard`` divides, gather their weights when they run.

    A weight that was replaced by a plain tensor stays as it is.
    """
    if not modules:
        yield
        return
    gatherer = _Gatherer(divided=set(modules))
    hooks = [hook for module in modules for hook in gatherer.hooks_of(module)]
    before = [hook.hooks[hook.key] for hook in hooks]
    try:
        for hook in hooks:
            hook.hooks[hook.key] = hook.function
        with gatherer.saving_pieces():
            yield
    finally:
        for hook, function in zip(hooks, before, strict=True):
            hook.hooks[hook.key] = function
        gatherer.release_all()


class _Hook(NamedTuple):
    """A hook of a module, and the function that stands in its place."""

    hooks: dict[int, Any]
    key: int
    function: Any


class _Released(NamedTuple):
    """A place in a module whose weight was gathered, and the piece that it had."""

    parameters: dict[str, Any]
    name: str
    piece: Tensor


@dataclass(frozen=True)
class SavedPiece:
    """What autograd saves instead of a weight that was gathered, or of a view of it."""

    piece: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self) -> Tensor:
        return gathered_piece(self.piece).as_strided(self.shape, self.stride, self.offset)


class _Gatherer:
    """Gathers the weights of the modules that run.

    Attributes:
        divided: the modules that ``fully_shard`` was called on.
        running: what was gathered for each of them that runs at the moment; the inner ones last.
        pieces: the pieces of the weights that are whole, by the address of the whole weight.
    """

    def __init__(self, divided: set[nn.Module]) -> None:
        self.divided = divided
        self.running: list[list[_Released]] = []
        self.pieces: dict[int, Tensor] = {}

    def hooks_of(self, module: nn.Module) -> Iterator[_Hook]:
        """The module's hooks of ``fully_shard``; the first before and after a call become ours."""
        for hooks, ours in (
            (module._forward_pre_hooks, self.gather),
            (module._forward_hooks, self.release),
        ):
            keys = [key for key, hook in hooks.items() if _is_of_fsdp(hook)]
            for number, key in enumerate(keys):
                yield _Hook(hooks, key, ours if number == 0 else _nothing)

    def gather(self, module: nn.Module, *_: Any) -> None:
        """Put whole weights in place of the pieces that the module holds."""
        whole: dict[int, Tensor] = {}  # by the id of the piece: tied weights are gathered once
        gathered = []
        self.running.append(gathered)
        for part in self._own_parts(module):
            parameters: dict[str, Any] = part._parameters
            pieces = {name: p for name, p in parameters.items() if is_sharded(p)}
            for name, piece in pieces.items():
                if id(piece) not in whole:
                    whole[id(piece)] = gathered_piece(piece)
                    self.pieces[_address(whole[id(piece)])] = piece
                gathered.append(_Released(parameters, name, piece))
                parameters[name] = whole[id(piece)]

    def release(self, *_: Any) -> None:
        """Put the pieces back, after the module that :meth:`gather` was last called for."""
        for parameters, name, piece in self.running.pop():
            whole = parameters[name]
            parameters[name] = piece
            self.pieces.pop(_address(whole), None)

    def release_all(self) -> None:
        """Put all pieces back, also after an error."""
        while self.running:
            self.release()

    def _own_parts(self, module: nn.Module) -> Iterator[nn.Module]:
        """The module and the modules inside, without those of another divided module."""
        yield module
        for child in module.children():
            if child not in self.divided:
                yield from self._own_parts(child)

    @contextmanager
    def saving_pieces(self) -> Iterator[None]:
        """Inside, autograd saves pieces instead of gathered weights.

        Other tensors go to the hooks that were there before, if any.
        """
        autograd: Any = vars(torch._C)["_autograd"]
        if not autograd._saved_tensors_hooks_is_enabled():  # inside of torch.func
            yield
            return
        outer = autograd._top_saved_tensors_default_hooks(True)

        def pack(tensor: Tensor) -> Any:
            piece = self.pieces.get(_address(tensor))
            if piece is not None:
                offset = int(tensor.storage_offset())
                return SavedPiece(piece, tensor.shape, tensor.stride(), offset)
            return tensor.detach() if outer is None else outer[0](tensor)

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, SavedPiece):
                return saved.view()
            return saved if outer is None else outer[1](saved)

        with saved_tensors_hooks(pack, unpack):
            yield


def _is_of_fsdp(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith(FSDP)


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
