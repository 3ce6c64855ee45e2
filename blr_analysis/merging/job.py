"""What to merge with what: what recipes and calls both lead to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from blr_analysis.checks import some
from blr_analysis.errors import InputError
from blr_analysis.merging.methods import CURVED, METHODS, Method, method_of
from blr_analysis.task import Task

MISSING = ("error", "base", "zero")
Weight = float | Callable[[str], float]


@dataclass(frozen=True)
class Member:
    """One fine-tuned model of a merge.

    Attributes:
        model: a folder (or ``.safetensors`` file), the folder of a LoRA adapter, a state dict, or
            a module.
        precision: H_t: where it is stored, tensors by name, or a posterior; None where the method
            needs none, or where :attr:`Job.missing_precision` says what stands for it.
        weight: α_t, a number or a function of the tensor's name.
        n_data: the number of examples that averages over them are multiplied by.
        density: the share of θ_t − θ_0 that stays, a number or a function of the tensor's name.
        data: the file of examples that its statistics are taken of, in a precision's place.
    """

    model: Any
    precision: Any = None
    weight: Weight = 1.0
    n_data: int | None = None
    density: Weight = 1.0
    data: Path | None = None


@dataclass(frozen=True)
class Job:
    """A merge.

    Attributes:
        method: a name of :data:`blr_analysis.merging.methods.METHODS`.
        members: the fine-tuned models, in order.
        base: θ_0, the model that they started from; of the same kinds.
        base_precision: H_0 without δ; None: 0.
        delta: δ, added to every entry of H_0.
        missing_precision: what stands for a precision that is not there: ``"error"`` refuses,
            ``"base"`` takes the base's (δ included), ``"zero"`` takes 0.
        normalize: divide the weights by their sum; None: as the method does by itself.
        dtype: of the arithmetic, float32 or float64.
        out_dtype: of the result; None: each tensor as in the base.
        shrink: of precisions with factors, the factor of their off-diagonals; RegMean: 0.9. None:
            1; with ``tasks``, and where each model's moments of a layer ("gram") are of fewer rows
            than inputs and there is no H_0, 1 less the part of them that is chance, as measured.
        power: of "kron" A ⊗ G, the power of G, 0 to 1; of diagonals that of every number, which
            0.5 puts half way, in logarithms, between the average and the Fisher average; with 1 and
            no H_0 a merge can end below the average.
        damping: d of H + d mean(H) 1, layer by layer; None: 1 for "kron", 0 for "gram". Where
            losses are quadratic and "kron" holds their Hessians, 0 gives the optimum of all tasks
            and 1 misses it; networks are merged better with 1. With 0, what no precision decides
            stays at the average (with a base, at task arithmetic).
        trust: take precisions that were recorded for other weights than the model's.
        scale: λ of task arithmetic, TIES and DARE, a number or a function of the name.
        seed: of what DARE leaves out; the same seed leaves the same entries, whatever the shards.
        rescale: what DARE leaves is divided by its share.
        tasks: the models' data, in the place of precisions (:mod:`.propagation`).
        tokenizer_source: of models in folders: ``"base"``, ``"union"``, or the folder of a
            tokenizer; rows of tokens are merged by their words, and models borrow the rows that
            they lack. None: the first model's, and rows are merged by their number.
    """

    method: str
    members: tuple[Member, ...]
    base: Any = None
    base_precision: Any = None
    delta: float = 0.0
    missing_precision: str = "error"
    normalize: bool | None = None
    dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype | None = None
    shrink: float | None = None
    power: float = 1.0
    damping: float | None = None
    trust: bool = False
    scale: Weight = 1.0
    seed: int = 0
    rescale: bool = True
    tasks: Sequence[Task] | None = None
    tokenizer_source: str | Path | None = None

    @property
    def propagates(self) -> bool:
        """Whether statistics of the layers' inputs are taken on the way."""
        return self.tasks is not None or any(m.data is not None for m in self.members)

    @property
    def row(self) -> Method:
        """The method's row of the registry; of propagated statistics the average, but for the
        layers."""
        if not self.propagates:
            return method_of(self.method)
        formula = "(Σ α_t W_t A_t)(Σ α_t A_t)⁻¹, A_t = Σ a aᵀ behind merged layers; else Σ α_t θ_t"
        return replace(METHODS["linear"], name="fisher", formula=f"{formula} / Σ α_t")

    @property
    def divides(self) -> bool:
        """Whether the weights are divided by their sum."""
        return self.row.normalize if self.normalize is None else self.normalize


DEFAULTS: dict[str, Any] = {
    **{f.name: f.default for f in fields(Job)},
    **{"density": 1.0, "n_data": None, "precisions": None, "weights": None, "validate": None},
}


def job_of(base: Any, models: Sequence[Any], method: str, **given: Any) -> Job:
    """The merge that the arguments of :func:`merge` describe."""
    given.pop("validate", None)
    models = list(models)
    usual = {"precisions": None, "weights": 1.0, "n_data": None, "density": 1.0}
    each = [_one_each(k, given.pop(k, None), default, len(models)) for k, default in usual.items()]
    members = tuple(
        Member(model, p, a, n, d) for model, p, a, n, d in zip(models, *each, strict=True)
    )
    return Job(method=method, members=members, base=base, **given)


def _one_each(name: str, given: Any, usual: Any, count: int) -> list[Any]:
    """One value per model."""
    if given is None:
        return [usual] * count
    if name in ("weights", "density") and (callable(given) or isinstance(given, int | float)):
        return [given] * count
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise InputError(f"{name} must be a list with one entry per model, got {given!r:.60}")
    if len(given) != count:
        raise InputError(f"{name} must have one entry per model: got {len(given)} for {count}")
    return list(given)


def refuse_idle(
    rows: Sequence[Method], given: Mapping[str, Any], method: str | None = None
) -> None:
    """Raise :class:`InputError` where an argument that is not its default is for none of these
    methods, or is of precisions that are not there because ``tasks`` or nothing stands for them."""
    strange = sorted(given.keys() - DEFAULTS.keys())
    if strange:
        raise InputError(f"merge takes no {some(strange)}: see the fields of merging.Job")
    tasks, auto = given.get("tasks") is not None, method == "auto"
    if tasks and method not in ("fisher", "auto"):
        raise InputError('tasks= stands for precisions, with method="fisher" or "auto"')
    bare = given.get("precisions") is None and (tasks or auto)
    idle = {*CURVED, "base_precision", "delta", "trust"} if bare else set()
    idle -= {"shrink"} if tasks else {"-"}
    idle |= {"weights"} if bare and not tasks else set()  # of "auto", which tries its own alone
    idle |= {"precisions"} if tasks and not auto else set()
    idle |= set() if auto else {"validate"}
    for name, value in given.items():
        usual = DEFAULTS[name]
        there = name not in idle and any(row.takes(name) for row in rows)
        if there or value is usual or (not isinstance(value, Mapping) and value == usual):
            continue
        names = method or some([row.name for row in rows])
        instead = some([row.name for row in METHODS.values() if row.takes(name)])
        instead = "precisions=" if name in idle else instead
        raise InputError(f"{name}= has no effect on {names} so: leave it out, or use {instead}")
