"""The benchmarks' truth: converged minima, files that survive an interruption, changed recipes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression
from torch import Tensor

import blr_analysis as blr
from benchmarks import truth
from benchmarks.agreement import influences, metrics, runner
from benchmarks.agreement.cases import Case, small
from benchmarks.truth import recipes, retrain, sources, store
from benchmarks.truth.__main__ import main
from blr_analysis.errors import DataError

N, M = 60, 30
TINY = recipes.Recipe(
    *("tiny", N, M, (4, 3), "categorical", 0.7), loo=(3, 2), subsets=2, relabel=2, dense=True
)


def numbers(recipe: recipes.Recipe) -> sources.Split:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(N + M, 4, dtype=torch.float64, generator=generator)
    slopes, noise = (
        torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (4, N + M)
    )
    scores = x @ slopes + 0.7 * noise
    y = scores[:, 0] if recipe.likelihood == "gaussian" else scores.argmax(1)
    return sources.Split(x[:N], y[:N], x[N:], y[N:])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> recipes.Recipe:
    """A case called "tiny", in a cache of its own."""
    monkeypatch.setenv("BLR_CACHE", str(tmp_path))
    monkeypatch.setitem(sources.SOURCES, "tiny", numbers)
    monkeypatch.setitem(recipes.CASES, "tiny", TINY)
    return TINY


def written(kind: str = "") -> dict[str, bytes]:
    """Every stored tensor of the case "tiny", as bytes, by file and name."""
    found = {}
    for path in sorted(store.folder("tiny").rglob(f"{kind}*/*.safetensors")):
        file = store.read(path, recipes.CASES["tiny"].hash)
        assert file is not None
        found |= {
            f"{path.parent.name}/{path.name}/{name}": np.asarray(t).tobytes()
            for name, t in file.tensors.items()
        }
    return found


def coefficients(x: torch.Tensor, y: torch.Tensor, delta: float) -> np.ndarray:
    """scikit-learn's logistic regression with the bias penalised like the other weights."""
    ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    fit = LogisticRegression(C=1 / delta, fit_intercept=False, solver="newton-cholesky", tol=1e-10)
    return fit.fit(ones.numpy(), y.numpy()).coef_


def as_rows(theta: torch.Tensor) -> np.ndarray:
    return torch.cat([theta[:12].view(3, 4), theta[12:, None]], 1).numpy()


def test_the_minimum_is_that_of_scikit_learn(tiny: recipes.Recipe) -> None:
    main(["--case", "tiny", "--what", "loo", "class"])
    case = truth.load("tiny")
    x, y = case.train
    assert case.record["converged"]
    assert as_rows(case.theta) == pytest.approx(coefficients(x, y, 0.7), abs=1e-6)
    for table in (case.loo, case.classes):
        assert bool(table.converged.all())
    for k, theta in enumerate(case.loo.theta):
        kept = case.loo.kept[k]
        assert int(kept.sum()) == N - 1
        expected = coefficients(x[kept], y[kept], 0.7)
        # strongly convex: no further from the minimum than gradient norm / δ
        gap = float(np.linalg.norm(as_rows(theta) - expected))
        assert gap <= float(case.loo.gradient_norm[k]) / 0.7 + 1e-8


def test_the_minimum_is_that_of_ridge_regression(tiny: recipes.Recipe) -> None:
    ridge = replace(TINY, widths=(4, 1), likelihood="gaussian", noise=0.3)
    x, y, *_ = numbers(ridge)
    minimum, _ = retrain.descend(ridge, x, y, retrain.fresh(ridge, 0), 1e-10)
    ones = torch.cat([x, torch.ones(N, 1, dtype=x.dtype)], 1)
    left = ones.T @ ones / 0.3 + 0.7 * torch.eye(5, dtype=x.dtype)
    exact = torch.linalg.solve(left, ones.T @ y / 0.3)
    assert minimum.converged
    torch.testing.assert_close(minimum.theta, exact, rtol=0, atol=1e-6)


