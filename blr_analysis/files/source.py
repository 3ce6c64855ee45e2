"""Sources of named tensors in files or in memory, which are read piece by piece."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.progress import track

CPU = torch.device("cpu")
PIECE = 2**22  # bytes that a fingerprint reads at a time


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of a stored tensor.

    >>> Spec((2, 3), torch.bfloat16).nbytes
    12
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes on disk."""
        return self.numel * self.dtype.itemsize


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """The shapes and dtypes of tensors in memory."""
    return {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


class Scratch:
    """Buffers that one worker uses again and again: one per key, as large as the largest use.

    >>> scratch = Scratch()
    >>> first = scratch.take("a", 16)
    >>> scratch.take("a", 8).data_ptr() == first.data_ptr()
    True
    """

    def __init__(self) -> None:
        self.buffers: dict[Hashable, Tensor] = {}

    def take(self, key: Hashable, nbytes: int) -> Tensor:
        """``nbytes`` bytes (uint8); they still hold what the last use of the key wrote."""
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < nbytes:
            self.buffers.pop(key, None)  # frees the smaller buffer before the larger one is made
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            self.buffers[key] = buffer
        return buffer[:nbytes]

    def array(
        self, key: Hashable, numel: int, dtype: torch.dtype, device: torch.device = CPU
    ) -> Tensor:
        """A buffer of ``numel`` elements of a dtype; on another device than the CPU a new one."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        return self.take(key, numel * dtype.itemsize).view(dtype)


class Owned(Scratch):
    """Part of a caller's scratch with separate keys: the caller's buffers stay unchanged."""

    def __init__(self, outer: Scratch, owner: Hashable) -> None:
        super().__init__()
        self._outer = outer
        self._owner = owner

    def take(self, key: Hashable, nbytes: int) -> Tensor:
        """A buffer in the caller's scratch, under a key that the caller itself does not use."""
        return self._outer.take((self._owner, key), nbytes)


class Source(ABC):
    """Named tensors that can be read piecewise, by several threads at once.

    Attributes:
        name: the folder or file, for messages.
        specs: shape and dtype by tensor name, in the order in which reading is cheapest.
        origin: the file that turns a base into this model, such as an adapter's; None without one.
        whole: the model as it is stored, if this source only reorders it or changes its rows.
    """

    name: str
    specs: Mapping[str, Spec]
    origin: Source | None = None
    whole: Source | None = None

    def words(self, name: str) -> str:
        """How a tensor is computed, in words; "" if it is stored as it is."""
        return ""

    @abstractmethod
    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        """Elements ``[start, stop)`` of a tensor, flattened row by row, in its stored dtype.

        The result lies in ``scratch`` and is valid until this source reads into it again.

        Raises:
            StorageError: the file cannot be read, or has changed.
        """

    def tensor(self, name: str) -> Tensor:
        """A whole tensor; a state dict in memory answers its own tensor, without a copy."""
        spec = self.specs[name]
        return self.read(name, 0, spec.numel, Scratch()).view(spec.shape)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: self.tensor(name) for name in self.specs}


class Loaded(Source):
    """A state dict as a source; pieces of contiguous tensors are views.

    Raises:
        InputError: no tensors, or values other than dense tensors with numbers.

    Example:
        >>> import torch
        >>> Loaded("mine", {"w": torch.arange(4)}).read("w", 1, 3, Scratch())
        tensor([1, 2])
    """

    def __init__(self, name: str, tensors: Mapping[str, Any]) -> None:
        if not isinstance(tensors, Mapping) or not tensors:
            raise InputError(f"{name} must be a state dict with at least one tensor")
        for key, value in tensors.items():
            if not isinstance(key, str) or not _is_dense(value):
                raise InputError(f"{name}: {key!r} must be a dense tensor with numbers in memory")
        self.name = name
        self.detached: dict[str, Tensor] = {key: value.detach() for key, value in tensors.items()}
        self.specs = specs_of(self.detached)

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        return self.detached[name].reshape(-1)[start:stop]


def fingerprint(source: Source, *, limit: int | None = None, progress: bool | None = None) -> str:
    """The sha256, in hexadecimal, of every tensor's name, dtype, shape and bytes, sorted by name.

    Two folders that hold the same tensors agree, whatever their shards and metadata.

    Args:
        source: the tensors.
        limit: how many numbers of each tensor are read, which tells models apart in little time;
            None: all.
        progress: a bar; None: on a terminal when it takes long.

    Raises:
        StorageError: a file cannot be read.
    """
    digest = hashlib.sha256()
    scratch = Scratch()
    for name in track(sorted(source.specs), label="sha256", show=progress):
        spec = source.specs[name]
        dtype = str(spec.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{dtype}\0{list(spec.shape)}\0".encode())
        numbers_per_piece = max(1, PIECE // spec.dtype.itemsize)
        end = spec.numel if limit is None else min(limit, spec.numel)
        for start in range(0, end, numbers_per_piece):
            stop = min(start + numbers_per_piece, end)
            piece = source.read(name, start, stop, scratch)
            digest.update(bytes_of(piece))
    return digest.hexdigest()


def bytes_of(values: Tensor) -> memoryview:
    """The bytes of a tensor's numbers, without a copy if the tensor is contiguous."""
    dense = values.contiguous()
    # contiguous() leaves any stride on a tensor with one entry or none; as_strided sets it to 1.
    flat = dense.as_strided((dense.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def _is_dense(value: Any) -> bool:
    """Whether this is a tensor whose numbers lie in memory, entry by entry."""
    if not isinstance(value, Tensor):
        return False
    return not (value.is_meta or value.is_sparse or value.is_quantized)
