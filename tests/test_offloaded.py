"""Frozen layers that accelerate keeps on disk, under an adapter in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_lm import sequences, task_of
from tiny_transformers import build

import blr_analysis as blr
from blr_analysis.errors import ModelError

accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
PARTS = ["embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb"]
IN_MEMORY = {"lm_head": "cpu"} | {f"model.{part}": "cpu" for part in PARTS}


def adapted(folder: Path, on_disk: list[str]) -> Any:
    """A Llama with these parts on disk, whose second layer has an adapter."""
    model = build("llama", "causal_lm").double().requires_grad_(False)
    if on_disk:
        places = {**IN_MEMORY, **dict.fromkeys(on_disk, "disk")}
        model = accelerate.dispatch_model(
            model, device_map=places, main_device="cpu", offload_dir=str(folder)
        )
    settings = peft.LoraConfig(
        r=2, target_modules=["q_proj"], layers_to_transform=[1], init_lora_weights=False
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return peft.get_peft_model(model, settings)


def influence(model: Any) -> torch.Tensor:
    task = task_of(model, sequences(6))
    q = blr.fit_laplace(task, structure="kron", curvature="mc_fisher", prior_precision=1.0)
    return blr.influence(task, q, task.subset([0, 1])).matrix


def test_layers_on_disk_give_the_same_influence_and_stay_there(tmp_path: Path) -> None:
    expected = influence(adapted(tmp_path, []))
    model = adapted(tmp_path, ["model.embed_tokens", "model.layers.0"])
    offloaded = [name for name, p in model.named_parameters() if p.is_meta]
    assert torch.equal(influence(model), expected)
    assert any("embed_tokens" in name for name in offloaded)
    assert [name for name, p in model.named_parameters() if p.is_meta] == offloaded


def test_an_adapter_on_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="meta device; load the weights"):
        influence(adapted(tmp_path, ["model.layers.1"]))
