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


def every_analysis(task: blr.Task, q: blr.Posterior | None = None):
    """Each public analysis of a task as a function without arguments, by name."""
    posterior = q if q is not None else fitted(task_of())
    found = {
        "sensitivity": lambda: blr.sensitivity(task, posterior),
        "leave_one_out": lambda: blr.leave_one_out(task, posterior),
        "what_if": lambda: blr.what_if(task, posterior, remove=[0]),
        "what_if_each": lambda: blr.what_if_each(task, posterior),
    }
    if q is None:
        for s in ("diag", "kron", "full"):
            found[f"fit_laplace {s}"] = lambda s=s: fitted(task, s)
    return found


def refused(task: blr.Task, error: type[BLRError], message: str, q=None) -> None:
    """Every analysis refuses the task with this message, and leaves the model alone."""
    for name, analysis in every_analysis(task, q).items():
        with untouched(task.model), pytest.raises(error, match=message) as caught:
            analysis()
            pytest.fail(f"{name} accepted it")
        assert isinstance(caught.value, BLRError), name


# What a task is built from.


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(4), 0)] * N)


class Unsized(Dataset):
    def __getitem__(self, i: int):
        return torch.zeros(4), 0


class Backwards(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(N - 1, -1, -1))

    def __len__(self) -> int:
        return N


def loader(**options) -> DataLoader:
    return DataLoader(TensorDataset(*data()), **options)


WHOLE = TensorDataset(*data())
SAMPLERS = {
    "subset": {"sampler": SubsetRandomSampler(range(5))},
    "replacement": {"sampler": RandomSampler(WHOLE, replacement=True)},
    "shorter": {"sampler": SequentialSampler(range(5))},
    "reordered": {"sampler": Backwards()},
    "a list of batches": {"batch_sampler": [[0, 1], [2, 3]]},
    "distributed": {"sampler": torch.utils.data.DistributedSampler(WHOLE, num_replicas=2, rank=0)},
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_that_change_the_training_set(sampler: str) -> None:
    with pytest.raises(DataError, match=r"draws its examples through .*; pass the dataset itself"):
        task_of(data=loader(**SAMPLERS[sampler]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Stream(), "got Stream; examples are addressed by index"),
        (Unsized(), "got Unsized; examples are addressed by index"),
        ((x for x in range(3)), "got generator"),
        ("train.csv", "got str"),
        ({"train": WHOLE, "test": WHOLE}, "got dict; .* take one split"),
        ([], "hold no examples"),
        (Subset(WHOLE, []), "hold no examples"),
        (Subset(WHOLE, torch.ones(10) > 0), r"mask\.nonzero"),
        (Subset(Subset(WHOLE, [True, False] * 5), [0, 1, 2]), r"mask\.nonzero"),
        ((torch.zeros(5, 4), torch.zeros(4)), r"same length, got \[5, 4\] and \[4\]"),
        ((torch.zeros(5, 4), torch.tensor(1)), "same length"),
        ((torch.zeros(5, 4), torch.zeros(5), torch.zeros(5)), r"a pair \(X, y\), got 3 arrays"),
        ((torch.zeros(5, 4), ["a"] * 5), "y of .* cannot become a tensor"),
        ((pd.DataFrame({"a": ["b"]}), torch.zeros(1)), "X of .* cannot become"),
        (([[0.0], [1.0]], [0, 1]), "tensors or arrays"),
        ([[[0.0], [1.0]], [0, 1]], "tensors or arrays"),
        (loader(batch_size=None), "batch_size=None"),
    ],
)
def test_data_that_cannot_be_addressed(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        task_of(data=given)


class Failing(Dataset):
    """Fails on one index, late."""

    def __init__(self, bad: int = 7) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int):
        if i == self.bad:
            raise FileNotFoundError("no such image: cat.png")
        return torch.full((4,), float(i), dtype=torch.float64), i % 3


def test_a_dataset_that_raises_on_an_index() -> None:
    message = r"failed on example 8 of 50: FileNotFoundError: no such image: cat.png; each index"
    refused(task_of(data=Failing(8)), DataError, message, posterior_for(50))
    with pytest.raises(DataError, match=r"failed on example 49 of 50"):
        task_of(data=Failing(49))  # among those that are read twice when the task is built


