"""Recipes: what mergekit's users write means here the same, and every fault has a line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from merging.models_on_disk import curved, near, state, write_family, write_model

from blr_analysis.errors import BLRError, InputError, StorageError
from blr_analysis.merging.job import Job, Member
from blr_analysis.merging.plan import make_plan as plan_folders
from blr_analysis.merging.recipe import Recipe, read_recipe
from blr_analysis.merging.layer_weights import (
    LayerWeights,
    Rule,
    depth_of,
    depths,
    varies,
    weight_by_layer,
)

Read = Callable[[str], Recipe]
MODELS = ("ft1", "ft2", "plain")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with base, ft1, ft2 (with precisions), and plain (without)."""
    folder = tmp_path_factory.mktemp("recipes")
    write_family(folder)
    write_model(folder / "plain", near(state(0), 3))
    return folder


@pytest.fixture
def read(place: Path) -> Read:
    def of(text: str) -> Recipe:
        (place / "recipe.yml").write_text(text, encoding="utf-8")
        return read_recipe(place / "recipe.yml")

    return of


def weights(recipe: Recipe) -> list[Any]:
    return [member.weight for member in recipe.job.members]


# The recipe of this package


def test_every_key_arrives_in_the_job(read: Read, place: Path) -> None:
    found = read(
        """
        merge_method: gradient_matching
        base_model: ./base
        base_precision: ./base/precision
        models:
          - model: ./ft1
            precision: ./ft2/precision
            n_data: 100
            parameters: {weight: -0.5}
          - model: ./ft2
            parameters: {weight: 2}
        parameters: {delta: 1e-3, missing_precision: zero, normalize: true}
        dtype: float64
        out_dtype: bfloat16
        tokenizer_source: ./ft2
        """
    )
    job = found.job
    assert job == Job(
        method="gradient_matching",
        members=job.members,
        base=place / "base",
        base_precision=place / "base/precision",
        delta=1e-3,
        missing_precision="zero",
        normalize=True,
        dtype=torch.float64,
        out_dtype=torch.bfloat16,
        tokenizer_source=place / "ft2",
    )
    one, two = job.members
    assert (one.model, one.precision) == (place / "ft1", place / "ft2/precision")
    assert (one.n_data, one.weight) == (100, -0.5)
    assert (two.model, two.precision) == (place / "ft2", place / "ft2/precision")  # beside it
    assert (two.n_data, two.weight) == (None, 2.0)
    assert found.notes == ()


def test_the_precisions_beside_the_models_are_taken(read: Read, place: Path) -> None:
    found = read("merge_method: gradient_matching\nbase_model: base\nmodels: [{model: ft1}]")
    assert found.job.members[0].precision == place / "ft1/precision"
    assert found.job.base_precision == place / "base/precision"
    assert "line 2" in found.notes[0]
    without = read(
        "merge_method: gradient_matching\nbase_model: base\nbase_precision: null\n"
        "models: [{model: ft1, precision: null}]\nparameters: {missing_precision: zero}"
    )
    assert without.job.members[0].precision is None
    assert without.job.base_precision is None


def test_defaults_are_the_methods_own(read: Read) -> None:
    models = "models: [{model: ft1}, {model: ft2}]"
    for method, weight in (("gradient_matching", 1.0), ("fisher", 1.0), ("linear", 1.0)):
        found = read(f"merge_method: {method}\nbase_model: base\n{models}")
        assert weights(found) == [weight] * 2
        assert found.job.normalize is None
        assert (found.job.dtype, found.job.out_dtype) == (torch.float32, None)
    found = read(f"merge_method: task_arithmetic\nbase_model: base\n{models}")
    assert weights(found) == [0.5, 0.5]
    assert "0.5 for each model" in found.notes[0]


