"""Recipes: what mergekit's users write means here the same, and every fault is named."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models_on_disk import near, state, write_family, write_model
from torch import Tensor

import blr_analysis as blr
from blr_analysis.errors import BLRError, InputError, StorageError
from blr_analysis.files import Folder
from blr_analysis.merging import Job, Member, execute, make_plan
from blr_analysis.merging.layer_weights import LayerWeights, Rule, depth_of, depths
from blr_analysis.merging.recipe import Recipe, read_recipe

Read = Callable[[str], Recipe]
HEAD = "merge_method: linear\n"
BOTH = "models: [{model: ft1}, {model: ft2}]\n"
TASK = "merge_method: task_arithmetic\nbase_model: base\n"
MATCH = "merge_method: gradient_matching\nbase_model: base\n"
ONE = "models: [{model: ft1}]\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with base, ft1, ft2 (with precisions), and plain (without)."""
    folder = tmp_path_factory.mktemp("recipes")
    write_family(folder)
    write_model(folder / "plain", near(state(0), 3))
    (folder / "lora").mkdir()
    (folder / "lora" / "adapter_config.json").write_text("{}")
    return folder


@pytest.fixture
def read(place: Path) -> Read:
    def of(text: str) -> Recipe:
        (place / "recipe.yml").write_text(text, encoding="utf-8")
        return read_recipe(place / "recipe.yml")

    return of


def weight_of(member: Member, name: str) -> float:
    return member.weight(name) if callable(member.weight) else member.weight


def test_every_key_arrives_in_the_job(read: Read, place: Path) -> None:
    first = "{model: ./ft1, precision: ./ft2/precision, n_data: 100, parameters: {weight: -0.5}}"
    actual = read(
        f"{MATCH}base_precision: ./base/precision\n"
        f"models: [{first}, {{model: ./ft2, parameters: {{weight: 2}}}}]\n"
        "parameters: {delta: 1e-3, missing_precision: zero, normalize: true}\n"
        "dtype: float64\nout_dtype: bfloat16"
    )
    member = Member(place / "ft1", place / "ft2/precision", -0.5, 100)
    second = Member(place / "ft2", place / "ft2/precision", 2.0)  # the precision beside it
    dtypes = {"dtype": torch.float64, "out_dtype": torch.bfloat16}
    settings: dict[str, Any] = {"delta": 1e-3, "missing_precision": "zero", "normalize": True}
    base = place / "base", place / "base/precision"
    assert actual.job == Job("gradient_matching", (member, second), *base, **settings, **dtypes)
    assert actual.notes == ()


def test_the_precisions_beside_the_models_are_taken(read: Read, place: Path) -> None:
    actual = read(MATCH + ONE)
    assert actual.job.members[0].precision == place / "ft1/precision"
    assert actual.job.base_precision == place / "base/precision"
    assert "taken from" in actual.notes[0]
    none = "base_precision: null\nmodels: [{model: ft1, precision: null}]\n"
    without = read(f"{MATCH}{none}parameters: {{missing_precision: zero}}").job
    assert (without.members[0].precision, without.base_precision) == (None, None)


def test_defaults_are_the_methods_own(read: Read) -> None:
    weights = {"gradient_matching": 1.0, "fisher": 1.0, "linear": 1.0, "task_arithmetic": 0.5}
    for method, weight in weights.items():
        actual = read(f"merge_method: {method}\nbase_model: base\n{BOTH}")
        assert [member.weight for member in actual.job.members] == [weight] * 2
        job = actual.job
        assert (job.normalize, job.dtype, job.out_dtype) == (None, torch.float32, None)


def test_what_a_method_has_no_use_for_is_said(read: Read) -> None:
    actual = read(
        "merge_method: task_arithmetic\nbase_model: base\nbase_precision: base/precision\n"
        "models:\n- {model: ft1, precision: ft1/precision, parameters: {weight: 1, density: 1}}\n"
        "parameters: {delta: 1, missing_precision: zero, int8_mask: true}"
    )
    job = actual.job
    assert (job.members[0].precision, job.base_precision, job.delta) == (None, None, 0.0)
    words = ("delta", "missing_precision", "density", "task_arithmetic takes no precisions")
    assert [n.partition(" has ")[0].partition(":")[0] for n in actual.notes] == list(words)