def posterior_for(n: int, model: nn.Module | None = None) -> blr.Posterior:
    model = mlp() if model is None else model
    return blr.Posterior(
        {name: p.detach() for name, p in model.named_parameters()},
        {name: torch.ones_like(p) for name, p in model.named_parameters()},
        prior_precision=1.0,
        n_data=n,
    )


def test_a_collate_function_that_fails() -> None:
    ragged = [(torch.zeros(3 + i), 0) for i in range(4)]
    with pytest.raises(DataError, match=r"collate function failed on examples 0, 1, 2, 3: Runt"):
        task_of(data=ragged)


class Augmented(Dataset):
    """Flips every example at random."""

    def __init__(self, size: int = 30) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int):
        x = torch.arange(4, dtype=torch.float64) + i
        return (x if torch.rand(()) < 0.5 else x.flip(0)), i % 3


def test_random_augmentation_is_noticed() -> None:
    torch.manual_seed(0)
    for _ in range(20):  # a miss in 256
        with pytest.raises(DataError, match="differ when read again"):
            task_of(data=Augmented())


def test_data_with_nan_are_not_taken_for_random() -> None:
    items = [(torch.tensor([NAN, 1.0, 2.0, 3.0]), 0)] * 5
    assert len(task_of(data=items)) == 5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"likelihood": "softmax"}, InputError, "likelihood must be one of 'categorical'"),
        ({"batch_size": 0}, InputError, "batch_size must be a positive integer, got 0"),
        ({"batch_size": 2.5}, InputError, "batch_size must be a positive integer, got 2.5"),
        ({"batch_size": True}, InputError, "batch_size must be a positive integer, got True"),
        ({"device": "gpu"}, DeviceError, "device 'gpu' is unknown"),
        ({"likelihood": nn.CrossEntropyLoss}, InputError, r"call it: CrossEntropyLoss\(\)"),
        ({"device": "meta"}, DeviceError, "'0.weight' is on another device"),
        ({"forward": 3}, InputError, r"forward must be a function \(model, batch\)"),
        ({"metadata": {"a": [1, 2]}}, InputError, "column 'a' has 2 values for 12 examples"),
        ({"metadata": {"a": 1}}, InputError, "column 'a' must be one value per"),
        ({"metadata": ["a"] * N}, InputError, "metadata must be columns by name"),
        ({"metadata": pd.DataFrame({"a": [1]})}, InputError, "'a' has 1 values for 12 examples"),
    ],
)
def test_bad_arguments_of_a_task(
    options: dict[str, Any], error: type[BLRError], message: str
) -> None:
    with pytest.raises(error, match=message):
        blr.Task(mlp(), data(), **options)


@pytest.mark.parametrize("model", [None, lambda x: x, nn.Linear, "model.pt"])
def test_a_model_that_is_none(model: Any) -> None:
    with pytest.raises(InputError, match=r"model must be a torch\.nn\.Module, got"):
        blr.Task(model, data())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_where_there_is_none(tmp_path: Path) -> None:
    message = r"device 'cuda' cannot be used here .*; use device=\"cpu\""
    with pytest.raises(DeviceError, match=message):
        task_of(device="cuda")
    with pytest.raises(DeviceError, match=message):
        fitted(task_of()).to("cuda")


# Inputs and targets.


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_inf_in_the_inputs(kind: str, value: float) -> None:
    x, y = data(kind)
    x = x.clone()
    x[5, 1] = value
    task = task_of(kind, data=(x, y))
    q = fitted(task_of(kind))
    refused(task, DataError, "inputs hold NaN or inf in 1 examples, the first at index 5; drop", q)
    for structure in ("diag", "kron", "full"):
        with untouched(task.model), pytest.raises(DataError, match="the first at index 5"):
            fitted(task, structure)
    test = task_of(kind, model=task.model, data=(x, y))
    with pytest.raises(DataError, match="the first at index 5"):
        blr.what_if(task_of(kind, model=task.model), q, remove=[0], evaluate=test)


def test_large_inputs_are_not_taken_for_infinite() -> None:
    x, y = data()
    huge = task_of(data=(x.clamp(0.5, 1) * 1e308, y))
    batch = huge.fetch(torch.arange(N))
    assert not torch.isfinite(batch[0].sum()) and torch.isfinite(batch[0]).all()
    outputs, _ = huge.run(batch, huge.parameters(), torch.arange(N))
    assert torch.isfinite(outputs).all()


