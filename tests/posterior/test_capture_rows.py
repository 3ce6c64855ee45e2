"""Posteriors of the rule's optimizers, live and saved, each in its own scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim import (
    BSAM,
    IVON,
    OGN,
    VOGN,
    Newton,
    RowOptimizer,
    Vadam,
    Vprop,
)
from blr_analysis.posterior import Posterior

N, DECAY = 30, 0.1
SETTINGS: dict[str, Any] = {"lr": 0.01, "ess": N, "weight_decay": DECAY}

LEARNED: dict[str, Callable[[nn.Module], Any]] = {
    "vogn": lambda m: VOGN(m.parameters(), model=m, **SETTINGS),
    "ogn": lambda m: OGN(m.parameters(), model=m, **SETTINGS),
    "vadam": lambda m: Vadam(m.parameters(), **SETTINGS),
    "vprop": lambda m: Vprop(m.parameters(), **SETTINGS),
    "bsam": lambda m: BSAM(m.parameters(), **SETTINGS),
    "ivon": lambda m: IVON(m.parameters(), **SETTINGS),
}
IVONS_ROW = {"ivon row": lambda m: RowOptimizer(m.parameters(), "IVON", hess_init=1.0, **SETTINGS)}


def trained(make: Callable[[nn.Module], Any], steps: int = 5) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(N, 4), torch.randint(3, (N,))
    optimizer = make(model)
    for _ in range(steps):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        if isinstance(optimizer, BSAM):
            with optimizer.adversarial_params():
                F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


def by_definition(name: str, hess: Tensor) -> Tensor:
    """S as each paper has it, of the s in the optimizer's state."""
    if name == "bsam":
        s = hess + DECAY  # the paper's s includes the prior's share
        return N * s
    return N * hess + N * DECAY  # N s + λ


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("name", [*LEARNED, *IVONS_ROW])
def test_each_in_its_own_scale(name: str, saved: bool, tmp_path: Path) -> None:
    model, optimizer = trained({**LEARNED, **IVONS_ROW}[name])
    if saved:
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        q = Posterior.from_checkpoint(tmp_path / "state.pt", model)
    else:
        q = Posterior.from_optimizer(optimizer, model)
    assert q.n_data == N and q.prior_precision == pytest.approx(N * DECAY)
    assert q.record["kind"] == name.removesuffix(" row")
    for parameter, p in model.named_parameters():
        expected = by_definition(name, optimizer.state[p]["hess"])
        torch.testing.assert_close(q.precision(parameter), expected, rtol=1e-6, atol=0)
        assert (expected > N * DECAY).any()
        assert torch.equal(q.mean[parameter], p.detach())


@pytest.mark.parametrize("name", LEARNED)
def test_the_posterior_is_the_one_that_weights_are_drawn_from(name: str) -> None:
    model, optimizer = trained(LEARNED[name])
    weight = model[0].weight
    draws = []
    for _ in range(1500):
        with optimizer.sampled_params():
            draws.append(weight.detach().clone())
    q = Posterior.from_optimizer(optimizer, model)
    ratio = torch.stack(draws).var(0) / q.variance("0.weight")
    assert (ratio - 1).abs().max() < 5 * (2 / 1500) ** 0.5


def test_squares_of_adams_row_are_read_as_torchs(tmp_path: Path) -> None:
    pairs = {
        "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.999),
    }
    for name, make in pairs.items():
        model, ours = trained(lambda m, name=name: RowOptimizer(m.parameters(), name, lr=0.01))
        torch.manual_seed(0)
        other = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        x, y = torch.randn(N, 4), torch.randint(3, (N,))
        theirs = make(other.parameters())
        for _ in range(5):
            theirs.zero_grad()
            F.cross_entropy(other(x), y).backward()
            theirs.step()
        settings = {"n_data": N, "prior_precision": 2.0}
        torch.save(ours.state_dict(), tmp_path / f"{name}.pt")
        expected = Posterior.from_optimizer(theirs, other, **settings)
        for q in (
            Posterior.from_optimizer(ours, model, **settings),
            Posterior.from_checkpoint(tmp_path / f"{name}.pt", model, **settings),
        ):
            assert q.record["kind"] == expected.record["kind"]
            for key in expected.mean:
                torch.testing.assert_close(
                    q.precision(key), expected.precision(key), rtol=1e-4, atol=1e-5
                )


@pytest.mark.parametrize("name", ["gradient descent", "SGD", "SGD with momentum"])
def test_rows_without_a_precision(name: str, tmp_path: Path) -> None:
    model, optimizer = trained(lambda m: RowOptimizer(m.parameters(), name, lr=0.1))
    with pytest.raises(OptimizerError, match=f"{name} keeps no diagonal precision.*fit_laplace"):
        Posterior.from_optimizer(optimizer, model, n_data=N, prior_precision=1.0)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    with pytest.raises(OptimizerError, match=f"{name} keeps no diagonal precision"):
        Posterior.from_checkpoint(tmp_path / "state.pt", model, n_data=N, prior_precision=1.0)


def test_newton_keeps_a_matrix() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(OptimizerError, match="Newton keeps no diagonal precision"):
        Posterior.from_optimizer(Newton(model.parameters()), model)
