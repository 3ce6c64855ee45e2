"""The posterior to expand at when the question is what random subsets of the data would give.

A subset that keeps each example with probability k is not near all the data: its average is data
of which every example counts for w < 1. The first-order predictor of retraining on subsets is
best taken there,

    m_w = argmin_θ Σ_i w ℓ_i(θ) + ½ θᵀ diag(δ) θ,     S_w = w Σ_i J_iᵀ Λ_i J_i + diag(δ)

and w is below k where data are few for their model (see :func:`subset_posterior`).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from blr_analysis.backprop.engine import Chunking, chunks
from blr_analysis.checks import instance, one_of, positive_int, positive_number, share
from blr_analysis.posterior.gaussian import Posterior, passed_on
from blr_analysis.posterior.laplace import STRUCTURES, fit_laplace
from blr_analysis.posterior.prior import Prior
from blr_analysis.progress import track
from blr_analysis.sensitivity.minimise import on_a_copy, train, write
from blr_analysis.sensitivity.scores import check_outputs, fitted
from blr_analysis.task import Task

SMALL = 300  # parameters: up to here the full structure preconditions the descent
ROUNDS = 20  # of the effective weight's fixed point; four are usual
SETTLED = 1e-4  # the fixed point's relative error
NOISE = 0.1  # the same, of the residual, where the descents end above their tolerance
COARSE = 1e-3  # residual of the descents in between: leverage changes little with the weights


@torch.inference_mode(False)  # also where the caller switched it on
def subset_posterior(
    task: Task,
    posterior: Posterior,
    keep: float = 0.5,
    *,
    effective: bool = True,
    structure: str | None = None,
    tolerance: float | None = None,
    max_steps: int = 60,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    progress: bool | None = None,
) -> Posterior:
    """The posterior of a model that sees every example as a random subset does on average.

    Influences under it, ``influence(task, subset_posterior(task, q), test_task)``, are first-order
    predictors of what retraining on random subsets gives: the test losses after it are, up to a
    constant, minus the sum of the influences of the examples that were kept. Leave-one-out, where
    all other examples stay, wants the posterior of all data instead.

    The weight w of every example is ``keep`` with ``effective=False``, else the solution of

        w = keep / (1 + (1 − w) v),     v = Σ_i tr((Λ_i V_i)²) / Σ_i tr(Λ_i V_i),
        V_i = J_i S_w⁻¹ J_iᵀ

    the mean leverage at weight w, each example's in proportion to its own. Derivation, for one
    output: with independent b_i ∈ {0, 1}, P(b_i = 1) = k, the resolvent Q = (Σ_i b_i g_i g_iᵀ +
    δ)⁻¹ has δQ + Σ_i b_i g_i g_iᵀ Q = 1, and g_iᵀ Q = g_iᵀ Q₋ᵢ / (1 + u_i) where b_i = 1, with
    u_i = g_iᵀ Q₋ᵢ g_i of the others. Put E Q₋ᵢ = (w Σ_{j≠i} g_j g_jᵀ + δ)⁻¹. Then u_i =
    v_i / (1 − w v_i), the mean is E Q = (w Σ_i g_i g_iᵀ + δ)⁻¹ for w = k (1 + w u) / (1 + u), and
    that is k / (1 + (1 − w) v). An example that is kept explains part of itself, so that halves of
    few data constrain a model less than half weights do.

    Args:
        task: the model and the data it was trained on. The model is not changed: the way to m_w,
            by full-batch damped Newton steps from the posterior's mean, is a copy's.
        posterior: learned on those data; its ``prior_precision`` is the δ of their objective.
        keep: the share of the data that a subset keeps, above 0 and at most 1.
        effective: whether w allows for what a kept example explains of itself.
        structure: of the result, as in :func:`blr_analysis.fit_laplace`; None: the posterior's
            own. Its scale (of a calibrated posterior) is not taken over.
        tolerance: ‖∇‖ / (w ‖Σ_i ∇ℓ_i‖ + ‖δθ‖) to reach; None: 1e-6 in float64, 1e-4 in float32.
        max_steps: Newton steps, per descent.
        chunk_size, memory_budget: as in :func:`blr_analysis.fit_laplace`.
        progress: None shows a bar on a terminal when the work is long.

    Returns:
        N(m_w, S_w⁻¹), with the generalised Gauss–Newton matrix at m_w and the posterior's own
        ``prior_precision``. Its ``record["subset"]`` holds ``keep``, ``weight`` w, ``effective``,
        ``residual`` and ``converged``.

    Raises:
        InputError: ``keep`` outside (0, 1], sequences, an unknown structure.
        PosteriorError: a posterior of another model or data, or whose prior precision is 0.
        ModelError: a model that cannot be copied.

    Warns:
        RuntimeWarning: the descent, or the weight, did not converge; marked in the record.

    Source: Park et al., "TRAK", ICML 2023, Definition 2.3 (what is predicted); Couillet & Debbah,
    "Random Matrix Methods for Wireless Communications", 2011, chapter 6 (deterministic
    equivalents); Nickl et al., NeurIPS 2023, Eq. 6 (the influence).

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(40, 3), torch.randn(40)
        >>> task = blr.Task(torch.nn.Linear(3, 1), (X, y), likelihood="gaussian")
        >>> q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
        >>> half = subset_posterior(task, q, 0.5, progress=False)
        >>> 0.3 < half.record["subset"]["weight"] < 0.5, half.record["subset"]["converged"]
        (True, True)
        >>> blr.influence(task, half, task, progress=False).shape
        torch.Size([40, 40])
    """
    check_outputs(task, "subset_posterior")
    instance("effective", effective, bool, "True or False")
    share("keep", keep)
    if tolerance is not None:
        positive_number("tolerance", tolerance)
    positive_int("max_steps", max_steps)
    q = fitted(task, posterior)
    structure = one_of("structure", q.structure if structure is None else structure, STRUCTURES)
    # the rank that the user chose for a low-rank posterior; else it is grown anew
    chosen = structure == "lowrank" == q.structure and q.record.get("tolerance") is None
    weighing = _Weighing(
        _trainable(task, q),
        q.prior.placed(q.mean),
        structure,
        q.record.get("rank") if chosen else None,
        max_steps,
        Chunking(chunk_size, memory_budget, progress=False),
    )
    if tolerance is None:
        tolerance = 1e-6 if next(iter(q.mean.values())).dtype == torch.float64 else 1e-4
    weight, settled = float(keep), True
    if effective:
        weight, settled = weighing.effective(float(keep), max(COARSE, tolerance), progress)
    residual = weighing.moved(weight, tolerance)
    fit = weighing.fit(weight)
    subset = {
        "keep": float(keep),
        "weight": weight,
        "effective": effective,
        "residual": residual,
        "converged": residual <= tolerance and settled,
    }
    if not residual <= tolerance:
        ended = f"the subsets' descent ended at a residual of {residual:.1e}, not {tolerance:.0e}"
        said = f"{ended}; raise max_steps or tolerance, or check prior_precision"
        warnings.warn(said, RuntimeWarning, stacklevel=3)
    if not settled:
        said = f"the effective weight did not settle in {ROUNDS} rounds; the last one is taken"
        warnings.warn(said, RuntimeWarning, stacklevel=3)
    return Posterior(
        fit.mean,
        fit.form,
        prior_precision=posterior.prior,
        n_data=task.n_data,
        record={
            **passed_on(fit),
            "source": "subset",
            "definition": "S = diag(prior_precision) + weight * sum_i J_i^T Lambda_i J_i",
            "subset": subset,
        },
    )


class _Weighing:
    """A copy of the model that moves to the optimum where every example counts for w.

    That of Σ_i w ℓ_i + ½ θᵀδθ is that of Σ_i ℓ_i + ½ θᵀ(δ/w)θ.
    """

    def __init__(
        self,
        task: Task,
        prior: Prior,
        structure: str,
        rank: int | None,
        max_steps: int,
        chunking: Chunking,
    ) -> None:
        self.task, self.prior, self.structure, self.rank = task, prior, structure, rank
        self.max_steps, self.chunking = max_steps, chunking
        size = sum(p.numel() for p in task.parameters().values())
        self.preconditioner = "full" if size <= SMALL else "kron"

    def moved(self, weight: float, tolerance: float) -> float:
        """The residual that was reached."""
        end = train(
            self.task,
            self.prior / weight,
            structure=self.preconditioner,
            tolerance=tolerance,
            max_steps=self.max_steps,
        )
        return end.point.residual

    def fit(self, weight: float) -> Posterior:
        """N(m, (w GGN + δ)⁻¹) at the present weights: w (GGN + δ/w)."""
        prior = self.prior / weight
        options: dict[str, Any] = {**vars(self.chunking), "rank": self.rank}
        q = fit_laplace(self.task, structure=self.structure, prior_precision=prior, **options)
        form = q.form.zeros().plus(q.form, weight)
        return Posterior(q.mean, form, prior_precision=self.prior, n_data=q.n_data, record=q.record)

    def leverage(self, weight: float) -> float:
        """v at the present weights."""
        q = self.fit(weight)
        traces = torch.zeros(2, dtype=torch.float64)
        for chunk in chunks(self.task, q.mean, self.chunking):
            lambdas = chunk.likelihood.hessian(chunk.outputs, chunk.targets)
            leverage = lambdas @ q.form.gram(chunk.jacobian_terms())
            for k, h in enumerate((leverage, leverage @ leverage)):
                traces[k] += h.diagonal(dim1=-2, dim2=-1).double().sum().cpu()
        return float(traces[1] / traces[0]) if float(traces[0]) > 0 else 0.0

    def effective(self, keep: float, tolerance: float, progress: bool | None) -> tuple[float, bool]:
        """The root of keep / (1 + (1 − w) v(w)) − w by secants, and whether it was found."""
        w, before = keep, None
        for _ in track(range(ROUNDS), total=ROUNDS, label="effective weight", show=progress):
            residual = self.moved(w, tolerance)
            enough = SETTLED if residual <= tolerance else max(SETTLED, NOISE * residual)
            gap = keep / (1 + (1 - w) * self.leverage(w)) - w
            if abs(gap) <= enough * w:
                return w, True
            slope = -1.0 if before is None else (gap - before[1]) / (w - before[0])
            before = (w, gap)
            step = gap / -slope if slope < 0 else gap
            w = min(keep, max(w + step, w / 4))
            if w == before[0]:
                break
        return w, False


def _trainable(task: Task, q: Posterior) -> Task:
    """The task under a copy of the model at the posterior's mean, with what it covers to train."""
    own = on_a_copy(task)
    for name, p in own.model.named_parameters():
        p.requires_grad_(name in q.mean)
    write(own, q.mean)
    return own
