"""Merged adapters: PEFT loads the result, and its weights are those of dense sums."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import refused, run
from models import seeded
from models_on_disk import write_model
from safetensors.torch import load_file, save_file
from tiny_transformers import build
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import BLRError
from blr_analysis.merging.adapter import AdapterReport, merge_adapters
from blr_analysis.merging.folders import execute
from blr_analysis.merging.plan import make_plan
from blr_analysis.merging.recipe import read_recipe

peft = pytest.importorskip("peft")
State = dict[str, Tensor]
ATTENTION = ["q_proj", "v_proj"]
# name → kind of model, its task, and the PEFT settings of two adapters
CASES: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "plain, of other ranks": (
        "llama",
        "causal_lm",
        [{"target_modules": ATTENTION, "r": 2}, {"target_modules": ATTENTION, "r": 3}],
    ),
    "rank-stabilised, of other layers": (
        "llama",
        "causal_lm",
        [
            {"target_modules": ATTENTION, "use_rslora": True},
            {"target_modules": ["q_proj", "up_proj"], "lora_alpha": 5},
        ],
    ),
    "patterns": (
        "llama",
        "causal_lm",
        [
            {
                "target_modules": ATTENTION,
                "rank_pattern": {"q_proj": 1},
                "alpha_pattern": {"v_proj": 7},
                "use_rslora": True,
            },
            {"target_modules": ATTENTION, "layers_to_transform": [0]},
        ],
    ),
    "a layer that only the first leaves out": (
        "llama",
        "causal_lm",
        [
            {"target_modules": "all-linear", "exclude_modules": ["v_proj"]},
            {"target_modules": ATTENTION, "layers_to_transform": 1},
        ],
    ),
    "a head, whose base weight PEFT saves too": (
        "llama",
        "causal_lm",
        [{"target_modules": ["lm_head"]}, {"target_modules": ["lm_head", "q_proj"]}],
    ),
    "Conv1D": (
        "gpt2",
        "causal_lm",
        [{"target_modules": ["c_attn"], "fan_in_fan_out": True}] * 2,
    ),
    "DoRA": (
        "llama",
        "causal_lm",
        [
            {"target_modules": ATTENTION, "use_dora": True},
            {"target_modules": ["q_proj", "up_proj"], "use_dora": True, "r": 2},
        ],
    ),
    "DoRA on Conv1D, square and not": (
        "gpt2",
        "causal_lm",
        [
            {"target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True},
            {"target_modules": ["c_proj"], "use_dora": True, "fan_in_fan_out": True, "r": 2},
        ],
    ),
    "DoRA beside plain": (
        "llama",
        "causal_lm",
        [
            {"target_modules": ATTENTION, "use_dora": True, "use_rslora": True},
            {"target_modules": ATTENTION},
        ],
    ),
    "whole modules": (
        "bert",
        "classification",
        [{"target_modules": ["query"], "modules_to_save": ["classifier"]}] * 2,
    ),
}


def written(folder: Path, base: nn.Module, seed: int, settings: dict[str, Any]) -> Path:
    """An adapter of a model, with random A and B."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **settings})
    tuned = peft.get_peft_model(copy.deepcopy(base), config)
    torch.manual_seed(seed)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) / 3
    tuned.save_pretrained(str(folder))
    return folder


def merged_by_peft(base: nn.Module, adapter: Path) -> State:
    tuned = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(adapter))
    return {name: t.detach().clone() for name, t in tuned.merge_and_unload().state_dict().items()}


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_the_sum_of_products(case: str, tmp_path: Path) -> None:
    """θ_0 + Σ α (θ_t − θ_0), without cross terms, and whole modules averaged."""
    kind, task, settings = CASES[case]
    base = build(kind, task)
    places = [written(tmp_path / f"a{t}", base, t, s) for t, s in enumerate(settings)]
    weights = [0.7, 0.3]
    base.save_pretrained(str(tmp_path / "base"))
    report = merge_adapters(places, tmp_path / "out", weights=weights, base=tmp_path / "base")
    assert report.share == pytest.approx(1.0)
    result = merged_by_peft(base, report.folder)
    models = [merged_by_peft(base, place) for place in places]
    for name, start in base.state_dict().items():
        steps = [w * (m[name] - start) for w, m in zip(weights, models, strict=True)]
        torch.testing.assert_close(result[name], start + sum(steps), rtol=1e-4, atol=1e-5)


