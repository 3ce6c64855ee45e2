"""How the default merge and "auto" stand beside the average and task arithmetic.

A difference is that of the mean test losses over the tasks. Its error is one standard error over
the test examples, on which both merges are tried.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
import torch

AVERAGE = "average"
DEFAULTS = ("default, diag", "default, gram", "default, kron", "default, recorded")
# What "auto" does with precisions alone is the default, and without anything the average.
RULES = {
    "auto by validation data, gram": "auto, gram, by validation",
    "auto by validation data, kron": "auto, kron, by validation",
    "auto by validation data, no precisions": "auto, no precisions, by validation",
    "auto by half of the training data, gram": "auto, gram, by training data",
    "precisions alone, diag": "default, diag",
    "precisions alone, gram": "default, gram",
    "precisions alone, kron": "default, kron",
    "recorded factors alone": "default, recorded",
    "nothing": AVERAGE,
}
REFERENCES = (AVERAGE, "task arithmetic, α = 0.4", "task arithmetic, best α")


class Difference(NamedTuple):
    """How much larger a loss is than another, and the standard error of this, in nats.

    >>> print(Difference(-0.25, 0.01).text(3))
    −0.250 ± 0.010
    """

    mean: float
    error: float

    def text(self, digits: int) -> str:
        return f"{self.mean:+.{digits}f} ± {self.error:.{digits}f}".replace("-", "−")


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """Of losses of the same examples.

    >>> difference([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    Difference(mean=1.0, error=0.5773502691896258)
    """
    gaps = torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)
    return Difference(float(gaps.mean()), float(gaps.std()) / math.sqrt(len(gaps)))


def mean_over_seeds(differences: Sequence[Difference]) -> Difference:
    """The mean, and its standard error by how far the seeds are apart."""
    means = [each.mean for each in differences]
    if len(means) == 1:
        return Difference(means[0], math.nan)
    return Difference(statistics.mean(means), statistics.stdev(means) / math.sqrt(len(means)))


def defaults(table: pd.DataFrame) -> pd.DataFrame:
    """The default less the average: a row for each kind and seed, and for the mean of its seeds.

    Args:
        table: a row for each kind, seed and merge, with its "losses".
    """
    rows = []
    for kind, of_kind in table.groupby("kind", sort=False):
        by_seed = {seed: _losses(part) for seed, part in of_kind.groupby("seed", sort=False)}
        columns = {
            merge: [
                difference(losses[merge], losses[AVERAGE])
                for losses in by_seed.values()
                if merge in losses
            ]
            for merge in DEFAULTS
        }
        for number, seed in enumerate(by_seed):
            cells = {name: _cell(found[number : number + 1]) for name, found in columns.items()}
            rows.append({"kind": kind, "seed": seed, **cells})
        means = {name: _cell([mean_over_seeds(f)] if f else []) for name, f in columns.items()}
        rows.append({"kind": kind, "seed": "mean", **means})
    return pd.DataFrame(rows)


def counts(table: pd.DataFrame) -> pd.DataFrame:
    """For each way to choose a merge and each reference, how often it is behind, and how far."""
    cases = [
        (f"{kind} {seed}", _losses(of_seed))
        for kind, of_kind in table.groupby("kind", sort=False)
        for seed, of_seed in of_kind.groupby("seed", sort=False)
    ]
    rows = []
    for rule, merge in RULES.items():
        for reference in REFERENCES:
            if merge == reference:
                continue
            found = {
                case: difference(losses[merge], losses[reference])
                for case, losses in cases
                if merge in losses
            }
            if found:
                rows.append({"chosen by": rule, "beside": reference, **_count(found)})
    return pd.DataFrame(rows)


def _count(found: dict[str, Difference]) -> dict[str, str | int]:
    """By case, a difference: how many are below 0, and above it by one and two errors."""
    furthest = max(found, key=lambda case: found[case].mean)
    errors = [d.mean / d.error if d.error > 0 else 0.0 for d in found.values()]
    return {
        "merges": len(found),
        "ahead by an error": sum(error < -1 for error in errors),
        "behind by an error": sum(error > 1 for error in errors),
        "behind by two": sum(error > 2 for error in errors),
        "furthest behind": f"{found[furthest].text(4)} ({furthest})",
    }


def _losses(part: pd.DataFrame) -> dict[str, Sequence[float]]:
    """By merge, the losses of a case's test examples."""
    return dict(zip(part["merge"], part["losses"], strict=True))


def _cell(found: Sequence[Difference]) -> str:
    """The only difference in words; a dash without one."""
    return found[0].text(4) if found else "-"
