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

ROWS = ".row_eigenvalues"  # beside one row of eigenvalues: what each row has on top of it
LARGEST = 16_384  # rows or columns of a layer with factors: a larger one, a head, has a diagonal


@dataclass(frozen=True)
class Kronecker(Spectral):
    """Eigenvalue-corrected K-FAC (George et al., 2018): per layer S = (U_G ⊗ U_A) diag(s) (·)ᵀ.

    Layers that are no matrix products (norms, embeddings, unknown modules) keep a diagonal, and so
    does the read-out of a language model, whose factor would have the vocabulary's square.
    ``values`` are keyed by the block's weight, ``[g, O, I']``, or by parameter name.
    """

    blocks: tuple[Basis, ...]
    values: dict[str, Tensor]
    plain: dict[str, tuple[int, ...]]  # parameters outside the blocks
    order: tuple[str, ...]
    kind = "kron"

    @classmethod
    def fitted(cls, fit: Fit) -> tuple[Kronecker, dict[str, Any]]:
        """The eigenvectors of the factors in a sweep over the sample, the eigenvalues in one over
        all data."""
        sample = sampled_examples(fit.task)
        scale = 1.0 if sample is None else fit.task.n_data / len(sample)
        moments = factor_sums(fit, sample)
        of_this_rank = ranks.share(torch.arange(len(moments)))
        blocks = eigenbases(moments, fit.params, scale, of_this_rank.tolist())
        ranks.total(m for b in blocks for m in (b.right, b.left) if m is not None)
        return cls.empty(blocks, fit.params).summed(fit), {}

    @classmethod
    def empty(cls, blocks: tuple[Basis, ...], params: Mapping[str, Tensor]) -> Self:
        """0, in the basis of these blocks; the other parameters stay in their own."""
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
            of_block = set(delta.numbers(block.names).values())
            low = min(of_block)
            high = max(of_block)
            if low != high:
                raise InputError(
                    f"one prior precision is needed for all of {block.names}, got {low:g} … "
                    f"{high:g}; use structure='full' or 'diag'"
                )
            values[block.key] = low
        return values

    def diagonal(self, *, inverse: bool = False) -> Tree:
        diagonal = {k: 1 / s if inverse else s.clone() for k, s in self.values.items()}
        for block in self.blocks:
            diagonal |= block.split(block.squares(diagonal[block.key]))
        return {n: diagonal[n] for n in self.order}

    def rotation_cost(self) -> tuple[int, int]:
        shapes = [block.shape for block in self.blocks]
        factored = sum(groups * (o * o + i * i) for groups, o, i in shapes)
        explicit = sum(groups * o * i * (o + i) for groups, o, i in shapes)
        return factored, explicit

    def paired(self, terms: Sequence[Term]) -> list[tuple[Term, Basis | None]]:
        """Each term with its block; None: its parameters are outside the blocks.

        Terms that cover other parameters than those of one block are made dense, and sorted into
        the blocks.
        """
        by_names = {block.names: block for block in self.blocks}
        pairs: list[tuple[Term, Basis | None]] = []
        loose: Tree = {}
        for term in terms:
            block = by_names.get(term.names)
            if block is not None:
                pairs.append((term, block))
            elif all(n in self.plain for n in term.names):
                pairs.append((term, None))
            else:
                loose.update(term.jacobian())
        for block in self.blocks:
            if any(name in loose for name in block.names):
                pairs.append((self._taken_from(loose, block), block))
        if loose:
            pairs.append((Dense(loose), None))
        return pairs

    def _taken_from(self, gradients: Tree, block: Basis) -> Dense:
        """The gradients of a block's parameters, which are taken out; 0 where there are none."""
        batch = next(gradients[n].shape[:2] for n in block.names if n in gradients)
        columns = {}
        for name in block.names:
            if name in gradients:
                columns[name] = gradients.pop(name)
            else:
                columns[name] = self.values[block.key].new_zeros(*batch, *self.shapes[name])
        return Dense(columns)

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


Moments = dict[str, tuple[Joint, Tensor, Tensor]]  # layers' factors by their keys


def factor_sums(fit: Fit, sample: Tensor | None) -> Moments:
    """Each layer's Σ a aᵀ and Σ d dᵀ over one sweep of the sample, in float64; of language models,
    where they take more memory than the weights, in the gradients' dtype.

    Of many outputs the layers below the last one see some random sums of the columns d, with the
    same mean of d dᵀ: the factors are looked at for their eigenvectors alone.
    """
    moments: Moments = {}
    kept = fit.kept.get("factors")
    vocabulary = vocabulary_of(fit.task, fit.params)
    padded = fit.task.likelihood.is_sequence
    mixed = fit.mixed_columns(fit.task.n_data if sample is None else len(sample))
    sweep = fit.passes("Kronecker factors", sample, kept, by_layer=True, mixed=mixed)
    for terms in sweep:
        for term in terms:
            factors = None
            if not is_too_large(term):
                factors = term.factors(padded=padded, vocabulary=vocabulary)
            if factors is not None:
                _add_factors(moments, *factors, in_double=not vocabulary)
        if kept is not None:
            kept.follow(fit.with_gradient(_by_label(moments)))
    ranks.total(m for _, right, left in moments.values() for m in (right, left))
    return moments


def is_too_large(term: Term) -> bool:
    """Whether a layer is read out by its diagonal: its factors would be too large."""
    layout = term.joint.layout if isinstance(term, Outer) else None
    return layout is not None and max(layout.rows, layout.columns) > LARGEST


