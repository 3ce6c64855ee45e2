"""Table 1: every row of the paper, and the code that it names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

import pandas as pd
import pytest
import torch
from torch import nn

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.expectations import AT_MEAN, AT_SAMPLES
from blr_analysis.learning_rule.inference import MultimodalOptimisation
from blr_analysis.learning_rule.moves import Move
from blr_analysis.learning_rule.optim import BSAM, RowOptimizer
from blr_analysis.learning_rule.table import ROWS, row, runs_elementwise

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
    "ridge regression",
    "SGD with momentum",
    "diagonal Newton",
    "AdaGrad",
    "AdaDelta",
    "AdamW",
    "Kalman filter",
    "Vprop",
    "Vadam",
    "IVON",
    "IVON, mixture",
    "dropout, learned rate",
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


@pytest.mark.parametrize("name", PAPER)
def test_a_row_says_what_the_paper_says(name: str) -> None:
    family, approximations, section = PAPER[name]
    found = ROWS[name]
    assert set(family.split()) <= set(found.family.replace(",", "").replace("(", "").split())
    words = found.approximations.replace(",", "").replace(":", "").replace("(", "").split()
    assert set(approximations.split()) <= set(words)
    assert found.section.split(",")[0] == section
    looks_at_the_mean = "mean" in found.look.name or "mode" in found.look.name
    # STE looks at the sign of the mean; many minima are found by samples, if nothing else is said
    if name not in ("STE", "multimodal optimisation"):
        assert ("delta" in approximations and "without" not in approximations) == looks_at_the_mean


@pytest.mark.parametrize("name", ROWS)
def test_the_module_that_runs_a_row_is_there(name: str) -> None:
    module = ROWS[name].runs
    assert importlib.import_module(module).__doc__


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("name", [name for name, found in ROWS.items() if runs_elementwise(found)])
def test_an_elementwise_row_steps(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x, y = torch.randn(10, 3), torch.randn(10, 2)
    settings = {"lr": 0.1, "ess": 10.0, "hess_init": 1.0, "weight_decay": 0.1}
    if name == "bSAM":
        optimizer: RowOptimizer = BSAM(model.parameters(), **settings)
    else:
        needs = {"model": model} if ROWS[name].curvature.method == "ggn" else {}
        optimizer = RowOptimizer(model.parameters(), name, **settings, **needs)
    before = float(nn.functional.mse_loss(model(x), y))
    for _ in range(20):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward(create_graph=name == "diagonal Newton")
        if isinstance(optimizer, BSAM):
            with optimizer.adversarial_params():
                nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    assert float(nn.functional.mse_loss(model(x), y)) < before


def test_what_makes_a_row_another_one() -> None:
    """Neighbours in the table differ in what their names say, and in nothing else."""

    def differences(one: str, two: str) -> set[str]:
        a, b = row(one), row(two)
        kept = ("family", "look", "curvature", "move")
        return {name for name in kept if getattr(a, name) != getattr(b, name)}

    assert differences("gradient descent", "SGD") == set()  # but for the minibatch
    assert differences("SGD", "SGD with momentum") == {"move"}
    assert differences("OGN", "VOGN") == {"look"}
    assert (row("OGN").look, row("VOGN").look) == (AT_MEAN, AT_SAMPLES)
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
    moves = {found.move for found in ROWS.values()}
    assert len({tuple(move.departures) for move in moves}) == len(moves)


def test_the_dataframe() -> None:
    table = blr.table1()
    columns = "algorithm family loss hessian departures approximations section analysable"
    assert list(table) == [*columns.split(), "through", "runs"]
    assert table.algorithm.tolist() == list(ROWS)
    by_name = table.set_index("algorithm")
    assert by_name.loc["VOGN", "through"] == "Posterior.from_optimizer"
    assert by_name.analysable.dtype == bool
    assert not by_name.loc["STE", "analysable"] and by_name.loc["EM", "analysable"]


def test_printing_shows_what_sets_the_rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    table = blr.table1()
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, repr(table).splitlines()[:-1])) <= 80
    monkeypatch.setenv("COLUMNS", "200")
    shown = repr(table)
    words = set(shown.split())
    for name in list(table)[:5]:
        assert {name, *" ".join(table[name]).split()} <= words
    for name in list(table)[5:]:
        assert name in shown.splitlines()[-1]
    assert type(table.head()) is pd.DataFrame


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
        made = getattr(blr, name)
        model = nn.Linear(1, 1)
        needs = {"model": model} if "model" in inspect.signature(made).parameters else {}
        optimizer = made(model.parameters(), lr=0.1, ess=10, **needs)
        assert isinstance(optimizer, RowOptimizer) and optimizer.row is ROWS[name]
