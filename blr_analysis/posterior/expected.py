"""Errors and curvatures averaged over what a posterior leaves open, not taken at its mean.

The rule takes both under q: E_q[∇ℓ_i] and S = δ + E_q[Σ_i ∇²ℓ_i] (Khan & Rue, section 1.3). With
the model linear around its weights, f ~ N(f_i, V_i) (Immer et al., AISTATS 2021):

    ē_i = E e(y_i, f),    Λ̄_i = E Λ(f),    f ~ N(f_i, V_i)

An example learned by heart has e_i ≈ 0 and Λ_i ≈ 0 at the mean, as if it had shaped nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import Chunk, Chunking, chunks, n_outputs
from blr_analysis.backprop.record import shared
from blr_analysis.errors import InputError, ModelError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.task import Task

DRAWS = 64  # of f, in pairs f_i ± ε; the same ones for every example


def expected_errors(task: Task, q: Posterior, chunking: Chunking) -> Tensor:
    """ē_i of every example, ``[N, C]``.

    Raises:
        InputError: sequences, whose outputs have no V_i.
    """
    check(task)
    means, own = [], shared(task, q.mean)
    columns = n_outputs(task, q.mean)
    for chunk in chunks(
        task, q.mean, chunking, columns=columns, indices=own, label="expected errors"
    ):
        errors = [chunk.likelihood.error(f, chunk.targets) for f in _draws(q, chunk)]
        means.append(torch.stack(errors).mean(0))
    return ranks.gathered(torch.cat(means), own, task.n_data)


def expected_root(q: Posterior, chunk: Chunk) -> Tensor:
    """Columns c_ik with Σ_k c_ik c_ikᵀ = Λ̄_i, ``[B, C, C]``."""
    curvature = sum(chunk.likelihood.hessian(f, chunk.targets) / DRAWS for f in _draws(q, chunk))
    values, turn = torch.linalg.eigh(curvature)
    return (turn * values.clamp_min(0).sqrt().unsqueeze(-2)).mT


def check(task: Task) -> None:
    """Raise for sequences."""
    if task.likelihood.is_sequence:
        raise InputError("sequences have no V_i to average over; leave expected= out")


def _draws(q: Posterior, chunk: Chunk) -> list[Tensor]:
    f, v = chunk.outputs, q.form.gram(chunk.jacobian_terms())
    if not bool(torch.isfinite(v).all()):
        raise ModelError("the prediction variance overflows; raise prior_precision")
    values, turn = torch.linalg.eigh((v + v.mT) / 2)
    root = (turn * values.clamp_min(0).sqrt().unsqueeze(-2)) @ turn.mT
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(DRAWS // 2, f.shape[-1], generator=generator, dtype=torch.float64).to(f)
    moves = torch.einsum("bcd,nd->nbc", root, noise)
    return [f + sign * move for move in moves for sign in (1, -1)]
