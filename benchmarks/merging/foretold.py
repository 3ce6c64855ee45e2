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
RANGES = {"diag": RANGE_OF_DIAGONALS, "gram": math.inf, "kron": RANGE_OF_KRONECKER}


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
    """By precision, merge and task, the rise of the loss of an example, foretold and measured.

    Args:
        precisions: every task's, by their structure.
    """
    for structure, posteriors in precisions.items():
        curvatures = [Curvature(posterior) for posterior in posteriors]
        for merge, tested in merges.items():
            for t, (name, home) in enumerate(case.models.items()):
                forms = [c.forms(tested.state, home, base.state) for c in curvatures]
                totals = [_total(by_layer) for by_layer in forms]
                shares = _shares(forms[t])
                yield {
                    "precision": structure,
                    "merge": merge,
                    "task": name,
                    "foretold": totals[t].rise,
                    "cost": cost_of(totals[t], totals),
                    "measured": tested.evaluations[t].nll - own[t].nll,
                    "foretold_of_base": totals[t].rise_of_base,
                    "measured_of_base": base.evaluations[t].nll - own[t].nll,
                    "shares_of_layers": shares,
                    "has_enough_examples": curvatures[t].has_enough_examples,
                    "verdict": _verdict(curvatures[t], totals[t], shares),
                }


def _verdict(curvature: Curvature, form: Form, shares: Mapping[str, float]) -> str:
    """What a forecast says of a task."""
    has_unit = curvature.structure != "gram"
    return TaskForecast(
        task="",
        rise=form.rise if has_unit else math.nan,
        low=math.nan,
        high=math.nan,
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
    """What forecasts are worth: a row for each precision and kind, and one for all kinds."""
    return _by_kind(table, _row_of_rise)


def cost_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Whether the cost orders better than the rise alone: rows as of :func:`summary`."""
    return _by_kind(pd.DataFrame(table[table["precision"] != "gram"]), _row_of_cost)


def _by_kind(table: pd.DataFrame, row: Callable[[pd.DataFrame], dict[str, Any]]) -> pd.DataFrame:
    rows = []
    for precision, by_precision in _parts(table, "precision"):
        parts = [*_parts(by_precision, "kind"), ("all", by_precision)]
        rows += [{"precision": precision, "kind": kind, **row(part)} for kind, part in parts]
    return pd.DataFrame(rows)


def _parts(table: pd.DataFrame, column: str) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each value of a column, in the order of their first rows."""
    return [(value, table[table[column] == value]) for value in table[column].unique()]  # type: ignore[misc]


def _row_of_rise(part: pd.DataFrame) -> dict[str, Any]:
    has_unit = part["precision"].iloc[0] != "gram"
    ratio = part["measured"] / part["foretold"]
    if not has_unit:  # of the shares in the base's rise
        ratio = ratio * part["foretold_of_base"] / part["measured_of_base"]
        ratio = ratio[part["measured_of_base"] > 0]
    factor = RANGES[part["precision"].iloc[0]]
    in_range = (ratio > 1 / factor) & (ratio < factor)
    is_worse = (part["measured"] > part["measured_of_base"]).to_numpy(bool)
    is_safe = (part["verdict"] == "safe").to_numpy(bool)
    return {
        "merges × tasks": len(part),
        "rank correlation": _rank(part, "foretold") if has_unit else "-",
        "measured ÷ foretold, 5 % to 95 %": "{:.2f} to {:.2f}".format(
            *np.quantile(ratio, [0.05, 0.95])
        ),
        "in the range, %": f"{100 * in_range.mean():.0f}" if has_unit else "-",
        "called safe": int(is_safe.sum()),
        "called safe and worse than the base": int((is_safe & is_worse).sum()),
    }


def _row_of_cost(part: pd.DataFrame) -> dict[str, Any]:
    columns = ["foretold", "cost", "measured"]
    merges = pd.DataFrame(part.groupby(["kind", "seed", "merge"])[columns].mean())
    return {
        "merges": len(merges),
        "rank by cost": _rank(merges, "cost"),
        "by the rise alone": _rank(merges, "foretold"),
        "among the merges of one case by cost": _rank_in_cases(merges, "cost"),
        "among them by the rise": _rank_in_cases(merges, "foretold"),
        "merges × tasks": len(part),
        "their rank by cost": _rank(part, "cost"),
        "their rank by the rise alone": _rank(part, "foretold"),
    }


def _rank(table: pd.DataFrame, column: str) -> str:
    """The rank correlation of a column with the measured rise."""
    return f"{_correlation(table, column):.2f}"


def _rank_in_cases(merges: pd.DataFrame, column: str) -> str:
    """The mean over kinds and seeds of the rank correlation, and its standard error."""
    found = [_correlation(part, column) for _, part in merges.groupby(["kind", "seed"])]
    if len(found) == 1:
        return f"{found[0]:.2f}"
    return f"{np.mean(found):.2f} ± {np.std(found, ddof=1) / len(found) ** 0.5:.2f}"


def _correlation(table: pd.DataFrame, column: str) -> float:
    return float(spearmanr(table[column], table["measured"])[0])  # type: ignore[index]
