"""The methods of merging, as rows: each is the one formula with some of its inputs left out.

Running statistics of BatchNorm are no weights: they are averaged, whatever the method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from blr_analysis.checks import one_of, positive_int
from blr_analysis.merging.selections import (
    Selection,
    arcee_fusion,
    nearswap,
    ram,
    ramplus_tl,
    sce,
)
from blr_analysis.merging.spans import karcher, model_stock, multislerp, slerp
from blr_analysis.merging.task_matrices import ace, iso_c, tsv_m, wudi

# What a function of a method must be given at once.
ENTRIES = "entries"
ROWS = "rows"
TENSORS = "tensors"
MATRICES = "matrices"  # and other tensors are averaged


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
        thinned: which part ``density`` of each θ_t − θ_0 stays: the largest by "size", some by
            "chance" or by "rank", which is by chance and size, or the "middle" of the sizes.
        elect: only what has the elected sign counts (:mod:`blr_analysis.merging.sparse`).
        span: the coefficients of a sum of whole tensors (:mod:`blr_analysis.merging.spans`).
        models: how many there must be; None: any number.
        matrix: the merged step of a weight from the models' steps and weights
            (:mod:`blr_analysis.merging.task_matrices`).
        select: the same by entries (:mod:`blr_analysis.merging.selections`).
        positive: no weight may be negative: the merge is a minimum, and there would be none.
        scope: what ``matrix``, ``select`` or a thinning must see at once: "entries", "rows",
            "tensors" or "matrices".
        options: further arguments of :func:`blr_analysis.merge` that have an effect.
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
    matrix: Callable[..., Tensor] | None = None
    select: Callable[[Tensor, Tensor, Selection], Tensor] | None = None
    positive: bool = False
    scope: str = ENTRIES
    options: frozenset[str] = frozenset()

    @property
    def divides_by_precisions(self) -> bool:
        """Whether α_t H_t divide without H_0: then the weights must not sum to 0."""
        return self.uses_precisions and not self.uses_base_precision

    def takes(self, option: str) -> bool:
        """Whether an argument of :func:`blr_analysis.merge` has an effect."""
        if option in self.options:
            return True
        thins = bool(self.thinned)
        draws = self.thinned in ("chance", "rank")
        scales = thins or self.matrix is not None or self.name == "task_arithmetic"
        weighs = self.select is None and self.name != "model_stock"
        effects = {
            **dict.fromkeys(CURVED, self.uses_precisions),
            **dict.fromkeys(SELECTING, False),
            "base_precision": self.uses_base_precision,
            "delta": self.uses_base_precision,
            "density": thins,
            "scale": scales,
            "lambda_": scales,
            "weights": weighs,
            "weight": weighs and self.name != "slerp",
            "normalize": weighs and self.name != "slerp",
            "seed": draws,
            "rescale": draws,
        }
        return effects.get(option, True)


# What only some methods can be told.
SELECTING = ("t", "epsilon", "gamma", "select_topk", "r", "alpha")
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
            options=frozenset({"t"}),
        ),
        Method(
            "nuslerp", False, True, False, False, True,
            "θ_0 + the arc from θ_1 − θ_0 to θ_2 − θ_0 at α_2 / (α_1 + α_2)", span=slerp, models=2,
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
        Method(
            "iso_c", True, True, False, False, False,
            "θ_0 + λ σ̄ U Vᵀ, of Σ α_t (θ_t − θ_0) = U S Vᵀ; σ̄ the mean of S > 0",
            matrix=iso_c, scope=MATRICES,
        ),
        Method(
            "tsv_m", True, True, False, False, False,
            "θ_0 + λ U⊥ S V⊥ᵀ, of the first 1/T singular vectors of each α_t (θ_t − θ_0)",
            matrix=tsv_m, scope=MATRICES,
        ),
        Method(
            "wudi", True, True, False, False, False,
            "θ_0 + λ (Σ α_t Δ_t C_t)(Σ α_t C_t)⁻¹, C_t = Δ_tᵀΔ_t/‖Δ_t‖²",
            matrix=wudi, positive=True, scope=MATRICES,
        ),
        Method(
            "ace", True, True, False, False, False,
            "θ_0 + λ (Σ α_t Δ_t C_t)(Σ α_t C_t)⁻¹, C_t = Δ_tᵀΔ_t/‖Δ_t‖² + d/I",
            matrix=ace, positive=True, scope=MATRICES, options=frozenset({"damping"}),
        ),
        Method(
            "della", True, True, False, False, True,
            "della_linear's as a mean over the steps of the elected sign",
            thinned="rank", elect=True, scope=ROWS, options=frozenset({"epsilon"}),
        ),
        Method(
            "della_linear", True, True, False, False, False,
            "θ_0 + λ Σ α_t dropped(θ_t − θ_0) / their chance to stay, by their rank in a row",
            thinned="rank", scope=ROWS, options=frozenset({"epsilon"}),
        ),
        Method(
            "breadcrumbs", True, True, False, False, False,
            "θ_0 + λ Σ α_t (θ_t − θ_0) without the largest γ and the smallest entries",
            thinned="middle", scope=TENSORS, options=frozenset({"gamma"}),
        ),
        Method(
            "breadcrumbs_ties", True, True, False, False, False,
            "θ_0 + λ Σ α_t (θ_t − θ_0) of the elected sign, without the largest γ and the smallest",
            thinned="middle", elect=True, scope=TENSORS, options=frozenset({"gamma"}),
        ),
        Method(
            "sce", True, True, False, False, False,
            "θ_0 + the mean by energy of the θ_t − θ_0 of the elected sign, where they vary most",
            select=sce, scope=TENSORS, options=frozenset({"select_topk"}),
        ),
        Method(
            "nearswap", True, True, False, False, False,
            "θ_0 + (θ_1 − θ_0) within [−t, t]",
            select=nearswap, models=1, options=frozenset({"t"}),
        ),
        Method(
            "arcee_fusion", True, True, False, False, False,
            "θ_0 + (θ_1 − θ_0) where |θ_1 − θ_0| times the row's divergence is an outlier",
            select=arcee_fusion, models=1, scope=TENSORS,
        ),
        Method(
            "ram", True, True, False, False, False,
            "θ_0 + the mean of the θ_t − θ_0 that are above ε in size",
            select=ram, options=frozenset({"epsilon"}),
        ),
        Method(
            "ramplus_tl", True, True, False, False, False,
            "ram; where one model alone is above ε, times 1 + r min(overlap, α)",
            select=ramplus_tl, scope=TENSORS, options=frozenset({"epsilon", "r", "alpha"}),
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
