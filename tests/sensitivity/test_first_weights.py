"""The first weights of a training: drawn as the model's own code draws them, or not at all."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.sensitivity.first_weights import drawn

WIDTH = 16
TOKENS = torch.randint(30, (32, 6), generator=torch.Generator().manual_seed(0))


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    sizes = dict(vocab_size=48, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=8)
    return GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.3))


def of_texts(model: nn.Module) -> blr.Task:
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    return blr.Task(model.eval(), rows, likelihood="causal_lm")


def of_vectors(*layers: nn.Module) -> blr.Task:
    model = nn.Sequential(nn.Linear(4, WIDTH), *layers)
    return blr.Task(model, (torch.randn(8, 4), torch.randn(8, WIDTH)), likelihood="gaussian")


@pytest.mark.parametrize("build", [llama, gpt2])
def test_models_of_transformers_draw_their_own(build) -> None:
    """As large as those of a new model, and where a new model's are constant, the same."""
    torch.manual_seed(0)
    new = build()
    model = build()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    fresh = drawn(of_texts(model), 3)
    for name, p in new.named_parameters():
        if float(p.detach().std()) == 0:
            assert torch.equal(fresh[name], p)
        else:
            torch.testing.assert_close(fresh[name].std(), p.detach().std(), rtol=0.2, atol=0)
            assert abs(float(fresh[name].mean())) < 0.1
    again = drawn(of_texts(model), 3)
    another_seed = drawn(of_texts(model), 4)
    name = next(iter(fresh))
    assert torch.equal(fresh[name], again[name])
    assert not torch.equal(fresh[name], another_seed[name])


class Scaled(nn.Module):
    """x̂ (w + around) of an RMSNorm, or w x, by nobody's name."""

    def __init__(self, around: float, normalises: bool = True) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.around = around
        self.normalises = normalises

    def forward(self, x: Tensor) -> Tensor:
        size = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() if self.normalises else 1.0
        return x * size * (self.gain + self.around)


class Shifted(Scaled):
    """A layer norm in the same way."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True)) + self.shift


@pytest.mark.parametrize(
    ("layer", "gain"), [(Scaled(0.0), 1.0), (Scaled(1.0), 0.0), (Shifted(), 1.0)]
)
def test_a_norm_begins_as_one_whatever_its_name(layer: nn.Module, gain: float) -> None:
    fresh = drawn(of_vectors(layer), 0)
    assert torch.equal(fresh["1.gain"], torch.full((WIDTH,), gain))
    if "1.shift" in fresh:
        assert not fresh["1.shift"].any()


class Half(nn.Linear):
    """Draws its weight, and forgets its bias."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


def test_what_nothing_draws_is_named() -> None:
    for layer, name in ((Scaled(0.0, normalises=False), "1.gain"), (Half(WIDTH, WIDTH), "1.bias")):
        with pytest.raises(InputError, match=f"{name}.*initial="):
            drawn(of_vectors(layer), 0)


@pytest.mark.parametrize("start", [True, "gaussian", "pissa"])
def test_an_adapter_begins_without_effect(start: bool | str) -> None:
    base = llama()
    head = base.lm_head.weight.detach().clone()
    config = LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=start
    )
    model = get_peft_model(base, config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.requires_grad * 1.0)
    if start == "pissa":  # which changes the base too
        with pytest.raises(InputError, match="initial="):
            drawn(of_texts(model), 0)
        return
    for name, w in drawn(of_texts(model), 0).items():
        if "lora_B" in name:
            assert not w.any()
        elif "lora_A" in name:
            assert 0 < float(w.std()) < 1
        elif "modules_to_save" in name:
            assert torch.equal(w, head)


def test_buffers_begin_anew() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    norm.running_mean.add_(3.0)
    fresh = drawn(of_vectors(norm), 0)
    assert not fresh["1.running_mean"].any()
    assert torch.equal(fresh["1.running_var"], torch.ones(WIDTH))
