"""Calibration against closed forms, dense linear algebra and exact retraining of every example."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path

import pytest
import torch
from oracles import dense_ggn, dense_jacobian, flatten
from oracles_retraining import leave_one_out_weights, linear, retrained, trained, with_ones
from sklearn.datasets import load_iris, load_wine
from torch import Tensor, nn
from typer.testing import CliRunner

import blr_analysis as blr
from blr_analysis.backprop.engine import QUIET
from blr_analysis.backprop.products import PROBES
from blr_analysis.sensitivity.calibration import draw
from blr_analysis.sensitivity.removal import exact_removals
from blr_analysis.tables import calibration_table

DELTA = 1.0


def ridge(n: int = 60, d: int = 4, c: int = 1) -> blr.Task:
    """A ridge regression at its exact optimum."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    x = x @ torch.randn(d, d, generator=g, dtype=torch.float64)
    y = torch.randn(n, c, generator=g, dtype=torch.float64)
    z = with_ones(x)
    theta = torch.linalg.solve(z.T @ z + DELTA * torch.eye(d + 1, dtype=torch.float64), z.T @ y)
    return blr.Task(linear(theta.T), (x, y), likelihood="gaussian")


def network(dtype: torch.dtype = torch.float64, n: int = 30) -> blr.Task:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    y = torch.randint(3, (n,), generator=g)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    return blr.Task(model, (x.to(dtype), y))


def fit(task: blr.Task, structure: str, delta: float = DELTA) -> blr.Posterior:
    return blr.fit_laplace(task, structure=structure, prior_precision=delta, progress=False)


def times(q: blr.Posterior, factor: float) -> blr.Posterior:
    """The posterior with ``factor`` times its precision."""
    form = q.form.zeros().plus(q.form, factor)
    return blr.Posterior(q.mean, form, prior_precision=q.prior_precision, n_data=q.n_data)


def calibrated(
    task: blr.Task, q: blr.Posterior, probe: int = 32, kind: str = "ggn", **options: object
):
    return blr.calibrate(task, q, probe, kind=kind, progress=False, **options)


# The scale is found.


@pytest.mark.parametrize(("structure", "factor"), [("full", 1.0), ("full", 5.0), ("kron", 0.2)])
def test_descents_find_the_scale_where_the_model_is_at_its_minimum(
    structure: str, factor: float
) -> None:
    task = ridge()
    q = times(fit(task, structure), factor)
    found = calibrated(task, q, 16, kind="auto").record["calibration"]
    exact = calibrated(task, q, 16, kind="ggn").record["calibration"]
    assert (found["kind"], exact["kind"]) == ("descent", "ggn")
    assert all(found["converged"]) and 16 < found["passes"] <= 16 * 42
    assert found["exact"] == pytest.approx(exact["exact"], rel=1e-3)
    assert found["scale"] == pytest.approx(exact["scale"], rel=1e-3)


def test_a_model_away_from_its_minimum_is_calibrated_by_its_curvature() -> None:
    task = network()
    q = fit(task, "full")
    assert calibrated(task, q, 16, kind="auto").record["calibration"]["kind"] == "ggn"
    with pytest.raises(blr.errors.PosteriorError, match="not at the minimum"):
        calibrated(task, q, 16, kind="descent")


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_the_exact_posterior_of_a_linear_regression_keeps_its_scale(
    kind: str, outputs: int
) -> None:
    task = ridge(c=outputs)
    found = calibrated(task, fit(task, "full"), kind=kind).record["calibration"]
    assert found["scale"] == pytest.approx(1, abs=1e-6)
    assert found["correction"], found["kind"] == ("cavity", kind)
    assert found["spread"] < 1e-6 and found["standard_error"] < 1e-6
    assert all(found["converged"]) and max(found["residual"]) <= 1e-4
    assert len(found["probe"]) == len(set(found["probe"])) == 32


