"""Per-example, per-column gradients of one layer, kept in factored form.

For K cotangents (columns) c of an example i, a layer with parameter θ_l contributes
G_ic = (∂f_i/∂θ_l)ᵀ c. A :class:`Term` holds all G_ic of a chunk without forming them where it
can, and answers what the posterior structures ask:

* ``gram``        ⟨G_ic ∘ σ², G_ic'⟩                 the layer's share of V_i, ``[B, K, K]``
* ``square_sum``  Σ_i Σ_c G_ic ∘ G_ic                the layer's share of a GGN diagonal
* ``jacobian``    G_ic itself                        ``[B, K, *shape]``

and, for weights that are matrices, the same in a rotated basis U_Gᵀ G U_A (Kronecker factors).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blr_analysis.backprop.outer import Outer


class Term(Protocol):
    """One layer's gradients for a chunk of B examples and K columns."""

    @property
    def names(self) -> tuple[str, ...]: ...
    def jacobian(self) -> dict[str, Tensor]: ...
    def gram(self, variance: Mapping[str, Tensor]) -> Tensor: ...
    def square_sum(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Rows:
    """Embedding: G_c has the row Σ_{t: id_t = v} d_ct for every id v that the example uses.

    ``ids`` ``[B, T]`` lists each id once per example; ``grads`` K tensors ``[B, T, O]`` are the
    sums over its positions (zero in unused slots).
    """

    name: str
    shape: tuple[int, ...]
    ids: Tensor
    grads: list[Tensor]

    @classmethod
    def collect(cls, name: str, shape: tuple[int, ...], ids: Tensor, grads: list[Tensor]) -> Rows:
        """Add up the positions that share an id, within each example."""
        ordered, order = ids.sort(dim=1)
        fresh = torch.ones_like(ordered)
        fresh[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).long()
        slots = fresh.cumsum(1) - 1
        unique = torch.zeros_like(ids).scatter(1, slots, ordered)
        summed = []
        for grad in grads:
            moved = grad.gather(1, order.unsqueeze(-1).expand_as(grad))
            index = slots.unsqueeze(-1).expand_as(grad)
            summed.append(torch.zeros_like(moved).scatter_add(1, index, moved))
        return cls(name, shape, unique, summed)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def jacobian(self) -> dict[str, Tensor]:
        d = torch.stack(self.grads, dim=1)  # [B, K, T, O]
        table = d.new_zeros(*d.shape[:2], *self.shape)
        index = self.ids[:, None, :, None].expand_as(d)
        return {self.name: table.scatter_add(2, index, d)}

    def gram(self, variance: Mapping[str, Tensor]) -> Tensor:
        scale = variance[self.name][self.ids]  # [B, T, O]
        d = torch.stack(self.grads, dim=1)
        return torch.bmm((d * scale.unsqueeze(1)).flatten(2), d.flatten(2).mT)

    def square_sum(self) -> dict[str, Tensor]:
        squares = sum((d.square() for d in self.grads), start=self.grads[0].new_zeros(()))
        total = squares.new_zeros(self.shape)
        total.index_add_(0, self.ids.flatten(), squares.flatten(0, 1))
        return {self.name: total}


@dataclass(frozen=True)
class Dense:
    """G_c held as it is, ``[B, K, *shape]`` per name: small parameters and unknown modules."""

    columns: dict[str, Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)

    def jacobian(self) -> dict[str, Tensor]:
        return self.columns

    def gram(self, variance: Mapping[str, Tensor]) -> Tensor:
        flat = {n: g.reshape(*g.shape[:2], -1) for n, g in self.columns.items()}
        shares = [torch.bmm(g * variance[n].flatten(), g.mT) for n, g in flat.items()]
        return torch.stack(shares).sum(0)

    def square_sum(self) -> dict[str, Tensor]:
        return {n: g.square().sum((0, 1)) for n, g in self.columns.items()}


def merged(terms: list[Term]) -> list[Term]:
    """Terms with every parameter in exactly one of them: shared weights are added up first."""
    owner: dict[str, int] = {}
    result: list[Term | None] = []
    for term in terms:
        hits = sorted({owner[n] for n in term.names if n in owner})
        for hit in hits:
            other = result[hit]
            assert other is not None
            result[hit] = None
            term = _add(other, term)
        for name in term.names:
            owner[name] = len(result)
        result.append(term)
    return [term for term in result if term is not None]


def _add(one: Term, two: Term) -> Term:
    if (
        isinstance(one, Outer)
        and isinstance(two, Outer)
        and (one.weight, one.bias, one.layout) == (two.weight, two.bias, two.layout)
    ):
        return one.joined(two)
    if isinstance(one, Rows) and isinstance(two, Rows) and one.name == two.name:
        ids = torch.cat([one.ids, two.ids], dim=1)
        grads = [torch.cat(pair, dim=1) for pair in zip(one.grads, two.grads, strict=True)]
        return Rows.collect(one.name, one.shape, ids, grads)
    total = dict(one.jacobian())
    for name, columns in two.jacobian().items():
        total[name] = total[name] + columns if name in total else columns
    return Dense(total)
