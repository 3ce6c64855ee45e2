"""Bad input: every case is refused by an exception of the package that says what to do.

Each message names the input and what was expected; the model is left exactly as it was, and
nothing is half-written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from models import mlp
from safetensors.torch import save_file
from snapshots import snapshot, untouched
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import blr_analysis as blr
from blr_analysis.errors import (
    BLRError,
    DataError,
    DeviceError,
    InputError,
    ModelError,
    OptimizerError,
    PosteriorError,
    StorageError,
)

N = 12
NAN, INF = float("nan"), float("inf")
KINDS = ("categorical", "bernoulli", "gaussian", "poisson")


def data(kind: str = "categorical", n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    if kind == "categorical":
        return x, torch.arange(n) % 3
    return x, torch.randint(2, (n, 1), generator=g).double()


def task_of(kind: str = "categorical", model: nn.Module | None = None, **options) -> blr.Task:
    outputs = 3 if kind == "categorical" else 1
    model = mlp(outputs=outputs) if model is None else model
    return blr.Task(model, options.pop("data", data(kind)), likelihood=kind, **options)


def fitted(task: blr.Task, structure: str = "diag") -> blr.Posterior:
    return blr.fit_laplace(task, structure=structure, prior_precision=1.0)


def posterior_for(n: int, model: nn.Module | None = None, precision: float = 1.0) -> blr.Posterior:
    mean = {name: p.detach() for name, p in (model or mlp()).named_parameters()}
    held = {name: torch.full_like(p, precision) for name, p in mean.items()}
    return blr.Posterior(mean, held, prior_precision=precision, n_data=n)


def refused(task: blr.Task, error: type[BLRError], message: str, q: blr.Posterior) -> None:
    """Every analysis refuses the task with this message, and leaves the model alone."""
    for analysis in (
        lambda: blr.sensitivity(task, q),
        lambda: blr.leave_one_out(task, q),
        lambda: blr.what_if(task, q, remove=[0]),
        lambda: blr.what_if_each(task, q),
    ):
        with untouched(task.model), pytest.raises(error, match=message):
            analysis()


def unfitted(task: blr.Task, error: type[BLRError], message: str) -> None:
    """No structure is fitted to the task, which is left alone."""
    for structure in ("diag", "kron", "full"):
        with untouched(task.model), pytest.raises(error, match=message):
            fitted(task, structure)


# What a task is built from.


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(4), 0)] * N)


class Items(Dataset):
    """As many as are asked for, each made by a function of its index."""

    def __init__(self, size: int, item) -> None:
        self.size, self.item = size, item

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int):
        return self.item(i), i % 3


class Backwards(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(N - 1, -1, -1))

    def __len__(self) -> int:
        return N


def failing(bad: int):
    """Rows, but for one index."""

    def row(i: int) -> Tensor:
        if i == bad:
            raise FileNotFoundError("no such image: cat.png")
        return torch.full((4,), float(i), dtype=torch.float64)

    return Items(50, row)


WHOLE = TensorDataset(*data())
DRAWN = r"draws its examples through .*; pass the dataset itself"
SAMPLERS = {
    "subset": {"sampler": SubsetRandomSampler(range(5))},
    "replacement": {"sampler": RandomSampler(WHOLE, replacement=True)},
    "shorter": {"sampler": SequentialSampler(range(5))},
    "reordered": {"sampler": Backwards()},
    "a list of batches": {"batch_sampler": [[0, 1], [2, 3]]},
    "distributed": {"sampler": torch.utils.data.DistributedSampler(WHOLE, num_replicas=2, rank=0)},
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Stream(), "got Stream; examples are addressed by index"),
        ((x for x in range(3)), "got generator"),
        ({"train": WHOLE, "test": WHOLE}, "got dict; .* take one split"),
        ([], "hold no examples"),
        (Subset(WHOLE, torch.ones(10) > 0), r"mask\.nonzero"),
        ((torch.zeros(5, 4), torch.zeros(4)), r"same length, got \[5, 4\] and \[4\]"),
        ((torch.zeros(5, 4), torch.zeros(5), torch.zeros(5)), r"a pair \(X, y\), got 3 arrays"),
        ((torch.zeros(5, 4), ["a"] * 5), "y of .* cannot become a tensor"),
        (([[0.0], [1.0]], [0, 1]), "tensors or arrays"),
        (DataLoader(WHOLE, batch_size=None), "batch_size=None"),
        ([(torch.zeros(3 + i), 0) for i in range(4)], "collate function failed on examples 0, 1"),
        (Items(30, lambda i: torch.rand(4)), "differ when read again"),
        (failing(49), "failed on example 49 of 50"),
        *((DataLoader(WHOLE, **options), DRAWN) for options in SAMPLERS.values()),
    ],
)
def test_data_that_cannot_be_addressed(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        task_of(data=given)


def test_a_dataset_that_raises_on_an_index() -> None:
    message = r"failed on example 8 of 50: FileNotFoundError: no such image: cat.png; each index"
    refused(task_of(data=failing(8)), DataError, message, posterior_for(50))


def test_data_with_nan_are_not_taken_for_random() -> None:
    items = [(torch.tensor([NAN, 1.0, 2.0, 3.0]), 0)] * 5
    assert len(task_of(data=items)) == 5


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (nn.Linear, {}, InputError, r"model must be a torch\.nn\.Module, got"),
        ("model.pt", {}, InputError, r"model must be a torch\.nn\.Module, got"),
        (None, {"likelihood": "softmax"}, InputError, "likelihood must be one of 'categorical'"),
        (None, {"likelihood": nn.CrossEntropyLoss}, InputError, r"call it: CrossEntropyLoss\(\)"),
        (None, {"batch_size": 0}, InputError, "batch_size must be a positive integer, got 0"),
        (None, {"batch_size": True}, InputError, "batch_size must be a positive .*, got True"),
        (None, {"memory_budget": 2.5}, InputError, "memory_budget must be a positive integer"),
        (None, {"device": "gpu"}, DeviceError, "device 'gpu' cannot be used"),
        (None, {"device": "meta"}, DeviceError, "'0.weight' is on another device"),
        (None, {"forward": 3}, InputError, r"forward must be a function \(model, batch\)"),
        (None, {"recipe": "adamw"}, InputError, r"recipe must be a blr_analysis\.Recipe"),
        (None, {"checkpoints": 3}, InputError, "checkpoints must be a list"),
        (None, {"metadata": {"a": [1, 2]}}, InputError, "column 'a' has 2 values for 12 examples"),
        (None, {"metadata": {"a": 1}}, InputError, "column 'a' must be one value per"),
        (None, {"metadata": ["a"] * N}, InputError, "metadata must be columns by name"),
        (None, {"metadata": pd.DataFrame({"a": [1]})}, InputError, "'a' has 1 values for 12 exa"),
    ],
)
def test_bad_arguments_of_a_task(model, options, error: type[BLRError], message: str) -> None:
    with pytest.raises(error, match=message):
        blr.Task(model or mlp(), data(), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_where_there_is_none() -> None:
    for call in (lambda: task_of(device="cuda"), lambda: fitted(task_of()).to("cuda")):
        with pytest.raises(DeviceError, match=r"device 'cuda' cannot be used here .*\"cpu\" can"):
            call()


# Inputs and targets.


@pytest.mark.parametrize(("kind", "value"), [*zip(KINDS, [NAN, INF, -INF, NAN], strict=True)])
def test_nan_and_inf_in_the_inputs(kind: str, value: float) -> None:
    x, y = data(kind)
    x = x.clone()
    x[5, 1] = value
    task, q = task_of(kind, data=(x, y)), fitted(task_of(kind))
    message = "inputs hold NaN or inf in 1 examples, the first at index 5; drop"
    refused(task, DataError, message, q)
    unfitted(task, DataError, message)
    with pytest.raises(DataError, match=message):
        blr.what_if(task_of(kind, model=task.model), q, remove=[0], evaluate=task)


def test_large_inputs_are_not_taken_for_infinite() -> None:
    x, y = data()
    huge = task_of(data=(x.clamp(0.5, 1) * 1e308, y))
    batch = huge.fetch(torch.arange(N))
    assert not torch.isfinite(batch[0].sum()) and torch.isfinite(batch[0]).all()
    outputs, _ = huge.run(batch, huge.parameters(), torch.arange(N))
    assert torch.isfinite(outputs).all()


@pytest.mark.parametrize(
    ("kind", "targets", "message"),  # the rest in test_likelihoods
    [
        ("categorical", torch.arange(N) % 4, r"must lie in 0 … 2 \(the model has 3 logits\)"),
        ("categorical", torch.zeros(N, 3), "soft targets"),
        ("bernoulli", torch.full((N,), NAN), "bernoulli targets contain NaN or inf; drop or mend"),
        ("gaussian", torch.zeros(N, 3), "do not fit outputs .* give one target per output"),
        ("poisson", torch.full((N,), -1.0), "poisson targets must be counts 0, 1, 2"),
    ],
)
def test_bad_targets(kind: str, targets: Tensor, message: str) -> None:
    task = task_of(kind, data=(data(kind)[0], targets))
    refused(task, DataError, message, fitted(task_of(kind)))
    unfitted(task, DataError, message)


# Models and what they return.


class Returns(nn.Module):
    """A linear layer whose output is changed on the way."""

    def __init__(self, change) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.layer(x))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda f: f * NAN, ModelError, "outputs are NaN or inf in .* examples, the first at ind"),
        (lambda f: f.argmax(-1), ModelError, r"must return a tensor of real numbers.* int64"),
        (lambda f: None, ModelError, "must return a tensor of real numbers.* NoneType"),
        (lambda f: f.mean(), DataError, r"outputs of shape \[batch, C\], got \(\)"),
        (lambda f: f[:1], ModelError, r"returned 1 rows of outputs for .* examples"),
        (lambda f: f - f.mean(0), ModelError, "changes with its batch"),
        (lambda f: f + torch.randn_like(f), ModelError, "call to call"),
        (lambda f: f.undefined, ModelError, r"failed on a batch of .*: AttributeError"),
    ],
)
def test_models_that_return_something_else(change, error: type[BLRError], message: str) -> None:
    torch.manual_seed(0)
    task = task_of(model=Returns(change))
    refused(task, error, message, posterior_for(N, task.model))
    unfitted(task, error, message)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"forward": lambda m, b: m(b[0])}, InputError, r"forward must return a tuple .*, got"),
        ({"forward": lambda m, b: (m(b[0]), None)}, DataError, "must be a tensor of num.*None"),
        ({"forward": lambda m, b: (m(b[0]), ["a"])}, DataError, "targets must be a tensor of num"),
        ({"forward": lambda m, b: (m(b[0]), b[1].sum())}, DataError, r"targets \(\)"),
        ({"forward": lambda m, b: (m(b[0]), b[1][:-1])}, DataError, "one each per example"),
        ({"forward": lambda m, b: (m(b["x"]), b["y"])}, ModelError, "failed on a batch .*TypeErr"),
        ({"data": TensorDataset(*data(), data()[0])}, DataError, "cannot read a batch of"),
        ({"data": [{"x": a} for a in data()[0]]}, DataError, "needs a 'labels' entry"),
        ({"data": (torch.zeros(N, 5), data()[1])}, ModelError, r"batch of \(\(.*, 5\) float32, "),
        ({"data": (torch.zeros(N, 4).int(), data()[1])}, ModelError, "failed on a batch"),
    ],
)
def test_batches_that_are_not_read(options, error: type[BLRError], message: str) -> None:
    unfitted(task_of(**options), error, message)


@pytest.mark.parametrize("value", [NAN, INF])
def test_nan_and_inf_in_the_weights(value: float) -> None:
    model = mlp()
    q = fitted(task_of(model=model))
    model[2].weight.data[0, 0] = value
    task = task_of(model=model)
    unfitted(task, ModelError, r"the weights of '2.weight' hold")
    adam = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    adam.step()
    with untouched(model), pytest.raises(BLRError, match=r"'2.weight' has .* not finite"):
        blr.Posterior.from_optimizer(adam, model, n_data=N, prior_precision=1.0)
    assert len(blr.sensitivity(task, q)) == N  # which takes the posterior's mean


def test_several_dtypes_complex_weights_and_the_meta_device() -> None:
    mixed, weird = mlp(), mlp()
    mixed[2].float()
    weird[0].weight = nn.Parameter(weird[0].weight.to(torch.complex64))
    for model, message in (
        (mixed, r"several dtypes \(float64: 0.weight, float32: 2.weight\)"),
        (weird, "'0.weight' is torch.complex64; give real numbers"),
        (mlp().to("meta"), "'0.weight' is on the meta device; load the weights"),
    ):
        task = blr.Task(model, data())
        for call in (lambda t: fitted(t, "kron"), lambda t: blr.sensitivity(t, posterior_for(N))):
            with pytest.raises(ModelError, match=message):
                call(task)


@pytest.mark.parametrize("dtype", [torch.double, torch.long])
@pytest.mark.parametrize("loss", [nn.BCELoss(), nn.HuberLoss()])
def test_losses_of_one_output_take_flat_targets(loss: nn.Module, dtype: torch.dtype) -> None:
    model, (x, y) = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()).double(), data()
    flat = (y > 0).to(dtype)
    tasks = [blr.Task(model, (x, y), likelihood=loss) for y in (flat, flat.double()[:, None])]
    ours, theirs = (blr.sensitivity(t, fitted(t)).deviation for t in tasks)
    torch.testing.assert_close(ours, theirs)


def test_a_loss_that_broadcasts_flat_targets_is_told_so() -> None:
    squared = lambda f, y: (f - y).square().sum(-1)  # noqa: E731
    unfitted(blr.Task(mlp(outputs=1), data(), likelihood=squared), InputError, r"y\[:, None\]")


def test_models_without_parameters() -> None:
    for model in (nn.Flatten(), mlp().requires_grad_(False)):
        unfitted(task_of(model=model), ModelError, "has no trainable parameters; set")
    with pytest.raises(PosteriorError, match=r"0.weight: .* in the posterior, absent in the model"):
        blr.sensitivity(task_of(model=nn.Flatten()), posterior_for(N))


class Detached(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize("structure", ["diag", "kron", "full", "lowrank"])
def test_outputs_that_no_parameter_reaches(structure: str) -> None:
    task = blr.Task(Detached(mlp()), data())
    with pytest.raises(PosteriorError, match="detached"):
        blr.fit_laplace(task, structure=structure)


def test_batch_normalisation() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double().train()
    for norm, message in (
        (model[1], r"BatchNorm layer '1' is in training mode; call model.eval\(\)"),
        (nn.BatchNorm1d(5, track_running_stats=False), "uses batch statistics; .* or use GroupN"),
    ):
        model[1] = norm.double()
        refused(task_of(model=model), ModelError, message, posterior_for(N, model))
        unfitted(task_of(model=model), ModelError, message)
    for norm in (nn.BatchNorm1d(5), nn.GroupNorm(1, 5)):
        model[1] = norm.double()
        model.train()(data()[0])
        assert fitted(task_of(model=model.eval())).n_data == N


def test_an_exception_in_the_middle_leaves_the_model_as_it_was() -> None:
    """The fault comes late, in training mode, with gradients there and hooks in use."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    x, y = data(n=40)
    q = fitted(task_of(model=model, data=(x, y)))
    y = y.clone()
    y[29] = 7
    model(x).sum().backward()
    model.train()
    model[1].eval()
    model[0].register_forward_hook(lambda *_: None)
    task = task_of(model=model, data=(x, y), batch_size=10)
    message = r"must lie in 0 … 2 .* found 7"
    refused(task, DataError, message, q)
    unfitted(task, DataError, message)
    with untouched(model), pytest.raises(DataError, match=message):
        blr.what_if(task, q, relabel={29: 0})
    state = snapshot(model)
    assert state["mode of ''"] and not state["mode of '1'"]


