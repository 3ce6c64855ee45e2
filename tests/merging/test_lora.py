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
from torch import Tensor, nn

from blr_analysis.errors import BLRError, ModelError, StorageError
from blr_analysis.files import Folder, Loaded, Scratch, Source, Spec
from blr_analysis.merging.lora import is_adapter, open_adapter
from blr_analysis.merging import lora as adapter_source
from blr_analysis.merging.lora import translate
from blr_analysis.posterior import fit_laplace
from blr_analysis.task import Task

pytestmark = pytest.mark.filterwarnings("ignore")
os.environ["HF_HUB_OFFLINE"] = "1"

V, D, INNER = 40, 16, 24  # vocabulary, width, inner width


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": 2}
    return BertForSequenceClassification(
        BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=12)
    )


def llama(tied: bool = False, bias: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 12}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, **heads, tie_word_embeddings=tied, attention_bias=bias)
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=D, n_layer=2, n_head=2, n_positions=12))


def gpt2_classifier() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    return GPT2ForSequenceClassification(
        GPT2Config(vocab_size=V, n_embd=D, n_layer=2, n_head=2, n_positions=12)
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": D, "intermediate_size": INNER, "num_hidden_layers": 1}
    return ViTForImageClassification(
        ViTConfig(**sizes, num_attention_heads=2, image_size=8, patch_size=4)
    )


State = dict[str, Tensor]


class Folders:
    """A base and an adapter trained on it, on disk, and what PEFT makes of the two."""

    def __init__(self, where: Path, build: Callable[[], nn.Module], dtype: torch.dtype) -> None:
        self.base, self.adapter = where / "base", where / "adapter"
        self.build, self.dtype = build, dtype

    def write(self, **settings: Any) -> Folders:
        from peft import IA3Config, LoHaConfig, LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = self.build().to(self.dtype)
        save(model, self.base)
        kind = settings.pop("peft_type", "LORA")
        if kind == "IA3":
            config = IA3Config(**settings, feedforward_modules=[])
        elif kind == "LOHA":
            config = LoHaConfig(**settings, r=3)
        else:
            config = LoraConfig(**{"r": 4, "lora_alpha": 6, **settings})
        tuned = get_peft_model(model, config)
        torch.manual_seed(2)
        for p in {p.data_ptr(): p for p in tuned.parameters() if p.requires_grad}.values():
            p.data += torch.randn_like(p) / 3
        tuned.save_pretrained(str(self.adapter))
        return self

    def fresh(self) -> Any:
        model: Any = self.build().to(self.dtype)
        if hasattr(model, "from_pretrained"):
            return type(model).from_pretrained(self.base, dtype=self.dtype)
        model.load_state_dict(load_file(self.base / "model.safetensors"))
        return model

    def tuned(self) -> Any:
        from peft import PeftModel

        return PeftModel.from_pretrained(self.fresh(), str(self.adapter)).eval()

    def oracle(self) -> State:
        merged = self.tuned().merge_and_unload()
        folder = self.adapter.parent / "merged"
        save(merged, folder)  # under the names of the base's file
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


def applied(base: State, adapter: Path) -> State:
    source = open_adapter(adapter, Loaded("the base", base))
    return {name: source.tensor(name) for name in source.specs}


def save(model: nn.Module, folder: Path) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(str(folder))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), folder / "model.safetensors")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A place that is the same for the same words."""
    return cache(lambda words: tmp_path_factory.mktemp("pair"))


@pytest.fixture
def folders(tmp_path: Path, written: Callable[[str], Path]) -> Callable[..., Folders]:
    def write(
        build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64, **settings: Any
    ) -> Folders:
        if build.__name__ == "<lambda>":
            return Folders(tmp_path, build, dtype).write(**settings)
        known = written(f"{build.__name__} {dtype} {settings}")
        if not any(known.iterdir()):
            Folders(known, build, dtype).write(**settings)
        shutil.copytree(known, tmp_path, dirs_exist_ok=True)
        return Folders(tmp_path, build, dtype)

    return write


QV = ["query", "value"]
PLAIN: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (bert, {"target_modules": QV}),
    "rank-stabilised": (bert, {"target_modules": QV, "use_rslora": True}),
    "rank and alpha by name": (
        bert,
        {
            "target_modules": ["query", "dense"],
            "rank_pattern": {"layer.1.attention.self.query": 2, r".*\.0\.output\.dense": 3},
            "alpha_pattern": {"^bert.encoder.layer.0.attention.self.query": 11, "dense": 5},
            "use_rslora": True,
        },
    ),
    "a regular expression": (bert, {"target_modules": r".*layer\.1.*(query|key)"}),
    "layer norms saved": (bert, {"target_modules": QV, "modules_to_save": ["LayerNorm"]}),
    "biases of the layers": (bert, {"target_modules": QV, "bias": "lora_only"}),
    "all biases": (bert, {"target_modules": QV, "bias": "all", "task_type": "SEQ_CLS"}),
    "embedding": (bert, {"target_modules": ["word_embeddings", "query"], "task_type": "SEQ_CLS"}),
    "embedding, no task": (bert, {"target_modules": ["word_embeddings", "query"]}),
    "llama": (llama, {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}),
    "llama, untied embedding": (llama, {"target_modules": ["embed_tokens", "lm_head"]}),
    "llama, both ends saved": (
        llama,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "Conv1D": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "Conv1D and a linear head": (gpt2_classifier, {"target_modules": ["c_proj", "score"]}),
}
# What PEFT merges.
OTHERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "bias of B": (bert, {"target_modules": QV, "lora_bias": True}),
    "DoRA": (bert, {"target_modules": ["query", "intermediate.dense"], "use_dora": True}),
    "llama, new rows of both ends": (
        llama,
        {
            "target_modules": ["k_proj"],
            "trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [2]},
        },
    ),
    "tied llama, new rows": (
        lambda: llama(tied=True),
        {"target_modules": ["k_proj"], "trainable_token_indices": [7, 0, 39]},
    ),
    "Conv1D, DoRA": (
        gpt2,
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "a weight as a parameter": (
        llama,
        {"target_modules": ["v_proj"], "target_parameters": ["k_proj.weight"]},
    ),
    "convolutions": (vit, {"target_modules": ["projection"], "use_rslora": True}),
    "LoHa": (bert, {"target_modules": QV, "peft_type": "LOHA"}),
    "IA3": (bert, {"target_modules": ["query"], "peft_type": "IA3"}),
}
CASES = PLAIN | OTHERS


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_what_peft_merges(case: str, folders: Callable[..., Folders]) -> None:
    build, settings = CASES[case]
    pair = folders(build, **settings)
    base, ours, oracle = load_file(pair.base / "model.safetensors"), pair.ours(), pair.oracle()
    assert list(ours) == list(Folder.open(pair.base).specs)
    changed = set()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, oracle[name], rtol=1e-12, atol=1e-13)
        changed |= {name} if not torch.equal(tensor, base[name]) else set()
    assert changed == set(open_adapter(pair.adapter, Folder.open(pair.base)).changes)
    assert changed


FORMS = ["plain", "DoRA", "embedding", "Conv1D", "convolutions", "layer norms saved"]


@pytest.mark.parametrize("case", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_do_not_depend_on_the_pieces(
    case: str,
    dtype: torch.dtype,
    folders: Callable[..., Folders],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build, settings = CASES[case]
    pair = folders(build, dtype, **settings)
    monkeypatch.setattr(adapter_source, "BLOCK", 50)  # three rows of 16, or a single row
    source, scratch = open_adapter(pair.adapter, Folder.open(pair.base)), Scratch()
    for name in source.changes:
        whole, size = source.tensor(name).view(-1), source.specs[name].numel
        for step in (1, 7, 48, 100):
            if size // step > 200:
                continue
            for start in range(0, size, step):
                stop = min(start + step, size)
                assert torch.equal(source.read(name, start, stop, scratch), whole[start:stop])


def lora_file(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> None:
    """An adapter written by hand, as PEFT would."""
    folder.mkdir()
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["w", "e"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))


def test_the_bits_do_not_depend_on_the_threads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows, cols, r = 513, 700, 24
    tensors = {"w.lora_A.weight": torch.randn(r, cols), "w.lora_B.weight": torch.randn(rows, r)}
    tensors |= {"e.lora_embedding_A": torch.randn(r, rows)}
    tensors |= {"e.lora_embedding_B": torch.randn(cols, r)}
    lora_file(tmp_path / "a", tensors, r=r, task_type="SEQ_CLS")
    base = Loaded(
        "base", {"w.weight": torch.randn(rows, cols), "e.weight": torch.randn(rows, cols)}
    )
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            source = open_adapter(tmp_path / "a", base)
            found.append({name: source.tensor(name) for name in source.changes})
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in ("w.weight", "e.weight"))


class Endless(Source):
    """A base too large for any memory: ones, made as they are read."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.name, self.specs = "endless", {"w.weight": Spec(shape, torch.bfloat16)}

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        self.piece(name, start, stop)
        return scratch.array(self, stop - start, torch.bfloat16).fill_(1)


