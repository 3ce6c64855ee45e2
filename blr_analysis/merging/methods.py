"""The methods of merging, as rows: each is the one formula with some of its inputs left out.

Running statistics of BatchNorm are no weights: they are averaged, whatever the method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from blr_analysis.checks import one_of, positive_int
from blr_analysis.merging.selections import (
    Blocks,
    Select,
    Selection,
    arcee_fusion,
    nearswap,
    ram,
    ramplus_tl,
    sce,
)
from blr_analysis.merging.spans import karcher, model_stock, multislerp, slerp
from blr_analysis.merging.task_matrices import ace, iso_c, iso_cts, tsv_m, wudi

# The part of a model that the function of a method must be given at once.
ENTRIES = "entries"
ROWS = "rows"
MATRICES = "matrices"  # the weights of layers; other tensors are averaged


@dataclass(frozen=True)
class Method:
    """A method, as a variant of the formula of :mod:`blr_analysis.merging.formula`.

    Attributes:
        name: its name in recipes.
        formula: in one line.
        needs_base: whether it is refused without θ_0.
        uses_base: whether θ_0 is part of the formula.
        uses_precisions: whether H_t is part of it; otherwise all H_t are 0.
        uses_base_precision: whether H_0 and δ are part of it; otherwise they are 0.
        normalize: whether the weights are divided by their sum, unless the user says otherwise.
        thinned: which entries of each θ_t − θ_0 stay, a share ``density`` of them: the largest
            ("size"), random ones ("chance"), random ones where larger entries stay more often
            ("rank"), or those of middle size ("middle"). "": all.
        elect: whether only entries of the elected sign count (:mod:`blr_analysis.merging.sparse`).
        span: the coefficients of a sum of whole tensors (:mod:`blr_analysis.merging.spans`).
        models: the number of models that it takes; None: any.
        matrix: the merged step of a weight from the models' steps and weights
            (:mod:`blr_analysis.merging.task_matrices`).
        select: what gives the merged step of a block from the models' steps
            (:mod:`blr_analysis.merging.selections`).
        passes: how often ``select`` reads a tensor, the merge itself included.
        positive: whether negative weights are refused: the merge minimises a sum, which has no
            minimum with them.
        scope: what ``matrix``, ``select`` or a thinning must see at once: "entries", "rows" or
            "matrices".
        options: further arguments of :func:`blr_analysis.merge` that have an effect.
    """

    name: str
    formula: str
    needs_base: bool = False
    uses_base: bool = False
    uses_precisions: bool = False
    uses_base_precision: bool = False
    normalize: bool = False
    thinned: str = ""
    elect: bool = False
    span: Callable[[Tensor, Tensor], Tensor] | None = None
    models: int | None = None
    matrix: Callable[..., Tensor] | None = None
    select: Callable[[Blocks, Selection], Select] | None = None
    passes: int = 1
    positive: bool = False
    scope: str = ENTRIES
    options: frozenset[str] = frozenset()

    @property
    def divides_by_precisions(self) -> bool:
        """Whether Σ α_t H_t divides, without H_0: the weights must not sum to 0 then."""
        return self.uses_precisions and not self.uses_base_precision

    def takes(self, option: str) -> bool:
        """Whether an argument of :func:`blr_analysis.merge` has an effect."""
        if option in self.options:
            return True
        thins = bool(self.thinned)
        draws = self.thinned in ("chance", "rank")
        scales = thins or self.matrix is not None or self.name == "task_arithmetic"
        weighs = self.select is None and self.name != "model_stock"
        is_slerp = self.name == "slerp"  # its t says how much of each model is taken
        effects = {
            **dict.fromkeys(CURVED, self.uses_precisions),
            **dict.fromkeys(SELECTING, False),
            **dict.fromkeys(OF_MERGEKIT, False),
            "base_precision": self.uses_base_precision,
            "delta": self.uses_base_precision,
            "density": thins,
            "scale": scales,
            "lambda_": scales,
            "weights": weighs,
            "weight": weighs and not is_slerp,
            "normalize": weighs and not is_slerp,
            "seed": draws,
            "rescale": draws,
        }
        return effects.get(option, True)


# Arguments of the methods of :mod:`.selections`, and of those that use precisions.
SELECTING = ("t", "epsilon", "gamma", "select_topk", "r", "alpha")
OF_MERGEKIT = ("eps", "max_iter", "tol")  # parameters of its means on spheres
CURVED = ("precisions", "n_data", "missing_precision", "shrink", "power", "damping")


def _of_steps(name: str, formula: str, **settings: Any) -> Method:
    """A method of the steps θ_t − θ_0 that takes no precisions."""
    return Method(name, formula, needs_base=True, uses_base=True, **settings)


METHODS = {
    row.name: row
    for row in (
        Method(
            "gradient_matching",
            "θ_0 + Σ α_t (H_0 + H_t)(θ_t − θ_0) / (H_0 + Σ α_t H_t)",
            needs_base=True,
            uses_base=True,
            uses_precisions=True,
            uses_base_precision=True,
        ),
        Method(
            "fisher",
            "Σ α_t H_t θ_t / Σ α_t H_t",
            uses_base=True,
            uses_precisions=True,
        ),
        _of_steps(
            "task_arithmetic",
            "θ_0 + Σ α_t (θ_t − θ_0)",
        ),
        Method(
            "linear",
            "Σ α_t θ_t / Σ α_t",
            normalize=True,
        ),
        _of_steps(
            "ties",
            "θ_0 + λ mean of the α_t trimmed(θ_t − θ_0) of the elected sign",
            normalize=True,
            thinned="size",
            elect=True,
        ),
        Method(
            "fisher_ties",
            "θ_0 + λ mean of the α_t H_t trimmed(θ_t − θ_0) of the elected sign",
            needs_base=True,
            uses_base=True,
            uses_precisions=True,
            normalize=True,
            thinned="size",
            elect=True,
        ),
        _of_steps(
            "dare_linear",
            "θ_0 + λ Σ α_t dropped(θ_t − θ_0) / density",
            thinned="chance",
        ),
        _of_steps(
            "dare_ties",
            "θ_0 + λ Σ α_t dropped(θ_t − θ_0) / density of the elected sign",
            thinned="chance",
            elect=True,
        ),
        Method(
            "slerp",
            "sin((1 − t)φ)/sin φ θ_1 + sin(tφ)/sin φ θ_2",
            normalize=True,
            span=slerp,
            models=2,
            options=frozenset({"t"}),
        ),
        Method(
            "nuslerp",
            "θ_0 + the arc from θ_1 − θ_0 to θ_2 − θ_0 at α_2 / (α_1 + α_2)",
            uses_base=True,
            normalize=True,
            span=slerp,
            models=2,
        ),
        Method(
            "multislerp",
            "θ_0 + the mean direction of the θ_t − θ_0 times their mean length",
            uses_base=True,
            normalize=True,
            span=multislerp,
        ),
        Method(
            "karcher",
            "the spherical mean of the θ_t",
            normalize=True,
            span=karcher,
        ),
        _of_steps(
            "model_stock",
            "θ_0 + t mean(θ_t − θ_0), t = T c / (1 + (T − 1) c), c their mean cosine",
            span=model_stock,
        ),
        _of_steps(
            "iso_c",
            "θ_0 + λ σ̄ U Vᵀ, of Σ α_t (θ_t − θ_0) = U S Vᵀ; σ̄ the mean of S > 0",
            matrix=iso_c,
            scope=MATRICES,
        ),
        _of_steps(
            "iso_cts",
            "θ_0 + λ σ̄ U⊥ V⊥ᵀ, as iso_c, of some singular vectors of each task too",
            matrix=iso_cts,
            scope=MATRICES,
        ),
        _of_steps(
            "tsv_m",
            "θ_0 + λ U⊥ S V⊥ᵀ, of the first 1/T singular vectors of each α_t (θ_t − θ_0)",
            matrix=tsv_m,
            scope=MATRICES,
        ),
        _of_steps(
            "wudi",
            "θ_0 + λ (Σ α_t Δ_t C_t)(Σ α_t C_t)⁻¹, C_t = Δ_tᵀΔ_t/‖Δ_t‖²",
            matrix=wudi,
            positive=True,
            scope=MATRICES,
        ),
        _of_steps(
            "ace",
            "θ_0 + λ (Σ α_t Δ_t C_t)(Σ α_t C_t)⁻¹, C_t = Δ_tᵀΔ_t/‖Δ_t‖² + d/I",
            matrix=ace,
            positive=True,
            scope=MATRICES,
            options=frozenset({"damping"}),
        ),
        _of_steps(
            "della",
            "della_linear's as a mean over the steps of the elected sign",
            normalize=True,
            thinned="rank",
            elect=True,
            scope=ROWS,
            options=frozenset({"epsilon"}),
        ),
        _of_steps(
            "della_linear",
            "θ_0 + λ Σ α_t dropped(θ_t − θ_0) / their chance to stay, by their rank in a row",
            thinned="rank",
            scope=ROWS,
            options=frozenset({"epsilon"}),
        ),
        _of_steps(
            "breadcrumbs",
            "θ_0 + λ Σ α_t (θ_t − θ_0) without the largest γ and the smallest entries",
            thinned="middle",
            options=frozenset({"gamma"}),
        ),
        _of_steps(
            "breadcrumbs_ties",
            "θ_0 + λ Σ α_t (θ_t − θ_0) of the elected sign, without the largest γ and the smallest",
            thinned="middle",
            elect=True,
            options=frozenset({"gamma"}),
        ),
        _of_steps(
            "sce",
            "θ_0 + the mean by energy of the θ_t − θ_0 of the elected sign, where they vary most",
            select=sce,
            passes=4,
            options=frozenset({"select_topk"}),
        ),
        _of_steps(
            "nearswap",
            "θ_0 + (θ_1 − θ_0) within [−t, t]",
            select=nearswap,
            models=1,
            options=frozenset({"t"}),
        ),
        _of_steps(
            "arcee_fusion",
            "θ_0 + (θ_1 − θ_0) where |θ_1 − θ_0| times the row's divergence is an outlier",
            select=arcee_fusion,
            models=1,
            scope=ROWS,
            passes=3,
        ),
        _of_steps(
            "ram",
            "θ_0 + the mean of the θ_t − θ_0 that are above ε in size",
            select=ram,
            options=frozenset({"epsilon"}),
        ),
        _of_steps(
            "ramplus_tl",
            "ram; where one model alone is above ε, times 1 + r min(overlap, α)",
            select=ramplus_tl,
            passes=2,
            options=frozenset({"epsilon", "r", "alpha"}),
        ),
    )
}


def widest(*, based: bool) -> Method:
    """The method with the most inputs among those that "auto" chooses from.

    Args:
        based: whether there is a base.
    """
    return METHODS["gradient_matching" if based else "fisher"]


def method_of(name: str) -> Method:
    """The row of this name.

    Raises:
        InputError: there is no such method.
    """
    return METHODS[one_of("method", name, tuple(METHODS))]


def default_weights(method: str, n_models: int) -> list[float]:
    """The weights α_t that a method's derivation asks for, before the tasks are known.

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