# Posteriors.

GOOD: dict[str, Any] = {
    "mean": {"w": torch.zeros(2)},
    "precision": {"w": torch.ones(2)},
    "prior_precision": 1.0,
    "n_data": 5,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": {"w": torch.tensor([1.0, NAN])}}, "mean of 'w' holds NaN or inf"),
        ({"mean": {"w": torch.ones(2) * 1j}}, "the mean of 'w' must hold real numbers"),
        ({"mean": {}}, "at least one parameter"),
        ({"mean": [torch.ones(2)]}, "mean must be a dict of tensors by parameter name, got list"),
        ({"precision": {"w": torch.tensor([1.0, NAN])}}, "precision of 'w' holds NaN or inf"),
        ({"precision": {"w": torch.tensor([1.0, -2.0])}}, "'w' must be positive, .* -2; give"),
        ({"precision": {"w": torch.ones(3)}}, r"w: \(2,\) in the mean, \(3,\) in the precision"),
        ({"precision": {"v": torch.ones(2)}}, r"absent in the precision; v: absent in the mean"),
        ({"prior_precision": -1.0}, "prior_precision must be finite and at least 0, got -1.0"),
        ({"prior_precision": "1e-3 "}, "prior_precision must be a number"),
        ({"prior_precision": {"v": 1.0}}, r"missing \['w'\], unknown \['v'\]"),
        ({"record": "laplace"}, "record must be a dict, got str"),
        ({"n_data": -1}, "n_data must be"),
    ],
)
def test_bad_posteriors(changes: dict[str, Any], message: str) -> None:
    assert blr.Posterior(**GOOD).n_data == 5
    with pytest.raises(InputError, match=message):
        blr.Posterior(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_precision": 0.0}, "prior_precision must be finite and above 0, got 0.0"),
        ({"prior_precision": NAN}, "prior_precision must be finite and above 0"),
        ({"prior_precision": "small"}, "prior_precision must be a number"),
        ({"prior_precision": {"0.weight": 1.0}}, r"missing \['0.bias', '2.bias', '2.weight'\]"),
        ({"structure": "diagonal"}, "structure must be one of"),
        ({"curvature": "hessian"}, "curvature must be one of"),
    ],
)
def test_bad_arguments_of_fit_laplace(options: dict[str, Any], message: str) -> None:
    task = task_of()
    with untouched(task.model), pytest.raises(InputError, match=message):
        blr.fit_laplace(task, **{"prior_precision": 1.0, **options})


