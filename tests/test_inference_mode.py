"""Under ``torch.inference_mode()`` every public function gives tensors that can be trained on.

Those that give nothing but numbers (``what_if_each``, ``merge_curve`` and their like) are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from models import mlp, normal, tokens
from snapshots import untouched
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.learning_rule.families import Beta
from blr_analysis.learning_rule.inference import Conjugate, bernoulli
from blr_analysis.sensitivity.token_scores import token_sensitivity

# Made outside of inference mode.
X = normal(12, 4)
MODEL = mlp()
IVON = blr.IVON(MODEL.parameters(), lr=0.1, ess=12, weight_decay=0.1)
with IVON.sampled_params(train=True):
    MODEL(X).square().mean().backward()
IVON.step()
IVON.zero_grad()
TASK = blr.Task(MODEL, (X, torch.arange(12) % 3))
Q = blr.fit_laplace(TASK, structure="full", prior_precision=1.0)
SCORES = blr.sensitivity(TASK, Q)
IDS = tokens(4, 6)
WORDS = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)).double()
TEXT = blr.Task(WORDS, (IDS, IDS), likelihood="causal_lm")
FISHER: Any = {"structure": "diag", "curvature": "empirical_fisher", "prior_precision": 1.0}
P = blr.fit_laplace(TEXT, **FISHER)
ONE = torch.ones((), dtype=torch.float64)
FIT = Conjugate(Beta(ONE, ONE), bernoulli()).fit((X[:, 0] > 0).double())
STATES = [{"w": torch.full((2, 3), float(k))} for k in range(3)]
ONES = [{"w": torch.ones(2, 3)}] * 2


def monitored(_: Path) -> Any:
    monitor = blr.Monitor(TASK, test=TASK)
    monitor(Q, 1)
    return [monitor.history("deviation"), monitor.indices]


def loaded(place: Path) -> blr.Posterior:
    Q.save(place / "q.safetensors")
    return blr.Posterior.load(place / "q.safetensors")


CALLS: dict[str, Callable[[Path], Any]] = {
    "sensitivity": lambda _: blr.sensitivity(TASK, Q),
    "sensitivity of sequences": lambda _: blr.sensitivity(TEXT, P),
    "sensitivity of a fit": lambda _: blr.sensitivity(FIT),
    "leave_one_out": lambda _: blr.leave_one_out(TASK, Q),
    "leave_one_out of sequences": lambda _: blr.leave_one_out(TEXT, P),
    "token_sensitivity": lambda _: token_sensitivity(TEXT, P, sequences=[1]),
    "influence": lambda _: blr.influence(TASK, Q, TASK),
    "top_influence": lambda _: blr.influence(TASK, Q, TASK, k=2),
    "suspicious": lambda _: blr.suspicious(TASK, Q, samples=2),
    "Monitor": monitored,
    "memory_map": lambda _: blr.memory_map(SCORES),
    "calibrate": lambda _: blr.calibrate(TASK, Q, probe=2),
    "select_prior_precision": lambda _: blr.select_prior_precision(TASK, [1.0]),
    "what_if": lambda _: blr.what_if(TASK, Q, remove=[0], relabel={1: 0}),
    "fit_laplace": lambda _: blr.fit_laplace(TASK, structure="kron", prior_precision=1.0),
    "from_optimizer": lambda _: blr.Posterior.from_optimizer(IVON, MODEL),
    "load": loaded,
    "merge": lambda _: blr.merge(STATES[0], STATES[1:], precisions=ONES, delta=1.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_tensors_can_be_trained_on(name: str, tmp_path: Path) -> None:
    with untouched(MODEL), torch.inference_mode():
        result = CALLS[name](tmp_path)
    tensors = list(inside(result, set()))
    assert tensors
    assert not any(tensor.is_inference() for tensor in tensors)
    for tensor in filter(torch.is_floating_point, tensors):
        (torch.ones((), dtype=tensor.dtype, requires_grad=True) * tensor).sum().backward()


def inside(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that a result holds."""
    if id(value) in seen or isinstance(value, (blr.Task, nn.Module, torch.Generator)):
        return
    seen.add(id(value))
    parts: Any = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif type(value).__module__.startswith("blr_analysis"):
        names = [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]
        parts = [getattr(value, name) for name in names]
    for part in parts:
        yield from inside(part, seen)
