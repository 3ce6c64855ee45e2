"""The posterior as users hold it: what it answers, what it refuses, how it is kept."""

from __future__ import annotations

import json

import pytest
import torch
from models import example_models, mlp
from oracles import flatten, relative
from parts import normal
from torch import nn

from blr_analysis.errors import PosteriorError
from blr_analysis.posterior import Posterior, fit_laplace
from blr_analysis.sensitivity import sensitivity
from blr_analysis.task import Task

MEAN = {"w": torch.tensor([[1.0, -2.0]]), "b": torch.tensor(0.5)}  # a scalar parameter too
PRECISION = {"w": torch.tensor([[4.0, 0.25]]), "b": torch.tensor(16.0)}


def posterior(**changes) -> Posterior:
    settings = dict(mean=MEAN, precision=PRECISION, prior_precision=0.1, n_data=10, record=None)
    settings |= changes
    return Posterior(settings.pop("mean"), settings.pop("precision"), **settings)


def task_for(model: nn.Module, n: int = 8) -> Task:
    return Task(model, (normal(n, 4), torch.arange(n) % 3))


class Wrapped(nn.Module):
    """As torch.compile, FSDP and checkpoint wrappers name what is inside of them."""

    def __init__(self, name: str, inside: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.name)(x)


@pytest.mark.parametrize("structure", ["diag", "kron", "lowrank", "full"])
@pytest.mark.parametrize("name", ["_orig_mod", "_fsdp_wrapped_module", "module"])
def test_posteriors_fit_wrapped_models_and_bare_ones(structure: str, name: str) -> None:
    bare = mlp()
    inside = nn.Sequential(*bare.children()) if name == "module" else nn.Sequential(
        Wrapped(name, bare[0]), *bare[1:]
    )  # fmt: skip
    wrapped = Wrapped(name, inside) if name == "module" else inside
    tasks = [task_for(bare), task_for(wrapped)]
    assert list(tasks[0].parameters()) != list(tasks[1].parameters())
    how = dict(structure=structure, progress=False, prior_precision=0.7)
    for one, other in (tasks, tasks[::-1]):
        q = fit_laplace(one, initial={n: p + 0.1 for n, p in one.parameters().items()}, **how)
        own = sensitivity(one, q, progress=False).self_influence
        assert relative(sensitivity(other, q, progress=False).self_influence, own) < 1e-10
        moved = q.on(other)
        assert list(moved.mean) == list(moved.initial) == list(other.parameters())


def test_nothing_of_the_callers_is_kept_attached() -> None:
    weight = nn.Parameter(torch.ones(2))
    q = Posterior({"w": weight}, {"w": torch.ones(2)}, prior_precision=1.0, n_data=1)
    assert not q.mean["w"].requires_grad
    record = {"kind": "given"}
    other = posterior(record=record)
    other.record["kind"] = "changed"
    assert record == {"kind": "given"}


def test_sampling_leaves_the_global_generator_alone_when_given_one() -> None:
    before = torch.get_rng_state()
    posterior().sample(generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)
    posterior().sample()
    assert not torch.equal(torch.get_rng_state(), before)


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

    def test_another_dtype_follows_the_model(self) -> None:
        _, q = self.fit()
        single = Task(mlp().float(), (normal(8, 4).float(), torch.arange(8) % 3))
        moved = q.on(single)
        assert all(t.dtype == torch.float32 for t in moved.form.tensors().values())

    def test_more_data_than_it_was_learned_from(self) -> None:
        _, q = self.fit()
        with pytest.raises(PosteriorError, match=r"n_data=8.*9"):
            q.on(task_for(mlp(), 9))
        assert q.on(task_for(mlp(), 9), same_data=False) is q


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