ARITHMETIC = """
merge_method: task_arithmetic
base_model: base
dtype: float16
out_dtype: float32
tokenizer: {source: base}
parameters: {lambda: 0.8, normalize: no, int8_mask: false}
models:
  - model: base                                 # its step is 0
  - {model: ft1, parameters: {weight: 0.75}}
  - model: ft2
    parameters:
      weight:
        - {filter: norm, value: [2.0, 0.5]}
        - {filter: "*", value: -0.25}
"""


def test_a_task_arithmetic_recipe_of_mergekit(read: Read) -> None:
    job = read(ARITHMETIC).job
    assert [m.model.name for m in job.members] == ["ft1", "ft2"]
    assert (job.scale, job.normalize, job.out_dtype) == (0.8, False, torch.float32)
    by_name = {"layers.0.norm.weight": 2.0, "layers.1.norm.weight": 0.5, "scale": -0.25}
    for name, weight in by_name.items():
        assert weight_of(job.members[0], name) == 0.75
        assert weight_of(job.members[1], name) == pytest.approx(weight)


def test_whose_weight_decides(read: Read) -> None:
    actual = read(
        "merge_method: linear\nmodels:\n- model: ft1\n- model: ft2\n"
        "  parameters: {weight: [{filter: mlp, value: 1e-1}]}\nparameters: {weight: 0.5}"
    )
    assert actual.job.members[0].weight == 0.5
    assert weight_of(actual.job.members[1], "layers.0.mlp.weight") == 0.1
    assert weight_of(actual.job.members[1], "layers.0.norm.weight") == 0.5
    for lines, names in (("{}", ["ft1", "ft2"]), ("{weight: 2}", ["ft1", "ft2", "base"])):
        actual = read(f"{HEAD}base_model: base\n{BOTH}parameters: {lines}")
        assert [m.model.name for m in actual.job.members] == names


def merge(root: Path, text: str) -> tuple[dict[str, Tensor], Path]:
    (root / "r.yml").write_text(text)
    folder = root / f"out{len(list(root.iterdir()))}"
    execute(make_plan(read_recipe(root / "r.yml").job), folder)
    return Folder.open(folder).tensors(), folder


def test_slerp_with_a_gradient(place: Path) -> None:
    tensors, _ = merge(
        place,
        "merge_method: slerp\nbase_model: base\nmodels: [{model: ft1}, {model: base}]\n"
        "parameters: {t: [{filter: norm, value: 1}, {value: [0, 1]}]}\n",
    )
    base, tuned = (Folder.open(place / n).tensors() for n in ("base", "ft1"))
    at = {"layers.0.mlp.weight": base, "layers.1.mlp.weight": tuned, "layers.0.norm.weight": tuned}
    for name, expected in at.items():
        torch.testing.assert_close(tensors[name], expected[name], rtol=0, atol=1e-6)


def test_densities_and_weights_run_over_the_layers(place: Path) -> None:
    tensors, _ = merge(
        place,
        "merge_method: ties\nbase_model: base\nparameters: {normalize: true, lambda: 0.7}\n"
        "models:\n- {model: ft1, parameters: {weight: [0.3, 0.6], density: [1, 0.5]}}\n"
        "- model: ft2\n  parameters:\n    density: 0.5\n"
        "    weight: [{filter: mlp, value: 0.5}, {value: 0.2}]\n",
    )
    base, first, second = (Folder.open(place / n).tensors() for n in ("base", "ft1", "ft2"))
    for layer, (weight, density) in enumerate([(0.3, 1.0), (0.6, 0.5)]):
        for part, second_weight in (("mlp", 0.5), ("norm", 0.2)):
            n = f"layers.{layer}.{part}.weight"
            expected = blr.merge(
                {n: base[n]},
                [{n: first[n]}, {n: second[n]}],
                method="ties",
                weights=[weight, second_weight],
                density=[density, 0.5],
                scale=0.7,
            )
            assert torch.equal(tensors[n], expected[n])


