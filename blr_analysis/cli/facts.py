"""Results as plain values for ``--json``: names as in Python, numbers unrounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is loaded by the commands that compute
    from blr_analysis.audit import Findings
    from blr_analysis.sensitivity import Validation, WhatIf


def facts_of_audit(findings: Findings) -> dict[str, Any]:
    """An audit's suspects, groups, left-out and test losses, and how far to trust them."""
    from blr_analysis.audit import sections

    trust = sections(findings)["trust"]
    loo = findings.loo
    on_test = findings.on_test
    removals = findings.removals
    return {
        "n_data": findings.task.n_data,
        "suspects": findings.suspects.to_dict("records"),
        "groups": None if removals is None else removals.to_dict("records"),
        "leave_one_out": {"nll": loo.nll, "accuracy": loo.accuracy, "note": loo.note},
        "test": None if on_test is None else {"nll": on_test.nll, "accuracy": on_test.accuracy},
        "trust": [trust.lead, *trust.notes, *trust.details],
    }


def facts_of_what_if(result: WhatIf) -> dict[str, Any]:
    """The losses before and after a change of the data, and how they were computed."""
    return {
        "removed": result.removed,
        "relabelled": result.relabelled,
        "before": {"nll": result.before.nll, "accuracy": result.before.accuracy},
        "after": {"nll": result.nll, "accuracy": result.accuracy},
        "interval": result.interval,
        "solver": result.solver,
        "passes": result.passes,
        "note": result.note,
    }


def facts_of_validation(result: Validation) -> dict[str, Any]:
    """The score of each method, the ceiling, and how they were measured."""
    return {
        "halves": len(result.halves),
        "seeds": result.seeds,
        "epochs": result.epochs,
        "seeds_agree": None if result.seeds_agree is None else result.seeds_agree.value,
        "methods": result.rows,
        "note": result.note,
    }
