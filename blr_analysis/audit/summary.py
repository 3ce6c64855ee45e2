"""What an audit says in words and small tables, for a terminal of any width or a text file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from torch import Tensor

from blr_analysis.audit.findings import (
    Findings,
    group_noun,
    influence_column,
    most_influential,
    most_suspicious,
    suspicion_column,
)
from blr_analysis.audit.pictures import plain
from blr_analysis.backprop.loss import Evaluation, SequenceEvaluation
from blr_analysis.memory_map import MemoryMap
from blr_analysis.plots import extremes
from blr_analysis.posterior import Posterior
from blr_analysis.posterior.stationarity import stationarity
from blr_analysis.sensitivity import LeaveOneOut, SequenceLeaveOneOut, WhatIf
from blr_analysis.sensitivity.results import PerExample
from blr_analysis.task import Task
from blr_analysis.terminal import grid, note, section

SHOWN = 8  # examples in each list
MOST_ROWS = 20
NAMED = 5  # groups in a sentence
EXCERPT = 48  # characters of a text
NOTABLE = 0.01  # of the precision raised to the prior
DIAGONAL = (
    "This posterior is diagonal, without correlations between weights: for a whole group it can be "
    "far off in either direction. A Laplace posterior with correlations (--fit kron; --fit full "
    "for a small model) comes closer."
)
REGION_MEANS = {
    "regular": "well fitted, and others support it",
    "uncertain": "well fitted, but few support it",
    "unpredictable": "poorly fitted: the other data insist",
    "memorable": "poorly fitted, few support it: look here",
}


def summary(findings: Findings, *, about_loo: str | None = None) -> RenderableType:
    """All sections that the findings allow, one below the other.

    Args:
        about_loo: a remark below the leave-one-out estimate.
    """
    table = findings.table
    parts = [
        trust_section(findings.task, findings.posterior, findings.loo),
        influential_section(table),
        suspicious_section(table),
        loo_section(findings.loo, findings.on_test),
        *([] if about_loo is None else [note(about_loo)]),
        map_section(findings.memory),
    ]
    if findings.removals is not None:
        where = "the test data" if findings.test is not None else "the training data themselves"
        noun = group_noun(str(findings.by), findings.scores)
        parts.append(removals_section(findings.removals, noun, where))
        if findings.posterior.structure == "diag":
            parts.append(note(DIAGONAL))
    return Group(*parts)


def trust_section(
    task: Task, posterior: Posterior, loo: PerExample | None = None
) -> RenderableType:
    """What the model's distance from its minimum means for the numbers that follow."""
    said, *more = trust_notes(task, posterior, loo)
    return section("How far to trust it", said, *map(note, more))


def trust_notes(task: Task, posterior: Posterior, loo: PerExample | None = None) -> list[str]:
    """The sentences of :func:`trust_section`."""
    said = [f"The model is {stationarity(task, posterior).verdict}."]
    if posterior.note:
        said.append(f"Single examples: {posterior.note}.")
    if loo is None:
        return said
    leverage = getattr(loo, "leverage", None)
    if leverage is not None and (many := int((leverage >= 1).sum())):
        said.append(
            f"{many:,} of {len(leverage):,} examples have a leverage of 1 or more: their own "
            "estimates are rough; leave_one_out(refine=) takes them out by a descent."
        )
    return said


def influential_section(table: pd.DataFrame) -> RenderableType:
    """The examples that shape the model most."""
    worst = most_influential(table, SHOWN)
    measure = influence_column(worst)
    columns: dict[str, Iterable[Any]] = {"index": worst["index"], **_answers(worst)}
    columns[measure.replace("_", "-")] = [f"{v:.3g}" for v in worst[measure]]
    columns["region"] = worst["region"].astype(str)
    said = "How far their own prediction would move without them"
    said += " (0 to 2)." if "label_quality" in table else " (in units of the output)."
    if measure == "self_influence":
        said = "How far their own loss would rise without them (to first order, in nats)."
    return section("Most influential examples", said, grid(columns))