@pytest.mark.parametrize("factor", [3.0, 1 / 7, 1e4])
def test_a_wrong_scale_is_recovered(factor: float) -> None:
    task = ridge()
    q = fit(task, "full")
    better = calibrated(task, times(q, factor), probe=12)
    assert better.record["calibration"]["scale"] == pytest.approx(factor, rel=1e-6)
    for name in q.mean:
        torch.testing.assert_close(better.variance(name), q.variance(name), rtol=1e-6, atol=0)
        assert torch.equal(better.mean[name], q.mean[name])
    assert (better.n_data, better.prior_precision) == (60, DELTA)
    again = calibrated(task, better, probe=20)
    assert again.record["calibration"]["scale"] == pytest.approx(factor, rel=1e-6)
    torch.testing.assert_close(again.variance("weight"), q.variance("weight"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("structure", ["diag", "kron", "lowrank", "full"])
@pytest.mark.parametrize("correction", ["first_order", "cavity"])
def test_the_scale_solves_its_equation(structure: str, correction: str) -> None:
    task = network()
    q = fit(task, structure)
    better = calibrated(task, q, 16, correction=correction)
    found = better.record["calibration"]
    loo = blr.leave_one_out(task, better, progress=False)  # auto: what it was calibrated for
    assert set(loo.correction) <= {correction, "bounded"}
    rise = (loo.losses - loo.losses_before)[found["probe"]]
    assert rise.tolist() == pytest.approx(found["calibrated"], rel=1e-8)
    before = blr.leave_one_out(task, q, correction=correction, progress=False)
    earlier = (before.losses - before.losses_before)[found["probe"]]
    assert earlier.tolist() == pytest.approx(found["estimated"], rel=1e-8)
    pull = sum(
        w * r * min(0.5, max(-0.5, math.log(exact / r)))
        for w, r, exact in zip(found["weight"], rise.tolist(), found["exact"], strict=True)
    )
    assert abs(pull) < 1e-9 * float(rise.sum())
    for name in q.mean:
        expected = q.variance(name) * found["scale"]
        torch.testing.assert_close(better.variance(name), expected, rtol=1e-8, atol=0)


def test_exact_solves_against_dense_matrices() -> None:
    task = network()
    x, y = task.dataset.tensors
    q = fit(task, "diag")
    chosen = torch.tensor([4, 17, 9])
    names = list(q.mean)
    theta = flatten(q.mean)

    def losses(flat: Tensor) -> Tensor:
        parts = flat.split([q.mean[n].numel() for n in names])
        values = {n: p.reshape(q.mean[n].shape) for n, p in zip(names, parts, strict=True)}
        f = torch.func.functional_call(task.model, values, (x,))
        return nn.functional.cross_entropy(f, y, reduction="none")

    ridge_part = DELTA * torch.eye(len(theta), dtype=torch.float64)
    jacobian = dense_jacobian(task, q.mean)
    f = task.model(x).detach()
    p = f.softmax(-1)
    e = p - nn.functional.one_hot(y, 3)
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    shares = {
        "ggn": jacobian.mT @ curvature @ jacobian,
        "hessian": torch.func.hessian(losses)(theta),
    }
    for kind, share in shares.items():
        found = exact_removals(
            task, q, chosen, kind=kind, tolerance=1e-10, max_iterations=500, chunking=QUIET
        )
        for row, i in zip(found.outputs, chosen.tolist(), strict=True):
            rest = share.sum(0) - share[i] + ridge_part
            if kind == "hessian" and float(torch.linalg.eigvalsh(rest)[0]) <= 0:
                continue
            move = torch.linalg.solve(rest, jacobian[i].T @ e[i])
            torch.testing.assert_close(row[0], f[i] + jacobian[i] @ move, rtol=1e-7, atol=1e-9)
        assert bool(found.converged.all()) or kind == "hessian"
        checked = PROBES if kind == "hessian" else 0  # for symmetry
        assert found.passes == 1 + 2 * (checked + 3 * found.iterations)
    torch.testing.assert_close(
        shares["ggn"].sum(0), dense_ggn(task, jacobian), rtol=1e-9, atol=1e-10
    )


# Against retraining.


def with_left_out_losses(load) -> tuple[blr.Task, Tensor]:
    """Logistic regression, and every example's loss once it is retrained without it."""
    x, y = load(return_X_y=True)
    x, y = torch.tensor((x - x.mean(0)) / x.std(0)), torch.tensor(y)
    task = blr.Task(trained("categorical", x, y, DELTA, 3), (x, y))
    theta = retrained("categorical", x, y, leave_one_out_weights(len(x)), DELTA, 3)
    logits = torch.einsum("ncd,nd->nc", theta, with_ones(x))
    return task, nn.functional.cross_entropy(logits, y, reduction="none")


@pytest.mark.parametrize("load", [load_iris, load_wine])
def test_totals_agree_with_retraining(load) -> None:
    """Σ (estimated rise) / Σ (true rise) after calibration, by the whole data's retrainings."""
    task, true = with_left_out_losses(load)
    for structure, apart in (("full", 0.05), ("lowrank", 0.05), ("kron", 0.15), ("diag", 0.15)):
        q = fit(task, structure)
        order = {"correction": "first_order"} if structure in ("kron", "diag") else {}
        loo = blr.leave_one_out(task, calibrated(task, q), **order, progress=False)
        rise, truth = loo.losses - loo.losses_before, true - loo.losses_before
        assert float(rise.sum() / truth.sum()) == pytest.approx(1, abs=apart)
        if structure == "diag":  # what there was to repair
            raw = blr.leave_one_out(task, q, correction="first_order", progress=False)
            assert float((raw.losses - raw.losses_before).sum() / truth.sum()) > 1.3


def test_logistic_regression_with_the_full_posterior_and_the_cavity() -> None:
    task, true = with_left_out_losses(load_iris)
    loo = blr.leave_one_out(task, fit(task, "full"), progress=False)
    rise, truth = loo.losses - loo.losses_before, true - loo.losses_before
    assert float(torch.corrcoef(torch.stack([rise, truth]))[0, 1]) >= 0.9999
    assert float(rise.sum() / truth.sum()) == pytest.approx(1, abs=0.02)


# The probe.


def test_a_probe_stands_for_the_whole() -> None:
    """Chances as they should be: Σ w_i x_i over the probe has the mean Σ x_i, whatever x."""
    g = torch.Generator().manual_seed(0)
    rise = torch.rand(40, generator=g, dtype=torch.float64) ** 6
    x = torch.rand(40, generator=g, dtype=torch.float64)
    totals, counts = [], torch.zeros(40)
    for _ in range(4000):
        chosen, weight = draw(rise, 10, g)
        assert len(chosen) == 10 == len(set(chosen.tolist()))
        totals.append(float((weight * x[chosen]).sum()))
        counts[chosen] += 1
    found = torch.tensor(totals, dtype=torch.float64)
    assert float(found.mean()) == pytest.approx(
        float(x.sum()), abs=4 * float(found.std()) / len(found) ** 0.5
    )
    size = 0.9 * rise / rise.sum() + 0.1 / 40
    factor = 10 / float(size.sum())
    for _ in range(40):  # Σ min(1, c · size) = 10, by fixed-point iteration on c
        factor *= 10 / float((factor * size).clamp_max(1).sum())
    chance = (factor * size).clamp_max(1)
    torch.testing.assert_close(counts.double() / 4000, chance, atol=0.04, rtol=0)
    every, weight = draw(rise, 40, g)
    assert every.tolist() == list(range(40)) and weight.tolist() == pytest.approx([1.0] * 40)


def test_the_probe_follows_the_generator() -> None:
    task = ridge()
    q = fit(task, "diag")

    def probe(seed: int | None) -> list[int]:
        g = None if seed is None else torch.Generator().manual_seed(seed)
        return calibrated(task, q, 6, generator=g).record["calibration"]["probe"]

    assert probe(None) == probe(None) == probe(0)
    assert probe(1) != probe(2)
    given = calibrated(task, q, indices=[7, 3, 50]).record["calibration"]
    assert given["probe"] == [7, 3, 50] and given["weight"] == [20.0] * 3


# What comes back.


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    task = network()
    better = calibrated(task, fit(task, "kron"), 8)
    better.save(tmp_path / "q.safetensors")
    loaded = blr.Posterior.load(tmp_path / "q.safetensors")
    assert loaded.record["calibration"] == better.record["calibration"]
    one = blr.leave_one_out(task, better, progress=False)
    two = blr.leave_one_out(task, loaded, progress=False)
    torch.testing.assert_close(one.logits, two.logits, rtol=1e-12, atol=1e-14)
    table = calibration_table(loaded)
    assert table["index"].tolist() == better.record["calibration"]["probe"]
    assert (table.ratio * table.calibrated).tolist() == pytest.approx(table.exact.tolist())
    with pytest.raises(blr.errors.InputError, match="no calibration"):
        calibration_table(fit(task, "kron"))


def test_auto_keeps_to_the_correction_of_the_calibration() -> None:
    task = network()
    better = calibrated(task, fit(task, "full"), 8, correction="first_order")
    assert set(blr.leave_one_out(task, better, progress=False).correction) == {"first_order"}
    better = calibrated(task, fit(task, "kron"), 8, correction="cavity")
    assert "cavity" in blr.leave_one_out(task, better, progress=False).correction


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_a_larger_variance_is_no_precision_below_the_prior(structure: str) -> None:
    """S/τ holds δ/τ; a removal must not take that for a part that was removed too often."""
    task = network()
    task.dataset.tensors[0][:, 1] = 0  # weights that the data say nothing of: S = δ there
    q = fit(task, structure)
    form = q.form.plus_prior(-DELTA)
    form = form.plus(form, 20.0).plus_prior(DELTA)  # too much of the data, the right prior
    q = blr.Posterior(q.mean, form, prior_precision=DELTA, n_data=30)
    better = calibrated(task, q, 8)
    scale = better.record["calibration"]["scale"]
    assert scale > 1
    result = blr.what_if(task, better, remove=[3], progress=False, solver="posterior")
    assert result.floored == 0
    least = min(float(result.posterior.precision(n).min()) for n in q.mean)
    assert least == pytest.approx(DELTA / scale, rel=1e-6)
    assert result.posterior.record["calibration"]["scale"] == scale


def test_single_precision() -> None:
    wide, narrow = network(), network(torch.float32)
    expected = calibrated(wide, fit(wide, "kron"), 8).record["calibration"]["scale"]
    found = calibrated(narrow, fit(narrow, "kron"), 8)
    assert found.record["calibration"]["scale"] == pytest.approx(expected, rel=1e-3)
    assert found.variance("0.weight").dtype == torch.float32


def test_ready_scores_give_the_same_probe() -> None:
    task = network()
    q = fit(task, "kron")
    scores = blr.sensitivity(task, q, progress=False)
    one = calibrated(task, q, 8).record["calibration"]
    two = calibrated(task, q, 8, scores=scores).record["calibration"]
    assert (one["probe"], one["scale"]) == (two["probe"], two["scale"])


SCRIPT = """
import torch, blr_analysis as blr
def make_task():
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.randint(3, (40,))
    return blr.Task(torch.nn.Linear(3, 3), (x, y))
"""


@pytest.mark.parametrize("command", ["loo", "audit"])
def test_on_the_command_line(command: str, tmp_path: Path) -> None:
    from blr_analysis.cli.commands import app

    (tmp_path / "train.py").write_text(SCRIPT)
    where = ["--fit", "diag", "--prior-precision", "1", "--out", str(tmp_path / "out")]
    task = f"{tmp_path / 'train.py'}:make_task"
    ran = CliRunner().invoke(app, [command, task, *where, "--calibrate", "8"])
    assert ran.exit_code == 0, ran.output
    assert "exact solves for 8 examples" in ran.stderr and "variances times" in ran.stderr
    if command == "audit":
        saved = blr.Posterior.load(tmp_path / "out" / "posterior.safetensors")
        assert len(saved.record["calibration"]["probe"]) == 8
    ran = CliRunner().invoke(app, [command, task, *where, "--calibrate", "0"])
    assert ran.exit_code == 2


# Bad input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probe": 0}, "probe must be a positive integer, got 0"),
        ({"probe": 61}, "probe=61 of 60 examples"),
        ({"correction": "bounded"}, "correction must be one of"),
        ({"kind": "fisher"}, "kind must be one of"),
        ({"indices": [1, 1]}, "more than once"),
        ({"indices": []}, "names no example"),
        ({"tolerance": 0.0}, "tolerance must be positive"),
        ({"max_iterations": 0}, "max_iterations must be a positive integer"),
        ({"scores": 1}, "scores must be"),
    ],
)
def test_bad_arguments(options: dict, message: str) -> None:
    task = ridge()
    with pytest.raises(blr.errors.InputError, match=message):
        blr.calibrate(task, fit(task, "diag"), progress=False, **{"kind": "ggn", **options})