TARGETS = {
    "categorical": [
        (torch.arange(N) % 4, r"must lie in 0 … 2 \(the model has 3 logits\), found 3"),
        (torch.zeros(N, 3), "soft targets"),
        (torch.zeros(N, 2, dtype=torch.long), "one class index per example"),
    ],
    "bernoulli": [(torch.full((N,), NAN), "bernoulli targets contain NaN or inf; drop or mend")],
    "gaussian": [(torch.zeros(N, 3), "do not fit outputs .* give one target per output")],
    "poisson": [(torch.full((N,), -1.0), "poisson targets must be counts 0, 1, 2")],
}  # the rest in test_likelihoods


@pytest.mark.parametrize(
    ("kind", "targets", "message"), [(k, t, m) for k in TARGETS for t, m in TARGETS[k]]
)
def test_bad_targets(kind: str, targets: Tensor, message: str) -> None:
    model = mlp(outputs=3 if kind == "categorical" else 1)
    task = task_of(kind, model, data=(data(kind)[0], targets))
    refused(task, DataError, message, fitted(task_of(kind)))
    with untouched(model), pytest.raises(DataError, match=message):
        fitted(task)


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
        (lambda f: (f, f), ModelError, r"got \(\(.*, 3\) float64.*"),
        (lambda f: None, ModelError, "must return a tensor of real numbers.* NoneType"),
        (lambda f: f.mean(), DataError, r"outputs of shape \[batch, C\], got \(\)"),
        (lambda f: f[:, :0], DataError, r"outputs of shape \[batch, C\], got \(.*, 0\)"),
        (lambda f: f[:1], ModelError, r"returned 1 rows of outputs for .* examples"),
        (lambda f: f - f.mean(0), ModelError, "changes with its batch"),
        (lambda f: f + torch.randn_like(f), ModelError, "call to call"),
        (lambda f: f.undefined, ModelError, r"failed on a batch of .*: AttributeError"),
    ],
)
def test_models_that_return_something_else(change, error: type[BLRError], message: str) -> None:
    torch.manual_seed(0)
    model = Returns(change)
    refused(task_of(model=model), error, message, posterior_for(N, model))
    with untouched(model), pytest.raises(error, match=message):
        fitted(task_of(model=model))


@pytest.mark.parametrize(
    ("forward", "error", "message"),
    [
        (
            lambda m, b: m(b[0]),
            InputError,
            r"forward must return a tuple \(outputs, targets\), got",
        ),
        (lambda m, b: [m(b[0]), b[1]], InputError, "forward must return a tuple"),
        (lambda m, b: (m(b[0]), None), DataError, "targets must be a tensor of numbers, got None"),
        (lambda m, b: (m(b[0]), ["a"] * len(b[1])), DataError, "targets must be a tensor of num"),
        (lambda m, b: (m(b[0]), b[1].sum()), DataError, r"targets \(\)"),
        (lambda m, b: (m(b[0]), b[1][:-1]), DataError, "one each per example"),
        (lambda m, b: (m(b[0])[:-1], b[1][:-1]), ModelError, "rows of outputs for"),
        (lambda m, b: (m(b["x"]), b["y"]), ModelError, "failed on a batch of .*: TypeError"),
    ],
)
def test_forward_functions_that_return_something_else(
    forward, error: type[BLRError], message: str
) -> None:
    refused(task_of(forward=forward), error, message)


def test_batches_that_the_default_forward_cannot_read() -> None:
    x, y = data()
    for given, message in (
        (TensorDataset(x, x, y), r"cannot read a batch of (tuple|list)"),
        (x, "cannot read a batch of Tensor"),
        ([{"x": a, "target": b} for a, b in zip(x, y, strict=True)], "needs a 'labels' entry"),
    ):
        with pytest.raises(DataError, match=message):
            fitted(task_of(data=given))


def test_inputs_of_another_shape() -> None:
    message = r"failed on a batch of \(\(.*, 5\) float32, .* int64\): RuntimeError"
    model = nn.Sequential(nn.Identity(), mlp())
    with pytest.raises(ModelError, match=message):
        fitted(task_of(model=model, data=(torch.zeros(N, 5), torch.zeros(N).long())))