def _add_factors(
    moments: Moments, joint: Joint, right: Tensor, left: Tensor, *, in_double: bool
) -> None:
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
    """As a file of unfinished sums calls them."""
    inputs = {f"inputs of {key}": right for key, (_, right, _) in moments.items()}
    outputs = {f"outputs of {key}": left for key, (_, _, left) in moments.items()}
    return inputs | outputs


def eigenbases(
    moments: Moments,
    params: Mapping[str, Tensor],
    scale: float = 1.0,
    of_this_rank: Container[int] | None = None,
) -> tuple[Basis, ...]:
    """The eigenvectors of each layer's factors, which are let go one after the other.

    Args:
        scale: makes the input factors sums over all examples.
        of_this_rank: the numbers of this rank's layers, the others have zeros; None: all.
    """
    blocks = []
    for number, key in enumerate(list(moments)):
        joint, inputs, outputs = moments.pop(key)
        if not bool(torch.isfinite(inputs.sum()) & torch.isfinite(outputs.sum())):
            raise ModelError(f"the curvature of {joint.key!r} overflows; use float64")
        weight = params[joint.key].detach()
        is_own = of_this_rank is None or number in of_this_rank
        right = _eigenvectors(inputs) if is_own else torch.zeros_like(inputs)
        left = _eigenvectors(outputs) if is_own else torch.zeros_like(outputs)
        blocks.append(
            Basis(
                joint.weight,
                joint.bias,
                joint.layout,
                right.to(weight).contiguous(),
                left.to(weight).contiguous(),
                scale * float(inputs.double().diagonal(dim1=-2, dim2=-1).mean()),
            )
        )
    return tuple(blocks)


def _eigenvectors(m: Tensor) -> Tensor:
    """In double precision where they do not converge in their own."""
    try:
        return torch.linalg.eigh(upcast(m))[1]
    except RuntimeError:  # LinAlgError
        return torch.linalg.eigh(m.double())[1]


class Gram(Kronecker):
    """S = A ⊗ 1 for every layer that multiplies its inputs a with a matrix, A = Σ a aᵀ over
    examples and positions: Kronecker factors without the outputs' (Jin et al., "Dataless knowledge
    fusion by merging weights of language models", ICLR 2023).

    An embedding has the counts of its look-ups, one for all numbers of a row; a table that is tied
    to a head has both, A + c_v 1 for row v, whose eigenvectors are A's; every other parameter the
    number of examples.
    """

    kind = "gram"
    of_inputs = True
    draws_labels = False

    @classmethod
    def fitted(cls, fit: Fit) -> tuple[Gram, dict[str, Any]]:
        """A in one sweep of forward passes; no label is looked at."""
        inputs = input_moments(fit.task, fit.params, unfinished=fit.kept.get("inputs"))
        joined = {n for joint, _ in inputs.moments.values() for n in joint.names}
        plain = {n: tuple(p.shape) for n, p in fit.params.items() if n not in joined}
        values = {name: _counts(fit, inputs, name) for name in plain}  # first, as in a file
        blocks = []
        for joint, moments in inputs.moments.values():
            block, eigenvalues = _input_block(fit, inputs, joint, moments)
            blocks.append(block)
            values[joint.key] = eigenvalues
        noise = max((inputs.noise(key, whole=True) for key in inputs.moments), default=0.0)
        return cls(tuple(blocks), values, plain, tuple(fit.params)), {"noise": noise}

    def tensors(self) -> dict[str, Tensor]:
        """Eigenvalues that all outputs of a layer share are stored once.

        Where outputs have one number more than the least of them, those numbers stand beside.
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
    """The row with the least eigenvalues of ``[g, O, I']``, and what every row has on top of it,
    ``[g, O, 1]``; None: nothing. As they are where rows differ by more than a number."""
    first = eigenvalues[..., 0]  # of the least eigenvector: others would round the number away
    columns = eigenvalues.shape[-1]
    places = first.argmin(1)[:, None, None].expand(-1, 1, columns)
    least = eigenvalues.gather(1, places)
    of_rows = (first - least[..., 0]).unsqueeze(-1)
    if torch.equal(eigenvalues, least.expand_as(eigenvalues)):
        return least.contiguous(), None
    if torch.allclose(eigenvalues, least + of_rows, rtol=1e-6, atol=0.0):
        return least.contiguous(), of_rows
    return eigenvalues, None


def _counts(fit: Fit, inputs: InputMoments, name: str) -> Tensor:
    """How often each row of a table was looked up; of other parameters N."""
    parameter = fit.params[name]
    counts = inputs.counts.get(name)
    if counts is None:
        number = parameter.new_tensor(fit.task.n_data)
    else:
        number = counts.to(parameter).unsqueeze(1)
    return number.expand_as(parameter).clone()


def _input_block(
    fit: Fit, inputs: InputMoments, joint: Joint, moments: Tensor
) -> tuple[Basis, Tensor]:
    """The eigenvectors of a layer's A, and the eigenvalues of all its outputs."""
    weight = fit.params[joint.key]
    spectrum, vectors = torch.linalg.eigh(moments)
    chance = inputs.noise(joint.key) if inputs.singular(joint.key) else 0.0
    right = vectors.to(weight)
    mean = float(spectrum.mean())
    block = Basis(joint.weight, joint.bias, joint.layout, right, None, mean, chance)
    eigenvalues = spectrum.clamp_min(0).to(weight).unsqueeze(1)
    counts = inputs.looked_up(joint)
    if counts is not None:
        eigenvalues = eigenvalues + counts.to(weight)
    return block, eigenvalues.expand(block.shape)
