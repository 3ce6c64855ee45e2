"""Under ``torch.inference_mode()`` every public function gives tensors that can be trained on.

Those that give nothing but numbers (``what_if_each``, ``merge_curve`` and their like) are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.learning_rule.families import Beta
from blr_analysis.learning_rule.inference import Conjugate, bernoulli
from blr_analysis.sensitivity.tokens import token_sensitivity
from tests.models import mlp
from tests.snapshots import untouched

STATES = [{"w": torch.full((2, 3), float(k))} for k in range(3)]
ONES = [{"w": torch.ones(2, 3)}] * 2


class Case:
    """What the functions are called with, made outside of inference mode."""

    def __init__(self, folder: Path) -> None:
        g = torch.Generator().manual_seed(0)
        x = torch.randn(12, 4, generator=g, dtype=torch.float64)
        self.model = mlp()
        self.optimizer = blr.IVON(self.model.parameters(), lr=0.1, ess=12, weight_decay=0.1)
        with self.optimizer.sampled_params(train=True):
            self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.task = blr.Task(self.model, (x, torch.arange(12) % 3))
        self.q = blr.fit_laplace(self.task, structure="full", prior_precision=1.0)
        self.scores = blr.sensitivity(self.task, self.q)
        ids = torch.randint(5, (4, 6), generator=g)
        words = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)).double()
        self.text = blr.Task(words, (ids, ids), likelihood="causal_lm")
        fit: dict[str, Any] = dict(structure="diag", curvature="empirical_fisher")
        self.p = blr.fit_laplace(self.text, prior_precision=1.0, **fit)
        one = torch.ones((), dtype=torch.float64)
        self.fit = Conjugate(Beta(one, one), bernoulli()).fit((x[:, 0] > 0).double())
        self.file = folder / "q.safetensors"
        self.q.save(self.file)


def monitored(c: Case) -> Any:
    monitor = blr.Monitor(c.task, test=c.task)
    monitor(c.q, 1)
    return monitor.state_dict()


CALLS: dict[str, Callable[[Case], Any]] = {
    "sensitivity": lambda c: blr.sensitivity(c.task, c.q),
    "sensitivity without V": lambda c: blr.sensitivity(c.task, c.q, variance=False),
    "sensitivity of sequences": lambda c: blr.sensitivity(c.text, c.p),
    "sensitivity of a fit": lambda c: blr.sensitivity(c.fit),
    "leverage": lambda c: blr.sensitivity(c.task, c.q).leverage,
    "leave_one_out": lambda c: blr.leave_one_out(c.task, c.q),
    "leave_one_out, refined": lambda c: blr.leave_one_out(c.task, c.q, refine=1),
    "leave_one_out of sequences": lambda c: blr.leave_one_out(c.text, c.p),
    "leave_one_out of a fit": lambda c: blr.leave_one_out(c.fit),
    "token_sensitivity": lambda c: token_sensitivity(c.text, c.p, sequences=[1]),
    "influence": lambda c: blr.influence(c.task, c.q, c.task),
    "top_influence": lambda c: blr.influence(c.task, c.q, c.task, k=2),
    "group": lambda c: blr.influence(c.task, c.q, c.task).group(),
    "suspicious": lambda c: blr.suspicious(c.task, c.q, samples=2),
    "Monitor": monitored,
    "memory_map": lambda c: blr.memory_map(c.scores),
    "calibrate": lambda c: blr.calibrate(c.task, c.q, probe=2),
    "select_prior_precision": lambda c: blr.select_prior_precision(c.task, [1.0]),
    "what_if": lambda c: blr.what_if(c.task, c.q, remove=[0], relabel={1: 0}),
    "fit_laplace": lambda c: blr.fit_laplace(c.task, structure="kron", prior_precision=1.0),
    "from_optimizer": lambda c: blr.Posterior.from_optimizer(c.optimizer, c.model),
    "load": lambda c: blr.Posterior.load(c.file),
    "merge": lambda c: blr.merge(STATES[0], STATES[1:], precisions=ONES, delta=1.0),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("saved"))


@pytest.mark.filterwarnings("ignore:1 of 1 examples keep")
@pytest.mark.parametrize("name", CALLS)
def test_tensors_can_be_trained_on(case: Case, name: str) -> None:
    with untouched(case.model), torch.inference_mode():
        result = CALLS[name](case)
    tensors = list(inside(result, set()))
    assert tensors and not any(tensor.is_inference() for tensor in tensors)
    for tensor in filter(torch.is_floating_point, tensors):
        weight = torch.ones((), dtype=tensor.dtype, requires_grad=True)
        (weight * tensor).sum().backward()


def inside(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that a result holds."""
    if id(value) in seen or isinstance(value, (blr.Task, nn.Module, torch.Generator)):
        return
    seen.add(id(value))
    parts: Any = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif type(value).__module__.startswith("blr_analysis"):
        names = [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]
        parts = [getattr(value, name) for name in names]
    for part in parts:
        yield from inside(part, seen)