@pytest.mark.parametrize("value", [NAN, INF])
def test_nan_and_inf_in_the_weights(value: float) -> None:
    model = mlp()
    q = fitted(task_of(model=model))
    model[2].weight.data[0, 0] = value
    task = task_of(model=model)
    for structure in ("diag", "kron", "full"):
        with untouched(model), pytest.raises(ModelError, match=r"the weights of '2.weight' hold"):
            fitted(task, structure)
    adam = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    adam.step()
    with untouched(model), pytest.raises(BLRError, match=r"'2.weight' has .* not finite"):
        blr.Posterior.from_optimizer(adam, model, n_data=N, prior_precision=1.0)
    assert len(blr.sensitivity(task, q)) == N  # which takes the posterior's mean


def test_several_dtypes_complex_weights_and_the_meta_device() -> None:
    mixed = mlp()
    mixed[2].float()
    weird = mlp()
    weird[0].weight = nn.Parameter(weird[0].weight.to(torch.complex64))
    for model, message in (
        (mixed, r"several dtypes \(float64: 0.weight, float32: 2.weight\)"),
        (weird, "'0.weight' is torch.complex64; give real numbers"),
        (mlp().to("meta"), "'0.weight' is on the meta device; load the weights"),
    ):
        task = blr.Task(model, data())
        for structure in ("diag", "kron", "full"):
            with pytest.raises(ModelError, match=message):
                fitted(task, structure)
        with pytest.raises(ModelError, match=message):
            blr.sensitivity(task, posterior_for(N))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(N, 5), "takes 4 features, X has 5"),
        (torch.zeros(N, 4, dtype=torch.int), r"X.float\(\)"),
        (torch.zeros(N, 4, 3), "takes 4 features, X has 3"),
    ],
)
def test_inputs_that_the_first_layer_does_not_take(x: torch.Tensor, message: str) -> None:
    refused(task_of(data=(x, data()[1])), ModelError, message, posterior_for(N))


@pytest.mark.parametrize("dtype", [torch.double, torch.long])
@pytest.mark.parametrize("loss", [nn.BCELoss(), nn.HuberLoss()])
def test_losses_of_one_output_take_flat_targets(loss: nn.Module, dtype: torch.dtype) -> None:
    model, (x, y) = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()).double(), data()
    flat = (y > 0).to(dtype)
    tasks = [blr.Task(model, (x, y), likelihood=loss) for y in (flat, flat.double()[:, None])]
    ours, theirs = (blr.sensitivity(t, fitted(t)).deviation for t in tasks)
    torch.testing.assert_close(ours, theirs)


