"""Every result, as the last line of a notebook's cell, shows a table or a picture."""

from __future__ import annotations

import base64
import re
from functools import cache
from typing import Any

import pytest
import torch
from tiny_lm import TinyLM
from torch import nn

import blr_analysis as blr
from blr_analysis.audit import investigate
from blr_analysis.learning_rule.families import FullGaussian
from blr_analysis.learning_rule.inference import Conjugate, linear
from blr_analysis.sensitivity import token_sensitivity

N = 24


@cache
def problem() -> tuple[blr.Task, blr.Task, blr.Posterior]:
    torch.manual_seed(0)
    X, y = torch.randn(N, 3), torch.arange(N) % 2
    X[:, 0] += 2 * y
    model = nn.Linear(3, 2)
    task = blr.Task(model, (X, y))
    q = blr.fit_laplace(task, prior_precision=1.0)
    return task, blr.Task(model, (X[:6] + 0.1, y[:6])), q


@cache
def language() -> tuple[blr.Task, blr.Posterior]:
    ids = torch.randint(7, (6, 5), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    loader = torch.utils.data.DataLoader(rows, batch_size=3)
    task = blr.Task(TinyLM(), loader, likelihood="causal_lm")
    how: dict[str, Any] = {"structure": "diag", "curvature": "empirical_fisher"}
    return task, blr.fit_laplace(task, prior_precision=1.0, **how)


def monitor() -> blr.Monitor:
    task, test, q = problem()
    watching = blr.Monitor(task, test=test)
    watching(q, 1)
    return watching


def fitted() -> Any:
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 3.0])
    return Conjugate(FullGaussian(torch.zeros(1), torch.eye(1)), linear(1.0)).fit((x, y))


def regression(weight: Any) -> tuple[blr.Task, dict[str, torch.Tensor]]:
    data = torch.eye(2), torch.tensor([1.0, 2.0])
    task = blr.Task(nn.Linear(2, 1, bias=False), data, likelihood="gaussian")
    return task, {"weight": torch.tensor([weight])}


def curve() -> Any:
    models = [regression([1.0, 0.0])[1], regression([0.0, 2.0])[1]]
    task, base = regression([0.0, 0.0])
    return blr.merge_curve(base, models, task, method="task_arithmetic", weights=[0.5, 1.0])


TABLES = {
    "scores": lambda t, v, q: blr.sensitivity(t, q),
    "leave-one-out": lambda t, v, q: blr.leave_one_out(t, q),
    "memory map": lambda t, v, q: blr.memory_map(blr.sensitivity(t, q)),
    "suspicions": lambda t, v, q: blr.suspicious(t, q),
    "top influence": lambda t, v, q: blr.influence(t, q, v, k=2),
    "group influence": lambda t, v, q: blr.influence(t, q, v).group(),
    "groups": lambda t, v, q: blr.what_if_each(t, q, by="target", evaluate=v),
    "findings": lambda t, v, q: investigate(t, q, test=v, by=None),
    "prior": lambda t, v, q: blr.select_prior_precision(t, [0.1, 1.0]),
    "predictions": lambda t, v, q: q.predict(v, draws=2),
    "sequences": lambda *_: blr.sensitivity(*language()),
    "sequences left out": lambda *_: blr.leave_one_out(*language()),
    "tokens": lambda *_: token_sensitivity(*language()),
    "probabilistic model": lambda *_: fitted(),
    "merge curve": lambda *_: curve(),
    "mismatch": lambda *_: blr.gradient_mismatch(
        regression([0.0, 0.0])[0], regression([1.0, 2.0])[1], models=[regression([1.0, 0.0])[1]]
    ),
    "Table 1": lambda *_: blr.table1(),
}
PICTURES = {
    "what-if": lambda t, v, q: blr.what_if(t, q, remove=[1, 2], evaluate=v),
    "monitor": lambda *_: monitor(),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table(name: str) -> None:
    shown = TABLES[name](*problem())._repr_html_()
    assert shown.count("<tr") > 1 and "<td" in shown and "tensor(" not in shown


@pytest.mark.parametrize("name", PICTURES)
def test_a_line_and_a_picture(name: str) -> None:
    result = PICTURES[name](*problem())
    shown = result._repr_html_()
    assert type(result).__name__ in shown
    (data,) = re.findall(r'<img src="data:image/png;base64,([^"]+)">', shown)
    assert base64.b64decode(data).startswith(b"\x89PNG")


def test_the_matrix_of_influences_is_a_line() -> None:
    task, test, q = problem()
    assert "24 training × 6 test examples" in blr.influence(task, q, test)._repr_html_()


def test_what_has_nothing_to_draw_yet_is_its_line() -> None:
    assert blr.Monitor(problem()[0])._repr_html_() is None