def test_a_posterior_of_another_model_or_of_other_data() -> None:
    renamed = nn.Sequential()
    for name, layer in zip(("a", "b", "c"), mlp().children(), strict=True):
        renamed.add_module(name, layer)
    grown = nn.Sequential(*mlp().children(), nn.Linear(3, 3).double())
    for task, message in (
        (task_of(model=mlp(hidden=6)), r"0.weight: \(5, 4\) in the posterior, \(6, 4\) in the mo"),
        (task_of(model=renamed), r"\(5, 4\) in the posterior, absent in the model; .*a.weight: ab"),
        (task_of(model=grown), r"another model: 3.weight: absent in the posterior, \(3, 3\) in"),
        (task_of(data=tuple(t[:11] for t in data())), "from n_data=12 examples, the task has 11"),
    ):
        refused(task, PosteriorError, message, fitted(task_of()))


def test_frozen_parameters_are_not_reported_as_differences() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    q = fitted(task_of(model=model))
    with pytest.raises(PosteriorError, match=r"2.weight: \(3, 5\)") as caught:
        blr.sensitivity(task_of(model=mlp(outputs=2)), q)
    assert "0.weight" not in str(caught.value)
    # nothing frozen here, but the posterior knows what was fixed
    assert len(blr.sensitivity(task_of(model=mlp()), q)) == N


