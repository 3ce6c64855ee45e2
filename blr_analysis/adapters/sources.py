"""A base with an adapter, and a base with untied layers, as sources of tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blr_analysis.adapters.products import Product
from blr_analysis.files import Owned, Scratch, Source, Spec

ELEMENTS_PER_BLOCK = 2**16  # of W that are computed at a time, in whole rows


class Adapted(Source):
    """A base and the tensors of it that an adapter changes.

    Attributes:
        changes: what the adapter does to a tensor, in words, by the base's names. All other tensors
            are the base's.
        untied: tensors that the base stores only under the name of a tensor they are tied to, and
            that the adapter trained apart: the tied name by the tensor's own name.
    """

    def __init__(
        self,
        name: str,
        base: Source,
        file: Source,
        changed: Mapping[str, Product | Tensor],
        dtype: torch.dtype | None,
        untied: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.base = base
        self.origin = file
        self.untied = dict(untied or {})
        self._file = file
        self._changed = changed
        self.changes = {key: _description(change) for key, change in changed.items()}
        self.specs = dict(base.specs)
        for key, change in changed.items():
            spec = base.specs[self.untied.get(key, key)]
            wider_dtype = torch.promote_types(dtype or spec.dtype, spec.dtype)
            # A table of tokens may have more rows than the base's.
            shape = tuple(change.shape) if isinstance(change, Tensor) else spec.shape
            self.specs[key] = Spec(shape, wider_dtype)

    def words(self, name: str) -> str:
        return self.changes.get(name, "")

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        change = self._changed.get(name)
        if change is None:
            return self.base.read(name, start, stop, Owned(scratch, (self, "base")))
        piece = scratch.array((self, "piece"), stop - start, self.specs[name].dtype)
        if isinstance(change, Tensor):
            return piece.copy_(change.view(-1)[start:stop])
        if len(piece):
            self._fill(piece, name, change, start, scratch)
        return piece

    def _fill(
        self, piece: Tensor, name: str, product: Product, start: int, scratch: Scratch
    ) -> None:
        """Write the entries of W_0 + s·B·A from ``start`` on into ``piece``.

        The sum is computed in float32 (float64 where the base is) and rounded once. Its blocks of
        whole rows stand at fixed places, so that the bits do not depend on the piece.
        """
        rows, columns = self.specs[name].shape
        stop = start + len(piece)
        rows_per_block = max(1, ELEMENTS_PER_BLOCK // columns)
        first_block = start // columns // rows_per_block
        last_block = (stop - 1) // columns // rows_per_block
        top = first_block * rows_per_block
        bottom = min(rows, (last_block + 1) * rows_per_block)
        dtype = torch.promote_types(torch.float32, self.base.specs[name].dtype)
        a = self._file.tensor(product.a).to(dtype)
        b = self._rows_of_b(product, top, bottom, scratch).to(dtype)
        for first_row in range(top, bottom, rows_per_block):
            # A copy has the same alignment whatever the piece, and so the same rounding.
            b_rows = b[first_row - top : first_row - top + rows_per_block].clone()
            block = torch.mm(b_rows, a).mul_(product.scale).view(-1)
            block_start = first_row * columns
            block_stop = block_start + len(block)
            base_scratch = Owned(scratch, (self, "base"))
            weights = self.base.read(name, block_start, block_stop, base_scratch)
            block.add_(weights.to(block))
            low = max(start, block_start)
            high = min(stop, block_stop)
            piece[low - start : high - start] = block[low - block_start : high - block_start]

    def _rows_of_b(self, product: Product, top: int, bottom: int, scratch: Scratch) -> Tensor:
        """The rows of B from ``top`` to ``bottom``, ``[bottom − top, r]``."""
        rank = product.rank
        file_scratch = Owned(scratch, (self, "file"))
        entries = self._file.read(product.b, top * rank, bottom * rank, file_scratch)
        return entries.view(-1, rank)


def _description(change: Product | Tensor) -> str:
    """What the adapter does to a tensor, in words."""
    if isinstance(change, Tensor):
        return "by PEFT"
    return f"LoRA, r={change.rank}, scaling {change.scale:.4g}"


class Untied(Source):
    """A model that answers tied tensors under both names, because an adapter trained them apart."""

    def __init__(self, source: Source, untied: Mapping[str, str]) -> None:
        self._source = source
        self._untied = {name: twin for name, twin in untied.items() if name not in source.specs}
        self.name = source.name
        self.origin = source.origin
        self.whole = source.whole or source
        self.specs = dict(source.specs)
        for name, twin in self._untied.items():
            self.specs[name] = source.specs[twin]

    def words(self, name: str) -> str:
        return self._source.words(self._untied.get(name, name))

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        stored_name = self._untied.get(name, name)
        return self._source.read(stored_name, start, stop, Owned(scratch, (self, name)))
