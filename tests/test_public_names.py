"""The names that users type: they exist, take what they should, and give what they should."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import blr_analysis as blr

N, M, C = 40, 15, 3

NAMES = {
    "Task",
    "Posterior",
    "fit_laplace",
    "sensitivity",
    "leave_one_out",
    "what_if",
    "what_if_each",
    "memory_map",
    "Monitor",
    "select_prior_precision",
    "IVON",
    "VOGN",
    "OGN",
    "Vadam",
    "Vprop",
    "BSAM",
    "STE",
    "BayesBiNN",
    "table1",
    "Likelihood",
    "Categorical",
    "Bernoulli",
    "Gaussian",
    "Poisson",
    "BLRError",
    "errors",
    "likelihoods",
    "CausalLM",
    "TokenCategorical",
    "token_sensitivity",
    "subset_posterior",
    "gradient_mismatch",
    "merge_curve",
    "suggest_weights",
    "replays",
    "KroneckerRecorder",
}

# name → (the first arguments, the keyword-only ones with their defaults)
REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[Callable, tuple[list[str], dict[str, Any]]] = {
    blr.Task: (
        ["model", "data"],
        {
            "likelihood": "categorical",
            "forward": None,
            "batch_size": 256,
            "device": None,
            "metadata": None,
        },
    ),
    blr.Posterior.from_optimizer: (
        ["optimizer", "model"],
        {"n_data": None, "prior_precision": None},
    ),
    blr.Posterior.from_checkpoint: (["path", "model"], {"n_data": None, "prior_precision": None}),
    blr.Posterior.load: (["path"], {"model": None, "prior_precision": None}),
    blr.fit_laplace: (["task"], {"structure": "kron", "prior_precision": None}),
    blr.sensitivity: (
        ["task", "posterior"],
        {"variance": None, "chunk_size": None, "memory_budget": None, "progress": None},
    ),
    blr.leave_one_out: (["task", "posterior"], {"correction": "auto"}),
    blr.what_if: (
        ["task", "posterior"],
        {
            "remove": None,
            "add": None,
            "relabel": None,
            "evaluate": None,
            "solver": "auto",
            "steps": None,
        },
    ),
    blr.what_if_each: (["task", "posterior"], {"by": "target", "evaluate": None}),
    blr.memory_map: (["scores"], {}),
}


def test_the_names_exist_and_explain_themselves() -> None:
    assert set(blr.__all__) >= NAMES
    assert all(getattr(blr, name).__doc__ for name in NAMES)
    assert all(hasattr(blr, name) for name in blr.__all__)
    assert len(set(blr.__all__)) == len(blr.__all__)
    assert isinstance(blr.__version__, str)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signatures(function: Callable) -> None:
    first, keywords = SIGNATURES[function]
    parameters = dict(inspect.signature(function).parameters)
    positional = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    assert positional == first
    for name, default in keywords.items():
        assert parameters[name].default is default or parameters[name].default == default, name
    # In the first two a fitted model can stand in, the others name its remedy.
    alone = function in (blr.sensitivity, blr.leave_one_out, blr.what_if, blr.what_if_each)
    required = first[:1] if alone else first
    assert all(parameters[name].default is REQUIRED for name in required)


def test_all_errors_are_one_family() -> None:
    classes = [v for v in vars(blr.errors).values() if inspect.isclass(v)]
    kinds = [kind for kind in classes if not issubclass(kind, Warning)]
    assert len(kinds) >= 8
    assert all(issubclass(kind, blr.BLRError) and kind.__doc__ for kind in kinds)
    assert issubclass(blr.errors.InputError, ValueError)
    assert issubclass(blr.errors.StorageError, OSError)


def blobs(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(C, (n,), generator=g)
    return torch.randn(n, 2, generator=g) + 2 * nn.functional.one_hot(y, C)[:, :2], y


class Audit:
    """The four lines, on a small model trained with IVON."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        x, y = blobs(N)
        self.model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, C))
        self.optimizer = blr.IVON(self.model.parameters(), lr=0.1, ess=N, weight_decay=1 / N)
        for _ in range(60):
            with self.optimizer.sampled_params(train=True):
                nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.task = blr.Task(
            self.model,
            DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True),
            likelihood="categorical",
            metadata={"source": ["web", "book"] * (N // 2)},
        )
        self.test_task = blr.Task(self.model, blobs(M, seed=1), likelihood="categorical")
        self.x, self.y = x, y
        self.posterior = blr.Posterior.from_optimizer(self.optimizer, self.model, n_data=N)


@pytest.fixture(scope="module")
def audit() -> Audit:
    return Audit()


def is_tensor(value: Any, *shape: int) -> bool:
    ok = isinstance(value, Tensor) and not value.requires_grad
    return ok and tuple(value.shape) == shape and value.device.type == "cpu"


def test_what_if(audit: Audit) -> None:
    remove = audit.y == 2
    result = blr.what_if(
        audit.task,
        audit.posterior,
        remove=remove,
        evaluate=audit.test_task,
        solver="auto",
        steps=1,
    )
    assert [type(v) for v in (result.nll, result.accuracy)] == [float, float]
    assert [type(v) for v in (result.before.nll, result.before.accuracy)] == [float, float]
    assert isinstance(result.parameters, dict)
    for name, p in audit.model.named_parameters():
        assert is_tensor(result.parameters[name], *p.shape)
    fresh = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, C))
    result.apply(fresh)
    x, y = audit.test_task.dataset.tensors
    f = fresh(x).detach()
    assert float(nn.functional.cross_entropy(f, y)) == pytest.approx(result.nll, rel=1e-5)
    assert float((f.argmax(1) == y).double().mean()) == pytest.approx(result.accuracy)
    assert isinstance(result.by_class, pd.DataFrame) and len(result.by_class) == C
    indices = remove.nonzero()[:, 0]
    for same in (indices, indices.tolist(), lambda row: row.target == 2):
        again = blr.what_if(
            audit.task, audit.posterior, remove=same, evaluate=audit.test_task, steps=1
        )
        assert again.nll == result.nll
