"""What a posterior covers of a model, and which parameters no gradient reaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import blr_analysis as blr

DATA = (torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2)


class Branches(nn.Module):
    """A layer that runs, and one that never does."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.idle = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) if len(x) else self.idle(x)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_a_layer_that_never_runs_is_named(structure: str, tmp_path: Path) -> None:
    q = blr.fit_laplace(blr.Task(Branches(), DATA), structure=structure, prior_precision=1.0)
    assert sorted(q.record["unreached"]) == ["idle.bias", "idle.weight"]
    assert "no gradient reaches 'idle" in q.note
    q.save(tmp_path / "q.safetensors")
    assert blr.Posterior.load(tmp_path / "q.safetensors").note == q.note


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_a_model_whose_layers_all_run_has_no_such_note(structure: str) -> None:
    q = blr.fit_laplace(blr.Task(nn.Linear(3, 2), DATA), structure=structure, prior_precision=1.0)
    assert "unreached" not in q.record
    assert "reaches" not in repr(q)


def test_the_share_of_the_parameters_is_said(tmp_path: Path) -> None:
    """By the posterior, of a fit or an optimizer, and in the record of an index."""
    model: Any = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    task = blr.Task(model, DATA)
    words = "12 of 32 parameters (37.5%)"
    q = blr.fit_laplace(task, structure="kron", prior_precision=1.0)
    assert q.coverage == words
    assert words in repr(q)
    index = blr.Index.build(task, q, tmp_path / "index")
    assert index._store.config["coverage"] == words
    optimizer = torch.optim.Adam(model[2].parameters())
    nn.functional.cross_entropy(model(DATA[0]), DATA[1]).backward()
    optimizer.step()
    captured = blr.Posterior.from_optimizer(optimizer, model, n_data=20, prior_precision=1.0)
    assert captured.coverage == words


def test_a_posterior_without_a_model_says_what_it_holds() -> None:
    mean = {"w": torch.zeros(3)}
    q = blr.Posterior(mean, {"w": torch.ones(3)}, prior_precision=1.0, n_data=1)
    assert q.coverage == "3 parameters"
