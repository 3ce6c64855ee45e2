"""Precisions beside a model: what is written is what is read, rounded only where it was asked."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blr_analysis import Posterior, Task, fit_laplace
from blr_analysis.errors import PosteriorError
from blr_analysis.files import Folder, fingerprint, storage
from blr_analysis.files.storage import FIELDS
from blr_analysis.learning_rule.optim import IVON
from blr_analysis.posterior import read_precision_record, write_captured, write_precision
from blr_analysis.posterior.capture import from_optimizer
from blr_analysis.posterior.precision_files import KINDS

N = 50
ABOUT: dict[str, Any] = {"kind": "fisher_emp", "definition": "sum_i g_i^2", "n_data": N}
HALF_ULP = 2.0**-8  # the largest relative error of rounding to bfloat16's 8 bits


def diagonal() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"net.weight": (3, 4), "net.bias": (3,), "scale": ()}
    return {n: torch.rand(shape, generator=generator) for n, shape in shapes.items()}


@pytest.mark.parametrize("name", ["precision", "p.safetensors"])
def test_without_means_the_tensors_are_the_models_names_and_no_others(
    tmp_path: Path, name: str
) -> None:
    data = diagonal()
    whole = {n: t + 2.0 for n, t in data.items()}
    write_precision(tmp_path / name, whole, **ABOUT, prior_precision=2.0)
    tensors, record = storage.read(tmp_path / name)
    assert set(tensors) == set(data)
    assert record["prior_precision"] == 2.0
    assert record["n_data"] == N
    assert set(FIELDS) <= set(record)
    loaded = Posterior.load(tmp_path / name, model=data)
    for n, s in whole.items():
        assert torch.equal(tensors[n], s)
        assert torch.equal(loaded.mean[n], data[n])
        assert torch.equal(loaded.precision(n), s)
    assert (loaded.prior_precision, loaded.n_data) == (2.0, N)


def test_the_mean_from_a_module_a_state_dict_a_folder_or_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    ones = {n: torch.ones_like(p) for n, p in parameters.items()}
    write_precision(tmp_path / "precision", ones, **ABOUT, prior_precision=0.5)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    places = (tmp_path, str(tmp_path), tmp_path / "model.safetensors")
    for source in (model, nn.DataParallel(model), model.state_dict(), *places):
        loaded = Posterior.load(tmp_path / "precision", model=source)
        assert list(loaded.mean) == list(parameters)
        assert all(torch.equal(loaded.mean[n], p) for n, p in parameters.items())
        loaded.mean["0.weight"].zero_()
        assert model[0].weight.any()  # a copy


def test_the_mean_of_tied_tensors_under_either_name(tmp_path: Path) -> None:
    tied = {"embed.weight": ["head.weight"]}
    write_precision(tmp_path / "p", {"embed.weight": torch.ones(4, 2)}, **ABOUT, tied=tied)
    weights = torch.randn(4, 2)
    for name in ("embed.weight", "head.weight"):
        loaded = Posterior.load(tmp_path / "p", model={name: weights}, prior_precision=1.0)
        assert torch.equal(loaded.mean["embed.weight"], weights)


def test_another_folder_than_the_recorded_one_is_refused(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 1)):
        (tmp_path / name).mkdir()
        generator = torch.Generator().manual_seed(seed)
        weights = {n: torch.randn(t.shape, generator=generator) for n, t in diagonal().items()}
        save_file(weights, tmp_path / name / "model.safetensors")
    place = tmp_path / "one" / "precision"
    write_precision(place, diagonal(), **ABOUT, model=tmp_path / "one")
    recorded = read_precision_record(place)["model_sha256"]
    assert recorded == fingerprint(Folder.open(tmp_path / "one"), progress=False)
    Posterior.load(place, model=tmp_path / "one", prior_precision=1.0)
    with pytest.raises(PosteriorError, match=r"sha256.*pass the module"):
        Posterior.load(place, model=tmp_path / "two", prior_precision=1.0)
    weights_of_two = load_file(tmp_path / "two" / "model.safetensors")
    Posterior.load(place, model=weights_of_two, prior_precision=1.0)  # knowingly


def test_the_prior_that_stands_outside_is_added_unless_another_is_given(tmp_path: Path) -> None:
    data = diagonal()
    write_precision(tmp_path / "p", data, **ABOUT, prior_outside=3.0)
    assert Posterior.load(tmp_path / "p", model=data).prior_precision == 3.0
    overridden = Posterior.load(tmp_path / "p", model=data, prior_precision=5.0)
    assert torch.equal(overridden.precision("net.bias"), data["net.bias"] + 5.0)
    overridden.save(tmp_path / "whole")  # what was outside is inside now
    again = Posterior.load(tmp_path / "whole")
    assert torch.equal(again.precision("net.bias"), data["net.bias"] + 5.0)
    half = {"w": torch.tensor([0.5, 3.0]).bfloat16(), "w.mean": torch.zeros(2)}
    record = {"structure": "diag", "prior_precision": 0.0, "prior_outside": 1e-3, "n_data": N}
    storage.write(tmp_path / "half", half, {**record, "parameters": ["w"]})
    expected = half["w"].float() + 1e-3  # nothing of the prior is rounded away
    assert torch.equal(Posterior.load(tmp_path / "half").precision("w"), expected)
    record = {"structure": "diag", "prior_precision": 0.25, "rounded": True, "n_data": N}
    storage.write(tmp_path / "rounded", half, {**record, "parameters": ["w"]})
    q = Posterior.load(tmp_path / "rounded")
    assert torch.equal(q.precision("w"), half["w"].float())
    assert "rounded" not in q.record


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.just(0.0) | st.floats(1e-30, 1e30), min_size=1, max_size=8),
    prior=st.just(0.0) | st.floats(1e-6, 1e6),
    dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
    beside=st.booleans(),
    single=st.booleans(),
)
def test_any_posterior_comes_back_as_near_as_its_dtype(
    tmp_path_factory: pytest.TempPathFactory,
    values: list[float],
    prior: float,
    dtype: torch.dtype | None,
    beside: bool,
    single: bool,
) -> None:
    data = torch.tensor(values, dtype=torch.float64)
    if prior == 0:
        data = data.clamp(min=1e-30)
    q = Posterior(
        {"w": data.sin()},
        {"w": data + prior},
        prior_precision=prior,
        n_data=N,
        record={"kind": "ivon", "step": 3},
    )
    path = tmp_path_factory.mktemp("any") / ("p.safetensors" if single else "p")
    rounding_of_dtype = {None: 0.0, torch.float32: 2.0**-24, torch.bfloat16: HALF_ULP}
    within = rounding_of_dtype[dtype] if beside else 0
    if beside:  # a model: the data's part alone
        outside = prior or None
        write_precision(path, {"w": data}, **ABOUT, step=3, prior_outside=outside, dtype=dtype)
    else:
        q.save(path)
    loaded = Posterior.load(path, model=q.mean if beside else None)
    error = (loaded.precision("w") - q.precision("w")).abs()
    # Of the data's part; S itself was rounded to double precision when it was made.
    allowed = within * (q.precision("w") - prior).abs() * (1 + 1e-9) + 4e-16 * q.precision("w")
    assert bool((error <= (allowed if within else 0.0)).all())
    assert torch.equal(loaded.mean["w"], q.mean["w"])
    assert (loaded.prior_precision, loaded.n_data, loaded.record["step"]) == (prior, N, 3)
    # The data's part is always what is stored, less the prior that the record says is inside.
    stored, record = storage.read(path)
    part = stored["w"].double() - record["prior_precision"]
    assert torch.allclose(part, data, rtol=within * 1.01, atol=1e-9 + 1e-15 * float(data.max()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_comes_back(kind: str, tmp_path: Path) -> None:
    data = diagonal()
    extra_fields = {"optimizer": "torch.optim.Adam", "step": 3, "notes": "ä"}
    inside = {n: t + 0.5 for n, t in data.items()}
    fields = {
        "kind": kind,
        "definition": "d",
        "n_data": 2**40,
        "prior_precision": 0.5,
        **extra_fields,
    }
    write_precision(tmp_path / "precision", inside, **fields)
    record = read_precision_record(tmp_path / "precision")
    assert fields.items() <= record.items()
    assert record["parameters"] == list(data)
    stored, _ = storage.read(tmp_path / "precision")
    assert all(torch.equal(stored[n], inside[n]) for n in data)
    assert Folder.open(tmp_path / "precision", stem="precision").specs.keys() == data.keys()


def trained(make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    optimizer = make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        drawn = isinstance(optimizer, IVON)
        with optimizer.sampled_params(train=True) if drawn else nullcontext():
            model(torch.tensor([0, 1])).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_an_optimizers_data_part_with_rows_that_no_gradient_reached(tmp_path: Path) -> None:
    model, optimizer = trained(lambda p: torch.optim.AdamW(p, weight_decay=0.0))
    captured = from_optimizer(optimizer, model, n_data=N, bare=True)
    assert captured.prior_precision == 0.0
    assert not captured.precision["0.weight"][2:].any()
    write_captured(tmp_path / "p", captured)
    record = read_precision_record(tmp_path / "p")
    assert (record["kind"], record["definition"]) == ("adam_v", "H = N*sqrt(v_hat)")
    whole = Posterior.from_optimizer(optimizer, model, n_data=N, prior_precision=7.0)
    loaded = Posterior.load(tmp_path / "p", model=model, prior_precision=7.0)
    for n in whole.mean:
        assert torch.equal(loaded.precision(n), whole.precision(n))


def test_ivons_prior_stays_inside(tmp_path: Path) -> None:
    settings = {"lr": 0.1, "ess": N, "weight_decay": 0.1, "beta2": 0.9, "squares": False}
    model, optimizer = trained(lambda p: IVON(p, **settings))
    captured = from_optimizer(optimizer, model, bare=True)
    write_captured(tmp_path / "p", captured)
    stored, record = storage.read(tmp_path / "p")
    assert record["prior_precision"] == pytest.approx(N * 0.1)
    assert record["beta2"] == 0.9
    for n, p in model.named_parameters():
        state = optimizer.state[p]
        left = 0.9 ** state["step"]
        learned = ((state["hess"] - left) / (1 - left)).clamp_min(0)
        assert torch.allclose(stored[n], N * (learned + 0.1))
    loaded = Posterior.load(tmp_path / "p", model=model)
    assert torch.equal(loaded.precision("1.bias"), captured.precision["1.bias"])


@pytest.mark.parametrize("structure", ["diag", "kron", "lowrank", "full"])
def test_parameters_may_be_called_as_buffers_and_priors_are(structure: str, tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.buffer = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
            self.as_prior = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.buffer * self.as_prior

    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    data = (torch.randn(10, 3), torch.arange(10) % 2)
    q = fit_laplace(Task(model, data), structure=structure, prior_precision=1.0)
    q.save(tmp_path / "q.safetensors")
    loaded = Posterior.load(tmp_path / "q.safetensors")
    assert loaded.buffers.keys() == q.buffers.keys() != set()
    for name in q.mean:
        assert torch.equal(loaded.mean[name], q.mean[name])
        assert torch.equal(loaded.variance(name), q.variance(name))
