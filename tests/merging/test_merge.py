"""Merging state dicts and folders: the same numbers either way, and every tensor arrives."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Words, randomised
from models_on_disk import (
    SHAPES,
    curved,
    family_in_memory,
    near,
    state,
    write_family,
    write_model,
    write_precision,
)
from ruamel.yaml import YAML
from torch import nn

import blr_analysis as blr
from blr_analysis.errors import PosteriorError
from blr_analysis.files import Folder, Scratch
from blr_analysis.merging.at_weights import state_of
from blr_analysis.merging.card import documents, markdown, model_card, shown, size
from blr_analysis.merging.folders import execute
from blr_analysis.merging.plan import make_plan
from blr_analysis.merging.precisions import open_precision
from blr_analysis.merging.recipe import read_recipe


def load(folder: Path) -> dict[str, torch.Tensor]:
    return Folder.open(folder).tensors()


def test_models_and_posteriors_stand_for_state_dicts_and_precisions() -> None:
    torch.manual_seed(0)
    base = nn.Linear(3, 2)
    model = nn.Linear(3, 2)
    h = {n: torch.rand_like(p) for n, p in model.named_parameters()}
    posterior = blr.Posterior(
        dict(model.state_dict()), {n: v + 0.5 for n, v in h.items()}, prior_precision=0.5, n_data=7
    )
    merged = blr.merge(base, [model], precisions=[posterior], delta=0.1)
    expected = blr.merge(base.state_dict(), [model.state_dict()], precisions=[h], delta=0.1)
    for n in h:
        torch.testing.assert_close(merged[n], expected[n])
    model.load_state_dict(merged)
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None


def test_the_prior_of_a_stored_precision_is_taken_off(tmp_path: Path) -> None:
    family = write_family(tmp_path)
    plain = blr.merge(**family)
    for t, folder in enumerate(family["models"], 1):
        with_prior = {n: h + 3.0 for n, h in curved(t).items()}
        write_precision(folder / "precision", with_prior, prior_precision=3.0)
    for n, tensor in blr.merge(**family).items():
        torch.testing.assert_close(tensor, plain[n], rtol=1e-4, atol=1e-6)


def test_averages_without_a_record_are_multiplied_by_n_data(tmp_path: Path) -> None:
    family = write_family(tmp_path)
    for folder in family["precisions"]:
        (folder / "precision_config.json").unlink()
    with pytest.raises(blr.BLRError, match="n_data is missing"):
        blr.merge(**family, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    actual = blr.merge(**family, n_data=[10, 20])
    memory = family_in_memory()
    pairs = zip((10, 20), memory["precisions"], strict=True)
    memory["precisions"] = [{n: k * h for n, h in p.items()} for k, p in pairs]
    expected = blr.merge(**memory)
    assert all(torch.allclose(actual[n], expected[n], rtol=1e-5, atol=1e-6) for n in SHAPES)
    with pytest.raises(blr.BLRError, match="leave n_data out"):
        blr.merge(**write_family(tmp_path / "x"), n_data=[10, None], out=tmp_path / "y")


@pytest.mark.parametrize("count", [1, 10])
def test_one_n_data_counts_for_every_file_without_a_record(tmp_path: Path, count: int) -> None:
    """1 is for files that hold sums, whatever their number."""
    family = write_family(tmp_path)
    for folder in family["precisions"]:
        (folder / "precision_config.json").unlink()
    memory = family_in_memory()
    memory["precisions"] = [{n: count * h for n, h in p.items()} for p in memory["precisions"]]
    expected = blr.merge(**memory)
    for n_data in (count, [count, count]):
        actual = blr.merge(**family, n_data=n_data)
        for n in SHAPES:
            torch.testing.assert_close(actual[n], expected[n], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("choice", ["base", "zero"])
def test_missing_precisions(choice: str) -> None:
    family = family_in_memory()
    name = "layers.0.mlp.weight"
    full = {**family, "precisions": [dict(p) for p in family["precisions"]]}
    if choice == "base":
        full["precisions"][1][name] = family["base_precision"][name] + 0.5
    else:
        full["precisions"][1][name] = torch.zeros(6, 6)
    del family["precisions"][1][name]
    with pytest.raises(blr.BLRError, match=r"none for 'layers\.0\.mlp\.weight'"):
        blr.merge(**family, delta=0.5)
    merged = blr.merge(**family, delta=0.5, missing_precision=choice)
    expected = blr.merge(**full, delta=0.5)
    assert all(torch.equal(merged[n], expected[n]) for n in SHAPES)


def test_a_frozen_tensor_needs_no_precision(tmp_path: Path) -> None:
    base = state(0)
    tuned = {**near(base, 1), "embed.weight": base["embed.weight"]}
    precision = {n: h for n, h in curved(1).items() if n != "embed.weight"}
    folder = write_model(tmp_path / "ft", tuned, precision=precision, frozen=["embed.weight"])
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
    settings: dict[str, Any] = {"method": "gradient_matching", "precisions": [folder / "precision"]}
    report = blr.merge(root, [folder], **settings, out=tmp_path / "out")
    assert report.fallback["layers.1.norm.weight"] == 2
    assert report.fallback_total == sum(t.numel() for t in base.values()) - 4
    arithmetic = blr.merge(base, [near(base, 1)], method="task_arithmetic")
    merged = load(report.folder)
    assert torch.equal(merged["embed.weight"], arithmetic["embed.weight"])


def test_entries_that_no_model_changed_are_not_counted(tmp_path: Path) -> None:
    """Without a precision the base's number is right whatever the formula."""
    base = state(0)
    model = near(base, 1)
    model["embed.weight"] = base["embed.weight"].clone()
    model["embed.weight"][0, 0] += 1.0
    nobody = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    root = write_model(tmp_path / "base", base)
    folder = write_model(tmp_path / "ft", model, precision=nobody)
    report = blr.merge(
        root,
        [folder],
        method="gradient_matching",
        precisions=[folder / "precision"],
        out=tmp_path / "out",
    )
    assert report.fallback["embed.weight"] == 1