@pytest.mark.parametrize(
    "call",
    [
        lambda t, q: blr.sensitivity(t, q),
        lambda t, q: blr.leave_one_out(t, q),
        lambda t, q: blr.what_if(t, q, remove=[0]),
        lambda t, q: blr.what_if_each(t, q),
    ],
)
def test_something_else_than_a_task_or_a_posterior(call) -> None:
    task = task_of()
    q = fitted(task)
    for other in (None, "posterior.safetensors", q.mean, task):
        with pytest.raises(InputError, match=r"posterior must be a blr_analysis.Posterior .* got"):
            call(task, other)
    for other in (task.model, data(), "task.py"):
        with pytest.raises(InputError, match="Task"):
            call(other, q)


def test_numbers_that_overflow() -> None:
    x, y = data()
    task = task_of(model=mlp().float(), data=(x * 100, y))
    wide = posterior_for(N, task.model, 1e-37)
    for analysis in (blr.sensitivity, blr.leave_one_out):
        with pytest.raises(ModelError, match=r"variance overflows float32; raise prior_precis"):
            analysis(task, wide)
    model, (x, y) = nn.Linear(4, 1).double(), data("poisson")
    task = task_of("poisson", model, data=(x * 1e4, y))
    message = r"log-rates reach .*, whose exp overflows torch.float64; check the weights"
    refused(task, ModelError, message, posterior_for(N, model))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: q.variance("weights"), "no parameter 'weights'; it covers"),
        (lambda q: q.sample(n=0), "n must be a positive integer, got 0"),
        (lambda q: q.to("cpu", torch.int64), r"floating-point torch\.dtype, got torch\.int64"),
        (lambda q: q.save(None), "path must be a file or folder name, got None"),
        (lambda q: q.load(3), "path must be a file or folder name, got 3"),
    ],
)
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_bad_questions_to_a_posterior(structure: str, call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(fitted(task_of(), structure))


def test_a_sparse_gradient() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = blr.IVON(model.parameters(), lr=0.1, ess=5)
    before = model.weight.detach().clone()
    with pytest.raises(BLRError, match="sparse"):
        with optimizer.sampled_params(train=True):
            model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, before)
    adam = torch.optim.SparseAdam(model.parameters())
    model.weight.grad = None
    model(torch.tensor([1])).sum().backward()
    adam.step()
    with pytest.raises(OptimizerError, match="no precision can be read from SparseAdam"):
        blr.Posterior.from_optimizer(adam, model, n_data=5, prior_precision=1.0)