def test_nan_in_the_probe() -> None:
    task = ridge()
    q = fit(task, "diag")
    task.dataset.tensors[0][5, 0] = torch.nan
    with pytest.raises(blr.errors.DataError, match="index 5"):
        calibrated(task, q, 4)
    with pytest.raises(blr.errors.DataError, match="index 5"):
        calibrated(task, q, indices=[5])


def test_a_posterior_of_other_data() -> None:
    with pytest.raises(blr.errors.PosteriorError, match="n_data=50"):
        calibrated(ridge(), fit(ridge(50), "diag"))


def test_a_perfect_fit_tells_no_scale() -> None:
    x = torch.eye(3, dtype=torch.float64)
    model = linear(torch.tensor([[1.0, 2.0, 3.0, 0.0]], dtype=torch.float64))
    task = blr.Task(model, (x, model(x).detach()), likelihood="gaussian")
    q = fit(task, "full")
    with pytest.raises(blr.errors.PosteriorError, match="tells the"):
        calibrated(task, q, 2)
    with pytest.raises(blr.errors.PosteriorError, match="tells the"):
        calibrated(task, q, indices=[0, 2])


def test_solves_that_do_not_converge_are_marked() -> None:
    task = network()
    with pytest.warns(RuntimeWarning, match="of 8 exact solves did not converge"):
        better = calibrated(task, fit(task, "diag"), 8, max_iterations=1, tolerance=1e-9)
    found = better.record["calibration"]
    assert not any(found["converged"]) and found["iterations"] == 1
    assert min(found["residual"]) > 1e-9
    assert calibration_table(better).converged.tolist() == [False] * 8


