"""The posterior as users hold it: what it answers, what it refuses, how it is kept."""

from __future__ import annotations

import json

import pytest
import torch
from models import example_models, mlp
from oracles import flatten, relative
from parts import normal
from torch import nn
from torch.distributions import Normal

from blr_analysis.errors import BLRError, InputError, PosteriorError
from blr_analysis.posterior import Posterior, fit_laplace
from blr_analysis.task import Task

MEAN = {"w": torch.tensor([[1.0, -2.0]]), "b": torch.tensor(0.5)}  # a scalar parameter too
PRECISION = {"w": torch.tensor([[4.0, 0.25]]), "b": torch.tensor(16.0)}


def posterior(**changes) -> Posterior:
    settings = dict(mean=MEAN, precision=PRECISION, prior_precision=0.1, n_data=10, record=None)
    settings |= changes
    return Posterior(settings.pop("mean"), settings.pop("precision"), **settings)


def task_for(model: nn.Module, n: int = 8) -> Task:
    return Task(model, (normal(n, 4), torch.arange(n) % 3))


def test_what_it_knows() -> None:
    q = posterior(record={"kind": "by hand"})
    assert (q.structure, q.n_data, q.prior_precision) == ("diag", 10, 0.1)
    assert torch.equal(q.variance("w"), torch.tensor([[0.25, 4.0]]))
    assert torch.equal(q.precision("b"), torch.tensor(16.0))
    assert "'diag'" in repr(q)
    assert "3 parameters" in repr(q)
    assert "n_data=10" in repr(q)
    assert "by hand" in repr(q)


def test_unknown_parameters_are_named_with_those_that_it_has() -> None:
    with pytest.raises(InputError, match=r"'weight'.*\['b', 'w'\]"):
        posterior().variance("weight")
    with pytest.raises(InputError, match="'v'"):
        posterior().precision("v")


def test_nothing_of_the_callers_is_kept_attached() -> None:
    weight = nn.Parameter(torch.ones(2))
    q = Posterior({"w": weight}, {"w": torch.ones(2)}, prior_precision=1.0, n_data=1)
    assert not q.mean["w"].requires_grad
    record = {"kind": "given"}
    other = posterior(record=record)
    other.record["kind"] = "changed"
    assert record == {"kind": "given"}


@pytest.mark.parametrize("n", [None, 1, 5])
def test_sample_shapes(n: int | None) -> None:
    draw = posterior().sample(generator=torch.Generator().manual_seed(0), n=n)
    lead = () if n is None else (n,)
    assert draw["w"].shape == (*lead, 1, 2)
    assert draw["b"].shape == lead


def test_sampling_leaves_the_global_generator_alone_when_given_one() -> None:
    before = torch.get_rng_state()
    posterior().sample(generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)
    posterior().sample()
    assert not torch.equal(torch.get_rng_state(), before)


def test_log_density_of_independent_normals() -> None:
    q = posterior()
    draws = q.sample(generator=torch.Generator().manual_seed(0), n=3)
    truth = sum(
        Normal(MEAN[n], PRECISION[n].rsqrt()).log_prob(draws[n]).reshape(3, -1).sum(1) for n in MEAN
    )
    assert relative(q.log_density(draws), truth) < 1e-6
    at_mean = sum(Normal(0.0, PRECISION[n].rsqrt()).log_prob(torch.tensor(0.0)).sum() for n in MEAN)
    assert float(q.log_density(MEAN)) == pytest.approx(float(at_mean), rel=1e-6)
    with pytest.raises(InputError, match="'b'"):
        q.log_density({"w": MEAN["w"]})


def test_to_another_dtype() -> None:
    q = posterior()
    double = q.to("cpu", torch.float64)
    assert double.mean["w"].dtype == torch.float64
    assert double.variance("w").dtype == torch.float64
    assert double.sample()["w"].dtype == torch.float64
    assert (double.n_data, double.prior_precision) == (10, 0.1)
    assert q.mean["w"].dtype == torch.float32
    assert q.to("cpu") is q


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": {"w": torch.tensor([[float("nan"), 0.0]]), "b": MEAN["b"]}}, "'w'.*NaN"),
        ({"mean": {"w": MEAN["w"], "b": torch.tensor(float("inf"))}}, "'b'.*inf"),
        ({"mean": {}, "precision": {}}, "at least one parameter"),
        ({"precision": {"w": torch.tensor([[1.0, -1.0]]), "b": MEAN["b"]}}, "'w'.*positive"),
        ({"precision": {"w": torch.zeros(1, 2), "b": MEAN["b"]}}, "'w'.*positive"),
        ({"precision": {"w": torch.tensor([[1.0, float("nan")]]), "b": MEAN["b"]}}, "'w'.*NaN"),
        ({"precision": {"w": torch.tensor([[1.0, float("inf")]]), "b": MEAN["b"]}}, "'w'.*inf"),
        ({"precision": {"w": torch.ones(2, 1), "b": MEAN["b"]}}, r"w: \(1, 2\).*\(2, 1\)"),
        ({"precision": {"w": PRECISION["w"]}}, "b: "),
        ({"precision": {**PRECISION, "c": torch.ones(3)}}, r"c: .*\(3,\)"),
        ({"n_data": None}, "n_data"),
        ({"n_data": -1}, "n_data.*-1"),
        ({"n_data": 2.5}, r"n_data.*2\.5"),
        ({"n_data": True}, "n_data.*True"),
        ({"prior_precision": -1.0}, r"prior_precision.*-1\.0"),
        ({"prior_precision": float("nan")}, "prior_precision.*nan"),
        ({"prior_precision": {"w": float("inf"), "b": 1.0}}, "prior_precision.*inf"),
    ],
)
def test_what_is_no_posterior_is_refused(changes, message: str) -> None:
    with pytest.raises(PosteriorError, match=message):
        posterior(**changes)