def suspicious_section(table: pd.DataFrame) -> RenderableType:
    """The labels, or targets, that the model contradicts when it has not seen them."""
    worst = most_suspicious(table, SHOWN)
    if "suspicious" not in table:
        measure = suspicion_column(worst)
        rows = grid(
            {
                "index": worst["index"],
                **_answers(worst),
                measure.replace("_", " ").replace("left out", "left-out"): [
                    f"{v:.3g}" for v in worst[measure]
                ],
            }
        )
        what = "texts" if measure != "left_out_loss" else "targets"
        return section(
            f"Most suspicious {what}", "Worst predicted without the example itself.", rows
        )
    count = int(np.count_nonzero(table["suspicious"]))
    lead = (
        f"{count:,} of {len(table):,} labels are contradicted by the model without that example; "
        "the surest first. Quality is the left-out probability of the label."
    )
    if not count:
        return section("Most suspicious labels", "No label is contradicted without its example.")
    rows = grid(
        {
            "index": worst["index"],
            **_answers(worst),
            "quality": [f"{v:.2g}" for v in worst["label_quality"]],
            "deviation": [f"{v:.3g}" for v in worst["deviation"]],
            "region": worst["region"].astype(str),
        }
    )
    return section("Most suspicious labels", lead, rows)


def sources_section(sources: pd.DataFrame) -> RenderableType:
    """The training examples that each question rests on, as ``blr-analysis query`` finds them."""
    names = {
        "question": "question",
        "test_target": "its label",
        "test_prediction": "prediction",
        "example": "index",
        "train_target": "label",
    }
    columns: dict[str, Iterable[Any]] = {
        shown: sources[name].map(plain) for name, shown in names.items() if name in sources
    }
    if "label" not in columns and "text" in sources:
        columns["text"] = [str(text)[:EXCERPT] for text in sources["text"]]
    about = "How far a question's loss would rise without them."
    quantity = "influence"
    if quantity not in sources:
        quantity, about = "normalized_influence", f"{about[:-1]}, by the length of each."
    columns[quantity] = [f"{v:.3g}" for v in sources[quantity]]
    return section("Sources", about, grid(columns))


def loo_section(
    loo: LeaveOneOut | SequenceLeaveOneOut, on_test: Evaluation | None
) -> RenderableType:
    """The estimate of the loss on new data, beside what it was made from and what came true."""
    rows = expectations(loo, on_test)
    names = ("training data", "leave-one-out estimate", "test data")
    columns: dict[str, Iterable[Any]] = {
        "": names[: len(rows)],
        "NLL": [f"{nll:.4f}" for nll, _ in rows],
    }
    if rows[1][1] is not None:
        columns["accuracy"] = [f"{accuracy:.1%}" for _, accuracy in rows]
    lead = "From the training data alone: the mean loss, in nats, of each example when left out."
    if isinstance(loo, SequenceLeaveOneOut):
        found = [loo.perplexity_before, loo.perplexity]
        found += [on_test.perplexity] if isinstance(on_test, SequenceEvaluation) else []
        columns["perplexity"] = [f"{value:.4g}" for value in found]
        lead = "From the training data alone: the mean loss of a token, its text left out, in nats."
    parts: list[RenderableType] = [grid(columns)]
    if on_test is not None:
        parts.append(note(agreement(loo, on_test)))
    return section("How well will it generalise?", lead, *parts)


def expectations(
    loo: LeaveOneOut | SequenceLeaveOneOut, on_test: Evaluation | None
) -> list[tuple[float, float | None]]:
    """Mean loss and accuracy of the training data, of the leave-one-out estimate, and of the test
    data if there are any; of sequences the mean loss of a token."""
    if isinstance(loo, SequenceLeaveOneOut):
        rows: list[tuple[float, float | None]] = [(loo.nll_per_token_before, None)]
        rows.append((loo.nll_per_token, None))
        if isinstance(on_test, SequenceEvaluation):
            rows.append((on_test.nll_per_token, on_test.accuracy))
        return rows
    before = replace(loo, losses=loo.losses_before).nll
    rows = [(before, accuracy_of(loo.predictions_before, loo)), (loo.nll, loo.accuracy)]
    return rows if on_test is None else [*rows, (on_test.nll, on_test.accuracy)]


