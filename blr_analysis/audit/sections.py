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
    found = {
        "trust": trust(findings.task, findings.posterior, findings, names, solver),
        "influential": influential(findings),
        "suspicious": suspects(findings),
        "new": generalisation(findings),
        "map": regions(findings.memory),
    }
    if removals is not None:
        where = "the test data" if findings.test is not None else "the training data themselves"
        found["removals"] = without_each(removals, findings.noun, where, names)
    return found


def trust(
    task: Task,
    posterior: Posterior,
    findings: Findings | None = None,
    names: Names | None = None,
    solver: str = "",
) -> Section:
    """How far the answers hold: what the reader must know before the first number; ``solver`` is
    by what groups were taken out."""
    posterior = with_stationarity(task, posterior)
    said, found = [], stationarity(task, posterior)
    if findings is not None and findings.unlike:
        said.append(f"The test data are unlike the training data: {findings.unlike}")
    if words := elsewhere(task, posterior):
        said.append(f"{words[0].upper()}{words[1:]}.")
    if solver in ("replay", "retrain") and not (found.at_minimum or found.near):
        said.append(TRAINED)
    if posterior.note and not posterior.at_minimum:  # else it is the verdict
        said.append(f"Single examples: {posterior.note}.")
    if (error := posterior.temperature_error) is not None:
        measured = f"{posterior.temperature:.3g}, give or take {error:.0%}"
        said.append(f"The temperature was measured: {measured}.")
    if posterior.structure == "diag":
        said.append(DIAGONAL)
    if (posterior.record.get("initial_share") or 0.0) > 0.5:
        said.append(STARTING)
    leverage = getattr(findings and findings.loo, "leverage", None)
    if leverage is not None and (many := int((leverage >= 1).sum())):
        out = "; leave_one_out(refine=) takes them out by a descent" if posterior.at_minimum else ""
        said.append(
            f"Leverage of 1 or more: {many:,} of {len(leverage):,} examples, whose own estimates "
            f"are rough{out}."
        )
    if findings is not None and findings.removals is not None:
        said += doubts(findings.removals, names)
    return Section("How far to trust it", f"The model is {found.verdict}.", notes=said)


def influential(findings: Findings) -> Section:
    """The examples that shape the model most."""
    measure = findings.influence
    worst = findings.table.nlargest(SHOWN, measure)
    lead = "How far their own prediction would move without them"
    lead += " (0 to 2)." if findings.task.likelihood.is_classification else " (in its own units)."
    if measure == "self_influence":
        lead = "How far their own loss would rise without them (to first order, in nats)."
    columns = {"index": worst["index"], **_answers(worst, "left_out_prediction")}
    columns |= {measure.replace("_", "-"): short(worst[measure]), "region": worst["region"]}
    return Section("Most influential examples", lead, columns)


def suspects(findings: Findings) -> Section:
    """The first rows of :func:`blr_analysis.suspicious`."""
    table = findings.suspects
    counts = table["kind"].value_counts().to_dict()
    told = [f"{counts[kind]:,} {means}" for kind, means in FAULTS.items() if counts[kind]]
    lead = f"Of {len(findings.table):,}: {', '.join(told) or 'none'}. Suspicious is not wrong."
    if (precision := findings.suspicions.precision) is not None:
        lead += f" Of these labels {precision:.0%} are expected to be wrong."
    worst = table.head(SHOWN)
    columns = {"index": worst["index"], "kind": worst["kind"], **_answers(worst, "proposed")}
    losses = {"loss": "loss", "training_loss": "at the end", "left_out_loss": "left-out loss"}
    columns |= {shown: short(worst[name]) for name, shown in losses.items()}
    if (worst["kind"] == "duplicate").to_numpy().any():
        pairs = zip(worst["kind"].tolist(), worst["twin"].tolist(), strict=True)
        columns["twin"] = [twin if kind == "duplicate" else "" for kind, twin in pairs]
    return Section("Suspicious examples", lead, columns if len(worst) else {})