def test_what_a_method_has_no_use_for_is_said(read: Read) -> None:
    found = read(
        "merge_method: task_arithmetic\nbase_model: base\nbase_precision: base/precision\n"
        "models:\n- {model: ft1, precision: ft1/precision, parameters: {weight: 1}}\n"
        "parameters: {delta: 1, missing_precision: zero}"
    )
    assert found.job.members[0].precision is None
    assert (found.job.base_precision, found.job.delta) == (None, 0.0)
    assert sorted(note.partition(":")[0] for note in found.notes) == [
        "line 3",
        "line 5",
        "line 6",
        "line 6",
    ]


# Recipes that mergekit runs, too

LINEAR = """
merge_method: linear
dtype: bfloat16
models:
  - {model: ft2, parameters: {weight: 0.7}}
  - {model: ft1, parameters: {weight: 1.4}}
"""
ARITHMETIC = """
merge_method: task_arithmetic
base_model: base
dtype: float16
out_dtype: float32
tokenizer: {source: base}
parameters:
  lambda: 0.8
  normalize: no
  int8_mask: false
models:
  - model: base                                 # its step is 0
  - {model: ft1, parameters: {weight: 0.75, density: 0.9}}
  - model: ft2
    parameters:
      weight:
        - {filter: norm, value: [2.0, 0.5]}
        - {filter: "*", value: -0.25}
"""


def test_a_linear_recipe(read: Read) -> None:
    found = read(LINEAR)
    assert found.job.method == "linear"
    assert weights(found) == [0.7, 1.4]
    assert found.job.base is None
    assert found.job.normalize is None  # which divides
    assert found.job.out_dtype == torch.bfloat16  # dtype is what mergekit writes
    assert found.job.dtype == torch.float32


def test_what_mergekit_ignores_is_noted(read: Read) -> None:
    slerp = "merge_method: slerp\nbase_model: base\nmodels: [{model: base}, {model: ft1}]\n"
    found = read(slerp + "parameters: {t: 0.5, embed_slerp: true}\nrandom_seed: 1\n")
    noted = [note for note in found.notes if "no effect" in note]
    assert {word for word in ("embed_slerp", "random_seed") if word in " ".join(noted)} == {
        "embed_slerp",
        "random_seed",
    }


def weight_of(member: Member, name: str) -> float:
    return member.weight(name) if callable(member.weight) else member.weight


def test_a_task_arithmetic_recipe(read: Read) -> None:
    found = read(ARITHMETIC)
    assert [m.model.name for m in found.job.members] == ["ft1", "ft2"]
    one, two = found.job.members
    assert found.job.scale == 0.8
    assert weight_of(one, "scale") == 0.75
    by_name = {"layers.0.norm.weight": 2.0, "layers.1.norm.weight": 0.5, "scale": -0.25}
    for name, weight in by_name.items():
        assert weight_of(two, name) == pytest.approx(weight)
    assert found.job.out_dtype == torch.float32
    assert found.job.tokenizer_source == "base"
    assert any("density has no effect" in note for note in found.notes)
    assert not any("int8_mask" in note for note in found.notes)


def test_lambda_stands_beside_the_weights(read: Read) -> None:
    found = read(
        "merge_method: task_arithmetic\nbase_model: base\n"
        "models: [{model: ft1, parameters: {weight: 1}}, {model: ft2, parameters: {weight: 3}}]\n"
        "parameters: {normalize: true, lambda: 0.5}"
    )
    assert weights(found) == [1.0, 3.0]
    assert found.job.normalize is True and found.job.scale == 0.5


def test_a_weight_of_all_models_yields_to_a_models_own(read: Read) -> None:
    found = read(
        "merge_method: linear\nmodels:\n- model: ft1\n- model: ft2\n"
        "  parameters: {weight: [{filter: mlp, value: 2}]}\nparameters: {weight: 0.5}"
    )
    assert found.job.members[0].weight == 0.5
    assert weight_of(found.job.members[1], "layers.0.mlp.weight") == 2.0
    assert weight_of(found.job.members[1], "layers.0.norm.weight") == 0.5