def test_a_loss_that_broadcasts_flat_targets_is_told_so() -> None:
    def squared(f: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (f - y).square().sum(-1)

    task = blr.Task(nn.Linear(4, 1).double(), data(), likelihood=squared)
    with pytest.raises(InputError, match=r"y\[:, None\]"):
        fitted(task)


def test_models_without_parameters() -> None:
    frozen = mlp().requires_grad_(False)
    for model in (nn.Flatten(), frozen):
        with untouched(model), pytest.raises(ModelError, match="has no trainable parameters; set"):
            fitted(task_of(model=model))
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
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    message = r"BatchNorm layer '1' is in training mode; call model.eval\(\)"
    refused(task_of(model=model.train()), ModelError, message, posterior_for(N, model))
    with untouched(model), pytest.raises(ModelError, match=message):
        fitted(task_of(model=model))
    model[1] = nn.BatchNorm1d(5, track_running_stats=False).double()
    message = "BatchNorm layer '1' uses batch statistics; .*track_running_stats=True .* GroupNorm"
    for mode in (True, False):
        refused(task_of(model=model.train(mode)), ModelError, message, posterior_for(N, model))
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
    for analysis in (
        lambda: blr.sensitivity(task, q),
        lambda: blr.leave_one_out(task, q),
        lambda: blr.what_if(task, q, remove=[0, 29]),
        lambda: blr.what_if(task, q, remove=[0]),
        lambda: blr.what_if(task, q, relabel={29: 0}),
        lambda: blr.what_if_each(task, q),
        lambda: blr.fit_laplace(task, prior_precision=1.0),
    ):
        with untouched(model), pytest.raises(DataError, match=r"must lie in 0 … 2 .* found 7"):
            analysis()
    state = snapshot(model)
    assert state["mode of ''"] and not state["mode of '1'"]


# Posteriors.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": {"w": torch.tensor([1.0, NAN])}}, "mean of 'w' holds NaN or inf"),
        ({"mean": {"w": torch.ones(2) * 1j}}, "the mean of 'w' must hold real numbers"),
        ({"mean": {}}, "at least one parameter"),
        ({"mean": [torch.ones(2)]}, "mean must be a dict of tensors by parameter name, got list"),
        ({"precision": {"w": torch.tensor([1.0, NAN])}}, "precision of 'w' holds NaN or inf"),
        ({"precision": {"w": torch.tensor([1.0, -2.0])}}, "'w' must be positive, .* -2; give"),
        ({"precision": {"w": torch.ones(2) * 1j}}, "precision of 'w' must hold real numbers"),
        (
            {"precision": {"w": torch.ones(3)}},
            r"disagree: w: \(2,\) in the mean, \(3,\) in the precision",
        ),
        (
            {"precision": {"v": torch.ones(2)}},
            r"w: \(2,\) in the mean, absent in the precision; v: absent in the mean, \(2,\) in",
        ),
        ({"precision": torch.ones(2)}, "precision must be a dict of tensors .* got Tensor"),
        ({"prior_precision": -1.0}, "prior_precision must be finite and at least 0, got -1.0"),
        ({"prior_precision": "1e-3 "}, "prior_precision must be a number"),
        ({"prior_precision": {"v": 1.0}}, r"missing \['w'\], unknown \['v'\]"),
        ({"prior_precision": {"w": torch.ones(3)}}, "prior_precision of 'w' must be a number"),
        ({"record": "laplace"}, "record must be a dict, got str"),
        ({"n_data": -1}, "n_data must be"),
        ({"n_data": 1.5}, "n_data must be"),
    ],
)
def test_bad_posteriors(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "mean": {"w": torch.zeros(2)},
        "precision": {"w": torch.ones(2)},
        "prior_precision": 1.0,
        "n_data": 5,
    }
    assert blr.Posterior(**good).n_data == 5
    with pytest.raises(InputError, match=message) as caught:
        blr.Posterior(**{**good, **changes})
    assert isinstance(caught.value, PosteriorError) or "record" in changes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior_precision": 0.0}, "prior_precision must be finite and above 0, got 0.0"),
        ({"prior_precision": NAN}, "prior_precision must be finite and above 0"),
        ({"prior_precision": "small"}, "prior_precision must be a number"),
        ({"prior_precision": True}, "prior_precision must be a number"),
        ({"prior_precision": {"0.weight": 1.0}}, r"missing \['0.bias', '2.bias', '2.weight'\]"),
        ({"structure": "diagonal"}, "structure must be one of"),
        ({"curvature": "hessian"}, "curvature must be one of"),
        ({"samples": 0, "curvature": "mc_fisher"}, "samples must be a positive integer"),
        ({"generator": 3, "curvature": "mc_fisher"}, r"generator must be a torch\.Generator, got"),
        ({"memory_budget": -5}, "memory_budget must be a positive integer, got -5"),
    ],
)
def test_bad_arguments_of_fit_laplace(options: dict[str, Any], message: str) -> None:
    task = task_of()
    with untouched(task.model), pytest.raises(InputError, match=message):
        blr.fit_laplace(task, **{"prior_precision": 1.0, **options})


def test_a_posterior_of_another_model_lists_names_and_shapes() -> None:
    q = fitted(task_of(model=mlp(hidden=6)))
    message = r"another model: 0.weight: \(6, 4\) in the posterior, \(5, 4\) in the model; 0.bias"
    refused(task_of(), PosteriorError, message, q)