def generalisation(findings: Findings) -> Section:
    """The estimate of the loss on new data, beside what it was made from and what came true."""
    scores, on_test = findings.scores, findings.on_test
    lead = "From the training data alone: the mean loss, in nats, of each example when left out."
    estimated = not findings.loo.is_below_chance
    estimate = ESTIMATE if estimated else "left out, no estimate"
    names = ("training data", estimate, "test data")
    if scores.tokens is not None:
        rows: list[Any] = [r for r in (scores, findings.loo, on_test) if r is not None]
        columns = {"": names[: len(rows)], "NLL": [f"{r.nll_per_token:.4f}" for r in rows]}
        columns["perplexity"] = [f"{r.perplexity:.4g}" for r in rows]
        lead = "From the training data alone: the mean loss of a token, its text left out, in nats."
    else:
        assert scores.outputs is not None and scores.targets is not None
        hits = findings.task.likelihood.correct(scores.outputs, scores.targets)
        before = Evaluation(scores.losses, hits)
        rows = [r for r in (before, findings.loo, on_test) if r is not None]
        columns = {"": names[: len(rows)], measured(findings): [f"{r.nll:.4f}" for r in rows]}
        if before.accuracy is not None:
            columns["accuracy"] = [f"{r.accuracy:.1%}" for r in rows]
    notes = [f"A rough estimate: {findings.loo.note}."] if findings.loo.note else []
    if on_test is not None and estimated:
        notes.append(agreement(findings.loo, on_test))
    return Section("How well will it generalise?", lead, columns, notes)


def measured(findings: Findings) -> str:
    """What the losses of single targets are."""
    measure = measure_of(findings.task.likelihood.kind)
    error = findings.scores.error
    assert error is not None
    outputs = error.shape[-1]
    several = f", summed over {outputs} outputs" if outputs > 1 else ""
    return "NLL" if measure == "nll" else measure + several


def agreement(loo: Any, on_test: Evaluation) -> str:
    """How far the estimate is from the test data, against the latter's own uncertainty."""
    losses, gap = on_test.counted.double(), loo.nll - on_test.nll
    if isinstance(on_test, SequenceEvaluation):  # of a ratio of sums
        nll = on_test.nll_per_token
        losses, gap = losses - nll * on_test.tokens, loo.nll_per_token - nll
        losses = losses / on_test.tokens.double().mean()
    said = f"The estimate is {abs(gap):.4f} nats {'above' if gap >= 0 else 'below'} the test NLL"
    if (m := len(losses)) > 1:
        noise = float(losses.std() / m**0.5)
        said += f" (whose standard error is {noise:.4f} with {m:,} examples)"
    return said + "."


def regions(memory: MemoryMap) -> Section:
    """How many examples each region of the memory map holds, and what that means."""
    counts, n = memory.counts(), len(memory.region)
    columns = {
        "region": list(counts),
        "examples": [f"{count:,}" for count in counts.values()],
        "share": [f"{count / n:.1%}" for count in counts.values()],
        "the example is": [REGION_MEANS[name] for name in counts],
    }
    above, beyond = shares_above(memory)
    lead = (
        f"Prediction error above {memory.error_threshold:.3g} counts as poorly fitted, prediction "
        f"variance above {memory.variance_threshold:.3g} as little support: quantiles of these "
        f"data, so that {above:.0%} and {beyond:.0%} lie above whatever the model."
    )
    first = ", ".join(map(str, extremes(memory, SHOWN)))
    notes = [f"Largest error times variance, memorable ones first: {first}."] if first else []
    return Section("Memory map", lead, columns, notes)


