"""Per-example, per-column gradients of one layer, in factored form.

For K cotangents (columns) c of an example i, a layer with parameter θ_l contributes
G_ic = (∂f_i/∂θ_l)ᵀ c. A :class:`Term` stands for all G_ic of a chunk and forms them only where it
must. It computes:

* ``gram``        ⟨G_ic ∘ σ², G_ic'⟩          the layer's share of V_i, ``[B, K, K]``
* ``square_sum``  Σ_i Σ_c G_ic ∘ G_ic         the layer's share of a GGN diagonal
* ``products``    ⟨G_ic, U_r⟩                 J_i Uᵀ for R stacked vectors, ``[B, K, R]``
* ``combined``    Σ_i Σ_c w_icr G_ic          Σ_i J_iᵀ W_i, ``[R, *shape]``
* ``projected``   ⟨G_i, r_k s_kᵀ⟩             with random matrices of rank one, ``[B, R]``
* ``rotated``     U_Gᵀ G_ic U_A               in the basis of Kronecker factors

A layer of a new kind subclasses :class:`Term` in a file of its own: ``names`` and ``jacobian`` are
enough, and every other answer is computed from them unless the subclass gives a cheaper one.
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

TEMPORARY_NUMBERS = 2**21
"""Numbers (not bytes) of a temporary tensor at most: a stack of vectors is taken in slices."""


@dataclass(frozen=True)
class TermCost:
    """How many numbers a layer keeps in memory for each example.

    Attributes:
        inputs: those that do not depend on the number of columns.
        column: those of every column's gradient.
        gram: those of temporary tensors while a gram is computed, by the number of columns.
    """

    inputs: float = 0.0
    column: float = 0.0
    gram: Callable[[int], float] = lambda n_columns: 0.0


class Term(ABC):
    """One layer's gradients for a chunk of B examples and K columns."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The parameters whose gradients these are."""

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

    @property
    def n_positions(self) -> int:
        """T, the number of positions that an example's factors are summed over; 1 without
        factors."""
        return 1

    def part(self, chosen: slice) -> Term:
        """The gradients of some of the examples."""
        return Dense({n: g[chosen] for n, g in self.jacobian().items()})

    def divided(self, size: int) -> Iterator[Term]:
        """The gradients of at most ``size`` examples at a time."""
        return (self.part(chosen) for chosen in slices(self.n_examples, size))

    def columns(self, chosen: slice) -> Term:
        """The gradients for some of the columns."""
        return Dense({n: g[:, chosen] for n, g in self.jacobian().items()})

    @property
    def matrix(self) -> MatrixShape | None:
        """The shape of a weight that is stored as one matrix ``[O, I]``, for :meth:`rows`; None
        where the term has other parameters."""
        return None

    def rows(self, chosen: slice) -> Term:
        """The gradients of some rows of :attr:`matrix`, under the weight's name."""
        raise NotImplementedError

    def cast(self, dtype: torch.dtype) -> Term:
        """The gradients in another precision."""
        return Dense({n: g.to(dtype) for n, g in self.jacobian().items()})

    def joined(self, other: Term) -> Term | None:
        """The sum of both terms, for two calls of the same parameters; None where the sum has no
        factored form."""
        return None

    def cost(self) -> TermCost:
        """How many numbers the term keeps in memory: the size of a chunk follows from it."""
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
        """Tensors of 0 in the shapes of the parameters, by name."""
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
        """⟨G_ic, s ∘ U_r⟩, ``[B, K, R]``, from U ``[R, *shape]`` and s ``[*shape]`` by name.

        ``room`` bounds the numbers of G that are formed at once, some examples at a time.
        """
        b = self.n_examples
        k = self.n_columns
        n_parameters = sum(stack[name].shape[1:].numel() for name in self.names)
        first = stack[self.names[0]]
        inner = first.new_zeros(b, k, len(first), dtype=dtype)
        is_copied = scale is not None or any(stack[name].dtype != dtype for name in self.names)
        stacked_at_once = len(first)
        if is_copied:
            stacked_at_once = TEMPORARY_NUMBERS // max(1, n_parameters)
        examples_at_once = b if room is None else room // (2 * k * n_parameters)
        for examples in slices(b, examples_at_once):
            for name, g in self.part(examples).jacobian().items():
                flat = g.to(dtype).reshape(*g.shape[:2], -1)
                for chosen in slices(len(first), stacked_at_once):
                    u = scaled_rows(stack, name, chosen, dtype, scale)
                    inner[examples, :, chosen] += product(flat, u.mT)
        return inner

    def combined(self, weights: Tensor, into: Tree) -> None:
        """Add Σ_i Σ_c w_icr G_ic to ``into``, ``[R, *shape]`` by name, for w ``[B, K, R]``."""
        by_vector = weights.flatten(0, 1).mT  # [R, B K]
        for name, g in self.jacobian().items():
            gradients = g.to(weights.dtype).reshape(by_vector.shape[1], -1)  # [B K, p]
            size = TEMPORARY_NUMBERS // max(1, gradients.shape[1])
            for chosen in slices(len(by_vector), size):
                sums = product(by_vector[chosen], gradients)
                into[name][chosen] += sums.view(-1, *g.shape[2:])

    def joints(self) -> list[Joint]:
        """How each parameter is read as a matrix: a weight as the layer does, others by rows."""
        shapes = {n: tuple(g.shape[2:]) for n, g in self.jacobian().items()}
        return [by_rows(name, shape) for name, shape in shapes.items()]

    def projected(self, joint: Joint, left: Tensor, right: Tensor, room: int) -> Tensor:
        """⟨G_i, r_k s_kᵀ⟩ of a term of one column, ``[B, R]``.

        Args:
            joint: which of the term's matrices.
            left: the vectors r_k, ``[g, O, R]``.
            right: the vectors s_k, ``[g, I, R]``.
            room: numbers of temporary tensors at most.
        """
        return rank_one(joint.join(self.jacobian())[:, 0], left, right, room)

    def factors(
        self, *, padded: bool = False, vocabulary: int = 0
    ) -> tuple[Joint, Tensor, Tensor] | None:
        """The layer's matrices and their Kronecker factors Σ a aᵀ and Σ d dᵀ.

        None where the layer has no such factors, or a row for each word of the ``vocabulary``.
        ``padded``: positions on which no column depends are padding and do not count.
        """
        return None

    def rotated(self, basis: Basis) -> Term:
        """U_Gᵀ G U_A, as one parameter ``basis.key`` of the basis's shape ``[g, O, I']``."""
        joint = basis.join(self.jacobian()).movedim(1, 2)
        if basis.left is not None:
            joint = basis.left.mT.unsqueeze(1) @ joint
        return Dense({basis.key: (joint @ basis.right.unsqueeze(1)).movedim(2, 1)})

    def rotated_gram(self, basis: Basis, variance: Tensor, into: Tensor | None = None) -> Tensor:
        """⟨U_Gᵀ G_c U_A ∘ σ², U_Gᵀ G_c' U_A⟩ with σ² ``[g, O, I']``, ``[B, K, K]``."""
        return self.rotated(basis).gram({basis.key: variance}, into)


