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


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_name_exists_and_explains_itself(name: str) -> None:
    found = getattr(blr, name)
    assert name in blr.__all__ and found.__doc__


def test_all_is_sorted_complete_and_true() -> None:
    assert set(blr.__all__) >= NAMES
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


def test_the_task(audit: Audit) -> None:
    task = audit.task
    assert len(task) == task.n_data == N
    assert task.model is audit.model and task.likelihood.name == "categorical"
    for likelihood in ("categorical", "bernoulli", "gaussian", "poisson", blr.Gaussian(2.0)):
        blr.Task(audit.model, (audit.x, audit.y), likelihood=likelihood)
    task = blr.Task(
        audit.model,
        (audit.x, audit.y),
        forward=lambda model, batch: (model(batch[0]), batch[1]),
        batch_size=7,
        device="cpu",
    )
    assert task.batch_size == 7 and task.device == torch.device("cpu")


def test_the_posterior(audit: Audit, tmp_path) -> None:
    q = audit.posterior
    assert q.structure == "diag" and q.n_data == N and q.prior_precision == pytest.approx(1.0)
    assert isinstance(q.mean, dict)
    for name, p in audit.model.named_parameters():
        assert is_tensor(q.mean[name], *p.shape) and torch.equal(q.mean[name], p.detach())
        assert is_tensor(q.variance(name), *p.shape) and bool((q.variance(name) > 0).all())
        torch.testing.assert_close(q.precision(name), 1 / q.variance(name))
    draw = q.sample(generator=torch.Generator().manual_seed(0))
    assert list(draw) == list(q.mean)
    assert all(is_tensor(draw[n], *m.shape) for n, m in q.mean.items())
    again = q.sample(generator=torch.Generator().manual_seed(0))
    assert all(torch.equal(draw[n], again[n]) for n in draw)
    for path in (tmp_path / "q.safetensors", str(tmp_path / "folder")):
        q.save(path)
        loaded = blr.Posterior.load(path)
        assert loaded.n_data == N and loaded.prior_precision == q.prior_precision
        assert all(torch.equal(loaded.mean[n], m) for n, m in q.mean.items())
        assert all(torch.equal(loaded.variance(n), q.variance(n)) for n in q.mean)
    assert (tmp_path / "q.safetensors").is_file() and (tmp_path / "folder").is_dir()


def test_a_posterior_from_a_checkpoint(audit: Audit, tmp_path) -> None:
    adam = torch.optim.Adam(audit.model.parameters(), lr=0.0)
    nn.functional.cross_entropy(audit.model(audit.x), audit.y).backward()
    adam.step()
    audit.model.zero_grad(set_to_none=True)
    torch.save(adam.state_dict(), tmp_path / "adam.pt")
    q = blr.Posterior.from_checkpoint(
        tmp_path / "adam.pt", audit.model, n_data=N, prior_precision=1.0
    )
    live = blr.Posterior.from_optimizer(adam, audit.model, n_data=N, prior_precision=1.0)
    assert all(torch.equal(q.precision(n), live.precision(n)) for n in live.mean)


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_fit_laplace(audit: Audit, structure: str) -> None:
    q = blr.fit_laplace(audit.task, structure=structure, prior_precision=1.5)
    assert isinstance(q, blr.Posterior)
    assert (q.structure, q.prior_precision, q.n_data) == (structure, 1.5, N)


def test_sensitivity(audit: Audit) -> None:
    scores = blr.sensitivity(audit.task, audit.posterior)
    assert is_tensor(scores.error, N, C)
    assert is_tensor(scores.variance, N, C, C)
    assert is_tensor(scores.deviation, N)
    assert is_tensor(scores.self_influence, N)
    assert scores.targets.tolist() == audit.y.tolist()  # in the order of the dataset
    table = scores.table
    assert isinstance(table, pd.DataFrame) and len(table) == N
    expected = "index target prediction loss error variance deviation self_influence source"
    assert set(expected.split()) <= set(table)
    assert table["index"].tolist() == list(range(N))
    assert scores.table is table


@pytest.mark.parametrize("correction", ["first_order", "cavity", "auto"])
def test_leave_one_out(audit: Audit, correction: str) -> None:
    loo = blr.leave_one_out(audit.task, audit.posterior, correction=correction)
    assert is_tensor(loo.logits, N, C)
    assert is_tensor(loo.losses, N)
    assert type(loo.nll) is float and type(loo.accuracy) is float
    assert isinstance(loo.table, pd.DataFrame) and len(loo.table) == N
    default = blr.leave_one_out(audit.task, audit.posterior)
    assert (correction == "cavity") or torch.equal(default.logits, loo.logits)


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


def test_what_if_added_and_relabelled(audit: Audit) -> None:
    new = blr.Task(audit.model, blobs(5, seed=2), likelihood="categorical")
    result = blr.what_if(audit.task, audit.posterior, add=new, evaluate=audit.test_task)
    assert result.nll != result.before.nll
    labels = {i: (int(audit.y[i]) + 1) % C for i in (0, 5)}
    result = blr.what_if(audit.task, audit.posterior, relabel=labels, evaluate=audit.test_task)
    assert result.nll != result.before.nll


@pytest.mark.parametrize(("by", "groups"), [("target", [0, 1, 2]), ("source", ["book", "web"])])
def test_what_if_each(audit: Audit, by: str, groups: list) -> None:
    table = blr.what_if_each(audit.task, audit.posterior, by=by, evaluate=audit.test_task)
    assert isinstance(table, pd.DataFrame) and table["group"].tolist() == groups


def test_memory_map(audit: Audit) -> None:
    memory = blr.memory_map(blr.sensitivity(audit.task, audit.posterior))
    assert isinstance(memory.table, pd.DataFrame) and len(memory.table) == N
    regions = {"regular", "uncertain", "unpredictable", "memorable"}
    assert set(memory.table.region) <= regions
    figure = pytest.importorskip("matplotlib.figure").Figure()
    ax = figure.subplots()
    assert memory.plot(ax=ax) is ax
    assert memory.plot().figure is not figure


def test_ivon_is_a_torch_optimizer() -> None:
    optimizer = blr.IVON(nn.Linear(2, 1).parameters(), lr=0.1, ess=10)
    assert isinstance(optimizer, torch.optim.Optimizer)
    from blr_analysis.learning_rule.optim import IVON

    assert IVON is blr.IVON
