"""Eigenvalue-corrected Kronecker factors: a precision that keeps correlations within a layer."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.inputs import InputMoments, input_moments
from blr_analysis.backprop.layers import upcast
from blr_analysis.backprop.matrices import Basis, Joint
from blr_analysis.backprop.outer import Outer
from blr_analysis.backprop.terms import Dense, Term, Tree
from blr_analysis.errors import InputError, ModelError
from blr_analysis.posterior.fit import Fit, sampled_examples, vocabulary_of
from blr_analysis.posterior.prior import Given, Prior
from blr_analysis.posterior.structures.contract import Spectral

ROWS = ".row_eigenvalues"  # a tensor of what each row has on top of the stored row of eigenvalues
ROUNDINGS = 3  # after which a rounded difference comes back to the bit
LARGEST = 16_384  # rows or columns of a layer with factors: larger ones, often heads, are diagonal
SAME = 1e-6  # relative difference of eigenvalues that counts as rounding


@dataclass(frozen=True)
class Kronecker(Spectral):
    """Eigenvalue-corrected K-FAC (George et al., 2018): per layer S = (U_G ⊗ U_A) diag(s) (·)ᵀ.

    Layers that are no matrix products (norms, embeddings, unknown modules) have a diagonal. So has
    the read-out of a language model, whose factor would have the vocabulary's square.

    Attributes:
        blocks: the eigenbasis of each layer with factors.
        values: s, ``[g, O, I']`` by the name of a block's weight; else by parameter name, shaped as
            the parameter.
        plain: the shapes of the parameters outside of the blocks.
        order: all parameter names, in the model's order.
    """

    blocks: tuple[Basis, ...]
    values: dict[str, Tensor]
    plain: dict[str, tuple[int, ...]]
    order: tuple[str, ...]
    kind = "kron"

    @classmethod
    def fitted(cls, fit: Fit) -> tuple[Kronecker, dict[str, Any]]:
        """The eigenvectors by a sweep over a sample, then the eigenvalues by one over all data."""
        sample = sampled_examples(fit.task)
        scale = 1.0 if sample is None else fit.task.n_data / len(sample)
        moments = factor_sums(fit, sample)
        of_this_rank = ranks.share(torch.arange(len(moments)))
        blocks = eigenbases(moments, fit.params, scale, of_this_rank.tolist())
        ranks.total(m for b in blocks for m in (b.right, b.left) if m is not None)
        return cls.empty(blocks, fit.params).summed(fit), {}

    @classmethod
    def empty(cls, blocks: tuple[Basis, ...], params: Mapping[str, Tensor]) -> Self:
        """A matrix of zeros, in the basis of these blocks."""
        joined = {n for b in blocks for n in b.names}
        values = {n: torch.zeros_like(p) for n, p in params.items() if n not in joined}
        plain = {n: tuple(s.shape) for n, s in values.items()}
        values |= {b.key: b.right.new_zeros(b.shape) for b in blocks}
        return cls(blocks, values, plain, tuple(params))

    @classmethod
    def read(
        cls, tensors: Mapping[str, Tensor], record: Mapping[str, Any], names: Sequence[str]
    ) -> Kronecker:
        blocks = tuple(_read_block(tensors, entry) for entry in record["blocks"])
        joined = {n for b in blocks for n in b.names}
        plain = {n: tuple(record["shapes"][n]) for n in names if n not in joined}
        values = {n: tensors[n] for n in plain}
        values |= {block.key: _read_eigenvalues(tensors, block) for block in blocks}
        return cls(blocks, values, plain, tuple(names))

    def record(self) -> dict[str, Any]:
        blocks = [
            {**block.record(), "inputs": block.inputs, "chance": block.chance}
            for block in self.blocks
        ]
        return {"blocks": blocks, **super().record()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        shapes = dict(self.plain)
        for block in self.blocks:
            shapes |= block.shapes
        return {n: shapes[n] for n in self.order}

    def forward(self, v: Tree) -> Tree:
        turned = {n: v[n] for n in self.plain}
        for block in self.blocks:
            turned[block.key] = block.turn(block.join(v))
        return turned

    def backward(self, v: Tree) -> Tree:
        turned = {n: v[n] for n in self.plain}
        for block in self.blocks:
            turned.update(block.split(block.back(v[block.key])))
        return {n: turned[n] for n in self.order}

    def prior_values(self, prior: Prior | Given) -> dict[str, float]:
        delta = Prior.of_any(prior)
        values = delta.numbers(self.plain)
        for block in self.blocks:
            deltas = delta.numbers(block.names).values()
            smallest = min(deltas)
            largest = max(deltas)
            if smallest != largest:
                raise InputError(
                    f"one prior precision is needed for all of {block.names}, got {smallest:g} … "
                    f"{largest:g}; use structure='full' or 'diag'"
                )
            values[block.key] = smallest
        return values

    def diagonal(self, *, inverse: bool = False) -> Tree:
        diagonal = {k: 1 / s if inverse else s.clone() for k, s in self.values.items()}
        for block in self.blocks:
            diagonal |= block.split(block.squares(diagonal[block.key]))
        return {n: diagonal[n] for n in self.order}

    def rotation_cost(self) -> tuple[int, int]:
        factored = 0
        explicit = 0
        for block in self.blocks:
            groups, rows, columns = block.shape
            factored += groups * columns**2
            explicit += groups * rows * columns**2
            if block.left is not None:
                factored += groups * rows**2
                explicit += groups * rows**2 * columns
        return factored, explicit

    def paired(self, terms: Sequence[Term]) -> list[tuple[Term, Basis | None]]:
        """Each term with its block; None: its parameters are outside the blocks.

        A term whose parameters are not those of exactly one block is made dense, and its gradients
        are sorted into the blocks.
        """
        block_of_names = {block.names: block for block in self.blocks}
        pairs: list[tuple[Term, Basis | None]] = []
        unsorted: Tree = {}
        for term in terms:
            block = block_of_names.get(term.names)
            if block is not None:
                pairs.append((term, block))
            elif all(n in self.plain for n in term.names):
                pairs.append((term, None))
            else:
                unsorted.update(term.jacobian())
        for block in self.blocks:
            if any(name in unsorted for name in block.names):
                pairs.append((self._taken_from(unsorted, block), block))
        if unsorted:
            pairs.append((Dense(unsorted), None))
        return pairs

    def _taken_from(self, gradients: Tree, block: Basis) -> Dense:
        """The gradients of a block's parameters, removed from ``gradients``; 0 for a parameter that
        has none."""
        n_examples, n_columns = next(gradients[n].shape[:2] for n in block.names if n in gradients)
        of_block = {}
        for name in block.names:
            if name in gradients:
                of_block[name] = gradients.pop(name)
            else:
                shape = (n_examples, n_columns, *self.shapes[name])
                of_block[name] = self.values[block.key].new_zeros(shape)
        return Dense(of_block)

    def tensors(self) -> dict[str, Tensor]:
        keys = {block.key for block in self.blocks}
        stored = {f"{n}.eigenvalues" if n in keys else n: s for n, s in self.values.items()}
        for block in self.blocks:
            stored[f"{block.key}.input_eigenvectors"] = block.right
            if block.left is not None:
                stored[f"{block.key}.output_eigenvectors"] = block.left
        return stored

    def to(self, device: torch.device, dtype: torch.dtype) -> Kronecker:
        blocks = tuple(b.to(device, dtype) for b in self.blocks)
        values = {n: s.to(device, dtype) for n, s in self.values.items()}
        return replace(self, blocks=blocks, values=values)


def _read_block(tensors: Mapping[str, Tensor], entry: Mapping[str, Any]) -> Basis:
    joint = Joint.read(entry)
    return Basis(
        joint.weight,
        joint.bias,
        joint.layout,
        tensors[f"{joint.key}.input_eigenvectors"],
        tensors.get(f"{joint.key}.output_eigenvectors"),
        entry.get("inputs"),
        float(entry.get("chance") or 0.0),
    )


def _read_eigenvalues(tensors: Mapping[str, Tensor], block: Basis) -> Tensor:
    eigenvalues = tensors[f"{block.key}.eigenvalues"]
    of_rows = tensors.get(f"{block.key}{ROWS}")
    if of_rows is not None:
        eigenvalues = eigenvalues + of_rows
    return eigenvalues.expand(block.shape)


Moments = dict[str, tuple[Joint, Tensor, Tensor]]  # of each layer by its key: Σ a aᵀ and Σ d dᵀ


def factor_sums(fit: Fit, sample: Tensor | None) -> Moments:
    """Each layer's Σ a aᵀ and Σ d dᵀ over one sweep of the sample.

    They are in float64, but for language models in the gradients' dtype, because there they take
    more memory than the weights. Where outputs are many, the layers below the last one get random
    sums in place of the columns d, with the same mean of d dᵀ, because only the eigenvectors of the
    factors are used.

    Args:
        sample: indices of the examples; None: all.
    """
    moments: Moments = {}
    unfinished = fit.unfinished.get("factors")
    vocabulary = vocabulary_of(fit.task, fit.params)
    padded = fit.task.likelihood.is_sequence
    mixed = fit.mixed_columns(fit.task.n_data if sample is None else len(sample))
    sweep = fit.passes("Kronecker factors", sample, unfinished, by_layer=True, mixed=mixed)
    for terms in sweep:
        for term in terms:
            factors = None
            if not is_too_large(term):
                factors = term.factors(padded=padded, vocabulary=vocabulary)
            if factors is not None:
                _add_factors(moments, *factors, in_double=not vocabulary)
        if unfinished is not None:
            unfinished.follow(fit.with_gradient(_by_label(moments)))
    ranks.total(m for _, right, left in moments.values() for m in (right, left))
    return moments


def is_too_large(term: Term) -> bool:
    """Whether a layer gets a diagonal, because its factors would be too large."""
    layout = term.joint.layout if isinstance(term, Outer) else None
    return layout is not None and max(layout.rows, layout.columns) > LARGEST


def _add_factors(
    moments: Moments, joint: Joint, right: Tensor, left: Tensor, *, in_double: bool
) -> None:
    """Add a layer's factors of one chunk to the sums."""
    if in_double:
        right = right.double()
        left = left.double()
    if joint.key in moments:
        _, right_sum, left_sum = moments[joint.key]
        right_sum.add_(right)
        left_sum.add_(left)
    else:
        moments[joint.key] = (joint, right, left)


def _by_label(moments: Moments) -> dict[str, Tensor]:
    """The sums under the names that a file of unfinished sums has for them."""
    inputs = {f"inputs of {key}": right for key, (_, right, _) in moments.items()}
    outputs = {f"outputs of {key}": left for key, (_, _, left) in moments.items()}
    return inputs | outputs


def eigenbases(
    moments: Moments,
    params: Mapping[str, Tensor],
    scale: float = 1.0,
    of_this_rank: Container[int] | None = None,
) -> tuple[Basis, ...]:
    """The eigenvectors of each layer's factors; ``moments`` is emptied layer by layer.

    Args:
        scale: by which input factors of a sample become sums over all examples.
        of_this_rank: the numbers of the layers that this rank computes; the others get zeros. None:
            all layers.
    """
    blocks = []
    for number, key in enumerate(list(moments)):
        joint, inputs, outputs = moments.pop(key)
        if not bool(torch.isfinite(inputs.sum()) & torch.isfinite(outputs.sum())):
            raise ModelError(f"the curvature of {joint.key!r} overflows; use float64")
        weight = params[joint.key].detach()
        is_computed_here = of_this_rank is None or number in of_this_rank
        right = _eigenvectors(inputs) if is_computed_here else torch.zeros_like(inputs)
        left = _eigenvectors(outputs) if is_computed_here else torch.zeros_like(outputs)
        mean_input_square = float(inputs.double().diagonal(dim1=-2, dim2=-1).mean())
        blocks.append(
            Basis(
                joint.weight,
                joint.bias,
                joint.layout,
                right.to(weight).contiguous(),
                left.to(weight).contiguous(),
                scale * mean_input_square,
            )
        )
    return tuple(blocks)


def _eigenvectors(matrix: Tensor) -> Tensor:
    """Eigenvectors, computed in float64 where they do not converge in the matrix's precision."""
    try:
        _, eigenvectors = torch.linalg.eigh(upcast(matrix))
    except RuntimeError:  # LinAlgError
        _, eigenvectors = torch.linalg.eigh(matrix.double())
    return eigenvectors


class Gram(Kronecker):
    """S = A ⊗ 1 for every layer that multiplies its inputs a by a matrix: Kronecker factors without
    those of the outputs.

    A = Σ a aᵀ sums over examples and positions (Jin et al., "Dataless knowledge fusion by merging
    weights of language models", ICLR 2023). An embedding has the diagonal c_v, how often row v was
    looked up. A table that is also a head has both, A + c_v 1 for row v, with A's eigenvectors.
    Every other parameter has the number of examples as its diagonal.
    """

    kind = "gram"
    of_inputs = True
    draws_labels = False

    @classmethod
    def fitted(cls, fit: Fit) -> tuple[Gram, dict[str, Any]]:
        """A by one sweep of forward passes; labels have no effect."""
        inputs = input_moments(fit.task, fit.params, unfinished=fit.unfinished.get("inputs"))
        joined = {n for joint, _ in inputs.moments.values() for n in joint.names}
        plain = {n: tuple(p.shape) for n, p in fit.params.items() if n not in joined}
        values = {name: _counts(fit, inputs, name) for name in plain}  # first, as in files
        blocks = []
        for joint, moments in inputs.moments.values():
            block, eigenvalues = _input_block(fit, inputs, joint, moments)
            blocks.append(block)
            values[joint.key] = eigenvalues
        noise = max((inputs.noise(key, whole=True) for key in inputs.moments), default=0.0)
        return cls(tuple(blocks), values, plain, tuple(fit.params)), {"noise": noise}

    def tensors(self) -> dict[str, Tensor]:
        """As of "kron", but eigenvalues that all outputs of a layer share are stored once.

        Where the outputs differ by one number each, those numbers are stored in a tensor beside.
        """
        stored = super().tensors()
        for block in self.blocks:
            if block.left is None:
                name = f"{block.key}.eigenvalues"
                shared, of_rows = _shared_eigenvalues(stored[name])
                stored[name] = shared
                if of_rows is not None:
                    stored[f"{block.key}{ROWS}"] = of_rows
        return stored


def _shared_eigenvalues(eigenvalues: Tensor) -> tuple[Tensor, Tensor | None]:
    """The row with the smallest eigenvalues, ``[g, 1, I']``, and what every row has on top of it,
    ``[g, O, 1]``, None if nothing.

    Where rows differ by more than one number each, the eigenvalues ``[g, O, I']`` as they are.
    """
    smallest = eigenvalues[..., 0]  # beside a large eigenvalue the number would be rounded away
    n_columns = eigenvalues.shape[-1]
    lowest_row = smallest.argmin(1)[:, None, None].expand(-1, 1, n_columns)
    shared = eigenvalues.gather(1, lowest_row)
    of_rows = _stable_difference(smallest, shared[..., 0]).unsqueeze(-1)
    if torch.equal(eigenvalues, shared.expand_as(eigenvalues)):
        return shared.contiguous(), None
    if torch.allclose(eigenvalues, shared + of_rows, rtol=SAME, atol=0.0):
        return shared.contiguous(), of_rows
    return eigenvalues, None


def _stable_difference(total: Tensor, part: Tensor) -> Tensor:
    """``total - part``, rounded so that it comes back: (part + difference) − part = difference.

    A posterior that was saved and read then has the same tensors again, to the bit.

    >>> part = torch.tensor(0.3)
    >>> difference = _stable_difference(torch.tensor(7.1), part)
    >>> torch.equal((part + difference) - part, difference)
    True
    """
    difference = total - part
    for _ in range(ROUNDINGS):
        difference = (part + difference) - part
    return difference


def _counts(fit: Fit, inputs: InputMoments, name: str) -> Tensor:
    """How often each row of a table was looked up, N for other parameters; shaped as the
    parameter."""
    parameter = fit.params[name]
    counts_by_row = inputs.counts.get(name)
    if counts_by_row is None:
        counts = parameter.new_tensor(fit.task.n_data)
    else:
        counts = counts_by_row.to(parameter).unsqueeze(1)
    return counts.expand_as(parameter).clone()


def _input_block(
    fit: Fit, inputs: InputMoments, joint: Joint, moments: Tensor
) -> tuple[Basis, Tensor]:
    """The eigenvectors of a layer's A, and the eigenvalues for all its outputs, ``[g, O, I']``."""
    weight = fit.params[joint.key]
    spectrum, eigenvectors = torch.linalg.eigh(moments)
    chance = inputs.noise(joint.key) if inputs.singular(joint.key) else 0.0
    right = eigenvectors.to(weight)
    mean = float(spectrum.mean())
    block = Basis(joint.weight, joint.bias, joint.layout, right, None, mean, chance)
    eigenvalues = spectrum.clamp_min(0).to(weight).unsqueeze(1)
    look_ups = inputs.looked_up(joint)
    if look_ups is not None:
        eigenvalues = eigenvalues + look_ups.to(weight)
    return block, eigenvalues.expand(block.shape)
