"""How the model will do on new data: an estimate from the training data, and the test data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from blr_analysis.audit.findings import Findings
from blr_analysis.audit.section import (
    STANDARD_ERRORS,
    Section,
    mean_and_error,
    percent,
    range_around,
    two_digits,
)
from blr_analysis.audit.trust import has_left_out_sizes, is_scaled_by_a_guess
from blr_analysis.backprop.loss import Evaluation, SequenceEvaluation
from blr_analysis.posterior.predictive import measure_of
from blr_analysis.task import Task

ESTIMATE = "leave-one-out estimate"
NO_ESTIMATE = (
    "There is no estimate for new data: this posterior ranks examples, but does not measure sizes. "
    "blr.calibrate(task, posterior) measures them."
)
BELOW_CHANCE = (
    "There is no estimate for new data: it came out worse than guessing, so its scale is wrong. "
    "blr.calibrate(task, posterior) measures the scale."
)
GUESS = (
    "The estimate is rough: its scale is a guess, which blr.calibrate(task, posterior) measures."
)
WRONG_LABELS = (
    "The estimate counts the {:,} rows that look wrong as they are labelled: it is too high if the "
    "test data have fewer of them."
)


def generalisation(findings: Findings) -> Section:
    """The estimate of the loss on new data, beside the losses on training and test data."""
    loo = findings.loo
    on_test = findings.on_test
    has_estimate = has_left_out_sizes(findings)
    evaluations: dict[str, Any] = {"training data": on_training_data(findings)}
    if has_estimate:
        evaluations[ESTIMATE] = loo
    if on_test is not None:
        evaluations["test data"] = on_test
    best_known = loo if has_estimate and on_test is None else on_test
    return Section(
        title="How it will do on new data",
        lead=expected(findings, best_known),
        columns=_columns(findings, evaluations),
        notes=_notes(findings, has_estimate),
    )


def _columns(findings: Findings, evaluations: dict[str, Any]) -> dict[str, Sequence[Any]]:
    """The measures of each evaluation, and the range of all but the first, the training data."""
    columns: dict[str, Sequence[Any]] = {"": list(evaluations)}
    on_training, *on_new = evaluations.values()
    rows = [on_training, *on_new]
    if findings.scores.tokens is not None:
        columns["loss of a token"] = [two_digits(row.nll_per_token) for row in rows]
        columns["likely range"] = ["", *map(token_range, on_new)]
        columns["perplexity"] = [two_digits(row.perplexity) for row in rows]
        return columns
    columns[measured(findings)] = [two_digits(row.nll) for row in rows]
    columns["likely range"] = ["", *map(loss_range, on_new)]
    if is_of_one_number(findings):
        columns["typical error"] = [two_digits(math.sqrt(row.nll)) for row in rows]
    if findings.loo.accuracy is not None:
        columns["accuracy"] = [percent(row.accuracy) for row in rows]
    return columns


def _notes(findings: Findings, has_estimate: bool) -> list[str]:
    """Why there is no estimate, or why it is rough, and how far it is from the test data."""
    loo = findings.loo
    notes = []
    if loo.is_below_chance:
        notes.append(BELOW_CHANCE)
    elif not has_estimate:
        notes.append(NO_ESTIMATE)
    elif is_scaled_by_a_guess(findings.posterior):
        notes.append(GUESS)
    elif loo.note:
        notes.append(f"The estimate is rough: {loo.note}.")
    if findings.on_test is not None and has_estimate:
        notes.append(agreement(loo, findings.on_test, measured(findings)))
        n_wrong = findings.suspects["kind"].tolist().count("label")
        if n_wrong and loo.nll > findings.on_test.nll:
            notes.append(WRONG_LABELS.format(n_wrong))
    return notes


def expected(findings: Findings, evaluation: Any) -> str:
    """A sentence on what to expect of new data, with its range.

    Args:
        evaluation: the leave-one-out estimate or the losses on test data; None without either.
    """
    if evaluation is None:
        return "The training data alone do not say."
    source = "the test data" if evaluation is findings.on_test else "the training data alone"
    if findings.scores.tokens is not None:
        loss = f"{two_digits(evaluation.nll_per_token)}{in_brackets(token_range(evaluation))}"
        perplexity = two_digits(evaluation.perplexity)
        return f"By {source}, expect a loss of {loss} a token, a perplexity of {perplexity}."
    loss = f"{two_digits(evaluation.nll)}{in_brackets(loss_range(evaluation))}"
    if is_of_one_number(findings):
        typical = two_digits(math.sqrt(evaluation.nll))
        return f"By {source}, expect to be off by about {typical}: the squared error is {loss}."
    if evaluation.accuracy is None:
        return f"By {source}, expect a {measured(findings)} of {loss}."
    hits = f"{percent(evaluation.accuracy)}{in_brackets(accuracy_range(evaluation))}"
    return f"By {source}, expect {hits} of answers to be right, and a loss of {loss}."


def in_brackets(text: str) -> str:
    """ " (text)"; "" for an empty text."""
    return f" ({text})" if text else ""


def losses_of(evaluation: Any) -> Any:
    """The losses of the examples that count, ``[N]``."""
    return evaluation.counted if isinstance(evaluation, Evaluation) else evaluation.losses


def loss_range(evaluation: Any) -> str:
    """Two standard errors on either side of the mean loss; "" for a single example."""
    losses = losses_of(evaluation).double()
    mean, error = mean_and_error(losses[losses.isfinite()])
    return range_around(mean, STANDARD_ERRORS * error)


def token_range(evaluation: Any) -> str:
    """Two standard errors on either side of the loss of a token, Σ losses / Σ tokens."""
    nll = evaluation.nll_per_token
    tokens = evaluation.tokens.double()
    residuals = (evaluation.losses.double() - nll * tokens) / tokens.mean()
    _, error = mean_and_error(residuals)
    return range_around(nll, STANDARD_ERRORS * error)


def accuracy_range(evaluation: Any) -> str:
    """Wilson's interval of the accuracy on as many new examples; "" for a single example."""
    share = evaluation.accuracy
    n = len(losses_of(evaluation))
    if n < 2:
        return ""
    z = STANDARD_ERRORS**2 / n
    centre = (share + z / 2) / (1 + z)
    half_width = math.sqrt(z * share * (1 - share) + z**2 / 4) / (1 + z)
    low = max(0.0, centre - half_width)
    high = min(1.0, centre + half_width)
    return f"{percent(low)} to {percent(high)}"


