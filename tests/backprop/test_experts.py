"""Mixtures of experts: each text's gradient of each expert, and experts that saw no token."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from models import randomised, seeded
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.backprop.engine import chunks

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 6}
SMALL |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
SMALL |= {"num_experts_per_tok": 1}
N_EXPERTS = 12  # more than tokens that count: some see none
KINDS: dict[str, dict[str, int]] = {
    "Mixtral": {"num_local_experts": N_EXPERTS, "head_dim": 4},
    "Olmoe": {"num_experts": N_EXPERTS},
    "Qwen2Moe": {
        "num_experts": N_EXPERTS,
        "moe_intermediate_size": 6,
        "shared_expert_intermediate_size": 6,
    },
}


@cache
def task_of(kind: str) -> blr.Task:
    config = getattr(transformers, f"{kind}Config")(**SMALL, **KINDS[kind])
    config._experts_implementation = "eager"
    with seeded(0):
        model = randomised(getattr(transformers, f"{kind}ForCausalLM")(config))
    ids = torch.randint(3, 16, (3, 4), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return blr.Task(model, rows, likelihood="causal_lm", batch_size=2)


def loss_of(model: Any, text: Tensor) -> Tensor:
    logits = model(input_ids=text.unsqueeze(0)).logits[0, :-1]
    return nn.functional.cross_entropy(logits, text[1:], reduction="sum")


def gradients_of(task: blr.Task) -> dict[str, Tensor]:
    """Each text's gradient by plain autograd, ``[N, *shape]`` by name."""
    named = dict(task.model.named_parameters())
    rows = []
    for example in range(task.n_data):
        loss = loss_of(task.model, task.dataset[example]["input_ids"])
        rows.append(torch.autograd.grad(loss, list(named.values())))
    return {name: torch.stack(g) for name, g in zip(named, zip(*rows, strict=True), strict=True)}


def experts_of(names: Any) -> list[str]:
    return [name for name in names if ".experts." in name]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_each_text_are_autograds(kind: str) -> None:
    task = task_of(kind)
    expected = gradients_of(task)
    found: dict[str, list[Tensor]] = {name: [] for name in expected}
    for chunk in chunks(task, task.parameters(), columns=1):
        error = chunk.likelihood.error(chunk.outputs, chunk.targets)
        for term in chunk.terms(error.unsqueeze(1), last=True):
            for name, gradient in term.jacobian().items():
                found[name].append(gradient[:, 0])
    assert experts_of(expected)
    for name, gradient in expected.items():
        largest = max(float(g.norm()) for g in expected.values())
        gap = torch.cat(found[name]) - gradient
        assert float(gap.norm()) < 1e-5 * largest, name


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_saw_no_token_are_named(kind: str, structure: str) -> None:
    task = task_of(kind)
    settings: dict[str, Any] = {"curvature": "empirical_fisher", "prior_precision": 1.0}
    q = blr.fit_laplace(task, structure=structure, **settings)
    idle = set()
    for name in experts_of(q.mean):
        sums = gradients_of(task)[name].square().sum(0)
        idle |= {f"{name}[{expert}]" for expert, g in enumerate(sums) if not g.any()}
    assert idle
    named = {name for name in q.record["unreached"] if ".experts." in name}
    assert named == idle
    assert "no gradient reaches" in repr(q)
