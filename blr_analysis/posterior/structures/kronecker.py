"""Eigenvalue-corrected Kronecker factors: a precision that keeps correlations within a layer."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.inputs import input_moments
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
        times = 1.0 if sample is None else fit.task.n_data / len(sample)
        moments = factor_sums(fit, sample)
        own = ranks.share(torch.arange(len(moments)))
        blocks = eigenbases(moments, fit.params, times, own.tolist())
        ranks.total(m for b in blocks for m in (b.right, b.left) if m is not None)
        return cls.empty(blocks, fit.params).summed(fit), {}

    @classmethod
    def empty(cls, blocks: tuple[Basis, ...], params: Mapping[str, Tensor]) -> Self:
        """0 in the basis of these blocks, the other parameters' in their own."""
        joined = {n for b in blocks for n in b.names}
        values = {n: torch.zeros_like(p) for n, p in params.items() if n not in joined}
        plain = {n: tuple(s.shape) for n, s in values.items()}
        values |= {b.key: b.right.new_zeros(b.shape) for b in blocks}
        return cls(blocks, values, plain, tuple(params))

    @classmethod
    def read(
        cls, tensors: Mapping[str, Tensor], record: Mapping[str, Any], names: Sequence[str]
    ) -> Kronecker:
        blocks = []
        for entry in record["blocks"]:
            joint = Joint.read(entry)
            right = tensors[f"{joint.key}.input_eigenvectors"]
            left = tensors.get(f"{joint.key}.output_eigenvectors")
            known = entry.get("inputs"), float(entry.get("chance") or 0.0)
            blocks.append(Basis(joint.weight, joint.bias, joint.layout, right, left, *known))
        joined = {n for b in blocks for n in b.names}
        plain = {n: tuple(record["shapes"][n]) for n in names if n not in joined}
        values = {n: tensors[n] for n in plain}
        for b in blocks:
            s, more = tensors[f"{b.key}.eigenvalues"], tensors.get(f"{b.key}{ROWS}")
            values[b.key] = (s if more is None else s + more).expand(b.shape)
        return cls(tuple(blocks), values, plain, tuple(names))

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
            low, high = (f(delta.numbers(block.names).values()) for f in (min, max))
            if low != high:
                said = f"one prior precision is needed for all of {block.names}"
                raise InputError(f"{said}, got {low:g} … {high:g}; use structure='full' or 'diag'")
            values[block.key] = low
        return values

    def diagonal(self, *, inverse: bool = False) -> Tree:
        diagonal = {k: 1 / s if inverse else s.clone() for k, s in self.values.items()}
        for block in self.blocks:
            diagonal |= block.split(block.squares(diagonal[block.key]))
        return {n: diagonal[n] for n in self.order}

    def rotation_cost(self) -> tuple[int, int]:
        shapes = [block.shape for block in self.blocks]
        factored = sum(g * (o * o + i * i) for g, o, i in shapes)
        return factored, sum(g * o * i * (o + i) for g, o, i in shapes)

    def paired(self, terms: Sequence[Term]) -> list[tuple[Term, Basis | None]]:
        """Each term with its block; None: its parameters are outside the blocks.

        Terms that cover other parameters than one block does are made dense and regrouped.
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
            held = [n for n in block.names if n in loose]
            if held:
                lead = loose[held[0]].shape[:2]
                columns = {
                    n: loose.pop(n)
                    if n in held
                    else self.values[block.key].new_zeros(*lead, *self.shapes[n])
                    for n in block.names
                }
                pairs.append((Dense(columns), block))
        return [*pairs, (Dense(loose), None)] if loose else pairs

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


Moments = dict[str, tuple[Joint, Tensor, Tensor]]  # layers' factors by their keys


def factor_sums(fit: Fit, sample: Tensor | None) -> Moments:
    """Each layer's Σ a aᵀ and Σ d dᵀ over one sweep of the sample, in float64; of language models,
    where they take more memory than the weights, as the gradients are."""
    moments: Moments = {}
    kept, vocabulary = fit.kept.get("factors"), vocabulary_of(fit.task, fit.params)
    padded = fit.task.likelihood.is_sequence
    for terms in fit.passes("Kronecker factors", sample, kept, by_layer=True):
        for term in terms:
            layout = term.joint.layout if isinstance(term, Outer) else None
            if layout is not None and max(layout.rows, layout.columns) > LARGEST:
                continue
            factors = term.factors(padded=padded, vocabulary=vocabulary)
            if factors is None:
                continue
            joint, *pair = factors
            right, left = pair if vocabulary else (m.double() for m in pair)
            if joint.key in moments:
                moments[joint.key][1].add_(right)
                moments[joint.key][2].add_(left)
            else:
                moments[joint.key] = (joint, right, left)
        if kept is not None:
            inputs = {f"inputs of {key}": right for key, (_, right, _) in moments.items()}
            outputs = {f"outputs of {key}": left for key, (*_, left) in moments.items()}
            kept.follow(inputs | outputs)
    ranks.total(m for _, *pair in moments.values() for m in pair)
    return moments


def eigenbases(
    moments: Moments,
    params: Mapping[str, Tensor],
    times: float = 1.0,
    own: Container[int] | None = None,
) -> tuple[Basis, ...]:
    """The eigenvectors of each layer's factors, which are let go one after the other; ``times``
    makes the input factors sums over all examples. Zeros for layers that are not this rank's
    ``own``."""
    blocks = []
    for k, key in enumerate(list(moments)):
        joint, *pair = moments.pop(key)
        like, mine = params[joint.key].detach(), own is None or k in own
        if not all(bool(torch.isfinite(m.sum())) for m in pair):
            raise ModelError(f"the curvature of {joint.key!r} overflows; use float64")
        right, left = (
            (_eigenvectors(m) if mine else torch.zeros_like(m)).to(like).contiguous() for m in pair
        )
        known = times * float(pair[0].double().diagonal(dim1=-2, dim2=-1).mean())
        blocks.append(Basis(joint.weight, joint.bias, joint.layout, right, left, known))
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
        seen = input_moments(fit.task, fit.params, kept=fit.kept.get("inputs"))
        joined = {n for joint, _ in seen.moments.values() for n in joint.names}
        plain = {n: tuple(p.shape) for n, p in fit.params.items() if n not in joined}
        blocks, values = [], {}
        for name in plain:  # first, as in a file
            like, counts = fit.params[name], seen.counts.get(name)
            each = (
                like.new_tensor(fit.task.n_data) if counts is None else counts.to(like).unsqueeze(1)
            )
            values[name] = each.expand_as(like).clone()
        for joint, moments in seen.moments.values():
            like = fit.params[joint.key]
            across, right = torch.linalg.eigh(moments)
            chance = seen.noise(joint.key) if seen.singular(joint.key) else 0.0
            right = right.to(like)
            known = right, None, float(across.mean()), chance
            blocks.append(Basis(joint.weight, joint.bias, joint.layout, *known))
            each = across.clamp_min(0).to(like).unsqueeze(1)
            if (counts := seen.looked_up(joint)) is not None:
                each = each + counts.to(like)
            values[joint.key] = each.expand(blocks[-1].shape)
        noise = max((seen.noise(key, whole=True) for key in seen.moments), default=0.0)
        return cls(tuple(blocks), values, plain, tuple(fit.params)), {"noise": noise}

    def tensors(self) -> dict[str, Tensor]:
        """Where all outputs of a layer have the same eigenvalues, or one number more than the least
        of them, that row of eigenvalues, and those numbers."""
        stored = super().tensors()
        for key in (block.key for block in self.blocks if block.left is None):
            s = stored[f"{key}.eigenvalues"]
            rows = s[..., 0]  # of the least eigenvector, that numbers are lost beside the least
            least = s.gather(1, rows.argmin(1)[:, None, None].expand(-1, 1, s.shape[-1]))
            more = (rows - least[..., 0]).unsqueeze(-1)
            if torch.equal(s, least.expand_as(s)):
                stored[f"{key}.eigenvalues"] = least.contiguous()
            elif torch.allclose(s, least + more, rtol=1e-6, atol=0.0):
                stored |= {f"{key}.eigenvalues": least.contiguous(), f"{key}{ROWS}": more}
        return stored