# Files.


def test_foreign_files(tmp_path: Path) -> None:
    text, weights = tmp_path / "notes.safetensors", tmp_path / "weights.safetensors"
    text.write_text("these are my notes, and they are longer than a header would be")
    save_file({"w": torch.ones(2)}, str(weights))
    (tmp_path / "folder").mkdir()
    for path, message in (
        (text, "no safetensors file"),
        (weights, "no 'blr_analysis' record"),
        (tmp_path / "folder", "holds no 'blr_analysis' record"),
        (tmp_path / "absent.safetensors", "nothing is stored at"),
    ):
        with pytest.raises(StorageError, match=message):
            blr.Posterior.load(path)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


PICKLE = b"cos\nmkdir\n(S'exploded'\ntR."  # makes a folder when it is unpickled


def test_pickles_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("q.pt", "q.pth", "q.bin", "q.ckpt", "q.pkl", "q.pickle", "q.safetensors"):
        Path(name).write_bytes(PICKLE)
        for read in (blr.Posterior.load, lambda name: task_of(checkpoints=[name])):
            with pytest.raises(StorageError):
                list(getattr(read(name), "checkpoints", ()))
    with pytest.raises(StorageError, match="has the name of a pickle"):
        fitted(task_of()).save(tmp_path / "mine.pt")
    model = nn.Linear(4, 3)
    torch.save({"state": Bomb(), "param_groups": []}, "adam.pt")
    with pytest.raises(StorageError, match="weights_only=True"):
        blr.Posterior.from_checkpoint("adam.pt", model, n_data=5, prior_precision=1.0)
    assert not Path("exploded").exists() and not Path("mine.pt").exists()


