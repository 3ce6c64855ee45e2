"""Precisions stand in the files' names and pieces, whatever transformers converts while it loads.

The oracle is transformers' own ``save_pretrained``, of a model whose weights are the true
precision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from blr_analysis.errors import ModelError
from blr_analysis.files import storage
from blr_analysis.huggingface.file_layout import file_layout
from blr_analysis.huggingface.fisher import fisher
from blr_analysis.huggingface.models import load_model

transformers = pytest.importorskip("transformers")

TEXTS = tiny.sentences(4)
SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "vocab_size": len(tiny.SPECIAL) + len(tiny.WORDS),
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
ROUTED = {**SMALL, "num_key_value_heads": 2, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 4,
    "q_lora_rank": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
DEEP = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8}
MODELS: dict[str, dict[str, Any]] = {  # the sizes of each, by the family's name
    "GPTNeoX": SMALL,
    "Mixtral": {**ROUTED, "num_local_experts": 4},
    "Qwen2Moe": {**ROUTED, **EXPERTS, "shared_expert_intermediate_size": 8},
    "DeepseekV3": {**ROUTED, **LATENT, **DEEP, "moe_intermediate_size": 8},
}
CONVERTED = [name for name in MODELS if name != "GPTNeoX"]


def build(family: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**MODELS[family])
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for p in model.parameters():
            p.data.add_(torch.randn_like(p), alpha=0.3)
    return model


def squared_gradients(model: Any) -> dict[str, Tensor]:
    """Σ g², text by text, by the model's names."""
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for text in TEXTS:
        ids = tiny.tokenizer()(text, return_tensors="pt")["input_ids"]
        logits = model(input_ids=ids, use_cache=False).logits[0]
        model.zero_grad()
        F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum").backward()
        for name, p in model.named_parameters():
            sums[name] += 0 if p.grad is None else p.grad.square()
    return sums


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as transformers writes them, each with its texts; loaded once, for the imports."""
    places = {}
    for family in MODELS:
        place = tiny.save(tmp_path_factory.mktemp("model"), build(family))
        (place / "texts.txt").write_text("\n".join(TEXTS))
        fisher(place, place / "texts.txt", kind="emp")
        places[family] = place
    return places


@pytest.mark.parametrize("family", MODELS)
def test_a_precision_stands_as_the_files_hold_the_weights(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    ours, record = storage.read(folders[family] / "precision")
    of_truth = build(family)
    truth = squared_gradients(build(family))
    with torch.no_grad():
        for name, p in of_truth.named_parameters():
            p.copy_(truth[name])
    tiny.save(tmp_path / "truth", of_truth)
    expected = load_file(tmp_path / "truth" / "model.safetensors")
    buffers = {name for name in expected if name.endswith("e_score_correction_bias")}
    assert set(ours) == set(expected) - buffers
    assert not record["frozen"]
    for name, precision in ours.items():
        torch.testing.assert_close(precision, expected[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", CONVERTED)
def test_factors_of_weights_in_other_pieces_are_refused(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    texts = folders[family] / "texts.txt"
    target = tmp_path / "out"
    with pytest.raises(ModelError, match=r"experts.*other pieces.*structure='diag'"):
        fisher(folders[family], texts, structure="kron", out=target)
    assert not target.exists()


def test_what_fills_no_tensor_of_the_files_is_refused(folders: dict[str, Path]) -> None:
    loaded = load_model(folders["Mixtral"])
    layout = file_layout(loaded.model, loaded.specs, loaded.folder)
    sums = {name: torch.rand_like(p) for name, p in loaded.model.named_parameters()}
    shapes = {name: tuple(t.shape) for name, t in layout.tensors(sums).items()}
    assert shapes == {name: spec.shape for name, spec in loaded.specs.items()}
    part = {name: t[:, :4] for name, t in sums.items() if "gate_up_proj" in name}
    with pytest.raises(ModelError, match="trained in part"):
        layout.tensors(part)
