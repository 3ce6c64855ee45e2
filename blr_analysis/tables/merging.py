"""How far a merge disturbs each task, and how merges do over a range of weights."""

from __future__ import annotations

from typing import Any

import pandas as pd

__all__ = ["merge_curve_table", "mismatch_table"]


def mismatch_table(result: Any) -> pd.DataFrame:
    """One row per merge and task, of :func:`blr_analysis.gradient_mismatch`.

    ===================== ==================================================== =============
    column                what                                                 more is
    ===================== ==================================================== =============
    merge, task           names, as given
    n_data                N_t, examples of the task
    mismatch              ‖∇ℓ̄_t(θ_merged) − ∇ℓ̄_t(θ_t)‖                         worse
    mismatch_per_example  the same over N_t                                    worse
    mismatch_in_metric    √(Σ v²/S_t) of the same difference v, √nats; S_t is  worse
                          H_t, with the prior of a posterior; NaN without
    gradient_own          ‖∇ℓ̄_t(θ_t)‖: 0 at an optimum without a prior
    gradient_merged       ‖∇ℓ̄_t(θ_merged)‖
    distance              ‖θ_merged − θ_t‖, over the trainable parameters
    gap                   ℓ̄_t(θ_merged) − ℓ̄_t(θ_t), nats, a sum over the task  worse
    gap_per_example       the same over N_t                                    worse
    gap_by_gradient       the gap if ℓ̄_t were quadratic between the two
    gap_by_precision      the gap that H_t foretells; NaN without
    nll_own, nll_merged   mean loss at θ_t and at θ_merged, nats               worse
    accuracy_own, …       fraction right at θ_t and (accuracy_merged) at       better
                          θ_merged; NaN for regression
    test_nll_own, …       test_nll_merged, test_accuracy_own and
                          test_accuracy_merged: on held-out data; NaN without
    ===================== ==================================================== =============
    """
    return pd.DataFrame(list(result.rows))


def merge_curve_table(curve: Any) -> pd.DataFrame:
    """One row per method and set of weights, of :func:`blr_analysis.merge_curve`.

    ===================== ==================================================== =============
    column                what                                                 more is
    ===================== ==================================================== =============
    method                of merging
    weight                α, where all models have the same one; else NaN
    weight_<model>        α_t of each model
    nll                   mean over the tasks of their mean losses, nats;      worse
                          infinite where the merge could not be run
    accuracy              mean over the tasks that have one; NaN without       better
    nll_<task>            mean loss on each validation task, nats per example  worse
    accuracy_<task>       fraction right; NaN for regression                   better
    failure               why the merge could not be run; "" where it could
    best                  whether this row is ``curve.best``
    ===================== ==================================================== =============
    """
    rows = []
    for point in curve.points:
        same = len(set(point.weights)) == 1
        rows.append(
            {
                "method": point.method,
                "weight": point.weights[0] if same else float("nan"),
                **{f"weight_{n}": a for n, a in zip(curve.models, point.weights, strict=True)},
                "nll": point.nll,
                "accuracy": point.accuracy,
                **{f"nll_{n}": v for n, v in zip(curve.tasks, point.nlls, strict=True)},
                **{f"accuracy_{n}": v for n, v in zip(curve.tasks, point.accuracies, strict=True)},
                "failure": point.failure,
                "best": point is curve.best,
            }
        )
    return pd.DataFrame(rows)
