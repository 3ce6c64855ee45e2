"""Results as pandas DataFrames, and DataFrames as files.

Where a result has one row per example, its columns are its attributes, declared once; else one
function makes its rows. All are registered with :func:`blr_analysis.views.make_table`, so that
``scores.table`` and its like find them. The columns of examples, by name:

================= ============================================================= ==============
column            what                                                          more is
================= ============================================================= ==============
index             position in the dataset
target            y_i (``target_0`` … where each example has several)
prediction        class, or mean (``prediction_0`` … where several)
mean              one probability per class, or the mean or rate
loss              −log p(y_i | f_i) in nats, of a sequence summed over its      worse fitted
                  ``tokens`` that count; of a leave-one-out without the example
                  and ``loss_before`` with it
error             ‖e_i‖₂, Euclidean norm of the prediction error                more wrong
variance          tr V_i, trace of the prediction variance; of sequences        less certain
                  estimated, with ``variance_error``
deviation         how far the prediction moves without the example              more influential
self_influence    g_iᵀΣg_i, first-order rise of its own loss, nats              more influential
leverage          largest eigenvalue of V_iΛ_i                                  more influential
correction        "first_order", "cavity", "bounded" or "descent"
change            of a token, first-order rise of its loss without its sequence more influential
…                 the user's metadata; a name taken above gets the suffix ``_metadata``
================= ============================================================= ==============

What was not computed is NaN, or not there.

    >>> groups = [dict(nll_before=0.2, nll_after=0.5, accuracy_before=0.9, accuracy_after=0.8)]
    >>> make_table(GroupRows(groups)).nll_change.tolist()
    [0.3]
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import torch
from pandas.api.types import is_object_dtype
from torch import Tensor

from blr_analysis.errors import DataError, InputError
from blr_analysis.files import drafted
from blr_analysis.learning_rule.inference.fitted import Fitted
from blr_analysis.learning_rule.inference.lda import TopicWords
from blr_analysis.learning_rule.table import Table1
from blr_analysis.memory_map import REGIONS, MemoryMap, error_size, variance_size
from blr_analysis.merging.curve import MergeCurve
from blr_analysis.merging.folders import MergeReport
from blr_analysis.merging.mismatch import GradientMismatch
from blr_analysis.merging.plan import MergePlan
from blr_analysis.posterior.predictive import Predictions
from blr_analysis.sensitivity.influence.results import (
    SHOWN,
    GroupInfluence,
    Influence,
    Matches,
)
from blr_analysis.sensitivity.leave_one_out import LeaveOneOut
from blr_analysis.sensitivity.monitor import COLUMNS, Monitor
from blr_analysis.sensitivity.prior_selection import PriorSelection
from blr_analysis.sensitivity.scores import Scores
from blr_analysis.sensitivity.sequences import SequenceLeaveOneOut, SequenceScores
from blr_analysis.sensitivity.sites import SiteLeaveOneOut, SiteScores
from blr_analysis.sensitivity.suspicious import KINDS, NONE, Suspicions
from blr_analysis.sensitivity.tokens import TokenScores
from blr_analysis.sensitivity.what_if import ByClass, WhatIf
from blr_analysis.views import GroupRows, make_table

# Columns


def _array(values: Any) -> Any:
    """A tensor or sequence as an array that pandas takes; half precisions become float32."""
    if not isinstance(values, Tensor):
        words = not hasattr(values, "ndim") and any(isinstance(v, str) for v in values)
        return values if hasattr(values, "ndim") else np.asarray(values, object if words else None)
    values = values.detach().cpu()
    small = values.is_floating_point() and values.element_size() < 4
    return (values.float() if small else values).numpy()


def _spread(name: str, values: Any) -> dict[str, Any]:
    """One column, or ``name_0`` … ``name_{C−1}`` where each example has C > 1 values."""
    array = _array(values)
    if array.ndim == 1:
        return {name: array}
    array = array.reshape(len(array), -1)
    if array.shape[1] == 1:
        return {name: array[:, 0]}
    return {f"{name}_{c}": array[:, c] for c in range(array.shape[1])}


def _frame(
    columns: Mapping[str, Any], metadata: Mapping[str, Sequence[Any]] | None = None
) -> pd.DataFrame:
    """The columns, None as NaN, and behind them the user's metadata."""
    n = len(next(iter(columns.values())))
    arrays: dict[str, Any] = {}
    for name, values in columns.items():
        arrays |= _spread(name, np.full(n, np.nan) if values is None else values)
    for name, values in (metadata or {}).items():
        if len(values) != n:
            raise DataError(f"metadata {name!r} holds {len(values)} values for {n} examples")
        arrays[_free(str(name), arrays)] = _plain(values)
    return pd.DataFrame(arrays)