def without_each(
    removals: pd.DataFrame, noun: str, where: str, names: Names | None = None
) -> Section:
    """What each group is worth: the table of ``what_if_each``, the largest change first."""
    order = removals["nll_change"].abs().argsort(kind="stable").to_numpy()[::-1]
    table = removals.iloc[order]
    columns: dict[str, Sequence[Any]] = {
        noun: [name_of(group, names) for group in table["group"]],
        "examples": [f"{n:,}" for n in table["n"]],
        "NLL without": [f"{v:.3f}" for v in table["nll_after"]],
        "change": [f"{v:+.3f}" for v in table["nll_change"]],
    }
    known = table["nll_low"].notna().to_numpy()
    if known.any():
        ends = zip(table["nll_low"], table["nll_high"], known, strict=True)
        columns["likely between"] = [f"{a:.2f} and {b:.2f}" if k else "" for a, b, k in ends]
    if not table["accuracy_after"].isna().to_numpy().any():
        columns["accuracy without"] = [f"{v:.1%}" for v in table["accuracy_after"]]
    before, passes = removals["nll_before"].iloc[0], float(removals["passes"].to_numpy().max())
    done = how(str(removals["solver"].iloc[0]), passes)
    lead = f"Each predicted {done}, measured on {where} (NLL with all data: {before:.3f})."
    notes = [WIDTHS] if known.any() else []
    return Section(f"What if one {noun} were gone?", lead, columns, notes)


def doubts(removals: pd.DataFrame, names: Names | None) -> list[str]:
    """Why not to trust the answers for some groups, a sentence for each reason."""
    said = []
    for why, rows in removals[removals["note"] != ""].groupby("note", sort=False):
        groups = [name_of(group, names) for group in rows["group"]]
        more = f" and {len(groups) - NAMED} more" if len(groups) > NAMED else ""
        some = f"Without {', '.join(groups[:NAMED])}{more}"
        said.append(f"{'Groups taken out' if len(groups) == len(removals) else some}: {why}.")
    return said


def how(solver: str, passes: float) -> str:
    """How a group was taken out."""
    return {
        "posterior": "in one step, without training",
        "cg": f"by a descent of {passes:.0f} passes over the data that stay",
        "replay": f"by short trainings with and without it, {passes:.0f} passes over the data",
        "retrain": f"by whole trainings without it, {passes:.0f} passes over the data",
    }.get(solver, solver)


def what_if_section(result: WhatIf, where: str, n_data: int) -> Section:
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
    changes = [f"{result.removed:,} of {n_data:,} training examples taken out"]
    changes += [f"{result.relabelled:,} relabelled"] * bool(result.relabelled)
    done = how(result.solver, result.passes)
    lead = f"{', '.join(changes)}; predicted {done}, measured on {where}."
    notes = []
    if result.interval is not None:
        low, high = result.interval
        notes.append(f"NLL after retraining, roughly: between {low:.3f} and {high:.3f}.")
    if result.note:
        notes.append(f"How far to trust it: {result.note}.")
    return Section("What if they were gone?", lead, columns, notes)


def sources(table: pd.DataFrame, quantity: str, asked: Sequence[str] | None = None) -> Section:
    """The training examples that each question rests on; ``asked`` are the questions' words."""
    names = {
        "question": "question",
        "test_target": "its label",
        "test_prediction": "prediction",
        "example": "index",
        "train_target": "label",
    }
    columns: dict[str, Sequence[Any]] = {
        shown: table[name].map(name_of).tolist() for name, shown in names.items() if name in table
    }
    if asked is not None:
        first = ~table["question"].duplicated()
        each = zip(table["question"], first, strict=True)
        columns["question"] = [f"{q}  {asked[q][:EXCERPT]}" if told else "" for q, told in each]
        columns["text"] = [str(text)[:EXCERPT] for text in table["text"]]
    columns[quantity.replace("_", " ")] = short(table[quantity])
    lead = "How far a question's loss would rise without them"
    lead += "." if quantity == "influence" else ", by the length of each."
    return Section("Sources", lead, columns)


def short(values: Any) -> list[str]:
    """Numbers to three digits."""
    return [f"{v:.3g}" for v in values]


def _answers(table: pd.DataFrame, other: str) -> dict[str, Any]:
    """The label and what the model says instead, where each is one value; of texts how they
    begin."""
    said = {"target": "label", "left_out_prediction": "without it", "proposed": "proposed"}
    columns = [c for c in ("target", other) if c in table and table[c].notna().to_numpy().any()]
    if not columns and "text" in table:
        return {"text": [str(text)[:EXCERPT] for text in table["text"]]}
    return {said[name]: table[name].map(name_of).tolist() for name in columns}
