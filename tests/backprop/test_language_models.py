"""Language models as people have them: norms of every name, tied tables, half precision."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from models import Graph, graph, normal, randomised, seeded
from oracles import dense_jacobian, relative
from readings import jacobian_of, ways
from tiny_lm import sequences, task_of, tiny_lm
from torch import Tensor, nn
from torch.utils.data import DataLoader

import blr_analysis as blr
from blr_analysis.half import narrow
from blr_analysis.posterior import Posterior
from blr_analysis.task import Task

HALVES = (torch.bfloat16, torch.float16)


def rms(width: int, shift: float = 0.0) -> nn.Module:
    """As transformers writes it: in single precision, then back; ``shift``: as in Gemma."""

    def call(m: Any, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (m.weight + shift) * wide.to(x.dtype)

    return Graph(call, weight=nn.Parameter(torch.ones(width)))


def scale(width: int) -> nn.Module:
    """A gate and an offset of features, under names of their own."""
    parts = dict(gamma=nn.Parameter(torch.ones(width)), beta=nn.Parameter(torch.zeros(width)))
    return Graph(lambda m, x, gate: x * gate.sigmoid() * m.gamma + m.beta, **parts)


def curved(width: int) -> nn.Module:
    """Looks like a scale and is none."""
    return Graph(lambda m, x: x * m.weight.tanh(), weight=nn.Parameter(torch.ones(width)))


def test_norms_of_every_name_are_read_by_themselves() -> None:
    """Single precision inside of a double one, too: as exact as that allows."""

    def call(m: Any, x: Tensor) -> Tensor:
        x = m.gemma(x + m.rms(x).tanh())
        return m.out(m.curved(m.scale(x, gate=x)).mean(1))

    with seeded(0):
        norms = dict(rms=rms(4), gemma=rms(4, 1.0), scale=scale(4), curved=curved(4))
        model = graph(call, **norms, out=nn.Linear(4, 3))
    task = Task(model, (normal(6, 5, 4), torch.arange(6) % 3))
    assert all(way in name for name, way in ways(task).items() if "out" not in name)  # by itself
    truth = dense_jacobian(task, task.parameters())
    for chunk_size in (1, 4):
        assert relative(jacobian_of(task, chunk_size), truth) < 1e-6


@pytest.fixture(scope="module")
def transformers() -> Any:
    """With the models' modules, whose import takes long."""
    module = pytest.importorskip("transformers")
    for kind in KINDS:
        getattr(module, f"{kind}ForCausalLM")
    return module