def map_section(memory: MemoryMap) -> RenderableType:
    """How many examples each region of the memory map holds, and what that means."""
    counts = memory.counts()
    n = len(memory.region)
    rows = grid(
        {
            "region": counts,
            "examples": [f"{count:,}" for count in counts.values()],
            "share": [f"{count / n:.1%}" for count in counts.values()],
            "the example is": [REGION_MEANS[name] for name in counts],
        }
    )
    above = float((memory.error > memory.error_threshold).double().mean())
    beyond = float((memory.variance > memory.variance_threshold).double().mean())
    lead = (
        f"Prediction error above {memory.error_threshold:.3g} counts as poorly fitted, prediction "
        f"variance above {memory.variance_threshold:.3g} as little support: quantiles of these "
        f"data, so that {above:.0%} and {beyond:.0%} lie above whatever the model."
    )
    return section("Memory map", lead, rows)


def extremes_section(memory: MemoryMap) -> RenderableType:
    """The examples with the largest error times variance, memorable ones first."""
    rows = memory.table.iloc[extremes(memory, SHOWN)]
    columns: dict[str, Iterable[Any]] = {"index": rows["index"]}
    if "target" in rows:
        columns["label"] = rows["target"].map(plain)
        columns["prediction"] = rows["prediction"].map(plain)
    columns["error"] = [f"{v:.3g}" for v in rows["error"]]
    columns["variance"] = [f"{v:.3g}" for v in rows["variance"]]
    columns["region"] = rows["region"].astype(str)
    return section("Extremes", "Largest error times variance, memorable ones first.", grid(columns))


def removals_section(removals: pd.DataFrame, noun: str, where: str) -> RenderableType:
    """What each group is worth: the table of ``what_if_each``, the largest change first."""
    columns: dict[str, Sequence[Any]] = {
        noun: removals["group"].map(plain).tolist(),
        "examples": [f"{n:,}" for n in removals["n"]],
        "NLL without": [f"{v:.3f}" for v in removals["nll_after"]],
        "change": [f"{v:+.3f}" for v in removals["nll_change"]],
    }
    ends = zip(removals["nll_low"], removals["nll_high"], strict=True)
    columns["likely between"] = [f"{low:.2f} and {high:.2f}" for low, high in ends]
    if not np.isnan(removals["accuracy_after"].to_numpy()).any():
        columns["accuracy without"] = [f"{v:.1%}" for v in removals["accuracy_after"]]
    order = removals["nll_change"].abs().argsort(kind="stable")[::-1].tolist()
    rows = {name: [values[k] for k in order[:MOST_ROWS]] for name, values in columns.items()}
    before = removals["nll_before"].iloc[0]
    lead = (
        f"Predicted {removed_how(removals)}, measured on {where} (NLL with all data: {before:.3f})."
    )
    lead += " The ranges are rough: their widths rest on small networks, or on a guess."
    parts: list[RenderableType] = [grid(rows)]
    if len(order) > MOST_ROWS:
        parts.append(note(f"The {MOST_ROWS} largest of {len(order)}; the table has them all."))
    parts += map(note, doubts(removals, plain))
    return section(f"What if a {noun} were gone?", lead, *parts)


def doubts(removals: pd.DataFrame, named: Callable[[Any], str]) -> list[str]:
    """Why not to trust the answers for some groups, a sentence for each reason."""
    groups: dict[str, list[str]] = {}
    for row in removals.to_dict("records"):
        if row["note"]:
            groups.setdefault(row["note"], []).append(str(named(row["group"])))
    return [
        f"Not to be trusted without {', '.join(some[:NAMED])}"
        + (f" and {len(some) - NAMED} more" if len(some) > NAMED else "")
        + f": {said}."
        for said, some in groups.items()
    ]


def removed_how(removals: pd.DataFrame) -> str:
    """How the groups of a table were taken out."""
    return how(str(removals["solver"].iloc[0]), float(removals["passes"].to_numpy().max()))


def how(solver: str, passes: float) -> str:
    if solver.startswith("replay"):
        return f"by short trainings from fresh weights, with and without it, {passes:.0f} passes"
    if passes == 0:
        return "without retraining, in one rough step"
    return f"by a descent of {passes:.0f} passes over the data that stay"


