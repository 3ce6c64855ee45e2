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

MISSING_PRECISION = ("error", "base", "zero")  # what stands where a model has no precision
PROPAGATED = (
    "(Σ α_t W_t A_t)(Σ α_t A_t)⁻¹, A_t = Σ a aᵀ behind merged layers; else Σ α_t θ_t / Σ α_t"
)
# The arguments of merge that say how precisions are used.
OF_PRECISIONS = frozenset({*CURVED, "base_precision", "delta", "trust"})

# Arguments that one number, or one function of the tensor's name, gives for all models.
BY_NAME = ("weights", "density", "epsilon", "gamma")
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
        epsilon: of DELLA, half of the range of the chances to stay; of RAM the size of a change;
            None: 0.15 and 1e-5.
        gamma: of breadcrumbs, the share of largest entries that goes.
        data: the file of examples that its statistics are taken of, in a precision's place.
    """

    model: Any
    precision: Any = None
    weight: Weight = 1.0
    n_data: int | None = None
    density: Weight = 1.0
    epsilon: Weight | None = None
    gamma: Weight = 0.01
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
        damping: d of H + d mean(H) 1, layer by layer, of diagonals tensor by tensor, after their
            power; None: 1 for "kron", 0 for "gram" and diagonals. The larger it is, the nearer is
            the merge to an average by the tasks' mean precisions. Where losses are quadratic and H
            are their Hessians, 0 gives the optimum of all tasks and 1 misses it; networks are
            merged more safely with 1. With 0, what no precision decides stays at the average (with
            a base, at task arithmetic).
        trust: take precisions that were recorded for other weights than the model's.
        scale: λ of task arithmetic, TIES and DARE, a number or a function of the name.
        seed: of what DARE leaves out; the same seed leaves the same entries, whatever the shards.
        rescale: what DARE and DELLA leave is divided by its share.
        t: of nearswap, the largest change of an entry.
        select_topk: of SCE, the share of entries that stay.
        r, alpha: of RAM+, how much a task's own entries grow with its overlap, and up to which.
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
    t: float | None = None
    select_topk: float = 1.0
    r: float = 0.1
    alpha: float = 0.2
    tasks: Sequence[Task] | None = None
    tokenizer_source: str | Path | None = None

    @property
    def propagates(self) -> bool:
        """Whether statistics of the layers' inputs are taken on the way."""
        return self.tasks is not None or any(m.data is not None for m in self.members)

    @property
    def row(self) -> Method:
        """The method's row of the registry. Where statistics are propagated, layers are solved by
        them and all other tensors are averaged."""
        if self.propagates:
            return replace(METHODS["linear"], name="fisher", formula=PROPAGATED)
        return method_of(self.method)

    @property
    def divides(self) -> bool:
        """Whether the weights are divided by their sum."""
        return self.row.normalize if self.normalize is None else self.normalize


# What each argument of merge is when nobody gives it.
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Job)}
DEFAULTS |= {"density": 1.0, "epsilon": None, "gamma": None}
DEFAULTS |= {"n_data": None, "precisions": None, "weights": None, "validate": None}


def job_of(base: Any, models: Sequence[Any], method: str, **arguments: Any) -> Job:
    """The merge that the arguments of :func:`merge` describe."""
    models = list(models)
    count = len(models)
    if method == "slerp" and arguments.get("t") is not None:
        arguments["weights"] = _weights_of_arc(arguments.pop("t"), arguments.get("weights"))
    arguments.pop("validate", None)  # only "auto" needs it, and has used it by now
    precisions = _one_per_model("precisions", arguments.pop("precisions", None), None, count)
    weights = _one_per_model("weights", arguments.pop("weights", None), 1.0, count)
    n_data = _one_per_model("n_data", arguments.pop("n_data", None), None, count)
    densities = _one_per_model("density", arguments.pop("density", None), 1.0, count)
    epsilons = _one_per_model("epsilon", arguments.pop("epsilon", None), None, count)
    gammas = _one_per_model("gamma", arguments.pop("gamma", None), 0.01, count)
    members = tuple(map(Member, models, precisions, weights, n_data, densities, epsilons, gammas))
    return Job(method=method, members=members, base=base, **arguments)


def _weights_of_arc(t: Any, weights: Any) -> list[float]:
    """The weights of two models by where between them the merge is.

    Raises:
        InputError: no number from 0 to 1, or weights beside it.
    """
    is_number = isinstance(t, int | float) and not isinstance(t, bool)
    if not (is_number and 0 <= t <= 1):
        raise InputError(f"t of slerp must be between 0 and 1, got {t!r:.60}")
    if weights is not None:
        raise InputError("slerp takes t or weights: give one of them")
    return [1 - t, t]