def test_linear_averages_an_unlisted_base_only_with_a_weight_for_all(read: Read) -> None:
    text = "merge_method: linear\nbase_model: base\nmodels: [{model: ft1}, {model: ft2}]\n"
    found = read(text + "parameters: {weight: 2}")
    assert [m.model.name for m in found.job.members] == ["ft1", "ft2", "base"]
    assert weights(found) == [2.0, 2.0, 2.0]
    assert [m.model.name for m in read(text).job.members] == ["ft1", "ft2"]


def test_a_merge_key_takes_over_what_it_names(read: Read) -> None:
    found = read(
        "merge_method: linear\nmodels:\n- model: ft1\n  parameters: &p {weight: 0.5}\n"
        "- model: ft2\n  parameters: {<<: *p}"
    )
    assert weights(found) == [0.5, 0.5]


def test_yaml_1_1_numbers_and_booleans(read: Read) -> None:
    found = read(
        'merge_method: linear\nmodels: [{model: ft1, parameters: {weight: "1e-1"}}, '
        "{model: ft2, parameters: {weight: 1_0.5}}]\nparameters: {normalize: off}"
    )
    assert weights(found) == [0.1, 10.5]
    assert found.job.normalize is False


# Where models are


def test_relative_paths_start_at_the_recipe(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (place / "deep").mkdir(exist_ok=True)
    (place / "deep/r.yml").write_text("merge_method: linear\nmodels: [{model: ../ft1}]")
    monkeypatch.chdir(tmp_path)
    assert os.path.samefile(read_recipe(place / "deep/r.yml").job.members[0].model, place / "ft1")


def test_home_and_absolute_paths(read: Read, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place))
    found = read(f"merge_method: linear\nmodels: [{{model: ~/ft1}}, {{model: {place}/ft2}}]")
    assert [m.model for m in found.job.members] == [place / "ft1", place / "ft2"]


COMMIT = "0a1b2c3d" * 5