def words(folder: Path, count: int) -> None:
    """A tokenizer of so many words."""
    vocabulary = {f"w{k}": k for k in range(count)}
    document = {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}}
    (folder / "tokenizer.json").write_text(json.dumps(document))


@pytest.mark.parametrize("is_tied", [False, True])
def test_tokens_that_adapters_added(tmp_path: Path, is_tied: bool) -> None:
    """PEFT saves the longer table and head beside such an adapter; its merges hold them too."""
    base = build("llama", "causal_lm", tie_word_embeddings=is_tied)
    base.save_pretrained(str(tmp_path / "base"))
    n_words = base.config.vocab_size
    words(tmp_path / "base", n_words)
    with seeded(0):
        longer = build("llama", "causal_lm", tie_word_embeddings=is_tied)
        longer.load_state_dict(base.state_dict())
        longer.resize_token_embeddings(n_words + 3)
    longer.name_or_path = str(tmp_path / "base")  # by whose configuration PEFT sees the new tokens
    settings = {"target_modules": ATTENTION, "task_type": "CAUSAL_LM"}
    places = [written(tmp_path / f"a{t}", longer, t, settings) for t in range(2)]
    models = [merged_by_peft(longer, place) for place in places]
    for place in places:
        words(place, n_words + 3)
    report = merge_adapters(places, tmp_path / "out")
    result = merged_by_peft(longer, report.folder)
    text = "merge_method: linear\nbase_model: base\ntokenizer_source: union\n"
    (tmp_path / "recipe.yml").write_text(f"{text}models: [{{model: a0}}, {{model: a1}}]")
    plan = make_plan(read_recipe(tmp_path / "recipe.yml").job)
    execute(plan, tmp_path / "model")
    loaded = type(base).from_pretrained(tmp_path / "model").state_dict()
    for name, tensor in loaded.items():
        expected = (models[0][name] + models[1][name]) / 2
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result[name], expected, rtol=1e-4, atol=1e-5)


