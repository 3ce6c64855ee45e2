"""The Bayesian learning rule and its rows (Khan & Rue, 2023, Table 1).

:func:`blr_step` is the rule, :func:`mirror_step` the same in the expectation parameters,
:func:`natural_momentum` the rule with a momentum, and :func:`fit` runs it for any family and loss.
:func:`table1` is the table of what each algorithm makes of it. The rows that train networks are in
:mod:`blr_analysis.learning_rule.optim`, those that fit probabilistic models in
:mod:`blr_analysis.learning_rule.inference`, the posteriors they learn in
:mod:`blr_analysis.learning_rule.families`.
"""

from typing import TYPE_CHECKING, Any

from blr_analysis.learning_rule.mirror import mirror_step
from blr_analysis.learning_rule.moves import Move, natural_momentum
from blr_analysis.learning_rule.rule import blr_step
from blr_analysis.learning_rule.table import ROWS, Row, row, table1

if TYPE_CHECKING:
    from blr_analysis.learning_rule.by_samples import fit

__all__ = [
    "ROWS",
    "Move",
    "Row",
    "blr_step",
    "fit",
    "mirror_step",
    "natural_momentum",
    "row",
    "table1",
]


def __getattr__(name: str) -> Any:
    """``fit`` is loaded with its first use: optimizers do without the models of inference."""
    if name == "fit":
        from blr_analysis.learning_rule.by_samples import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
