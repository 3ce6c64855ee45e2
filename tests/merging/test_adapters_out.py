"""Adapters merged into an adapter: what PEFT makes of it is what the products come to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from merging.models_on_disk import record
from merging.test_lora import Folders, State, gpt2, llama
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.cli import main
from blr_analysis.errors import BLRError, InputError
from blr_analysis.merging.card import size
from blr_analysis.merging.adapters import low_rank
from blr_analysis.merging.recipe import read_recipe

pytestmark = pytest.mark.filterwarnings("ignore")
ATTENTION: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "r": 4}
SECOND: dict[str, Any] = {
    "target_modules": ["q_proj", "down_proj"],
    "r": 2,
    "use_rslora": True,
    "rank_pattern": {"down_proj": 3},
}


def convolutions() -> nn.Module:
    """Of one, two and three dimensions, of kernels of one and more."""
    return nn.Sequential(
        nn.Conv2d(3, 9, (3, 2), stride=2), nn.ReLU(), nn.Conv2d(9, 4, 1, bias=False),
        nn.Conv2d(4, 6, 2, groups=2), nn.Flatten(2), nn.Conv1d(6, 4, 3, padding=1), nn.Flatten(),
        nn.Linear(48, 2),
    )  # fmt: skip


def pair(where: Path, build: Any, one: dict[str, Any], two: dict[str, Any]) -> list[Folders]:
    """Two adapters of one base; the second trained elsewhere."""
    folders = [
        Folders(where / str(k), build, torch.float32).write(**more)
        for k, more in enumerate((one, two))
    ]
    other = folders[1].adapter / "adapter_model.safetensors"
    save_file({n: t.flip(0).contiguous() * 0.7 for n, t in load_file(other).items()}, other)
    folders[1].base = folders[0].base
    return folders


def steps(folders: list[Folders]) -> list[State]:
    """θ_t − θ_0, by PEFT's own merges."""
    start = folders[0].fresh().state_dict()
    return [{n: t - start[n] for n, t in f.oracle().items() if n in start} for f in folders]


def loaded(folders: list[Folders], out: Path) -> State:
    """The step that PEFT makes of what was written."""
    made = Folders(out.parent, folders[0].build, torch.float32)
    made.base, made.adapter = folders[0].base, out
    start = made.fresh().state_dict()
    return {n: t - start[n] for n, t in made.tuned().merge_and_unload().state_dict().items()}


@pytest.mark.parametrize(
    ("build", "one", "two"),
    [
        (llama, ATTENTION, SECOND),
        (
            gpt2,
            {"target_modules": ["c_attn", "wpe"], "r": 3},
            {"target_modules": ["c_attn", "c_proj"], "r": 2, "alpha_pattern": {"c_attn": 1}},
        ),
        (
            convolutions,
            {"target_modules": ["0", "2", "5"], "r": 3, "rank_pattern": {"2": 1}},
            {"target_modules": ["0", "2", "5"], "r": 2, "use_rslora": True},
        ),
    ],
    ids=["linears", "Conv1D and embedding", "convolutions"],
)
def test_products_are_merged_and_load_in_peft(
    tmp_path: Path, build: Any, one: dict[str, Any], two: dict[str, Any]
) -> None:
    folders = pair(tmp_path, build, one, two)
    report = blr.merge(
        folders[0].base, [f.adapter for f in folders], weights=[0.6, -0.3],
        method="task_arithmetic", rank=8, out=tmp_path / "out",
    )  # fmt: skip
    assert max(report.lost.values()) < 1e-6
    assert len(set(report.ranks.values())) > 1  # as many as the products have
    first, second = steps(folders)
    step = loaded(folders, tmp_path / "out")
    assert any(t.any() for t in step.values())
    for name, tensor in step.items():
        expected = 0.6 * first[name] - 0.3 * second[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=2e-6, msg=name)


