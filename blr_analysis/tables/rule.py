"""Table 1 of the Bayesian learning rule, one row per algorithm."""

from __future__ import annotations

from typing import Any

import pandas as pd

__all__ = ["rule_table"]


def rule_table(table: Any) -> pd.DataFrame:
    """The rows of :data:`blr_analysis.learning_rule.table.ROWS`; see :func:`blr_analysis.table1`.

    ============== ===========================================================================
    column         what
    ============== ===========================================================================
    algorithm      its name
    family         of the posterior q
    loss           where the loss is looked at
    hessian        what the Hessian is taken to be
    departures     named departures of the step from the rule; empty where there are none
    approximations all of that in the words of Khan & Rue's Table 1
    section        of Khan & Rue, or another source
    analysable     whether its posterior can be analysed (sensitivity, leave-one-out, merging)
    through        what hands that posterior over; empty where there is none
    runs           the module that runs it
    ============== ===========================================================================
    """
    rows = [
        {
            "algorithm": row.algorithm,
            "family": row.family,
            "loss": row.look.name,
            "hessian": row.curvature.name,
            "departures": ", ".join(row.move.departures),
            "approximations": row.approximations,
            "section": row.section,
            "analysable": bool(row.analysable),
            "through": row.analysable,
            "runs": row.runs,
        }
        for row in table.rows
    ]
    return pd.DataFrame(rows)
