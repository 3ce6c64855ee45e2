"""What stands beside a merged model: readable, escaped, and without paths of this machine."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from merging.models_on_disk import near, state, write_family, write_model
from ruamel.yaml import YAML

from blr_analysis.merging.card import documents, markdown, model_card, shown, size
from blr_analysis.merging.folders import MergeReport, execute
from blr_analysis.merging.plan import plan_folders
from blr_analysis.merging.recipe import Recipe, read_recipe

RECIPE = """# with ``` in a remark
merge_method: gradient_matching
base_model: ./base
models:
  - model: ./ft1
  - model: ./ft2
    parameters: {weight: [0.5, 1.5]}
parameters: {delta: 0.01}
out_dtype: bfloat16
chat_template: "{{ messages }}"
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
            documents=lambda report: documents(report, recipe),
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
        "chat_template.jinja", "config.json", "tokenizer.json", "model.safetensors",
    }  # fmt: skip
    assert (report.folder / "chat_template.jinja").read_text() == "{{ messages }}"


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
