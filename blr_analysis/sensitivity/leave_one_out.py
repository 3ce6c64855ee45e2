"""What each training example's prediction would have been without it.

    first order   f_i^{\\i} = f_i + V_i e_i
    cavity        f_i^{\\i} = f_i + (I − V_i Λ_i)⁻¹ V_i e_i

The cavity form takes the example's own share out of the posterior as well; for linear regression
it is Cook's formula and the mean squared error is PRESS, exactly. Averaged over the data the
left-out losses estimate the loss on new data from the training data alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import chunks
from blr_analysis.checks import one_of
from blr_analysis.likelihoods import Gaussian, Likelihood
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.sensitivity.scores import check_finite, fitted, leverage
from blr_analysis.task import Task
from blr_analysis.views import Tabular

CORRECTIONS = ("auto", "cavity", "first_order")
BEARS_CAVITY = ("full", "lowrank")  # structures whose V_i is not overstated
HIGHEST_LEVERAGE = 0.999


@dataclass(frozen=True)
class LeaveOneOut(Tabular):
    """What :func:`leave_one_out` found; tensors on the CPU, in the order of the dataset.

    Attributes:
        logits: f_i^{\\i}, ``[N, C]`` (means or log-rates for regression).
        losses: ℓ(y_i, f_i^{\\i}) in nats, ``[N]``; larger is worse.
        nll: their mean: the estimate of the loss on new data.
        accuracy: of the left-out predictions; None for regression.
        deviation: how far each prediction moves, as in :class:`Scores`.
        leverage: the largest eigenvalue of V_i Λ_i, ``[N]``; near or above 1 the posterior's
            structure overstates V_i and no cavity exists.
        correction: "cavity" or "first_order", what was used for each example.
        mse: mean squared left-out error (Gaussian likelihood only, else None).
    """

    logits: Tensor
    losses: Tensor
    losses_before: Tensor
    predictions: Tensor
    predictions_before: Tensor
    targets: Tensor
    deviation: Tensor
    leverage: Tensor
    correction: list[str]
    likelihood: Likelihood
    metadata: Mapping[str, list[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.losses)

    @property
    def nll(self) -> float:
        return float(self.losses.double().mean())

    @property
    def accuracy(self) -> float | None:
        correct = self.likelihood.correct(self.logits, self.targets)
        return None if correct is None else float(correct.double().mean())

    @property
    def mse(self) -> float | None:
        if not isinstance(self.likelihood, Gaussian):
            return None
        return float((self.logits - self.targets).double().square().mean())

    def __repr__(self) -> str:
        cavity = self.correction.count("cavity")
        right = "" if self.accuracy is None else f", accuracy={self.accuracy:.4f}"
        return (
            f"LeaveOneOut(nll={self.nll:.4f}{right}, N={len(self)}, "
            f"cavity for {cavity} of {len(self)}, "
            f"leverage of 1 or more for {int((self.leverage >= 1).sum())})"
        )


@torch.inference_mode(False)  # also where the caller switched it on
def leave_one_out(
    task: Task,
    posterior: Posterior,
    *,
    correction: str = "auto",
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> LeaveOneOut:
    """Every example's prediction as if the model had been trained without it.

    Args:
        task: the model and the data it was trained on.
        posterior: learned on those data.
        correction: "first_order", "cavity", or "auto": the cavity for structures that can bear
            it ("full"), first order for those that overstate V_i ("diag", "kron"). Where an
            example's leverage reaches 1 no cavity exists and first order is used for that row;
            the table's ``correction`` column says so.
        chunk_size, memory_budget: see :func:`blr_analysis.sensitivity`.

    Raises:
        InputError: an unknown correction.
        PosteriorError, ModelError, DataError: as :func:`blr_analysis.sensitivity`.

    Source: Nickl et al., NeurIPS 2023, Eq. 12 (first order); Cook, 1977 (cavity).

    Example:
        >>> import torch, blr_analysis as blr
        >>> X = torch.randn(40, 2, dtype=torch.float64); y = X.sum(1)
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> model.weight.data = torch.linalg.solve(X.T @ X + torch.eye(2), X.T @ y)[None]
        >>> task = blr.Task(model, (X, y), likelihood="gaussian")
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
        >>> loo = leave_one_out(task, q, progress=False)
        >>> hat = (X @ torch.linalg.inv(X.T @ X + torch.eye(2)) @ X.T).diagonal()
        >>> press = ((y - X @ model.weight[0]) / (1 - hat)).square().mean().item()
        >>> abs(loo.mse / press - 1) < 1e-9
        True
    """
    one_of("correction", correction, CORRECTIONS)
    q = fitted(task, posterior)
    wants_cavity = correction == "cavity" or (correction == "auto" and q.structure in BEARS_CAVITY)
    likelihood = task.likelihood
    parts: list[tuple[Tensor, ...]] = []
    passes = chunks(
        task,
        q.mean,
        chunk_size=chunk_size,
        memory_budget=memory_budget,
        label="leave one out",
        progress=progress,
    )
    for chunk in passes:
        f, y = chunk.outputs, chunk.targets
        e = likelihood.error(f, y)
        v = q.form.gram(chunk.jacobian_terms())
        check_finite(v)
        height = leverage(v, likelihood.hessian_root(f))
        cavity = (
            height < HIGHEST_LEVERAGE
            if wants_cavity
            else torch.zeros_like(height, dtype=torch.bool)
        )
        parts.append(
            tuple(t.cpu() for t in (f, y, left_out(f, e, v, likelihood, cavity), height, cavity))
        )
    before, targets, after, height, cavity = (torch.cat(p) for p in zip(*parts, strict=True))
    return LeaveOneOut(
        logits=after,
        losses=likelihood.nll(after, targets),
        losses_before=likelihood.nll(before, targets),
        predictions=likelihood.prediction(after),
        predictions_before=likelihood.prediction(before),
        targets=targets,
        deviation=likelihood.distance(before, after),
        leverage=height,
        correction=["cavity" if c else "first_order" for c in cavity.tolist()],
        likelihood=likelihood,
        metadata=task.metadata,
    )


def left_out(f: Tensor, e: Tensor, v: Tensor, likelihood: Likelihood, cavity: Tensor) -> Tensor:
    """f_i^{\\i}: by the cavity where ``cavity`` is true, to first order elsewhere; ``[B, C]``."""
    move = torch.bmm(v, e.unsqueeze(-1))
    if bool(cavity.any()):
        eye = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
        system = torch.where(cavity[:, None, None], eye - v @ likelihood.hessian(f), eye)
        move = torch.linalg.solve(system, move)
    return f + move.squeeze(-1)
