"""Merging state dicts and folders: the same numbers either way, and nothing lost on the way."""

from __future__ import annotations

import copy
import csv
import io
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from merging.models_on_disk import (
    SHAPES,
    curved,
    family_in_memory,
    near,
    state,
    write_family,
    write_model,
)
from parts import normal
from ruamel.yaml import YAML
from safetensors.torch import load_file
from torch import nn

import blr_analysis as blr
from blr_analysis.errors import PosteriorError
from blr_analysis.files import Folder
from blr_analysis.merging.at_weights import state_of
from blr_analysis.merging.card import documents, markdown, model_card, shown, size
from blr_analysis.merging.folders import MergeReport, execute
from blr_analysis.merging.formula import combine
from blr_analysis.merging.methods import METHODS
from blr_analysis.merging.plan import make_plan as plan_folders
from blr_analysis.merging.precisions import open_precision
from blr_analysis.merging.recipe import Recipe, read_recipe
from blr_analysis.posterior import write_precision

PLAIN = ["gradient_matching", "fisher", "task_arithmetic", "linear"]


def load(folder: Path) -> dict[str, torch.Tensor]:
    source = Folder.open(folder)
    return {n: source.tensor(n) for n in source.specs}


def arguments(family: dict[str, Any], method: str) -> dict[str, Any]:
    row = METHODS[method]
    more = {"delta": 0.01} if row.uses_base_precision else {}
    return {**{k: v for k, v in family.items() if row.takes(k)}, "method": method, **more}