def test_a_lower_rank_is_the_nearest(tmp_path: Path) -> None:
    folders = pair(tmp_path, llama, ATTENTION, SECOND)
    adapters = [f.adapter for f in folders]
    blr.merge(
        folders[0].base, adapters, weights=0.5, method="task_arithmetic", rank=2,
        out=tmp_path / "out",
    )  # fmt: skip
    first, second = steps(folders)
    for name, tensor in loaded(folders, tmp_path / "out").items():
        whole = (first[name] + second[name]).double() / 2
        if not whole.any():
            continue
        u, s, v = torch.linalg.svd(whole)
        expected = u[:, :2] * s[:2] @ v[:2]
        torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=2e-6)


def test_a_share_chooses_ranks_that_load_again(tmp_path: Path) -> None:
    folders = pair(tmp_path, llama, ATTENTION, SECOND)
    text = (
        "merge_method: linear\nbase_model: 0/base\nadapter_rank: 0.8\n"
        "models: [{model: 0/adapter}, {model: 1/adapter}]\n"
    )
    (tmp_path / "r.yml").write_text(text)
    assert read_recipe(tmp_path / "r.yml").job.rank == 0.8
    report = blr.merge(
        folders[0].base, [f.adapter for f in folders], method="linear", rank=0.8,
        out=tmp_path / "out",
    )  # fmt: skip
    assert max(report.lost.values()) <= 0.2**0.5
    assert len(set(report.ranks.values())) > 1
    assert any(t.any() for t in loaded(folders, tmp_path / "out").values())
    written = load_file(tmp_path / "out" / "adapter_model.safetensors").values()
    assert report.table["bytes"].sum() == sum(t.nbytes for t in written)


@pytest.mark.parametrize("rank", [1, 3])
def test_the_metric_of_the_inputs_is_what_the_outputs_lose(rank: int) -> None:
    """Eckart–Young in the space of outputs ΔW Xᵀ."""
    generator = torch.Generator().manual_seed(0)
    step = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    inputs = torch.randn(40, 6, generator=generator, dtype=torch.float64) * torch.arange(1.0, 7)
    b, a, lost = low_rank(step, rank, right=inputs.T @ inputs)
    outputs = step @ inputs.T
    s = torch.linalg.svdvals(outputs)
    error = torch.linalg.norm(outputs - b @ a @ inputs.T)
    assert float(error) == pytest.approx(float(s[rank:].norm()), rel=1e-4)
    assert lost == pytest.approx(float(s[rank:].norm() / s.norm()), rel=1e-4)


def test_diagonal_precisions_weigh_merge_and_rank(tmp_path: Path) -> None:
    folders = pair(tmp_path, llama, ATTENTION, {**ATTENTION, "r": 3})
    first, second = steps(folders)
    names = [n for n, t in first.items() if t.any()]
    h: list[dict[str, Tensor]] = [
        {n: torch.rand(first[n].shape) + k for n in names} for k in range(2)
    ]
    places = []
    for k, values in enumerate(h):
        place = tmp_path / f"precision{k}"
        place.mkdir()
        save_file(values, place / "precision.safetensors")
        (place / "precision_config.json").write_text(json.dumps(record(parameters=names)))
        places.append(place)
    blr.merge(
        folders[0].base, [f.adapter for f in folders], precisions=places, delta=0.1,
        rank=8, out=tmp_path / "out",
    )  # fmt: skip
    step = loaded(folders, tmp_path / "out")
    assert names
    for n in names:
        one, two = h[0][n] + 0.1, h[1][n] + 0.1
        exact = (one * first[n] + two * second[n]) / (0.1 + h[0][n] + h[1][n])
        rows, columns = (h[0][n] + h[1][n]).mean(1), (h[0][n] + h[1][n]).mean(0)
        turned = rows.sqrt()[:, None] * exact * columns.sqrt()
        left = (rows.sqrt()[:, None] * (exact - step[n]) * columns.sqrt()).norm()
        tail = torch.linalg.svdvals(turned)[8:].norm()
        assert float(left) <= 1.001 * float(tail) + 1e-5
    chosen = blr.merge(
        folders[0].base, [f.adapter for f in folders], precisions=places, method="auto",
        rank=4, out=tmp_path / "auto",
    )  # fmt: skip
    assert chosen.choice.by == "gap" and set(chosen.ranks.values()) == {4}


