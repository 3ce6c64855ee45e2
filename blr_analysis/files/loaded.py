"""Tensors in memory, as a source like those on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.files.source import Scratch, Source, Spec


class Loaded(Source):
    """A state dict as a source; pieces are views of its tensors where those have no holes.

    Raises:
        InputError: no tensors, or values that are none, or that hold no numbers.

    Example:
        >>> import torch
        >>> Loaded("mine", {"w": torch.arange(4)}).read("w", 1, 3, Scratch())
        tensor([1, 2])
    """

    def __init__(self, name: str, tensors: Mapping[str, Any]) -> None:
        if not isinstance(tensors, Mapping) or not tensors:
            raise InputError(
                f"{name} must be a state dict with at least one tensor, got "
                f"{'an empty one' if isinstance(tensors, Mapping) else type(tensors).__name__}"
            )
        for key, value in tensors.items():
            if not isinstance(key, str) or not isinstance(value, Tensor):
                raise InputError(f"{name}: {key!r} is no tensor but a {type(value).__name__}")
            if value.is_meta or value.is_sparse or value.is_quantized:
                raise InputError(f"{name}: {key!r} is no dense tensor that holds numbers")
        self.name = name
        self.tensors: dict[str, Tensor] = {k: v.detach() for k, v in tensors.items()}
        self.specs = {k: Spec(tuple(v.shape), v.dtype) for k, v in self.tensors.items()}

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        self.piece(name, start, stop)
        return self.tensors[name].reshape(-1)[start:stop]