def test_integers_that_agree_are_copied_and_others_refused() -> None:
    family = family_in_memory()
    for sd in (family["base"], *family["models"]):
        sd["position_ids"] = torch.arange(5)
    merged = blr.merge(**family)
    assert torch.equal(merged["position_ids"], torch.arange(5))
    family["models"][1]["position_ids"] = torch.arange(5) + 1
    with pytest.raises(blr.BLRError, match=r"position_ids.*models\[1\]"):
        blr.merge(**family)


@pytest.mark.parametrize("stored", [False, True])
def test_both_names_of_a_tied_tensor_have_its_precision_without_the_prior(
    tmp_path: Path, stored: bool
) -> None:
    base, *models = (randomised(Words(), seed=k) for k in range(3))
    precisions: list[Any] = []
    for k, model in enumerate(models):
        task = blr.Task(model, (torch.arange(60).view(12, 5) ** 2 % 7, torch.arange(12) % 7))
        q = blr.fit_laplace(task, structure="diag", prior_precision=5.0)
        h = (q.precision("words.weight") - 5.0).double()
        precision = open_precision(q)
        for name in ("words.weight", "read.weight"):
            actual = precision.read(name, 0, h.numel(), Scratch(), torch.float64)
            torch.testing.assert_close(actual.double(), h.flatten(), rtol=1e-4, atol=1e-5)
        q.save(tmp_path / str(k))
        precisions.append(tmp_path / str(k) if stored else q)
    merged = blr.merge(base, models, precisions=precisions, delta=1.0)
    assert torch.equal(merged["words.weight"], merged["read.weight"])


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


