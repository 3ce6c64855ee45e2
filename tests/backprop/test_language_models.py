"""Language models as people have them: norms of every name, tied tables, half precision."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from models import randomised, seeded
from oracles import relative
from readings import jacobian_of, ways
from tiny_lm import sequences, task_of, tiny_lm
from torch import Tensor, nn
from torch.utils.data import DataLoader

import blr_analysis as blr
from blr_analysis.errors import ModelError
from blr_analysis.half import narrow
from blr_analysis.posterior import Posterior
from blr_analysis.task import Task

HALVES = (torch.bfloat16, torch.float16)


class RMS(nn.Module):
    """As transformers writes it: in single precision, then back; ``shift``: as in Gemma."""

    def __init__(self, width: int, *, shift: float = 0.0) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.ones(width)), shift

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (self.weight + self.shift) * wide.to(x.dtype)


class Scaled(nn.Module):
    """A gate and an offset of features, under names of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid() * self.gamma + self.beta


class Curved(nn.Module):
    """Looks like a scale and is none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rms, self.gemma, self.scale = RMS(4), RMS(4, shift=1.0), Scaled(4)
        self.curved, self.out = Curved(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gemma(x + self.rms(x).tanh())
        return self.out(self.curved(self.scale(x, gate=x)).mean(1))


def norms(dtype: torch.dtype = torch.float64) -> Task:
    with seeded(0):
        model = randomised(Model()).to(dtype)
        x = torch.randn(6, 5, 4, dtype=dtype)
    return Task(model, (x, torch.arange(6) % 3))


def by_autograd(task: Task) -> Tensor:
    """∂f_ic/∂θ, ``[N, C, P]``."""
    rows = []
    for i in range(len(task)):
        outputs = task.model(task.fetch(torch.tensor([i]))[0])
        for f in outputs[0]:
            grads = torch.autograd.grad(f, list(task.model.parameters()), retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).view(len(task), -1, len(rows[0]))


def test_norms_of_every_name_are_read_by_themselves() -> None:
    """Single precision inside of a double one, too: as exact as that allows."""
    task = norms()
    assert all(way in name for name, way in ways(task).items() if "out" not in name)  # by itself
    for chunk_size in (1, 4):
        assert relative(jacobian_of(task, chunk_size), by_autograd(task)) < 1e-6


@pytest.fixture(scope="module")
def transformers() -> Any:
    """With the models' modules, whose import takes long."""
    found = pytest.importorskip("transformers")
    for kind in ("Mixtral", "Gemma2", "Cohere", "DeepseekV3"):
        getattr(found, f"{kind}ForCausalLM")
    return found