SMALL = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 12}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}
SIZES = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
KINDS: dict[str, dict[str, int]] = {
    "Mixtral": {"head_dim": 4, "num_local_experts": 2},
    "Gemma2": {"head_dim": 4},
    "Cohere": {"head_dim": 4},
    "DeepseekV3": dict.fromkeys(SIZES, 4) | {"first_k_dense_replace": 2, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_models_whose_norms_are_in_single_precision_run_in_double(
    kind: str, transformers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a router's rows are not misplaced, which would send all layers before it through the
    whole model, one example at a time."""
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **ends, **KINDS[kind]})
    config._experts_implementation = "eager"
    with seeded(0):
        model = randomised(getattr(transformers, f"{kind}ForCausalLM")(config))
    ids = torch.randint(1, 16, (5, 7), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    task = Task(model, DataLoader(rows, batch_size=2), likelihood="causal_lm")
    assert ways(task)["model.embed_tokens.weight"] in ("embedding", "linear")
    monkeypatch.delattr("blr_analysis.backprop.reading.task_columns")
    q = fitted(task, "diag")
    sums = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    for row in ids:
        model.zero_grad()
        logits = model(row.unsqueeze(0)).logits[0, :-1]
        nn.functional.cross_entropy(logits, row[1:], reduction="sum").backward()
        for name, p in model.named_parameters():
            sums[name] += p.grad.square()
    assert all(relative(q.precision(n), s) < 1e-5 for n, s in sums.items())


@cache
def language(dtype: torch.dtype) -> Task:
    return task_of(tiny_lm(tied=True).to(dtype), sequences(10))


def fitted(task: Task, structure: str) -> blr.Posterior:
    settings: dict[str, Any] = {"prior_precision": 1.0, "curvature": "empirical_fisher"}
    return blr.fit_laplace(task, structure=structure, **settings)


def test_a_tied_table_is_never_made_for_each_example() -> None:
    read = ways(language(torch.float64))
    assert read["words.weight"] == "linear"  # the table's own rule, and the read-out's
    assert set(read.values()) == {"embedding", "linear", "norm"}


@pytest.mark.parametrize(
    ("structure", "dtype"), [("diag", HALVES[0]), ("kron", HALVES[1]), ("lowrank", HALVES[1])]
)
def test_half_precision_is_single_precision_up_to_rounding(
    dtype: torch.dtype, structure: str
) -> None:
    half = language(dtype)
    single = language(torch.float32)
    eps = torch.finfo(dtype).eps
    q = fitted(half, structure)
    exact = fitted(single, structure)
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
    narrow_mean = narrow(q.mean)
    assert {m.dtype for m in narrow_mean.values()} == {torch.bfloat16}
    assert {m.dtype for m in q.mean.values()} == {torch.float32}
    assert all(m is narrow_mean[n] for n, m in narrow(q.on(task).mean).items())
    assert q.to("cpu", torch.float64).mean["words.weight"].dtype == torch.float64
    ours, theirs = (blr.influence(task, p, task).matrix for p in (q, wide))
    assert torch.equal(ours, theirs)
    before = {n: m.clone() for n, m in q.mean.items()}
    with torch.no_grad():
        model.words.weight.add_(1.0)
    assert all(torch.equal(m, before[n]) for n, m in q.mean.items())


def test_inputs_of_a_model_of_two_dtypes_stay_as_it_was_trained_on_them() -> None:
    with seeded(0):
        parts = dict(scale=nn.Parameter(torch.ones(3)), first=nn.Linear(4, 3))
        model = Graph(lambda m, x: m.first(x).float() * m.scale, **parts)
        x = torch.randn(6, 4).bfloat16()
    y = torch.arange(6) % 3
    model.first.bfloat16().float()
    truth = fitted(Task(model, (x, y)), "kron")
    model.first.bfloat16()
    q = fitted(Task(model, (x, y)), "kron")
    for name, m in truth.mean.items():
        assert torch.equal(q.mean[name], m)
        assert relative(q.precision(name), truth.precision(name)) < 0.05


def test_autocast_inside_of_the_forward_pass() -> None:
    def cast(m: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return m.inner(input_ids, attention_mask)

    inner = tiny_lm(tied=True).float()
    task, single = (task_of(model, sequences(10)) for model in (Graph(cast, inner=inner), inner))
    ours, theirs = (blr.sensitivity(t, fitted(t, "diag")).self_influence for t in (task, single))
    assert relative(ours, theirs) < 10 * torch.finfo(torch.bfloat16).eps


def test_frozen_weights_of_few_bits_under_an_adapter() -> None:
    """A base of 8-bit numbers and a scale, as quantised layers keep it, and a LoRA in float32."""

    def adapted(m: Any, x: Tensor) -> Tensor:
        base = x @ (m.base.to(x.dtype) * scale).T
        return base + m.up(m.down(x.float())).to(x.dtype)

    with seeded(0):
        model = tiny_lm().to(torch.bfloat16).requires_grad_(False)
        down = nn.Linear(4, 2, bias=False)
        up = nn.Linear(2, 4, bias=False)
        scale = model.mix.weight.abs().amax().item() / 127
        base = nn.Parameter((model.mix.weight / scale).round().to(torch.int8), False)
        model.mix = Graph(adapted, base=base, down=down, up=up)
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