def test_a_posterior_whose_model_was_renamed_or_grew() -> None:
    q = fitted(task_of())
    renamed = nn.Sequential()
    for name, layer in zip(("a", "b", "c"), mlp().children(), strict=True):
        renamed.add_module(name, layer)
    message = r"0.weight: \(5, 4\) in the posterior, absent in the model; .*a.weight: absent in the"
    refused(task_of(model=renamed), PosteriorError, message, q)
    grown = nn.Sequential(*mlp().children(), nn.Linear(3, 3).double())
    message = r"another model: 3.weight: absent in the posterior, \(3, 3\) in the model"
    refused(task_of(model=grown), PosteriorError, message, q)


def test_frozen_parameters_are_not_reported_as_differences() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    q = fitted(task_of(model=model))
    other = mlp(outputs=2)
    with pytest.raises(PosteriorError) as caught:
        blr.sensitivity(task_of(model=other), q)
    assert "0.weight" not in str(caught.value) and "2.weight: (3, 5)" in str(caught.value)
    other = mlp()  # nothing frozen here, but the posterior knows what was fixed
    assert len(blr.sensitivity(task_of(model=other), q)) == N


def test_n_data_that_is_not_the_tasks() -> None:
    q = fitted(task_of())
    message = "learned from n_data=12 examples, the task has 11"
    refused(task_of(data=tuple(t[:11] for t in data())), PosteriorError, message, q)


@pytest.mark.parametrize(
    "call",
    [
        lambda t, q: blr.sensitivity(q, t),
        lambda t, q: blr.sensitivity(t, None),
        lambda t, q: blr.leave_one_out(t, "posterior.safetensors"),
        lambda t, q: blr.what_if(t, q.mean, remove=[0]),
        lambda t, q: blr.what_if_each(t, t),
    ],
)
def test_something_else_than_a_posterior(call) -> None:
    task = task_of()
    with pytest.raises(InputError, match=r"posterior must be a blr_analysis.Posterior .* got"):
        call(task, fitted(task))


@pytest.mark.parametrize(
    "call",
    [
        lambda t, q: blr.sensitivity(t.model, q),
        lambda t, q: blr.leave_one_out(data(), q),
        lambda t, q: blr.what_if(None, q, remove=[0]),
        lambda t, q: blr.what_if_each("task.py", q),
        lambda t, q: blr.fit_laplace(t.model, prior_precision=1.0),
    ],
)
def test_something_else_than_a_task(call) -> None:
    task = task_of()
    with pytest.raises(InputError, match=r"task must be a blr_analysis.Task, got"):
        call(task, fitted(task))


def test_variances_that_overflow() -> None:
    model = mlp().float()
    x, y = data()
    wide = blr.Posterior(
        {n: p.detach() for n, p in model.named_parameters()},
        {n: torch.full_like(p, 1e-37) for n, p in model.named_parameters()},
        prior_precision=1e-37,
        n_data=N,
    )
    task = task_of(model=model, data=(x * 100, y))
    for analysis in (blr.sensitivity, blr.leave_one_out):
        with pytest.raises(ModelError, match=r"variance overflows float32; raise prior_precis"):
            analysis(task, wide, progress=False)


