"""Per-example, per-column gradients of one layer, kept in factored form.

For K cotangents (columns) c of an example i, a layer with parameter θ_l contributes
G_ic = (∂f_i/∂θ_l)ᵀ c. A :class:`Term` holds all G_ic of a chunk without forming them where it
can, and answers what is asked of them:

* ``gram``        ⟨G_ic ∘ σ², G_ic'⟩          the layer's share of V_i, ``[B, K, K]``
* ``square_sum``  Σ_i Σ_c G_ic ∘ G_ic         the layer's share of a GGN diagonal
* ``products``    ⟨G_ic, U_k⟩                 J_i Uᵀ for r stacked vectors, ``[B, K, r]``
* ``combined``    Σ_i Σ_c t_ick G_ic          Σ_i J_iᵀ T_i, ``[r, *shape]``
* ``projected``   ⟨G_i, r_k s_kᵀ⟩             with random matrices of rank one, ``[B, r]``
* ``rotated``     U_Gᵀ G_ic U_A               in the basis of Kronecker factors

A layer of a new kind subclasses :class:`Term` in a file of its own: ``names`` and ``jacobian`` are
enough, and every other answer is taken from them until it gives a cheaper one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blr_analysis.backprop.matmul import product
from blr_analysis.backprop.matrices import Basis, Joint, MatrixShape
from blr_analysis.backprop.tree import Tree
from blr_analysis.errors import ModelError

HELD = 2**21  # numbers of an intermediate result: rows of a stack are taken in slices


@dataclass(frozen=True)
class TermCost:
    """Numbers that a layer holds per example: its data, each column's gradient, a gram of K."""

    inputs: float = 0.0
    column: float = 0.0
    gram: Callable[[int], float] = lambda columns: 0.0