@pytest.mark.parametrize("embedding", [False, True])
def test_memory_is_bounded_by_the_matrices_and_the_piece(tmp_path: Path, embedding: bool) -> None:
    torch.manual_seed(0)
    rows, cols = 3_000_000, 1000  # 6 GB in bfloat16
    left, right = torch.randn(rows, 2), torch.randn(2, cols)
    names = ("e.lora_embedding_A", "e.lora_embedding_B")
    parts = {names[0]: left.T, names[1]: right.T} if embedding else {}
    parts = parts or {"w.lora_A.weight": right, "w.lora_B.weight": left}
    parts = {name.replace("e.", "w.", 1): t.contiguous() for name, t in parts.items()}
    lora_file(tmp_path / "a", parts, task_type="SEQ_CLS")
    source, scratch = open_adapter(tmp_path / "a", Endless((rows, cols))), Scratch()
    start = 1_234_567 * cols + 89
    piece = source.read("w.weight", start, start + 3 * cols, scratch)
    there = (1 + 1.5 * left[1_234_567:1_234_571] @ right).view(-1)[89 : 89 + 3 * cols]
    torch.testing.assert_close(piece, there.to(torch.bfloat16))
    assert scratch.nbytes < 2**20


def test_the_callers_piece_of_the_base_is_left_alone(folders: Callable[..., Folders]) -> None:
    pair = folders(bert, target_modules=QV)
    base, scratch = Folder.open(pair.base), Scratch()
    source = open_adapter(pair.adapter, base)
    layer = "bert.encoder.layer.0.attention.self"
    held = base.read(f"{layer}.key.weight", 0, D * D, scratch)
    before = held.clone()
    for name in (f"{layer}.query.weight", "bert.encoder.layer.0.attention.output.dense.weight"):
        source.read(name, 0, D * D, scratch)
        assert torch.equal(held, before)


