"""Results as plain values for ``--json``: names as in Python, numbers unrounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is loaded by the commands that compute
    from blr_analysis.audit import Findings
    from blr_analysis.merging.folders import MergeReport
    from blr_analysis.sensitivity import Index, Validation, WhatIf


def facts_of_audit(findings: Findings, files: Sequence[Path]) -> dict[str, Any]:
    """An audit's suspects, groups, left-out and test losses, and how far to trust them.

    Args:
        files: that the audit has written.
    """
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
        "files": list(files),
    }


def facts_of_demo(findings: Findings, truth: Mapping[int, float], folder: Path) -> dict[str, Any]:
    """What :func:`facts_of_audit` says of the demo, and the losses of its retrained networks."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {**facts_of_audit(findings, files), "retrained": truth}


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


def facts_of_index(index: Index, out: Path, seconds: Mapping[str, float]) -> dict[str, Any]:
    """The size of an index, how far it errs, and the seconds of each pass over the data."""
    return {
        "n_data": index.n_data,
        "numbers": index.numbers,
        "error": {
            "relative_rms": index.error.relative_rms,
            "spearman": index.error.spearman,
        },
        "seconds": seconds,
        "written": out,
    }


def facts_of_merge(report: MergeReport) -> dict[str, Any]:
    """A merge that was written: its method, tensors, bytes and files."""
    plan = report.plan
    return {
        "method": plan.method.name,
        "tensors": Counter(tensor.fate for tensor in plan.tensors),
        "fallback": report.fallback_total,
        "bytes_read": plan.bytes_read,
        "bytes_written": plan.bytes_written,
        "seconds": report.seconds,
        "shards": report.shards,
        "written": report.folder,
    }
