"""What a forecast of a merge's cost is worth, beside what the merge then cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr
from torch import Tensor

import blr_analysis as blr
from benchmarks.merging.cases import Case
from blr_analysis.backprop.loss import Evaluation
from blr_analysis.files import Scratch
from blr_analysis.merging.forecast import (
    RANGE_OF_DIAGONALS,
    RANGE_OF_KRONECKER,
    Form,
    TaskForecast,
    cost_of,
)
from blr_analysis.merging.precisions import open_precision

State = dict[str, Tensor]
RANGES = {"diag": RANGE_OF_DIAGONALS, "kron": RANGE_OF_KRONECKER}


@dataclass(frozen=True)
class Tested:
    """A merge and its losses on the test data of every task."""

    state: State
    evaluations: list[Evaluation]


class Curvature:
    """One task's H, with its factors and diagonals in memory."""

    def __init__(self, posterior: blr.Posterior) -> None:
        self.precision = open_precision(posterior)
        self.count = posterior.n_data
        self.structure = posterior.structure
        self.factors = {layer: self.precision.factors(layer) for layer in self.precision.layers}
        self.diagonals = {name: self._diagonal(name) for name in self.precision.stored}

    def _diagonal(self, name: str) -> Tensor:
        """The precision of a tensor without factors, in one row."""
        spec = self.precision.spec(name)
        assert spec is not None
        h = self.precision.read(name, 0, spec.numel, Scratch(), torch.float64)
        return h.double().clone()

    @property
    def has_enough_examples(self) -> bool:
        """Whether no layer with factors has more inputs than there are examples."""
        return not any(map(self.precision.is_poorly_sampled, self.factors))

    def forms(self, state: State, home: State, base: State) -> dict[str, Form]:
        """By layer or tensor, the quadratic form between weights, θ_t and the base."""
        forms = {}
        for layer, factors in self.factors.items():
            joint, _ = self.precision.layers[layer]
            step = joint.join({name: (state[name] - home[name]).double() for name in joint.names})
            back = joint.join({name: (base[name] - home[name]).double() for name in joint.names})
            forms[layer] = _form(step, back, factors.times(step), factors.times(back))
        for name, h in self.diagonals.items():
            step = (state[name] - home[name]).double().flatten()
            back = (base[name] - home[name]).double().flatten()
            forms[name] = _form(step, back, h * step, h * back)
        return {
            name: Form(
                form.rise / self.count, form.along / self.count, form.rise_of_base / self.count
            )
            for name, form in forms.items()
        }


def _form(step: Tensor, back: Tensor, curved_step: Tensor, curved_back: Tensor) -> Form:
    return Form(
        float((step * curved_step).sum()) / 2,
        float((step * curved_back).sum()) / 2,
        float((back * curved_back).sum()) / 2,
    )


def _total(forms: Mapping[str, Form]) -> Form:
    """The sum over layers and tensors."""
    return Form(
        sum(form.rise for form in forms.values()),
        sum(form.along for form in forms.values()),
        sum(form.rise_of_base for form in forms.values()),
    )


def rises(
    case: Case,
    own: list[Evaluation],
    base: Tested,
    merges: dict[str, Tested],
    precisions: Mapping[str, list[blr.Posterior]],
) -> Iterator[dict[str, Any]]:
    """By forecast, merge and task, the rise of the loss of an example, foretold and measured.

    Args:
        precisions: every task's, by their structure.
    """
    yield from _rises_by_data(case, own, base, merges)
    for structure, posteriors in precisions.items():
        curvatures = [Curvature(posterior) for posterior in posteriors]
        for merge, tested in merges.items():
            for t, (name, home) in enumerate(case.models.items()):
                forms = [c.forms(tested.state, home, base.state) for c in curvatures]
                totals = [_total(by_layer) for by_layer in forms]
                shares = _shares(forms[t])
                yield {
                    "forecast": structure,
                    "merge": merge,
                    "task": name,
                    "foretold": totals[t].rise,
                    "cost": cost_of(totals[t], totals),
                    "foretold_of_base": totals[t].rise_of_base,
                    **_measured(t, own, base, tested),
                    "shares_of_layers": shares,
                    "has_enough_examples": curvatures[t].has_enough_examples,
                    "verdict": _verdict(curvatures[t], totals[t], shares),
                }


def _rises_by_data(
    case: Case, own: list[Evaluation], base: Tested, merges: dict[str, Tested]
) -> Iterator[dict[str, Any]]:
    """By merge and task, the rise on the training data beside that on the test data."""
    rises_of_base = case.rises_on_training_data(base.state)
    for merge, tested in merges.items():
        found = case.rises_on_training_data(tested.state)
        for t, name in enumerate(case.models):
            yield {
                "forecast": "training data",
                "merge": merge,
                "task": name,
                "foretold": found[t],
                "foretold_of_base": rises_of_base[t],
                **_measured(t, own, base, tested),
                "verdict": "-",
            }


