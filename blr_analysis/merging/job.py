"""A merge as data: its models, method and settings. Recipes and calls both lead to it."""

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

MISSING_PRECISION = ("error", "base", "zero")  # what replaces a precision that is missing
PROPAGATED = (
    "(Σ α_t W_t A_t)(Σ α_t A_t)⁻¹, A_t = Σ a aᵀ behind merged layers; else Σ α_t θ_t / Σ α_t"
)
# The arguments of merge that say how precisions are used.
OF_PRECISIONS = frozenset({*CURVED, "base_precision", "delta", "trust"})
BREADCRUMBS_GAMMA = 0.01  # the share of largest entries that breadcrumbs drops, unless told

# Arguments that may be one number, or one function of the tensor's name, for all models.
BY_NAME = ("weights", "density", "epsilon", "gamma")
Weight = float | Callable[[str], float]


@dataclass(frozen=True)
class Member:
    """One fine-tuned model of a merge.

    Attributes:
        model: a folder (or ``.safetensors`` file), the folder of a LoRA adapter, a state dict, or
            a module.
        precision: H_t: the folder or file where it is stored, tensors by name, or a posterior.
            None where the method needs no precision, or :attr:`Job.missing_precision` replaces it.
        weight: α_t, a number or a function of the tensor's name.
        n_data: the number of examples, by which a precision that is an average is multiplied.
        density: the share of θ_t − θ_0 that stays, a number or a function of the tensor's name.
        epsilon: DELLA: half the range of the probabilities to stay, 0.15 where it is None. RAM:
            the size above which a step is a change, 1e-5 where it is None.
        gamma: breadcrumbs: the share of largest entries that is dropped.
        data: a file of examples, by which the layers' inputs are measured in place of a precision.
    """

    model: Any
    precision: Any = None
    weight: Weight = 1.0
    n_data: int | None = None
    density: Weight = 1.0
    epsilon: Weight | None = None
    gamma: Weight = BREADCRUMBS_GAMMA
    data: Path | None = None


@dataclass(frozen=True)
class Job:
    """A merge.

    Attributes:
        method: a name of :data:`blr_analysis.merging.methods.METHODS`.
        members: the fine-tuned models, in order.
        base: θ_0, the model that they started from: a folder, a state dict or a module.
        base_precision: H_0 without δ; None: 0.
        delta: δ, added to every entry of H_0.
        missing_precision: what replaces a precision that is missing: ``"base"`` is the base's (δ
            included), ``"zero"`` is 0, and ``"error"`` refuses the merge.
        normalize: whether the weights are divided by their sum; None: as the method's row says.
        dtype: of the arithmetic, float32 or float64.
        out_dtype: of the result; None: each tensor as in the base.
        shrink: the factor of the off-diagonals of precisions with factors; RegMean uses 0.9.
            None is 1, with two exceptions: with ``tasks``, and where all models have moments of a
            layer ("gram") from fewer rows than inputs and there is no H_0. It is then 1 less the
            measured part of the off-diagonals that is chance.
        power: "kron", A ⊗ G: the power of G, 0 to 1. Diagonals: the power of every number; 0.5 is
            half way, in logarithms, between the average and the Fisher average. With power 1 and
            no H_0, a merge can be worse than the average.
        damping: d of H + d mean(H) 1. The mean is over a layer, or for diagonals over a tensor,
            after their power. None: 1 for "kron", 0 for "gram" and diagonals. The larger d is, the
            nearer is the merge to an average by the tasks' mean precisions. If losses are
            quadratic and H are their Hessians, 0 gives the optimum of all tasks and 1 misses it;
            networks are merged more safely with 1. With 0, directions without a precision stay at
            the average (with a base, at task arithmetic).
        balanced: whether H / mean(H) + d 1 is taken in place of H + d mean(H) 1, so that large d
            give the average. The default method sets this; d is then 10 for "gram" and 3 for
            others unless it is given. See :mod:`blr_analysis.merging.auto`.
        trust: whether precisions are accepted that were recorded for other weights.
        scale: λ of task arithmetic, TIES and DARE, a number or a function of the tensor's name.
        seed: chooses the entries that DARE and DELLA drop, whatever the shards.
        rescale: whether DARE and DELLA divide the entries that stay by their probability.
        t: nearswap: the largest change of an entry.
        select_topk: SCE: the share of entries that stay.
        r, alpha: RAM+: how much a task's own entries grow with its overlap, and up to which
            overlap.
        tasks: the models' data, in place of precisions: RegMean++, each layer behind the merged
            ones.
        tokenizer_source: for models in folders: ``"base"``, ``"union"``, or the folder of a
            tokenizer. Rows of tokens are then merged by their words, and models borrow the rows
            that they lack. None: rows are merged by their number, and the tokenizer is the first
            model's.
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
    balanced: bool = False
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
        """Whether the layers' inputs are measured during the merge (RegMean++)."""
        return self.tasks is not None or any(m.data is not None for m in self.members)

    @property
    def row(self) -> Method:
        """The method's row of the registry.

        A merge by data solves the layers by their inputs, and averages all other tensors.
        """
        if self.propagates:
            return replace(METHODS["linear"], name="fisher", formula=PROPAGATED)
        return method_of(self.method)

    @property
    def divides(self) -> bool:
        """Whether the weights are divided by their sum."""
        return self.row.normalize if self.normalize is None else self.normalize