def test_a_start_in_single_precision_ends_at_the_same_minimum(tiny: recipes.Recipe) -> None:
    x, y, *_ = numbers(TINY)
    start = retrain.fresh(TINY, 0)
    double, none = retrain.descend(TINY, x, y, start, 1e-9)
    both, some = retrain.descend(replace(TINY, mixed=True), x, y, start, 1e-9)
    assert both.converged and none == 0 and 0 < some < both.evaluations
    torch.testing.assert_close(both.theta, double.theta, rtol=0, atol=1e-7)


def test_what_is_stored_is_what_the_weights_give(tiny: recipes.Recipe) -> None:
    main(["--case", "tiny"])
    case = truth.load("tiny")
    assert len(case.loo) == 5 and sorted(set(case.loo.notes)) == ["random", "top"]
    assert case.classes.notes == ["0", "1", "2"]
    assert len(case.relabel) == 2
    for table in (case.loo, case.classes, case.relabel, case.subsets("B")):
        for k, theta in enumerate(table.theta):
            x, y = case.test
            losses = torch.nn.functional.cross_entropy(case.model(theta)(x), y, reduction="none")
            torch.testing.assert_close(table.test_losses[k], losses.detach())
            f = case.model(theta)(case.train[0]).detach()
            touched = [*table.removed[k].tolist(), *(i for i, _ in table.relabelled[k])]
            torch.testing.assert_close(table.left_out_outputs[k], f[sorted(touched)])
            nll = torch.nn.functional.cross_entropy(f, case.train[1], reduction="none")
            torch.testing.assert_close(table.train_losses[k], nll)
    before = case.train_losses[torch.cat(case.loo.removed)]
    assert bool((case.loo.left_out_losses > before).all())  # an example left out is missed


def test_an_interrupted_run_goes_on_where_it_stopped(
    tiny: recipes.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["--case", "tiny", "--what", "class", "loo"])
    whole = written()
    stopped = sorted(store.folder("tiny").glob("*/*.safetensors"))[1::2]
    for path in stopped:
        path.unlink()
    stopped[0].write_bytes(b"half a file")
    made = []
    once = retrain.retrain
    monkeypatch.setattr(
        "benchmarks.truth.__main__.retrain", lambda *a: made.append(a[1].name) or once(*a)
    )
    main(["--case", "tiny", "--what", "class", "loo"])
    assert sorted(made) == sorted(path.stem for path in stopped)
    assert written() == whole


def test_a_changed_recipe_is_computed_again(
    tiny: recipes.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["--case", "tiny", "--what", "class"])
    before = truth.load("tiny")
    classes = before.classes
    monkeypatch.setitem(recipes.CASES, "tiny", replace(TINY, delta=2.0))
    with pytest.raises(DataError, match=r"python -m benchmarks\.truth --case tiny"):
        truth.load("tiny")
    main(["--case", "tiny", "--what", "class"])
    after = truth.load("tiny")
    assert float(after.theta.norm()) < float(before.theta.norm())
    assert float(after.classes.theta.norm()) < float(classes.theta.norm())
    monkeypatch.setitem(recipes.CASES, "tiny", replace(TINY, delta=2.0, loo=(9, 9), chunk=7))
    assert len(truth.load("tiny").classes) == 3  # counts and chunks change no result


# The benchmark's own arithmetic, and how it talks to packages in environments of their own.


FAKE = """
import json, sys
from pathlib import Path
import torch
from problem import Problem, main


def methods(folder):
    problem = Problem(folder, torch.float64)

    def outputs():
        return problem.model()(problem.x) @ problem.model()(problem.x_test).T

    def broken():
        raise ValueError("a reason")

    return {
        "outputs": outputs,
        "broken": broken,
        "short": lambda: outputs()[:3],
        "nan": lambda: outputs() * torch.nan,
    }


main(methods)
"""


@pytest.fixture(scope="module")
def case() -> Case:
    return small(subsets=6, left_out=5)


def test_rank_correlations_are_those_of_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(6, (40, 3), generator=generator).double()  # with ties
    b = torch.randn(40, 3, generator=generator) + a
    found = metrics.spearman(a, b)
    for j in range(3):
        assert float(found[j]) == pytest.approx(stats.spearmanr(a[:, j], b[:, j])[0], abs=1e-12)
    alone = metrics.spearman(a[:, 0], b[:, 0])
    assert float(alone) == pytest.approx(float(found[0]), abs=1e-12)
    linear = stats.pearsonr(a[:, 1], b[:, 1])[0]
    assert float(metrics.pearson(a, b)[1]) == pytest.approx(linear, abs=1e-12)