def test_a_rank_is_the_nearest_product(tmp_path: Path) -> None:
    """By the singular values of the dense ΔW, layer by layer."""
    base = build("llama", "causal_lm")
    settings = {"target_modules": ["q_proj"], "r": 3}
    places = [written(tmp_path / f"a{t}", base, t, settings) for t in range(2)]
    report = merge_adapters(places, tmp_path / "out", rank=2)
    result = merged_by_peft(base, report.folder)
    models = [merged_by_peft(base, place) for place in places]
    assert report.rank == 2
    for module, share in report.shares.items():
        name = f"{module}.weight"
        start = base.state_dict()[name]
        left, values, right = torch.linalg.svd(sum(m[name] - start for m in models) / 2)
        expected = start + left[:, :2] * values[:2] @ right[:2]
        torch.testing.assert_close(result[name], expected, rtol=1e-4, atol=1e-5)
        kept_energy = values[:2].square().sum() / values.square().sum()
        assert share == pytest.approx(float(kept_energy), rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True, "rank_pattern": {"q_proj": 1}},
        {"trainable_token_indices": [1, 2]},
        {"init_lora_weights": "pissa"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_one_adapter_is_itself_to_the_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Of whatever kind it is."""
    base = build("llama", "causal_lm")
    settings = {"target_modules": ATTENTION, **settings}
    place = written(tmp_path / "a", base, 0, settings)
    report = merge_adapters([place], tmp_path / "out")
    assert isinstance(report, AdapterReport)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (report.folder / file).read_bytes() == (place / file).read_bytes()


def plain(folder: Path, pair: tuple[Tensor, Tensor], **settings: Any) -> Path:
    """An adapter of one layer ``fc``."""
    folder.mkdir()
    b, a = pair
    names = {"base_model.model.fc.lora_A.weight": a, "base_model.model.fc.lora_B.weight": b}
    save_file(names, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": len(a), "lora_alpha": len(a), "target_modules": ["fc"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder


def test_by_moments_of_inputs_it_is_regmean(tmp_path: Path) -> None:
    """The dense (Σ ΔW_t M_t)(Σ M_t)⁻¹ for the last layer of two tasks with different inputs."""
    torch.manual_seed(0)
    pairs = [(torch.randn(3, 2), torch.randn(2, 4)) for _ in range(2)]
    places = [plain(tmp_path / f"a{t}", pair) for t, pair in enumerate(pairs)]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    inputs = [torch.randn(30, 4) * torch.tensor([1.0, 2.0, 0.5, 1.0]).roll(t) for t in range(2)]
    tasks = [blr.Task(Layer(), (x, torch.arange(30) % 3)) for x in inputs]
    grams = [blr.fit_laplace(task, structure="gram", prior_precision=1.0) for task in tasks]
    report = merge_adapters(places, tmp_path / "out", precisions=grams)
    tensors = load_file(report.folder / "adapter_model.safetensors")
    actual = tensors["base_model.model.fc.lora_B.weight"]
    actual = actual @ tensors["base_model.model.fc.lora_A.weight"]
    moments = [x.mT @ x for x in inputs]
    top = sum(b @ a @ m for (b, a), m in zip(pairs, moments, strict=True))
    torch.testing.assert_close(actual, top @ torch.linalg.inv(sum(moments)), rtol=1e-3, atol=1e-4)


PAIR = (torch.ones(3, 2), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("settings", "changes", "word"),
    [
        ({"lora_bias": True}, {}, "lora_bias.*into a model"),
        ({"bias": "all"}, {}, "bias"),
        ({"peft_type": "LOHA"}, {}, "LOHA"),
        ({"target_parameters": ["fc.weight"]}, {}, "target_parameters.*into a model"),
        ({"use_tomorrow": True}, {}, "use_tomorrow.*into a model"),
        ({"init_lora_weights": "olora"}, {}, "olora, which changes the base"),
        ({"r": 3}, {}, "rank 3"),
        ({}, {"rank": 0}, "rank"),
        ({}, {"weights": [1.0]}, "one for each adapter"),
        ({}, {"weights": [1.0, float("nan")]}, "expected a finite number"),
        ({}, {"precisions": [{"fc.weight": torch.ones(3, 4)}] * 2}, "gram"),
        ({}, {"precisions": [None, None]}, "no precision"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], word: str
) -> None:
    places = [plain(tmp_path / "a", PAIR, **settings), plain(tmp_path / "b", PAIR)]
    with pytest.raises(BLRError, match=word):
        merge_adapters(places, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_a_damaged_adapter_is_refused(tmp_path: Path) -> None:
    damaged = (torch.ones(3, 2), torch.tensor([[1.0, torch.nan, 1.0, 1.0]] * 2))
    places = [plain(tmp_path / "a", damaged), plain(tmp_path / "b", PAIR)]
    for adapters in (places, places[:1]):
        with pytest.raises(BLRError, match=r"lora_A.weight' of '.*a' holds NaN or inf"):
            merge_adapters(adapters, tmp_path / "out")


def test_adapters_of_other_bases_are_refused(tmp_path: Path) -> None:
    places = [
        plain(tmp_path / "a", PAIR),
        plain(tmp_path / "b", (torch.ones(5, 2), torch.ones(2, 4))),
    ]
    with pytest.raises(BLRError, match="other bases"):
        merge_adapters(places, tmp_path / "out")
    places = [plain(tmp_path / name, PAIR) for name in "cd"]
    for value, place in enumerate(places):
        file = place / "adapter_model.safetensors"
        head = {"base_model.model.fc.base_layer.weight": torch.full((3, 4), float(value))}
        save_file({**load_file(file), **head}, file)
    with pytest.raises(BLRError, match=r"base_layer\.weight' of the base differs"):
        merge_adapters(places, tmp_path / "out")


RECIPE = """
merge_method: {method}
base_model: base
models:
  - {{model: a, parameters: {{weight: 0.75}}}}
  - {{model: b, parameters: {{weight: 0.25}}}}
out_adapter: {{rank: 4}}
"""


def test_a_recipe_writes_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    for name in "ab":
        plain(tmp_path / name, (torch.randn(3, 2), torch.randn(2, 4)))
    write_model(tmp_path / "base", {"fc.weight": torch.ones(3, 4)})
    (tmp_path / "recipe.yml").write_text(RECIPE.format(method="linear"))
    code, output, _ = run(capsys, "merge", tmp_path / "recipe.yml", tmp_path / "out")
    assert code == 0
    assert "rank keeps 100.0%" in output
    expected = merge_adapters(
        [tmp_path / "a", tmp_path / "b"], tmp_path / "c", weights=[0.75, 0.25]
    )
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (expected.folder / file).read_bytes()
    (tmp_path / "recipe.yml").write_text(RECIPE.format(method="ties"))
    for out in (tmp_path / "no", "--dry-run"):
        line = refused(capsys, "merge", tmp_path / "recipe.yml", out)
        assert "ties makes no adapter" in line


def quantise(base: Path) -> None:
    """Say in its configuration that a model's weights are codes."""
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))


