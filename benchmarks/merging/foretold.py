"""What a forecast of a merge's cost is worth, beside what the merge then cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr
from torch import Tensor

import blr_analysis as blr
from benchmarks.merging.cases import Case
from blr_analysis.backprop.loss import Evaluation
from blr_analysis.merging.forecast import RANGE_OF_KRONECKER, SAFE_SHARE
from blr_analysis.merging.precisions import open_precision

State = dict[str, Tensor]


@dataclass(frozen=True)
class Tested:
    """A merge and its losses on the test data of every task."""

    state: State
    evaluations: list[Evaluation]


def rises(
    case: Case,
    own: list[Evaluation],
    base: Tested,
    merges: dict[str, Tested],
    precisions: list[blr.Posterior],
) -> Iterator[dict[str, Any]]:
    """By merge and task, the rise of the test loss for each example, foretold and measured."""
    for merge, tested in merges.items():
        for t, (name, home) in enumerate(case.models.items()):
            rise, interference = _foretold(precisions[t], tested.state, home, base.state)
            yield {
                "merge": merge,
                "task": name,
                "foretold": rise,
                "interference": interference,
                "measured": tested.evaluations[t].nll - own[t].nll,
                "foretold_of_base": _foretold(precisions[t], base.state, home, base.state)[0],
                "measured_of_base": base.evaluations[t].nll - own[t].nll,
            }


def _foretold(
    posterior: blr.Posterior, state: State, home: State, base: State
) -> tuple[float, float]:
    """Q_t and I_t of :mod:`blr_analysis.merging.forecast`, of the layers with factors.

    They are for each example.
    """
    precision = open_precision(posterior)
    rise = 0.0
    rise_of_base = 0.0
    along = 0.0
    for layer, (joint, _) in precision.layers.items():
        step = joint.join({name: (state[name] - home[name]).double() for name in joint.names})
        back = joint.join({name: (base[name] - home[name]).double() for name in joint.names})
        curved_back = precision.factors(layer).times(back)
        rise += float((step * precision.factors(layer).times(step)).sum()) / 2
        rise_of_base += float((back * curved_back).sum()) / 2
        along += float((step * curved_back).sum()) / 2
    interference = max(rise - along**2 / rise_of_base, 0.0)
    return rise / posterior.n_data, interference / posterior.n_data


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each kind, and one for all together."""
    parts = [(str(kind), part) for kind, part in table.groupby("kind", sort=False)]
    return pd.DataFrame([_row(kind, part) for kind, part in [*parts, ("all", table)]])


def _row(kind: str, part: pd.DataFrame) -> dict[str, Any]:
    foretold = part["foretold"].to_numpy(float)
    measured = part["measured"].to_numpy(float)
    cost = foretold + part["interference"].to_numpy(float)
    ratio = measured / foretold
    share = foretold / part["foretold_of_base"].to_numpy(float)
    is_worse = measured > part["measured_of_base"].to_numpy(float)
    is_safe = share < SAFE_SHARE
    in_range = (ratio > 1 / RANGE_OF_KRONECKER) & (ratio < RANGE_OF_KRONECKER)
    return {
        "kind": kind,
        "merges × tasks": len(part),
        "rank": f"{spearmanr(cost, measured)[0]:.2f}",  # type: ignore[index]
        "rank of the rise alone": f"{spearmanr(foretold, measured)[0]:.2f}",  # type: ignore[index]
        "measured ÷ foretold, 5 % to 95 %": "{:.2f} to {:.2f}".format(
            *np.quantile(ratio, [0.05, 0.95])
        ),
        "in the range, %": f"{100 * in_range.mean():.0f}",
        "called safe": int(is_safe.sum()),
        "called safe and worse than the base": int((is_safe & is_worse).sum()),
    }
