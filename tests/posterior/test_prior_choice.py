"""δ that nobody named: exact at a regularised minimum, else what the data and the weights say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import classes, mlp
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import OptimizerError, PosteriorError
from blr_analysis.posterior import prior_choice
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
    assert float(d @ ((slope + delta * d) / (h + delta))) == pytest.approx(0, abs=1e-9)
    evidence = about["evidence"]
    assert evidence * float(d @ d) == pytest.approx(float((h / (h + evidence)).sum()))
    assert about["apart"] == pytest.approx(max(delta / evidence, evidence / delta))
    assert 0 < about["explained"] < 1


@pytest.mark.parametrize("known", [False, True])
def test_directions_taken_together_give_the_same(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [torch.randn(4000, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    form = Diagonal({"w": (3 * drawn[0]).exp(), "v": torch.tensor([0.0, 1e-9])})
    d = {"w": drawn[1], "v": torch.ones(2)}
    g = {n: -0.7 * x for n, x in d.items()}
    g["w"] = g["w"] + 0.3 * drawn[2]
    one_by_one = chosen_prior(form, d, g if known else None)
    monkeypatch.setattr(prior_choice, "SINGLE", 0)
    together = chosen_prior(form, d, g if known else None)
    assert together[0] == pytest.approx(one_by_one[0], rel=1e-4)
    for name, value in one_by_one[1].items():
        exact = value if value is None or isinstance(value, str) else pytest.approx(value, rel=1e-4)
        assert together[1][name] == exact


def test_without_a_pull_of_the_prior_the_evidence_decides() -> None:
    h, d = torch.tensor([5.0, 1.0]), torch.tensor([1.0, -1.0])
    delta, about = chosen_prior(Diagonal({"w": h}), {"w": d}, {"w": torch.zeros(2)})
    assert about["rule"] == "evidence" and about["stationarity"] is None
    assert delta == chosen_prior(Diagonal({"w": h}), {"w": d}, None)[0] == about["evidence"]


@pytest.mark.parametrize("seed", range(3))
def test_a_network_stopped_early_gets_a_prior_between_the_extremes(seed: int) -> None:
    x, y = classes(seed, torch.float32)
    model = mlp(seed=seed).float()
    first = {n: p.clone() for n, p in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    q = blr.fit_laplace(blr.Task(model, (x, y)), initial=first)
    about = q.record["prior_choice"]
    assert 1e-3 < q.prior_precision < 1e3 and q.prior_precision == about[about["rule"]]
    assert about["rule"] in repr(q)


def test_rules_far_apart_are_both_said() -> None:
    choice = {"delta": 2.0, "rule": "stationarity", "evidence": 30.0, "apart": 15.0}
    assert in_words({**choice, "explained": 0.1}) == "2 by stationarity (30 by evidence)"
    assert in_words({**choice, "explained": 0.999}) == "2 by stationarity"
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


def test_a_rounded_diagonal_keeps_the_priors_mean(tmp_path: Path) -> None:
    mean = {"w": torch.ones(3)}
    q = blr.Posterior(mean, mean, prior_precision=0.5, n_data=3, initial={"w": torch.arange(3.0)})
    q.save(tmp_path / "q", dtype=torch.bfloat16)
    back = blr.Posterior.load(tmp_path / "q")
    assert back.initial is not None and torch.equal(back.initial["w"], torch.arange(3.0))
    with pytest.raises(blr.errors.InputError, match="prior's mean"):
        q.save(tmp_path / "bare", mean=False)


@pytest.mark.parametrize(
    ("initial", "word"),
    [
        ({"weight": torch.zeros(3, 4)}, "bias"),
        ({"weight": torch.zeros(4, 3), "bias": torch.zeros(3)}, "another model"),
        ({"weight": torch.full((3, 4), float("nan")), "bias": torch.zeros(3)}, "NaN"),
        ([torch.zeros(3)], "state dict"),
    ],
)
def test_an_initial_of_another_model_is_refused(initial: object, word: str) -> None:
    x, y = classes(0)
    task = blr.Task(nn.Linear(4, 3).double(), (x, y))
    with pytest.raises(PosteriorError, match=word):
        blr.fit_laplace(task, prior_precision=1.0, initial=initial)  # type: ignore[arg-type]


def test_weights_that_never_moved_tell_nothing() -> None:
    x, y = classes(0)
    model = nn.Linear(4, 3).double()
    with pytest.raises(PosteriorError, match="the initial ones"):
        first = copy.deepcopy(model.state_dict())
        blr.fit_laplace(blr.Task(model, (x, y)), initial=first)


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


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize(
    ("make", "settings"), [(torch.optim.Adam, {}), (torch.optim.AdamW, {"weight_decay": 0.1})]
)
def test_elsewhere_the_weights_and_the_diagonal_decide(
    make: type[torch.optim.Optimizer],
    settings: dict[str, float],
    around: bool,
    saved: bool,
    tmp_path: Path,
) -> None:
    model, first, optimizer = stepped(make, **settings)
    options = dict(n_data=N, initial=first if around else None)
    if saved:
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        q = blr.Posterior.from_checkpoint(tmp_path / "state.pt", model, **options)
    else:
        q = blr.Posterior.from_optimizer(optimizer, model, **options)
    delta = q.prior_precision
    h = torch.cat([(q.precision(n) - delta).flatten() for n in q.mean])
    gaps = [m - first[n] if around else m for n, m in q.mean.items()]
    size = float(sum(gap.square().sum() for gap in gaps))
    assert delta * size == pytest.approx(float((h / (h + delta)).sum()), rel=1e-6)
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


def test_a_grid_is_made_around_the_prior_that_is_found() -> None:
    x, y = classes(1)
    start = {"weight": torch.full((3, 4), 0.3), "bias": torch.full((3,), 0.3)}
    start = {n: p.double() for n, p in start.items()}
    task = blr.Task(minimised(nn.Linear(4, 3).double(), x, y, 3.0, start), (x, y))
    chosen = blr.select_prior_precision(task, initial=start)
    grid = [row["prior_precision"] for row in chosen.rows]
    assert len(grid) == 9 and grid[4] == pytest.approx(3.0, rel=1e-3)
    assert grid[-1] / grid[0] == pytest.approx(1e4)
    again = blr.select_prior_precision(task, [grid[4]], initial=start)
    for name, p in task.parameters().items():  # already at that minimum
        torch.testing.assert_close(again.posterior.mean[name], p, atol=1e-4, rtol=0)
    torch.testing.assert_close(again.posterior.initial, start)