@pytest.mark.parametrize("structure", ["gram", "kron"])
def test_moments_weigh_convolutions_with_biases(tmp_path: Path, structure: str) -> None:
    """The first layer against the patches that it sees, its bias left as it is."""
    settings: dict[str, Any] = {"target_modules": ["0"], "r": 3}
    folders = pair(tmp_path, convolutions, settings, {**settings, "r": 2})
    generator, places, moments = torch.Generator().manual_seed(0), [], []
    for k, folder in enumerate(folders):
        images = torch.rand(40, 3, 12, 8, generator=generator)
        model = folder.tuned().merge_and_unload().requires_grad_()
        task = blr.Task(model, (images, torch.zeros(40, dtype=torch.long)))
        fit = blr.fit_laplace(task, structure=structure, prior_precision=1.0)
        fit.save(tmp_path / f"p{k}")
        places.append(tmp_path / f"p{k}")
        patches = (
            nn.functional.unfold(images.double(), (3, 2), stride=2).movedim(1, 2).flatten(0, 1)
        )
        moments.append(patches.T @ patches)
    how: dict[str, Any] = {"method": "fisher", "precisions": places, "trust": True, "rank": 2}
    base, models, out = folders[0].base, [f.adapter for f in folders], tmp_path / "out"
    if structure == "kron":
        with pytest.raises(BLRError, match="hold a bias"):
            blr.merge(base, models, out=out, **how)
        return
    blr.merge(base, models, out=out, **how)
    one, two = (s["0.weight"].double().flatten(1) for s in steps(folders))
    both = moments[0] + moments[1]
    exact = torch.linalg.solve(both, one @ moments[0] + two @ moments[1], left=False)
    step = loaded(folders, out)["0.weight"].double().flatten(1)
    root = torch.linalg.cholesky(both)
    tail = torch.linalg.svdvals(exact @ root)[2:].norm()
    assert float(((exact - step) @ root).norm()) == pytest.approx(float(tail), rel=1e-3)


def test_a_quantised_base_is_not_read(tmp_path: Path) -> None:
    folders = pair(tmp_path, llama, ATTENTION, SECOND)
    adapters = [f.adapter for f in folders]
    more: dict[str, Any] = {"method": "task_arithmetic", "weights": 0.5, "rank": 4}
    blr.merge(folders[0].base, adapters, **more, out=tmp_path / "full")
    file = folders[0].base / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if "proj" in name:
            tensors[name] = torch.zeros(tensors[name].numel() // 2, 1, dtype=torch.uint8)
    save_file(tensors, file)
    kept = file.read_bytes()
    blr.merge(folders[0].base, adapters, **more, out=tmp_path / "few")
    assert file.read_bytes() == kept
    one, two = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("full", "few"))
    assert all(torch.equal(one[n], two[n]) for n in one)


