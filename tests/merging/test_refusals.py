"""What a merge refuses, and that it leaves nothing behind when it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from merging.models_on_disk import (
    curved,
    family_in_memory,
    near,
    record,
    state,
    write_family,
    write_model,
)
from safetensors.torch import load_file, save_file

import blr_analysis as blr
from blr_analysis.errors import BLRError

Family = dict[str, Any]


def change(file: Path, how: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file)


def precision_of(family: Family) -> Path:
    return family["precisions"][0] / "precision.safetensors"


def model_of(family: Family) -> Path:
    return family["models"][0] / "model.safetensors"


def config(folder: Path, **more: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


DAMAGES: dict[str, tuple[Callable[[Family], Any], str]] = {
    "a missing tensor": (
        lambda f: change(model_of(f), lambda t: t.pop("layers.0.norm.weight")),
        r"missing in the first: 'layers\.0\.norm\.weight'",
    ),
    "an extra tensor": (
        lambda f: change(model_of(f), lambda t: t.update(odd=torch.ones(2, 2))),
        "only there: 'odd'",
    ),
    "another shape": (
        lambda f: change(model_of(f), lambda t: t.update(scale=torch.ones(3))),
        r"'scale' is \[3\], expected \[\]",
    ),
    "another vocabulary": (
        lambda f: change(model_of(f), lambda t: t.update({"embed.weight": torch.ones(13, 6)})),
        "a vocabulary",
    ),
    "integers for numbers": (
        lambda f: change(model_of(f), lambda t: t.update(scale=torch.tensor(3))),
        r"'scale' is of torch\.int64",
    ),
    "a prefix": (
        lambda f: save_file(
            {f"model.{n}": t for n, t in load_file(model_of(f)).items()}, model_of(f)
        ),
        "prefix",
    ),
    "NaN in a model": (
        lambda f: change(model_of(f), lambda t: t["layers.0.mlp.weight"].fill_(torch.nan)),
        r"'layers\.0\.mlp\.weight' of '.*ft1' holds NaN",
    ),
    "NaN in a precision": (
        lambda f: change(precision_of(f), lambda t: t["scale"].fill_(torch.nan)),
        "the precision of 'scale'.*NaN",
    ),
    "a negative precision": (
        lambda f: change(precision_of(f), lambda t: t["scale"].fill_(-1e-3)),
        "the precision of 'scale'.*negative",
    ),
    "a precision of another shape": (
        lambda f: (
            change(precision_of(f), lambda t: t.update(scale=torch.ones(2))),
            None,
        ),
        r"the precision of 'scale' .* is \[2\], the weight \[\]",
    ),
    "a truncated shard": (lambda f: truncate(model_of(f)), "truncated"),
    "a missing shard": (
        lambda f: next(f["base"].glob("model-00002*")).unlink(),
        "model-00002-of-00003",
    ),
    "a record of another program": (
        lambda f: (f["precisions"][0] / "precision_config.json").write_text('{"format": "x"}'),
        "format 'x'",
    ),
    "a record without n_data": (
        lambda f: (f["precisions"][0] / "precision_config.json").write_text(
            json.dumps(record(parameters=["scale"], n_data=None))
        ),
        "n_data=None",
    ),
    "a precision with factors": (
        lambda f: (f["precisions"][0] / "precision_config.json").write_text(
            json.dumps({"format": "blr_analysis.precision", "version": 1, "structure": "lowrank"})
        ),
        "structure 'lowrank'",
    ),
    "another number of heads": (
        lambda f: [
            config(folder, num_attention_heads=k)
            for k, folder in enumerate([f["base"], *f["models"]])
        ],
        "num_attention_heads is 1 and 0",
    ),
    "a malformed record": (
        lambda f: (f["precisions"][0] / "precision_config.json").write_text(
            json.dumps(record(parameters=["scale"], prior_precision={"zz": 1.0}))
        ),
        "one number per tensor",
    ),
    "a negative prior": (
        lambda f: (f["precisions"][0] / "precision_config.json").write_text(
            json.dumps(record(parameters=["scale"], prior_precision=-1.0))
        ),
        "prior_precision=-1.0",
    ),
    "another architecture": (lambda f: config(f["models"][0], model_type="other"), "architectures"),
    "a quantised model": (
        lambda f: config(f["models"][0], quantization_config={"bits": 4}),
        "quantised",
    ),
    "a broken configuration": (
        lambda f: (f["base"] / "config.json").write_text("{"),
        r"config\.json.* truncated",
    ),
    "pickled weights": (
        lambda f: (model_of(f).unlink(), (f["models"][0] / "pytorch_model.bin").write_bytes(b"x")),
        "pickle",
    ),
    "a model that equals its base": (
        lambda f: save_file(state(0), model_of(f)),
        "equals its base",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_one_clear_error_and_nothing_written(tmp_path: Path, name: str) -> None:
    family = write_family(tmp_path)
    damage, word = DAMAGES[name]
    damage(family)
    with pytest.raises(BLRError, match=word):
        blr.merge(**family, out=tmp_path / "out")
    assert not any(p.name.startswith((".out", "out")) for p in tmp_path.iterdir())


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no models": ({"models": [], "precisions": []}, "models is empty"),
    "one model": ({"models": {}}, "must be a list"),
    "one weight too few": ({"weights": [1.0]}, "weights must have one entry per model"),
    "a weight of NaN": ({"weights": [1.0, float("nan")]}, "expected a finite number"),
    "one precision too few": ({"precisions": [curved(1)]}, "precisions must have one entry"),
    "no precision": ({"precisions": None}, r"precision of 'models\[0\]' is missing"),
    "a negative delta": ({"delta": -1.0}, "delta must be"),
    "a huge delta": ({"delta": 1e39}, "delta must be"),
    "a weight in words": ({"weights": ["a", "b"]}, "expected a finite number"),
    "an unknown method": ({"method": "tyes"}, "method must be one of"),
    "no base": ({"base": None}, "needs the base"),
    "an odd dtype": ({"dtype": torch.bfloat16}, "dtype"),
    "an odd out_dtype": ({"out_dtype": torch.int8}, "out_dtype"),
    "an odd stand-in": ({"missing_precision": "guess"}, "missing_precision"),
    "out in memory": ({"out": "somewhere"}, "are for folders"),
    "paths and tensors": ({"base": "base"}, "all models as folders"),
    "weights that sum to 0": (
        {
            "method": "linear",
            "weights": [1.0, -1.0],
            "precisions": None,
            "base_precision": None,
        },
        "sum to 0",
    ),
    "foreign precisions": (
        {"precisions": [curved(1), {**curved(2), "odd": torch.ones(2)}]},
        "belongs to another model.*'odd'",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_make_no_sense(name: str) -> None:
    more, word = SETTINGS[name]
    with pytest.raises(BLRError, match=word):
        blr.merge(**{**family_in_memory(), **more})


def test_folders_need_a_place_to_go(tmp_path: Path) -> None:
    with pytest.raises(BLRError, match="name it with out="):
        blr.merge(**write_family(tmp_path))


def test_a_merge_that_overflows_its_dtype() -> None:
    base = {"w": torch.zeros(3)}
    model = {"w": torch.full((3,), 6e4)}
    arguments: dict[str, Any] = dict(method="task_arithmetic", out_dtype=torch.float16)
    assert blr.merge(base, [model], **arguments)["w"].dtype == torch.float16
    with pytest.raises(BLRError, match=r"does not fit into torch\.float16"):
        blr.merge(base, [model], weights=[2.0], **arguments)


def test_a_model_equal_to_its_base_is_found_wherever_they_differ() -> None:
    base = {"w": torch.zeros(10_000)}
    one = {"w": torch.zeros(10_000)}
    with pytest.raises(BLRError, match="equals its base"):
        blr.merge(base, [one], method="task_arithmetic")
    one["w"][9_000] = 1.0
    assert torch.equal(blr.merge(base, [one], method="task_arithmetic")["w"], one["w"])


def test_an_adapter_needs_its_base(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "ft", near(state(0), 1))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(BLRError, match="is an adapter"):
        blr.merge(None, [folder], method="linear", out=tmp_path / "out")


def test_precisions_that_add_up_to_more_than_float32_holds() -> None:
    base, models = {"w": torch.zeros(2)}, [{"w": torch.full((2,), x)} for x in (0.5, 0.25)]
    huge = [{"w": torch.full((2,), 2e38)}] * 2
    with pytest.raises(BLRError, match="float64"):
        blr.merge(base, models, precisions=huge)
    merged = blr.merge(base, models, precisions=huge, dtype=torch.float64)
    torch.testing.assert_close(merged["w"], torch.full((2,), 0.375))


def test_tensors_without_entries() -> None:
    base = {"w": torch.zeros(0, 4)}
    with pytest.raises(BLRError, match="equals its base"):
        blr.merge(base, [{"w": torch.zeros(0, 4)}], method="task_arithmetic")
    merged = blr.merge(None, [base, {"w": torch.zeros(0, 4).half()}], method="linear")
    assert merged["w"].shape == (0, 4)


def test_a_base_that_only_gives_its_files_must_fit_all_the_same(tmp_path: Path) -> None:
    family = write_family(tmp_path)
    write_model(tmp_path / "other", {"odd": torch.ones(2, 2)})
    with pytest.raises(BLRError, match="not the same model"):
        blr.merge(tmp_path / "other", family["models"], method="linear", out=tmp_path / "out")
