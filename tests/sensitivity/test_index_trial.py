"""What a dry run says of an index: the work of a trial, by how much more the index visits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_lm import sequences, task_of, tiny_lm

import blr_analysis as blr
from blr_analysis import progress
from blr_analysis.backprop.engine import Chunk
from blr_analysis.posterior import fit_examples, forecast
from blr_analysis.sensitivity.index import trial
from blr_analysis.sensitivity.index.build import PROBE_COLUMNS, PROBE_ROWS, measured_error
from blr_analysis.sensitivity.index.projection import Projection
from blr_analysis.sensitivity.index.sketch import Sketch

N = 300
RANK = 60
PROMISED = 0.3  # relative error of a forecast


def fitted(task: blr.Task) -> blr.Posterior:
    return blr.fit_laplace(task, structure="kron", curvature="mc_fisher", sampled=True)


def fitted_examples(task: blr.Task) -> int:
    return fit_examples(task, "kron", chooses_prior=True, sampled=True)


class Clock:
    """Moves on by a second for each example whose gradient is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        true_terms = Chunk.terms

        def terms(chunk: Chunk, *args: object, **options: object) -> object:
            self.seconds += len(chunk.indices)
            return true_terms(chunk, *args, **options)  # type: ignore[arg-type]

        clock = SimpleNamespace(perf_counter=lambda: self.seconds, monotonic=lambda: self.seconds)
        monkeypatch.setattr(Chunk, "terms", terms)
        monkeypatch.setattr(trial, "time", clock)
        monkeypatch.setattr(progress, "time", clock)


def test_seconds_and_bytes_are_those_of_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(tiny_lm(tied=True), sequences(N))
    clock = Clock(monkeypatch)
    monkeypatch.setattr(trial, "_size_of_first_chunk", lambda task: 1)
    cost = trial.build_forecast(task, RANK, fitted, fitted_examples, structure="kron")
    clock.seconds = 0.0
    blr.Index.build(task, fitted(task), tmp_path / "index", rank=RANK)
    assert cost.seconds == pytest.approx(clock.seconds, rel=PROMISED)
    folder = tmp_path / "index"
    on_disk = sum(file.stat().st_size for file in folder.iterdir())
    headers = 50_000  # of files for so few numbers, the record and the table
    assert cost.disk < on_disk < cost.disk + headers


def test_the_error_takes_one_gradient_of_each_example(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(tiny_lm(tied=True), sequences(60))
    projection = Projection(task, Sketch.of(fitted(task), RANK))
    clock = Clock(monkeypatch)
    measured_error(projection, torch.int8)
    assert clock.seconds == trial.measured_examples(60) == PROBE_ROWS + PROBE_COLUMNS


def test_long_texts_are_timed_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and last texts, by which chunks are cut, are short: a dry run takes no more memory
    than the run."""
    rows = [{"input_ids": row, "labels": row} for row in sequences(40)]
    for place in (0, 20, 39):
        rows[place] = {name: ids[:2] for name, ids in rows[place].items()}
    task = blr.Task(tiny_lm(tied=True), rows, likelihood="causal_lm")
    sizes: list[int] = []
    true_terms = Chunk.terms

    def terms(chunk: Chunk, *args: Any, **options: Any) -> Any:
        sizes.append(len(chunk.indices))
        return true_terms(chunk, *args, **options)

    monkeypatch.setattr(Chunk, "terms", terms)
    forecast.sweep_seconds(task, task.parameters())
    assert sum(sizes) >= 2 * forecast.EXAMPLES_TIMED
    assert max(sizes) < forecast.EXAMPLES_TIMED


def test_a_saved_posterior_is_not_fitted(tmp_path: Path) -> None:
    task = task_of(tiny_lm(tied=True), sequences(40))
    saved = fitted(task)
    cost = trial.build_forecast(
        task, RANK, lambda task: saved.on(task, same_data=False), lambda task: 0, structure=""
    )
    assert cost.passes == (40 + trial.measured_examples(40)) / 40
    assert torch.isfinite(torch.tensor(cost.seconds))


def test_factors_that_do_not_fit_into_the_memory_are_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = task_of(tiny_lm(tied=True), sequences(40))
    monkeypatch.setattr(trial, "memory_of", lambda device: 1)

    def unexpected(task: blr.Task) -> blr.Posterior:
        raise AssertionError("fitted")

    cost = trial.build_forecast(task, RANK, unexpected, fitted_examples, structure="kron")
    assert cost.memory > 1
    assert cost.seconds > 0