@pytest.mark.parametrize("written", ["org/model", "org/model@v1", f"org/model@{COMMIT}"])
def test_names_on_the_hub_are_found_in_its_cache(
    read: Read, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str
) -> None:
    kept = tmp_path / "models--org--model"
    snapshot = kept / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (kept / "blobs").mkdir()
    for file in (place / "plain").iterdir():
        (kept / "blobs" / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(kept / "blobs" / file.name)
    for ref in ("main", "v1"):
        (kept / "refs").mkdir(exist_ok=True)
        (kept / "refs" / ref).write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = read(f"merge_method: linear\nmodels: [{{model: {written}}}, {{model: ft1}}]")
    assert found.job.members[0].model == snapshot


def test_names_on_the_hub_that_are_not_here(
    read: Read, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    text = "merge_method: linear\nmodels:\n- model: org/model@v2"
    with pytest.raises(InputError, match=r"line 3.*huggingface-cli download org/model --rev.* v2"):
        read(text)


def test_adapters_are_named_as_in_mergekit(read: Read, place: Path) -> None:
    (place / "lora").mkdir(exist_ok=True)
    text = "merge_method: task_arithmetic\nbase_model: base\nmodels:\n"
    found = read(f"{text}- {{model: ./base+./lora, parameters: {{weight: 1}}}}")
    assert found.job.members[0].model == place / "lora"
    with pytest.raises(InputError, match=r"line 4.*write base_model: \./ft1"):
        read(f"{text}- {{model: ./ft1+./lora, parameters: {{weight: 1}}}}")


# What is wrong, and where


@pytest.mark.parametrize("method", ["linear", "task_arithmetic"])
def test_a_rule_must_speak_of_every_tensor(read: Read, method: str) -> None:
    """As in mergekit, whose error is "Missing required parameter weight"; of precisions the
    default is 1."""
    text = f"merge_method: {method}\nbase_model: base\nmodels:\n- model: ft1\n  parameters:\n"
    rules = "    weight:\n    - {filter: mlp, value: 0.5}\n"
    other = "- {model: ft2, parameters: {weight: 1}}\n"
    with pytest.raises(InputError, match=r"line 7.*'embed\.weight'.*value"):
        plan_folders(read(text + rules + other).job)
    with pytest.raises(InputError, match=r"line 7.*'mpl'.*mlp"):
        plan_folders(read(text + rules.replace("mlp", "mpl") + "    - value: 1\n" + other).job)
    plan_folders(read(text + rules + "    - value: 1\n" + other).job)
    matched = text.replace(method, "gradient_matching") + rules + "- {model: ft2}\n"
    weight = read(matched).job.members[0].weight
    assert callable(weight) and weight("embed.weight") == 1.0


HEAD = "merge_method: linear\n"
BOTH = "models: [{model: ft1}, {model: ft2}]\n"
TASK = "merge_method: task_arithmetic\nbase_model: base\n"
FAULTS = {
    "empty": ("", "line 1.*expected keys"),
    "a tab": ("merge_method: linear\n\tmodels: []", "line 2, column 1.*cannot start"),
    "two documents": (HEAD + BOTH + "---\na: 1", "line 3.*document"),
    "key twice": (HEAD + BOTH + "merge_method: linear", "line 3.*duplicate"),
    "a tag": (HEAD + "models: !!python/object:os.system [x]", "line 2.*models"),
    "odd key": ("? [a]\n: b", "line 1.*string"),
    "no method": (BOTH, "line 1.*the key 'merge_method' is missing"),
    "unknown key": (HEAD + BOTH + "modls: 3", "line 3, column 1: unknown key 'modls'.*'models'"),
    "misplaced key": (HEAD + BOTH + "normalize: true", "line 3.*belongs to 'parameters'"),
    "misspelt weight": (
        HEAD + "models:\n- model: ft1\n  parameters:\n    weigth: 1",
        "line 5, column 5.*'weigth'.*'weight'",
    ),
    "model a number": (HEAD + "models: [{model: 3}]", "line 2.*model: expected.*got 3"),
    "no models": (HEAD + "models: []", "line 2.*the list is empty"),
    "key of a rule": (
        HEAD + "models: [{model: ft1, parameters: {weight: [{filter: a, valu: 1}]}}]",
        "line 2.*'valu'.*mean 'value'",
    ),
    "rank of models": (HEAD + BOTH + "adapter_rank: 2", "line 3.*adapters.*'ft1'"),
    "neither": (HEAD, "line 1.*the key 'models' is missing"),
    "NaN in a list": (
        HEAD + "models:\n- model: ft1\n  parameters:\n    weight:\n    - 1\n    - .nan",
        r"line 7, column 7.*weight\[1\]: expected a finite number, got nan",
    ),
    "weight true": (HEAD + BOTH + "parameters: {weight: true}", "line 3.*got True"),
    "empty gradient": (HEAD + BOTH + "parameters: {weight: []}", "line 3.*empty"),
    "negative delta": (HEAD + BOTH + "parameters: {delta: -1}", "line 3.*equal to 0, got -1"),
    "normalize": (HEAD + BOTH + "parameters: {normalize: 2}", "line 3.*boolean.*got 2"),
    "missing_precision": (
        HEAD + BOTH + "parameters: {missing_precision: none}",
        "line 3.*'error', 'base' or 'zero', got 'none'",
    ),
    "dtype": (HEAD + BOTH + "dtype: int8", "line 3.*'bfloat16', 'float16'"),
    "a method of mergekit": ("merge_method: breadcrumbs\n" + BOTH, "line 1.*'breadcrumbs'"),
    "unknown method": (
        "merge_method: fischer\n" + BOTH,
        "line 1.*'fischer'.*did you mean 'fisher'",
    ),
    "no base": ("merge_method: task_arithmetic\n" + BOTH, "line 1.*needs base_model"),
    "only the base": (TASK + "models: [{model: base}]", "line 3.*no model beside the base"),
    "no precision": (
        "merge_method: fisher\nmodels:\n- model: ft1\n- model: plain",
        "line 4.*'plain' has no precision.*blr-analysis fisher",
    ),
    "precision not there": (
        "merge_method: fisher\nmodels:\n- model: ft1\n  precision: ft1/precison",
        "line 4.*there is no precision",
    ),
    "base with a weight": (
        "merge_method: gradient_matching\nbase_model: base\nmodels:\n- model: ft1\n"
        "- {model: ./base, parameters: {weight: 1}}",
        "line 5.*this is base_model itself",
    ),
    "model twice": (HEAD + "models:\n- model: ft1\n- model: ./ft2/../ft1", "line 4.*as on line 3"),
    "some without weight": (
        TASK + "models:\n- model: ft1\n- model: ft2\n  parameters: {weight: 1}",
        "line 4.*no weight",
    ),
    "no such folder": (HEAD + "models:\n- model: ./nowhere", "line 3.*folder of the recipe"),
    "no such user": (HEAD + "models:\n- model: ~nobody_here/x", "line 3.*no user of this name"),
    "density of fisher": (
        "merge_method: fisher\nmodels:\n- model: ft1\n  parameters: {density: 0.5}",
        "line 4.*density has no effect on fisher",
    ),
    "slerp without t": (
        "merge_method: slerp\nbase_model: base\nmodels: [{model: ft1}]",
        "line 3.*t:|needs t",
    ),
    "gamma of ties": (
        "merge_method: ties\nbase_model: base\nmodels: [{model: ft1}]\nparameters: {gamma: 0.1}",
        "line 4.*gamma has no effect on ties",
    ),
    "slices": (HEAD + "slices: [{sources: [{model: ft1}]}]", "line 2.*mergekit does this"),
    "modules": (HEAD + BOTH + "modules: {a: {slices: []}}", "line 3.*mergekit does this"),
    "template": (HEAD + BOTH + "chat_template: chatml", "line 3.*mergekit does this"),
    "tokens": (HEAD + BOTH + "tokenizer: {source: ft1, tokens: {}}", "line 3.*'tokens'"),
    "base without base": (HEAD + BOTH + "tokenizer_source: base", "line 3.*no base_model"),
    "two tokenizers": (
        HEAD + BOTH + "tokenizer_source: ft1\ntokenizer: {source: ft2}",
        "line 4.*one of them",
    ),
    "gradient without layers": (
        HEAD + "models:\n- model: bare\n  parameters: {weight: [0, 1]}",
        "line 2.*bare",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named_with_its_line(read: Read, place: Path, fault: str) -> None:
    (place / "bare").mkdir(exist_ok=True)
    text, expected = FAULTS[fault]
    with pytest.raises(InputError, match=f"(?s)^recipe.yml.*{expected}|^{expected}"):
        read(text)


def test_all_wrong_keys_are_listed_in_the_order_of_their_lines(read: Read) -> None:
    with pytest.raises(InputError) as caught:
        read("merge_method: linear\nmodels: 3\nparameters: {wieght: 1}\ndtype: int8\n")
    lines = str(caught.value).splitlines()
    assert [line.split(",")[1] for line in lines] == [" line 2", " line 3", " line 4"]


BOMB = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
BOMB += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("\n".join([*BOMB, "merge_method: linear", "models: *a29"]), "unknown key"),
        ("[" * 600 + "]" * 600, "YAML"),
        ("\n".join(f"{' ' * k}a:" for k in range(600)), "YAML|unknown key"),
        (f"{HEAD}{BOTH}x: {'9' * 5000}", "digits"),
    ],
    ids=["aliases", "brackets", "levels", "digits"],
)
def test_texts_that_grow_are_refused(read: Read, text: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        read(text)


def test_files_that_are_no_text(place: Path) -> None:
    file = place / "odd.yml"
    file.write_bytes(b"merge_method: linear\nmodels: \xff\xfe")
    with pytest.raises(InputError, match="line 2: a byte that is no UTF-8"):
        read_recipe(file)
    file.write_bytes(b"a" * 900_000)
    with pytest.raises(InputError, match="no recipe is that long"):
        read_recipe(file)
    with pytest.raises(StorageError, match="cannot be read"):
        read_recipe(place)
    with pytest.raises(StorageError, match="No such file"):
        read_recipe(place / "none.yml")


def test_a_byte_order_mark_is_no_fault(place: Path) -> None:
    (place / "bom.yml").write_bytes(b"\xef\xbb\xbf" + LINEAR.encode())
    assert read_recipe(place / "bom.yml").job.method == "linear"


# Whatever is in the file

KEYS = [
    "merge_method", "base_model", "base_precision", "models", "slices", "modules", "parameters",
    "dtype", "out_dtype", "tokenizer_source", "tokenizer", "chat_template", "model", "precision",
    "n_data", "weight", "lambda", "normalize", "int8_mask", "density", "delta", "sources",
    "missing_precision", "layer_range", "filter", "value", "source", "residual_weight",
]  # fmt: skip
WORDS = [
    "linear", "fisher", "task_arithmetic", "gradient_matching", "ties", "base", "ft1", "ft2",
    "plain", "./base+./ft1", "org/model", "~", "~x", "auto", "union", "float32", "zero", "mlp", "",
    "\0", "\ud800", "a" * 300, "*",
]  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.sampled_from(WORDS), st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=3)), inner, max_size=5),
    ),
    max_leaves=20,
)
ENTRY = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3).map(
    lambda more: {"model": "ft1", **more}
)
RECIPES = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5).flatmap(
    lambda more: st.builds(
        lambda method, models: {"merge_method": method, "models": models, **more},
        st.sampled_from(WORDS[:4]),
        st.one_of(VALUES, st.lists(ENTRY, max_size=2)),
    )
)
MARKS = st.text(alphabet=" \n\t-:{}[]&*!|>'\"%@`#,?~<.0123eE_ab", max_size=60)
FUZZ = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def either_a_job_or_an_error(place: Path, raw: bytes) -> None:
    file = place / "fuzz.yml"
    file.write_bytes(raw)
    with contextlib.suppress(BLRError):
        found = read_recipe(file)
        assert isinstance(found.job, Job)
        assert found.job.members