def what_if_section(result: WhatIf, where: str, n_data: int) -> RenderableType:
    """One what-if: before and after, on the whole and by class."""
    rows = [("all", len(result.targets), result.before.nll, result.nll)]
    shares = [(result.before.accuracy, result.accuracy)]
    if has_classes(result):
        for row in result.by_class.to_dict("records"):
            rows.append((str(row["class"]), row["n"], row["nll_before"], row["nll_after"]))
            shares.append((row["accuracy_before"], row["accuracy_after"]))
    columns: dict[str, Iterable[Any]] = {
        "class": [name for name, *_ in rows],
        "examples": [f"{n:,}" for _, n, *_ in rows],
        "NLL": [f"{before:.3f}" for *_, before, _ in rows],
        "without": [f"{after:.3f}" for *_, after in rows],
    }
    if result.accuracy is not None:
        columns["accuracy"] = [f"{before:.1%}" for before, _ in shares]
        columns["without "] = [f"{after:.1%}" for _, after in shares]
    lead = (
        f"{result.removed:,} of {n_data:,} training examples taken out"
        + (f", {result.relabelled:,} relabelled" if result.relabelled else "")
        + "; predicted "
        f"{how(result.solver, result.passes)}, measured on {where}."
    )
    parts: list[RenderableType] = [grid(columns)]
    if result.interval is not None:
        low, high = result.interval
        parts.append(note(f"NLL after retraining, roughly: between {low:.3f} and {high:.3f}."))
    if result.note:
        parts.append(note(f"How far to trust it: {result.note}."))
    return section("What if they were gone?", lead, *parts)


def has_classes(result: WhatIf) -> bool:
    """Whether what-if results can be told apart by class."""
    targets = result.targets
    return result.accuracy is not None and (targets.ndim == 1 or targets.shape[-1] == 1)


def files_section(folder: Path, files: Iterable[Path]) -> RenderableType:
    """What was written, by name."""
    names = ", ".join(dict.fromkeys(path.name for path in files))
    return section("Written", f"{folder}: {names}")


def _answers(table: pd.DataFrame) -> dict[str, Iterable[Any]]:
    """The label and what the model says without the example, where each is one value; of texts
    how they begin."""
    names = {"target": "label", "left_out_prediction": "without it"}
    if "suspicious" not in table:
        names["target"] = "target"
    answers: dict[str, Iterable[Any]] = {
        shown: table[name].map(plain).tolist() for name, shown in names.items() if name in table
    }
    if not answers and "text" in table:
        answers = {"text": [str(text)[:EXCERPT] for text in table["text"]]}
    return answers


def accuracy_of(predictions: Any, loo: LeaveOneOut) -> float | None:
    if loo.accuracy is None:
        return None
    hits = predictions.to(loo.targets.dtype) == loo.targets.reshape(predictions.shape)
    hits = hits if hits.ndim == 1 else hits.all(-1)
    counted = ~cast(Tensor, loo.likelihood.correct(loo.logits, loo.targets)).isnan()
    return float(hits[counted].double().mean())


def agreement(loo: LeaveOneOut | SequenceLeaveOneOut, on_test: Evaluation) -> str:
    """How far the estimate is from the test data, against the latter's own uncertainty."""
    _, (estimate, accuracy), (nll, hits) = expectations(loo, on_test)
    gap, losses = estimate - nll, on_test.counted.double()
    m = len(losses)
    said = f"The estimate is {abs(gap):.4f} nats {'above' if gap >= 0 else 'below'} the test NLL"
    if m > 1:
        if isinstance(on_test, SequenceEvaluation):  # of a ratio of sums
            losses = (losses - nll * on_test.tokens) / on_test.tokens.double().mean()
        noise = float(losses.std() / m**0.5)
        said += f" (whose standard error is {noise:.4f} with {m:,} examples)"
    if accuracy is not None and hits is not None:
        points = 100 * (accuracy - hits)
        said += f"; {abs(points):.1f} points {'above' if points >= 0 else 'below'} in accuracy"
    return said + "."