@pytest.mark.parametrize("kind", ["ggn", "descent"])
def test_what_preconditions_changes_the_cost_alone(kind: str, monkeypatch) -> None:
    task = ridge(c=2)
    q = fit(task, "diag")
    by_matrix = calibrated(task, q, 16, kind=kind).record["calibration"]
    monkeypatch.setattr(sys.modules[exact_removals.__module__], "DENSE", 0)
    by_posterior = calibrated(task, q, 16, kind=kind).record["calibration"]
    assert by_matrix["passes"] < 0.7 * by_posterior["passes"]
    assert by_matrix["exact"] == pytest.approx(by_posterior["exact"], rel=2e-3)
    assert all(by_matrix["converged"]) and all(by_posterior["converged"])


def test_a_hessian_that_is_not_positive() -> None:
    """An untrained network far from an optimum, next to no prior: saddle points all around."""
    task = network()
    with torch.no_grad():
        for p in task.model.parameters():
            p.mul_(8)
    q = fit(task, "diag", 1e-3)
    with (
        warnings.catch_warnings(),
        pytest.raises(blr.errors.PosteriorError, match="not positive"),
    ):
        warnings.simplefilter("ignore")
        calibrated(task, q, 8, kind="hessian")
    assert calibrated(task, q, 8).record["calibration"]["scale"] > 0  # Gauss–Newton always can


def test_the_model_is_left_as_it_is() -> None:
    task = network()
    task.model.train()
    before = {n: p.clone() for n, p in task.model.named_parameters()}
    q = fit(task, "kron")
    values = {k: v.clone() for k, v in q.form.tensors().items()}
    with torch.inference_mode():
        better = calibrated(task, q, 4)
    assert task.model.training and all(p.grad is None for p in task.model.parameters())
    assert all(torch.equal(p, before[n]) for n, p in task.model.named_parameters())
    assert all(torch.equal(v, values[k]) for k, v in q.form.tensors().items())
    assert "calibration" not in q.record and "calibration" in better.record
