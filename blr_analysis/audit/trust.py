"""How far to trust an audit: two sentences, warnings, and the details."""

from __future__ import annotations

from blr_analysis.audit.findings import Findings
from blr_analysis.audit.section import Section, percent, two_digits
from blr_analysis.posterior import Posterior
from blr_analysis.posterior.minimum import Stationarity
from blr_analysis.posterior.notes import SATURATED, note_of_drawn_labels, note_of_recipe
from blr_analysis.posterior.recognition import warning_of_other_weights
from blr_analysis.posterior.stationarity import with_stationarity
from blr_analysis.task import Task

DIAGONAL = (
    "This posterior is diagonal: it ignores correlations between weights, so one step for a "
    "whole group can be far off in either direction. A Kronecker fit (--fit kron) comes closer."
)
DOUBTFUL_PRECISION = (
    "The optimizer's precision is mostly noise or its starting value, and hardly comes from the "
    "data, so the scale of every estimate is uncertain."
)
TRAINED = "Groups were taken out by training without them, so that their sizes hold as well."
MAX_NAMED = 5  # classes in a sentence
TRAINERS = ("replay", "retrain")  # solvers that train


def trust(
    task: Task,
    posterior: Posterior,
    findings: Findings | None = None,
    solver: str = "",
) -> Section:
    """How far the answers hold.

    Args:
        task, posterior: the subject of the audit.
        findings: of a whole audit; None for a single question.
        solver: that took groups out; "" if no groups were.
    """
    posterior = with_stationarity(task, posterior)
    minimum = posterior.stationarity
    assert minimum is not None
    lead = f"{how_it_was_trained(minimum)} {what_holds(posterior, minimum, solver)}"
    details = [f"{sentence_of(minimum)}.", *notes_on_posterior(posterior)]
    if solver in TRAINERS and groups_are_sizes(findings):
        details.append(TRAINED)
    if findings is not None:
        details += notes_on_leverage(findings)
    notes = warnings(task, posterior, findings)
    return Section("How far to trust it", lead, notes=notes, details=details)


def how_it_was_trained(minimum: Stationarity) -> str:
    """A sentence on where the training ended."""
    if minimum.at_minimum:
        return "This model was trained until its loss was minimal."
    if minimum.near:
        return "This model was trained until its loss was nearly minimal."
    return "This model was stopped before its loss was minimal."


def what_holds(posterior: Posterior, minimum: Stationarity, solver: str) -> str:
    """A sentence on whether rankings and sizes hold."""
    if minimum.at_minimum:
        return "Rankings hold, and so do sizes."
    if minimum.near:
        smallest = f"{minimum.least_group:,.0f}"
        return f"Rankings hold; sizes hold for groups of {smallest} examples or more."
    error = posterior.temperature_error
    if error is not None:
        return f"Rankings hold; sizes are measured to within {percent(error)}."
    subject = "the sizes of single examples" if solver in TRAINERS else "sizes"
    if is_scaled_by_a_guess(posterior):
        return f"Rankings hold; {subject} rest on a guess that blr.calibrate measures."
    return f"Rankings hold; {subject} do not, until blr.calibrate measures them."


def is_scaled_by_a_guess(posterior: Posterior) -> bool:
    """Whether the posterior's variances are scaled by a temperature that was not measured."""
    return posterior.calibration is None and posterior.temperature != 1.0


def sentence_of(minimum: Stationarity) -> str:
    """A sentence, without its full stop, on how far the training ended from the minimum."""
    if not minimum.gain_is_possible:
        return "The loss still falls too steeply to say how far one more step would lower it"
    gain = two_digits(minimum.decrement)
    return f"By this posterior, one more step would lower the summed loss by about {gain}"


def groups_are_sizes(findings: Findings | None) -> bool:
    """Whether nothing speaks against the size of any group."""
    if findings is None or findings.removals is None:
        return True
    return bool((findings.removals["note"] == "").all())


def warnings(task: Task, posterior: Posterior, findings: Findings | None) -> list[str]:
    """Sentences on facts that can make every answer wrong."""
    sentences = []
    if findings is not None and findings.unlike:
        sentences.append(f"The test data are unlike the training data: {findings.unlike}")
    if findings is not None:
        sentences += classes_without_examples(findings)
    warning = warning_of_other_weights(task, posterior)
    if warning:
        sentences.append(f"{warning[0].upper()}{warning[1:]}.")
    if posterior.saturated > 0.5:
        sentences.append(SATURATED.format(posterior.saturated))
    if posterior.ending:
        sentences.append(f"{posterior.ending[0].upper()}{posterior.ending[1:]}.")
    return sentences


def classes_without_examples(findings: Findings) -> list[str]:
    """A sentence on classes of the test data that no training example has; empty without any."""
    training_targets = findings.loo.targets
    test_targets = findings.test_targets
    is_classification = findings.task.likelihood.is_classification
    if training_targets is None or test_targets is None or not is_classification:
        return []
    if training_targets.ndim > 1 or test_targets.ndim > 1:
        return []
    if findings.on_test is not None:
        test_targets = test_targets[findings.on_test.losses.isfinite()]
    absent = sorted(set(test_targets.tolist()) - set(training_targets.tolist()))
    if not absent:
        return []
    names = ", ".join(str(label) for label in absent[:MAX_NAMED])
    if len(absent) > MAX_NAMED:
        names += f" and {len(absent) - MAX_NAMED} more"
    return [f"The test data have classes that no training example has: {names}."]


def notes_on_posterior(posterior: Posterior) -> list[str]:
    """Sentences on the posterior's origin, scale and structure."""
    remarks = [
        note_of_recipe(posterior.rerun),
        posterior.record.get("caveat") or "",
        note_of_drawn_labels(posterior.record.get("drawn")),
    ]
    notes = [f"{remark[0].upper()}{remark[1:]}." for remark in remarks if remark]
    error = posterior.temperature_error
    if error is not None:
        scale = f"{two_digits(posterior.temperature)}, give or take {percent(error)}"
        notes.append(f"The scale of all sizes was measured: {scale}.")
    if posterior.structure == "diag":
        notes.append(DIAGONAL)
    if posterior.record.get("is_doubtful"):
        notes.append(DOUBTFUL_PRECISION)
    return notes


def ranks_only(posterior: Posterior) -> bool:
    """Whether the posterior gives the order of examples, but not the size of their effects."""
    is_measured = posterior.calibration is not None or posterior.at_minimum
    return not is_measured and not is_scaled_by_a_guess(posterior)


def has_left_out_sizes(findings: Findings) -> bool:
    """Whether left-out losses and predictions can be shown, at least as rough ones."""
    return not ranks_only(findings.posterior) and not findings.loo.is_below_chance


def notes_on_leverage(findings: Findings) -> list[str]:
    """A sentence on how many left-out estimates are rough, and the remedy; empty without any."""
    leverage = findings.loo.leverage
    if leverage is None or not has_left_out_sizes(findings):
        return []
    rough = int((leverage >= 1).sum())
    if not rough:
        return []
    sentence = (
        f"{rough:,} of {len(leverage):,} examples decide their own predictions (leverage of 1 or "
        "more): their left-out estimates are rough, and are not shown"
    )
    if findings.posterior.at_minimum:
        sentence += "; leave_one_out(refine=) takes them out by a descent"
    return [f"{sentence}."]
