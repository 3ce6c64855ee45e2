"""The Bayesian learning rule and its rows (Khan & Rue, 2023, Table 1).

:func:`blr_step` is the rule, :func:`table1` the table of what each algorithm makes of it. The rows
that train networks are in :mod:`blr_analysis.learning_rule.optim`, those that fit probabilistic
models in :mod:`blr_analysis.learning_rule.inference`, the posteriors they learn in
:mod:`blr_analysis.learning_rule.families`.
"""

from blr_analysis.learning_rule.moves import Move
from blr_analysis.learning_rule.rule import blr_step
from blr_analysis.learning_rule.table import ROWS, Row, row, table1

__all__ = ["ROWS", "Move", "Row", "blr_step", "row", "table1"]