def test_a_bfloat16_base_is_rounded_once_or_not_at_all(folders: Callable[..., Folders]) -> None:
    pair = folders(llama, torch.bfloat16, target_modules=["q_proj"], bias="none")
    tensors, name = pair.tensors(), "model.layers.0.self_attn.q_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
    base = load_file(pair.base / "model.safetensors")[f"{name}.weight"]
    exact = base.double() + 1.5 * b @ a
    assert torch.equal(pair.ours()[f"{name}.weight"], exact.float().bfloat16())
    wide = pair.ours(dtype=torch.float32)
    torch.testing.assert_close(wide[f"{name}.weight"], exact.float())
    assert wide["lm_head.weight"].dtype == torch.bfloat16  # not changed, so as it is


def test_a_float64_base_is_never_narrowed(folders: Callable[..., Folders]) -> None:
    pair = folders(llama, torch.float64, target_modules=["q_proj"])
    wide = pair.ours(dtype=torch.float32)
    assert all(torch.equal(tensor, wide[name]) for name, tensor in pair.ours().items())


def test_float16_factors_and_a_float32_base(folders: Callable[..., Folders]) -> None:
    pair = folders(llama, torch.float32, target_modules=["q_proj"])
    pair.store({name: t.half() for name, t in pair.tensors().items()})
    name = "model.layers.1.self_attn.q_proj"
    a, b = (pair.tensors()[f"base_model.model.{name}.lora_{x}.weight"].double() for x in "AB")
    exact = load_file(pair.base / "model.safetensors")[f"{name}.weight"].double() + 1.5 * b @ a
    torch.testing.assert_close(pair.ours()[f"{name}.weight"], exact.float())


