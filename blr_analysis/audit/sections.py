"""What an audit says: one list of sections, each in words and a small table, for any renderer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from blr_analysis.audit.findings import Findings
from blr_analysis.backprop.loss import Evaluation, SequenceEvaluation
from blr_analysis.memory_map import MemoryMap
from blr_analysis.plots._canvas import Names, name_of
from blr_analysis.plots.memory import extremes, shares_above
from blr_analysis.plots.what_if import whole
from blr_analysis.posterior import Posterior
from blr_analysis.posterior.predictive import measure_of
from blr_analysis.posterior.recognition import elsewhere
from blr_analysis.posterior.stationarity import stationarity, with_stationarity
from blr_analysis.sensitivity import WhatIf
from blr_analysis.task import Task

SHOWN = 8  # examples in each list
NAMED = 5  # groups in a sentence
EXCERPT = 48  # characters of a text
ESTIMATE = "leave-one-out estimate"
DIAGONAL = (
    "This posterior is diagonal, without correlations between weights: for a whole group one step "
    "can be far off in either direction; one of Kronecker factors (--fit kron) comes closer."
)
STARTING = (
    "More than half of the precision is still the optimizer's starting value, not the data's: the "
    "scale of every estimate rests on that choice."
)
TRAINED = "What is said here of groups comes from trainings without them: more than a ranking."
WIDTHS = "The ranges are rough: four of five truths lie in them on small networks."
REGION_MEANS = {
    "regular": "well fitted, and others support it",
    "uncertain": "well fitted, but few support it",
    "unpredictable": "poorly fitted: the other data insist",
    "memorable": "poorly fitted, few support it: look here",
}
FAULTS = {
    "label": "probably labelled wrongly",
    "unfamiliar": "unlike the others",
    "duplicate": "there twice",
}


@dataclass(frozen=True)
class Section:
    """A heading, a sentence, the columns of a small table, and notes."""

    title: str
    lead: str = ""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """The table, row by row."""
        return list(zip(*self.columns.values(), strict=True))


def sections(findings: Findings, names: Names | None = None) -> dict[str, Section]:
    """All that the findings allow, in the order of reading; ``names`` are those of groups."""
    removals = findings.removals
    solver = "" if removals is None else str(removals["solver"].iloc[0])
    parts = {
        "trust": trust(findings.task, findings.posterior, findings, names, solver),
        "influential": influential(findings),
        "suspicious": suspects(findings),
        "new": generalisation(findings),
        "map": regions(findings.memory),
    }
    if removals is not None:
        measured_on = "the test data"
        if findings.test is None:
            measured_on = "the training data themselves"
        parts["removals"] = without_each(removals, findings.noun, measured_on, names)
    return parts


def trust(
    task: Task,
    posterior: Posterior,
    findings: Findings | None = None,
    names: Names | None = None,
    solver: str = "",
) -> Section:
    """How far the answers hold: what the reader must know before the first number.

    Args:
        task, posterior: the subject.
        findings: of a whole audit; None of a single question.
        names: what groups are called.
        solver: by which groups were taken out; "" if none were.
    """
    posterior = with_stationarity(task, posterior)
    minimum = stationarity(task, posterior)
    notes = []
    if findings is not None and findings.unlike:
        notes.append(f"The test data are unlike the training data: {findings.unlike}")
    warning = elsewhere(task, posterior)
    if warning:
        notes.append(f"{warning[0].upper()}{warning[1:]}.")
    is_near_minimum = minimum.at_minimum or minimum.near
    if solver in ("replay", "retrain") and not is_near_minimum:
        notes.append(TRAINED)
    notes += notes_on_posterior(posterior)
    if findings is not None:
        notes += notes_on_leverage(findings)
    if findings is not None and findings.removals is not None:
        notes += doubts(findings.removals, names)
    return Section("How far to trust it", f"The model is {minimum.verdict}.", notes=notes)


def notes_on_posterior(posterior: Posterior) -> list[str]:
    """What to know of its scale and of its structure."""
    notes = []
    if posterior.note and not posterior.at_minimum:  # at a minimum the verdict says it
        notes.append(f"Single examples: {posterior.note}.")
    error = posterior.temperature_error
    if error is not None:
        temperature = f"{posterior.temperature:.3g}, give or take {error:.0%}"
        notes.append(f"The temperature was measured: {temperature}.")
    if posterior.structure == "diag":
        notes.append(DIAGONAL)
    share_of_the_start = posterior.record.get("initial_share") or 0.0
    if share_of_the_start > 0.5:
        notes.append(STARTING)
    return notes


def notes_on_leverage(findings: Findings) -> list[str]:
    """How many left-out estimates are rough, and what solves them."""
    leverage = findings.loo.leverage
    if leverage is None:
        return []
    rough = int((leverage >= 1).sum())
    if not rough:
        return []
    sentence = (
        f"Leverage of 1 or more: {rough:,} of {len(leverage):,} examples, whose own estimates "
        "are rough"
    )
    if findings.posterior.at_minimum:
        sentence += "; leave_one_out(refine=) takes them out by a descent"
    return [f"{sentence}."]


def influential(findings: Findings) -> Section:
    """The examples that shape the model most."""
    measure = findings.influence
    worst = findings.table.nlargest(SHOWN, measure)
    columns = {"index": worst["index"], **_answers(worst, "left_out_prediction")}
    columns[measure.replace("_", "-")] = short(worst[measure])
    columns["region"] = worst["region"]
    if measure == "self_influence":
        lead = "How far their own loss would rise without them (to first order, in nats)."
    elif findings.task.likelihood.is_classification:
        lead = "How far their own prediction would move without them (0 to 2)."
    else:
        lead = "How far their own prediction would move without them (in its own units)."
    return Section("Most influential examples", lead, columns)


def suspects(findings: Findings) -> Section:
    """The first rows of :func:`blr_analysis.suspicious`."""
    table = findings.suspects
    counts = table["kind"].value_counts().to_dict()
    faults = [f"{counts[kind]:,} {meaning}" for kind, meaning in FAULTS.items() if counts[kind]]
    lead = f"Of {len(findings.table):,}: {', '.join(faults) or 'none'}. Suspicious is not wrong."
    precision = findings.suspicions.precision
    if precision is not None:
        lead += f" Of these labels {precision:.0%} are expected to be wrong."
    if not len(table):
        return Section("Suspicious examples", lead)
    worst = table.head(SHOWN)
    columns = {"index": worst["index"], "kind": worst["kind"], **_answers(worst, "proposed")}
    columns["loss"] = short(worst["loss"])
    columns["at the end"] = short(worst["training_loss"])
    columns["left-out loss"] = short(worst["left_out_loss"])
    kinds = worst["kind"].tolist()
    if "duplicate" in kinds:
        twins = zip(kinds, worst["twin"].tolist(), strict=True)
        columns["twin"] = [twin if kind == "duplicate" else "" for kind, twin in twins]
    return Section("Suspicious examples", lead, columns)


def generalisation(findings: Findings) -> Section:
    """The estimate of the loss on new data, beside what it was made from and what came true."""
    loo = findings.loo
    on_test = findings.on_test
    has_estimate = not loo.is_below_chance
    estimate = ESTIMATE if has_estimate else "left out, no estimate"
    names = ["training data", estimate]
    if on_test is not None:
        names.append("test data")
    if findings.scores.tokens is not None:
        rows: list[Any] = [findings.scores, loo, on_test][: len(names)]
        lead = "From the training data alone: the mean loss of a token, its text left out, in nats."
        columns: dict[str, Sequence[Any]] = {
            "": names,
            "NLL": [f"{row.nll_per_token:.4f}" for row in rows],
            "perplexity": [f"{row.perplexity:.4g}" for row in rows],
        }
    else:
        rows = [on_training_data(findings), loo, on_test][: len(names)]
        lead = (
            "From the training data alone: the mean loss, in nats, of each example when left out."
        )
        columns = {"": names, measured(findings): [f"{row.nll:.4f}" for row in rows]}
        if loo.accuracy is not None:
            columns["accuracy"] = [f"{row.accuracy:.1%}" for row in rows]
    notes = []
    if loo.note:
        notes.append(f"A rough estimate: {loo.note}.")
    if on_test is not None and has_estimate:
        notes.append(agreement(loo, on_test))
    return Section("How well will it generalise?", lead, columns, notes)


def on_training_data(findings: Findings) -> Evaluation:
    """Losses and hits on the data that the model was trained on."""
    scores = findings.scores
    assert scores.outputs is not None and scores.targets is not None
    hits = findings.task.likelihood.correct(scores.outputs, scores.targets)
    return Evaluation(scores.losses, hits)


def measured(findings: Findings) -> str:
    """What the losses of an example are called: "NLL", or another measure and of how many
    outputs it is summed."""
    measure = measure_of(findings.task.likelihood.kind)
    if measure == "nll":
        return "NLL"
    error = findings.scores.error
    assert error is not None
    outputs = error.shape[-1]
    return f"{measure}, summed over {outputs} outputs" if outputs > 1 else measure


def agreement(loo: Any, on_test: Evaluation) -> str:
    """How far the estimate is from the test data, against the latter's own uncertainty."""
    losses = on_test.counted.double()
    gap = loo.nll - on_test.nll
    if isinstance(on_test, SequenceEvaluation):  # Σ losses / Σ tokens, a ratio of sums
        nll = on_test.nll_per_token
        gap = loo.nll_per_token - nll
        losses = (losses - nll * on_test.tokens) / on_test.tokens.double().mean()
    side = "above" if gap >= 0 else "below"
    sentence = f"The estimate is {abs(gap):.4f} nats {side} the test NLL"
    n = len(losses)
    if n > 1:
        standard_error = float(losses.std() / n**0.5)
        sentence += f" (whose standard error is {standard_error:.4f} with {n:,} examples)"
    return f"{sentence}."


