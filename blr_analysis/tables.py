"""Results as pandas DataFrames, and DataFrames as files.

A result with one row per example names its columns itself (``table_columns()``). The rows of any
other result are made by one function here. :data:`TABLES` has it under the name of the result's
class, or of a base of that class. The columns of examples:

================= ============================================================= ==============
column            what                                                          more is
================= ============================================================= ==============
index             position in the dataset
target            y_i (``target_0`` … where each example has several)
prediction        class, or mean (``prediction_0`` … where several)
mean              one probability per class, or the mean or rate
loss              −log p(y_i | f_i) in nats; of a sequence the sum over its     worse fitted
                  ``tokens`` that count; in a leave-one-out the loss without
                  the example, beside ``loss_before`` with it
error             ‖e_i‖₂, Euclidean norm of the prediction error                more wrong
variance          tr V_i, trace of the prediction variance; of sequences an     less certain
                  estimate, with ``variance_error``
deviation         how far the prediction moves without the example              more influential
self_influence    g_iᵀΣg_i, first-order rise of its own loss, nats              more influential
leverage          largest eigenvalue of V_iΛ_i                                  more influential
correction        "first_order", "cavity", "bounded" or "descent"
change            of a token, first-order rise of its loss without its sequence more influential
…                 the user's metadata; a name from above gets the suffix ``_metadata``
================= ============================================================= ==============

A number that was not computed is NaN, or its column is missing.

    >>> from blr_analysis.views import GroupRows
    >>> groups = [dict(nll_before=0.2, nll_after=0.5, accuracy_before=0.9, accuracy_after=0.8)]
    >>> GroupRows(groups).table.nll_change.tolist()
    [0.3]
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.files import drafted
from blr_analysis.memory_map import REGIONS
from blr_analysis.sensitivity.influence.results import SHOWN
from blr_analysis.sensitivity.results import FAULTS, NO_FAULT

# One row per example


def example_table(result: Any) -> pd.DataFrame:
    """One row per example in the order of the dataset.

    The columns are the index, the result's own and the user's metadata.
    """
    columns = {"index": np.arange(len(result)), **result.table_columns()}
    return frame_of(columns, getattr(result, "metadata", None))


def _array(values: Any) -> Any:
    """A tensor or sequence as an array that pandas takes; half precisions become float32."""
    if isinstance(values, Tensor):
        is_half = values.is_floating_point() and values.element_size() < 4
        full = values.float() if is_half else values
        return full.detach().cpu().numpy()
    if hasattr(values, "ndim"):
        return values
    has_words = any(isinstance(value, str) for value in values)
    return np.asarray(values, object if has_words else None)


def frame_of(columns: Mapping[str, Any], metadata: Any = None) -> pd.DataFrame:
    """The columns, and behind them the user's metadata.

    A column with C > 1 values in each row becomes ``name_0`` … ``name_{C−1}``; None becomes NaN. A
    column of metadata whose name is in use gets the suffix ``_metadata``.
    """
    n_rows = len(next(iter(columns.values())))
    arrays: dict[str, Any] = {}
    for name, values in columns.items():
        array = _array(np.full(n_rows, np.nan) if values is None else values)
        arrays |= _single_columns(name, array)
    if metadata is not None:
        for name, values in metadata.items():
            arrays[_free_name(str(name), arrays)] = [
                _array(value).tolist() if isinstance(value, Tensor | np.ndarray) else value
                for value in values
            ]
    return pd.DataFrame(arrays)


def _single_columns(name: str, array: Any) -> dict[str, Any]:
    """The columns of an array ``[N]`` or ``[N, …]``, each with one value in a row, by name."""
    if array.ndim == 1:
        return {name: array}
    parts = array.reshape(len(array), -1).T
    if len(parts) == 1:
        return {name: parts[0]}
    return {f"{name}_{place}": part for place, part in enumerate(parts)}


def _free_name(name: str, names: Iterable[str]) -> str:
    """The name, with suffixes ``_metadata`` until it differs from all of these names."""
    while name in names:
        name += "_metadata"
    return name


def _memory_map(memory: Any) -> pd.DataFrame:
    """The table of the scores, with the error, the variance and the region of the memory map."""
    table = memory.scores.table
    if "region" in table:
        table = table.rename(columns={"region": _free_name("region", table)})
    last_score = "leverage" if "leverage" in table else "self_influence"
    place = list(table).index(last_score) + 1
    table = table.assign(error=memory.error.numpy(), variance=memory.variance.numpy())
    table.insert(place, "region", pd.Categorical(memory.region, categories=REGIONS))
    return table


def _suspicions(suspicions: Any) -> pd.DataFrame:
    """One row per example, the most suspicious first.

    ============= ========================================================== ===============
    column        what                                                       more is
    ============= ========================================================== ===============
    index         position in the dataset
    kind          the fault that is suspected: "label", "unfamiliar",
                  "duplicate" or "none"
    target        y_i (``target_0`` … where each example has several)
    prediction    the model's answer
    proposed      the best other label without the example; NaN for regression
    wrong         the chance that its label is wrong; only for classes       worse (label)
    loss          its unweighted loss, mean over the run, nats               worse (label)
    guessed_loss  of texts, the loss of a guess by the words' frequencies:
                  they are suspected by loss − guessed_loss
    training_loss its loss at the end of the run, nats                       worse (label)
    left_out_loss its loss for a model without the example, nats             worse (label)
    unfamiliarity tr(Λ_i V_i), the parameters that the example takes up      worse
    closeness     how much nearer its twin is than its tenth neighbour,      worse
                  0 … 1; NaN where twins were not asked for
    twin          index of the nearest other example; −1 where not asked
    …             the user's metadata; a name from above gets the suffix ``_metadata``
    ============= ========================================================== ===============

    ``table.attrs["note"]`` says how far to trust the table, and if no label is called wrong, why.
    """
    table = example_table(suspicions)
    table = table.assign(kind=pd.Categorical(suspicions.kind, [*FAULTS, NO_FAULT]))
    table = table.iloc[suspicions.order.numpy()].reset_index(drop=True)
    table.attrs["note"] = suspicions.note
    return table


def _fitted(fitted: Any) -> pd.DataFrame:
    """One row per example of a :class:`blr_analysis.learning_rule.inference.Fitted`.

    ============== ============================================================= ============
    column         what                                                          more is
    ============== ============================================================= ============
    index          position in the data
    log_predictive log p(y_i) under the posterior, in nats                       better
    left_out       log p(y_i) under the posterior without the example, in nats   better
    gain           log_predictive − left_out, the example's information about    shapes more
                   itself
    ============== ============================================================= ============

    ``table.attrs["note"]`` says why ``left_out`` is not exact, if it is not.

    Raises:
        InputError: a model without sites or without a predictive, or one that did not keep its
            data. ``fitted.history`` has the history of any fit.
    """
    left_out = _array(fitted.left_out())
    if fitted.predictive is None or fitted.data is None:
        raise InputError("the table needs the model's predictive and its data")
    before = _array(fitted.log_predictive(fitted.data))
    table = frame_of({"index": range(len(before)), "log_predictive": before, "left_out": left_out})
    table.attrs["note"] = fitted.note
    return table.assign(gain=table["log_predictive"] - table["left_out"])


# One row per pair of examples, per class, or per group


def _matches(top: Any) -> pd.DataFrame:
    """One row per test example and strong training example, the most helpful first.

    ``top.helpful`` and ``top.harmful`` may hold examples of the other sign; these are left out.

    ================ ========================================================
    column           what
    ================ ========================================================
    test             position of the test example in its dataset
    effect           "helpful" (leaving it out hurts) or "harmful"
    rank             1 for the strongest of its test example and effect
    train            position of the training example
    influence        rise of the test loss without it, nats; normalized influences have the
                     column normalized_influence (√nats) or cosine
    test_target, …   target and prediction of both (not for sequences, nor from an index)
    …                metadata of the training example
    ================ ========================================================

    ``table.attrs["note"]`` names the curvature of the influences, if it is not the posterior's.
    """
    has_right_sign = torch.cat(top.has_right_sign, dim=1)
    test, place = has_right_sign.nonzero().unbind(1)  # places of helpful ones are below k
    train = torch.cat([top.helpful, top.harmful], dim=1)[has_right_sign]
    values = torch.cat([top.helpful_values, top.harmful_values], dim=1)[has_right_sign]
    columns: dict[str, Any] = {
        "test": test,
        "effect": np.where(place >= top.k, "harmful", "helpful"),
        "rank": place % top.k + 1,
        "train": train,
        top.quantity: values,
    }
    for name, column in top.described(test, test=True).items():
        columns[f"test_{name}"] = column
    for name, column in top.described(train).items():
        columns[f"train_{name}"] = column
    train_indices = train.tolist()
    metadata = {
        name: [column[index] for index in train_indices] for name, column in top.metadata.items()
    }
    table = frame_of(columns, metadata)
    table.attrs["note"] = top.note
    return table


def _strongest(influence: Any) -> pd.DataFrame:
    """The table of the few examples that help, or harm, each test example most."""
    return influence.top(min(SHOWN, len(influence))).table


def _group_influence(influence: Any) -> pd.DataFrame:
    """One row per group: group, n, influence and influence_per_example.

    The influence is the rise of the mean test loss without the group, in nats. The last column is
    the influence divided by n.
    """
    mean_rises = _array(influence.mean)
    sizes = _array(influence.sizes)
    columns = {
        "group": list(influence.groups),
        "n": sizes,
        "influence": mean_rises,
        "influence_per_example": mean_rises / sizes,
    }
    return pd.DataFrame(columns)


def _by_class(result: Any) -> pd.DataFrame:
    """The evaluation set of a what-if, one row per class.

    The columns are class, n, nll_before, nll_after (nats per example), accuracy_before and
    accuracy_after.

    Raises:
        InputError: the targets are not classes: several per example, or not whole numbers.
    """
    columns = {
        "class": result.targets,
        "nll_before": result.before.losses,
        "nll_after": result.after.losses,
        "accuracy_before": result.before.correct,
        "accuracy_after": result.after.correct,
    }
    frame: Any = frame_of(columns).astype(np.float64)
    has_one_target = "class" in frame
    if not has_one_target or (frame["class"] % 1).any():
        raise InputError("a table by class needs one whole-number target per example")
    groups = frame.astype({"class": np.int64}).groupby("class", as_index=False)
    table: Any = groups.mean()
    table.insert(1, "n", groups.size()["size"])
    has_classes = result.after.correct is not None
    if has_classes:
        # The loss after is the loss before plus an estimated change, which can lead below 0.
        table["nll_after"] = table["nll_after"].clip(lower=0.0)
    return table


def _removed_groups(result: Any) -> pd.DataFrame:
    """One row per group that was taken out, with nll_change and accuracy_change (after − before).

    A positive nll_change means that the model became worse, a positive accuracy_change that it
    became better. Each change stands behind the column that it explains.
    """
    table = pd.DataFrame(list(result.rows))
    for measure in ("nll", "accuracy"):
        before = f"{measure}_before"
        after = f"{measure}_after"
        table[[before, after]] = table[[before, after]].astype(np.float64)
        place = list(table).index(after) + 1
        table.insert(place, f"{measure}_change", table[after] - table[before])
    return table


# Results that have rows already, or parts that become rows


def _rows(result: Any) -> pd.DataFrame:
    """The rows of the result as they are.

    A :class:`blr_analysis.Monitor` has one per recorded epoch:

    =================== ====================================================== ==============
    column              what                                                   more is
    =================== ====================================================== ==============
    epoch               epochs done
    train_nll           mean loss of the watched training examples, nats       worse
    train_accuracy      their accuracy                                         better
    loo_nll             mean left-out loss: the estimate of test_nll           worse
    loo_accuracy        of the left-out predictions; NaN for regression        better
    test_nll            mean loss of the test task; NaN without one            worse
    test_accuracy       its accuracy                                           better
    mean_deviation      mean over the watched examples
    mean_self_influence mean g_iᵀΣg_i, nats
    max_leverage        largest eigenvalue of V_iΛ_i over all examples; if it
                        is 1 or more, the posterior overstates V_i
    seconds             the time of the recording
    =================== ====================================================== ==============

    :func:`blr_analysis.gradient_mismatch` has one per merge and task:

    ===================== ==================================================== =============
    column                what                                                 more is
    ===================== ==================================================== =============
    merge, task           their names
    n_data                N_t, examples of the task
    mismatch              ‖∇ℓ̄_t(θ_merged) − ∇ℓ̄_t(θ_t)‖                         worse
    mismatch_per_example  the mismatch divided by N_t                          worse
    mismatch_in_metric    √(Σ v²/S_t) of the same difference v, √nats; S_t is  worse
                          H_t, with the prior of a posterior; NaN without H_t
    gradient_own          ‖∇ℓ̄_t(θ_t)‖: 0 at an optimum without a prior
    gradient_merged       ‖∇ℓ̄_t(θ_merged)‖
    distance              ‖θ_merged − θ_t‖, over the trainable parameters
    gap                   ℓ̄_t(θ_merged) − ℓ̄_t(θ_t), nats, a sum over the task  worse
    gap_per_example       the gap divided by N_t                               worse
    gap_by_gradient       the gap if ℓ̄_t were quadratic between the two
    gap_by_precision      the gap that H_t predicts; NaN without H_t
    nll_own, nll_merged   mean loss at θ_t and at θ_merged, nats               worse
    accuracy_own, …       fraction right at θ_t and (accuracy_merged) at       better
                          θ_merged; NaN for regression
    test_nll_own, …       test_nll_merged, test_accuracy_own and
                          test_accuracy_merged: on held-out data; NaN without
    ===================== ==================================================== =============

    :func:`blr_analysis.select_prior_precision` has one per δ, in rising order.

    :func:`blr_analysis.validate` has one per method, the best first, and one for the ceiling:

    ========== =============================================================== ============
    column     what                                                            more is
    ========== =============================================================== ============
    method     its name; "ceiling" is the score that the noise of retraining
               allows
    score      linear datamodeling score: rank correlation with retraining     better
    low, high  a range that should hold it in four of five cases
    of_ceiling score / ceiling; NaN for a single seed
    ========== =============================================================== ============
    """
    return pd.DataFrame(list(result.rows))


def _merge_curve(curve: Any) -> pd.DataFrame:
    """One row per method and set of weights, of :func:`blr_analysis.merge_curve`.

    ===================== ==================================================== =============
    column                what                                                 more is
    ===================== ==================================================== =============
    method                the method of merging
    weight                α if all models have the same one, else NaN
    weight_<model>        α_t of each model
    nll                   mean over the tasks of their mean losses, nats;      worse
                          infinite where the merge could not be run
    accuracy              mean over the tasks that have one; NaN without       better
    nll_<task>            mean loss on each validation task, nats per example  worse
    accuracy_<task>       fraction right; NaN for regression                   better
    failure               why the merge could not be run; "" if it was run
    best                  whether this row is ``curve.best``
    ===================== ==================================================== =============
    """
    rows = []
    for point in curve.points:
        is_shared = len(set(point.weights)) == 1
        row = {"method": point.method, "weight": point.weights[0] if is_shared else float("nan")}
        for model, weight in zip(curve.models, point.weights, strict=True):
            row[f"weight_{model}"] = weight
        row["nll"] = point.nll
        row["accuracy"] = point.accuracy
        for task, nll in zip(curve.tasks, point.nlls, strict=True):
            row[f"nll_{task}"] = nll
        for task, accuracy in zip(curve.tasks, point.accuracies, strict=True):
            row[f"accuracy_{task}"] = accuracy
        row["failure"] = point.failure
        row["best"] = point is curve.best
        rows.append(row)
    return pd.DataFrame(rows)


def rule_table(table: Any) -> pd.DataFrame:
    """The rows of :data:`blr_analysis.learning_rule.table.ROWS`; see :func:`blr_analysis.table1`.

    ============== ===========================================================================
    column         what
    ============== ===========================================================================
    algorithm      its name
    family         of the posterior q
    loss           the point or points at which the loss is evaluated
    hessian        the approximation of the Hessian
    departures     named departures of the step from the rule; "" without any
    approximations all of these in the words of Khan & Rue's Table 1
    section        of Khan & Rue, or another source
    analysable     whether its posterior can be analysed (sensitivity, leave-one-out, merging)
    through        the function that returns this posterior; "" without one
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