def test_a_posterior_without_n_data_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="n_data"):
        Posterior(MEAN, PRECISION, prior_precision=1.0)  # type: ignore[call-arg]


def test_a_prior_of_nought_is_a_posterior_without_a_prior() -> None:
    assert posterior(prior_precision=0.0).prior_precision == 0.0


class TestOnATask:
    """The check that every analysis begins with."""

    def fit(self, **options) -> tuple[Task, Posterior]:
        task = task_for(mlp())
        return task, fit_laplace(task, structure="kron", prior_precision=1.0, **options)

    def test_the_right_task(self) -> None:
        task, q = self.fit()
        assert q.on(task) is q

    def test_another_dtype_follows_the_model(self) -> None:
        _, q = self.fit()
        single = Task(mlp().float(), (normal(8, 4).float(), torch.arange(8) % 3))
        moved = q.on(single)
        assert all(t.dtype == torch.float32 for t in moved.form.tensors().values())

    def test_another_models_names_and_shapes_are_listed(self) -> None:
        _, q = self.fit()
        other = task_for(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double())
        with pytest.raises(PosteriorError) as caught:
            q.on(other)
        said = str(caught.value)
        for part in (
            "another model",
            "0.weight",
            "(5, 4)",
            "(6, 4)",
            "2.bias",
            "1.weight",
            "(3, 6)",
        ):
            assert part in said, f"{part} is missing in: {said}"

    def test_more_data_than_it_was_learned_from(self) -> None:
        _, q = self.fit()
        with pytest.raises(PosteriorError, match=r"n_data=8.*9"):
            q.on(task_for(mlp(), 9))
        assert q.on(task_for(mlp(), 9), same_data=False) is q

    def test_layers_added_since(self) -> None:
        _, q = self.fit()
        grown = mlp()
        grown.append(nn.Linear(3, 3).double())
        with pytest.raises(PosteriorError, match=r"3\.weight"):
            q.on(task_for(grown))

    def test_layers_frozen_before_the_fit_are_no_difference(self) -> None:
        model = mlp()
        model[0].requires_grad_(False)
        task = task_for(model)
        q = fit_laplace(task, structure="diag", prior_precision=1.0, progress=False)
        model.requires_grad_(True)
        assert set(q.on(task).mean) == {"2.weight", "2.bias"}


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("folder", [False, True])
def test_priors_of_every_form_are_saved_to_the_bit(tmp_path, structure: str, folder: bool) -> None:
    task = task_for(mlp())
    generator = torch.Generator().manual_seed(0)
    by_name = {n: 0.1 + i / 3 for i, n in enumerate(task.parameters())}
    by_weight = {
        n: torch.rand(p.shape, generator=generator, dtype=p.dtype) + 0.1
        for n, p in task.parameters().items()
    }
    layerwise = {n: 1 / 3 if n.startswith("0") else 2 / 3 for n in by_name}
    priors = [0.1, layerwise] if structure == "kron" else [0.1, by_name, by_weight]
    for number, prior in enumerate(priors):
        q = fit_laplace(task, structure=structure, prior_precision=prior, progress=False)
        path = tmp_path / (f"{number}" if folder else f"{number}.safetensors")
        q.save(path)
        back = Posterior.load(path)
        if isinstance(prior, float):
            assert back.prior_precision == prior
            continue
        assert list(back.prior_precision) == list(prior)
        for name, value in prior.items():
            found = back.prior_precision[name]
            if isinstance(value, torch.Tensor):
                assert torch.equal(found, value)
            else:
                assert found == value


def test_tied_weights_are_held_and_saved_once(tmp_path) -> None:
    model, ids = example_models()["words_tied"]
    task = Task(model, (ids, torch.arange(len(ids)) % 7))
    q = fit_laplace(task, structure="kron", prior_precision=1.0, progress=False)
    assert "words.weight" in q.mean
    assert "read.weight" not in q.mean
    q.save(tmp_path / "q")
    names = json.loads(next((tmp_path / "q").glob("*.index.json")).read_text())["weight_map"]
    assert not any(name.startswith("read.weight") for name in names)
    back = Posterior.load(tmp_path / "q")
    assert relative(flatten(back.mean), flatten(q.mean)) == 0
    assert back.on(task) is back


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_models_with_a_scalar_parameter(tmp_path, structure: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.gain = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x):
            return self.gain * self.inner(x)

    task = task_for(Scaled())
    q = fit_laplace(task, structure=structure, prior_precision=1.0, progress=False)
    assert q.variance("gain").shape == ()
    assert q.sample()["gain"].shape == ()
    assert q.sample(n=2)["gain"].shape == (2,)
    assert q.log_density(q.sample(n=2)).shape == (2,)
    q.save(tmp_path / "q.safetensors")
    back = Posterior.load(tmp_path / "q.safetensors")
    assert torch.equal(back.mean["gain"], q.mean["gain"])
    assert back.variance("gain").shape == ()


def test_every_refusal_is_one_that_users_can_catch() -> None:
    assert issubclass(PosteriorError, BLRError)
    assert issubclass(PosteriorError, ValueError)