# The analyses.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to change: give remove=, add= or relabel="),
        ({"remove": range(N)}, "remove selects all 12 examples; leave at least one, or add"),
        ({"remove": [0], "solver": "newton"}, "solver must be one of"),
        ({"remove": [0], "seeds": 0}, "seeds must be a positive integer"),
        ({"remove": [0], "passes": 0}, "passes must be a positive integer"),
        ({"remove": [0], "evaluate": data()}, "evaluate must be a blr_analysis.Task .* got tuple"),
        ({"add": data()}, "add must be a blr_analysis.Task with the new examples, got tuple"),
        ({"relabel": [1, 2]}, "relabel must be a dict from index to new target, got list"),
        ({"relabel": {N: 0}}, "relabel names example 12, but the examples are 0 … 11"),
        ({"relabel": {True: 0}}, "the mask relabel has 1 entries for 12 examples"),
        ({"relabel": {3: 1}, "remove": [2, 3]}, "example 3 is both removed and relabelled"),
        ({"relabel": {3: 5}}, "must lie in 0 … 2"),
        ({"relabel": {3: 0.5}}, "categorical targets must be integers"),
        ({"relabel": {3: "cat"}}, "'cat' is no number"),
    ],
)
def test_bad_what_ifs(options: dict[str, Any], message: str) -> None:
    task = task_of()
    q = fitted(task)
    with untouched(task.model), pytest.raises(InputError, match=message):
        blr.what_if(task, q, **options)