def _plain(values: Sequence[Any]) -> Any:
    """A metadata column as pandas takes it: numbers out of tensors, rows of a matrix as lists."""
    if isinstance(values, Tensor | np.ndarray):
        array = _array(values)
        return array if array.ndim == 1 else array.tolist()
    return [_array(v).tolist() if isinstance(v, Tensor) else v for v in values]


def _free(name: str, taken: Iterable[str]) -> str:
    while name in taken:
        name += "_metadata"
    return name


# One row per example


Columns = Mapping[str, str | Callable[[Any], Any]]  # of what attribute, or how worked out


def example_table(result: Any, columns: Columns, optional: Collection[str] = ()) -> pd.DataFrame:
    """One row per example in the order of the dataset: index, the columns, the user's metadata.

    What was not computed is NaN, or, of an ``optional`` column, not there.
    """
    values: dict[str, Any] = {"index": np.arange(len(result.losses))}
    for name, source in columns.items():
        value = getattr(result, source) if isinstance(source, str) else source(result)
        if value is not None or name not in optional:
            values[name] = value
    return _frame(values, getattr(result, "metadata", None))


def _registered(result: type, columns: Columns, optional: Collection[str] = ()) -> Any:
    return make_table.register(result, partial(example_table, columns=columns, optional=optional))


def _summed_variance(scores: Any) -> Tensor | None:
    return None if scores.variance is None else variance_size(scores.variance)


_ANSWERED = {"target": "targets", "prediction": "predictions"}
_PER_TOKEN = {"tokens": "tokens", "loss": "losses"}

scores_table = _registered(
    Scores,
    {
        **_ANSWERED,
        "loss": "losses",
        "error": lambda scores: error_size(scores.error),
        "variance": _summed_variance,
        **{name: name for name in ("deviation", "self_influence", "leverage")},
    },
)
leave_one_out_table = _registered(
    LeaveOneOut,
    {
        **_ANSWERED,
        "prediction_before": "predictions_before",
        "loss": "losses",
        "loss_before": "losses_before",
        **{name: name for name in ("deviation", "leverage", "correction")},
    },
)
_registered(
    Predictions,
    {
        "loss": "losses",
        "target": lambda predictions: None if predictions.mean is None else predictions.targets,
        "mean": "mean",
    },
    optional=("target", "mean"),
)
_registered(
    SequenceScores,
    {
        **_PER_TOKEN,
        "loss_per_token": lambda scores: scores.losses / scores.tokens,
        **{name: name for name in ("error", "self_influence", "variance", "variance_error")},
    },
    optional=("variance", "variance_error"),
)
_registered(
    SequenceLeaveOneOut,
    {
        **_PER_TOKEN,
        "loss_before": "losses_before",
        "loss_per_token": lambda loo: loo.losses / loo.tokens,
        "loss_per_token_before": lambda loo: loo.losses_before / loo.tokens,
        "correction": "correction",
    },
)
_registered(
    TokenScores,
    {
        **{name: name for name in ("sequence", "position", "target")},
        "loss": "losses",
        "change": "change",
        "loss_without": "losses_without",
    },
)
_registered(SiteLeaveOneOut, {"loss": "losses", "loss_before": "losses_before"})
_registered(SiteScores, {"loss": "losses", "deviation": "deviation"})


@make_table.register(MemoryMap)
def memory_map_table(memory: MemoryMap) -> pd.DataFrame:
    """The table of the scores, its error and variance as mapped, and the region of each row."""
    table = pd.DataFrame(make_table(memory.scores))
    if "region" in table:
        table = table.rename(columns={"region": _free("region", table)})
    after = list(table).index("leverage" if "leverage" in table else "self_influence") + 1
    table = table.assign(error=memory.error.numpy(), variance=memory.variance.numpy())
    table.insert(after, "region", pd.Categorical(memory.region, categories=REGIONS))
    return table


