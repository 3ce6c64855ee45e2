"""Second moments of layers' inputs: the precision of RegMean, from forward passes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.matrices import Basis
from blr_analysis.posterior.structures.contract import Fit
from blr_analysis.posterior.structures.kronecker import Kronecker


class Gram(Kronecker):
    """S = A ⊗ 1 for every layer that multiplies its inputs a with a matrix, A = Σ a aᵀ over
    examples and positions: Kronecker factors without the outputs' (Jin et al., "Dataless knowledge
    fusion by merging weights of language models", ICLR 2023).

    An embedding has the counts of its look-ups, one for all numbers of a row; every other parameter
    the number of examples.
    """

    kind = "gram"
    of_inputs = True

    @classmethod
    def fitted(cls, fit: Fit) -> tuple[Gram, dict[str, Any]]:
        """A in one sweep of forward passes; no label is looked at."""
        seen = fit.inputs()
        joined = {n for joint, _ in seen.moments.values() for n in joint.names}
        plain = {n: tuple(p.shape) for n, p in fit.params.items() if n not in joined}
        blocks, values = [], {}
        for name in plain:  # first, as in a file
            like, counts = fit.params[name], seen.counts.get(name)
            each = like.new_tensor(fit.n_data) if counts is None else counts.to(like).unsqueeze(1)
            values[name] = each.expand_as(like).clone()
        for joint, moments in seen.moments.values():
            like = fit.params[joint.key]
            across, right = torch.linalg.eigh(moments)
            known = float(across.mean())
            right = right.to(like)
            blocks.append(Basis(joint.weight, joint.bias, joint.layout, right, None, known))
            values[joint.key] = across.clamp_min(0).to(like).unsqueeze(1).expand(blocks[-1].shape)
        return cls(tuple(blocks), values, plain, tuple(fit.params)), {}

    def tensors(self) -> dict[str, Tensor]:
        """One row of eigenvalues where all outputs of a layer have the same."""
        stored = super().tensors()
        for key in (f"{block.key}.eigenvalues" for block in self.blocks):
            first = stored[key][:, :1]
            stored[key] = first.contiguous() if bool((stored[key] == first).all()) else stored[key]
        return stored
