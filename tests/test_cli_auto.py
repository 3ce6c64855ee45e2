"""``blr-analysis merge`` with ``merge_method: auto``: chosen by labelled examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from commands import refused, run

from blr_analysis import merge
from blr_analysis.cli import main
from blr_analysis.files import Folder
from blr_analysis.huggingface.fisher import text_tasks
from blr_analysis.posterior import write_precision

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two models of it, a recipe, and labelled examples for each."""
    place = tmp_path_factory.mktemp("auto")
    base = tiny.build("bert")
    tiny.save(place / "base", base)
    for k, name in enumerate("ab", 1):
        model = tiny.build("bert")
        generator = torch.Generator().manual_seed(k)
        for p in model.parameters():
            p.data += 0.05 * torch.randn(p.shape, generator=generator)
        folder = tiny.save(place / name, model)
        curved = {n: torch.full(s.shape, float(k)) for n, s in Folder.open(folder).specs.items()}
        about = {"kind": "fisher_mc", "definition": "constant", "n_data": 10}
        write_precision(folder / "precision", curved, **about, model=folder)
        rows = [{"text": t, "label": i % 3} for i, t in enumerate(tiny.sentences(12, seed=k))]
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (place / "recipe.yml").write_text(
        "merge_method: auto\nbase_model: base\nmodels:\n- model: a\n- model: b\n"
        "parameters: {delta: 0.5}\n"
    )
    return place


def merged(capsys: Any, place: Path, out: str, *options: object) -> tuple[int, str, str]:
    return run(capsys, "merge", place / "recipe.yml", place / out, *options)


def test_without_data_nothing_is_chosen(here: Path, capsys: Any) -> None:
    assert "chooses by data" in refused(capsys, "merge", here / "recipe.yml", here / "by_gap")


def test_by_validation(here: Path, capsys: Any) -> None:
    options = ("--validate", here / "a.jsonl", "--validate", here / "b.jsonl")
    code, said, err = merged(capsys, here, "by_file", *options)
    assert code == 0, err
    tried = said.split("Tried")[1].splitlines()
    rows = [line.rsplit(None, 1) for line in tried if " " in line.strip()][1:]
    values = [float(value) for name, value in rows if name.strip().startswith(("average", "task"))]
    assert values == sorted(values)
    assert len(values) >= 5
    assert "auto: Choice(" in err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fisher", "auto"])
def test_statistics_behind_merged_layers(here: Path, capsys: Any, method: str) -> None:
    """The bits of the same merge in memory; a dry run says what it takes and reads no data."""
    models = (
        "[{model: a, data: a.jsonl, precision: null}, "
        "{model: b, data: b.jsonl, precision: null, parameters: {weight: 2}}]"
    )
    text = f"merge_method: {method}\nbase_model: base\nmodels: {models}\n"
    (here / "data.yml").write_text(text)
    command = ["merge", str(here / "data.yml")]
    assert main([*command, "--dry-run"]) == 0
    assert "forward passes" in capsys.readouterr().out or method == "auto"
    assert main([*command, str(here / f"by_{method}")]) == 0
    files = [here / "a.jsonl", here / "b.jsonl"]
    how = {"tasks": text_tasks(here / "base", files, labelled=method == "auto"), "weights": [1, 2]}
    states = [Folder.open(here / name).tensors() for name in "ab"]
    base = Folder.open(here / "base").tensors()
    expected = merge(base, states, method=method, progress=False, **how)
    written = Folder.open(here / f"by_{method}").tensors()
    assert all(torch.equal(written[n], t) for n, t in expected.items())
    for old, new, word in (
        (", data: b.jsonl", "", "at every model"),
        ("data: b.jsonl", "data: c.jsonl", "no 'c.jsonl'"),
        *[("data: b.jsonl", "data: b.jsonl, n_data: 3", "one of them")] * (method == "fisher"),
        (f"method: {method}", "method: gradient_matching", "fisher and auto"),
    ):
        (here / "data.yml").write_text(text.replace(old, new))
        assert main([*command, "--dry-run"]) == 2
        assert word in capsys.readouterr().err


def test_swapped_and_misused(here: Path, capsys: Any) -> None:
    (here / "swapped.yml").write_text(
        "merge_method: gradient_matching\nbase_model: base\nmodels:\n"
        "- {model: a, precision: b/precision}\n- {model: b, precision: a/precision}\n"
    )
    command = ["merge", str(here / "swapped.yml"), str(here / "swapped")]
    assert main(command) == 2
    assert "swapped" in capsys.readouterr().err
    assert main([*command, "--validate", str(here / "a.jsonl")]) == 2
    assert "auto" in capsys.readouterr().err
    assert main([*command, "--trust"]) == 0