@make_table.register(Suspicions)
def suspicious_table(suspicions: Suspicions) -> pd.DataFrame:
    """One row per example, the most suspicious first.

    ============= ========================================================== ===============
    column        what                                                       more is
    ============= ========================================================== ===============
    index         position in the dataset
    kind          the fault that is suspected: "label", "unfamiliar",
                  "duplicate" or "none"
    target        y_i (``target_0`` … where each example has several)
    prediction    what the model answers
    proposed      the best other label without the example; NaN for regression
    loss          its unweighted loss, mean over the run, nats               worse (label)
    left_out_loss its loss for a model without the example, nats             worse (label)
    unfamiliarity tr(Λ_i V_i), parameters that the example takes up          worse
    closeness     how much nearer its twin is than its tenth neighbour,      worse
                  0 … 1; NaN where twins were not asked for
    twin          index of the nearest other example; −1 where not asked
    …             the user's metadata; a name taken above gets the suffix ``_metadata``
    ============= ========================================================== ===============
    """
    columns: Columns = {
        "kind": lambda _: pd.Categorical(suspicions.kind, categories=[*KINDS, NONE]),
        **_ANSWERED,
        "proposed": "proposed",
        "loss": "losses",
        "left_out_loss": "left_out",
        "unfamiliarity": "unfamiliarity",
        "closeness": "closeness",
        "twin": lambda s: np.full(len(s), -1) if s.twin is None else s.twin,
    }
    table = example_table(suspicions, columns, optional=("target", "prediction"))
    return table.iloc[suspicions.order.numpy()].reset_index(drop=True)


@make_table.register(Fitted)
def fitted_table(fitted: Any) -> pd.DataFrame:
    """One row per example of a :class:`blr_analysis.learning_rule.inference.Fitted`.

    ============== ============================================================= ============
    column         what                                                          more is
    ============== ============================================================= ============
    index          position in the data
    log_predictive log p(y_i) under the posterior, in nats                       better
    left_out       log p(y_i) under the posterior without the example, in nats   better
    gain           log_predictive − left_out: what the example told the model    shapes more
                   about itself
    ============== ============================================================= ============

    ``table.attrs["note"]`` says what to know of ``left_out``, where that is not exact.

    Raises:
        InputError: a model without sites or without a predictive, or fitted without keeping its
            data; its history is in ``fitted.history``.
    """
    left_out = _array(fitted.left_out())
    if fitted.predictive is None or fitted.data is None:
        raise InputError("the table needs the model's predictive and its data")
    before = _array(fitted.log_predictive(fitted.data))
    columns = {
        "index": np.arange(len(left_out)),
        "log_predictive": before,
        "left_out": left_out,
        "gain": before - left_out,
    }
    table = _frame(columns)
    table.attrs["note"] = fitted.note
    return table


# One row per pair of examples, or per group of them


@make_table.register(Matches)
def top_influence_table(top: Any) -> pd.DataFrame:
    """One row per test example and strong training example, most helpful first; of
    ``top.helpful`` those that help, of ``top.harmful`` those that harm.

    ================ ========================================================
    column           what
    ================ ========================================================
    test             position of the test example in its dataset
    effect           "helpful" (leaving it out hurts) or "harmful"
    rank             1 for the strongest of its test example and effect
    train            position of the training example
    influence        rise of the test loss without it, nats; where it was asked for normalized,
                     the column is called normalized_influence (√nats) or cosine
    test_target, …   target and prediction of both (not for sequences, nor from an index)
    …                metadata of the training example
    ================ ========================================================

    ``table.attrs["note"]`` says of which curvature it is, where not of the posterior's own.
    """
    kept = torch.cat(top.own_sign, dim=1)
    test, place = kept.nonzero().unbind(1)
    harms, rank = place >= top.k, place % top.k + 1
    train = torch.cat([top.helpful, top.harmful], dim=1)[kept]
    columns: dict[str, Any] = {
        "test": test,
        "effect": np.where(harms, "harmful", "helpful"),
        "rank": rank,
        "train": train,
        top.quantity: torch.cat([top.helpful_values, top.harmful_values], 1)[kept],
    }
    for side, indices in (("test", test), ("train", train)):
        for name, values in top.described(indices, test=side == "test").items():
            columns[f"{side}_{name}"] = values
    chosen = {k: [v[i] for i in train.tolist()] for k, v in top.metadata.items()}
    table = _frame(columns, chosen)
    table.attrs["note"] = top.note
    return table


