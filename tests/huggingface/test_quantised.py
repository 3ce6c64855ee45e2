"""Adapters on quantised bases, by the libraries that quantise; the base stays as it is."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import relative
from tiny_lm import sequences, task_of
from tiny_transformers import build
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import blr_analysis as blr
from blr_analysis.errors import ModelError
from blr_analysis.merging.adapter import merge_adapters

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
WIDTH = 64  # 4-bit blocks are of 64 numbers
LAYERS = ["q_proj", "down_proj"]


def library(name: str) -> Any:
    return pytest.importorskip(name)


def base_of_torchao(bits: int) -> nn.Module:
    """Weights of 8 bits with a scale for each row, or of 4 bits with one for 32 numbers."""
    library("torchao")
    quantization = importlib.import_module("torchao.quantization")
    model = build("llama", "causal_lm", hidden_size=WIDTH, intermediate_size=WIDTH)
    settings = quantization.Int8WeightOnlyConfig()
    if bits == 4:
        groups = quantization.PerGroup(32)
        settings = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups)
    quantization.quantize_(model.model, settings)
    return model


def base_of_bitsandbytes(folder: Path, **settings: Any) -> nn.Module:
    """As transformers loads it."""
    library("bitsandbytes")
    model = build("llama", "causal_lm", hidden_size=WIDTH, intermediate_size=WIDTH)
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.BitsAndBytesConfig(**settings),
        device_map={"": "cpu"},
        dtype=torch.float32,
    )


BASES: dict[str, Callable[[Path], nn.Module]] = {
    "torchao, 8 bits": lambda _: base_of_torchao(8),
    "torchao, 4 bits": lambda _: base_of_torchao(4),
    "bitsandbytes, 8 bits": lambda folder: base_of_bitsandbytes(
        folder, load_in_8bit=True, llm_int8_threshold=0.0
    ),
    "bitsandbytes, 4 bits": lambda folder: base_of_bitsandbytes(
        folder, load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32
    ),
}


def adapted(base: nn.Module, seed: int = 0) -> Any:
    """The base, frozen, with a random adapter in float32."""
    base.requires_grad_(False)
    settings = peft.LoraConfig(
        r=2, target_modules=LAYERS, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(base, settings)


def task_of_texts(model: nn.Module) -> blr.Task:
    return task_of(model, sequences(7))


def stored(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors, codes and scales, that a tensor consists of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from stored(getattr(tensor, name))
    else:
        yield tensor.detach()


def numbers_of_base(model: nn.Module) -> list[Tensor]:
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return [part.clone() for p in frozen for part in stored(p)]


def squares(model: Any) -> dict[str, Tensor]:
    """Σ_i g_i² of the adapter by plain autograd, one text after the other."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in trained.items()}
    for text in sequences(7):
        logits = model(input_ids=text.unsqueeze(0)).logits[0, :-1]
        loss = nn.functional.cross_entropy(logits.float(), text[1:], reduction="sum")
        gradients = torch.autograd.grad(loss, list(trained.values()))
        for name, gradient in zip(trained, gradients, strict=True):
            sums[name] += gradient.square()
    return sums


@pytest.mark.parametrize("kind", BASES)
def test_an_adapter_on_a_quantised_base(kind: str, tmp_path: Path) -> None:
    """Gradients are autograd's, an index of all numbers has the influence, and neither they nor
    the loss of left-out texts change a number of the base."""
    model = adapted(BASES[kind](tmp_path / "base"))
    before = numbers_of_base(model)
    task = task_of_texts(model)
    settings: dict[str, Any] = {"curvature": "empirical_fisher", "prior_precision": 1.0}
    q = blr.fit_laplace(task, structure="diag", **settings)
    for name, expected in squares(model).items():
        assert relative(q.precision(name) - 1, expected) < 1e-4, name
    test = task.subset([0, 1])
    influence = blr.influence(task, q, test).matrix
    size = sum(p.numel() for p in q.mean.values())
    index = blr.Index.build(task, q, tmp_path / "index", dtype="float32", rank=size)
    assert relative(index.influence(test), influence) < 1e-5
    assert bool(blr.leave_one_out(task, q).losses.isfinite().all())
    after = numbers_of_base(model)
    assert all(map(torch.equal, after, before))


@pytest.mark.parametrize("kind", ["torchao, 8 bits", "bitsandbytes, 4 bits"])
def test_merged_adapters_of_a_quantised_base(kind: str, tmp_path: Path) -> None:
    """The merged adapter, on the base: the output moves by the sum of what each adds to a layer."""
    base = BASES[kind](tmp_path / "base")
    bare = copy.deepcopy(base).requires_grad_(False)
    inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    plain = bare.get_submodule("model.layers.0.self_attn.q_proj")(inputs)
    places = []
    moves = []
    for seed in range(2):
        model = adapted(copy.deepcopy(base), seed)
        places.append(tmp_path / f"adapter{seed}")
        model.save_pretrained(places[-1])
        moves.append(_layer(model)(inputs) - plain)
    before = numbers_of_base(bare)
    report = merge_adapters(places, tmp_path / "merged", weights=[0.7, 0.3])
    merged = peft.PeftModel.from_pretrained(bare, report.folder)
    expected = 0.7 * moves[0] + 0.3 * moves[1]
    assert relative(_layer(merged)(inputs) - plain, expected) < 1e-4
    of_base = [p for name, p in merged.named_parameters() if "lora" not in name]
    after = [part for p in of_base for part in stored(p)]
    assert all(map(torch.equal, after, before))


def _layer(model: Any) -> nn.Module:
    return model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")


def test_a_base_that_rounds_inputs_by_the_batch_is_refused(tmp_path: Path) -> None:
    base = base_of_bitsandbytes(tmp_path / "base", load_in_8bit=True)
    task = task_of_texts(adapted(base))
    with pytest.raises(ModelError, match="llm_int8_threshold=0"):
        blr.fit_laplace(task, structure="diag", curvature="empirical_fisher")
