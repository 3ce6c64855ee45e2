"""The rows to look at, and who supplied them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from blr_analysis.audit.findings import Findings
from blr_analysis.audit.section import Section, excerpt, percent, short
from blr_analysis.audit.trust import has_left_out_sizes, ranks_only
from blr_analysis.plots._canvas import name_of

SHOWN = 8  # rows in a text
EXCERPT = 48  # characters of a text
MAX_SOURCES = 50  # values in a column of sources; with more, it is some other column
MIN_SUSPECTS = 5  # of one source, to speak of it
MAX_PRECISION = 0.99  # that is written; no label is called wrong for certain
CLEAR_EXCESS = 3.0  # standard deviations above the number that chance gives a source


def suspects(findings: Findings) -> Section:
    """The first rows of :func:`blr_analysis.suspicious`, and the source that supplied most."""
    title = "Rows to look at"
    table = findings.suspects
    lead = _number_of_suspects(findings)
    if not len(table):
        return Section(title, lead)
    notes = [note for note in (main_supplier(findings), no_label_called(findings)) if note]
    return Section(
        title,
        lead=f"{lead} Suspicious is not wrong: look, then decide.",
        columns=_worst(table.head(SHOWN), has_sizes=has_left_out_sizes(findings)),
        notes=notes,
    )


def _number_of_suspects(findings: Findings) -> str:
    """A sentence on how many examples are suspected of each fault, and one on the labels.

    Only labels of classes are counted by the chance that they are wrong. Of targets, texts and
    unfamiliar examples a share is listed, whether they are wrong or not.
    """
    meanings = {
        "label": "{:,} probably labelled wrongly",
        "unfamiliar": "the {:,} least like the others",
        "duplicate": "{:,} there twice",
    }
    if findings.task.likelihood.is_sequence:
        meanings["label"] = "the {:,} hardest to predict"
    elif not findings.task.likelihood.is_classification:
        meanings["label"] = "the {:,} whose targets are furthest from the prediction"
    counts = findings.suspects["kind"].value_counts().to_dict()
    faults = [
        meaning.format(counts[kind]) for kind, meaning in meanings.items() if counts.get(kind)
    ]
    text = f"Of {len(findings.table):,} examples: {', '.join(faults) or 'none looks wrong'}."
    precision = findings.suspicions.precision
    if precision is not None:
        share = percent(min(precision, MAX_PRECISION))
        text += f" About {share} of these labels are expected to be wrong."
    return text


def no_label_called(findings: Findings) -> str:
    """A sentence on why no label is called wrong although the model contradicts some."""
    reason = findings.suspicions.no_label_called
    return f"{reason[:1].upper()}{reason[1:]}." if reason else ""


def _worst(table: pd.DataFrame, *, has_sizes: bool) -> dict[str, Any]:
    """The columns that show these rows of suspects.

    Args:
        has_sizes: whether left-out losses can be trusted in size.
    """
    columns = {"index": table["index"], "kind": table["kind"], **answers(table, "proposed")}
    columns["loss"] = short(table["loss"])
    has_checkpoints = not table["loss"].equals(table["training_loss"])  # "loss" averages over them
    if has_checkpoints:
        columns["at the end"] = short(table["training_loss"])
    if has_sizes:
        columns["left-out loss"] = short(table["left_out_loss"])
    kinds = table["kind"].tolist()
    if "duplicate" in kinds:
        twins = zip(kinds, table["twin"].tolist(), strict=True)
        columns["twin"] = [twin if kind == "duplicate" else "" for kind, twin in twins]
    return columns


def main_supplier(findings: Findings) -> str:
    """A sentence on the source whose suspects exceed chance most clearly; "" if none does.

    Of K suspects, chance gives a source with the share p of all rows K p ± √(K p (1 − p)).
    """
    n_suspects = len(findings.suspects)
    clearest = ""
    clearest_excess = CLEAR_EXCESS
    for column, source, count, share in _sources(findings):
        spread = math.sqrt(n_suspects * share * (1 - share))
        excess = (count - n_suspects * share) / spread
        if count >= MIN_SUSPECTS and excess > clearest_excess:
            clearest_excess = excess
            subject = f"{column[:1].upper()}{column[1:]} {name_of(source)}"
            clearest = (
                f"{subject} supplied {count:,} of {n_suspects:,} suspects "
                f"({percent(count / n_suspects)}), but only {percent(share)} of all rows."
            )
    return clearest


def _sources(findings: Findings) -> Iterator[tuple[str, Any, int, float]]:
    """Each source that supplied suspects.

    A source is a value of a metadata column with few values.

    Yields:
        The column, the value, the number of its suspects, and its share of all rows.
    """
    suspected = findings.suspects["index"].to_numpy()
    for column, values in findings.task.metadata.items():
        series = pd.Series(list(values)).map(str)
        shares: dict[str, float] = series.value_counts(normalize=True).to_dict()
        if not len(suspected) or not 2 <= len(shares) <= MAX_SOURCES:
            continue
        counts: dict[str, int] = series.iloc[suspected].value_counts().to_dict()
        for source, count in counts.items():
            yield str(column), source, count, shares[source]


def influential(findings: Findings) -> Section:
    """The examples that shape the model most."""
    measure = findings.influence
    worst = findings.table.nlargest(SHOWN, measure)
    columns = {"index": worst["index"], **answers(worst, "left_out_prediction")}
    if not ranks_only(findings.posterior):
        columns[measure.replace("_", "-")] = short(worst[measure])
    columns["region"] = worst["region"]
    if ranks_only(findings.posterior):
        lead = "In order; how far the model would move without them is not measured yet."
    elif measure == "self_influence":
        lead = "Left out of the training, each has a loss that is this much larger (first order)."
    elif findings.task.likelihood.is_classification:
        lead = "Left out of the training, each changes its own prediction this much (0 to 2)."
    else:
        lead = "Left out of the training, each changes its own prediction this much (in its units)."
    return Section("Most influential examples", lead, columns)


def answers(table: pd.DataFrame, answer: str) -> dict[str, Any]:
    """The label and the column ``answer``, where they are single values.

    Where neither is, the beginnings of the texts, if the table has texts.
    """
    titles = {"target": "label", "left_out_prediction": "without it", "proposed": "proposed"}
    names = [
        name
        for name in ("target", answer)
        if name in table and table[name].notna().to_numpy().any()
    ]
    if not names and "text" in table:
        return {"text": [excerpt(text, EXCERPT) for text in table["text"]]}
    return {titles[name]: table[name].map(name_of).tolist() for name in names}