def test_where_models_are(
    read: Read, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside the recipe, at home, or in the hub's cache, whatever the working folder."""
    commit = "0a1b2c3d" * 5
    cache = tmp_path / "models--org--model"
    snapshot = write_model(cache / "snapshots" / commit, near(state(0), 4))
    (cache / "refs").mkdir()
    for ref in ("main", "v1"):
        (cache / "refs" / ref).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.chdir(tmp_path)
    for written, expected in {
        "./ft1": place / "ft1",
        "~/ft1": place / "ft1",
        "org/model": snapshot,
        "org/model@v1": snapshot,
        "./base+./lora": place / "lora",
    }.items():
        actual = read(f"{TASK}models: [{{model: {written}}}, {{model: ft2}}]")
        assert actual.job.members[0].model == expected
    with pytest.raises(InputError, match="huggingface-cli download"):
        read("merge_method: linear\nmodels:\n- model: org/model@v2")


SLICES = (
    "merge_method: linear\nslices: [{{sources: [{{model: ft1, layer_range: {}}}, "
    "{{model: ft2, layer_range: {}}}]}}]\nparameters: {{weight: 1}}"
)
BOMB = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
BOMB += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
FISHER = "merge_method: fisher\nmodels: "
REFUSED: list[tuple[str, str]] = [
    ("", "expected keys and values"),
    ("merge_method: linear\n\tmodels: []", "line 2"),
    (HEAD + BOTH + "---\na: 1", "has 2 recipes: write each into a file of its own"),
    (BOTH + "metric_method: all", "metric_method: it compares models"),
    (
        HEAD + "models: [{model: {model: ft1, override_architecture: X}}]",
        "override_architecture': leave it out",
    ),
    (HEAD + "models: [{model: ft1+lora}, {model: ft2+lora}]", "write base_model: ft1"),
    ("merge_method: nuslerp\nmodels: [{model: base+ft1}]", "write base_model: base"),
    (HEAD + BOTH + "chat_template: auto", "comes with the tokenizer; leave it out"),
    (HEAD + BOTH + "out_path: x", "leave it out, and name OUT"),
    (HEAD + BOTH + "merge_method: linear", "duplicate"),
    (HEAD + "models: !!python/object:os.system [x]", "YAML"),
    ("[" * 600 + "]" * 600, "YAML"),
    ("\n".join([*BOMB, "merge_method: linear", "models: *a29"]), "expected keys and values"),
    (HEAD + BOTH + "out_adapter: 16", r"out_adapter: write {rank: 16}"),
    (HEAD + BOTH + "out_adapter: true", r"out_adapter: write {rank: 16}"),
    (BOTH, "merge_method: Field required"),
    (HEAD, "write models: or slices:"),
    (HEAD + BOTH + "modls: 3", "modls: there is no such key"),
    (HEAD + "models: [{model: 3}]", r"models\.0\.model: .*string"),
    (HEAD + "models: []", "models: .*at least 1"),
    (HEAD + "models: [ft1]", r"models\.0: .*such as model: \./ft1"),
    (HEAD + "models: [{model: ft1, parameters: {weight: [1, .nan]}}]", r"weight.*finite number"),
    (HEAD + BOTH + "parameters: {weight: true}", "valid number"),
    (HEAD + BOTH + "parameters: {weight: []}", "at least 1"),
    (HEAD + BOTH + "parameters: {delta: -1}", "parameters.delta: .*equal to 0"),
    (HEAD + BOTH + "parameters: {missing_precision: none}", "'error', 'base' or 'zero'"),
    (HEAD + BOTH + "dtype: int8", "'bfloat16', 'float16'"),
    (
        HEAD + BOTH + "slices: [{sources: [{model: ft1}]}]",
        r"models: or slices:, .*\(mergekit may support this\)",
    ),
    (HEAD + BOTH + "tokenizer: {source: ft1, tokens: {}}", "tokenizer.tokens: .*mergekit"),
    ("merge_method: passthrough\n" + BOTH, "no 'passthrough' here: to stack layers, use mergekit"),
    ("merge_method: encoder_decoder_weighted\n" + BOTH, "write linear, with weight"),
    ("merge_method: task_arithmetic\n" + BOTH, "needs the base"),
    (TASK + "models: [{model: base}]", "no model beside the base"),
    (TASK + "models: [{model: ./ft1+./ft2}]", r"write base_model: \./ft1"),
    (FISHER + "[{model: ft1}, {model: plain}]", "'plain' has no precision"),
    (FISHER + "[{model: ft1, precision: ft1/precison}]", "there is no"),
    (MATCH + "models: [{model: ft1}, {model: ./base, parameters: {weight: 1}}]", "model itself"),
    (HEAD + "models: [{model: ft1}, {model: ./ft2/../ft1}]", "twice"),
    (TASK + "models: [{model: ft1}, {model: ft2, parameters: {weight: 1}}]", "no weight"),
    (HEAD + "models: [{model: ./nowhere}]", "folder of the recipe"),
    (HEAD + "models: [{model: lora}]", "'lora' is an adapter: name its base_model"),
    (HEAD + "models: [{model: ~nobody_here/x}]", "names no file"),
    ("merge_method: slerp\nbase_model: base\n" + ONE, "no t"),
    (HEAD + "models: [{model: ft1, data: ft1/config.json}, {model: ft2}]", "data: replaces"),
    (FISHER + "[{model: ft1, data: recipe.yml, precision: ft1/precision}]", "leave one out"),
    (
        "merge_method: dellla\nbase_model: base\nmodels: [{model: ft1, parameters: {eps: 1}}]",
        "dellla",
    ),
    (
        "merge_method: passthrough\nslices: [{sources: [{model: ft1, layer_range: [0, 1]}]}]",
        "stack layers",
    ),
    ("base_model: base\ngate_mode: hidden\nexperts: []", "mergekit-moe"),
    ("genome: {}", "mergekit-evolve"),
    (SLICES.format("[0, 1]", "[0, 1]"), r"write layers 0 to 2 of every model"),
    (SLICES.format("[0, 2]", "[1, 2]"), r"write layers 0 to 2 of every model"),
    (SLICES.format("[0, 3]", "[0, 3]"), r"write layers 0 to 2 of every model"),
    (
        "merge_method: karcher\nslices: [{sources: [{model: ft1, layer_range: [0, 1]}]}, "
        "{sources: [{model: ft2, layer_range: [1, 2]}]}]",
        "karcher needs the same models in every slice",
    ),
    (
        "merge_method: linear\nslices: [{sources: [{model: ft1, layer_range: [0, 1]}]}, "
        "{sources: [{model: ft1, layer_range: [1, 2]}], parameters: {normalize: false}}]",
        "'normalize' must be the same in all slices",
    ),
    ("merge_method: nuslerp\nparameters: {nuslerp_flatten: false}\n" + BOTH, "nuslerp_flatten"),
    (TASK + "models: [{model: ft1, parameters: {weight: [{filter: mpl, value: 1}]}}]", "'mpl'"),
]


def sliced(*ranges: str, weights: list[str]) -> str:
    """A recipe of slices of ft1, of weight 1, and ft2, of these weights."""
    slices = [
        f"{{sources: [{{model: ft1, layer_range: {layers}, parameters: {{weight: 1}}}}, "
        f"{{model: ft2, layer_range: {layers}, parameters: {{weight: {weight}}}}}]}}"
        for layers, weight in zip(ranges, weights, strict=True)
    ]
    return f"merge_method: linear\nslices: [{', '.join(slices)}]"


# The weights of ft2 in an embedding, in layers 0 and 1, and in the last norm. mergekit 0.1.5 has
# the same, by its merges of models full of ones and of zeros.
SLICE_WEIGHTS = {
    sliced("[0, 2]", weights=["[0, 3]"]): [0, 0, 3, 0],
    sliced("[0, 1]", "[1, 2]", weights=["[0, 3]", "[0, 3]"]): [0, 3, 3, 0],
    sliced("[0, 1]", "[1, 2]", weights=["1", "3"]): [1, 1, 3, 3],
    "merge_method: linear\nparameters: {weight: 1}\n"
    "slices: [{sources: [{model: ft1, layer_range: [0, 1]}]}, "
    "{sources: [{model: ft2, layer_range: [1, 2]}]}]": [0, 0, 1, 1],
}


@pytest.mark.parametrize("text", SLICE_WEIGHTS)
def test_slices_have_weights_of_their_own(read: Read, text: str) -> None:
    """A gradient runs over the layers of its slice; a model that is not listed has weight 0."""
    names = ["embed.weight", "layers.0.mlp.weight", "layers.1.mlp.weight", "norm.weight"]
    first, second = read(text).job.members
    assert [weight_of(second, name) for name in names] == SLICE_WEIGHTS[text]
    assert weight_of(first, "layers.0.mlp.weight") == 1


def test_a_slice_of_one_model_is_that_model(place: Path) -> None:
    tensors, _ = merge(
        place,
        "merge_method: ties\nbase_model: base\nparameters: {weight: 1}\n"
        "slices: [{sources: [{model: ft1, layer_range: [0, 1]}]}, "
        "{sources: [{model: ft2, layer_range: [1, 2]}]}]",
    )
    for layer, model in enumerate(("ft1", "ft2")):
        name = f"layers.{layer}.mlp.weight"
        expected = Folder.open(place / model).tensors()[name]
        torch.testing.assert_close(tensors[name], expected)


@pytest.mark.parametrize(
    "models",
    [
        "[{model: base+./lora}, {model: ft1}]",
        "[{model: base, lora: ./lora}, {model: ft1}]",
        "[{model: {model: {path: base}, lora: {path: ./lora}}}, {model: ft1}]",
    ],
)
def test_adapters_name_their_base(read: Read, place: Path, models: str) -> None:
    recipe = read(f"{HEAD}models: {models}\nparameters: {{weight: 1}}")
    assert recipe.job.base == place / "base"
    assert [member.model.name for member in recipe.job.members] == ["lora", "ft1"]
    assert "base_model: taken from the adapters: base" in recipe.notes


def test_slerp_by_weights(read: Read) -> None:
    models = "[{model: ft1, parameters: {weight: 6}}, {model: ft2, parameters: {weight: 2}}]"
    recipe = read(f"merge_method: slerp\nmodels: {models}")
    assert [member.weight for member in recipe.job.members] == [6, 2]
    assert recipe.notes == ("slerp has no t: it is the second model's share of the weights",)


def test_settings_of_mergekits_means_are_noted(read: Read) -> None:
    recipe = read(f"merge_method: karcher\nparameters: {{max_iter: 9, tol: 1e-4}}\n{BOTH}")
    expected = tuple(f"{name} has no effect on karcher" for name in ("max_iter", "tol"))
    assert recipe.notes == expected


def test_an_older_word_for_filter(read: Read) -> None:
    rules = "{weight: [{pattern: mlp, value: 3}, {value: 1}]}"
    first, _ = read(f"{HEAD}{BOTH}parameters: {rules}").job.members
    names = ("layers.0.mlp.weight", "norm.weight")
    assert [weight_of(first, name) for name in names] == [3, 1]


def test_the_parameters_of_a_slice_are_those_of_all(read: Read) -> None:
    sources = "{model: ft1, layer_range: [0, 2]}, {model: ft2, layer_range: [0, 2]}"
    recipe = read(
        f"merge_method: slerp\nbase_model: ft1\n"
        f"slices: [{{sources: [{sources}], parameters: {{t: 0.25}}}}]"
    )
    assert [member.weight for member in recipe.job.members] == [0.75, 0.25]


@pytest.mark.parametrize(
    ("method", "models", "parameters", "settings"),
    [
        ("della", "epsilon: 0.1, density: 0.6, weight: 1", "", {"epsilon": 0.1, "density": 0.6}),
        ("breadcrumbs", "gamma: 0.2, weight: 1", "", {"gamma": 0.2}),
        ("sce", "", "select_topk: 0.3", {"select_topk": 0.3}),
        ("nearswap", "", "t: 0.02", {"t": 0.02}),
        ("ramplus_tl", "", "r: 0.2, alpha: 0.4", {"r": 0.2, "alpha": 0.4}),
        ("ram", "", "epsilon: 0.001", {"epsilon": 0.001}),
        ("wudi", "weight: 1", "lambda: 0.5", {"scale": 0.5}),
    ],
)
def test_parameters_of_single_methods(
    read: Read, method: str, models: str, parameters: str, settings: dict[str, float]
) -> None:
    recipe = read(
        f"merge_method: {method}\nbase_model: base\nparameters: {{{parameters}}}\n"
        f"models: [{{model: ft1, parameters: {{{models}}}}}]"
    )
    (member,) = recipe.job.members
    for name, value in settings.items():
        place = member if hasattr(member, name) else recipe.job
        assert getattr(place, name) == value
    make_plan(recipe.job)
    assert recipe.notes == ()


@pytest.mark.parametrize(("text", "word"), REFUSED)
def test_recipes_that_are_refused(read: Read, text: str, word: str) -> None:
    with pytest.raises(BLRError, match=word):
        make_plan(read(text).job)


def test_files_that_are_no_recipe(place: Path) -> None:
    file = place / "odd.yml"
    file.write_bytes(b"merge_method: linear\nmodels: \xff\xfe")
    with pytest.raises(InputError, match="UnicodeDecodeError"):
        read_recipe(file)
    file.write_bytes(b"a" * 900_000)
    with pytest.raises(InputError, match="no recipe is that long"):
        read_recipe(file)
    for missing in (place, place / "none.yml"):
        with pytest.raises(StorageError, match="cannot be read"):
            read_recipe(missing)
    file.write_bytes(b"\xef\xbb\xbf" + ARITHMETIC.encode())
    assert read_recipe(file).job.method == "task_arithmetic"


KEYS = [
    "merge_method",
    "base_model",
    "base_precision",
    "models",
    "slices",
    "parameters",
    "dtype",
    "tokenizer_source",
    "tokenizer",
    "model",
    "precision",
    "n_data",
    "weight",
    "lambda",
    "normalize",
    "density",
    "delta",
    "missing_precision",
    "filter",
    "value",
    "source",
    "data",
]
METHODS = ["linear", "fisher", "task_arithmetic", "gradient_matching"]
WORDS = [
    "ties",
    "base",
    "ft1",
    "plain",
    "./base+./ft1",
    "org/model",
    "~",
    "~x",
    "auto",
    "union",
    "float32",
    "zero",
    "mlp",
    "",
    "\0",
    "\ud800",
    "a" * 300,
    "*",
]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.sampled_from(WORDS), st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=20,
)
ENTRY = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3).map(
    lambda keys: {"model": "ft1", **keys}
)
RECIPES = st.builds(
    lambda method, models, keys: {"merge_method": method, "models": models, **keys},
    st.sampled_from(METHODS),
    st.one_of(VALUES, st.lists(ENTRY, max_size=2)),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5),
).map(lambda recipe: json.dumps(recipe).encode("utf-8"))  # JSON is YAML


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(raw=st.one_of(RECIPES, st.binary(max_size=80)))
def test_any_text_gives_a_job_or_an_error(place: Path, raw: bytes) -> None:
    (place / "fuzz.yml").write_bytes(raw)
    with contextlib.suppress(BLRError):
        assert read_recipe(place / "fuzz.yml").job.members