def regions(memory: MemoryMap) -> Section:
    """How many examples each region of the memory map holds, and what that means."""
    counts = memory.counts()
    n = len(memory.region)
    columns = {
        "region": list(counts),
        "examples": [f"{count:,}" for count in counts.values()],
        "share": [f"{count / n:.1%}" for count in counts.values()],
        "the example is": [REGION_MEANS[name] for name in counts],
    }
    share_of_errors, share_of_variances = shares_above(memory)
    lead = (
        f"Prediction error above {memory.error_threshold:.3g} counts as poorly fitted, prediction "
        f"variance above {memory.variance_threshold:.3g} as little support: quantiles of these "
        f"data, so that {share_of_errors:.0%} and {share_of_variances:.0%} lie above whatever the "
        "model."
    )
    notes = []
    largest = ", ".join(map(str, extremes(memory, SHOWN)))
    if largest:
        notes.append(f"Largest error times variance, memorable ones first: {largest}.")
    return Section("Memory map", lead, columns, notes)


def without_each(
    removals: pd.DataFrame, noun: str, measured_on: str, names: Names | None = None
) -> Section:
    """What each group is worth: the table of ``what_if_each``, the largest change first."""
    order = removals["nll_change"].abs().argsort(kind="stable").to_numpy()[::-1]
    table = removals.iloc[order]
    columns: dict[str, Sequence[Any]] = {
        noun: [name_of(group, names) for group in table["group"]],
        "examples": [f"{n:,}" for n in table["n"]],
        "NLL without": [f"{nll:.3f}" for nll in table["nll_after"]],
        "change": [f"{change:+.3f}" for change in table["nll_change"]],
    }
    notes = []
    has_range = table["nll_low"].notna().to_numpy()
    if has_range.any():
        ranges = zip(table["nll_low"], table["nll_high"], has_range, strict=True)
        columns["likely between"] = [
            f"{low:.2f} and {high:.2f}" if is_known else "" for low, high, is_known in ranges
        ]
        notes.append(WIDTHS)
    if not table["accuracy_after"].isna().to_numpy().any():
        columns["accuracy without"] = [f"{accuracy:.1%}" for accuracy in table["accuracy_after"]]
    before = removals["nll_before"].iloc[0]
    passes = float(removals["passes"].to_numpy().max())
    manner = how(str(removals["solver"].iloc[0]), passes)
    lead = f"Each predicted {manner}, measured on {measured_on} (NLL with all data: {before:.3f})."
    return Section(f"What if one {noun} were gone?", lead, columns, notes)