def _one_per_model(name: str, argument: Any, default: Any, count: int) -> list[Any]:
    """An argument of :func:`merge` as a list of one value for each model."""
    if argument is None:
        return [default] * count
    is_weight = callable(argument) or isinstance(argument, int | float)
    if name in BY_NAME and is_weight:
        return [argument] * count
    is_text_or_mapping = isinstance(argument, str | bytes | Mapping)
    if is_text_or_mapping or not isinstance(argument, Sequence):
        raise InputError(f"{name} must be a list with one entry per model, got {argument!r:.60}")
    if len(argument) != count:
        raise InputError(f"{name} must have one entry per model: got {len(argument)} for {count}")
    return list(argument)


@dataclass(frozen=True)
class Call:
    """A call of :func:`merge`, as its arguments are judged.

    Attributes:
        rows: the methods that may be used.
        arguments: by name, those that were given and those that were not.
        method: as the user names it; None where several are compared.
    """

    rows: Sequence[Method]
    arguments: Mapping[str, Any]
    method: str | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return self.method or some([row.name for row in self.rows])

    @property
    def is_auto(self) -> bool:
        """Whether the method is chosen."""
        return self.method == "auto"

    @property
    def has_tasks(self) -> bool:
        """Whether statistics are propagated."""
        return self.arguments.get("tasks") is not None

    @property
    def has_precisions(self) -> bool:
        """Whether precisions are given, or stand beside these arguments, as in a curve."""
        are_given = self.arguments.get("precisions") is not None
        stand_beside = not self.has_tasks and not self.is_auto
        return are_given or stand_beside


@dataclass(frozen=True)
class Rule:
    """When some arguments have no effect.

    Attributes:
        names: of the arguments.
        applies: whether they have no effect in a call.
        remedy: what to do instead.
    """

    names: frozenset[str]
    applies: Callable[[Call], bool]
    remedy: str


RULES = (
    # Only "auto" chooses by data.
    Rule(frozenset({"validate"}), lambda call: not call.is_auto, 'use method="auto"'),
    # The statistics of the tasks stand in the place of precisions; "auto" tries both.
    Rule(
        frozenset({"precisions"}),
        lambda call: call.has_tasks and not call.is_auto,
        "leave tasks= out",
    ),
    # Without precisions, the arguments that say how to use them have no effect.
    Rule(OF_PRECISIONS - {"shrink"}, lambda call: not call.has_precisions, "give precisions="),
    # shrink= acts on the statistics of tasks, too.
    Rule(
        frozenset({"shrink"}),
        lambda call: not (call.has_precisions or call.has_tasks),
        "give precisions= or tasks=",
    ),
    # Without precisions and tasks, "auto" tries only weights that it chooses itself.
    Rule(
        frozenset({"weights"}),
        lambda call: not (call.has_precisions or call.has_tasks),
        "give precisions= or tasks=",
    ),
)


def refuse_idle(
    rows: Sequence[Method], arguments: Mapping[str, Any], method: str | None = None
) -> None:
    """Raise where an argument has no effect on any of these methods.

    Raises:
        InputError: an argument that there is not, or one that is not its default and is for none
            of the methods, or is of precisions or tasks that are not there.
    """
    unknown = sorted(arguments.keys() - DEFAULTS.keys())
    if unknown:
        raise InputError(f"merge takes no {some(unknown)}: see the fields of merging.Job")
    call = Call(rows, arguments, method)
    if call.has_tasks and method not in ("fisher", "auto"):
        raise InputError('tasks= stands for precisions, with method="fisher" or "auto"')
    for name, value in arguments.items():
        if _is_default(name, value):
            continue
        remedy = _remedy(name, call)
        if remedy is not None:
            raise InputError(
                f"{name}= has no effect on {call.name} here: leave it out, or {remedy}"
            )


def _is_default(name: str, value: Any) -> bool:
    default = DEFAULTS[name]
    is_comparable = isinstance(value, int | float | str)  # tensors, for one, are not
    return value is default or (is_comparable and value == default)


def _remedy(name: str, call: Call) -> str | None:
    """What to do about an argument that has no effect; None where it has one."""
    for rule in RULES:
        if name in rule.names and rule.applies(call):
            return rule.remedy
    if any(row.takes(name) for row in call.rows):
        return None
    methods = [row.name for row in METHODS.values() if row.takes(name)]
    return f"use {some(methods)}"
