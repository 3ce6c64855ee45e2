"""δ that nobody named: exact at a regularised minimum, else what the data and the weights say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import classes, minimised, mlp
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import OptimizerError
from blr_analysis.posterior.prior_choice import chosen_prior
from blr_analysis.posterior.structures import Diagonal

N = 120


CURVATURES = [(s, "ggn") for s in ("kron", "diag", "full", "lowrank")]
CURVATURES += [("kron", "empirical_fisher"), ("kron", "mc_fisher"), ("full", "exact")]


@pytest.mark.parametrize(("structure", "curvature"), CURVATURES)
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize(("delta", "seed"), [(0.1, 0), (3.0, 1), (50.0, 2)])
def test_the_penalty_of_a_converged_model_is_found(
    delta: float, seed: int, around: bool, structure: str, curvature: str
) -> None:
    data = classes(seed)
    model = nn.Linear(4, 3).double()
    start = None
    if around:
        start = {n: torch.full_like(p, 0.3) for n, p in model.state_dict().items()}
    task = blr.Task(minimised(model, data, delta, start=0.3 if around else 0.0), data)
    arguments = {"structure": structure, "curvature": curvature}
    q = blr.fit_laplace(task, initial=start, **arguments)
    within = 3e-3 if curvature == "mc_fisher" else 1e-3
    assert q.prior_precision == pytest.approx(delta, rel=within)
    choice = q.record["prior_choice"]
    assert choice["rule"] == "stationarity"
    assert choice["explained"] > 0.999
    with_that_prior = blr.fit_laplace(task, prior_precision=q.prior_precision, **arguments)
    for name in q.mean:
        assert torch.allclose(q.variance(name), with_that_prior.variance(name), rtol=1e-3)


def test_both_rules_against_dense_algebra() -> None:
    g = torch.Generator().manual_seed(0)
    h, d, slope = (torch.randn(30, generator=g, dtype=torch.float64) for _ in range(3))
    h = 10 * h.square()
    slope = -2.0 * d + 0.3 * h.sqrt() * slope
    delta, choice = chosen_prior(Diagonal({"w": h}), {"w": d}, {"w": slope})
    assert choice["rule"] == "stationarity"
    left = (slope + delta * d) / (h + delta)
    assert float(d @ left) == pytest.approx(0, abs=1e-4 * float((d * left).abs().sum()))
    evidence = choice["evidence"]
    assert evidence * float(d @ d) == pytest.approx(float((h / (h + evidence)).sum()), rel=1e-4)
    assert choice["apart"] == pytest.approx(max(delta / evidence, evidence / delta))
    assert 0 < choice["explained"] < 1


def test_a_root_that_is_chance_gives_way_to_the_evidence() -> None:
    """δ far below the evidence's: kept at a minimum, where it explains the gradient, else not."""
    form = Diagonal({"w": torch.tensor([40.0, 10.0])})
    gap = {"w": torch.tensor([1.0, -1.0])}
    at = {"w": -1e-3 * gap["w"]}
    off = {"w": torch.tensor([3.0, 0.751])}
    delta, choice = chosen_prior(form, gap, at)
    assert choice["rule"] == "stationarity"
    assert delta == pytest.approx(1e-3, rel=1e-3)
    delta, choice = chosen_prior(form, gap, off)
    assert choice["rule"] == "evidence"
    assert delta == choice["evidence"]
    assert choice["stationarity"] < delta / 100
    assert choice["explained"] < 0.5


def test_the_priors_mean_is_kept(tmp_path: Path) -> None:
    mean = {"w": torch.ones(3).double()}
    start = torch.arange(3.0).double()
    q = blr.Posterior(mean, mean, prior_precision=0.5, n_data=3, initial={"w": start})
    q.save(tmp_path / "q")
    for copied in (q, blr.Posterior.load(tmp_path / "q"), q.to("cpu", torch.float32)):
        assert copied.initial is not None
        assert torch.equal(copied.initial["w"].double(), start)


def stepped(make: Callable[..., torch.optim.Optimizer], **settings: float):
    """A network, its first weights, and what trained it for some steps."""
    x, y = classes(0)
    model = mlp()
    first = {n: p.clone() for n, p in model.state_dict().items()}
    optimizer = make(model.parameters(), lr=1e-2, **settings)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(20):
        optimizer.step(closure)
    return model, first, optimizer


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.RMSprop])
def test_an_l2_penalty_of_the_training_is_the_prior(make: type[torch.optim.Optimizer]) -> None:
    model, first, optimizer = stepped(make, weight_decay=0.05)
    q = blr.Posterior.from_optimizer(optimizer, model, n_data=N)
    assert q.prior_precision == pytest.approx(0.05 * N)
    assert q.record["prior_choice"]["rule"] == "weight_decay"
    assert "weight_decay" in repr(q)
    around = blr.Posterior.from_optimizer(optimizer, model, n_data=N, initial=first)
    assert around.record["prior_choice"]["rule"] == "evidence"  # the penalty was around 0


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_elsewhere_the_weights_and_the_diagonal_decide(
    decay: float, around: bool, tmp_path: Path
) -> None:
    model, first, optimizer = stepped(torch.optim.AdamW, weight_decay=decay)
    start = first if around else None
    q = blr.Posterior.from_optimizer(optimizer, model, n_data=N, initial=start)
    delta = q.prior_precision
    h = torch.cat([(q.precision(n) - delta).flatten() for n in q.mean])
    gaps = [m - first[n] if around else m for n, m in q.mean.items()]
    size = float(sum(gap.square().sum() for gap in gaps))
    assert delta * size == pytest.approx(float((h / (h + delta)).sum()), rel=1e-4)
    choice = q.record["prior_choice"]
    assert choice["rule"] == "evidence"
    assert "fit_laplace" in choice["unsure"]
    assert (q.initial is not None) == around
    q.save(tmp_path / "q")
    assert blr.Posterior.load(tmp_path / "q").record["prior_choice"] == choice


def test_the_prior_of_ivon_is_its_own() -> None:
    model, first, optimizer = stepped(blr.IVON, ess=N, weight_decay=0.1)
    q = blr.Posterior.from_optimizer(optimizer, model)
    assert q.prior_precision == pytest.approx(0.1 * N)
    assert "prior_choice" not in q.record
    with pytest.raises(OptimizerError, match="around 0"):
        blr.Posterior.from_optimizer(optimizer, model, initial=first)
