"""Table 1: every row of the paper, and the code that it names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.learning_rule import optim
from blr_analysis.learning_rule.expectations import (
    AT_MEAN,
    AT_SAMPLES,
    places,
)
from blr_analysis.learning_rule.families import DiagonalGaussian, FullGaussian
from blr_analysis.learning_rule.inference import MultimodalOptimisation
from blr_analysis.learning_rule.moves import Block, Move, step
from blr_analysis.learning_rule.optim import RowOptimizer
from blr_analysis.learning_rule.table import ROWS, row

# Khan & Rue's Table 1: algorithm → words of its posterior, words of its approximations, section.
PAPER = {
    "gradient descent": ("Gaussian fixed", "delta", "1.3.1"),
    "Newton": ("Gaussian", "delta", "1.3.2"),
    "multimodal optimisation": ("mixture Gaussians", "delta", "3.2"),
    "SGD": ("Gaussian fixed", "delta stochastic", "4.1"),
    "RMSprop": ("Gaussian diagonal", "delta stochastic Hessian square-root slow-moving", "4.2"),
    "Adam": ("Gaussian diagonal", "delta stochastic Hessian square-root slow-moving", "4.2"),
    "dropout": ("mixture Gaussians", "delta stochastic responsibility", "4.3"),
    "STE": ("Bernoulli", "delta stochastic", "4.5"),
    "OGN": ("Gaussian diagonal", "delta stochastic Gauss–Newton no square-root", "4.4"),
    "VOGN": ("Gaussian diagonal", "without delta OGN", "4.4"),
    "BayesBiNN": ("Bernoulli", "without delta STE", "4.5"),
    "conjugate Bayes": ("exponential family", "learning rate 1", "5.1"),
    "Laplace": ("Gaussian", "delta", "4.4"),
    "EM": ("exponential family Gaussian", "delta parameters", "5.2"),
    "SVI": ("exponential family mean field", "stochastic local learning rate 1", "5.3"),
    "VMP": ("exponential family mean field", "learning rate 1 all nodes", "5.3"),
    "non-conjugate VMP": ("exponential family mean field", "learning rate 1 all nodes", "5.3"),
    "non-conjugate VI": ("mixture exponential family", "none", "5.4"),
}
BEYOND = {
    "mirror descent",
    "natural momentum",
    "any family, any loss",
    "preconditioned SGD",
    "diagonal online Newton",
    "dropout, rate learned",
    "SAM",
    "ridge regression",
    "SGD with momentum",
    "AdaGrad",
    "AdaDelta",
    "AdamW",
    "Kalman filter",
    "Vprop",
    "Vadam",
    "IVON",
    "IVON, mixture",
    "noisy K-FAC",
    "SLANG",
    "OGGN",
    "VOGGN",
    "bSAM",
    "factor analysis, PPCA",
    "online EM",
    "message passing",
    "hidden Markov model",
    "sparse Gaussian process",
    "exponential weights",
    "online Newton",
    "natural-gradient MLE",
}


def test_the_algorithms_are_those_of_the_paper_and_more() -> None:
    assert set(ROWS) == set(PAPER) | BEYOND


def words(text: str) -> set[str]:
    """The words of a cell, without its punctuation."""
    return set(re.sub("[,:(]", "", text).split())


@pytest.mark.parametrize("name", PAPER)
def test_a_row_says_what_the_paper_says(name: str) -> None:
    family, approximations, section = PAPER[name]
    actual = ROWS[name]
    assert set(family.split()) <= words(actual.family)
    assert set(approximations.split()) <= words(actual.approximations)
    assert actual.section.split(",")[0] == section
    looks_at_the_mean = "mean" in actual.look.name or "mode" in actual.look.name
    # STE looks at the sign of the mean; multimodal optimisation draws samples by default
    if name not in ("STE", "multimodal optimisation"):
        assert ("delta" in approximations and "without" not in approximations) == looks_at_the_mean


@pytest.mark.parametrize("name", ROWS)
def test_the_module_that_runs_a_row_is_there(name: str) -> None:
    module = ROWS[name].runs
    assert importlib.import_module(module).__doc__


def test_what_makes_a_row_another_one() -> None:
    """Neighbours in the table differ in the parts that their names say, and in no other part."""

    def differences(first: str, second: str) -> set[str]:
        a = row(first)
        b = row(second)
        parts = ("family", "look", "curvature", "move")
        return {part for part in parts if getattr(a, part) != getattr(b, part)}

    assert differences("gradient descent", "SGD") == set()  # but for the minibatch
    assert differences("SGD", "SGD with momentum") == {"move"}
    assert differences("mirror descent", "natural momentum") == {"move"}
    assert differences("SGD", "preconditioned SGD") == {"curvature", "move"}
    assert differences("diagonal online Newton", "RMSprop") == {"curvature", "move"}
    assert differences("diagonal online Newton", "OGN") == {"curvature", "move"}
    assert differences("dropout", "dropout, rate learned") == {"family"}
    assert differences("SGD with momentum", "SAM") == {"look"}
    assert differences("OGN", "VOGN") == {"look"}
    assert row("OGN").look == AT_MEAN
    assert row("VOGN").look == AT_SAMPLES
    assert differences("Adam", "AdamW") == {"move"}
    assert differences("RMSprop", "Adam") == {"move"}
    assert differences("Adam", "Vadam") == {"look", "move"}
    assert differences("VOGN", "IVON") == {"curvature", "move"}
    assert differences("STE", "BayesBiNN") == {"look", "move"}
    assert row("STE").move.departures == ["no entropy"]


def test_departures_in_words() -> None:
    assert Move().departures == []
    assert row("Adam").move.departures[0] == "square root"
    assert "precision kept positive (retraction)" in row("IVON").move.departures
    moves = {algorithm.move for algorithm in ROWS.values()}
    assert len({tuple(move.departures) for move in moves}) == len(moves)


def test_the_dataframe() -> None:
    table = blr.table1()
    columns = "algorithm family loss hessian departures approximations section analysable"
    assert list(table) == [*columns.split(), "through", "runs"]
    assert table.algorithm.tolist() == list(ROWS)
    by_name = table.set_index("algorithm")
    assert by_name.loc["VOGN", "through"] == "Posterior.from_optimizer"
    assert by_name.analysable.dtype == bool
    assert not by_name.loc["STE", "analysable"]
    assert by_name.loc["EM", "analysable"]


def test_defaults_are_those_of_the_table() -> None:
    assert MultimodalOptimisation().look == "samples"
    assert row("multimodal optimisation").look is AT_SAMPLES


def test_an_unknown_name() -> None:
    assert row("ADAM") is ROWS["Adam"]
    for name in ("adamax", None):
        with pytest.raises(InputError, match="gradient descent"):
            row(name)


def test_the_named_optimizers_are_their_rows() -> None:
    for name in ("VOGN", "OGN", "Vadam", "Vprop"):
        kind = getattr(optim, name)
        model = nn.Linear(1, 1)
        settings: dict[str, Any] = {"lr": 0.1, "ess": 10}
        if "model" in inspect.signature(kind).parameters:
            settings["model"] = model
        optimizer = kind(model.parameters(), **settings)
        assert isinstance(optimizer, RowOptimizer)
        assert optimizer.row is ROWS[name]


# Where the loss is looked at, what the Hessian is taken to be, and how a step departs.


THETA = torch.tensor([0.3, -0.7, 0.2, 1.0], dtype=torch.float64)


def posterior() -> DiagonalGaussian:
    return DiagonalGaussian(THETA, torch.tensor([4.0, 9.0, 2.0, 30.0]).double())


def by_quadrature(q: DiagonalGaussian, f: Callable[[Tensor], Tensor], nodes: int = 20) -> Tensor:
    points, shares = places(q, "quadrature", nodes)
    return torch.tensordot(shares, torch.stack([f(point) for point in points]), 1)


# Expectations -----------------------------------------------------------------------------------


def test_quadrature_agrees_with_moments_and_with_samples() -> None:
    q = posterior()
    variance = 1 / q.precision
    fourth = THETA**4 + 6 * THETA**2 * variance + 3 * variance**2
    actual = by_quadrature(q, lambda t: torch.stack([t**4, t]), nodes=3)  # exact up to degree 5
    torch.testing.assert_close(actual[0], fourth, rtol=1e-12, atol=0)
    torch.testing.assert_close(actual[1], THETA, rtol=1e-12, atol=1e-14)
    draws, shares = places(q, "samples", 5000, generator=torch.Generator().manual_seed(0))
    sampled = torch.tensordot(shares, torch.cos(draws), 1)
    exactly = torch.cos(THETA) * torch.exp(-variance / 2)
    torch.testing.assert_close(by_quadrature(q, torch.cos), exactly, rtol=1e-10, atol=0)
    assert (sampled - exactly).abs().max() < 4 / 5000**0.5


def test_bad_requests() -> None:
    q = posterior()
    with pytest.raises(InputError, match="samples must be"):
        places(q, "quadrature", 0)
    with pytest.raises(InputError, match="one variable"):
        places(FullGaussian(THETA, torch.eye(4).double()), "quadrature")


# Moves ------------------------------------------------------------------------------------------


def settings(**changes: float) -> dict[str, float]:
    return {"lr": 0.1, "beta1": 0.9, "beta2": 0.5, "weight_decay": 0.2, "hess_init": 0.0, **changes}


def test_the_retraction_keeps_half_of_the_precision() -> None:
    """It does so whatever the estimate; without it the precision turns negative."""

    def hess_after(estimate: float, positive: bool, beta2: float) -> float:
        hess = [torch.tensor([0.5]).double()]
        zero = torch.zeros(1).double()
        block = Block([zero], [zero.clone()], [torch.tensor([estimate]).double()], hess, [])
        move = Move(positive=positive)
        step(block, ROWS["VOGN"].curvature, move, settings(beta2=beta2), 1)
        return float(hess[0])

    weight_decay = settings()["weight_decay"]
    assert hess_after(-100.0, positive=True, beta2=0.5) + weight_decay >= 0.35
    assert hess_after(0.7, positive=True, beta2=0.0) + weight_decay >= 0.35
    assert hess_after(-100.0, positive=False, beta2=0.5) + weight_decay < 0
    assert hess_after(0.7, positive=False, beta2=0.0) == pytest.approx(0.7)


@pytest.mark.parametrize("power", [1.0, 0.5, 0.25])
def test_the_power_of_the_precision(power: float) -> None:
    theta = [torch.tensor([1.0]).double()]
    block = Block(
        theta,
        [torch.tensor([3.0]).double()],
        [torch.tensor([16.0]).double()],
        [torch.zeros(1).double()],
        [],
    )
    group = settings(beta2=0.0, weight_decay=0.0)
    step(block, ROWS["VOGN"].curvature, Move(power=power), group, 1)
    assert float(theta[0]) == pytest.approx(1 - 0.1 * 3 / 16**power, rel=1e-14)
