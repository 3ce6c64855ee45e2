"""The sections of an audit, each in words and a small table, for any renderer.

Their reader asks what to do. First come the rows to look at, then groups, then what to expect of
new data, then how far to trust all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from blr_analysis.audit.findings import Findings
from blr_analysis.audit.groups import how, without_each
from blr_analysis.audit.new_data import generalisation, measured
from blr_analysis.audit.section import Section, excerpt, percent, two_digits
from blr_analysis.audit.suspects import EXCERPT, SHOWN, influential, suspects
from blr_analysis.audit.trust import trust
from blr_analysis.memory_map import MemoryMap
from blr_analysis.plots._canvas import Names, name_of
from blr_analysis.plots.memory import extremes, shares_above
from blr_analysis.plots.what_if import whole
from blr_analysis.sensitivity import WhatIf

__all__ = ["Section", "sections", "sources", "trust", "what_if_section"]

REGION_MEANS = {
    "regular": "well fitted, and others support it",
    "uncertain": "well fitted, but few support it",
    "unpredictable": "poorly fitted: the other data insist",
    "memorable": "poorly fitted, few support it: look here",
}


def sections(findings: Findings, names: Names | None = None) -> dict[str, Section]:
    """Every section that the findings allow, in the order of reading.

    Args:
        names: of the groups that were taken out; None: their values.
    """
    removals = findings.removals
    solver = "" if removals is None else str(removals["solver"].iloc[0])
    parts = {"suspicious": suspects(findings)}
    if removals is not None:
        measured_on = "the test data"
        if findings.test is None:
            measured_on = "the training data themselves"
        measure = measured(findings)
        parts["removals"] = without_each(removals, findings.noun, measured_on, names, measure)
    parts["new"] = generalisation(findings)
    parts["trust"] = trust(findings.task, findings.posterior, findings, solver)
    parts["influential"] = influential(findings)
    parts["map"] = regions(findings.memory)
    return parts


def regions(memory: MemoryMap) -> Section:
    """The number of examples in each region of the memory map, and what the region means."""
    counts = memory.counts()
    n = len(memory.region)
    columns = {
        "region": list(counts),
        "examples": [f"{count:,}" for count in counts.values()],
        "share": [percent(count / n) for count in counts.values()],
        "the example is": [REGION_MEANS[name] for name in counts],
    }
    share_of_errors, share_of_variances = shares_above(memory)
    lead = (
        f"Prediction error above {two_digits(memory.error_threshold)} counts as poorly fitted, "
        f"prediction variance above {two_digits(memory.variance_threshold)} as little support. "
        f"The bounds are quantiles of these data: for any model, {share_of_errors:.0%} of the "
        f"examples have a larger error, and {share_of_variances:.0%} a larger variance."
    )
    notes = []
    largest = ", ".join(map(str, extremes(memory, SHOWN)))
    if largest:
        notes.append(f"Largest error times variance, memorable ones first: {largest}.")
    return Section("Memory map", lead, columns, notes)


def what_if_section(
    result: WhatIf, measured_on: str, n_data: int, measure: str = "loss"
) -> Section:
    """One what-if: losses before and after, of all data and of each class.

    Args:
        measured_on: the data that losses are measured on, in words.
        n_data: the number of training examples.
        measure: what the loss is called.
    """
    table = whole(result)
    columns: dict[str, Sequence[Any]] = {
        "class": table["class"].map(name_of).tolist(),
        "examples": [f"{n:,}" for n in table["n"]],
        measure: [f"{v:.3f}" for v in table["nll_before"]],
        "without": [f"{v:.3f}" for v in table["nll_after"]],
    }
    if result.accuracy is not None:
        columns["accuracy"] = [f"{v:.1%}" for v in table["accuracy_before"]]
        columns["without "] = [f"{v:.1%}" for v in table["accuracy_after"]]
    change = f"{result.removed:,} of {n_data:,} training examples taken out"
    if result.relabelled:
        change += f", {result.relabelled:,} relabelled"
    method = how(result.solver, result.passes, change="with the change")
    lead = f"{change}; predicted {method}, measured on {measured_on}."
    notes = []
    if result.interval is not None:
        low, high = result.interval
        name = f"{measure[0].upper()}{measure[1:]}"
        notes.append(f"{name} after retraining, roughly: between {low:.3f} and {high:.3f}.")
    if result.note:
        notes.append(f"How far to trust it: {result.note}.")
    return Section("What if they were gone?", lead, columns, notes)


def sources(table: pd.DataFrame, quantity: str, questions: Sequence[str] | None = None) -> Section:
    """The training examples that each question rests on.

    Args:
        table: a row for each question and example.
        quantity: the column of influences.
        questions: their texts; None where they are no texts.
    """
    titles = {
        "question": "question",
        "test_target": "its label",
        "test_prediction": "prediction",
        "example": "index",
        "train_target": "label",
    }
    columns: dict[str, Sequence[Any]] = {
        title: table[name].map(name_of).tolist() for name, title in titles.items() if name in table
    }
    if questions is not None:
        is_first_row = ~table["question"].duplicated()
        rows = zip(table["question"], is_first_row, strict=True)
        columns["question"] = [
            f"{index}  {excerpt(questions[index], EXCERPT)}" if is_first else ""
            for index, is_first in rows
        ]
        columns["text"] = [excerpt(text, EXCERPT) for text in table["text"]]
    columns[quantity.replace("_", " ")] = [f"{value:.3g}" for value in table[quantity]]
    lead = "How far a question's loss would rise without them"
    if quantity != "influence":
        lead += ", divided by the length of each source's gradient"
    return Section("Sources", f"{lead}.", columns)