def on_training_data(findings: Findings) -> Any:
    """Losses and hits on the data that the model was trained on."""
    scores = findings.scores
    if scores.tokens is not None:
        return scores
    assert scores.outputs is not None and scores.targets is not None
    hits = findings.task.likelihood.correct(scores.outputs, scores.targets)
    return Evaluation(scores.losses, hits)


def loss_in_words(task: Task) -> str:
    """The name of an example's loss: "loss", or its measure, such as "squared error"."""
    measure = measure_of(task.likelihood.kind)
    return "loss" if measure == "nll" else measure


def measured(findings: Findings) -> str:
    """The name of an example's loss, as :func:`loss_in_words`.

    For several outputs the name says that the measure is summed over them.
    """
    measure = loss_in_words(findings.task)
    if measure == "loss":
        return measure
    error = findings.scores.error
    assert error is not None
    outputs = error.shape[-1]
    return f"{measure}, summed over {outputs} outputs" if outputs > 1 else measure


def is_of_one_number(findings: Findings) -> bool:
    """Whether the loss is the squared error of one number: its root has the target's units."""
    return measured(findings) == "squared error"


def agreement(loo: Any, on_test: Evaluation, measure: str) -> str:
    """A sentence on how far the estimate is from the loss on test data, and how sure that is."""
    losses = on_test.counted.double()
    gap = loo.nll - on_test.nll
    if isinstance(on_test, SequenceEvaluation):  # Σ losses / Σ tokens, a ratio of sums
        nll = on_test.nll_per_token
        gap = loo.nll_per_token - nll
        losses = (losses - nll * on_test.tokens) / on_test.tokens.double().mean()
    side = "above" if gap >= 0 else "below"
    sentence = f"The estimate is {two_digits(abs(gap))} {side} the {measure} on the test data"
    n = len(losses)
    if n > 1:
        _, error = mean_and_error(losses)
        chance = two_digits(error)
        sentence += f"; the choice of these {n:,} test examples alone moves it by {chance}"
    return f"{sentence}."
