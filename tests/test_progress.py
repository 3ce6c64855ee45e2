"""What long work says of itself: what is left of it, on a terminal or in the log."""

from __future__ import annotations

import logging

import pytest
import torch

import blr_analysis as blr
from blr_analysis import progress


@pytest.fixture
def everything_is_long(monkeypatch):
    monkeypatch.setattr(progress, "GLANCE", -1.0)
    monkeypatch.setattr(progress, "LONG", 0.0)


def test_the_log_says_once_what_is_left(caplog, monkeypatch, everything_is_long):
    clock = iter([100.0, 103.0])
    monkeypatch.setattr(progress, "perf_counter", lambda: next(clock))
    with caplog.at_level(logging.INFO, logger="blr_analysis"):
        assert list(progress.track("abcdefghij", total=10, label="letters")) == [*"abcdefghij"]
    assert caplog.messages == ["letters: about 00:27 more (1 of 10 done)"]


def test_short_work_and_progress_false_say_nothing(caplog, capsys, everything_is_long):
    with caplog.at_level(logging.INFO, logger="blr_analysis"):
        list(progress.track(range(10), total=10, show=False))
        list(progress.track([1], total=1))
    assert not caplog.messages and not capsys.readouterr().err


def test_a_bar_counts_and_shows_what_is_left(capsys):
    with progress.bar(4, "steps", True) as shown:
        shown.update(3)
        shown.refresh()
    assert "steps:  75%" in capsys.readouterr().err


def test_short_trainings_of_a_what_if_tell_their_steps(caplog, everything_is_long):
    X = torch.randn(60, 3)
    recipe = blr.Recipe("sgd", lr=0.1, epochs=2, batch_size=20)
    task = blr.Task(torch.nn.Linear(3, 2), (X, (X[:, 0] > 0).long()), recipe=recipe)
    q = blr.fit_laplace(task.quiet)
    with caplog.at_level(logging.INFO, logger="blr_analysis"):
        blr.what_if(task, q, remove=[0, 1, 2], solver="replay", seeds=1)
    assert any(said.startswith("what if: short trainings: about") for said in caplog.messages)