# The defaults of merge's arguments, by name.
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Job)}
del DEFAULTS["balanced"]  # the default method sets it, and no user
DEFAULTS |= {"density": 1.0, "epsilon": None, "gamma": None}
DEFAULTS |= {"n_data": None, "precisions": None, "weights": None, "validate": None}


def job_of(base: Any, models: Sequence[Any], method: str, **arguments: Any) -> Job:
    """The merge that the arguments of :func:`merge` describe."""
    models = list(models)
    count = len(models)
    if method == "slerp" and arguments.get("t") is not None:
        arguments["weights"] = _weights_of_arc(arguments.pop("t"), arguments.get("weights"))
    arguments.pop("validate", None)  # it is no part of a job: "auto" takes it from the call
    precisions = _one_per_model("precisions", arguments.pop("precisions", None), None, count)
    weights = _one_per_model("weights", arguments.pop("weights", None), 1.0, count)
    n_data = _one_per_model("n_data", arguments.pop("n_data", None), None, count)
    densities = _one_per_model("density", arguments.pop("density", None), 1.0, count)
    epsilons = _one_per_model("epsilon", arguments.pop("epsilon", None), None, count)
    gammas = _one_per_model("gamma", arguments.pop("gamma", None), BREADCRUMBS_GAMMA, count)
    members = tuple(map(Member, models, precisions, weights, n_data, densities, epsilons, gammas))
    return Job(method=method, members=members, base=base, **arguments)


def _weights_of_arc(t: Any, weights: Any) -> list[float]:
    """The weights of two models for a merge at t, which is 0 at the first and 1 at the second.

    Raises:
        InputError: t is no number from 0 to 1, or weights are given too.
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
    is_number = isinstance(argument, int | float)
    is_of_names = name in BY_NAME and callable(argument)
    if is_of_names or (is_number and name != "precisions"):
        return [argument] * count  # the same for all models
    is_text_or_mapping = isinstance(argument, str | bytes | Mapping)
    if is_text_or_mapping or not isinstance(argument, Sequence):
        raise InputError(f"{name} must be a list with one entry per model, got {argument!r:.60}")
    if len(argument) != count:
        raise InputError(f"{name} must have one entry per model: got {len(argument)} for {count}")
    return list(argument)


@dataclass(frozen=True)
class Call:
    """The arguments of a call of :func:`merge`, for :data:`RULES`.

    Attributes:
        rows: the methods that may be used.
        arguments: all arguments by name, also those that were left out.
        method: the name that the user gave; None where several methods are compared.
    """

    rows: Sequence[Method]
    arguments: Mapping[str, Any]
    method: str | None = None

    @property
    def name(self) -> str:
        """The method or methods, for messages."""
        return self.method or some([row.name for row in self.rows])

    @property
    def is_auto(self) -> bool:
        """Whether "auto" chooses the method."""
        return self.method == "auto"

    @property
    def has_tasks(self) -> bool:
        """Whether the data of the tasks are given."""
        return self.arguments.get("tasks") is not None

    @property
    def has_precisions(self) -> bool:
        """Whether the merge may have precisions.

        A call without precisions, tasks and "auto" is judged as if it had them: curves pass them
        beside these arguments, and methods without precisions refuse their settings themselves.
        """
        are_given = self.arguments.get("precisions") is not None
        may_come_otherwise = not self.has_tasks and not self.is_auto
        return are_given or may_come_otherwise


@dataclass(frozen=True)
class Rule:
    """A case in which some arguments have no effect.

    Attributes:
        names: the arguments.
        applies: whether a call is such a case.
        remedy: what the user can do instead.
    """

    names: frozenset[str]
    applies: Callable[[Call], bool]
    remedy: str


RULES = (
    # Only "auto" chooses by data.
    Rule(frozenset({"validate"}), lambda call: not call.is_auto, 'use method="auto"'),
    # The tasks' statistics replace precisions; "auto" tries both.
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
        InputError: an unknown argument; or an argument that differs from its default and has no
            effect on these methods, or needs precisions or tasks that are missing.
    """
    unknown = sorted(arguments.keys() - DEFAULTS.keys())
    if unknown:
        raise InputError(f"merge takes no {some(unknown)}: see the fields of merging.Job")
    call = Call(rows, arguments, method)
    if call.has_tasks and method not in ("fisher", "auto"):
        raise InputError('tasks= replaces the precisions of method="fisher" or "auto" alone')
    for name, value in arguments.items():
        if _is_default(name, value):
            continue
        remedy = _remedy(name, call)
        if remedy is not None:
            raise InputError(
                f"{name}= has no effect on {call.name} here: leave it out, or {remedy}"
            )


def _is_default(name: str, value: Any) -> bool:
    """Whether an argument has its default value."""
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