def test_two_adapters_add_up_without_cross_terms(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, deltas = {"w.weight": torch.randn(5, 4, dtype=torch.float64)}, []
    for i in (0, 1):
        a, b = torch.randn(2, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
        lora_file(tmp_path / str(i), {"w.lora_A.weight": a, "w.lora_B.weight": b})
        tuned = applied(base, tmp_path / str(i))["w.weight"]
        deltas.append((tuned - base["w.weight"], 1.5 * b @ a))
    total, exact = (sum(pair[k] for pair in deltas) for k in (0, 1))
    torch.testing.assert_close(total, exact, rtol=1e-12, atol=1e-13)


def test_a_state_dict_in_memory(folders: Callable[..., Folders]) -> None:
    pair = folders(bert, target_modules=QV)
    base = dict(pair.fresh().state_dict())
    copies = {name: t.clone() for name, t in base.items()}
    tuned, oracle = applied(base, pair.adapter), pair.oracle()
    assert list(tuned) == list(base)
    for name, tensor in tuned.items():
        torch.testing.assert_close(tensor, oracle[name], rtol=1e-12, atol=1e-13)
        assert torch.equal(base[name], copies[name])


def test_what_is_an_adapter(folders: Callable[..., Folders]) -> None:
    pair = folders(bert, target_modules=QV)
    assert is_adapter(pair.adapter) and is_adapter(str(pair.adapter))
    assert not is_adapter(pair.base) and not is_adapter(pair.base / "nowhere")


def test_another_base_than_recorded_is_noted(folders: Callable[..., Folders]) -> None:
    pair = folders(bert, target_modules=QV)
    assert open_adapter(pair.adapter, Folder.open(pair.base)).notes == ()
    pair.settings(base_model_name_or_path="someone/base")
    assert open_adapter(pair.adapter, Folder.open(pair.base)).notes == ()
    pair.settings(base_model_name_or_path="someone/else")
    (note,) = open_adapter(pair.adapter, Folder.open(pair.base)).notes
    assert "someone/else" in note


def renamed(pair: Folders, change: Callable[[str], str | None]) -> None:
    """The base's tensors under other names; None drops one."""
    tensors = load_file(pair.base / "model.safetensors")
    there = {change(name): t for name, t in tensors.items()}
    save_file({n: t for n, t in there.items() if n}, pair.base / "model.safetensors")


@pytest.mark.parametrize("how", ["without bert.", "with model.", "with a.b."])
def test_one_prefix_may_differ(how: str, folders: Callable[..., Folders]) -> None:
    pair = folders(bert, target_modules=QV)
    oracle = pair.oracle()
    prefix = how.split()[1]
    change: dict[str, Callable[[str], str]] = {
        "without": lambda name: name.removeprefix(prefix),
        "with": lambda name: prefix + name,
    }
    change_ = change[how.split()[0]]
    renamed(pair, change_)
    ours = pair.ours()
    assert len(open_adapter(pair.adapter, Folder.open(pair.base)).changes) == 4
    for name, tensor in oracle.items():
        torch.testing.assert_close(ours[change_(name)], tensor, rtol=1e-12, atol=1e-13)


def test_two_prefixes_that_fit_are_refused(folders: Callable[..., Folders]) -> None:
    pair = folders(bert, target_modules=QV)
    tensors = load_file(pair.base / "model.safetensors")
    both = {f"{side}.{n}": t.clone() for n, t in tensors.items() for side in ("left", "right")}
    save_file(both, pair.base / "model.safetensors")
    with pytest.raises(ModelError, match=r"may mean 'left.*or 'right"):
        pair.ours()


def test_two_names_never_become_one() -> None:
    with pytest.raises(ModelError, match=r"'a\.w\.weight'"):
        translate(["a.w.weight", "w.weight"], {"w.weight": 1}, "lora")


def test_a_head_that_the_base_lacks_is_refused(folders: Callable[..., Folders]) -> None:
    pair = folders(bert, target_modules=QV, task_type="SEQ_CLS")
    renamed(pair, lambda name: None if "classifier" in name else name.removeprefix("bert."))
    with pytest.raises(ModelError, match=r"'classifier\.bias', 'classifier\.weight'"):
        pair.ours()


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens", "q_proj"], "task_type": "CAUSAL_LM"},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["lm_head"]},
    ],
    ids=["matrices", "matrices, no task", "input saved", "both saved", "matrices of the output"],
)
def test_one_end_of_a_tied_model_is_refused(
    settings: dict[str, Any], folders: Callable[..., Folders]
) -> None:
    pair = folders(lambda: llama(tied=True), **settings)
    with pytest.raises(ModelError, match="tied"):
        pair.ours()


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
    ids=["matrices", "saved"],
)
def test_both_ends_of_a_tied_model_are_what_the_adapter_computes(
    settings: dict[str, Any], folders: Callable[..., Folders]
) -> None:
    pair = folders(lambda: llama(tied=True), ensure_weight_tying=True, **settings)
    ours, model, tokens = pair.ours(), pair.fresh().eval(), torch.arange(10)[None]
    model.load_state_dict(ours | {"lm_head.weight": ours["model.embed_tokens.weight"]})
    # not merged: merge_and_unload adds the matrices to the one tied tensor twice
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens).logits, pair.tuned()(tokens).logits, rtol=1e-10, atol=1e-12
        )


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "does not know"),
    "prefix tuning": ({"peft_type": "PREFIX_TUNING"}, "merge_and_unload"),
    "repeated layers": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "aLoRA": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    "QA-LoRA": ({"use_qalora": True}, "use_qalora"),
    "Megatron": ({"megatron_config": {"a": 1}}, "megatron_config"),
    "a variant of LoRA": ({"velora_config": {"rank": 1}}, "lora_embed"),
    "a later setting": ({"use_tomorrow": True}, "use_tomorrow"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
    "LoftQ": ({"init_lora_weights": "loftq"}, "loftq"),
    "an unknown start": ({"init_lora_weights": "tomorrow"}, "tomorrow"),
    "another rank": ({"r": 8}, "r = 8"),
    "another rank by name": ({"rank_pattern": {"query": 8}}, "r = 8"),
    "no rank": ({"r": 0}, "got 0"),
    "alpha as text": ({"lora_alpha": "6"}, "lora_alpha"),
    "a broken pattern": ({"alpha_pattern": {"(": 3}}, "impossible setting"),
    "an unknown bias": ({"bias": "some"}, "bias"),
    "DoRA without magnitudes": ({"use_dora": True}, "magnitude"),
    "a bias of B that is not there": ({"lora_bias": True}, "lora_B.bias"),
    "biases that are not there": ({"bias": "lora_only"}, "no bias of"),
    "a module that is not there": ({"modules_to_save": ["pooler"]}, "'pooler'"),
    "other targets": ({"target_modules": ["value"]}, "query"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_not_exact_are_refused(
    case: str, folders: Callable[..., Folders]
) -> None:
    pair, (values, word) = folders(bert, target_modules=QV), SETTINGS[case]
    pair.settings(**values)
    with pytest.raises(BLRError) as caught:
        pair.ours()
    assert word in str(caught.value) and str(pair.adapter) in str(caught.value)


@pytest.mark.parametrize("value", [None, False, [], {}, ""])
def test_a_later_setting_that_is_off_is_no_matter(
    value: object, folders: Callable[..., Folders]
) -> None:
    pair = folders(bert, target_modules=QV)
    before = pair.ours()
    pair.settings(use_tomorrow=value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pair.ours().items())


QUERY = "base_model.model.bert.encoder.layer.0.attention.self.query"
FILES: dict[str, tuple[Callable[[State], State], str]] = {
    "no B": (
        lambda t: {n: x for n, x in t.items() if n != f"{QUERY}.lora_B.weight"},
        "lora_A.weight",
    ),
    "an unknown part": (lambda t: t | {f"{QUERY}.lora_C.weight": torch.ones(1)}, "lora_C"),
    "an adapter's name": (
        lambda t: t | {f"{QUERY}.lora_A.default.weight": torch.ones(4, D)},
        "lora_A.default.weight",
    ),
    "no prefix": (lambda t: t | {"extra": torch.ones(1)}, "'extra'"),
    "a tensor that the base lacks": (
        lambda t: t | {"base_model.model.bert.more.weight": torch.ones(1)},
        "'bert.more.weight'",
    ),
    "matrices of another module": (
        lambda t: {n.replace("layer.0", "layer.9"): x for n, x in t.items()},
        "layer.9",
    ),
    "a magnitude without DoRA": (
        lambda t: t | {f"{QUERY}.lora_magnitude_vector": torch.ones(D)},
        "magnitude",
    ),
    "both spellings of a magnitude": (
        lambda t: (
            t | {f"{QUERY}.lora_magnitude_vector{end}": torch.ones(D) for end in ("", ".weight")}
        ),
        "magnitude",
    ),
    "a bias of B without the setting": (
        lambda t: t | {f"{QUERY}.lora_B.bias": torch.ones(D)},
        "lora_B.bias",
    ),
    "another shape": (
        lambda t: t | {f"{QUERY}.lora_A.weight": torch.ones(4, D + 1)},
        f"[4, {D + 1}]",
    ),
    "a whole tensor of another shape": (
        lambda t: t | {"base_model.model.classifier.weight": torch.ones(3, D)},
        f"[3, {D}]",
    ),
    "integers": (lambda t: {n: x.to(torch.int8) for n, x in t.items()}, "torch.int8"),
    "two versions of a head": (
        lambda t: (
            t
            | {
                "base_model.model.classifier.weight": torch.ones(2, D),
                "base_model.model.classifier.modules_to_save.weight": torch.zeros(2, D),
            }
        ),
        "two versions",
    ),
    "rows without a setting": (
        lambda t: (
            t
            | {
                "base_model.model.bert.embeddings.word_embeddings.token_adapter"
                ".trainable_tokens_delta": torch.ones(2, D)
            }
        ),
        "trainable_tokens_delta",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_of_which_anything_would_be_left_over_is_refused(
    case: str, folders: Callable[..., Folders]
) -> None:
    pair, (change, word) = folders(bert, target_modules=QV), FILES[case]
    pair.store(change(pair.tensors()))
    with pytest.raises(ModelError) as caught:
        pair.ours()
    assert word in str(caught.value) and str(pair.adapter) in str(caught.value)


@pytest.mark.parametrize(
    ("indices", "word"),
    [
        ([7, 0], "[3, 16]"),
        ([7, 0, V], f"index {V}"),
        ([7, 0, -1], "index -1"),
    ],
)
def test_token_indices_that_do_not_fit(
    indices: list[int], word: str, folders: Callable[..., Folders]
) -> None:
    pair = folders(llama, target_modules=["q_proj"], trainable_token_indices=[7, 0, 39])
    pair.settings(trainable_token_indices=indices)
    with pytest.raises(BLRError) as caught:
        pair.ours()
    assert word in str(caught.value)


def test_matrices_and_new_rows_of_one_embedding_are_refused(
    folders: Callable[..., Folders],
) -> None:
    pair = folders(llama, target_modules=["q_proj"], trainable_token_indices=[7, 0, 39])
    name = "base_model.model.model.embed_tokens.lora_embedding"
    pair.store(pair.tensors() | {f"{name}_A": torch.ones(4, V), f"{name}_B": torch.ones(D, 4)})
    pair.settings(target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(ModelError, match="trainable_token_indices"):
        pair.ours()


def test_dora_with_a_bias_of_b_is_refused(folders: Callable[..., Folders]) -> None:
    pair = folders(bert, target_modules=["query"], use_dora=True)
    names = [n.removesuffix("A.weight") for n in pair.tensors() if n.endswith("lora_A.weight")]
    pair.store(pair.tensors() | {f"{name}B.bias": torch.ones(D) for name in names})
    pair.settings(lora_bias=True)
    with pytest.raises(ModelError, match="lora_bias=True"):
        pair.ours()


class Square(nn.Module):
    """A square layer beside layers that tell, or do not, how the model stores its weights."""

    def __init__(self, linear: bool, conv1d: bool, square_conv1d: bool, bias: bool = True) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.linear = nn.Linear(D, INNER) if linear else nn.Identity()
        self.turned = Conv1D(INNER, D) if conv1d else nn.Identity()
        self.square = Conv1D(D, D) if square_conv1d else nn.Linear(D, D, bias=bias)


@pytest.mark.parametrize(("linear", "conv1d"), [(True, False), (False, True), (False, False)])
def test_a_square_weight_is_read_as_the_base_stores_its_like(
    linear: bool, conv1d: bool, folders: Callable[..., Folders]
) -> None:
    pair = folders(lambda: Square(linear, conv1d, conv1d), target_modules=["square"])
    if linear or conv1d:  # PEFT corrects a wrong flag where it sees the layer, and so do we
        pair.settings(fan_in_fan_out=not conv1d)
    ours, oracle = pair.ours(), pair.oracle()
    torch.testing.assert_close(
        ours["square.weight"], oracle["square.weight"], rtol=1e-12, atol=1e-13
    )


def test_a_layer_without_a_bias_is_no_conv1d(folders: Callable[..., Folders]) -> None:
    pair = folders(lambda: Square(False, True, False, bias=False), target_modules=["square"])
    torch.testing.assert_close(
        pair.ours()["square.weight"], pair.oracle()["square.weight"], rtol=1e-12, atol=1e-13
    )


def test_a_square_weight_among_layers_of_both_kinds_is_refused(
    folders: Callable[..., Folders],
) -> None:
    pair = folders(lambda: Square(True, True, True), target_modules=["square"])
    with pytest.raises(ModelError, match=r"'square\.weight' is square"):
        pair.ours()


def test_a_quantized_base_is_refused(folders: Callable[..., Folders]) -> None:
    pair = folders(bert, target_modules=QV)
    tensors = load_file(pair.base / "model.safetensors")
    tensors["bert.encoder.layer.0.attention.self.query.weight"] = torch.zeros(D, D).char()
    save_file(tensors, pair.base / "model.safetensors")
    with pytest.raises(ModelError, match=r"not quantized.*torch\.int8"):
        pair.ours()


def test_dora_is_its_formula(folders: Callable[..., Folders]) -> None:
    """W_j = m_j (W_0 + s·B·A)_j / ‖(W_0 + s·B·A)_j‖, for each output j."""
    pair = folders(llama, target_modules=["q_proj"], use_dora=True)
    tensors, layer = pair.tensors(), "model.layers.1.self_attn.q_proj"
    part = {k.rpartition(f"{layer}.lora_")[2]: t for k, t in tensors.items() if layer in k}
    base = load_file(pair.base / "model.safetensors")[f"{layer}.weight"]
    v = base + 1.5 * part["B.weight"] @ part["A.weight"]
    exact = part["magnitude_vector"][:, None] * v / v.norm(dim=1, keepdim=True)
    torch.testing.assert_close(pair.ours()[f"{layer}.weight"], exact, rtol=1e-12, atol=1e-13)


def test_a_convolution_is_its_formula(folders: Callable[..., Folders]) -> None:
    pair = folders(vit, target_modules=["projection"], use_rslora=True)
    a, b = (t.flatten(1) for _, t in sorted(pair.tensors().items()))
    base = load_file(pair.base / "model.safetensors")
    name = next(name for name in base if "projection.weight" in name)
    exact = base[name] + 3.0 * (b @ a).view_as(base[name])  # 6 / √4
    torch.testing.assert_close(pair.ours()[name], exact, rtol=1e-12, atol=1e-13)


def test_more_than_plain_lora_needs_a_transformers_model(folders: Callable[..., Folders]) -> None:
    pair = folders(bert, target_modules=QV, use_dora=True)
    with pytest.raises(ModelError, match="merge_and_unload"):
        applied(dict(pair.fresh().state_dict()), pair.adapter)


def test_without_peft_the_extra_is_named(
    folders: Callable[..., Folders], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = folders(bert, target_modules=QV, use_dora=True)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match="pip install"):
        pair.ours()


def test_files_that_are_missing_damaged_or_pickles(folders: Callable[..., Folders]) -> None:
    pair = folders(bert, target_modules=QV)
    base, file = Folder.open(pair.base), pair.adapter / "adapter_model.safetensors"
    with pytest.raises(StorageError, match=r"no adapter_config\.json"):
        open_adapter(pair.base, base)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(StorageError, match="truncated"):
        open_adapter(pair.adapter, base)
    file.unlink()
    with pytest.raises(StorageError, match="holds no adapter_model"):
        open_adapter(pair.adapter, base)
    torch.save({}, pair.adapter / "adapter_model.bin")
    with pytest.raises(StorageError, match="pickle"):
        open_adapter(pair.adapter, base)
    file.write_bytes(whole)
    (pair.adapter / "model.safetensors").write_bytes(whole)
    with pytest.raises(StorageError, match="both an adapter and"):
        open_adapter(pair.adapter, base)
    (pair.adapter / "model.safetensors").unlink()
    (pair.adapter / "adapter_config.json").write_text("[1]")
    with pytest.raises(StorageError, match=r"adapter_config\.json"):
        open_adapter(pair.adapter, base)


def test_a_tied_tensor_that_is_stored_twice(folders: Callable[..., Folders]) -> None:
    pair = folders(lambda: llama(tied=True), target_modules=["q_proj"], trainable_token_indices=[1])
    both, (row, head) = pair.fresh().state_dict(), ("model.embed_tokens.weight", "lm_head.weight")
    torch.testing.assert_close(pair.ours()[row], pair.oracle()[row])
    save_file({n: t.clone() for n, t in both.items()}, pair.base / "model.safetensors")
    with pytest.raises(ModelError, match=r"again as 'lm_head\.weight'"):
        pair.ours()
    config = json.loads((pair.base / "config.json").read_text()) | {"tie_word_embeddings": False}
    (pair.base / "config.json").write_text(json.dumps(config))
    ours = pair.ours()  # equal, but said not to be tied
    assert torch.equal(ours[head], both[head]) and not torch.equal(ours[row], both[row])


# --- precisions of the adapters' own parameters -------------------------------------------------


@pytest.mark.parametrize("structure", ["gram", "diag", "kron"])
def test_adapters_have_precisions_of_their_own(structure: str) -> None:
    """Input moments of A and of B, by hand; Fishers against autograd, example by example."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    settings = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(net, settings).double().eval()
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.randint(3, (12,))
    q = fit_laplace(
        Task(model, (x, y)), structure=structure, prior_precision=1.0,
        curvature="ggn" if structure == "gram" else "empirical_fisher",
    )  # fmt: skip
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert set(q.mean) == set(own) and len(own) == 2
    first, second = (own[n] for n in sorted(own))  # A [2, 5], B [4, 2]
    if structure == "gram":
        truth = [x.square().sum(0).expand(2, 5), (x @ first.T).square().sum(0).expand(4, 2)]
    else:
        squares = [torch.zeros_like(first), torch.zeros_like(second)]
        for row, label in zip(x, y, strict=True):
            loss = nn.functional.cross_entropy(model(row[None]), label[None])
            for total, g in zip(squares, torch.autograd.grad(loss, [first, second]), strict=True):
                total += g**2
        truth = squares
    for n, value in zip(sorted(own), truth, strict=True):
        found = q.precision(n).double() - 1
        if structure == "kron":  # eigenvalues are the Fisher's, whose trace they keep
            found, value = found.sum(), value.sum()
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-8)
