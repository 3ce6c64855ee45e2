"""What long work says of itself: what is left of it, on a terminal or in the log."""

from __future__ import annotations

import logging

import pytest
from commands import run

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


TASK = """
import torch, blr_analysis as blr

def task():
    torch.manual_seed(0)
    X = torch.randn(60, 3)
    y = (X[:, 0] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(X), y).backward()
        optimizer.step()
    return blr.Task(model, (X, y))
"""


def test_short_trainings_of_a_what_if_tell_their_steps(tmp_path, capsys, everything_is_long):
    script = tmp_path / "script.py"
    script.write_text(TASK)
    asked = ("what-if", f"{script}:task", "--fit", "kron", "--remove", "0,1,2")
    code, _, said = run(capsys, *asked, "--solver", "replay")
    starts = {line.partition(": about")[0] for line in said.splitlines()}
    assert (
        code == 0
        and {
            "short trainings on all data",
            "what if: a short training without",
        }
        <= starts
    )
    assert not logging.getLogger("blr_analysis").handlers
