"""δ that nobody named: exact at a regularised minimum, else what the data and the weights say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import classes, mlp
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import OptimizerError, PosteriorError
from blr_analysis.posterior.prior_choice import chosen_prior, in_words
from blr_analysis.posterior.structures import Diagonal

N = 120


def minimised(model: nn.Module, x: Tensor, y: Tensor, delta: float, start: dict[str, Tensor]):
    """Trained by L-BFGS on the mean loss with an L2 penalty towards ``start``."""
    for p in model.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        named = model.named_parameters()
        penalty = sum((p - start.get(n, 0)).square().sum() for n, p in named)
        loss = nn.functional.cross_entropy(model(x), y) + delta / N / 2 * penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


@pytest.mark.parametrize("structure", ["kron", "diag", "full", "lowrank"])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize(("delta", "seed"), [(0.1, 0), (3.0, 1), (50.0, 2)])
def test_the_penalty_of_a_converged_model_is_found(
    delta: float, seed: int, around: bool, structure: str
) -> None:
    x, y = classes(seed)
    model = nn.Linear(4, 3).double()
    start = {n: torch.full_like(p, 0.3) for n, p in model.state_dict().items()} if around else {}
    task = blr.Task(minimised(model, x, y, delta, start), (x, y))
    q = blr.fit_laplace(task, structure=structure, initial=start or None)
    assert q.prior_precision == pytest.approx(delta, rel=1e-3)
    about = q.record["prior_choice"]
    assert about["rule"] == "stationarity" and about["explained"] > 0.999
    same = blr.fit_laplace(task, structure=structure, prior_precision=q.prior_precision)
    for name in q.mean:
        assert torch.allclose(q.variance(name), same.variance(name), rtol=1e-3)


@pytest.mark.parametrize("curvature", ["empirical_fisher", "mc_fisher", "exact"])
def test_the_penalty_is_found_by_any_curvature(curvature: str) -> None:
    x, y = classes(3)
    task = blr.Task(minimised(nn.Linear(4, 3).double(), x, y, 2.0, {}), (x, y))
    kind = "full" if curvature == "exact" else "kron"
    q = blr.fit_laplace(task, structure=kind, curvature=curvature)
    assert q.prior_precision == pytest.approx(2.0, rel=1e-3)


def test_both_rules_against_dense_algebra() -> None:
    g = torch.Generator().manual_seed(0)
    h, d, slope = (torch.randn(30, generator=g, dtype=torch.float64) for _ in range(3))
    h = 10 * h.square()
    slope = -2.0 * d + 0.3 * h.sqrt() * slope
    delta, about = chosen_prior(Diagonal({"w": h}), {"w": d}, {"w": slope})
    assert about["rule"] == "stationarity"
    left = (slope + delta * d) / (h + delta)
    assert float(d @ left) == pytest.approx(0, abs=1e-4 * float((d * left).abs().sum()))
    evidence = about["evidence"]
    assert evidence * float(d @ d) == pytest.approx(float((h / (h + evidence)).sum()), rel=1e-4)
    assert about["apart"] == pytest.approx(max(delta / evidence, evidence / delta))
    assert 0 < about["explained"] < 1


def test_without_a_pull_of_the_prior_the_evidence_decides() -> None:
    h, d = torch.tensor([5.0, 1.0]), torch.tensor([1.0, -1.0])
    delta, about = chosen_prior(Diagonal({"w": h}), {"w": d}, {"w": torch.zeros(2)})
    assert about["rule"] == "evidence" and about["stationarity"] is None
    assert delta == chosen_prior(Diagonal({"w": h}), {"w": d}, None)[0] == about["evidence"]


def test_a_choice_in_words() -> None:
    assert in_words({"delta": 2.0, "rule": "stationarity"}) == "2 by stationarity"
    assert in_words({"delta": {"a": 1.0, "b": 3.0}, "rule": "weight_decay"}) == "3 by weight_decay"


def test_a_root_that_is_chance_gives_way_to_the_evidence() -> None:
    """δ far below the evidence's: kept at a minimum, where it explains the gradient, else not."""
    form, gap = Diagonal({"w": torch.tensor([40.0, 10.0])}), {"w": torch.tensor([1.0, -1.0])}
    at, off = {"w": -1e-3 * gap["w"]}, {"w": torch.tensor([3.0, 0.751])}
    delta, about = chosen_prior(form, gap, at)
    assert about["rule"] == "stationarity" and delta == pytest.approx(1e-3, rel=1e-3)
    delta, about = chosen_prior(form, gap, off)
    assert about["rule"] == "evidence" and delta == about["evidence"]
    assert about["stationarity"] < delta / 100 and about["explained"] < 0.5


def test_the_priors_mean_is_kept(tmp_path: Path) -> None:
    x, y = classes(5)
    start = {"weight": torch.full((3, 4), 0.5), "bias": torch.ones(3)}
    task = blr.Task(minimised(nn.Linear(4, 3).double(), x, y, 4.0, start), (x, y))
    q = blr.fit_laplace(task, structure="full", prior_precision=4.0, initial=start)
    q.save(tmp_path / "q.safetensors")
    for held in (q, blr.Posterior.load(tmp_path / "q.safetensors"), q.to("cpu", torch.float32)):
        assert held.initial is not None
        assert torch.equal(held.initial["weight"].double(), start["weight"].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_weights_that_followed_the_training(dtype: torch.dtype) -> None:
    x, y = classes(0)
    task = blr.Task(nn.Linear(4, 3).to(dtype), (x.float(), y))
    for own in (task.model.state_dict(), task.parameters()):
        with pytest.raises(PosteriorError, match="deepcopy"):
            blr.fit_laplace(task, prior_precision=1.0, initial=own)


# ---------------------------------------------------------------- optimizers and grids


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
    assert q.record["prior_choice"]["rule"] == "weight_decay" and "weight_decay" in repr(q)
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
    about = q.record["prior_choice"]
    assert about["rule"] == "evidence" and "fit_laplace" in about["unsure"]
    assert (q.initial is not None) == around
    q.save(tmp_path / "q")
    assert blr.Posterior.load(tmp_path / "q").record["prior_choice"] == about


def test_the_prior_of_ivon_is_its_own() -> None:
    model, first, optimizer = stepped(blr.IVON, ess=N, weight_decay=0.1)
    q = blr.Posterior.from_optimizer(optimizer, model)
    assert q.prior_precision == pytest.approx(0.1 * N) and "prior_choice" not in q.record
    with pytest.raises(OptimizerError, match="around 0"):
        blr.Posterior.from_optimizer(optimizer, model, initial=first)