LAYERS = [f"model.layers.{i}.{part}" for i in range(5) for part in ("mlp.up.weight", "norm.weight")]
LLAMA = ["model.embed_tokens.weight", *LAYERS, "model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # five layers stand at t = 0, 1/4, 1/2, 3/4, 1
        ((0.0, 1.0, 0.0), [0.0, 0.5, 1.0, 0.5, 0.0]),
        ((0.0, 3.0, 6.0, 0.0), [0.0, 2.25, 4.5, 4.5, 0.0]),  # 3t = 0, 3/4, 3/2, 9/4, 3
    ],
)
def test_a_list_is_interpolated_over_the_layers(values: Any, expected: list[float]) -> None:
    actual = LayerWeights((Rule(values),), depths(LLAMA))
    assert [actual(name) for name in LAYERS[::2]] == expected
    assert {actual(name) for name in LLAMA if name not in LAYERS} == {values[0]}


def test_the_first_fitting_rule_decides() -> None:
    rules = Rule((0.0, 1.0), "mlp"), Rule((7.0,), "layers.3"), Rule((2.0,), "norm")
    actual = LayerWeights(rules, depths(LLAMA), 0.5)
    assert actual("model.layers.3.mlp.up.weight") == 0.75  # of mlp, although it is in layer 3
    assert actual("model.layers.3.norm.weight") == 7.0
    assert actual("model.layers.2.norm.weight") == 2.0
    assert actual("lm_head.weight") == 0.5  # no rule fits it
    assert repr(actual) == "mlp: [0.0, 1.0]; layers.3: 7.0; norm: 2.0; 0.5"


def test_stacks_of_layers() -> None:
    """Each stack has its own depth; a single layer stands at the end; numbers with gaps are no
    layers."""
    names = [f"encoder.block.{i}.w" for i in range(3)] + [f"decoder.block.{i}.w" for i in range(5)]
    stack_of = depths([*names, "one.0.w", "head.0.weight", "head.3.weight"])
    assert stack_of == {"encoder.block": 3, "decoder.block": 5, "one": 1}
    places = {"encoder.block.1.w": 0.5, "decoder.block.1.w": 0.25, "one.0.w": 1.0}
    places |= {"head.3.weight": 0.0, "encoder.block.1.experts.7.w": 0.5}
    assert {name: depth_of(name, stack_of) for name in places} == places