@pytest.mark.parametrize(
    ("rank", "word"),
    [(17, "17 is above"), *((r, "whole number") for r in (2.5, 0, float("inf"), float("nan")))],
)
def test_ranks_that_cannot_be(tmp_path: Path, rank: float, word: str) -> None:
    folders = pair(tmp_path, llama, ATTENTION, ATTENTION)
    with pytest.raises(InputError, match=word):
        blr.merge(
            folders[0].base, [f.adapter for f in folders], method="linear", rank=rank,
            out=tmp_path / "out",
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_a_rank_is_cut_to_each_matrix(tmp_path: Path) -> None:
    """k_proj is narrower than q_proj; a rank above it is the whole of it."""
    narrow = {"target_modules": ["q_proj", "k_proj"], "r": 3}
    folders = pair(tmp_path, llama, narrow, narrow)
    file = load_file(folders[0].adapter / "adapter_model.safetensors")
    small = min(len(t) for n, t in file.items() if "k_proj.lora_B" in n)
    assert small < 16
    report = blr.merge(
        folders[0].base,
        [f.adapter for f in folders],
        method="linear",
        rank=16,
        out=tmp_path / "out",
    )
    assert max(report.lost.values()) < 1e-6
    assert max(report.ranks.values()) <= 6
    first, second = steps(folders)
    for name, tensor in loaded(folders, tmp_path / "out").items():
        torch.testing.assert_close(tensor, (first[name] + second[name]) / 2, rtol=0, atol=2e-6)


RECIPE = """merge_method: task_arithmetic
base_model: 0/base
adapter_rank: 2
out_dtype: bfloat16
models: [{model: 0/adapter, parameters: {weight: 0.5}}, {model: 1/adapter, parameters: {weight: 1}}]
"""


def test_a_recipe_writes_all_that_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = pair(tmp_path, llama, ATTENTION, SECOND)
    (folders[0].adapter / "tokenizer.json").write_text("{}")
    (tmp_path / "r.yml").write_text(RECIPE)
    command = ["merge", str(tmp_path / "r.yml"), str(tmp_path / "out"), "--tensors"]
    assert main([*command, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "q_proj" in said
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    written = size(sum(t.nbytes for t in tensors.values()))
    assert written in planned  # of rank 2, which all products have
    assert f"{written} written" in said
    texts = {p.name: p.read_text() for p in (tmp_path / "out").iterdir() if "model.s" not in p.name}
    assert {"tokenizer.json", "merge_report.csv", "merge_report.json"} <= set(texts)
    assert RECIPE in texts["merge_recipe.yml"]
    assert "library_name: peft" in texts["README.md"]
    first, second = steps(folders)
    for name, step in loaded(folders, tmp_path / "out").items():
        whole = 0.5 * first[name] + second[name]
        if not whole.any():
            continue
        u, s, v = torch.linalg.svd(whole)
        expected = u[:, :2] * s[:2] @ v[:2]
        assert float((step - expected).norm()) <= 2e-2 * float(s[0])


@pytest.mark.parametrize(
    ("old", "new", "options", "word"),
    [
        ("rank: 2", "rank: 99", [], "99 is above"),
        ("1/adapter", "1/base", [], "is none"),
        ("", "", ["--shard-size", "1kB"], "no --shard-size"),
    ],
)
def test_a_dry_run_refuses_what_the_run_does(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    options: list[str],
    word: str,
) -> None:
    folders = pair(tmp_path, llama, ATTENTION, SECOND)
    assert folders
    (tmp_path / "r.yml").write_text(RECIPE.replace(old, new))
    for dry in ([], ["--dry-run"]):
        assert main(["merge", str(tmp_path / "r.yml"), str(tmp_path / "out"), *options, *dry]) == 2
        assert re.search(word, capsys.readouterr().err)
        assert not (tmp_path / "out").exists()


def test_only_matrices_of_adapters(tmp_path: Path) -> None:
    more = {**ATTENTION, "modules_to_save": ["lm_head"]}
    folders = pair(tmp_path, llama, ATTENTION, more)
    base, models = folders[0].base, [f.adapter for f in folders]
    with pytest.raises(BLRError, match="more than LoRA"):
        blr.merge(base, models, method="linear", rank=2, out=tmp_path / "out")
    grouped = pair(tmp_path / "grouped", convolutions, *2 * [{"target_modules": ["3"], "r": 2}])
    with pytest.raises(BLRError, match="no plain LoRA"):
        blr.merge(
            grouped[0].base, [f.adapter for f in grouped], method="linear", rank=2,
            out=tmp_path / "out",
        )  # fmt: skip
    with pytest.raises(InputError, match="is none"):
        blr.merge(base, [base], method="linear", rank=2, out=tmp_path / "out")
    with pytest.raises(InputError, match="for folders"):
        blr.merge(None, [{"w": torch.ones(2)}], method="linear", rank=2)