@pytest.mark.parametrize("method", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folders_give_what_state_dicts_give(
    tmp_path: Path, method: str, dtype: torch.dtype
) -> None:
    memory = blr.merge(**arguments(family_in_memory(dtype), method), weights=[0.5, 1.5])
    report = blr.merge(
        **arguments(write_family(tmp_path, dtype), method), weights=[0.5, 1.5], out=tmp_path / "out"
    )
    on_disk = load(report.folder)
    assert set(on_disk) == set(SHAPES)
    assert all(torch.equal(memory[n], on_disk[n]) for n in SHAPES)
    assert all(t.dtype == dtype for t in on_disk.values())


def test_in_memory_it_is_the_formula() -> None:
    family = family_in_memory()
    merged = blr.merge(**family, weights=[0.5, 1.5], delta=0.25)
    for name, tensor in merged.items():
        expected = combine(
            family["base"][name],
            [m[name] for m in family["models"]],
            [0.5, 1.5],
            precisions=[h[name] for h in family["precisions"]],
            base_precision=family["base_precision"][name],
            delta=0.25,
        )
        assert torch.equal(tensor, expected)


def test_what_the_models_lose_by_their_precisions(tmp_path: Path) -> None:
    """½ Σ H_t (θ − θ_t)² over that at the plain average: in the report; above 1 it is warned of."""
    family, folders = family_in_memory(), write_family(tmp_path, torch.float32)
    models, precisions = family["models"], family["precisions"]
    average = blr.merge(None, models, method="linear")

    def lost(state: Any) -> list[float]:
        return [
            sum(float((h[n] * (state[n] - m[n]).square()).sum()) for n in m)
            for m, h in zip(models, precisions, strict=True)
        ]

    for k, weights in enumerate(([1.0, 1.0], [3.0, 3.0])):
        method = "fisher" if k == 0 else "gradient_matching"
        report = blr.merge(**arguments(folders, method), weights=weights, out=tmp_path / str(k))
        pairs = zip(lost(load(report.folder)), lost(average), strict=True)
        assert report.gap_ratios == pytest.approx([ours / plain for ours, plain in pairs], rel=1e-4)
        worse = sum(report.gap_ratios) > len(models)
        assert worse == (method == "gradient_matching") == ("smaller weights" in model_card(report))
        with pytest.warns(UserWarning, match="average") if worse else nullcontext() as told:
            blr.merge(**arguments(family, method), weights=weights)
        assert not worse or told[0].filename == __file__


def test_linear_and_task_arithmetic() -> None:
    family = family_in_memory()
    base, (one, two) = family["base"], family["models"]
    linear = blr.merge(None, [one, two], weights=[1.0, 3.0], method="linear")
    plain = blr.merge(None, [one, two], weights=[1.0, 3.0], method="linear", normalize=False)
    added = blr.merge(base, [one, two], weights=[0.5, -1.0], method="task_arithmetic")
    for n in SHAPES:
        torch.testing.assert_close(linear[n], (one[n] + 3 * two[n]) / 4)
        torch.testing.assert_close(plain[n], one[n] + 3 * two[n])
        expected = base[n] + 0.5 * (one[n] - base[n]) - (two[n] - base[n])
        torch.testing.assert_close(added[n], expected)


def test_one_weight_for_all_and_weights_by_name() -> None:
    family = family_in_memory()
    by_name: Callable[[str], float] = lambda n: 0.25 if "layers.0" in n else 1.0  # noqa: E731
    merged = blr.merge(**family, weights=by_name)
    low, high = blr.merge(**family, weights=0.25), blr.merge(**family, weights=[1, 1])
    for n in SHAPES:
        assert torch.equal(merged[n], (low if "layers.0" in n else high)[n])


def test_models_and_posteriors_stand_for_state_dicts_and_precisions() -> None:
    torch.manual_seed(0)
    base, one = nn.Linear(3, 2), nn.Linear(3, 2)
    h = {n: torch.rand_like(p) for n, p in one.named_parameters()}
    posterior = blr.Posterior(
        dict(one.state_dict()), {n: v + 0.5 for n, v in h.items()}, prior_precision=0.5, n_data=7
    )
    merged = blr.merge(base, [one], precisions=[posterior], delta=0.1)
    expected = blr.merge(base.state_dict(), [one.state_dict()], precisions=[h], delta=0.1)
    for n in h:
        torch.testing.assert_close(merged[n], expected[n])
    one.load_state_dict(merged)
    one(torch.ones(1, 3)).sum().backward()
    assert one.weight.grad is not None


def test_the_prior_of_a_stored_precision_is_taken_off(tmp_path: Path) -> None:
    plain = write_family(tmp_path / "plain")
    family = write_family(tmp_path / "with")
    for t, folder in enumerate(family["models"], 1):
        with_prior = {n: h + 3.0 for n, h in curved(t).items()}
        write_model(folder, load(folder), precision=with_prior, prior_precision=3.0, shards=1)
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    one = blr.merge(**plain, out=tmp_path / "a")
    two = blr.merge(**family, out=tmp_path / "b")
    for n, tensor in load(one.folder).items():
        torch.testing.assert_close(load(two.folder)[n], tensor, rtol=1e-4, atol=1e-6)


def test_a_calibrated_posterior_is_scaled_as_a_whole() -> None:
    """S' = (H + δ) / τ: what is left of it without its prior is H / τ."""
    base, one = state(0), near(state(0), 1)
    h = curved(1)
    calibrated = blr.Posterior(
        one,
        {n: (v + 2.0) / 4.0 for n, v in h.items()},
        prior_precision=2.0,
        n_data=5,
        record={"calibration": {"scale": 4.0}},
    )
    merged = blr.merge(base, [one], precisions=[calibrated], delta=1.0)
    expected = blr.merge(base, [one], precisions=[{n: v / 4 for n, v in h.items()}], delta=1.0)
    for n in base:
        torch.testing.assert_close(merged[n], expected[n])


@pytest.mark.parametrize("method", ["gradient_matching", "fisher"])
def test_the_power_of_diagonals_is_that_of_every_number(method: str, tmp_path: Path) -> None:
    """Of the data's part, the prior off; the base's own too, and δ is added as it is."""
    models = [{"w": normal(6, seed=k)} for k in range(3)]
    held = [{"w": normal(6, seed=k + 10).square()} for k in range(3)]
    for k, h in enumerate(held):
        place = tmp_path / f"p{k}"
        write_precision(
            place, {"w": h["w"] + 3.0}, kind="ggn", definition="by hand", n_data=5,
            prior_precision=3.0, dtype=None,
        )  # fmt: skip
    places = [tmp_path / f"p{k}" for k in range(3)]
    roots = [{"w": h["w"].sqrt()} for h in held]
    based = method == "gradient_matching"
    first = [{"base_precision": h[0], "delta": 0.5} if based else {} for h in (places, roots)]
    how = {"method": method, "dtype": torch.float64}
    ours = blr.merge(models[0], models[1:], precisions=places[1:], power=0.5, **how, **first[0])
    truth = blr.merge(models[0], models[1:], precisions=roots[1:], **how, **first[1])
    torch.testing.assert_close(ours["w"], truth["w"], rtol=1e-6, atol=1e-6)


def test_averages_without_a_record_are_multiplied_by_n_data(tmp_path: Path) -> None:
    family = write_family(tmp_path)
    for folder in family["precisions"]:
        (folder / "precision_config.json").unlink()
    with pytest.raises(blr.BLRError, match="n_data is missing"):
        blr.merge(**family, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = blr.merge(**family, n_data=[10, 20], out=tmp_path / "out")
    memory = family_in_memory()
    memory["precisions"] = [
        {n: k * h for n, h in p.items()}
        for k, p in zip((10, 20), memory["precisions"], strict=True)
    ]
    expected = blr.merge(**memory)
    found = load(report.folder)
    assert all(torch.allclose(found[n], expected[n], rtol=1e-5, atol=1e-6) for n in SHAPES)
    with pytest.raises(blr.BLRError, match="leave n_data out"):
        blr.merge(**write_family(tmp_path / "x"), n_data=[10, None], out=tmp_path / "y")


@pytest.mark.parametrize(("choice", "stands"), [("base", "base_precision"), ("zero", None)])
def test_missing_precisions(choice: str, stands: str | None) -> None:
    family = family_in_memory()
    name = "layers.0.mlp.weight"
    full = {**family, "precisions": [dict(p) for p in family["precisions"]]}
    instead = family["base_precision"][name] + 0.5 if stands else torch.zeros(6, 6)
    full["precisions"][1][name] = instead
    del family["precisions"][1][name]
    with pytest.raises(blr.BLRError, match=r"none for 'layers\.0\.mlp\.weight'"):
        blr.merge(**family, delta=0.5)
    merged = blr.merge(**family, delta=0.5, missing_precision=choice)
    expected = blr.merge(**full, delta=0.5)
    assert all(torch.equal(merged[n], expected[n]) for n in SHAPES)


def test_a_frozen_tensor_needs_no_precision(tmp_path: Path) -> None:
    base = state(0)
    tuned = {**near(base, 1), "embed.weight": base["embed.weight"]}
    known = {n: h for n, h in curved(1).items() if n != "embed.weight"}
    folder = write_model(tmp_path / "ft", tuned, precision=known, frozen=["embed.weight"])
    root = write_model(tmp_path / "base", base)
    report = blr.merge(
        root, [folder], precisions=[folder / "precision"], delta=1.0, out=tmp_path / "out"
    )
    assert torch.equal(load(report.folder)["embed.weight"], base["embed.weight"])


def test_entries_without_any_precision_are_counted(tmp_path: Path) -> None:
    base = state(0)
    nobody = {n: torch.zeros(s) for n, s in SHAPES.items()}
    nobody["layers.1.norm.weight"][:4] = 1.0
    folder = write_model(tmp_path / "ft", near(base, 1), precision=nobody)
    root = write_model(tmp_path / "base", base)
    report = blr.merge(root, [folder], precisions=[folder / "precision"], out=tmp_path / "out")
    assert report.fallback["layers.1.norm.weight"] == 2
    assert report.fallback_total == sum(t.numel() for t in base.values()) - 4
    arithmetic = blr.merge(base, [near(base, 1)], method="task_arithmetic")
    merged = load(report.folder)
    assert torch.equal(merged["embed.weight"], arithmetic["embed.weight"])


def test_integers_that_agree_are_copied_and_others_refused() -> None:
    family = family_in_memory()
    for sd in (family["base"], *family["models"]):
        sd["position_ids"] = torch.arange(5)
    merged = blr.merge(**family)
    assert torch.equal(merged["position_ids"], torch.arange(5))
    family["models"][1]["position_ids"] = torch.arange(5) + 1
    with pytest.raises(blr.BLRError, match=r"position_ids.*models\[1\]"):
        blr.merge(**family)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(3, 3, bias=False) for _ in range(2))
        self.two.weight = self.one.weight
        self.mid = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.mid(self.one(x))))


