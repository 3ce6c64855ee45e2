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

import blr_analysis as blr
from blr_analysis.cli import main
from blr_analysis.merging.card import size

pytestmark = pytest.mark.filterwarnings("ignore")
ATTENTION: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "r": 4}
SECOND: dict[str, Any] = {
    "target_modules": ["q_proj", "down_proj"],
    "r": 2,
    "use_rslora": True,
    "rank_pattern": {"down_proj": 3},
}


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
    ("build", "one", "two"),
    [
        (llama, ATTENTION, SECOND),
        (llama, {"target_modules": ["q_proj", "k_proj"], "r": 3}, ATTENTION),
        (
            gpt2,
            {"target_modules": ["c_attn"], "r": 3},
            {"target_modules": ["c_attn", "c_proj"], "r": 2, "alpha_pattern": {"c_attn": 1}},
        ),
    ],
    ids=["rank-stabilised", "a narrow layer", "Conv1D"],
)
def test_products_are_merged_and_load_in_peft(
    tmp_path: Path, build: Any, one: dict[str, Any], two: dict[str, Any]
) -> None:
    folders = pair(tmp_path, build, one, two)
    report = blr.merge(
        folders[0].base, [f.adapter for f in folders], weights=[0.6, -0.3],
        method="task_arithmetic", rank=16, out=tmp_path / "out",
    )  # fmt: skip
    assert max(report.lost.values()) < 1e-6
    assert len(set(report.ranks.values())) > 1  # as many as the products have
    first, second = steps(folders)
    step = loaded(folders, tmp_path / "out")
    assert any(t.any() for t in step.values())
    for name, tensor in step.items():
        expected = 0.6 * first[name] - 0.3 * second[name]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=3e-6, msg=name)


def test_diagonal_precisions_weigh(tmp_path: Path) -> None:
    folders = pair(tmp_path, llama, ATTENTION, {**ATTENTION, "r": 3})
    first, second = steps(folders)
    names = [n for n, t in first.items() if t.any()]
    h = [{n: torch.rand(first[n].shape) + k for n in names} for k in range(2)]
    places = []
    for k, values in enumerate(h):
        places.append(tmp_path / f"precision{k}")
        places[k].mkdir()
        save_file(values, places[k] / "precision.safetensors")
        document = json.dumps(record(parameters=names))
        (places[k] / "precision_config.json").write_text(document)
    blr.merge(
        folders[0].base, [f.adapter for f in folders], precisions=places, delta=0.1,
        rank=16, out=tmp_path / "out",
    )  # fmt: skip
    step = loaded(folders, tmp_path / "out")
    for n in names:
        one, two = h[0][n] + 0.1, h[1][n] + 0.1
        exact = (one * first[n] + two * second[n]) / (0.1 + h[0][n] + h[1][n])
        torch.testing.assert_close(step[n], exact, rtol=0, atol=3e-6)


RECIPE = """merge_method: task_arithmetic
base_model: 0/base
adapter_rank: 0.8
out_dtype: bfloat16
models: [{model: 0/adapter, parameters: {weight: 0.5}}, {model: 1/adapter, parameters: {weight: 1}}]
"""


def test_a_recipe_writes_all_that_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a share, which chooses ranks that load again."""
    folders = pair(tmp_path, llama, ATTENTION, SECOND)
    (folders[0].adapter / "tokenizer.json").write_text("{}")
    (tmp_path / "r.yml").write_text(RECIPE)
    command = ["merge", str(tmp_path / "r.yml"), str(tmp_path / "out"), "--tensors"]
    assert main([*command, "--dry-run"]) == 0
    assert "q_proj" in capsys.readouterr().out and not (tmp_path / "out").exists()
    assert main(command) == 0
    said = capsys.readouterr().out
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert f"{size(sum(t.nbytes for t in tensors.values()))} written" in said
    texts = {p.name: p.read_text() for p in (tmp_path / "out").iterdir() if "model.s" not in p.name}
    assert {"tokenizer.json", "merge_report.csv"} <= texts.keys()
    assert RECIPE in texts["merge_recipe.yml"] and "library_name: peft" in texts["README.md"]
    assert len(json.loads(texts["adapter_config.json"])["rank_pattern"]) > 0
    first, second = steps(folders)
    for name, step in loaded(folders, tmp_path / "out").items():
        whole = 0.5 * first[name] + second[name]
        assert float((step - whole).norm()) <= (0.2**0.5 + 0.02) * float(whole.norm()), name


@pytest.mark.parametrize(
    ("old", "new", "options", "word"),
    [
        ("rank: 0.8", "rank: 99", [], "up to 16"),
        ("rank: 0.8", "rank: 2.5", [], "whole number"),
        ("1/adapter", "1/base", [], "is none"),
        ("1/adapter", "2/adapter", [], "more than the matrices"),
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
    pair(tmp_path, llama, ATTENTION, ATTENTION)
    if "2" in new:
        more = {**ATTENTION, "modules_to_save": ["lm_head"]}
        Folders(tmp_path / "2", llama, torch.float32).write(**more)
    (tmp_path / "r.yml").write_text(RECIPE.replace(old, new))
    for dry in ([], ["--dry-run"]):
        assert main(["merge", str(tmp_path / "r.yml"), str(tmp_path / "out"), *options, *dry]) == 2
        assert re.search(word, capsys.readouterr().err)
        assert not (tmp_path / "out").exists()