def additive(n: int = 30, m: int = 4, k: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    """Influences, subsets, and losses that are the influences' own sums."""
    generator = torch.Generator().manual_seed(1)
    influence = torch.randn(n, m, generator=generator).double()
    kept = torch.rand(k, n, generator=generator) < 0.5
    return influence, kept, (~kept).double() @ influence


def test_a_loss_that_is_a_sum_of_influences_scores_one() -> None:
    influence, kept, losses = additive()
    assert metrics.linear_datamodeling(influence, kept, losses).value == pytest.approx(1)
    assert metrics.linear_datamodeling(-influence, kept, losses).value == pytest.approx(-1)
    mixed = metrics.linear_datamodeling(influence * torch.tensor([1.0, 1, 1, -1]), kept, losses)
    assert mixed.value == pytest.approx(0.5)
    assert mixed.error == pytest.approx(1 / 2 * 3**0.5 / 2, rel=0.15)  # σ of ±1, √4 examples


def test_retrainings_of_the_small_case_are_at_their_minimum(case: Case) -> None:
    task = case.task()
    gradients = influences.gradients(task, task.parameters())
    for name, weight in task.parameters().items():
        rest = gradients[name].sum(0) + case.delta * weight
        assert float(rest.norm()) < 1e-5 * float(gradients[name].norm())


def test_our_influences_are_those_of_dense_algebra(case: Case) -> None:
    task = case.task()
    tests = case.test_task(task, 7)
    softmax = task.model(case.x).softmax(1).detach()
    inputs = torch.cat([case.x, torch.ones(len(case.x), 1).double()], 1)
    blocks = torch.diag_embed(softmax) - softmax[:, :, None] * softmax[:, None]
    hessian = torch.einsum("nab,ni,nj->aibj", blocks, inputs, inputs).reshape(650, 650)

    def flat(one: blr.Task) -> Tensor:
        held = influences.gradients(one, task.parameters())
        return torch.cat([held["0.weight"], held["0.bias"][:, :, None]], 2).flatten(1)

    def exact(weight: float) -> Tensor:
        whole = weight * hessian + case.delta * torch.eye(650).double()
        return flat(task) @ torch.linalg.solve(whole, flat(tests).T)

    for found in (influences.fitted(task, tests, "full", case.delta),):
        torch.testing.assert_close(found, exact(1.0), rtol=1e-8, atol=1e-12)
    by_cg = influences.solved(task, tests, case.delta)
    assert float((by_cg - exact(1.0)).norm() / exact(1.0).norm()) < 1e-2


def test_at_half_weight_the_expansion_predicts_subsets_better(case: Case) -> None:
    truth = case.subsets
    assert truth is not None
    tests = case.test_task(case.task())
    whole = influences.fitted(case.task(), tests, "full", case.delta)
    half = influences.at_weight(case, tests, "full")
    scores = [metrics.linear_datamodeling(i, truth.kept, truth.losses).value for i in (whole, half)]
    assert scores[1] > scores[0] > 0.8
    torch.testing.assert_close(influences.at_weight(case, tests, "full", keep=1.0), whole)


def test_a_peer_answers_through_files(case: Case, tmp_path: Path) -> None:
    script = tmp_path / "run_fake.py"
    (tmp_path / "problem.py").write_text((runner.SCRIPTS / "problem.py").read_text())
    script.write_text(FAKE)
    x, y = case.x_test[:4], case.y_test[:4]
    found = {a.name: a for a in runner.ask(Path(sys.executable), script, case, x, y, 60)}
    model = case.model()
    expected = (model(case.x) @ model(x).T).detach()
    answer = found["outputs"].influence
    assert answer is not None
    torch.testing.assert_close(answer, expected)
    assert 0 < found["outputs"].seconds < 60
    assert found["broken"].influence is None and "a reason" in found["broken"].error
    assert "shape (3, 4), expected (400, 4)" in found["short"].error
    assert "NaN" in found["nan"].error
