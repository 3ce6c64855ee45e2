"""The benchmark's own arithmetic, and how it talks to packages in environments of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

import blr_analysis as blr
from benchmarks.agreement import influences, metrics, runner
from benchmarks.agreement.cases import Case, small

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
