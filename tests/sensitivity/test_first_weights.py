"""The first weights of a training: drawn as the model's own code draws them, or not at all."""

from __future__ import annotations

import pytest
import torch
from blr_analysis.sensitivity.groups.first_weights import (
    first_weights,
    may_be_tuned,
    redrawn,
    undrawn,
)
from blr_analysis.sensitivity.groups.solving import GroupSolver, checked_plan
from peft import LoraConfig, get_peft_model
from snapshots import untouched
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import blr_analysis as blr
from blr_analysis.backprop.engine import QUIET
from blr_analysis.errors import InputError

WIDTH = 16
TOKENS = torch.randint(30, (32, 6), generator=torch.Generator().manual_seed(0))


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=48, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=8, initializer_range=0.3,
    )  # fmt: skip
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
    new, model = build(), build()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    drawn = first_weights(of_texts(model), 3)
    assert drawn is not None
    for name, p in new.named_parameters():
        if float(p.detach().std()) == 0:
            assert torch.equal(drawn[name], p)
        else:
            torch.testing.assert_close(drawn[name].std(), p.detach().std(), rtol=0.2, atol=0)
            assert abs(float(drawn[name].mean())) < 0.1
    again, other = first_weights(of_texts(model), 3), first_weights(of_texts(model), 4)
    name = next(iter(drawn))
    assert torch.equal(drawn[name], again[name]) and not torch.equal(drawn[name], other[name])


class Scaled(nn.Module):
    """x̂ (w + around) of an RMSNorm, or w x, by nobody's name."""

    def __init__(self, around: float, normalises: bool = True) -> None:
        super().__init__()
        self.gain, self.around, self.normalises = (
            nn.Parameter(torch.ones(WIDTH)),
            around,
            normalises,
        )

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
    drawn = first_weights(of_vectors(layer), 0)
    assert torch.equal(drawn["1.gain"], torch.full((WIDTH,), gain))
    if "1.shift" in drawn:
        assert not drawn["1.shift"].any()


class Half(nn.Linear):
    """Draws its weight, and forgets its bias."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


def test_what_nothing_draws_is_named() -> None:
    for layer, name in ((Scaled(0.0, normalises=False), "1.gain"), (Half(WIDTH, WIDTH), "1.bias")):
        task = of_vectors(layer)
        assert first_weights(task, 0) is None and undrawn(redrawn(task, 0)) == [name]


class Owner(nn.Module):
    """A model with a function for its layers, as those that follow GPT-2's code have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, WIDTH)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_model_that_initialises_its_layers_has_the_last_word() -> None:
    task = blr.Task(Owner(), (torch.randn(8, 4), torch.randn(8, WIDTH)), likelihood="gaussian")
    drawn = first_weights(task, 0)
    assert torch.equal(drawn["inner.weight"], torch.full((WIDTH, 4), 0.5))


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
    drawn = first_weights(of_texts(model), 0)
    if start == "pissa":  # which changes the base too
        assert drawn is None
        return
    for name, w in drawn.items():
        if "lora_B" in name:
            assert not w.any()
        elif "lora_A" in name:
            assert 0 < float(w.std()) < 1
        else:
            assert torch.equal(w, head)


def test_a_loaded_model_tells_by_the_words_of_no_text_whether_it_was_fine_tuned() -> None:
    model = llama()
    task = of_texts(model)
    drawn = first_weights(task, 0)
    assert not may_be_tuned(task, drawn)  # made here
    model.name_or_path = "somewhere"
    assert not may_be_tuned(task, drawn)
    unread = [k for k in range(48) if not bool((k == TOKENS).any())]
    with torch.no_grad():
        model.model.embed_tokens.weight[unread] *= 3
    assert may_be_tuned(task, drawn)
    how = dict(curvature="empirical_fisher", prior_precision=1.0, progress=False)
    q = blr.fit_laplace(task, structure="diag", **how)
    assert "--initial" in GroupSolver(task, q, checked_plan("auto", None, None), QUIET).no_replay


# Networks trained anew for a few epochs, to average over.


N = 120


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def trained() -> nn.Sequential:
    """A replay's steps make the weights as large as the model's: it has to have some."""
    model, (x, y) = network(), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def fitted(model: nn.Module) -> tuple[blr.Task, blr.Posterior]:
    task = blr.Task(model, data())
    return task, blr.fit_laplace(task, prior_precision=2.0)


def test_each_network_is_trained_anew_and_has_the_same_prior() -> None:
    task, q = fitted(trained())
    with untouched(task.model):
        *fresh, last = blr.replays(task, q, 3, progress=False)
    again = blr.replays(task, q, 3, progress=False)
    assert last is q and len(fresh) == 3
    x, y = data()
    for one, two in zip(fresh, again, strict=False):
        assert one.prior_precision == 2.0 and one.n_data == N and one.structure == "kron"
        outputs = torch.func.functional_call(task.model, dict(one.mean), (x,))
        assert cross_entropy(outputs, y) < 0.9 * cross_entropy(network()(x), y)
        for name, weight in one.mean.items():
            assert torch.equal(weight, two.mean[name])
    assert not torch.equal(fresh[0].mean["0.weight"], fresh[1].mean["0.weight"])
    matrices = [blr.influence(task, p, task).matrix for p in (*fresh, q)]
    mean = blr.influence(task, [*fresh, q], task).matrix
    torch.testing.assert_close(mean, torch.stack(matrices).mean(0))


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (dict(count=0), "count"),
        (dict(epochs=0.0), "epochs"),
        (dict(epochs="4"), "epochs"),
        (dict(seed=0.5), "seed"),
    ],
)
def test_bad_settings_are_named(asked: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        blr.replays(*fitted(network()), **asked)  # type: ignore[arg-type]


def test_a_model_that_cannot_be_trained_anew_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    with pytest.raises(InputError, match="BatchNorm"):
        blr.replays(*fitted(model))