def _topics(topics: Any) -> pd.DataFrame:
    """One row per topic and word, the most probable word first.

    The columns are topic (from 0), rank (from 1), word and probability (E[β_kw]).
    """
    columns = {"word": topics.words, "probability": topics.probabilities}
    table = pd.DataFrame(columns).explode([*columns]).rename_axis("topic").reset_index()
    table.insert(1, "rank", table.groupby("topic").cumcount() + 1)
    return table.astype({"probability": float})


# The function that makes the table of a result, by the name of the result's class or of a base.
TABLES = {
    "PerExample": example_table,
    "Predictions": example_table,
    "MemoryMap": _memory_map,
    "Suspicions": _suspicions,
    "Fitted": _fitted,
    "Matches": _matches,
    "Influence": _strongest,
    "GroupInfluence": _group_influence,
    "ByClass": _by_class,
    "GroupRows": _removed_groups,
    "Monitor": _rows,
    "PriorSelection": _rows,
    "GradientMismatch": _rows,
    "MergeCurve": _merge_curve,
    "Validation": _rows,
    "Table1": rule_table,
    "TopicWords": _topics,
}


# Files: CSV for eyes and spreadsheets, Parquet for programs


def write_table(table: pd.DataFrame, folder: str | Path, stem: str) -> tuple[Path, Path]:
    """Write ``folder/stem.csv`` and ``folder/stem.parquet``, both whole or neither.

    Both are written beside their targets and renamed into place. Parquet keeps every dtype; CSV is
    for eyes and spreadsheets. Parquet cannot hold a column of mixed types: such a column is written
    as text, with a warning.

    Returns:
        The two paths.

    Raises:
        StorageError: the folder cannot be made or written.
    """
    csv = Path(folder, f"{stem}.csv")
    parquet = Path(folder, f"{stem}.parquet")
    with drafted(csv) as csv_draft, drafted(parquet) as parquet_draft:
        table.to_csv(csv_draft, index=False)
        try:
            table.to_parquet(parquet_draft, index=False)
        except pyarrow.ArrowException:
            columns = list(table.select_dtypes(object))
            warnings.warn(
                f"some of the columns {columns} mix types: they are text in Parquet", stacklevel=2
            )
            as_text = table.copy()
            as_text[columns] = table[columns].astype(str)
            as_text.to_parquet(parquet_draft, index=False)
    return csv, parquet
