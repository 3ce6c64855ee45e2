"""What a forecast of a merge's cost is worth, beside what the merge then cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr
from torch import Tensor

import blr_analysis as blr
from benchmarks.merging.cases import Case
from blr_analysis.backprop.loss import Evaluation
from blr_analysis.merging.forecast import RANGE_OF_KRONECKER, SAFE_SHARE, Form, cost_of
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
            forms = [form_of(posterior, tested.state, home, base.state) for posterior in precisions]
            yield {
                "merge": merge,
                "task": name,
                "foretold": forms[t].rise,
                "cost": cost_of(forms[t], forms),
                "measured": tested.evaluations[t].nll - own[t].nll,
                "foretold_of_base": forms[t].rise_of_base,
                "measured_of_base": base.evaluations[t].nll - own[t].nll,
            }


def form_of(posterior: blr.Posterior, state: State, home: State, base: State) -> Form:
    """The quadratic form of the layers with factors, between weights, θ_t and the base."""
    precision = open_precision(posterior)
    rise = 0.0
    along = 0.0
    rise_of_base = 0.0
    for layer, (joint, _) in precision.layers.items():
        factors = precision.factors(layer)
        step = joint.join({name: (state[name] - home[name]).double() for name in joint.names})
        back = joint.join({name: (base[name] - home[name]).double() for name in joint.names})
        curved_back = factors.times(back)
        rise += float((step * factors.times(step)).sum()) / 2
        along += float((step * curved_back).sum()) / 2
        rise_of_base += float((back * curved_back).sum()) / 2
    count = posterior.n_data
    return Form(rise / count, along / count, rise_of_base / count)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """What the foretold rise is worth: a row for each kind, and one for all together."""
    return _by_kind(table, _row_of_rise)


def cost_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Whether the cost orders better than the rise alone: rows as of :func:`summary`."""
    return _by_kind(table, _row_of_cost)


def _by_kind(table: pd.DataFrame, row: Callable[[pd.DataFrame], dict[str, Any]]) -> pd.DataFrame:
    parts = [(str(kind), part) for kind, part in table.groupby("kind", sort=False)]
    return pd.DataFrame([{"kind": kind, **row(part)} for kind, part in [*parts, ("all", table)]])


def _row_of_rise(part: pd.DataFrame) -> dict[str, Any]:
    foretold = part["foretold"].to_numpy(float)
    measured = part["measured"].to_numpy(float)
    ratio = measured / foretold
    share = foretold / part["foretold_of_base"].to_numpy(float)
    is_worse = measured > part["measured_of_base"].to_numpy(float)
    is_safe = share < SAFE_SHARE
    in_range = (ratio > 1 / RANGE_OF_KRONECKER) & (ratio < RANGE_OF_KRONECKER)
    return {
        "merges × tasks": len(part),
        "rank correlation": _rank(part, "foretold"),
        "measured ÷ foretold, 5 % to 95 %": "{:.2f} to {:.2f}".format(
            *np.quantile(ratio, [0.05, 0.95])
        ),
        "in the range, %": f"{100 * in_range.mean():.0f}",
        "called safe": int(is_safe.sum()),
        "called safe and worse than the base": int((is_safe & is_worse).sum()),
    }


def _row_of_cost(part: pd.DataFrame) -> dict[str, Any]:
    by_merge = part.groupby(["kind", "seed", "merge"])
    merges = pd.DataFrame(by_merge[["foretold", "cost", "measured"]].mean())
    return {
        "merges": len(merges),
        "rank by cost": _rank(merges, "cost"),
        "by the rise alone": _rank(merges, "foretold"),
        "merges × tasks": len(part),
        "their rank by cost": _rank(part, "cost"),
        "their rank by the rise alone": _rank(part, "foretold"),
    }


def _rank(table: pd.DataFrame, column: str) -> str:
    """The rank correlation of a column with the measured rise."""
    return f"{spearmanr(table[column], table['measured'])[0]:.2f}"  # type: ignore[index]
