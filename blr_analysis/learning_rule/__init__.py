"""The Bayesian learning rule and its rows (Khan & Rue, 2023, Table 1).

The rule is :func:`blr_analysis.learning_rule.rule.blr_step`, the table of what each algorithm
makes of it :mod:`blr_analysis.learning_rule.table`. The rows that train networks are
:mod:`blr_analysis.learning_rule.optim`, those that fit probabilistic models
:mod:`blr_analysis.learning_rule.inference`.
"""
