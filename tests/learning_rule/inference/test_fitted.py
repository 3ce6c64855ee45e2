"""What every fitted model answers, and when it says that it cannot."""

from __future__ import annotations

import math

import pytest
import torch

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families import Beta, DiagonalGaussian
from blr_analysis.learning_rule.inference import (
    Conjugate,
    Fitted,
    NotConverged,
    SkewNormal,
    bernoulli,
    fit_skew_normal,
)
from blr_analysis.learning_rule.inference import fitted as module
from blr_analysis.learning_rule.inference.fitted import indexed, total, until_flat

Y = torch.tensor([1.0, 0.0, 1.0, 1.0])


def coin() -> Fitted[Beta]:
    return Conjugate(Beta(torch.tensor(1.0), torch.tensor(1.0)), bernoulli()).fit(Y)


@pytest.mark.parametrize(
    "chosen",
    [[0, 1], torch.tensor([1, 0, 0]), {0, 1}, torch.tensor([True, True, False, False])],
)
def test_examples_are_named_by_index_or_mask_and_count_once(chosen: object) -> None:
    q = coin().without(chosen)
    assert (float(q.a), float(q.b)) == (3.0, 1.0)


def test_nothing_taken_out_is_the_posterior() -> None:
    fitted = coin()
    assert fitted.without([]) is fitted.q


@pytest.mark.parametrize(
    ("chosen", "match"),
    [([4], "example 4"), ([-1], "example -1"), (torch.ones(3).bool(), "3 entries for 4")],
)
def test_examples_that_do_not_exist_are_named(chosen: object, match: str) -> None:
    with pytest.raises(InputError, match=match):
        coin().without(chosen)


def test_many_examples_are_added_up_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, left_out = coin().without([0, 2, 3]), coin().left_out()
    monkeypatch.setattr(module, "CHUNK", 2)
    parts = coin().without([0, 2, 3])
    assert (whole.a, whole.b) == (parts.a, parts.b)
    torch.testing.assert_close(coin().left_out(), left_out)
    sizes = []

    def site_of(chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        sizes.append(len(chosen))
        return {"a": chosen.double()}

    assert float(total(site_of, torch.arange(5))["a"]) == 10.0
    assert sizes == [2, 2, 1]


def test_a_mean_field_moves_only_the_factors_with_sites() -> None:
    node = DiagonalGaussian(torch.zeros(3), torch.ones(3))
    sites = {"right": {"linear": torch.eye(3), "square": -0.25 * torch.eye(3)}}
    fitted = Fitted(
        q={"left": node, "right": DiagonalGaussian(torch.ones(3), 2 * torch.ones(3))},
        history=[0.0],
        objective="ELBO",
        n_data=3,
        site_of=indexed(sites),
    )
    q = fitted.without([2])
    assert q["left"] is node
    torch.testing.assert_close(q["right"].precision, torch.tensor([2.0, 2.0, 1.5]))
    torch.testing.assert_close(q["right"].mean, torch.tensor([1.0, 1.0, 1 / 1.5]))
    assert fitted.sites["right"]["linear"].shape == (3, 3)


def test_what_a_model_does_not_have_is_said() -> None:
    bare = Fitted(q=coin().q, history=[0.0], objective="ELBO", n_data=4)
    for ask in (lambda: bare.without([0]), lambda: bare.sites, bare.left_out):
        with pytest.raises(InputError, match="has no sites"):
            ask()
    with pytest.raises(InputError, match="no closed form"):
        bare.log_predictive(Y)
    whole = coin()
    unkept = Fitted(
        q=whole.q,
        history=[0.0],
        objective="ELBO",
        n_data=4,
        site_of=whole.site_of,
        predictive=whole.predictive,
    )
    with pytest.raises(InputError, match="pass data="):
        unkept.left_out()


def test_iterations_stop_when_the_objective_rests() -> None:
    values = [0.0, 1.0, 1.15, 1.2, 9.0]
    run = until_flat(values.__getitem__, "bound", max_iter=5, tol=0.1)
    assert run["history"] == [0.0, 1.0, 1.15, 1.2] and run["converged"]
    with pytest.warns(NotConverged, match="the bound still changed by more than 0.1 after 3"):
        run = until_flat(float, "bound", max_iter=3, tol=0.1)
    assert run["history"] == [0.0, 1.0, 2.0] and not run["converged"]
    run = until_flat(lambda t: 0.0, "bound", max_iter=3, tol=0.1, noisy=True)
    assert run == {"history": [0.0] * 3, "objective": "bound", "converged": False}
    with pytest.raises(InputError, match="the bound became nan at iteration 2"):
        until_flat([0.0, math.nan, 1.0].__getitem__, "bound", max_iter=3, tol=0.1)


def test_the_table_says_what_each_example_did() -> None:
    fitted = coin()
    table, log = fitted.table, math.log
    assert table["index"].tolist() == [0, 1, 2, 3]
    # Beta(1, 1) and three heads of four: 4/6 for a head, 3/5 without it; 2/6 for the tail, 1/5.
    assert table.log_predictive.tolist() == pytest.approx(
        [log(x) for x in (2 / 3, 1 / 3, 2 / 3, 2 / 3)]
    )
    assert table.left_out.tolist() == pytest.approx([log(x) for x in (3 / 5, 1 / 5, 3 / 5, 3 / 5)])
    assert table.gain.tolist() == pytest.approx(
        [log(x) for x in (10 / 9, 5 / 3, 10 / 9, 10 / 9)], rel=1e-5
    )
    with pytest.raises(InputError, match="has no sites"):
        _ = Fitted(q=fitted.q, history=[0.0], objective="ELBO").table


@pytest.mark.parametrize("converged", [True, False])
def test_the_picture_shows_the_history(converged: bool) -> None:
    fitted = Fitted(coin().q, [-3.0, -2.0, -1.5], "ELBO", converged=converged)
    ax = fitted.plot()
    assert ax.lines[0].get_ydata().tolist() == [-3.0, -2.0, -1.5]
    assert ax.lines[0].get_xdata().tolist() == [1, 2, 3]
    assert ax.get_ylabel() == "ELBO [nats]"
    assert (ax.get_legend() is None) == converged
    with pytest.raises(InputError, match="history is empty"):
        Fitted(coin().q, [], "ELBO").plot()


def test_results_show_what_to_know_of_them() -> None:
    whole = coin()
    assert repr(whole).startswith("Fitted(log evidence") and whole.note == ""
    start = SkewNormal(*torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    leaning = fit_skew_normal(
        lambda theta: -0.5 * theta.square(),
        start,
        log_likelihood=lambda y, theta: y[:, None] * theta - theta.exp(),
        data=torch.tensor([1.0, 2.0], dtype=torch.float64),
        tol=1e-5,
    )
    shown = (leaning, blr.leave_one_out(None, leaning), blr.sensitivity(None, leaning))
    assert all("one step" in repr(result) for result in shown)
    assert "one step" in leaning.table.attrs["note"]
