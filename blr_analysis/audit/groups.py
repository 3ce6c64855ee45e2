"""Which groups help and which hurt: each class, source or annotator taken out in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from blr_analysis.audit.section import Section, percent, two_digits
from blr_analysis.plots._canvas import Names, name_of
from blr_analysis.recipe import UNKNOWN

MAX_NAMED = 5  # groups that a sentence names
RANGES_ARE_ROUGH = (
    "The ranges are rough: on small networks, four of five held what retraining gave."
)
FIGURES_ARE_ROUGH = (
    "These figures are rough: nothing says how the model was trained. Pass recipe= to the Task for "
    "better ones."
)
ORDER_ONLY = "order only"  # replaces a figure that cannot be trusted


def without_each(
    removals: pd.DataFrame,
    noun: str,
    measured_on: str,
    names: Names | None = None,
    measure: str = "loss",
) -> Section:
    """What each group is worth: the table of ``what_if_each``, the group that helps most first.

    A group whose effect cannot be trusted in size keeps its place in the order, without a figure.

    Args:
        noun: what a group is called, such as "class".
        measured_on: the data that losses are measured on, in words.
        names: of the groups; None: the values in the table.
        measure: what the loss is called.
    """
    table = in_order(removals)
    trusted = is_measured(table)
    columns: dict[str, Sequence[Any]] = {
        noun: [name_of(group, names) for group in table["group"]],
        "examples": [f"{n:,}" for n in table["n"]],
        "effect": verdicts(table),
    }
    columns |= _columns_of_figures(table, trusted, measure)
    notes = doubts(removals, names)
    if _has_range(table, trusted).any():
        notes.append(RANGES_ARE_ROUGH)
    loss_before = two_digits(removals["nll_before"].iloc[0])
    passes = float(removals["passes"].to_numpy().max())
    method = how(str(removals["solver"].iloc[0]), passes)
    lead = (
        f"{in_short(table, noun, names, measure)} With all data the {measure} on {measured_on} is "
        f"{loss_before}. Each {noun} was taken out {method}."
    )
    return Section("Which groups help, which hurt", lead, columns, notes)


def _columns_of_figures(
    table: pd.DataFrame, trusted: np.ndarray, measure: str
) -> dict[str, Sequence[Any]]:
    """Loss, change, range and accuracy without each group; a column without figures is left out.

    Args:
        trusted: whether each group's figures are shown, ``[G]``.
    """
    columns: dict[str, Sequence[Any]] = {}
    if not trusted.any():
        return columns
    columns[f"{measure} without"] = _figures(table["nll_after"], trusted)
    columns["change"] = _figures(table["nll_change"], trusted, sign="+")
    has_range = _has_range(table, trusted)
    if has_range.any():
        ranges = zip(table["nll_low"], table["nll_high"], has_range, strict=True)
        columns["likely range"] = [
            f"{two_digits(low)} to {two_digits(high)}" if is_known else ""
            for low, high, is_known in ranges
        ]
    if not table["accuracy_after"].isna().to_numpy().any():
        accuracies = zip(table["accuracy_after"], trusted, strict=True)
        columns["accuracy without"] = [
            percent(accuracy) if is_trusted else "" for accuracy, is_trusted in accuracies
        ]
    return columns


def _has_range(table: pd.DataFrame, trusted: np.ndarray) -> np.ndarray:
    """Whether each group's loss has a range that is shown, ``[G]``."""
    return table["nll_low"].notna().to_numpy() & trusted


def in_order(removals: pd.DataFrame) -> pd.DataFrame:
    """The rows in order: first the group without which the loss rises most."""
    return removals.sort_values("nll_change", ascending=False, kind="stable", ignore_index=True)


def is_measured(table: pd.DataFrame) -> np.ndarray:
    """Whether the size of each group's effect can be trusted, at least roughly; ``[G]`` bool."""
    return table["note"].isin(["", UNKNOWN]).to_numpy()