def test_other_tasks_than_the_posteriors() -> None:
    task, regression = task_of(), task_of("gaussian")
    q, real = fitted(task), fitted(regression)
    other = task_of(model=mlp(hidden=7))
    for call in (
        lambda: blr.what_if(task, q, remove=[0], evaluate=other),
        lambda: blr.what_if_each(task, q, evaluate=other),
    ):
        with untouched(other.model), pytest.raises(PosteriorError, match=r"another model: 0\.w"):
            call()
    counts = blr.Task(regression.model, data("gaussian"), likelihood="poisson")
    with pytest.raises(InputError, match=r"have the likelihood .*, the task Gaussian\(varia"):
        blr.what_if(regression, real, add=counts)


def test_weights_at_which_the_model_breaks_down() -> None:
    """A step so long that the outputs overflow is blamed on the step, not on the model."""
    torch.manual_seed(0)
    task = task_of("poisson", nn.Linear(4, 1).double())
    message = r"at the weights after the change the model.*The step is too long for this"
    with untouched(task.model), pytest.raises(PosteriorError, match=message):
        thin = posterior_for(N, task.model, 1e-8)
        blr.what_if(task, thin, remove=[0, 1, 2], solver="posterior")


def test_bad_arguments_of_single_examples() -> None:
    task = task_of()
    for correction in ("Cavity", None, 1):
        with pytest.raises(InputError, match="correction must be one of"):
            blr.leave_one_out(task, fitted(task), correction=correction)
    with pytest.raises(InputError, match="variance must be True, False or None, got str"):
        blr.sensitivity(task, fitted(task), variance="full")
