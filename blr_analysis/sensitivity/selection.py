"""Which examples are meant: a mask, indices, or a question asked of the table's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.engine import predict
from blr_analysis.errors import InputError
from blr_analysis.posterior.gaussian import Posterior
from blr_analysis.sensitivity.scores import sensitivity
from blr_analysis.task import Task

Selection = Any  # boolean mask [N] | indices | (row) -> bool


class Columns:
    """The table's columns, each computed when first asked for."""

    CHEAP = ("index", "target", "prediction", "loss")
    SCORED = ("error", "variance", "deviation", "self_influence")

    def __init__(self, task: Task, posterior: Posterior) -> None:
        self._task, self._posterior = task, posterior
        self._known: dict[str, Sequence[Any]] = {
            name if name not in (*self.CHEAP, *self.SCORED) else f"{name}_metadata": column
            for name, column in task.metadata.items()
        }

    def __getitem__(self, name: str) -> Sequence[Any]:
        if name not in self._known:
            if name in self.CHEAP:
                self._predict()
            elif name in self.SCORED:
                self._score()
            else:
                raise InputError(
                    f"the table has no column {name!r}; it has "
                    f"{[*self.CHEAP, *self.SCORED, *self._known]}"
                )
        return self._known[name]

    def _predict(self) -> None:
        likelihood = self._task.likelihood
        outputs, targets = predict(self._task, self._posterior.mean)
        if targets.ndim > 1 and targets.shape[-1] == 1:
            targets = targets.squeeze(-1)
        self._known.update(
            index=range(self._task.n_data),
            target=targets.tolist(),
            prediction=likelihood.prediction(outputs).tolist(),
        )
        self._known["loss"] = likelihood.nll(
            outputs, likelihood.prepare_targets(targets, outputs)
        ).tolist()

    def _score(self) -> None:
        scores = sensitivity(self._task, self._posterior)
        norm = torch.linalg.vector_norm(scores.error, dim=-1)
        self._known["error"] = norm.tolist()
        self._known["self_influence"] = scores.self_influence.tolist()
        nothing = [float("nan")] * len(scores)
        v, d = scores.variance, scores.deviation
        trace = nothing if v is None else v.diagonal(dim1=-2, dim2=-1).sum(-1).tolist()
        self._known["variance"] = trace
        self._known["deviation"] = nothing if d is None else d.tolist()


class Row(Mapping[str, Any]):
    """One row of the table: ``row.target`` or ``row["target"]``."""

    def __init__(self, columns: Columns, index: int) -> None:
        self._columns, self._index = columns, index

    def __getitem__(self, name: str) -> Any:
        return self._columns[name][self._index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._columns[name][self._index]

    def __iter__(self) -> Iterator[str]:
        return iter((*Columns.CHEAP, *Columns.SCORED, *self._columns._known))

    def __len__(self) -> int:
        return len(list(iter(self)))


def select(
    selection: Selection, task: Task, posterior: Posterior, *, name: str = "remove"
) -> Tensor:
    """The indices that are meant, sorted, ``[M]`` long.

    Raises:
        InputError: a mask of another length, indices that repeat or lie outside the data,
            something that is neither, or a selection of nothing.
    """
    n = task.n_data
    if callable(selection):
        chosen = _asked(selection, Columns(task, posterior), n, name)
    else:
        if hasattr(selection, "to_numpy"):
            selection = selection.to_numpy()
        try:
            values = torch.as_tensor(
                list(selection) if isinstance(selection, (range, set)) else selection
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"{name} must be a boolean mask, indices, or a function of a row, got "
                f"{type(selection).__name__}"
            ) from error
        values = values.reshape(1) if values.ndim == 0 else values
        if values.ndim != 1:
            raise InputError(f"{name} must be one-dimensional, got shape {tuple(values.shape)}")
        if values.dtype == torch.bool:
            if len(values) != n:
                raise InputError(f"the mask {name} has {len(values)} entries for {n} examples")
            chosen = values.nonzero().flatten()
        elif len(values) and (values.is_floating_point() or values.is_complex()):
            raise InputError(f"{name} must hold booleans or integer indices, got {values.dtype}")
        else:
            chosen = values.long()
    if len(chosen) == 0:
        raise InputError(f"{name} selects none of the {n} examples")
    if int(chosen.min()) < 0 or int(chosen.max()) >= n:
        bad = int(chosen.min()) if int(chosen.min()) < 0 else int(chosen.max())
        raise InputError(f"{name} names example {bad}, but the examples are 0 … {n - 1}")
    chosen = chosen.cpu().sort().values
    if bool((chosen.diff() == 0).any()):
        twice = int(chosen[1:][chosen.diff() == 0][0])
        raise InputError(f"{name} names example {twice} more than once")
    return chosen


def _asked(question: Callable[[Row], Any], columns: Columns, n: int, name: str) -> Tensor:
    answers = []
    for i in range(n):
        answer = question(Row(columns, i))
        try:
            answers.append(bool(answer))
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"the function {name} must answer true or false for a row, got {answer!r}"
            ) from error
    return torch.tensor(answers, dtype=torch.bool).nonzero().flatten()


def groups_by(by: str, task: Task, posterior: Posterior) -> dict[Any, Tensor]:
    """Indices of the examples that share a value of a column, by value in sorted order."""
    column = Columns(task, posterior)[by]
    found: dict[Any, list[int]] = {}
    for i, value in enumerate(column):
        if isinstance(value, list):
            raise InputError(f"column {by!r} holds several values per example; group by another")
        found.setdefault(value.item() if hasattr(value, "item") else value, []).append(i)
    try:
        keys = sorted(found)
    except TypeError:
        keys = sorted(found, key=str)
    return {key: torch.tensor(found[key]) for key in keys}
