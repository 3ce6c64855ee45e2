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
from benchmarks.agreement import influences, metrics, runner
from benchmarks.agreement.cases import Case, small
from benchmarks.truth import cases, store
from benchmarks.truth.__main__ import main
from benchmarks.truth.cases import Data, Recipe
from benchmarks.truth.retrain import KINDS, Truth
from blr_analysis.errors import DataError

N, M = 60, 30
TINY = Recipe("tiny", N, M, (4, 3), "categorical", 0.7, loo=5, subsets=2)


def numbers(n: int, m: int) -> Data:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n + m, 4, dtype=torch.float64, generator=generator)
    slopes, noise = (
        torch.randn(k, 3, dtype=torch.float64, generator=generator) for k in (4, n + m)
    )
    y = (x @ slopes + 0.7 * noise).argmax(1)
    return Data(x[:n], y[:n], x[n:], y[n:])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Truth:
    """A case called "tiny", in a cache of its own."""
    monkeypatch.setenv("BLR_CACHE", str(tmp_path))
    monkeypatch.setitem(cases.SOURCES, "tiny", numbers)
    monkeypatch.setitem(cases.CASES, "tiny", TINY)
    return Truth("tiny")


def written() -> dict[str, bytes]:
    """Every stored tensor of the case "tiny", as bytes, by file and name."""
    found = {}
    for path in sorted(store.folder("tiny").rglob("*.safetensors")):
        file = store.read(path, cases.CASES["tiny"].hash)
        assert file is not None
        for name, t in file.tensors.items():
            found[f"{path.parent.name}/{path.name}/{name}"] = np.asarray(t).tobytes()
    return found


def coefficients(x: torch.Tensor, y: torch.Tensor, delta: float) -> np.ndarray:
    """scikit-learn's logistic regression with the bias penalised like the other weights."""
    ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    fit = LogisticRegression(C=1 / delta, fit_intercept=False, solver="newton-cholesky", tol=1e-10)
    return fit.fit(ones.numpy(), y.numpy()).coef_


def as_rows(theta: torch.Tensor) -> np.ndarray:
    return torch.cat([theta[:12].view(3, 4), theta[12:, None]], 1).numpy()


def test_the_minimum_is_that_of_scikit_learn(tiny: Truth) -> None:
    main(["--case", "tiny", "--what", "loo", "class", "A"])
    x, y, *_ = tiny.data
    assert tiny.base.record["converged"]
    assert as_rows(tiny.theta) == pytest.approx(coefficients(x, y, 0.7), abs=1e-6)
    for kind, count in (("loo", 5), ("class", 3), ("A", 2)):
        table = tiny.retrained(kind)
        assert table is not None and len(table) == count and bool(table.converged.all())
        for theta, kept in [] if kind == "class" else zip(table.theta, table.kept, strict=True):
            expected = coefficients(x[kept], y[kept], 0.7)
            assert as_rows(theta) == pytest.approx(expected, abs=1e-4)
    assert tiny.retrained("B") is None


def test_what_is_stored_is_what_the_weights_give(tiny: Truth) -> None:
    main(["--case", "tiny"])
    x, y, x_test, y_test = tiny.data
    for kind in KINDS:
        table = tiny.retrained(kind)
        assert table is not None
        for k, theta in enumerate(table.theta):
            model = tiny.model(theta)
            for given, targets, kept in (
                (x, y, table.train_losses),
                (x_test, y_test, table.test_losses),
            ):
                losses = torch.nn.functional.cross_entropy(model(given), targets, reduction="none")
                torch.testing.assert_close(kept[k], losses.detach())
            assert not bool(table.kept[k][table.removed[k]].any())
    loo = tiny.retrained("loo")
    assert loo is not None
    before = tiny.base.tensors["train_losses"][torch.cat(loo.removed)]
    assert bool((loo.left_out_losses > before).all())  # an example left out is missed


def test_an_interrupted_run_goes_on_where_it_stopped(tiny: Truth) -> None:
    main(["--case", "tiny", "--what", "class", "loo"])
    whole = written()
    stopped = sorted(store.folder("tiny").glob("*/*.safetensors"))[1::2]
    for path in stopped:
        path.unlink()
    stopped[0].write_bytes(b"half a file")
    kept = {path: path.stat().st_mtime_ns for path in store.folder("tiny").glob("*/*.safetensors")}
    del kept[stopped[0]]
    main(["--case", "tiny", "--what", "class", "loo"])
    assert written() == whole
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())


def test_a_changed_recipe_is_computed_again(tiny: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["--case", "tiny", "--what", "class"])
    before = float(tiny.theta.norm())
    monkeypatch.setitem(cases.CASES, "tiny", replace(TINY, delta=2.0))
    with pytest.raises(DataError, match=r"python -m benchmarks\.truth --case tiny"):
        assert len(Truth("tiny").theta)
    assert Truth("tiny").retrained("class") is None
    main(["--case", "tiny", "--what", "class"])
    assert float(Truth("tiny").theta.norm()) < before
    monkeypatch.setitem(cases.CASES, "tiny", replace(TINY, delta=2.0, loo=9))
    classes = Truth("tiny").retrained("class")  # counts change no result
    assert classes is not None and len(classes) == 3


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
    return small(subsets=2, left_out=2)


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


@pytest.mark.slow
def test_retrainings_of_the_small_case_are_at_their_minimum(case: Case) -> None:
    task = case.task()
    gradients = influences.gradients(task, task.parameters())
    for name, weight in task.parameters().items():
        rest = gradients[name].sum(0) + case.delta * weight
        assert float(rest.norm()) < 1e-5 * float(gradients[name].norm())


@pytest.mark.slow
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

    for curvature in ("ggn", "exact"):
        found = influences.fitted(task, tests, "full", case.delta, curvature)
        torch.testing.assert_close(found, exact(1.0), rtol=1e-8, atol=1e-12)


@pytest.mark.slow
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
