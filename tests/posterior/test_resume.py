"""A fit that was ended goes on where it was, and comes to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_lm import sequences, task_of, tiny_lm
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.backprop.engine import chunks
from blr_analysis.backprop.inputs import InputMoments, swept
from blr_analysis.files import storage
from blr_analysis.posterior.fit import Fit

N = 10
BATCH = 2


class Killed(Exception):
    """Ends a fit."""


@pytest.fixture(autouse=True)
def _every_batch_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MIN_INTERVAL", 0.0)
    monkeypatch.setattr(storage, "MIN_WRITINGS", 0.0)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_a_fit_that_was_ended_comes_to_the_same_bits(
    structure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was ended: curvature, prior precision and distance from the minimum."""
    task = task_of(tiny_lm(), sequences(9), batch_size=2)
    whole = blr.fit_laplace(task, structure=structure)
    true_columns = Fit._columns_of
    n_chunks = 0
    n_ends = 0

    def columns_of_four_chunks(*args: Any) -> Any:
        nonlocal n_chunks
        n_chunks += 1
        if n_chunks % 5 == 0:
            raise Killed
        return true_columns(*args)

    monkeypatch.setattr(Fit, "_columns_of", columns_of_four_chunks)
    unfinished = tmp_path / "unfinished"
    posterior = None
    while posterior is None and n_ends < 50:
        try:
            posterior = blr.fit_laplace(task, structure=structure, unfinished=unfinished)
        except Killed:
            n_ends += 1
    assert posterior is not None
    assert n_ends > 2
    for name, diagonal in whole.form.diagonal().items():
        assert torch.equal(posterior.form.diagonal()[name], diagonal)
    assert posterior.prior_precision == whole.prior_precision
    assert posterior.stationarity == whole.stationarity

    monkeypatch.setattr(Fit, "_columns_of", lambda *_: 1 / 0)
    stored = blr.fit_laplace(task, structure=structure, unfinished=unfinished)  # is read
    for name, diagonal in whole.form.diagonal().items():
        assert torch.equal(stored.form.diagonal()[name], diagonal)
    shortened = task.subset(list(range(task.n_data - 1)))
    with pytest.raises(ZeroDivisionError):
        blr.fit_laplace(shortened, structure=structure, unfinished=unfinished)


@dataclass
class Ending(storage.Unfinished):
    """Ends a sweep once its sums hold so many batches; None: never."""

    end: int | None = None
    n_followed: int = 0

    def follow(self, sums: Mapping[str, Tensor]) -> None:
        super().follow(sums)
        self.n_followed += 1
        if self.done == self.end:
            raise Killed


def one_hot_task() -> blr.Task:
    """Example i is the i-th unit vector, so that Σ a aᵀ has the number of its visits at (i, i)."""
    model = nn.Linear(N, 2, bias=False).double()
    data = (torch.eye(N, dtype=torch.float64), torch.arange(N) % 2)
    return blr.Task(model, data, batch_size=BATCH, progress=False)


def visits_of_examples(unfinished: Ending) -> Tensor:
    """How often a sweep over examples adds each of them, ``[N]``."""
    task = one_hot_task()
    visits = torch.zeros(N)
    for chunk in chunks(task, task.parameters(), size=BATCH, unfinished=unfinished):
        visits[chunk.indices] += 1
        unfinished.follow({"visits": visits})
    return visits


def visits_of_inputs(unfinished: Ending) -> Tensor:
    """The same of a sweep over the layers' inputs."""
    task = one_hot_task()
    sums = swept(task, task.parameters(), InputMoments(), unfinished=unfinished)
    _, moments = sums.moments["weight"]
    return moments[0].diagonal().float()


@pytest.mark.parametrize("ends", [[1], [2], [4], [2, 3], [2, 4]])
@pytest.mark.parametrize("visits_of", [visits_of_examples, visits_of_inputs])
def test_no_batch_is_left_out_or_added_twice(
    visits_of: Callable[[Ending], Tensor], ends: list[int], tmp_path: Path
) -> None:
    """The first batch of a resumed sweep reads the file, and the number of batches that are done
    rises to the file's; the batches up to it are left out."""
    file = tmp_path / "sums"
    for end in ends:
        with pytest.raises(Killed):
            visits_of(Ending(file, "key", end=end))
    resumed = Ending(file, "key")
    visits = visits_of(resumed)
    assert visits.tolist() == [1.0] * N
    n_batches = N // BATCH
    assert resumed.done == n_batches
    n_left = n_batches - ends[-1]
    assert resumed.n_followed == 1 + n_left


def test_a_gram_that_was_ended_goes_on_at_the_batch_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(tiny_lm(), sequences(9), batch_size=2)
    whole = blr.fit_laplace(task, structure="gram")
    true_begin = InputMoments.begin
    n_batches = 0

    def begin_of_three_batches(sums: InputMoments) -> None:
        nonlocal n_batches
        n_batches += 1
        if n_batches == 4:
            raise Killed
        true_begin(sums)

    monkeypatch.setattr(InputMoments, "begin", begin_of_three_batches)
    unfinished = tmp_path / "unfinished"
    with pytest.raises(Killed):
        blr.fit_laplace(task, structure="gram", unfinished=unfinished)
    n_batches = 10
    posterior = blr.fit_laplace(task, structure="gram", unfinished=unfinished)
    assert n_batches - 10 < 5  # a sweep from the start has five batches
    for name, diagonal in whole.form.diagonal().items():
        assert torch.equal(posterior.form.diagonal()[name], diagonal)
