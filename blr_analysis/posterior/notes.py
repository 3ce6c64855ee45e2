"""What a posterior says of its own trustworthiness, in one line.

These are functions of the posterior's facts, its structure, and the other entries of its record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blr_analysis.posterior.facts import Facts, Rerun
from blr_analysis.posterior.reach import note_of_unreached

GUESSED_TEMPERATURE = 0.15  # τ of Kronecker fits of classifiers: python -m benchmarks.field
MOSTLY_SATURATED = 0.5  # share of predictions that are exactly 0 or 1
MOSTLY_START = (
    "{:.0%} of the precision is what the optimizer started with: it says little about single "
    "weights"
)
SATURATED = "{:.0%} of predictions are exactly 0 or 1, without curvature: are the logits scaled?"


def temperature_is_guessed(facts: Facts, structure: str) -> bool:
    """Whether τ is only a guess: for an uncalibrated Kronecker fit of a classifier off its minimum.

    Args:
        facts: of the posterior.
        structure: its kind.
    """
    is_kronecker_fit = structure == "kron" and facts.source == "laplace"
    is_off_minimum = facts.stationarity is not None and not facts.stationarity.near
    return is_kronecker_fit and facts.is_classifier and is_off_minimum and not facts.calibration


def note_of(facts: Facts, entries: Mapping[str, Any], structure: str) -> str:
    """How far a posterior is to be trusted; "" where it is.

    Args:
        facts: of the posterior.
        entries: of its record, without the facts.
        structure: its kind.
    """
    notes = []
    if facts.saturated > MOSTLY_SATURATED:
        notes.append(SATURATED.format(facts.saturated))
    notes.append(facts.ending)
    notes.append(entries.get("caveat") or "")
    notes.append(_note_of_scale(facts, structure))
    notes.append(note_of_drawn_labels(entries.get("drawn")))
    notes.append(note_of_unreached(entries.get("unreached") or ()))
    return "; ".join(note for note in notes if note)


def _note_of_scale(facts: Facts, structure: str) -> str:
    """Whether the size of single answers, or only their order, is to be trusted."""
    stationarity = facts.stationarity
    if stationarity is None or facts.calibration is not None or stationarity.at_minimum:
        return ""
    if stationarity.near:
        return f"model {stationarity.verdict}"
    scale = "off the minimum: only rankings hold, until calibrate measures the sizes"
    if temperature_is_guessed(facts, structure):
        scale = "off the minimum: sizes rest on a guess, until calibrate measures them"
    return "; ".join(filter(None, [note_of_recipe(facts.rerun), scale]))


def note_of_recipe(rerun: Rerun | None) -> str:
    """How the recipe of a rerun differs from that of the run itself."""
    if rerun is None or rerun.known:
        return ""
    if rerun.missing:
        return f"trained without {rerun.missing}"
    return "trained by a default recipe"


def note_of_drawn_labels(drawn: Mapping[str, Any] | None) -> str:
    """How many labels were drawn in place of exact columns, because the outputs are many."""
    if drawn is None:
        return ""
    n_labels = drawn["labels"]
    labels = f"{n_labels} drawn label{'s' if n_labels > 1 else ''}"
    if "outputs" not in drawn:
        return f"the curvature is estimated from {labels} of each {drawn['of']}"
    return (
        f"the curvature of {drawn['outputs']:,} outputs is estimated from {labels} of each example"
    )