@dataclass(frozen=True)
class Dense(Term):
    """G_c itself, ``[B, K, *shape]`` by name: of small parameters and of unknown modules."""

    gradients: Tree

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.gradients)

    def jacobian(self) -> Tree:
        return self.gradients


@dataclass(frozen=True)
class Apart(Term):
    """A sum of terms of which at most one differs from 0 in every entry of a parameter.

    The squares of the terms therefore add up to the square of the sum.
    """

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
            gram=lambda n_columns: sum(cost.gram(n_columns) for cost in costs),
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
    position: dict[str, int] = {}  # where in `result` the term of a parameter stands
    result: list[Term | None] = []  # None: the term was added to a later one
    for term in terms:
        for k in sorted({position[name] for name in term.names if name in position}):
            earlier = result[k]
            assert earlier is not None
            result[k] = None
            term = _sum_of(earlier, term)
        position.update(dict.fromkeys(term.names, len(result)))
        result.append(term)
    return [term for term in result if term is not None]


def _sum_of(first: Term, second: Term) -> Term:
    """The sum of two terms, in factored form where it has one."""
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
    """⟨G_ic, s ∘ U_r⟩ summed over the layers, ``[B, K, R]``: :meth:`Term.products`."""
    return total(term.products(stack, dtype=dtype, scale=scale, room=room) for term in terms)


def pieces(terms: Sequence[Term], size: int) -> Iterator[list[Term]]:
    """The terms of at most ``size`` examples at a time."""
    n_examples = terms[0].n_examples if terms else 0
    if n_examples <= size:
        yield list(terms)
        return
    for piece in zip(*(term.divided(size) for term in terms), strict=True):
        yield list(piece)


def total(parts: Iterable[Tensor]) -> Tensor:
    """The sum of the layers' shares. Each share is freed once it is added.

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


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Σ_k x_k², entry by entry."""
    squares = tensors[0].square()
    for tensor in tensors[1:]:
        squares += tensor.square()
    return squares


def added(into: Tensor | None, share: Tensor) -> Tensor:
    """``into`` with the share added in place; the share itself where ``into`` is None."""
    return share if into is None else into.add_(share)


def added_bmm(into: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """:func:`added` for a batch of matrix products ``left @ right``."""
    return torch.bmm(left, right) if into is None else into.baddbmm_(left, right)


def slices(n: int, size: int) -> Iterator[slice]:
    """The range 0 … n in slices of ``size``, which counts as 1 where it is smaller.

    >>> list(slices(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, size)
    return (slice(start, min(n, start + size)) for start in range(0, n, size))


def scaled_rows(
    stack: Mapping[str, Tensor],
    name: str,
    rows: slice,
    dtype: torch.dtype,
    scale: Mapping[str, Tensor] | None,
) -> Tensor:
    """Some of the stacked vectors s ∘ U of one parameter, each flat: ``[rows, p]``."""
    u = stack[name][rows].to(dtype)
    if scale is not None:
        u = u * scale[name].to(dtype)
    return u.reshape(len(u), -1)


def by_rows(name: str, shape: tuple[int, ...]) -> Joint:
    """A parameter read as one matrix: its first dimension gives the rows."""
    rows = shape[0] if shape else 1
    return Joint(name, None, MatrixShape(1, rows, torch.Size(shape).numel() // rows, shape))


def rank_one(matrices: Tensor, left: Tensor, right: Tensor, room: int) -> Tensor:
    """⟨G_i, r_k s_kᵀ⟩ of gradients ``[B, g, O, I]``, ``[B, R]``: :meth:`Term.projected`."""
    b, g, o, _ = matrices.shape
    n_stacked = left.shape[-1]
    inner = matrices.new_zeros(b, n_stacked)
    for rows in slices(o, room // (2 * b * g * n_stacked)):
        by_right = matrices[:, :, rows] @ right  # [B, g, rows, R]
        inner += by_right.mul_(left[:, rows]).sum((1, 2))
    return inner
