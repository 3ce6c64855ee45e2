"""The rows to look at, and who supplied them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from blr_analysis.audit.findings import Findings
from blr_analysis.audit.section import Section, percent, short
from blr_analysis.plots._canvas import name_of

SHOWN = 8  # rows in a text
EXCERPT = 48  # characters of a text
MOST_SOURCES = 50  # values of a column that tells sources apart
LEAST_SUSPECTS = 5  # of one source, to speak of it
HIGHEST_PRECISION = 0.99  # no label is called wrong for certain
CLEAR = 3.0  # standard deviations above what chance would give a source
FAULTS = {
    "label": "probably labelled wrongly",
    "unfamiliar": "unlike the others",
    "duplicate": "there twice",
}


def suspects(findings: Findings) -> Section:
    """The first rows of :func:`blr_analysis.suspicious`, and the source that supplied most."""
    table = findings.suspects
    counts = table["kind"].value_counts().to_dict()
    is_classification = findings.task.likelihood.is_classification
    meanings = dict(FAULTS)
    if findings.task.likelihood.is_sequence:
        meanings["label"] = "probably wrong"
    elif not is_classification:
        meanings["label"] = "probably with a wrong target"
    faults = [
        f"{counts[kind]:,} {meaning}" for kind, meaning in meanings.items() if counts.get(kind)
    ]
    lead = f"Of {len(findings.table):,} examples: {', '.join(faults) or 'none looks wrong'}."
    precision = findings.suspicions.precision
    if precision is not None:
        share = percent(min(precision, HIGHEST_PRECISION))
        lead += f" About {share} of these labels are expected to be wrong."
    title = "Rows to look at"
    if not len(table):
        return Section(title, lead)
    lead += " Suspicious is not wrong: look, then decide."
    worst = table.head(SHOWN)
    columns = {"index": worst["index"], "kind": worst["kind"], **answers(worst, "proposed")}
    columns["loss"] = short(worst["loss"])
    columns["at the end"] = short(worst["training_loss"])
    columns["left-out loss"] = short(worst["left_out_loss"])
    kinds = worst["kind"].tolist()
    if "duplicate" in kinds:
        twins = zip(kinds, worst["twin"].tolist(), strict=True)
        columns["twin"] = [twin if kind == "duplicate" else "" for kind, twin in twins]
    supplier = main_supplier(findings)
    return Section(title, lead, columns, [supplier] if supplier else [])


def main_supplier(findings: Findings) -> str:
    """The source that supplied more suspects than chance would give it; "" where none did.

    Of a source with the share p of all rows, chance gives K suspects K p ± √(K p (1 − p)).
    """
    n_suspects = len(findings.suspects)
    clearest = ""
    clearest_excess = CLEAR
    for column, source, count, share in _sources(findings):
        spread = math.sqrt(n_suspects * share * (1 - share))
        excess = (count - n_suspects * share) / spread
        if count >= LEAST_SUSPECTS and excess > clearest_excess:
            clearest_excess = excess
            subject = f"{column[:1].upper()}{column[1:]} {name_of(source)}"
            clearest = (
                f"{subject} supplied {count:,} of {n_suspects:,} suspects "
                f"({percent(count / n_suspects)}), but only {percent(share)} of all rows."
            )
    return clearest


def _sources(findings: Findings) -> Iterator[tuple[str, Any, int, float]]:
    """Of each column of few values, each value: the column, the value, its suspects, and its share
    of all rows."""
    suspected = findings.suspects["index"].to_numpy()
    for column, values in findings.task.metadata.items():
        series = pd.Series(list(values)).map(str)
        shares: dict[str, float] = series.value_counts(normalize=True).to_dict()
        if not len(suspected) or not 2 <= len(shares) <= MOST_SOURCES:
            continue
        counts: dict[str, int] = series.iloc[suspected].value_counts().to_dict()
        for source, count in counts.items():
            yield str(column), source, count, shares[source]


def influential(findings: Findings) -> Section:
    """The examples that shape the model most."""
    measure = findings.influence
    worst = findings.table.nlargest(SHOWN, measure)
    columns = {"index": worst["index"], **answers(worst, "left_out_prediction")}
    columns[measure.replace("_", "-")] = short(worst[measure])
    columns["region"] = worst["region"]
    if measure == "self_influence":
        lead = "Their own loss would rise this far without them (to first order, in nats)."
    elif findings.task.likelihood.is_classification:
        lead = "Their own prediction would move this far without them (0 to 2)."
    else:
        lead = "Their own prediction would move this far without them (in its own units)."
    return Section("Most influential examples", lead, columns)


def answers(table: pd.DataFrame, other: str) -> dict[str, Any]:
    """Columns of the label and of the column ``other``, where they are single values; of texts,
    how they begin."""
    titles = {"target": "label", "left_out_prediction": "without it", "proposed": "proposed"}
    names = [
        name for name in ("target", other) if name in table and table[name].notna().to_numpy().any()
    ]
    if not names and "text" in table:
        return {"text": [str(text)[:EXCERPT] for text in table["text"]]}
    return {titles[name]: table[name].map(name_of).tolist() for name in names}
