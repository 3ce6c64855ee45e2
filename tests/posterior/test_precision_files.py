"""Precisions beside a model: what is written is what is read, rounded only where it was asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blr_analysis import Posterior
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.files import Folder, fingerprint, storage
from blr_analysis.learning_rule.optim import IVON
from blr_analysis.posterior import read_precision_record, write_captured, write_precision
from blr_analysis.posterior.capture import from_optimizer
from blr_analysis.posterior.precision_files import KINDS

N = 50
ABOUT: dict[str, Any] = {"kind": "fisher_emp", "definition": "sum_i g_i^2", "n_data": N}
HALF_ULP = 2.0**-8  # the largest relative error of rounding to bfloat16's 8 bits


def diagonal(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"net.weight": (3, 4), "net.bias": (3,), "scale": ()}
    return {
        n: scale * torch.rand(shape, generator=generator, dtype=dtype)
        for n, shape in shapes.items()
    }


def posterior(prior: Any = 2.0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Any:
    data = diagonal(scale, dtype)
    by_name = prior if isinstance(prior, dict) else dict.fromkeys(data, prior)
    return Posterior(
        {n: torch.randn(t.shape, dtype=dtype) for n, t in data.items()},
        {n: t + by_name[n] for n, t in data.items()},
        prior_precision=prior,
        n_data=N,
        record={"kind": "ggn", "tied": {}},
    )


# ------------------------------------------------------------------- precisions without means


def test_the_mean_from_a_module_a_state_dict_a_folder_or_a_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    held = {n: p.detach() for n, p in model.named_parameters()}
    write_precision(
        tmp_path / "precision", {n: torch.ones_like(p) for n, p in held.items()}, **ABOUT
    )
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for source in (
        model, nn.DataParallel(model), model.state_dict(), tmp_path,
        str(tmp_path), tmp_path / "model.safetensors",
    ):  # fmt: skip
        back = Posterior.load(tmp_path / "precision", model=source, prior_precision=0.5)
        assert list(back.mean) == list(held)
        assert all(torch.equal(back.mean[n], p) for n, p in held.items())
        back.mean["0.weight"].zero_()
        assert model[0].weight.any()  # a copy


def test_the_mean_of_tied_tensors_under_either_name(tmp_path: Path) -> None:
    tied = {"embed.weight": ["head.weight"]}
    write_precision(tmp_path / "p", {"embed.weight": torch.ones(4, 2)}, **ABOUT, tied=tied)
    weights = torch.randn(4, 2)
    for name in ("embed.weight", "head.weight"):
        back = Posterior.load(tmp_path / "p", model={name: weights}, prior_precision=1.0)
        assert torch.equal(back.mean["embed.weight"], weights)


def test_a_parameter_called_mean(tmp_path: Path) -> None:
    data = {"w": torch.ones(2), "w.mean": torch.full((3,), 2.0)}
    write_precision(tmp_path / "p", data, **ABOUT)
    weights = {"w": torch.zeros(2), "w.mean": torch.zeros(3)}
    back = Posterior.load(tmp_path / "p", model=weights, prior_precision=1.0)
    assert back.precision("w.mean").tolist() == [3, 3, 3]
    with pytest.raises(InputError, match=r"\['w\.mean'\].*rename"):
        back.save(tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_half_precision_models_get_a_posterior_in_single_precision(tmp_path: Path) -> None:
    data = diagonal()
    write_precision(tmp_path / "p", data, **ABOUT, dtype=torch.bfloat16)
    weights = {n: torch.randn(t.shape).bfloat16() for n, t in data.items()}
    back = Posterior.load(tmp_path / "p", model=weights, prior_precision=1e-3)
    for n, t in data.items():
        assert back.mean[n].dtype == torch.bfloat16
        assert torch.equal(back.precision(n), t.bfloat16().float() + 1e-3)


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
    other = load_file(tmp_path / "two" / "model.safetensors")
    Posterior.load(place, model=other, prior_precision=1.0)  # knowingly


# ---------------------------------------------------------------------------------- the prior


def test_the_prior_that_stands_outside_is_added_unless_another_is_given(tmp_path: Path) -> None:
    data = diagonal()
    write_precision(tmp_path / "p", data, **ABOUT, prior_outside=3.0)
    assert Posterior.load(tmp_path / "p", model=data).prior_precision == 3.0
    other = Posterior.load(tmp_path / "p", model=data, prior_precision=5.0)
    assert torch.equal(other.precision("net.bias"), data["net.bias"] + 5.0)
    other.save(tmp_path / "whole")  # what was outside is inside now
    again = Posterior.load(tmp_path / "whole")
    assert torch.equal(again.precision("net.bias"), data["net.bias"] + 5.0)


def test_entries_without_data_need_a_prior(tmp_path: Path) -> None:
    data = {**diagonal(), "scale": torch.tensor(0.0)}
    write_precision(tmp_path / "p", data, **ABOUT)
    with pytest.raises(PosteriorError, match=r"0 in 1 of 1 entries of 'scale'.*prior_precision="):
        Posterior.load(tmp_path / "p", model=data)
    assert Posterior.load(tmp_path / "p", model=data, prior_precision=1.0).n_data == N


# ------------------------------------------------------------------------ write_precision


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_comes_back(kind: str, tmp_path: Path) -> None:
    data = diagonal()
    more = {"optimizer": "torch.optim.Adam", "step": 3, "notes": "ä"}
    inside = {n: t + 0.5 for n, t in data.items()}
    about = {"kind": kind, "definition": "d", "n_data": 2**40, "prior_precision": 0.5, **more}
    write_precision(tmp_path / "precision", inside, **about)
    record = read_precision_record(tmp_path / "precision")
    assert about.items() <= record.items() and record["parameters"] == list(data)
    stored, _ = storage.read(tmp_path / "precision")
    assert all(torch.equal(stored[n], inside[n]) for n in data)
    assert Folder.open(tmp_path / "precision", stem="precision").specs.keys() == data.keys()


# -------------------------------------------------------------- what optimizers leave behind


def trained(make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    optimizer = make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        if isinstance(optimizer, IVON):
            with optimizer.sampled_params(train=True):
                model(torch.tensor([0, 1])).square().mean().backward()
        else:
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
    back = Posterior.load(tmp_path / "p", model=model, prior_precision=7.0)
    for n in whole.mean:
        assert torch.equal(back.precision(n), whole.precision(n))


def test_a_prior_given_to_a_bare_capture_is_kept_beside(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.Adam)
    captured = from_optimizer(optimizer, model, n_data=N, bare=True, prior_precision=7.0)
    assert not captured.precision["0.weight"][2:].any()
    write_captured(tmp_path / "p", captured)
    assert Posterior.load(tmp_path / "p", model=model).prior_precision == 7.0


def test_ivons_prior_stays_inside(tmp_path: Path) -> None:
    model, optimizer = trained(lambda p: IVON(p, lr=0.1, ess=N, weight_decay=0.1, beta2=0.9))
    captured = from_optimizer(optimizer, model, bare=True)
    write_captured(tmp_path / "p", captured)
    stored, record = storage.read(tmp_path / "p")
    assert record["prior_precision"] == pytest.approx(N * 0.1) and record["beta2"] == 0.9
    for n, p in model.named_parameters():
        assert torch.allclose(stored[n], N * (optimizer.state[p]["hess"] + 0.1))
    back = Posterior.load(tmp_path / "p", model=model)
    assert torch.equal(back.precision("1.bias"), captured.precision["1.bias"])