@FUZZ
@given(recipe=RECIPES)
def test_any_mapping_gives_a_job_or_an_error(place: Path, recipe: dict[str, Any]) -> None:
    raw = json.dumps(recipe).encode("utf-8")  # JSON is YAML
    either_a_job_or_an_error(place, raw)


@FUZZ
@given(raw=st.one_of(st.binary(max_size=80), MARKS.map(str.encode)))
def test_any_bytes_give_a_job_or_an_error(place: Path, raw: bytes) -> None:
    either_a_job_or_an_error(place, raw)


@FUZZ
@given(at=st.integers(0, len(ARITHMETIC)), cut=st.integers(0, 30), new=MARKS)
def test_any_edit_gives_a_job_or_an_error(place: Path, at: int, cut: int, new: str) -> None:
    either_a_job_or_an_error(place, (ARITHMETIC[:at] + new + ARITHMETIC[at + cut :]).encode())


def test_a_precision_of_another_model_is_found_by_the_plan(read: Read, place: Path) -> None:
    """What a recipe cannot know is checked where folders are opened, before anything is written."""

    other = {name: tensor[:2] for name, tensor in curved(9).items() if tensor.ndim == 2}
    write_model(place / "odd", near(state(0), 7), precision=other)
    found = read("merge_method: fisher\nmodels: [{model: ft1}, {model: odd}]")
    with pytest.raises(BLRError, match="precision of"):
        plan_folders(found.job)