@make_table.register(Influence)
def influence_table(influence: Any) -> pd.DataFrame:
    """The strongest few of each test example; see :func:`top_influence_table`."""
    return top_influence_table(influence.top(min(SHOWN, influence.shape[0])))


@make_table.register(GroupInfluence)
def group_influence_table(influence: Any) -> pd.DataFrame:
    """One row per group: group, n, influence (rise of the mean test loss without it, nats) and
    influence_per_example (the same divided by n)."""
    mean, sizes = _array(influence.mean), _array(influence.sizes)
    columns = {"group": list(influence.groups), "n": sizes, "influence": mean}
    return pd.DataFrame(columns).assign(influence_per_example=mean / sizes)


@make_table.register(WhatIf)
@make_table.register(ByClass)
def what_if_table(result: Any) -> pd.DataFrame:
    """The evaluation set of a what-if, one row per class: class, n, nll_before, nll_after (nats
    per example), accuracy_before and accuracy_after.

    Raises:
        InputError: the targets are not classes: several per example, or not whole numbers.
    """
    classes = _array(result.targets)
    if classes.ndim == 2 and classes.shape[1] == 1:
        classes = classes[:, 0]
    if classes.ndim != 1 or not np.array_equal(classes, np.round(classes)):
        said = "a table by class needs one whole-number target per example"
        raise InputError(f"{said}; use what_if_each(by=a metadata column)")
    labels, member, n = np.unique(classes, return_inverse=True, return_counts=True)
    columns: dict[str, Any] = {"class": labels.astype(np.int64), "n": n}
    for measure, field in (("nll", "losses"), ("accuracy", "correct")):
        for when in ("before", "after"):
            values = getattr(getattr(result, when), field)
            columns[f"{measure}_{when}"] = (
                None if values is None else np.bincount(member, _array(values), len(labels)) / n
            )
    if columns["accuracy_after"] is not None:  # a difference of trainings can lead below 0
        columns["nll_after"] = np.maximum(columns["nll_after"], 0.0)
    return _frame(columns)


@make_table.register(GroupRows)
def groups_table(groups: GroupRows) -> pd.DataFrame:
    """One row per group that was taken out, as given, with nll_change and accuracy_change (after −
    before) behind what they change: positive where the model is worse off, or better."""
    table = pd.DataFrame(list(groups.rows))
    for measure in ("nll", "accuracy"):
        before, after = (table[f"{measure}_{w}"].astype(np.float64) for w in ("before", "after"))
        table = table.assign(**{f"{measure}_before": before, f"{measure}_after": after})
        place = list(table).index(f"{measure}_after") + 1
        table.insert(place, f"{measure}_change", after - before)
    return table


# One row per epoch, or per setting that was tried


@make_table.register(Monitor)
def monitor_table(monitor: Any) -> pd.DataFrame:
    """One row per recorded epoch.

    =================== ====================================================== ==============
    column              what                                                   more is
    =================== ====================================================== ==============
    epoch               epochs done
    train_nll           mean loss of the watched training examples, nats       worse
    train_accuracy      theirs
    loo_nll             mean left-out loss: the estimate of test_nll           worse
    loo_accuracy        of the left-out predictions; NaN for regression        better
    test_nll            mean loss of the test task; NaN without one            worse
    test_accuracy       its
    mean_deviation      mean over the watched examples
    mean_self_influence mean g_iᵀΣg_i, nats
    max_leverage        largest eigenvalue of V_iΛ_i over all examples; from 1
                        on, the posterior overstates V_i
    seconds             what the recording took
    =================== ====================================================== ==============
    """
    return pd.DataFrame(monitor.rows, columns=list(COLUMNS)).astype({"epoch": np.int64})


