"""The figures of the papers, small: each shows what its paper says, and HMC is right."""

import pandas as pd
import pytest
import torch
from torch import nn

from benchmarks import figures


def numbers(name: str) -> dict[str, float]:
    figure, found = figures.FIGURES[name](True)
    assert all(axes.has_data() for axes in figure.axes)
    return found


def test_posteriors_of_two_weights() -> None:
    """Deviations in units of mean-field's: Gauss–Newton is right, ĝ² of M = 10 too wide."""
    found = numbers("posterior_quality")
    assert found["VOGN, M = 1"] == pytest.approx(1, abs=0.15)
    assert found["VOGGN"] == pytest.approx(1, abs=0.05)
    assert found["Vadam, M = 10"] > 1.5
    assert max(v for k, v in found.items() if k.endswith("mean")) < 0.4


def test_theorem_1() -> None:
    found = numbers("minibatch_variance")
    assert found["error"] < 0.08 and found["ratio at N"] > 2


def test_gauss_newton_is_fast() -> None:
    found = numbers("fast_gauss_newton")
    rest = [found[f"{kind}: −ELBO over all epochs"] for kind in ("Vadam", "black-box VI")]
    assert found["VOGN: −ELBO over all epochs"] < 0.8 * min(rest)


def test_vadam_leaves_the_narrow_well() -> None:
    found = numbers("two_wells")
    assert found["gradient descent"] == pytest.approx(-1, abs=0.05)
    assert found["Vadam"] == pytest.approx(1.9, abs=0.4)


def test_a_segmentation_is_unsure_where_it_may_be_wrong() -> None:
    found = numbers("segmentation")
    assert found["share wrong"] < 0.05
    assert found["entropy at borders"] > 5 * found["entropy elsewhere"]
    assert found["entropy where wrong"] > found["entropy at borders"]


def test_false_labels_come_apart_while_training() -> None:
    found = list(numbers("evolving").values())
    assert found == sorted(found) and found[0] < 1.2 and found[-1] > 1.8


def test_hamiltonian_monte_carlo_and_black_box_vi_of_a_linear_model() -> None:
    """Against the Gaussian posterior of ridge regression, and its mean-field optimum."""
    torch.manual_seed(0)
    x, y, delta, n = torch.randn(30, 2), torch.randn(30, 1), 2.0, 30
    model = nn.Linear(2, 1, bias=False)

    def nll(net: nn.Module) -> torch.Tensor:
        return 0.5 * (net(x) - y).square().mean()

    precision = x.T @ x + delta * torch.eye(2)
    mean = torch.linalg.solve(precision, x.T @ y)
    drawn = figures.hmc(model, nll, n, delta, 300, torch.eye(2))
    torch.testing.assert_close(drawn.mean(0), mean[:, 0], rtol=0, atol=0.04)
    torch.testing.assert_close(drawn.T.cov(), torch.linalg.inv(precision), rtol=0.3, atol=0.005)
    optimizer = figures.BlackBox(model, 0.01, n, delta)
    figures.train(optimizer, lambda i: nll(model), n, 800, n)
    torch.testing.assert_close(optimizer.mean[0].detach(), mean.T, rtol=0, atol=0.05)
    deviations = precision.diagonal().rsqrt()[None]
    torch.testing.assert_close(optimizer.log_sd[0].exp().detach(), deviations, rtol=0.2, atol=0)


def test_the_curves_of_exploration_are_those_of_the_table() -> None:
    found, table = numbers("exploration"), pd.read_csv(figures.RESULTS / "exploration.csv")
    for row in table.itertuples():
        assert found[f"{row.task}: {row.kind}"] == pytest.approx(row.all, abs=0.051)


def test_vadam_comes_down_before_black_box_vi() -> None:
    found = numbers("against_black_box")
    vadam, other = (found[f"{kind}: −ELBO over all epochs"] for kind in ("Vadam", "black-box VI"))
    assert vadam < 0.85 * other
    assert found["Vadam: −ELBO"] < found["black-box VI: −ELBO"]


def test_posteriors_are_wide_in_the_gap_and_a_mixture_wider_than_one() -> None:
    found = numbers("gap")
    ways = {"HMC": 4, "one IVON": 1.5, "mixture of 3 IVONs": 1.5}
    assert all(found[f"{way}: gap"] > times * found[f"{way}: data"] for way, times in ways.items())
    off = [abs(found[f"{way}: gap"] - found["HMC: gap"]) for way in [*ways][1:]]
    assert found["mixture of 3 IVONs: gap"] > found["one IVON: gap"] and off[1] < off[0]