def verdicts(table: pd.DataFrame) -> list[str]:
    """ "helps" or "hurts" for each group; "no clear effect" where its range allows both."""
    rows = zip(
        table["nll_change"],
        table["nll_before"],
        table["nll_low"],
        table["nll_high"],
        is_measured(table),
        strict=True,
    )
    words = []
    for change, before, low, high, is_trusted in rows:
        if is_trusted and low <= before <= high:
            words.append("no clear effect")
        elif change == 0:
            words.append("no effect")
        else:
            words.append("helps" if change > 0 else "hurts")
    return words


def in_short(table: pd.DataFrame, noun: str, names: Names | None, measure: str) -> str:
    """The group that helps most and the one that hurts most, in two sentences."""
    words = verdicts(table)
    some_help = words[0] == "helps"
    some_hurt = words[-1] == "hurts"
    if not some_help and not some_hurt:
        return f"No {noun} clearly helps or hurts."
    helpful = f"No {noun} clearly helps."
    if some_help:
        helpful = _effect(table.iloc[0], "helps", noun, names, measure)
    harmful = f"No {noun} clearly hurts."
    if some_hurt:
        harmful = _effect(table.iloc[-1], "hurts", noun, names, measure)
    return f"{helpful} {harmful}"


def _effect(row: Any, verdict: str, noun: str, names: Names | None, measure: str) -> str:
    """A sentence on the group of this row, with the loss without it if that can be trusted."""
    subject = f"{noun[:1].upper()}{noun[1:]} {name_of(row['group'], names)}"
    if row["note"] not in ("", UNKNOWN):
        return f"{subject} {verdict} most."
    change = "rise" if verdict == "helps" else "fall"
    loss_after = two_digits(row["nll_after"])
    sentence = f"{subject} {verdict} most: without it the {measure} would {change} to {loss_after}"
    if pd.notna(row["nll_low"]):
        low = two_digits(row["nll_low"])
        high = two_digits(row["nll_high"])
        return f"{sentence} (likely {low} to {high})."
    return f"{sentence}."


def _figures(values: Any, trusted: Any, sign: str = "") -> list[str]:
    """Figures to two digits, or :data:`ORDER_ONLY` where they cannot be trusted."""
    pairs = zip(values, trusted, strict=True)
    return [two_digits(value, sign) if is_trusted else ORDER_ONLY for value, is_trusted in pairs]


def doubts(removals: pd.DataFrame, names: Names | None) -> list[str]:
    """Why some groups show no figures, a sentence for each reason."""
    sentences = []
    for reason, rows in removals[removals["note"] != ""].groupby("note", sort=False):
        if reason == UNKNOWN:
            sentences.append(FIGURES_ARE_ROUGH)
            continue
        groups = [name_of(group, names) for group in rows["group"]]
        if len(groups) == len(removals):
            subject = "Only the order of the groups counts"
        elif len(groups) > MAX_NAMED:
            named = ", ".join(groups[:MAX_NAMED])
            subject = f"Without {named} and {len(groups) - MAX_NAMED} more"
        else:
            subject = f"Without {', '.join(groups)}"
        sentences.append(f"{subject}: {reason}.")
    return sentences


def how(solver: str, passes: float, change: str = "without it") -> str:
    """How a solver predicts a model, in words; the passes where they were counted.

    Args:
        solver: its name.
        passes: over the data; 0 where they were not counted.
        change: the data of the predicted model, such as "without it", a group.

    >>> how("retrain", 40), how("retrain", 0)
    ('by whole trainings without it, 40 passes over the data', 'by whole trainings without it')
    """
    words_of_solver = {
        "posterior": "in one step, without training",
        "cg": "by a descent on the changed data",
        "replay": f"by short trainings with all data and {change}",
        "retrain": f"by whole trainings {change}",
    }
    words = words_of_solver.get(solver, solver)
    is_counted = passes > 0  # one step has none, those of a user's own training are not known
    return f"{words}, {passes:.0f} passes over the data" if is_counted else words
