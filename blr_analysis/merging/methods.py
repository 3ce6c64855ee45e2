"""The methods of merging, as rows: each is the one formula with some of its inputs left out."""

from __future__ import annotations

from dataclasses import dataclass

from blr_analysis.checks import one_of


@dataclass(frozen=True)
class Method:
    """What a method takes of the formula of :mod:`blr_analysis.merging.formula`.

    Attributes:
        name: as recipes say it.
        needs_base: θ_0 must be there.
        uses_base: θ_0 is part of the formula.
        uses_precisions: H_t is; otherwise all are 0.
        uses_base_precision: H_0 and δ are; otherwise they are 0.
        normalize: the weights are divided by their sum unless the user says otherwise.
        formula: in one line.
    """

    name: str
    needs_base: bool
    uses_base: bool
    uses_precisions: bool
    uses_base_precision: bool
    normalize: bool
    formula: str


METHODS = {
    row.name: row
    for row in (
        Method(
            "gradient_matching", True, True, True, True, False,
            "θ_0 + Σ α_t (H_0 + H_t)(θ_t − θ_0) / (H_0 + Σ α_t H_t)",
        ),
        Method("fisher", False, True, True, False, False, "Σ α_t H_t θ_t / Σ α_t H_t"),
        Method("task_arithmetic", True, True, False, False, False, "θ_0 + Σ α_t (θ_t − θ_0)"),
        Method("linear", False, False, False, False, True, "Σ α_t θ_t / Σ α_t"),
    )
}  # fmt: skip


def method_of(name: str) -> Method:
    """The row of this name.

    Raises:
        InputError: there is none.
    """
    return METHODS[one_of("method", name, tuple(METHODS))]
