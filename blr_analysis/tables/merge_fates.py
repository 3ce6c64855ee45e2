"""What became, or will become, of every tensor of a merge."""

from __future__ import annotations

import pandas as pd

from blr_analysis.merging.merge import MergeReport
from blr_analysis.merging.plan import Plan

__all__ = ["plan_table", "report_table"]


def plan_table(plan: Plan) -> pd.DataFrame:
    """One row per tensor of the result.

    ========== =====================================================================
    column     what
    ========== =====================================================================
    tensor     its name
    fate       merged, or copied (integers in which all models agree)
    dtype      as it is written
    shape      as text, such as 64 × 32
    bytes      as it is written
    weights    α_t of every model, in order
    precisions what stands for every H_t: own, base (H_0 + δ) or zero
    note       tied copies, precisions that are missing
    ========== =====================================================================
    """
    return pd.DataFrame(
        [
            {
                "tensor": item.name,
                "fate": item.fate,
                "dtype": str(item.spec.dtype).removeprefix("torch."),
                "shape": " × ".join(map(str, item.spec.shape)) or "1",
                "bytes": item.spec.nbytes,
                "weights": ", ".join(f"{a:g}" for a in item.weights),
                "precisions": ", ".join(item.curved),
                "note": item.note,
            }
            for item in plan.items
        ],
        columns=["tensor", "fate", "dtype", "shape", "bytes", "weights", "precisions", "note"],
    )


def report_table(report: MergeReport) -> pd.DataFrame:
    """:func:`plan_table`, and ``fallback``: the entries where task arithmetic stands."""
    table = plan_table(report.plan)
    table.insert(5, "fallback", [report.fallback.get(n, 0) for n in table["tensor"]])
    return table
