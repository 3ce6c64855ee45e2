"""The Bayesian learning rule and its rows (Khan & Rue, 2023, Table 1).

The rows that train networks are :mod:`blr_analysis.learning_rule.optim`.
"""
