"""What a posterior covers: its share of a model's parameters, and what no gradient reaches.

Experts that saw no token, and layers that never ran, have no curvature: the data say nothing of
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from blr_analysis.posterior.structures.contract import Spectral, Structure
from blr_analysis.posterior.structures.kronecker import Kronecker

STACKED = 3  # dimensions of a tensor that holds a matrix for each expert
NAMED = 3  # in a sentence


def share_in_words(n_parameters: int, n_of_model: int | None) -> str:
    """How many parameters are covered, and of how many.

    >>> share_in_words(1200, 60_000)
    '1,200 of 60,000 parameters (2.0%)'
    >>> share_in_words(1200, None)
    '1,200 parameters'
    """
    if n_of_model is None or n_of_model <= n_parameters:
        return f"{n_parameters:,} parameters"
    share = n_parameters / n_of_model
    return f"{n_parameters:,} of {n_of_model:,} parameters ({share:.1%})"


def unreached(curvature: Structure) -> list[str]:
    """The parameters whose curvature is exactly 0, before a prior is added to it.

    In a stack of matrices ``[E, O, I]`` each matrix counts for itself, as ``name[e]``.
    """
    if not isinstance(curvature, Spectral):
        return []
    names_of_layers: dict[str, tuple[str, ...]] = {}
    if isinstance(curvature, Kronecker):
        names_of_layers = {block.key: block.names for block in curvature.blocks}
    names: list[str] = []
    for key, values in curvature.values.items():
        if not bool(values.any()):
            names += names_of_layers.get(key, (key,))
        elif key not in names_of_layers and values.ndim == STACKED:
            is_zero = ~values.flatten(1).any(1)
            names += [f"{key}[{number}]" for number in is_zero.nonzero().flatten().tolist()]
    return names


def note_of_unreached(names: Sequence[str]) -> str:
    """One line on parameters that no gradient reaches; "" if there are none.

    >>> note_of_unreached(["experts.up[2]", "experts.down[2]"])
    "no gradient reaches 'experts.up[2]', 'experts.down[2]': the data say nothing about them"
    """
    if not names:
        return ""
    listed = ", ".join(map(repr, names[:NAMED]))
    n_more = len(names) - NAMED
    more = f" and {n_more} more" if n_more > 0 else ""
    return f"no gradient reaches {listed}{more}: the data say nothing about them"