def test_rates_that_overflow() -> None:
    model = nn.Linear(4, 1).double()
    x, y = data("poisson")
    task = task_of("poisson", model, data=(x * 1e4, y))
    message = r"log-rates reach .*, whose exp overflows torch.float64; check the weights"
    refused(task, ModelError, message, posterior_for(N, model))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: q.variance("weights"), "no parameter 'weights'; it covers"),
        (lambda q: q.sample(n=0), "n must be a positive integer, got 0"),
        (lambda q: q.sample(generator=3), r"generator must be a torch\.Generator, got int"),
        (lambda q: q.to("cpu", torch.int64), r"floating-point torch\.dtype, got torch\.int64"),
        (lambda q: q.save(None), "path must be a file or folder name, got None"),
        (lambda q: q.load(3), "path must be a file or folder name, got 3"),
        (lambda q: q.precision_product(3), "expected tensors by parameter name, got int"),
        (lambda q: q.covariance_product({}), "needs '0.weight' of shape"),
    ],
)
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_bad_questions_to_a_posterior(structure: str, call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(fitted(task_of(), structure))


# Optimizers.


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
    text = tmp_path / "notes.safetensors"
    text.write_text("these are my notes, and they are longer than a header would be")
    weights = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(2)}, str(weights))
    folder = tmp_path / "folder"
    folder.mkdir()
    for path, message in (
        (text, "truncated or is no safetensors file"),
        (weights, "no 'blr_analysis' record"),
        (folder, "holds no precision_config.json"),
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
        with pytest.raises(StorageError):
            blr.Posterior.load(name)
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
        ({"remove": [0], "solver": "posterior", "steps": 2}, "steps=2: solver='posterior' makes"),
        ({"remove": [0], "solver": "posterior", "passes": 5}, "passes= bounds solver='cg'"),
        ({"remove": [0], "steps": 0}, "steps must be a positive integer, got 0"),
        ({"remove": [0], "solver": "cg", "passes": 1}, "needs passes of at least 2"),
        (
            {"remove": [0], "evaluate": data()},
            "evaluate must be a blr_analysis.Task with .* got tuple",
        ),
        ({"add": data()}, "add must be a blr_analysis.Task with the new examples, got tuple"),
        ({"relabel": [1, 2]}, "relabel must be a dict from index to new target, got list"),
        ({"relabel": {N: 0}}, "relabel names example 12, but the examples are 0 … 11"),
        ({"relabel": {True: 0}}, "the mask relabel has 1 entries for 12 examples"),
        ({"relabel": {3: 1}, "remove": [2, 3]}, "example 3 is both removed and relabelled"),
        ({"relabel": {3: 5}}, "relabel must map indices to targets: .* must lie in 0 … 2"),
        ({"relabel": {3: 0.5}}, "relabel must map .*: categorical targets must be integers"),
        ({"relabel": {3: "cat"}}, "'cat' is no number"),
        ({"relabel": {3: 0, 4: [0, 1]}}, "relabel must map indices to targets"),
    ],
)
def test_bad_what_ifs(options: dict[str, Any], message: str) -> None:
    task = task_of()
    q = fitted(task)
    with untouched(task.model), pytest.raises(InputError, match=message):
        blr.what_if(task, q, **options)


def test_added_examples_of_another_likelihood() -> None:
    task = task_of("gaussian")
    q = fitted(task)
    for kind in ("poisson", blr.Gaussian(variance=2.0)):
        new = blr.Task(task.model, data("gaussian"), likelihood=kind)
        with pytest.raises(InputError, match=r"have the likelihood .*, the task Gaussian\(varia"):
            blr.what_if(task, q, add=new)


def test_evaluating_on_a_task_of_another_model() -> None:
    task = task_of()
    test = task_of(model=mlp(hidden=7))
    for call in (
        lambda: blr.what_if(task, fitted(task), remove=[0], evaluate=test),
        lambda: blr.what_if_each(task, fitted(task), evaluate=test),
    ):
        with (
            untouched(task.model),
            untouched(test.model),
            pytest.raises(PosteriorError, match=r"another model: 0.weight: \(5, 4\) in the po"),
        ):
            call()


def test_weights_at_which_the_model_breaks_down() -> None:
    """A step so long that the outputs overflow is blamed on the step, not on the model."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    task = task_of("poisson", model)
    thin = blr.Posterior(
        task.parameters(),
        {n: torch.full_like(p, 1e-8) for n, p in task.parameters().items()},
        prior_precision=1e-8,
        n_data=N,
    )
    with (
        untouched(model),
        pytest.raises(
            PosteriorError,
            match=r"at the weights after the change the model.*The step is too long for this",
        ),
    ):
        blr.what_if(task, thin, remove=[0, 1, 2], solver="posterior")


@pytest.mark.parametrize("correction", ["Cavity", "none", None, 1])
def test_unknown_corrections(correction: Any) -> None:
    task = task_of()
    with pytest.raises(InputError, match="correction must be one of"):
        blr.leave_one_out(task, fitted(task), correction=correction)


@pytest.mark.parametrize("name", ["chunk_size", "memory_budget"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "many", NAN])
def test_bad_sizes(name: str, value: Any) -> None:
    task = task_of()
    for analysis in (blr.sensitivity, blr.leave_one_out):
        with pytest.raises(InputError, match=f"{name} must be a positive integer, got {value!r}"):
            analysis(task, fitted(task), **{name: value})


def test_variance_is_asked_for_or_not() -> None:
    task = task_of()
    with pytest.raises(InputError, match="variance must be True, False or None, got str"):
        blr.sensitivity(task, fitted(task), variance="full")
