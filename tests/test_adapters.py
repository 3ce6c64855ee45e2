"""LoRA adapters as fine-tuned models, against PEFT's own merge of the same files."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_transformers import build
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.adapters import is_adapter, open_adapter, sources
from blr_analysis.errors import BLRError
from blr_analysis.files import Folder, Scratch, Source, Spec

os.environ["HF_HUB_OFFLINE"] = "1"
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
D = 8  # width


def vit() -> nn.Module:
    sizes = {"hidden_size": D, "intermediate_size": 12, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **heads))


BUILT: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: build("bert"),
    "llama": lambda: build("llama", "causal_lm"),
    "tied": lambda: build("llama", "causal_lm", tie_word_embeddings=True),
    "gpt2": lambda: build("gpt2", "causal_lm"),
    "gpt2 classifier": lambda: build("gpt2"),
    "vit": vit,
}
State = dict[str, Tensor]


class Folders:
    """A base and an adapter trained on it, on disk, and what PEFT makes of the two."""

    def __init__(self, where: Path, kind: str, dtype: torch.dtype) -> None:
        self.base = where / "base"
        self.adapter = where / "adapter"
        self.kind = kind
        self.dtype = dtype

    def write(self, **settings: Any) -> Folders:
        torch.manual_seed(1)
        model: Any = BUILT[self.kind]().to(self.dtype)
        model.save_pretrained(str(self.base))
        method = settings.pop("peft_type", "LORA")
        if method == "IA3":
            config = peft.IA3Config(**settings, feedforward_modules=[])
        elif method == "LOHA":
            config = peft.LoHaConfig(**settings, r=3)
        else:
            config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **settings})
        tuned = peft.get_peft_model(model, config)
        torch.manual_seed(2)
        for p in {p.data_ptr(): p for p in tuned.parameters() if p.requires_grad}.values():
            p.data += torch.randn_like(p) / 3
        tuned.save_pretrained(str(self.adapter))
        return self

    def oracle(self) -> State:
        """As PEFT merges them, under the names of the base's file."""
        fresh = type(BUILT[self.kind]()).from_pretrained(self.base, dtype=self.dtype)
        merged = peft.PeftModel.from_pretrained(fresh, str(self.adapter)).merge_and_unload()
        folder = self.adapter.parent / "merged"
        merged.save_pretrained(str(folder))
        return merged.state_dict() | load_file(folder / "model.safetensors")

    def ours(self, **kwargs: Any) -> dict[str, Tensor]:
        source = open_adapter(self.adapter, Folder.open(self.base), **kwargs)
        return {name: source.tensor(name) for name in source.specs}

    def settings(self, **values: Any) -> None:
        path = self.adapter / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.adapter / "adapter_model.safetensors")

    def store(self, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, self.adapter / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A place that is the same for the same words."""
    return cache(lambda words: tmp_path_factory.mktemp("pair"))


@pytest.fixture
def folders(tmp_path: Path, written: Callable[[str], Path]) -> Callable[..., Folders]:
    def write(kind: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Folders:
        known = written(f"{kind} {dtype} {settings}")
        if not any(known.iterdir()):
            Folders(known, kind, dtype).write(**settings)
        shutil.copytree(known, tmp_path, dirs_exist_ok=True)
        return Folders(tmp_path, kind, dtype)

    return write


QV = ["query", "value"]
NEW = {"target_modules": ["k_proj"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("bert", {"target_modules": QV}),
    "rank-stabilised": ("bert", {"target_modules": QV, "use_rslora": True}),
    "rank and alpha by name": (
        "bert",
        {
            "target_modules": ["query", "dense"],
            "rank_pattern": {"layer.1.attention.self.query": 2, r".*\.0\.output\.dense": 3},
            "alpha_pattern": {"^bert.encoder.layer.0.attention.self.query": 11, "dense": 5},
            "use_rslora": True,
        },
    ),
    "a regular expression": ("bert", {"target_modules": r".*layer\.1.*(query|key)"}),
    "llama": ("llama", {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}),
    # What PEFT merges.
    "layer norms saved": ("bert", {"target_modules": QV, "modules_to_save": ["LayerNorm"]}),
    "biases of the layers": ("bert", {"target_modules": QV, "bias": "lora_only"}),
    "all biases": ("bert", {"target_modules": QV, "bias": "all", "task_type": "SEQ_CLS"}),
    "embedding": ("bert", {"target_modules": ["word_embeddings", "query"], "task_type": "SEQ_CLS"}),
    "llama, untied embedding": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "both ends saved": ("llama", {**NEW, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "Conv1D and a linear head": ("gpt2 classifier", {"target_modules": ["c_proj", "score"]}),
    "bias of B": ("bert", {"target_modules": QV, "lora_bias": True}),
    "DoRA": ("bert", {"target_modules": ["query", "intermediate.dense"], "use_dora": True}),
    "new rows of both ends": (
        "llama",
        {**NEW, "trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [2]}},
    ),
    "tied llama, new rows": ("tied", {**NEW, "trainable_token_indices": [7, 0, 15]}),
    "Conv1D, DoRA": (
        "gpt2",
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "a weight as a parameter": (
        "llama",
        {"target_modules": ["v_proj"], "target_parameters": ["k_proj.weight"]},
    ),
    "convolutions": ("vit", {"target_modules": ["projection"], "use_rslora": True}),
    "LoHa": ("bert", {"target_modules": QV, "peft_type": "LOHA"}),
    "IA3": ("bert", {"target_modules": ["query"], "peft_type": "IA3"}),
}
STREAMED = {"plain", "rank-stabilised", "rank and alpha by name", "a regular expression", "llama"}


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_what_peft_merges(case: str, folders: Callable[..., Folders]) -> None:
    kind, settings = CASES[case]
    pair = folders(kind, **settings)
    base = load_file(pair.base / "model.safetensors")
    ours = pair.ours()
    oracle = pair.oracle()
    assert list(ours) == list(Folder.open(pair.base).specs)
    changed = set()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, oracle[name], rtol=1e-12, atol=1e-13)
        changed |= {name} if not torch.equal(tensor, base[name]) else set()
    words = open_adapter(pair.adapter, Folder.open(pair.base)).changes
    assert changed == set(words)
    assert changed
    assert all(w.startswith("LoRA") == (case in STREAMED) for w in words.values())


FORMS = ["plain", "DoRA", "embedding", "Conv1D", "convolutions", "layer norms saved"]


@pytest.mark.parametrize("case", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_do_not_depend_on_the_pieces(
    case: str, dtype: torch.dtype, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, settings = CASES[case]
    pair = folders(kind, dtype, **settings)
    monkeypatch.setattr(sources, "ELEMENTS_PER_BLOCK", 50)  # six rows of 8
    source = open_adapter(pair.adapter, Folder.open(pair.base))
    scratch = Scratch()
    for name in source.changes:
        whole = source.tensor(name).view(-1)
        size = source.specs[name].numel
        for step in (1, 7, 48, 100):
            if size // step > 200:
                continue
            for start in range(0, size, step):
                stop = min(start + step, size)
                assert torch.equal(source.read(name, start, stop, scratch), whole[start:stop])


def lora_file(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> None:
    """An adapter written by hand, as PEFT would."""
    folder.mkdir()
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["w", "e"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))


class Endless(Source):
    """A base too large for any memory: ones, made as they are read."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.name = "endless"
        self.specs = {"w.weight": Spec(shape, torch.bfloat16)}

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        return scratch.array(self, stop - start, torch.bfloat16).fill_(1)


def test_memory_is_bounded_by_the_matrices_and_the_piece(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # 6 GB in bfloat16
    rows = 3_000_000
    cols = 1000
    left = torch.randn(rows, 2)
    right = torch.randn(2, cols)
    lora_file(tmp_path / "a", {"w.lora_A.weight": right, "w.lora_B.weight": left})
    source = open_adapter(tmp_path / "a", Endless((rows, cols)))
    scratch = Scratch()
    start = 1_234_567 * cols + 89
    piece = source.read("w.weight", start, start + 3 * cols, scratch)
    there = (1 + 1.5 * left[1_234_567:1_234_571] @ right).view(-1)[89 : 89 + 3 * cols]
    torch.testing.assert_close(piece, there.to(torch.bfloat16))
    assert sum(t.nbytes for t in scratch.buffers.values()) < 2**20


def test_a_bfloat16_base_is_rounded_once_or_not_at_all(folders: Callable[..., Folders]) -> None:
    pair = folders("llama", torch.bfloat16, target_modules=["q_proj"], bias="none")
    tensors = pair.tensors()
    name = "model.layers.0.self_attn.q_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
    base = load_file(pair.base / "model.safetensors")[f"{name}.weight"]
    exact = base.double() + 1.5 * b @ a
    assert torch.equal(pair.ours()[f"{name}.weight"], exact.float().bfloat16())
    wide = pair.ours(dtype=torch.float32)
    torch.testing.assert_close(wide[f"{name}.weight"], exact.float())
    assert wide["lm_head.weight"].dtype == torch.bfloat16  # not changed, so as it is


def renamed(pair: Folders, change: Callable[[str], str | None]) -> None:
    """The base's tensors under other names; None drops one."""
    tensors = load_file(pair.base / "model.safetensors")
    there = {change(name): t for name, t in tensors.items()}
    save_file({n: t for n, t in there.items() if n}, pair.base / "model.safetensors")


@pytest.mark.parametrize("change", ["{short}", "model.{name}", "a.b.{name}"])
def test_one_prefix_may_differ(change: str, folders: Callable[..., Folders]) -> None:
    def named(name: str) -> str:
        return change.format(name=name, short=name.removeprefix("bert."))

    pair = folders("bert", target_modules=QV)
    oracle = pair.oracle()
    renamed(pair, named)
    ours = pair.ours()
    for name, tensor in oracle.items():
        torch.testing.assert_close(ours[named(name)], tensor, rtol=1e-12, atol=1e-13)


def test_dora_is_its_formula(folders: Callable[..., Folders]) -> None:
    """W_j = m_j (W_0 + s·B·A)_j / ‖(W_0 + s·B·A)_j‖, for each output j."""
    pair = folders("llama", target_modules=["q_proj"], use_dora=True)
    tensors = pair.tensors()
    layer = "model.layers.1.self_attn.q_proj"
    part = {k.rpartition(f"{layer}.lora_")[2]: t for k, t in tensors.items() if layer in k}
    base = load_file(pair.base / "model.safetensors")[f"{layer}.weight"]
    v = base + 1.5 * part["B.weight"] @ part["A.weight"]
    exact = part["magnitude_vector"][:, None] * v / v.norm(dim=1, keepdim=True)
    torch.testing.assert_close(pair.ours()[f"{layer}.weight"], exact, rtol=1e-12, atol=1e-13)


def test_two_adapters_are_merged_as_weights(tmp_path: Path) -> None:
    """B₁A₁ + B₂A₂ without cross terms, onto a state dict; rank-stabilised ones by α/√r."""
    torch.manual_seed(0)
    base = {"w.weight": torch.randn(5, 4, dtype=torch.float64)}
    deltas = []
    places = []
    for k, scale in enumerate((1.5, 3 / 2**0.5)):
        a = torch.randn(2, 4, dtype=torch.float64)
        b = torch.randn(5, 2, dtype=torch.float64)
        places.append(tmp_path / str(k))
        lora_file(places[k], {"w.lora_A.weight": a, "w.lora_B.weight": b}, use_rslora=k == 1)
        deltas.append(scale * b @ a)
    how: dict[str, Any] = {"method": "task_arithmetic", "dtype": torch.float64}
    merged = blr.merge(base, places, weights=[1.0, -0.5], **how)
    exact = base["w.weight"] + deltas[0] - 0.5 * deltas[1]
    torch.testing.assert_close(merged["w.weight"], exact, rtol=1e-12, atol=1e-13)


TABLE = "model.embed_tokens.weight"
HEAD_WEIGHT = "lm_head.weight"


@pytest.mark.parametrize("saved", [[TABLE, HEAD_WEIGHT], [TABLE], [HEAD_WEIGHT]])
def test_ends_saved_on_a_tied_base_are_untied(tmp_path: Path, saved: list[str]) -> None:
    """As PEFT trains them: each has weights of its own, and so has the merge, which loads.

    An end that is not saved stays as it was.
    """
    modules = [name.split(".")[-2] for name in saved]
    settings = {"target_modules": ["q_proj"], "modules_to_save": modules}
    pair = Folders(tmp_path / "one", "tied", torch.float32).write(**settings)
    stored = pair.tensors()
    start = load_file(pair.base / "model.safetensors")[TABLE]
    ends = {TABLE: start, HEAD_WEIGHT: start}
    ends |= {name: stored[f"base_model.model.{name}"] for name in saved}
    assert not torch.equal(*ends.values())
    source = open_adapter(pair.adapter, Folder.open(pair.base))
    for name, value in ends.items():
        assert torch.equal(source.tensor(name), value)
    report = blr.merge(
        pair.base, [pair.adapter], method="task_arithmetic", weights=0.5, out=tmp_path / "out"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(report.folder)
    for name, value in ends.items():
        torch.testing.assert_close(model.state_dict()[name], (start + value) / 2)


QUERY = "base_model.model.bert.encoder.layer.0.attention.self.query"
Damage = Callable[[Folders], object]


def extra(name: str, *shape: int) -> Damage:
    return lambda f: f.store(f.tensors() | {name: torch.ones(shape)})


def renamed_base(f: Folders) -> None:
    tensors = load_file(f.base / "model.safetensors")
    both = {f"{side}.{n}": t.clone() for n, t in tensors.items() for side in ("left", "right")}
    save_file(both, f.base / "model.safetensors")


def headless(f: Folders) -> None:
    renamed(f, lambda n: None if "classifier" in n else n.removeprefix("bert."))


def quantized(f: Folders) -> None:
    tensors = load_file(f.base / "model.safetensors")
    tensors["bert.encoder.layer.0.attention.self.query.weight"] = torch.zeros(D, D).char()
    save_file(tensors, f.base / "model.safetensors")


def pickled(f: Folders) -> None:
    (f.adapter / "adapter_model.safetensors").unlink()
    torch.save({}, f.adapter / "adapter_model.bin")


def cut_short(f: Folders) -> None:
    file = f.adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


HEAD = {"target_modules": QV, "task_type": "SEQ_CLS"}
DORA = {"target_modules": QV, "use_dora": True}
LLAMA = {"target_modules": ["q_proj"]}
REFUSED: list[tuple[str, dict[str, Any], Damage, str]] = [
    *(
        ("bert", {"target_modules": QV}, lambda f, v=values: f.settings(**v), word)
        for values, word in (
            ({"peft_type": "IA3"}, "does not know"),
            ({"peft_type": "PREFIX_TUNING"}, "merge_and_unload"),
            ({"layer_replication": [[0, 2]]}, "layer_replication"),
            ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
            ({"use_qalora": True}, "use_qalora"),
            ({"velora_config": {"rank": 1}}, "lora_embed"),
            ({"use_tomorrow": True}, "use_tomorrow"),
            ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
            ({"init_lora_weights": "tomorrow"}, "tomorrow"),
            ({"r": 8}, "r = 8"),
            ({"rank_pattern": {"query": 8}}, "r = 8"),
            ({"r": 0}, "impossible setting"),
            ({"lora_alpha": "6"}, "impossible setting"),
            ({"alpha_pattern": {"(": 3}}, "impossible setting"),
            ({"use_dora": True}, "magnitude"),
            ({"lora_bias": True}, "lora_B.bias"),
            ({"bias": "lora_only"}, "bias"),
            ({"modules_to_save": ["pooler"]}, "pooler"),
        )
    ),
    *(
        ("bert", {"target_modules": QV}, damage, word)
        for damage, word in (
            (extra(f"{QUERY}.lora_C.weight", 1), "lora_C"),
            (extra("extra", 1), "'extra'"),
            (extra("base_model.model.bert.more.weight", 1), "more.weight"),
            (extra(f"{QUERY}.lora_magnitude_vector", D), "magnitude"),
            (extra(f"{QUERY}.lora_A.weight", 4, D + 1), rf"\[4, {D + 1}\]"),
            (lambda f: f.store({n: t.char() for n, t in f.tensors().items()}), "torch.int8"),
            (lambda f: f.store({n.replace("r.1", "r.9"): t for n, t in f.tensors().items()}), "9"),
            (renamed_base, r"may mean 'left.*or 'right"),
            (quantized, "not quantized"),
            (pickled, "pickle"),
            (cut_short, "truncated"),
            (lambda f: (f.adapter / "adapter_config.json").write_text("[1]"), "adapter_config"),
        )
    ),
    ("bert", HEAD, headless, "'classifier.bias', 'classifier.weight'"),
    ("bert", DORA, lambda f: (f.base / "config.json").unlink(), "Unrecognized model"),
    ("tied", {"target_modules": ["embed_tokens", "q_proj"]}, lambda f: None, "tied"),
    ("tied", {"target_modules": ["lm_head"]}, lambda f: None, "tied"),
]


@pytest.mark.parametrize(("kind", "settings", "damage", "word"), REFUSED)
def test_adapters_that_are_not_exact_are_refused(
    kind: str, settings: dict[str, Any], damage: Damage, word: str, folders: Callable[..., Folders]
) -> None:
    pair = folders(kind, **settings)
    damage(pair)
    with pytest.raises(BLRError, match=word) as refusal:
        pair.ours()
    assert "pip install" not in str(refusal.value)


def test_without_peft_the_extra_is_named(
    folders: Callable[..., Folders], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = folders("bert", **DORA)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(BLRError, match="pip install"):
        pair.ours()
    pair = folders("bert", target_modules=QV)
    assert len(open_adapter(pair.adapter, Folder.open(pair.base)).changes) == 4
    assert is_adapter(pair.adapter)
    assert not is_adapter(pair.base)