# Weights over the layers: every value worked out by hand.


LLAMA = [
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.{part}" for i in range(5) for part in ("mlp.up.weight", "norm.weight")),
    "model.norm.weight",
    "lm_head.weight",
]


def weight(*rules: Rule, names: list[str] = LLAMA, default: float = 1.0) -> LayerWeights:
    return LayerWeights(rules, depths(names), default)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # five layers stand at t = 0, 1/4, 1/2, 3/4, 1
        ((0.0, 1.0), [0.0, 0.25, 0.5, 0.75, 1.0]),
        ((0.0, 1.0, 0.0), [0.0, 0.5, 1.0, 0.5, 0.0]),
        ((1.0, 4.0, 2.0, 8.0, 0.0), [1.0, 4.0, 2.0, 8.0, 0.0]),
        ((0.0, 3.0, 6.0, 0.0), [0.0, 2.25, 4.5, 4.5, 0.0]),  # 3t = 0, 3/4, 3/2, 9/4, 3
        ((-2.0,), [-2.0] * 5),
    ],
)
def test_a_list_is_interpolated_over_the_layers(
    values: tuple[float, ...], expected: list[float]
) -> None:
    found = weight(Rule(values))
    assert [found(f"model.layers.{i}.mlp.up.weight") for i in range(5)] == expected
    assert found("model.embed_tokens.weight") == values[0]
    assert found("model.norm.weight") == found("lm_head.weight") == values[0]