@pytest.mark.parametrize("stored", [False, True])
def test_both_names_of_a_tied_tensor_have_its_precision_without_the_prior(
    tmp_path: Path, stored: bool
) -> None:
    torch.manual_seed(0)
    base, *models = (Tied() for _ in range(3))
    precisions: list[Any] = []
    for k, model in enumerate(models):
        task = blr.Task(model, (torch.randn(20, 3), torch.randint(3, (20,))))
        q = blr.fit_laplace(task, structure="diag", prior_precision=5.0)
        h = q.precision("one.weight") - 5.0
        held = open_precision(q)
        moved = {n: t + 0.1 for n, t in q.mean.items()}
        both = [{n: t["one.weight"] for n in ("one.weight", "two.weight")} for t in (moved, q.mean)]
        assert held.gap(*both) == pytest.approx(float(0.5 * 0.01 * h.sum()), rel=1e-4)
        q.save(tmp_path / str(k))
        precisions.append(tmp_path / str(k) if stored else q)
    merged = blr.merge(base, models, precisions=precisions, delta=1.0)
    assert torch.equal(merged["one.weight"], merged["two.weight"])


def test_a_tied_tensor_that_was_not_trained_needs_no_precision() -> None:
    torch.manual_seed(0)
    base, *models = (Tied() for _ in range(3))
    for model in models:
        model.one.weight.requires_grad_(False)
    data = torch.randn(20, 3), torch.randint(3, (20,))
    precisions = [
        blr.fit_laplace(blr.Task(m, data), structure="diag", prior_precision=5.0) for m in models
    ]
    merged = blr.merge(base, models, precisions=precisions, delta=1.0)
    expected = models[0].one.weight + models[1].one.weight - base.one.weight
    torch.testing.assert_close(merged["two.weight"], expected.detach())


