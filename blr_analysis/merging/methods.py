"""The methods of merging, as rows: each is the one formula with some of its inputs left out.

Running statistics of BatchNorm are no weights: they are averaged, whatever the method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from blr_analysis.checks import one_of, positive_int
from blr_analysis.merging.spans import karcher, model_stock, multislerp, slerp


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
        thinned: which part ``density`` of each θ_t − θ_0 stays: the largest by "size", or "chance".
        elect: only what has the elected sign counts (:mod:`blr_analysis.merging.sparse`).
        span: the coefficients of a sum of whole tensors (:mod:`blr_analysis.merging.spans`).
        models: how many there must be; None: any number.
    """

    name: str
    needs_base: bool
    uses_base: bool
    uses_precisions: bool
    uses_base_precision: bool
    normalize: bool
    formula: str
    thinned: str = ""
    elect: bool = False
    span: Callable[[Tensor, Tensor], Tensor] | None = None
    models: int | None = None

    @property
    def divides_by_precisions(self) -> bool:
        """Whether α_t H_t divide without H_0: then the weights must not sum to 0."""
        return self.uses_precisions and not self.uses_base_precision

    def takes(self, option: str) -> bool:
        """Whether an argument of :func:`blr_analysis.merge` has an effect."""
        thins, draws = bool(self.thinned), self.thinned == "chance"
        return {
            **dict.fromkeys(CURVED, self.uses_precisions),
            "base_precision": self.uses_base_precision,
            "delta": self.uses_base_precision,
            "density": thins,
            **dict.fromkeys(("scale", "lambda_"), thins or self.name == "task_arithmetic"),
            "t": self.name == "slerp",
            "weight": self.name not in ("slerp", "model_stock"),
            "seed": draws,
            "rescale": draws,
        }.get(option, True)


CURVED = ("precisions", "n_data", "missing_precision", "shrink", "power", "damping")

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
        Method(
            "ties", True, True, False, False, True,
            "θ_0 + λ mean of the α_t trimmed(θ_t − θ_0) of the elected sign",
            thinned="size", elect=True,
        ),
        Method(
            "fisher_ties", True, True, True, False, True,
            "θ_0 + λ mean of the α_t H_t trimmed(θ_t − θ_0) of the elected sign",
            thinned="size", elect=True,
        ),
        Method(
            "dare_linear", True, True, False, False, False,
            "θ_0 + λ Σ α_t dropped(θ_t − θ_0) / density", thinned="chance",
        ),
        Method(
            "dare_ties", True, True, False, False, False,
            "θ_0 + λ Σ α_t dropped(θ_t − θ_0) / density of the elected sign",
            thinned="chance", elect=True,
        ),
        Method(
            "slerp", False, False, False, False, True,
            "sin((1 − t)φ)/sin φ θ_1 + sin(tφ)/sin φ θ_2", span=slerp, models=2,
        ),
        Method(
            "multislerp", False, True, False, False, True,
            "θ_0 + the mean direction of the θ_t − θ_0 times their mean length", span=multislerp,
        ),
        Method(
            "karcher", False, False, False, False, True,
            "the spherical mean of the θ_t", span=karcher,
        ),
        Method(
            "model_stock", True, True, False, False, False,
            "θ_0 + t mean(θ_t − θ_0), t = T c / (1 + (T − 1) c), c their mean cosine",
            span=model_stock,
        ),
    )
}  # fmt: skip


def widest(*, based: bool) -> Method:
    """Of those that "auto" chooses among, the one that takes most."""
    return METHODS["gradient_matching" if based else "fisher"]


def method_of(name: str) -> Method:
    """The row of this name.

    Raises:
        InputError: there is none.
    """
    return METHODS[one_of("method", name, tuple(METHODS))]


def default_weights(method: str, n_models: int) -> list[float]:
    """α_t before anything is known of the tasks: what the method's own derivation asks for.

    ``gradient_matching`` and ``fisher``: 1 each. Their H_t are SUMS over the examples of a task,
    so α_t = 1 lets every example of every task count once: the objective is that of training on
    all data together, and for quadratic losses the merge is its optimum.

    ``task_arithmetic`` and ``linear``: 1/T each. Without precisions nothing says where the tasks
    agree. If they all ask for the same change, Σ_t (θ_t − θ_0) overshoots T times and 1/T is
    exact; if each changes weights of its own, 1 is exact. 1/T never leaves the models' convex hull.

    Raises:
        InputError: an unknown method, or fewer than one model.

    Example:
        >>> default_weights("gradient_matching", 4), default_weights("task_arithmetic", 4)
        ([1.0, 1.0, 1.0, 1.0], [0.25, 0.25, 0.25, 0.25])
    """
    count = positive_int("n_models", n_models)
    return [1.0 if method_of(method).uses_precisions else 1 / count] * count