def test_the_only_layer_stands_at_the_end() -> None:
    assert weight(Rule((0.25, 0.75)), names=["h.0.w"])("h.0.w") == 0.75


def test_the_first_fitting_rule_decides() -> None:
    found = weight(Rule((0.0, 1.0), "mlp"), Rule((7.0,), "layers.3"), Rule((2.0,)))
    assert found("model.layers.3.mlp.up.weight") == 0.75  # of mlp, although it is in layer 3
    assert found("model.layers.3.norm.weight") == 7.0
    assert found("model.layers.2.norm.weight") == found("lm_head.weight") == 2.0


def test_where_no_rule_speaks_the_default_holds() -> None:
    found = weight(Rule((5.0,), "mlp"), Rule((6.0,), "norm"), default=0.5)
    assert found("model.layers.0.mlp.up.weight") == 5.0
    assert found("model.layers.0.norm.weight") == 6.0
    assert found("lm_head.weight") == 0.5


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("bert.embeddings.LayerNorm.weight", 0.0),
        ("transformer.wte.weight", 0.0),
        ("transformer.wpe.weight", 0.0),
        ("shared.weight", 0.0),
        ("embed_out.weight", 0.0),
        ("transformer.ln_f.bias", 0.0),
        ("classifier.out_proj.weight", 0.0),
        ("model.layers.2.embed.weight", 0.5),  # inside a layer, whatever it is called
        ("model.layers.1.experts.7.w1.weight", 0.25),
    ],
)
def test_what_stands_outside_the_layers_is_at_the_beginning_as_in_mergekit(
    name: str, depth: float
) -> None:
    assert depth_of(name, depths(LLAMA)) == depth


def test_each_stack_has_a_depth_of_its_own() -> None:
    names = [f"encoder.block.{i}.w" for i in range(3)] + [f"decoder.block.{i}.w" for i in range(5)]
    found = weight(Rule((0.0, 1.0)), names=names)
    assert found("encoder.block.1.w") == 0.5
    assert found("decoder.block.1.w") == 0.25


def test_numbers_with_gaps_are_no_layers() -> None:
    names = ["head.0.weight", "head.3.weight", "blocks.0.w", "blocks.1.w"]
    assert depths(names) == {"blocks": 2}
    assert depth_of("head.0.weight", depths(names)) == 0.0


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([Rule((0.5,))], 0.5),
        ([Rule((0.5, 0.5))], 0.5),
        ([], 0.25),
        ([Rule((0.5,), "mlp"), Rule((0.7,))], None),
        ([Rule((0.0, 1.0))], None),
    ],
)
def test_a_weight_is_a_number_where_no_name_matters(
    rules: list[Rule], expected: float | None
) -> None:
    assert varies(rules) == (expected is None)
    found = weight_by_layer(tuple(rules), {}, 0.25)
    assert callable(found) if expected is None else found == expected


def test_a_weight_shows_what_it_is() -> None:
    assert repr(weight(Rule((0.0, 1.0), "mlp"), Rule((2.0,)))) == "mlp: [0.0, 1.0]; 2.0"
    assert repr(weight(Rule((0.5,), "mlp"))) == "mlp: 0.5; 1.0"