@make_table.register(PriorSelection)
def prior_selection_table(selection: Any) -> pd.DataFrame:
    """One row per δ, rising; the columns of :class:`~blr_analysis.sensitivity.PriorSelection`."""
    return pd.DataFrame(list(selection.rows))


# Merging: one row per merge and task, per choice of weights, per tensor


@make_table.register(GradientMismatch)
def mismatch_table(result: Any) -> pd.DataFrame:
    """One row per merge and task, of :func:`blr_analysis.gradient_mismatch`.

    ===================== ==================================================== =============
    column                what                                                 more is
    ===================== ==================================================== =============
    merge, task           names, as given
    n_data                N_t, examples of the task
    mismatch              ‖∇ℓ̄_t(θ_merged) − ∇ℓ̄_t(θ_t)‖                         worse
    mismatch_per_example  the same over N_t                                    worse
    mismatch_in_metric    √(Σ v²/S_t) of the same difference v, √nats; S_t is  worse
                          H_t, with the prior of a posterior; NaN without
    gradient_own          ‖∇ℓ̄_t(θ_t)‖: 0 at an optimum without a prior
    gradient_merged       ‖∇ℓ̄_t(θ_merged)‖
    distance              ‖θ_merged − θ_t‖, over the trainable parameters
    gap                   ℓ̄_t(θ_merged) − ℓ̄_t(θ_t), nats, a sum over the task  worse
    gap_per_example       the same over N_t                                    worse
    gap_by_gradient       the gap if ℓ̄_t were quadratic between the two
    gap_by_precision      the gap that H_t foretells; NaN without
    nll_own, nll_merged   mean loss at θ_t and at θ_merged, nats               worse
    accuracy_own, …       fraction right at θ_t and (accuracy_merged) at       better
                          θ_merged; NaN for regression
    test_nll_own, …       test_nll_merged, test_accuracy_own and
                          test_accuracy_merged: on held-out data; NaN without
    ===================== ==================================================== =============
    """
    return pd.DataFrame(list(result.rows))


@make_table.register(MergeCurve)
def merge_curve_table(curve: Any) -> pd.DataFrame:
    """One row per method and set of weights, of :func:`blr_analysis.merge_curve`.

    ===================== ==================================================== =============
    column                what                                                 more is
    ===================== ==================================================== =============
    method                of merging
    weight                α, where all models have the same one; else NaN
    weight_<model>        α_t of each model
    nll                   mean over the tasks of their mean losses, nats;      worse
                          infinite where the merge could not be run
    accuracy              mean over the tasks that have one; NaN without       better
    nll_<task>            mean loss on each validation task, nats per example  worse
    accuracy_<task>       fraction right; NaN for regression                   better
    failure               why the merge could not be run; "" where it could
    best                  whether this row is ``curve.best``
    ===================== ==================================================== =============
    """
    rows = [
        {
            "method": point.method,
            "weight": point.weights[0] if len(set(point.weights)) == 1 else float("nan"),
            **{f"weight_{n}": a for n, a in zip(curve.models, point.weights, strict=True)},
            "nll": point.nll,
            "accuracy": point.accuracy,
            **{f"nll_{n}": v for n, v in zip(curve.tasks, point.nlls, strict=True)},
            **{f"accuracy_{n}": v for n, v in zip(curve.tasks, point.accuracies, strict=True)},
            "failure": point.failure,
            "best": point is curve.best,
        }
        for point in curve.points
    ]
    return pd.DataFrame(rows)


@make_table.register(MergePlan)
def plan_table(plan: MergePlan) -> pd.DataFrame:
    """One row per tensor of the result.

    ========== =====================================================================
    column     what
    ========== =====================================================================
    tensor     its name
    fate       merged, or copied (integers in which all models agree)
    dtype      as it is written
    shape      as text, such as 64 × 32
    bytes      as it is written
    weights    α_t of every model, in order
    precisions what stands for every H_t: own, base (H_0 + δ) or zero
    note       tied copies, precisions that are missing
    ========== =====================================================================
    """
    rows = [
        {
            "tensor": item.name,
            "fate": item.fate,
            "dtype": str(item.spec.dtype).removeprefix("torch."),
            "shape": " × ".join(map(str, item.spec.shape)) or "1",
            "bytes": item.spec.nbytes,
            "weights": ", ".join(f"{a:g}" for a in item.weights),
            "precisions": ", ".join(item.curved),
            "note": item.note,
        }
        for item in plan.items
    ]
    names = ["tensor", "fate", "dtype", "shape", "bytes", "weights", "precisions", "note"]
    return pd.DataFrame(rows, columns=names)


