"""Influence as tables: the strongest pairs of training and test example, and groups."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from blr_analysis.sensitivity.influence_results import SHOWN
from blr_analysis.tables._columns import array_of, free_name, spread

__all__ = ["group_influence_table", "influence_table", "top_influence_table"]


def influence_table(found: Any) -> pd.DataFrame:
    """The strongest few of each test example; see :func:`top_influence_table`."""
    return top_influence_table(found.top(min(SHOWN, found.shape[0])))


def top_influence_table(top: Any) -> pd.DataFrame:
    """One row per test example and strong training example, most helpful first.

    ================ ========================================================
    column           what
    ================ ========================================================
    test             position of the test example in its dataset
    effect           "helpful" (leaving it out hurts) or "harmful"
    rank             1 for the strongest of its test example and effect
    train            position of the training example
    influence        rise of the test loss without it, nats
    test_target, …   target and prediction of both (not for sequences)
    …                metadata of the training example
    ================ ========================================================
    """
    n_test, k = top.helpful.shape
    train = torch.cat([top.helpful, top.harmful], dim=1).flatten()
    test = torch.arange(n_test).repeat_interleave(2 * k)
    columns: dict[str, Any] = {
        "test": test.numpy(),
        "effect": (["helpful"] * k + ["harmful"] * k) * n_test,
        "rank": list(range(1, k + 1)) * (2 * n_test),
        "train": train.numpy(),
        "influence": array_of(torch.cat([top.helpful_values, top.harmful_values], 1).flatten()),
    }
    for side, indices in (("test", test), ("train", train)):
        for name, values in top.pairs.described(indices, test=side == "test").items():
            columns.update(spread(f"{side}_{name}", values))
    for name, values in top.pairs.task.metadata.items():
        columns[free_name(str(name), set(columns))] = [values[i] for i in train.tolist()]
    return pd.DataFrame(columns)


def group_influence_table(found: Any) -> pd.DataFrame:
    """One row per group: group, n, influence (rise of the mean test loss without it, nats) and
    influence_per_example (the same divided by n)."""
    mean = array_of(found.mean)
    sizes = array_of(found.sizes)
    return pd.DataFrame(
        {
            "group": list(found.groups),
            "n": sizes,
            "influence": mean,
            "influence_per_example": mean / sizes,
        }
    )