def test_a_router_in_single_precision_does_not_misplace_rows(
    monkeypatch: pytest.MonkeyPatch, transformers: Any
) -> None:
    """Which would send all layers before it through the whole model, one example at a time."""
    small = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 12}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    config = transformers.MixtralConfig(**small, **heads, head_dim=4, use_cache=False)
    config._experts_implementation = "eager"
    with seeded(0):
        model = randomised(transformers.MixtralForCausalLM(config).double().eval())
    ids = torch.randint(1, 16, (4, 7), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    task = Task(model, DataLoader(rows, batch_size=4), likelihood="causal_lm")
    assert set(ways(task).values()) >= {"linear", "embedding"}
    monkeypatch.delattr("blr_analysis.backprop.reading.task_columns")
    fitted(task, "diag")


@pytest.mark.parametrize("kind", ["Gemma2", "Cohere", "DeepseekV3"])
def test_models_whose_norms_are_in_single_precision_run_in_double(
    kind: str, transformers: Any
) -> None:
    small = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 12}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}
    ends: dict[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "DeepseekV3":  # dense: no router
        sizes = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")
        ends |= dict.fromkeys((*sizes, "v_head_dim"), 4) | {"first_k_dense_replace": 2}
        heads["num_key_value_heads"] = 2
    else:
        ends["head_dim"] = 4
    config = getattr(transformers, f"{kind}Config")(**small, **heads, **ends)
    with seeded(0):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()
        randomised(model)
    ids = torch.randint(1, 16, (5, 7), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    q = fitted(Task(model, DataLoader(rows, batch_size=2), likelihood="causal_lm"), "diag")
    sums = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    for row in ids:
        model.zero_grad()
        logits = model(row.unsqueeze(0)).logits[0, :-1]
        nn.functional.cross_entropy(logits, row[1:], reduction="sum").backward()
        for name, p in model.named_parameters():
            sums[name] += p.grad.square()
    assert all(relative(q.precision(n), s) < 1e-5 for n, s in sums.items())


@cache
def language(dtype: torch.dtype, tied: bool = True) -> Task:
    ids = sequences(10)
    return task_of(tiny_lm(tied=tied).to(dtype), ids)


def fitted(task: Task, structure: str) -> blr.Posterior:
    how: dict[str, Any] = {"prior_precision": 1.0, "curvature": "empirical_fisher"}
    return blr.fit_laplace(task, structure=structure, **how)


def test_a_tied_table_is_never_made_for_each_example() -> None:
    read = ways(language(torch.float64))
    assert read["words.weight"] == "linear"  # the table's own rule, and the read-out's
    assert set(read.values()) == {"embedding", "linear", "norm"}


@pytest.mark.parametrize("structure", ["diag", "kron", "lowrank"])
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_single_precision_up_to_rounding(
    dtype: torch.dtype, structure: str
) -> None:
    half, single = language(dtype), language(torch.float32)
    eps = torch.finfo(dtype).eps
    q, exact = fitted(half, structure), fitted(single, structure)
    for name, m in q.mean.items():
        assert m.dtype == torch.float32
        assert relative(q.precision(name), exact.precision(name)) < 10 * eps
    scores, truth = (blr.sensitivity(t, exact) for t in (half, single))
    assert relative(scores.losses, truth.losses) < 3 * eps
    assert relative(scores.self_influence, truth.self_influence) < 10 * eps
    ours, theirs = (blr.influence(t, exact, t).matrix for t in (half, single))
    assert ours.dtype == torch.float32
    assert relative(ours, theirs) < 10 * eps
    assert {p.dtype for p in half.model.parameters()} == {dtype}


def test_the_mean_of_a_half_precision_model_is_held_in_it() -> None:
    model = tiny_lm(tied=True).bfloat16()
    task = task_of(model, sequences(10))
    q = fitted(task, "diag")
    wide = Posterior(dict(q.mean), q.form, prior_precision=1.0, n_data=10)
    held = narrow(q.mean)
    assert {m.dtype for m in held.values()} == {torch.bfloat16}
    assert {m.dtype for m in q.mean.values()} == {torch.float32}
    assert all(m is held[n] for n, m in narrow(q.on(task).mean).items())
    assert q.to("cpu", torch.float64).mean["words.weight"].dtype == torch.float64
    ours, theirs = (blr.influence(task, p, task).matrix for p in (q, wide))
    assert torch.equal(ours, theirs)
    before = {n: m.clone() for n, m in q.mean.items()}
    with torch.no_grad():
        model.words.weight.add_(1.0)
    assert all(torch.equal(m, before[n]) for n, m in q.mean.items())


def test_inputs_of_a_model_of_two_dtypes_stay_as_it_was_trained_on_them() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.first = nn.Parameter(torch.ones(3)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).float() * self.scale

    with seeded(0):
        model, x = Mixed(), torch.randn(6, 4).bfloat16()
    y = torch.arange(6) % 3
    model.first.bfloat16().float()
    truth = fitted(Task(model, (x, y)), "kron")
    model.first.bfloat16()
    q = fitted(Task(model, (x, y)), "kron")
    for name, m in truth.mean.items():
        assert torch.equal(q.mean[name], m)
        assert relative(q.precision(name), truth.precision(name)) < 0.05


def test_autocast_inside_of_the_forward_pass() -> None:
    class Cast(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(input_ids, attention_mask)

    ids = sequences(10)
    task = task_of(Cast(tiny_lm(tied=True).float()), ids)
    single = task_of(Cast(tiny_lm(tied=True).float()).inner, ids)
    ours, theirs = (blr.sensitivity(t, fitted(t, "diag")).self_influence for t in (task, single))
    assert relative(ours, theirs) < 10 * torch.finfo(torch.bfloat16).eps


def test_gradients_that_half_precision_cannot_hold_are_refused() -> None:
    model = nn.Linear(4, 3).half()
    nn.init.zeros_(model.weight)
    data = torch.full((5, 4), 6e4).half(), torch.arange(5) % 3
    task = Task(model, data, forward=lambda m, batch: (100 * m(batch[0]), batch[1]))
    with pytest.raises(ModelError, match=r"'weight' are NaN or inf in float16: use model.float"):
        fitted(task, "diag")


def test_frozen_weights_of_few_bits_under_an_adapter() -> None:
    """A base of 8-bit numbers and a scale, as quantised layers keep it, and a LoRA in float32."""

    class Quantised(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.scale = weight.abs().amax().item() / 127
            self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight.to(x.dtype) * self.scale).T

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x.float())).to(x.dtype)

    with seeded(0):
        model = tiny_lm().to(torch.bfloat16).requires_grad_(False)
        model.mix = Adapted(Quantised(model.mix.weight))
        nn.init.normal_(model.mix.up.weight)
    task = task_of(model, sequences(8))
    assert set(task.parameters()) == {"mix.down.weight", "mix.up.weight"}
    wide = task_of(model.float(), sequences(8))
    truth = blr.sensitivity(wide, fitted(wide, "kron")).self_influence
    model.to(torch.bfloat16).mix.down.float()
    model.mix.up.float()
    task = task_of(model, sequences(8))
    ours = blr.sensitivity(task, fitted(task, "kron")).self_influence
    assert relative(ours, truth) < 10 * torch.finfo(torch.bfloat16).eps
