"""What a forecast of a merge's cost is worth, beside what the merge then cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr
from torch import Tensor

import blr_analysis as blr
from benchmarks.merging.cases import Case
from blr_analysis.merging.forecast import RANGE_OF_KRONECKER, SAFE_SHARE
from blr_analysis.merging.precisions import open_precision

State = dict[str, Tensor]


def rises(
    case: Case, merges: dict[str, State], precisions: list[blr.Posterior]
) -> Iterator[dict[str, Any]]:
    """By merge and task, the rise of the test loss for each example, foretold and measured."""
    own = [evaluation.nll for evaluation in case.own()]
    names = list(case.models)
    at_base = [evaluation.nll for evaluation in case.evaluations(case.base)]
    for merge, state in merges.items():
        measured = [evaluation.nll for evaluation in case.evaluations(state)]
        for t, name in enumerate(names):
            home = case.models[name]
            yield {
                "merge": merge,
                "task": name,
                "foretold": _quadratic(precisions[t], state, home),
                "measured": measured[t] - own[t],
                "foretold_of_base": _quadratic(precisions[t], case.base, home),
                "measured_of_base": at_base[t] - own[t],
            }


def _quadratic(posterior: blr.Posterior, state: State, home: State) -> float:
    """½ (θ − θ_t)ᵀ H_t (θ − θ_t) of the layers with factors, for each example."""
    precision = open_precision(posterior)
    total = 0.0
    for layer, (joint, _) in precision.layers.items():
        step = joint.join({name: (state[name] - home[name]).double() for name in joint.names})
        total += float((step * precision.factors(layer).times(step)).sum()) / 2
    return total / posterior.n_data


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each kind, and one for all together."""
    parts = [(str(kind), part) for kind, part in table.groupby("kind", sort=False)]
    return pd.DataFrame([_row(kind, part) for kind, part in [*parts, ("all", table)]])


def _row(kind: str, part: pd.DataFrame) -> dict[str, Any]:
    foretold = part["foretold"].to_numpy(float)
    measured = part["measured"].to_numpy(float)
    ratio = measured / foretold
    share = foretold / part["foretold_of_base"].to_numpy(float)
    is_worse = measured > part["measured_of_base"].to_numpy(float)
    is_safe = share < SAFE_SHARE
    in_range = (ratio > 1 / RANGE_OF_KRONECKER) & (ratio < RANGE_OF_KRONECKER)
    return {
        "kind": kind,
        "merges × tasks": len(part),
        "rank correlation": f"{spearmanr(foretold, measured)[0]:.2f}",  # type: ignore[index]
        "measured ÷ foretold, 5 % to 95 %": "{:.2f} to {:.2f}".format(
            *np.quantile(ratio, [0.05, 0.95])
        ),
        "in the range, %": f"{100 * in_range.mean():.0f}",
        "called safe": int(is_safe.sum()),
        "called safe and worse than the base": int((is_safe & is_worse).sum()),
    }