def test_a_quantised_base_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    for name in "ab":
        plain(tmp_path / name, (torch.randn(3, 2), torch.randn(2, 4)))
    base = write_model(tmp_path / "base", {"fc.weight": torch.ones(3, 4).byte()})
    quantise(base)
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    (tmp_path / "recipe.yml").write_text(RECIPE.format(method="linear"))
    code, output, _ = run(capsys, "merge", tmp_path / "recipe.yml", "--dry-run")
    assert code == 0
    assert "rank keeps 100.0%" in output
    assert "No forecast: " in output
    code, _, _ = run(capsys, "merge", tmp_path / "recipe.yml", tmp_path / "out")
    assert code == 0
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before
    expected = merge_adapters(
        [tmp_path / "a", tmp_path / "b"], tmp_path / "c", weights=[0.75, 0.25]
    )
    name = "adapter_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (expected.folder / name).read_bytes()


def test_dora_on_a_quantised_base_is_refused(tmp_path: Path) -> None:
    base = build("llama", "causal_lm")
    settings = {"target_modules": ["q_proj"], "use_dora": True}
    places = [written(tmp_path / f"a{t}", base, t, settings) for t in range(2)]
    base.save_pretrained(str(tmp_path / "base"))
    quantise(tmp_path / "base")
    with pytest.raises(BLRError, match="is quantised: DoRA needs the weights before that"):
        merge_adapters(places, tmp_path / "out", base=tmp_path / "base")


def test_dora_needs_its_base(tmp_path: Path) -> None:
    base = build("llama", "causal_lm")
    settings = {"target_modules": ["q_proj"], "use_dora": True}
    places = [written(tmp_path / f"a{t}", base, t, settings) for t in range(2)]
    with pytest.raises(BLRError, match="give base="):
        merge_adapters(places, tmp_path / "out")


def test_dora_on_another_base_is_refused(tmp_path: Path) -> None:
    base = build("llama", "causal_lm")
    settings = {"target_modules": ["q_proj"], "use_dora": True}
    places = [written(tmp_path / f"a{t}", base, t, settings) for t in range(2)]
    (name,) = [n for n, p in base.named_parameters() if "layers.0.self_attn.q_proj" in n]
    base.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(torch.ones(3, 5))
    base.save_pretrained(str(tmp_path / "base"))
    with pytest.raises(BLRError, match=r"is \[3, 5\], in the adapters .*: name their base"):
        merge_adapters(places, tmp_path / "out", base=tmp_path / "base")


def test_dora_is_not_added_to_a_folder_that_nobody_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base in memory is called "base" in messages; a folder of that name is another model."""
    base = build("llama", "causal_lm")
    dora = written(tmp_path / "a", base, 0, {"target_modules": ["q_proj"], "use_dora": True})
    build("llama", "causal_lm").save_pretrained(str(tmp_path / "base"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BLRError, match="its base on disk; name the folder"):
        blr.merge(base, [dora], method="linear")