def _measured(t: int, own: list[Evaluation], base: Tested, tested: Tested) -> dict[str, float]:
    """The rise of task t's test loss at a merge and at the base."""
    return {
        "measured": tested.evaluations[t].nll - own[t].nll,
        "measured_of_base": base.evaluations[t].nll - own[t].nll,
    }


def _verdict(curvature: Curvature, form: Form, shares: Mapping[str, float]) -> str:
    """What a forecast says of a task."""
    has_unit = curvature.structure != "gram"
    return TaskForecast(
        task="",
        rise=form.rise if has_unit else math.nan,
        factor=RANGES.get(curvature.structure, RANGE_OF_KRONECKER),
        base_rise=form.rise_of_base if has_unit else math.nan,
        share=form.rise / form.rise_of_base,
        tensors={},
        largest_share=max(shares.values()),
        has_enough_examples=curvature.has_enough_examples,
    ).verdict


def _shares(forms: Mapping[str, Form]) -> dict[str, float]:
    """By layer, the rise over that of the base."""
    return {
        name: form.rise / form.rise_of_base for name, form in forms.items() if form.rise_of_base > 0
    }


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """What forecasts are worth: a row for each forecast and kind, and one for all kinds."""
    return _by_kind(table, _row_of_rise)


def cost_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Whether the cost orders better than the rise alone: rows as of :func:`summary`."""
    return _by_kind(pd.DataFrame(table[table["forecast"].isin(["diag", "kron"])]), _row_of_cost)


def _by_kind(table: pd.DataFrame, row: Callable[[pd.DataFrame], dict[str, Any]]) -> pd.DataFrame:
    rows = []
    for forecast, by_forecast in _parts(table, "forecast"):
        parts = [*_parts(by_forecast, "kind"), ("all", by_forecast)]
        rows += [{"forecast by": forecast, "kind": kind, **row(part)} for kind, part in parts]
    return pd.DataFrame(rows)


def _parts(table: pd.DataFrame, column: str) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each value of a column, in the order of their first rows."""
    return [(value, table[table[column] == value]) for value in table[column].unique()]  # type: ignore[misc]


def _row_of_rise(part: pd.DataFrame) -> dict[str, Any]:
    forecast = part["forecast"].iloc[0]
    has_unit = forecast != "gram"
    ratio = (part["measured"] / part["foretold"]).to_numpy(float)
    if not has_unit:  # of the shares in the base's rise
        ratio = ratio * (part["foretold_of_base"] / part["measured_of_base"]).to_numpy(float)
        ratio = ratio[part["measured_of_base"] > 0]
    factor = RANGES.get(forecast, math.inf)
    is_in_range = (ratio > 1 / factor) & (ratio < factor)
    is_worse = (part["measured"] > part["measured_of_base"]).to_numpy(bool)
    is_safe = (part["verdict"] == "safe").to_numpy(bool)
    return {
        "merges × tasks": len(part),
        "rank correlation": _rank(part, "foretold") if has_unit else "-",
        "among the merges of one case": _rank_in_cases(part, "foretold"),
        "measured ÷ foretold, 5 % to 95 %": "{:.2f} to {:.2f}".format(
            *np.quantile(ratio, [0.05, 0.95])
        ),
        "in the range, %": f"{100 * is_in_range.mean():.0f}" if forecast in RANGES else "-",
        "called safe": int(is_safe.sum()),
        "called safe and worse than the base": int((is_safe & is_worse).sum()),
    }


def _row_of_cost(part: pd.DataFrame) -> dict[str, Any]:
    merges = _merges(part)
    return {
        "merges": len(merges),
        "rank by cost": _rank(merges, "cost"),
        "by the rise alone": _rank(merges, "foretold"),
        "among the merges of one case by cost": _rank_in_cases(part, "cost"),
        "among them by the rise": _rank_in_cases(part, "foretold"),
        "merges × tasks": len(part),
        "their rank by cost": _rank(part, "cost"),
        "their rank by the rise alone": _rank(part, "foretold"),
    }


def _merges(part: pd.DataFrame) -> pd.DataFrame:
    """A row for each merge: means over its tasks."""
    columns = ["foretold", "cost", "measured"]
    return pd.DataFrame(part.groupby(["kind", "seed", "merge"])[columns].mean())


def _rank(table: pd.DataFrame, column: str) -> str:
    """The rank correlation of a column with the measured rise."""
    return f"{_correlation(table, column):.2f}"


def _rank_in_cases(part: pd.DataFrame, column: str) -> str:
    """The rank correlation over the merges of the same models, ± its error over the cases."""
    by_case = _merges(part).groupby(["kind", "seed"])
    found = [_correlation(pd.DataFrame(merges), column) for _, merges in by_case]
    if len(found) == 1:
        return f"{found[0]:.2f}"
    return f"{np.mean(found):.2f} ± {np.std(found, ddof=1) / len(found) ** 0.5:.2f}"


def _correlation(table: pd.DataFrame, column: str) -> float:
    return float(spearmanr(table[column], table["measured"])[0])  # type: ignore[index]