@make_table.register(MergeReport)
def report_table(report: MergeReport) -> pd.DataFrame:
    """:func:`plan_table`, and ``fallback``: the entries where task arithmetic stands."""
    table = plan_table(report.plan)
    table.insert(5, "fallback", [report.fallback.get(n, 0) for n in table["tensor"]])
    return table


# The rule, and the words of topics


@make_table.register(Table1)
def rule_table(table: Any) -> pd.DataFrame:
    """The rows of :data:`blr_analysis.learning_rule.table.ROWS`; see :func:`blr_analysis.table1`.

    ============== ===========================================================================
    column         what
    ============== ===========================================================================
    algorithm      its name
    family         of the posterior q
    loss           where the loss is looked at
    hessian        what the Hessian is taken to be
    departures     named departures of the step from the rule; empty where there are none
    approximations all of that in the words of Khan & Rue's Table 1
    section        of Khan & Rue, or another source
    analysable     whether its posterior can be analysed (sensitivity, leave-one-out, merging)
    through        what hands that posterior over; empty where there is none
    runs           the module that runs it
    ============== ===========================================================================
    """
    rows = [
        {
            "algorithm": row.algorithm,
            "family": row.family,
            "loss": row.look.name,
            "hessian": row.curvature.name,
            "departures": ", ".join(row.move.departures),
            "approximations": row.approximations,
            "section": row.section,
            "analysable": bool(row.analysable),
            "through": row.analysable,
            "runs": row.runs,
        }
        for row in table.rows
    ]
    return pd.DataFrame(rows)


@make_table.register(TopicWords)
def topics_table(topics: TopicWords) -> pd.DataFrame:
    """One row per topic and word, the most probable first.

    Returns:
        Columns: topic (from 0), rank (from 1), word, probability (E[β_kw]).
    """
    rows = [
        (topic, rank, word, probability)
        for topic, pairs in enumerate(zip(topics.words, topics.probabilities, strict=True))
        for rank, (word, probability) in enumerate(zip(*pairs, strict=True), start=1)
    ]
    return pd.DataFrame(rows, columns=["topic", "rank", "word", "probability"])


# Files: CSV for eyes and spreadsheets, Parquet for programs


def write_table(table: pd.DataFrame, folder: str | Path, stem: str) -> tuple[Path, Path]:
    """Write ``folder/stem.csv`` and ``folder/stem.parquet``, both whole or neither.

    Both are written beside their targets and renamed into place. Parquet keeps every dtype;
    CSV is for eyes and spreadsheets. A column of mixed types, which Parquet cannot hold, is
    written as text, with a warning.

    Returns:
        The two paths.

    Raises:
        StorageError: the folder cannot be made or written.
        InputError: ``stem`` is empty or contains a path.
    """
    if stem in ("", ".", "..") or Path(stem).name != stem:
        raise InputError(f"stem must be a file name without folder or suffix; got {stem!r}")
    csv, parquet = Path(folder, f"{stem}.csv"), Path(folder, f"{stem}.parquet")
    storable = _storable(table)
    with drafted(csv) as one, drafted(parquet) as two:
        table.to_csv(one, index=False)
        storable.to_parquet(two, index=False)
    return csv, parquet


def _storable(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the columns that Parquet cannot hold turned into text."""
    for name in filter(lambda name: is_object_dtype(table[name]), table.columns):
        try:
            pyarrow.array(table[name], from_pandas=True)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):
            warnings.warn(
                f"column {name!r} mixes types that Parquet cannot hold: written as text",
                stacklevel=3,
            )
            table = table.assign(**{name: table[name].map(str)})
    return table