class Term(ABC):
    """One layer's gradients for a chunk of B examples and K columns."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The parameters it covers."""

    @abstractmethod
    def jacobian(self) -> Tree:
        """G_ic itself, ``[B, K, *shape]`` by name."""

    @property
    def n_examples(self) -> int:
        """B."""
        return len(next(iter(self.jacobian().values())))

    @property
    def n_columns(self) -> int:
        """K."""
        return next(iter(self.jacobian().values())).shape[1]

    def part(self, chosen: slice) -> Term:
        """The same for some of the examples."""
        return Dense({n: g[chosen] for n, g in self.jacobian().items()})

    def divided(self, size: int) -> Iterator[Term]:
        """The same for at most ``size`` examples at a time."""
        return (self.part(chosen) for chosen in slices(self.n_examples, size))

    def columns(self, chosen: slice) -> Term:
        """The same for some of the columns."""
        return Dense({n: g[:, chosen] for n, g in self.jacobian().items()})

    @property
    def matrix(self) -> MatrixShape | None:
        """The shape of a weight that is stored as one matrix ``[O, I]``, for :meth:`rows`; None of
        any other parameters."""
        return None

    def rows(self, chosen: slice) -> Term:
        """The same for some rows of that matrix."""
        raise NotImplementedError

    def cast(self, dtype: torch.dtype) -> Term:
        """The term with its numbers in another precision."""
        return Dense({n: g.to(dtype) for n, g in self.jacobian().items()})

    def joined(self, other: Term) -> Term | None:
        """The sum with another call of the same parameters; None where it has no factored form."""
        return None

    def cost(self) -> TermCost:
        """What it holds, for the chunk size."""
        numbers = sum(g[:, 0].numel() for g in self.jacobian().values())
        return TermCost(column=numbers / self.n_examples)

    def gram(self, variance: Mapping[str, Tensor], into: Tensor | None = None) -> Tensor:
        """⟨G_ic ∘ σ², G_ic'⟩, ``[B, K, K]``, added to ``into`` unless that is None."""
        for name, g in self.jacobian().items():
            flat = g.reshape(*g.shape[:2], -1)
            into = added_bmm(into, flat * variance[name].flatten(), flat.mT)
        return total([]) if into is None else into

    @property
    def zeros(self) -> Tree:
        """0 in the shapes of its parameters."""
        return {n: torch.zeros_like(g[0, 0]) for n, g in self.jacobian().items()}

    def square_sum(self) -> Tree:
        """Σ_i Σ_c G_ic ∘ G_ic."""
        squares = self.zeros
        self.add_square_sum(squares)
        return squares

    def add_square_sum(self, into: Tree) -> None:
        """Add :meth:`square_sum` to ``into``."""
        for name, g in self.jacobian().items():
            into[name] += g.square().sum((0, 1))

    def sum(self) -> Tree:
        """Σ_i Σ_c G_ic."""
        return {n: g.sum((0, 1)) for n, g in self.jacobian().items()}

    def products(
        self,
        stack: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        scale: Mapping[str, Tensor] | None = None,
        room: int | None = None,
    ) -> Tensor:
        """⟨G_ic, s ∘ U_k⟩, ``[B, K, r]``, from U ``[r, *shape]`` and s ``[*shape]`` by name.

        ``room`` bounds the numbers of G that are made at once, some examples at a time.
        """
        numbers = sum(stack[name].shape[1:].numel() for name in self.names)
        first = stack[self.names[0]]
        r = len(first)
        b = self.n_examples
        shares = first.new_zeros(b, self.n_columns, r, dtype=dtype)
        is_copied = scale is not None or any(stack[name].dtype != dtype for name in self.names)
        rows = list(slices(r, HELD // max(1, numbers) if is_copied else r))
        size = b if room is None else room // (2 * self.n_columns * numbers)
        for examples in slices(b, size):
            for name, g in self.part(examples).jacobian().items():
                flat = g.to(dtype).reshape(*g.shape[:2], -1)
                for at in rows:
                    u = scaled_rows(stack, name, at, dtype, scale)
                    shares[examples, :, at] += product(flat, u.mT)
        return shares

    def combined(self, weights: Tensor, into: Tree) -> None:
        """Add Σ_i Σ_c t_ick G_ic to ``into``, ``[r, *shape]`` by name, for t ``[B, K, r]``."""
        flat = weights.flatten(0, 1).mT
        for name, g in self.jacobian().items():
            columns = g.to(weights.dtype).reshape(flat.shape[1], -1)
            for at in slices(len(flat), HELD // max(1, columns.shape[1])):
                into[name][at] += product(flat[at], columns).view(-1, *g.shape[2:])

    def joints(self) -> list[Joint]:
        """How each parameter is read as matrices: a weight as the layer does, the rest by rows."""
        shapes = {n: tuple(g.shape[2:]) for n, g in self.jacobian().items()}
        return [by_rows(name, shape) for name, shape in shapes.items()]

    def projected(self, joint: Joint, left: Tensor, right: Tensor, room: int) -> Tensor:
        """⟨G_i, r_k s_kᵀ⟩ of one column, ``[B, r]``: r ``[g, O, r]``, s ``[g, I, r]``."""
        return rank_one(joint.join(self.jacobian())[:, 0], left, right, room)

    def factors(
        self, *, padded: bool = False, vocabulary: int = 0
    ) -> tuple[Joint, Tensor, Tensor] | None:
        """Kronecker factors Σ a aᵀ and Σ d dᵀ of the layer's matrices; None: it has none, or a row
        for each word of the vocabulary."""
        return None

    def rotated(self, basis: Basis) -> Term:
        """U_Gᵀ G U_A, named and shaped as the basis is: ``basis.key``, ``[g, O, I']``."""
        joint = basis.join(self.jacobian()).movedim(1, 2)
        if basis.left is not None:
            joint = basis.left.mT.unsqueeze(1) @ joint
        return Dense({basis.key: (joint @ basis.right.unsqueeze(1)).movedim(2, 1)})

    def rotated_gram(self, basis: Basis, variance: Tensor, into: Tensor | None = None) -> Tensor:
        """⟨U_Gᵀ G_c U_A ∘ σ², U_Gᵀ G_c' U_A⟩ with σ² ``[g, O, I']``, ``[B, K, K]``."""
        return self.rotated(basis).gram({basis.key: variance}, into)


@dataclass(frozen=True)
class Dense(Term):
    """G_c as it is, ``[B, K, *shape]`` per name: small parameters and unknown modules."""

    gradients: Tree

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.gradients)

    def jacobian(self) -> Tree:
        return self.gradients


@dataclass(frozen=True)
class Apart(Term):
    """A sum of terms of which at most one differs from 0 at any place: their squares add up too."""

    parts: tuple[Term, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(n for part in self.parts for n in part.names))

    @property
    def n_examples(self) -> int:
        return self.parts[0].n_examples

    @property
    def n_columns(self) -> int:
        return self.parts[0].n_columns

    def _changed(self, change: Callable[[Term], Term]) -> Apart:
        return Apart(tuple(change(part) for part in self.parts))

    def part(self, chosen: slice) -> Apart:
        return self._changed(lambda part: part.part(chosen))

    def columns(self, chosen: slice) -> Apart:
        return self._changed(lambda part: part.columns(chosen))

    @property
    def matrix(self) -> MatrixShape | None:
        layouts = {part.matrix for part in self.parts}
        return layouts.pop() if len(layouts) == 1 else None

    def rows(self, chosen: slice) -> Apart:
        return self._changed(lambda part: part.rows(chosen))

    def cast(self, dtype: torch.dtype) -> Apart:
        return self._changed(lambda part: part.cast(dtype))

    def cost(self) -> TermCost:
        costs = [part.cost() for part in self.parts]
        return TermCost(
            inputs=sum(cost.inputs for cost in costs),
            column=sum(cost.column for cost in costs),
            gram=lambda columns: sum(cost.gram(columns) for cost in costs),
        )

    def jacobian(self) -> Tree:
        return _by_name([part.jacobian() for part in self.parts])

    def gram(self, variance: Mapping[str, Tensor], into: Tensor | None = None) -> Tensor:
        for part in self.parts:
            into = part.gram(variance, into)
        return total([]) if into is None else into

    @property
    def zeros(self) -> Tree:
        return _by_name([part.zeros for part in self.parts])

    def add_square_sum(self, into: Tree) -> None:
        for part in self.parts:
            part.add_square_sum(into)

    def sum(self) -> Tree:
        return _by_name([part.sum() for part in self.parts])

    def products(
        self,
        stack: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        scale: Mapping[str, Tensor] | None = None,
        room: int | None = None,
    ) -> Tensor:
        return products(self.parts, stack, dtype=dtype, scale=scale, room=room)

    def combined(self, weights: Tensor, into: Tree) -> None:
        for part in self.parts:
            part.combined(weights, into)

    def joints(self) -> list[Joint]:
        by_key = {joint.key: joint for part in self.parts for joint in part.joints()}
        return list(by_key.values())

    def projected(self, joint: Joint, left: Tensor, right: Tensor, room: int) -> Tensor:
        parts = [part for part in self.parts if joint.key in part.names]
        return total([part.projected(joint, left, right, room) for part in parts])


def merged(terms: list[Term]) -> list[Term]:
    """Terms with every parameter in exactly one of them: shared weights are added up first."""
    place: dict[str, int] = {}  # of a parameter's term in the result
    result: list[Term | None] = []  # None: it was added to a later one
    for term in terms:
        for k in sorted({place[name] for name in term.names if name in place}):
            earlier = result[k]
            assert earlier is not None
            result[k] = None
            term = _sum_of(earlier, term)
        place.update(dict.fromkeys(term.names, len(result)))
        result.append(term)
    return [term for term in result if term is not None]


def _sum_of(first: Term, second: Term) -> Term:
    """In factored form, where there is one."""
    factored = first.joined(second) or second.joined(first)
    return factored or Dense(_by_name([first.jacobian(), second.jacobian()]))


def _by_name(trees: Sequence[Tree]) -> Tree:
    """The sum of tensors by name."""
    sums: Tree = {}
    for tree in trees:
        for name, tensor in tree.items():
            sums[name] = sums[name] + tensor if name in sums else tensor
    return sums


def products(
    terms: Sequence[Term],
    stack: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    scale: Mapping[str, Tensor] | None = None,
    room: int | None = None,
) -> Tensor:
    """⟨G_ic, s ∘ U_k⟩ summed over the layers, ``[B, K, r]``: :meth:`Term.products`."""
    return total(term.products(stack, dtype=dtype, scale=scale, room=room) for term in terms)


def pieces(terms: Sequence[Term], size: int) -> Iterator[list[Term]]:
    """The same terms for at most ``size`` examples at a time."""
    examples = terms[0].n_examples if terms else 0
    if examples <= size:
        yield list(terms)
        return
    for piece in zip(*(term.divided(size) for term in terms), strict=True):
        yield list(piece)


def total(parts: Iterable[Tensor]) -> Tensor:
    """The sum of the layers' shares, each of which is freed once it is added.

    Raises:
        ModelError: there is no layer.
    """
    shares = iter(parts)
    result = next(shares, None)
    if result is None:
        raise ModelError("no trainable parameter of the posterior takes part in the model")
    second = next(shares, None)
    if second is None:
        return result
    result = result + second  # a new tensor: the first share may be in use elsewhere
    del second
    for share in shares:
        result += share
    return result


def added(into: Tensor | None, share: Tensor) -> Tensor:
    """The share itself, or ``into`` with it added."""
    return share if into is None else into.add_(share)


def added_bmm(into: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """The product of matrices itself, or ``into`` with it added."""
    return torch.bmm(left, right) if into is None else into.baddbmm_(left, right)


def slices(n: int, size: int) -> Iterator[slice]:
    """0 … n in runs of ``size`` (at least one)."""
    size = max(1, size)
    return (slice(start, min(n, start + size)) for start in range(0, n, size))


def scaled_rows(
    stack: Mapping[str, Tensor],
    name: str,
    rows: slice,
    dtype: torch.dtype,
    scale: Mapping[str, Tensor] | None,
) -> Tensor:
    """Some rows of s ∘ U, flat: ``[rows, p]``."""
    u = stack[name][rows].to(dtype)
    if scale is not None:
        u = u * scale[name].to(dtype)
    return u.reshape(len(u), -1)


def by_rows(name: str, shape: tuple[int, ...]) -> Joint:
    """A parameter read as one matrix of its rows."""
    rows = shape[0] if shape else 1
    return Joint(name, None, MatrixShape(1, rows, torch.Size(shape).numel() // rows, shape))


def rank_one(matrices: Tensor, left: Tensor, right: Tensor, room: int) -> Tensor:
    """⟨G_i, r_k s_kᵀ⟩ of gradients ``[B, g, O, I]`` that are held as they are, ``[B, r]``."""
    b, g, o, _ = matrices.shape
    r = left.shape[-1]
    inner = matrices.new_zeros(b, r)
    for at in slices(o, room // (2 * b * g * r)):
        inner += (matrices[:, :, at] @ right).mul_(left[:, at]).sum((1, 2))
    return inner