def doubts(removals: pd.DataFrame, names: Names | None) -> list[str]:
    """Why not to trust the answers for some groups, a sentence for each reason."""
    sentences = []
    for reason, rows in removals[removals["note"] != ""].groupby("note", sort=False):
        groups = [name_of(group, names) for group in rows["group"]]
        if len(groups) == len(removals):
            subject = "Groups taken out"
        elif len(groups) > NAMED:
            subject = f"Without {', '.join(groups[:NAMED])} and {len(groups) - NAMED} more"
        else:
            subject = f"Without {', '.join(groups)}"
        sentences.append(f"{subject}: {reason}.")
    return sentences


def how(solver: str, passes: float) -> str:
    """How a group was taken out, in words."""
    manners = {
        "posterior": "in one step, without training",
        "cg": f"by a descent of {passes:.0f} passes over the data that stay",
        "replay": f"by short trainings with and without it, {passes:.0f} passes over the data",
        "retrain": f"by whole trainings without it, {passes:.0f} passes over the data",
    }
    return manners.get(solver, solver)


def what_if_section(result: WhatIf, measured_on: str, n_data: int) -> Section:
    """One what-if: before and after, on the whole and by class."""
    table = whole(result)
    columns: dict[str, Sequence[Any]] = {
        "class": table["class"].map(name_of).tolist(),
        "examples": [f"{n:,}" for n in table["n"]],
        "NLL": [f"{v:.3f}" for v in table["nll_before"]],
        "without": [f"{v:.3f}" for v in table["nll_after"]],
    }
    if result.accuracy is not None:
        columns["accuracy"] = [f"{v:.1%}" for v in table["accuracy_before"]]
        columns["without "] = [f"{v:.1%}" for v in table["accuracy_after"]]
    change = f"{result.removed:,} of {n_data:,} training examples taken out"
    if result.relabelled:
        change += f", {result.relabelled:,} relabelled"
    manner = how(result.solver, result.passes)
    lead = f"{change}; predicted {manner}, measured on {measured_on}."
    notes = []
    if result.interval is not None:
        low, high = result.interval
        notes.append(f"NLL after retraining, roughly: between {low:.3f} and {high:.3f}.")
    if result.note:
        notes.append(f"How far to trust it: {result.note}.")
    return Section("What if they were gone?", lead, columns, notes)


def sources(table: pd.DataFrame, quantity: str, questions: Sequence[str] | None = None) -> Section:
    """The training examples that each question rests on; ``questions`` are their words."""
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
            f"{index}  {questions[index][:EXCERPT]}" if is_first else "" for index, is_first in rows
        ]
        columns["text"] = [str(text)[:EXCERPT] for text in table["text"]]
    columns[quantity.replace("_", " ")] = short(table[quantity])
    lead = "How far a question's loss would rise without them"
    lead += "." if quantity == "influence" else ", by the length of each."
    return Section("Sources", lead, columns)


def short(values: Any) -> list[str]:
    """Numbers to three digits."""
    return [f"{value:.3g}" for value in values]


def _answers(table: pd.DataFrame, other: str) -> dict[str, Any]:
    """Columns of the label and of the column ``other``, where they are single values; of texts,
    how they begin."""
    titles = {"target": "label", "left_out_prediction": "without it", "proposed": "proposed"}
    names = [
        name for name in ("target", other) if name in table and table[name].notna().to_numpy().any()
    ]
    if not names and "text" in table:
        return {"text": [str(text)[:EXCERPT] for text in table["text"]]}
    return {titles[name]: table[name].map(name_of).tolist() for name in names}