def test_a_tied_copy_is_recognised_and_nothing_else_is_dropped(tmp_path: Path) -> None:
    """One model saved its tied head, the other did not: the bytes say that it is the same."""
    base = state(0)
    tied = {**near(base, 1)}
    tied["lm_head.weight"] = tied["embed.weight"].clone()
    expected = blr.merge(base, [near(base, 1)], method="task_arithmetic")
    merged = blr.merge(base, [tied], method="task_arithmetic")
    assert set(merged) == set(base)
    assert all(torch.equal(merged[n], expected[n]) for n in base)
    with_head = {**base, "lm_head.weight": base["embed.weight"].clone()}
    merged = blr.merge(with_head, [near(base, 1)], method="task_arithmetic")
    assert torch.equal(merged["lm_head.weight"], expected["embed.weight"])
    tied["lm_head.weight"] = tied["lm_head.weight"] + 1
    with pytest.raises(blr.BLRError, match=r"only there: 'lm_head\.weight'"):
        blr.merge(base, [tied], method="task_arithmetic")


def test_shards_of_a_chosen_size_with_an_index_of_their_own(tmp_path: Path) -> None:
    family = write_family(tmp_path)
    whole = blr.merge(**family, out=tmp_path / "whole")
    parts = blr.merge(**family, out=tmp_path / "parts", max_shard_bytes=200)
    assert whole.shards == ("model.safetensors",)
    assert len(parts.shards) > 2
    index = json.loads((parts.folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(SHAPES)
    assert index["metadata"]["total_size"] == parts.bytes_written
    for file in parts.shards:
        size = sum(t.nbytes for t in load_file(parts.folder / file).values())
        assert size <= 200 or len(load_file(parts.folder / file)) == 1
    assert all(torch.equal(load(whole.folder)[n], load(parts.folder)[n]) for n in SHAPES)


def test_what_lies_beside_the_weights(tmp_path: Path) -> None:
    family = write_family(tmp_path)
    base = family["base"]
    (base / "optimizer.pt").write_bytes(b"")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    report = blr.merge(**family, out=tmp_path / "out", out_dtype=torch.bfloat16)
    held = {p.name for p in report.folder.iterdir()}
    assert held == {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"}
    assert json.loads((report.folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((base / "config.json").read_text())["dtype"] == "float32"
    assert report.files["optimizer.pt"] == "left where it is"
    assert "model-00001-of-00003.safetensors" in report.files
    assert all(t.dtype == torch.bfloat16 for t in load(report.folder).values())


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"slerp"}))
@pytest.mark.parametrize("weights", [[1.0, 2.0, 1.0], [1.0, -0.5, 1.0]])
def test_running_statistics_are_averaged(method: str, weights: list[float], tmp_path: Path) -> None:
    """No weights: by normalised weights, equal ones where some are negative; never negative."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    models = [copy.deepcopy(base) for _ in range(3)]
    for t, model in enumerate(models):
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
        model[1].running_var.fill_(0.1 * (t + 1))
        model[1].running_mean.fill_(t - 1.0)
        model[1].num_batches_tracked += t
    curved = [{n: torch.ones_like(p) for n, p in m.named_parameters()} for m in models]
    how: dict[str, Any] = {"method": method, "weights": weights}
    weighed = METHODS[method].uses_precisions
    own = blr.merge(base, models, **how, precisions=curved if weighed else None)
    shares = torch.tensor(weights if min(weights) > 0 else [1.0] * 3)
    for name in ("1.running_var", "1.running_mean"):
        each = torch.stack([m.state_dict()[name] for m in models])
        torch.testing.assert_close(own[name], shares @ each / shares.sum())
    assert int(own["1.num_batches_tracked"]) == 0
    folders = [
        write_model(tmp_path / str(t), m.state_dict(), precision=c)
        for t, (m, c) in enumerate(zip([base, *models], [curved[0], *curved], strict=True))
    ]
    beside = [f / "precision" for f in folders[1:]] if METHODS[method].uses_precisions else None
    report = blr.merge(
        folders[0], folders[1:], **how, precisions=beside, out=tmp_path / "out", progress=False
    )
    assert all(torch.equal(t, own[n]) for n, t in load(report.folder).items())
    fates = report.table.set_index("tensor").fate
    assert fates["1.running_var"] == "averaged" and "running statistics" in model_card(report)


@pytest.mark.parametrize("method", ["fisher", "gradient_matching"])
def test_buffers_without_a_precision_are_copied_or_averaged(method: str) -> None:
    """Parameters that lack one are refused; of state dicts all are taken for parameters."""
    base = nn.Linear(2, 2)
    base.register_buffer("scale", torch.tensor([0.1, 0.7]))
    models = [copy.deepcopy(base) for _ in range(3)]
    for t, model in enumerate(models):
        model.weight.data += 0.1 * (t + 1) ** 2
    curved = [{n: torch.ones_like(p) for n, p in m.named_parameters()} for m in models]
    how: dict[str, Any] = {"method": method, "precisions": curved, "weights": [1.0, 2.0, 3.0]}
    assert torch.equal(blr.merge(base, models, **how)["scale"], base.scale)
    states = [m.state_dict() for m in models]
    assert torch.equal(blr.merge(base, states, **how)["scale"], base.scale)
    for t, model in enumerate(models):
        model.scale += t
    expected = torch.tensor([0.1, 0.7]) + (2 * 1 + 3 * 2) / 6
    torch.testing.assert_close(blr.merge(base, models, **how)["scale"], expected)
    wrapped = [torch.compile(models[0]), nn.DataParallel(models[1]), models[2]]
    torch.testing.assert_close(blr.merge(nn.DataParallel(base), wrapped, **how)["scale"], expected)
    assert state_of(wrapped[0], "").keys() == base.state_dict().keys()  # which losses are asked at
    with pytest.raises(PosteriorError, match="scale"):
        blr.merge(base, [m.state_dict() for m in models], **how)


def test_without_a_base_the_average_stands_where_nobody_has_a_precision() -> None:
    """Frozen tensors of a Fisher average: their mean, and never their sum."""
    models = [near(state(0), t) for t in (1, 2)]
    known = [{n: h for n, h in curved(t).items() if n != "embed.weight"} for t in (1, 2)]
    merged = blr.merge(
        None, models, precisions=known, method="fisher", missing_precision="zero", weights=[3, 1]
    )
    mean = (3 * models[0]["embed.weight"] + models[1]["embed.weight"]) / 4
    torch.testing.assert_close(merged["embed.weight"], mean)
    nobody = blr.merge(
        None, models, precisions=[None, None], method="fisher", missing_precision="zero"
    )
    for n in SHAPES:
        torch.testing.assert_close(nobody[n], (models[0][n] + models[1][n]) / 2)
    alone = combine(None, [torch.ones(1), 3 * torch.ones(1)], precisions=[0.0, 0.0])
    assert float(alone) == 2.0


def test_kinds_of_precisions_and_filters_are_spoken_of(tmp_path: Path) -> None:
    family = write_family(tmp_path)
    write_model(family["models"][1], near(state(0), 2), precision=curved(2), kind="adam_v")
    (family["models"][1] / "model.safetensors").unlink()
    report = blr.merge(**family, out=tmp_path / "out")
    assert any("adam_v, fisher_mc" in note for note in report.plan.notes)
    family["precisions"][1] = family["precisions"][0]
    report = blr.merge(**family, out=tmp_path / "two")
    assert any("stands for several models" in note for note in report.plan.notes)


def test_an_output_named_through_a_link_or_a_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = write_family(tmp_path / "in")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    blr.merge(**family, out=tmp_path / "link")
    assert (tmp_path / "real" / "model.safetensors").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    blr.merge(**family, out=".")
    assert (tmp_path / "here" / "model.safetensors").is_file()


def test_the_table_tells_every_tensors_fate(tmp_path: Path) -> None:
    report = blr.merge(**write_family(tmp_path), out=tmp_path / "out")
    table = report.table
    assert list(table["tensor"]) == list(Folder.open(tmp_path / "base").specs)
    assert set(table["fate"]) == {"merged"}
    assert list(report.plan.table["bytes"]) == list(table["bytes"])
    assert table["bytes"].sum() == report.bytes_written


# What stands beside a merged model: readable, escaped, and without paths of this machine.


RECIPE = """# with ``` in a remark
merge_method: gradient_matching
base_model: ./base
models:
  - model: ./ft1
  - model: ./ft2
    parameters: {weight: [0.5, 1.5]}
parameters: {delta: 0.01}
out_dtype: bfloat16
"""
Run = Callable[..., tuple[MergeReport, Recipe]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def of(text: str = RECIPE, out: str = "merged") -> tuple[MergeReport, Recipe]:
        (tmp_path / "recipe.yml").write_text(text)
        recipe = read_recipe(tmp_path / "recipe.yml")
        report = execute(
            plan_folders(recipe.job),
            tmp_path / out,
            documents=lambda report: documents(report, recipe.text),
        )
        return report, recipe

    return of


@pytest.fixture
def family(tmp_path: Path) -> dict[str, Any]:
    return write_family(tmp_path)


def front_matter(card: str) -> dict[str, Any]:
    _, head, _ = card.split("---\n", 2)
    return YAML(typ="safe").load(head)


def test_all_of_it_stands_in_the_folder(run: Run, family: dict[str, Any]) -> None:
    report, _ = run()
    names = {path.name for path in report.folder.iterdir()}
    assert names == {
        "README.md", "merge_recipe.yml", "merge_report.csv", "merge_report.json",
        "config.json", "tokenizer.json", "model.safetensors",
    }  # fmt: skip


def test_the_card(run: Run, family: dict[str, Any]) -> None:
    report, _ = run()
    card = (report.folder / "README.md").read_text()
    assert front_matter(card) == {
        "library_name": "transformers",
        "tags": ["merge", "blr_analysis", "gradient_matching"],
    }
    assert "# merged\n" in card
    assert r"| ft1 | `1.0` | ft1/precision: diag, fisher\_mc |" in card
    assert r"| ft2 | `[0.5, 1.5]` | ft2/precision: diag, fisher\_mc |" in card
    assert "* precision of the base: base/precision, plus δ = 0.01" in card
    assert "* computed in float32, written in bfloat16" in card
    assert f"````yaml\n{RECIPE}````" in card  # a fence longer than what is inside


def test_no_path_of_this_machine_is_published(run: Run, family: dict[str, Any]) -> None:
    report, _ = run()
    for name in ("README.md", "merge_recipe.yml", "merge_report.csv", "merge_report.json"):
        assert str(report.folder.parent) not in (report.folder / name).read_text(), name


def test_the_recipe_as_run_can_be_run_again(run: Run, family: dict[str, Any]) -> None:
    report, recipe = run()
    again = report.folder / "merge_recipe.yml"
    assert again.read_text().splitlines()[1:] == RECIPE.splitlines()
    (report.folder.parent / "again.yml").write_text(again.read_text())
    job = read_recipe(report.folder.parent / "again.yml").job
    assert repr(job) == repr(recipe.job)


def test_the_report_says_what_was_done(run: Run, family: dict[str, Any]) -> None:
    report, _ = run()
    rows = list(csv.DictReader(io.StringIO((report.folder / "merge_report.csv").read_text())))
    assert [row["tensor"] for row in rows] == [item.name for item in report.plan.items]
    by_name = {row["tensor"]: row for row in rows}
    one = by_name["layers.0.mlp.weight"]
    assert (one["fate"], one["shape"], one["dtype"]) == ("merged", "6x6", "bfloat16")
    assert (one["bytes"], one["weights"], one["precisions"]) == ("72", "1 0.5", "own own")
    assert by_name["layers.1.mlp.weight"]["weights"] == "1 1.5"
    figures = json.loads((report.folder / "merge_report.json").read_text())
    assert figures["tensors_merged"] == len(rows)
    assert figures["entries"] == 66 + 36 + 6 + 36 + 6 + 1
    assert figures["bytes_written"] == 2 * figures["entries"]
    # weights of three models and their precisions, all float32
    assert figures["bytes_read"] == 4 * 6 * figures["entries"]
    assert figures["models"][1] == {
        "model": "ft2", "weight": "[0.5, 1.5]", "precision": "ft2/precision", "n_data": None,
        "density": 1.0,
    }  # fmt: skip
    assert figures["delta"] == 0.01
    assert figures["shards"] == ["model.safetensors"]


def test_notes_name_models_without_their_paths(tmp_path: Path, run: Run) -> None:
    base = state(0)
    write_model(tmp_path / "base", {**base, "head.weight": base["embed.weight"].clone()})
    write_model(tmp_path / "ft1", near(base, 1))  # its head is tied, and not stored
    report, _ = run("merge_method: task_arithmetic\nbase_model: base\nmodels: [{model: ft1}]")
    text = (report.folder / "merge_report.csv").read_text()
    (row,) = (row for row in csv.DictReader(io.StringIO(text)) if row["tensor"] == "head.weight")
    assert row["note"] == "ft1: tied to embed.weight"


def test_models_of_the_hub_are_linked(tmp_path: Path, run: Run) -> None:
    base = state(0)
    for k, name in enumerate(("org/base", "me/ft-1", "me/ft_2")):
        cache = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "0a"
        write_model(cache, near(base, k) if k else base)
    folders = [f"models--me--ft{x}/snapshots/0a" for x in ("-1", "_2")]
    models = ", ".join(f"{{model: {f}, parameters: {{weight: 1}}}}" for f in folders)
    report, _ = run(
        "merge_method: task_arithmetic\nbase_model: models--org--base/snapshots/0a\n"
        f"models: [{models}]"
    )
    found = front_matter((report.folder / "README.md").read_text())
    assert found["base_model"] == ["org/base", "me/ft-1", "me/ft_2"]
    assert found["base_model_relation"] == "merge"


def test_what_users_name_is_shown_as_it_is(tmp_path: Path, run: Run) -> None:
    odd = "a|b`c <img src=x> [l](http://x) *_#"
    base = state(0)
    write_model(tmp_path / odd.replace("/", "-"), base)
    write_model(tmp_path / "ft1", near(base, 1))
    quoted = json.dumps("./" + odd.replace("/", "-"))
    report, _ = run(
        f"merge_method: linear\nmodels: [{{model: {quoted}}}, {{model: ft1}}]", out="---\nx: 1"
    )
    card = (report.folder / "README.md").read_text()
    assert front_matter(card)["tags"] == ["merge", "blr_analysis", "linear"]
    assert "# --- x: 1\n" in card
    (row,) = (line for line in card.splitlines() if line.startswith("| a"))
    assert row == (r"| a\|b\`c \<img src=x\> \[l\]\(http:--x\) \*\_\# | `1.0` |")


def test_control_characters_do_not_reach_the_card() -> None:
    assert markdown("a\x1b[31m\nb\u202e") == r"a?\[31m b?"


def test_a_card_without_a_recipe(run: Run, family: dict[str, Any]) -> None:
    report, _ = run()
    card = model_card(report)
    assert "## Recipe" not in card
    assert set(documents(report)) == {"README.md", "merge_report.csv", "merge_report.json"}


def test_names_and_sizes() -> None:
    assert shown(Path("/x/models--org--m/snapshots/0a")) == "org/m"
    assert shown(Path("/x/models--org--m/snapshots/0a/precision")) == "org/m/precision"
    assert shown(Path("/home/me/ft/")) == "ft"
    assert [size(n) for n in (0, 999, 1000, 2.5e12)] == ["0 B", "999 B", "1 kB", "2.5 TB"]