def test_what_lies_beside_the_weights(tmp_path: Path) -> None:
    family = write_family(tmp_path)
    base = family["base"]
    (base / "optimizer.pt").write_bytes(b"")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    report = blr.merge(**family, out=tmp_path / "out", out_dtype=torch.bfloat16)
    names = {p.name for p in report.folder.iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"}
    assert json.loads((report.folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((base / "config.json").read_text())["dtype"] == "float32"
    assert report.files["optimizer.pt"] == "left where it is"
    assert "model-00001-of-00003.safetensors" in report.files
    assert all(t.dtype == torch.bfloat16 for t in load(report.folder).values())


@pytest.mark.parametrize("method", ["fisher", "gradient_matching"])
def test_buffers_without_a_precision_are_copied_or_averaged(method: str) -> None:
    """Parameters without a precision are refused; every tensor of a state dict counts as one."""
    base = nn.Linear(2, 2)
    base.register_buffer("scale", torch.tensor([0.1, 0.7]))
    models = [copy.deepcopy(base) for _ in range(3)]
    for t, model in enumerate(models):
        model.weight.data += 0.1 * (t + 1) ** 2
    curved = [{n: torch.ones_like(p) for n, p in m.named_parameters()} for m in models]
    settings: dict[str, Any] = {"method": method, "precisions": curved, "weights": [1.0, 2.0, 3.0]}
    assert torch.equal(blr.merge(base, models, **settings)["scale"], base.scale)
    states = [m.state_dict() for m in models]
    assert torch.equal(blr.merge(base, states, **settings)["scale"], base.scale)
    for t, model in enumerate(models):
        model.scale += t
    expected = torch.tensor([0.1, 0.7]) + (2 * 1 + 3 * 2) / 6
    torch.testing.assert_close(blr.merge(base, models, **settings)["scale"], expected)
    wrapped = [nn.DataParallel(models[0]), nn.DataParallel(models[1]), models[2]]
    merged = blr.merge(nn.DataParallel(base), wrapped, **settings)
    torch.testing.assert_close(merged["scale"], expected)
    assert state_of(wrapped[0], "").keys() == base.state_dict().keys()  # losses are taken at these
    with pytest.raises(PosteriorError, match="scale"):
        blr.merge(base, [m.state_dict() for m in models], **settings)


def test_without_a_base_the_average_stands_where_nobody_has_a_precision() -> None:
    """Frozen tensors of a Fisher average become their mean."""
    models = [near(state(0), t) for t in (1, 2)]
    precisions = [{n: h for n, h in curved(t).items() if n != "embed.weight"} for t in (1, 2)]
    settings: dict[str, Any] = {"method": "fisher", "missing_precision": "zero"}
    merged = blr.merge(None, models, precisions=precisions, weights=[3, 1], **settings)
    mean = (3 * models[0]["embed.weight"] + models[1]["embed.weight"]) / 4
    torch.testing.assert_close(merged["embed.weight"], mean)
    merged = blr.merge(None, models, precisions=[None, None], **settings)
    for name in SHAPES:
        torch.testing.assert_close(merged[name], (models[0][name] + models[1][name]) / 2)


def test_kinds_of_precisions_are_spoken_of(tmp_path: Path) -> None:
    family = write_family(tmp_path)
    write_precision(family["precisions"][1], curved(2), kind="adam_v")
    with pytest.warns(UserWarning, match="in other units: 'adam_v', 'fisher_mc'"):
        blr.merge(**family)
    family["precisions"][1] = family["precisions"][0]
    with pytest.warns(UserWarning, match="stands for several models"):
        blr.merge(**family)


# The files beside a merged model: readable, escaped, and without local paths.


ODD = "a|b`c <img src=x> [l](http:--x) *_#"
RECIPE = """# with ``` in a remark
merge_method: gradient_matching
base_model: base
models:
  - model: ft1
  - model: "a|b`c <img src=x> [l](http:--x) *_#"
    parameters: {weight: [0.5, 1.5]}
parameters: {delta: 0.01}
out_dtype: bfloat16
"""


def test_the_card_the_recipe_and_the_report(tmp_path: Path) -> None:
    write_family(tmp_path)
    (tmp_path / "ft2").rename(tmp_path / ODD)
    (tmp_path / "recipe.yml").write_text(RECIPE)
    recipe = read_recipe(tmp_path / "recipe.yml")
    report = execute(
        make_plan(recipe.job), tmp_path / "out", documents=lambda plan: documents(plan, recipe.text)
    )
    texts = {p.name: p.read_text() for p in report.folder.iterdir() if p.suffix != ".safetensors"}
    assert texts.keys() == {
        "README.md",
        "merge_recipe.yml",
        "merge_report.csv",
        "config.json",
        "tokenizer.json",
        "merge_files.json",
    }
    assert not any(str(tmp_path) in text for text in texts.values())
    card = texts["README.md"]
    _, head, _ = card.split("---\n", 2)
    assert YAML(typ="safe").load(head) == {
        "library_name": "transformers",
        "tags": ["merge", "blr_analysis", "gradient_matching"],
    }
    assert "# out\n" in card
    assert "The base is base." in card
    assert r"| ft1 | `1.0` | ft1/precision, diag, fisher\_mc |" in card
    (row,) = (line for line in card.splitlines() if line.startswith("| a"))
    name = r"a\|b\`c \<img src=x\> \[l\]\(http:--x\) \*\_\#"
    assert row == rf"| {name} | `[0.5, 1.5]` | {name}/precision, diag, fisher\_mc |"
    assert f"````yaml\n{RECIPE}````" in card  # a fence longer than what is inside
    assert "6 tensors merged, 0 copied" in card
    assert "## Recipe" in card
    assert texts["merge_recipe.yml"].splitlines()[1:] == RECIPE.splitlines()
    rows = list(csv.DictReader(io.StringIO(texts["merge_report.csv"])))
    assert [row["tensor"] for row in rows] == [tensor.name for tensor in report.plan.tensors]
    mlp_row = next(row for row in rows if row["tensor"] == "layers.0.mlp.weight")
    expected = {
        "fate": "merged",
        "shape": "6x6",
        "dtype": "bfloat16",
        "bytes": "72",
        "weights": "1 0.5",
        "precisions": "own own",
    }
    assert expected.items() <= mlp_row.items()
    entries = sum(math.prod(shape) for shape in SHAPES.values())
    assert report.plan.bytes_read == 6 * 4 * entries  # three models, three precisions, float32
    assert report.plan.bytes_written == 2 * entries


def test_models_of_the_hub_are_linked_and_tied_tensors_told(tmp_path: Path) -> None:
    base = state(0)
    places = []
    for k, name in enumerate(("org/base", "me/ft-1", "me/ft_2")):
        cache = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "0a"
        if k == 0:
            tensors = {**base, "head.weight": base["embed.weight"].clone()}
        else:
            tensors = near(base, k)
        places.append(write_model(cache, tensors))
    report = blr.merge(places[0], places[1:], method="task_arithmetic", out=tmp_path / "out")
    _, head, _ = model_card(report, "").split("---\n", 2)
    actual = YAML(typ="safe").load(head)
    assert actual["base_model"] == ["org/base", "me/ft-1", "me/ft_2"]
    assert actual["base_model_relation"] == "merge"
    note = "me/ft-1: tied to embed.weight; me/ft_2: tied to embed.weight"
    assert f",{note}\n" in documents(report, "")["merge_report.csv"]


def test_names_and_sizes() -> None:
    assert shown(Path("/x/models--org--m/snapshots/0a/precision")) == "org/m/precision"
    assert [size(n) for n in (0, 999, 1000, 2.5e12)] == ["0 B", "999 B", "1 kB", "2.5 TB"]
    assert markdown("a\x1b[31m\nb\u202e") == r"a?\[31m b?"
