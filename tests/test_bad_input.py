"""Bad input: every case is refused by an exception of the package that says what to do.

Each message names the input; the model is left exactly as it was, and nothing is half-written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from models import graph, mlp
from snapshots import untouched
from torch import Tensor, nn
from torch.utils import data as tud

import blr_analysis as blr
from blr_analysis.errors import (
    BLRError,
    DataError,
    DeviceError,
    InputError,
    ModelError,
    PosteriorError,
    StorageError,
)

N = 12
NAN = float("nan")
INF = float("inf")


def data(kind: str = "categorical", n: int = N) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    if kind == "categorical":
        return x, torch.arange(n) % 3
    return x, torch.randint(2, (n, 1), generator=g).double()


def task_of(kind: str = "categorical", model: Any = None, **options: Any) -> blr.Task:
    model = mlp(outputs=3 if kind == "categorical" else 1) if model is None else model
    return blr.Task(model, options.pop("data", data(kind)), likelihood=kind, **options)


def fitted(task: blr.Task, structure: str = "diag") -> blr.Posterior:
    return blr.fit_laplace(task, structure=structure, prior_precision=1.0)


def posterior_for(n: int, model: nn.Module | None = None, precision: float = 1.0) -> blr.Posterior:
    mean = {name: p.detach() for name, p in (model or mlp()).named_parameters()}
    held = {name: torch.full_like(p, precision) for name, p in mean.items()}
    return blr.Posterior(mean, held, prior_precision=precision, n_data=n)


ANALYSES: tuple[Callable[[Any, Any], Any], ...] = (
    blr.sensitivity,
    blr.leave_one_out,
    lambda task, q: blr.what_if(task, q, remove=[0]),
    lambda task, q: blr.what_if_each(task, q),
)


def refused(task: blr.Task, error: type[BLRError], word: str, q: blr.Posterior) -> None:
    """Every analysis refuses the task with this message, and leaves the model alone."""
    for analysis in ANALYSES:
        with untouched(task.model), pytest.raises(error, match=word):
            analysis(task, q)


def unfitted(task: blr.Task, error: type[BLRError], word: str) -> None:
    """No structure is fitted to the task, which is left alone."""
    for structure in ("diag", "kron", "full", "lowrank"):
        with untouched(task.model), pytest.raises(error, match=word):
            fitted(task, structure)


# What a task is built from.


class Stream(tud.IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(4), 0)] * N)


class Rows(tud.Dataset):
    """Fifty, each made by a function of its index."""

    def __init__(self, item: Callable[[int], Tensor]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.item(i), i % 3


def failing(bad: int) -> Rows:
    return Rows({i: torch.ones(4).double() for i in range(50) if i != bad}.__getitem__)


WHOLE = tud.TensorDataset(*data())
SAMPLERS: tuple[dict[str, Any], ...] = (
    {"sampler": tud.SubsetRandomSampler(range(5))},
    {"sampler": tud.RandomSampler(WHOLE, replacement=True)},
    {"sampler": tud.SequentialSampler(range(5))},
    {"batch_sampler": [[0, 1], [2, 3]]},
    {"batch_size": None},
)
MASKED = np.ma.masked_array(np.zeros((5, 4)), mask=np.eye(5, 4))
DATA: list[tuple[Any, str]] = [
    (Stream(), "got Stream"),
    ((x for x in range(3)), "got generator"),
    ({"train": WHOLE, "test": WHOLE}, "one split, got dict"),
    ([], "hold no examples"),
    (tud.Subset(WHOLE, torch.ones(10) > 0), r"mask\.nonzero"),  # type: ignore[arg-type]
    ((torch.zeros(5, 4), torch.zeros(4)), r"same length, got \[5, 4\] and \[4\]"),
    ((torch.zeros(5, 4),) * 3, r"a pair \(X, y\), got 3 arrays"),
    ((torch.zeros(5, 4), ["a"] * 5), "y of .* cannot become a tensor"),
    (([[0.0], [1.0]], [0, 1]), "tensors or arrays"),
    (({"a": torch.zeros(5, 4)}, torch.zeros(5)), "X of .* is a dict; .* a list of dicts"),
    ((torch.zeros(5, 4), None), "y of .* is a NoneType; give a tensor"),
    ((torch.zeros(5, 4), {0, 1}), "y of .* is a set; give a tensor"),
    ((torch.eye(5, 4).to_sparse(), torch.zeros(5)), r"X of .* sparse .*to_dense\(\)"),
    ((torch.zeros(5, 4, device="meta"), torch.zeros(5)), "X of .* without numbers"),
    ((MASKED, torch.zeros(5)), r"X of .* masked numbers; .*filled"),
    ([(torch.zeros(3 + i), 0) for i in range(4)], "collate function failed on examples 0, 1"),
    (Rows(lambda i: torch.rand(4)), "differs when read again"),
    (failing(49), "failed on example 49 of 50"),
    *((tud.DataLoader(WHOLE, **options), "pass the dataset itself") for options in SAMPLERS),
]
FRAME = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": 1.0, "y": ["cat", "dog", "owl"]})
ARGUMENTS: list[tuple[dict[str, Any], type[BLRError], str]] = [
    ({"model": nn.Linear}, InputError, r"model must be a torch\.nn\.Module, got"),
    ({"batch_size": 0}, InputError, "batch_size must be a positive integer, got 0"),
    ({"memory_budget": 0}, InputError, "memory_budget must be a positive integer"),
    ({"device": "gpu"}, DeviceError, 'device .gpu. cannot be used here.*"cpu" can'),
    ({"device": "meta"}, DeviceError, "'0.weight' is on another device"),
    ({"forward": 3}, InputError, r"forward must be a function \(model, batch\)"),
    ({"recipe": "adamw"}, InputError, r"recipe must be a blr_analysis\.Recipe"),
    ({"checkpoints": 3}, InputError, "checkpoints must be a list"),
    ({"metadata": {"a": [1, 2]}}, InputError, "column 'a' must hold 12 values"),
    ({"metadata": {"a": 1}}, InputError, "column 'a' must be one value per"),
    ({"metadata": ["a"] * N}, InputError, "metadata must be columns by name"),
    ({"model": nn.LazyLinear(3)}, ModelError, "'weight'.*run a batch"),
    ({"target": "y"}, InputError, "no column"),
    ({"data": FRAME}, DataError, "target="),
    ({"data": FRAME, "target": "z"}, InputError, "one of 'a', 'b', 'y'"),
    ({"data": FRAME[["y"]].assign(a="x"), "target": "y"}, DataError, "of numbers"),
    ({"data": FRAME.assign(y=[None, "a", "a"]), "target": "y"}, DataError, "row 0 "),
    ({"data": FRAME.assign(y=[0, 0, NAN]), "target": "y"}, DataError, "row 2 "),
    ({"data": FRAME.rename(columns={"b": "a"}), "target": "y"}, InputError, "called 'a'"),
    ({"data": FRAME.rename(columns={"b": "y"}), "target": "y"}, InputError, "'y'"),
    ({"data": FRAME[:0], "target": "y"}, DataError, "no examples"),
    *(({"data": given}, DataError, word) for given, word in DATA),
]


@pytest.mark.parametrize(("options", "error", "word"), ARGUMENTS)
def test_what_no_task_is_made_of(options: dict, error: type[BLRError], word: str) -> None:
    with pytest.raises(error, match=word):
        task_of(**{"kind": "categorical", **options})


def test_unusual_numbers_that_are_no_fault() -> None:
    """NaN is not taken for random, nor what is large for infinite."""
    items = [(torch.tensor([NAN, 1.0, 2.0, 3.0]), 0)] * 5
    assert len(task_of(data=items)) == 5
    x, y = data()
    huge = task_of(data=(x.clamp(0.5, 1) * 1e308, y))
    batch = huge.fetch(torch.arange(N))
    assert not torch.isfinite(batch[0].sum())
    assert torch.isfinite(huge.run(batch, huge.parameters(), torch.arange(N))[0]).all()


# What a sweep meets: inputs, targets, and what the model makes of them.


def returns(change: Callable[[Tensor], Any]) -> nn.Module:
    """A linear layer whose output is changed on the way."""
    return graph(lambda m, x: change(m.layer(x)), layer=nn.Linear(4, 3))


def spoilt(value: float) -> dict[str, Any]:
    x, y = data()
    x[5, 1] = value
    return {"data": (x, y)}


SPOILT = "inputs hold NaN or inf in the example at index 5; drop"
FAULTY: list[tuple[dict[str, Any], type[BLRError], str]] = [
    (spoilt(NAN), DataError, SPOILT),
    (spoilt(INF), DataError, SPOILT),
    ({"data": (data()[0], torch.arange(N) % 4)}, DataError, r"in 0 … 2 \(the model has 3 log"),
    *(
        ({"model": returns(change)}, error, word)
        for change, error, word in (
            (lambda f: f * NAN, ModelError, "outputs are NaN or inf in .* examples, the first at"),
            (lambda f: f.argmax(-1), ModelError, "must return real numbers.* int64"),
            (lambda f: f.mean(), DataError, r"outputs of shape \[batch, C\], got \(\)"),
            (lambda f: f[:1], ModelError, r"returned 1 rows of outputs for .* examples"),
            (lambda f: f.undefined, ModelError, r"failed on a batch of .*: AttributeError"),
            (lambda f: f.detach(), ModelError, "a detach in forward"),
            (lambda f: (f - f.mean(0)) / f.std(0), ModelError, "mixes examples.*one alone"),
            (lambda f: f.squeeze(0), ModelError, "mixes examples.*one alone"),
        )
    ),
    ({"forward": lambda m, b: m(b[0])}, InputError, r"forward must return a tuple .*, got"),
    ({"forward": lambda m, b: (m(b[0]), None)}, DataError, "must be a tensor of num.*None"),
    ({"forward": lambda m, b: (m(b[0]), b[1].sum())}, DataError, r"targets \[\]"),
    ({"forward": lambda m, b: (m(b[0]), b[1][:-1])}, DataError, "give one each"),
    ({"forward": lambda m, b: (m(b["x"]), b["y"])}, ModelError, "failed on a batch .*TypeErr"),
    ({"data": tud.TensorDataset(*data(), data()[0])}, DataError, r"must be \(x, y\) or a dict"),
    ({"data": [{"x": a} for a in data()[0]]}, DataError, "needs 'labels'"),
    ({"data": (torch.zeros(N, 5), data()[1])}, ModelError, r"batch of \(\(.*, 5\) float32, "),
    ({"data": failing(8)}, DataError, "failed on example 8 of 50: KeyError: 8; each index"),
    (
        {"kind": lambda f, y: (f - y).square().sum(-1), "data": data(), "model": mlp(outputs=1)},
        InputError,
        r"y\[:, None\]",
    ),
    (
        {"kind": "poisson", "model": graph(lambda m, x: 1e6 * m.one(x), one=mlp(outputs=1))},
        ModelError,
        r"log-rates reach .*, whose exp overflows torch.float64; check the weights",
    ),
    ({"model": mlp().requires_grad_(False)}, ModelError, "set requires_grad, .*is_trainable=True"),
]


@pytest.mark.parametrize(("options", "error", "word"), FAULTY)
def test_what_a_sweep_refuses(options: dict[str, Any], error: type[BLRError], word: str) -> None:
    task = task_of(**options)
    unfitted(task, error, word)
    if "detach" not in word and any(p.requires_grad for p in task.model.parameters()):
        refused(task, error, word, posterior_for(len(task), task.model))


def test_weights_that_cannot_be_read() -> None:
    broken = mlp()
    mixed = mlp()
    weird = mlp()
    away = mlp().to("meta")
    broken[2].weight.data[0, 0] = NAN
    mixed[2].float()
    weird[0].weight = nn.Parameter(weird[0].weight.to(torch.complex64))
    for model, word in (
        (mixed, r"one dtype \(float64: .*, float32: 2.*float\(\)"),
        (weird, "real, .*complex64"),
        (away, "meta device"),
    ):
        for call in (lambda t: fitted(t, "kron"), lambda t: blr.sensitivity(t, posterior_for(N))):
            with pytest.raises(ModelError, match=word):
                call(blr.Task(model, data()))
    task = task_of(model=broken)
    unfitted(task, ModelError, r"the weights of '2.weight' hold")
    assert len(blr.sensitivity(task, posterior_for(N))) == N  # which takes the posterior's mean
    adam = torch.optim.Adam(broken.parameters())
    nn.utils.parameters_to_vector(broken.parameters()).sum().backward()
    adam.step()
    with untouched(broken), pytest.raises(ModelError, match=r"'2.weight' has .* not finite"):
        blr.Posterior.from_optimizer(adam, broken, n_data=N, prior_precision=1.0)


def test_losses_of_one_output_take_flat_targets() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()).double()
    x, y = data()
    flat = (y > 0).long()
    tasks = [
        blr.Task(model, (x, y), likelihood=nn.BCELoss()) for y in (flat, flat.double()[:, None])
    ]
    ours, theirs = (blr.sensitivity(t, fitted(t)).deviation for t in tasks)
    torch.testing.assert_close(ours, theirs)


# Posteriors, and what is asked of them.


def made(**changes: Any) -> Callable[..., Any]:
    given = {"mean": {"w": torch.zeros(2)}, "precision": {"w": torch.ones(2)}}
    given |= {"prior_precision": 1.0, "n_data": 5}
    return lambda task, q: blr.Posterior(**{**given, **changes})


def fit(**options: Any) -> Callable[..., Any]:
    return lambda task, q: blr.fit_laplace(task, **{"prior_precision": 1.0, **options})


def what_if(**options: Any) -> Callable[..., Any]:
    return lambda task, q: blr.what_if(task, q, **options)


CALLS: list[tuple[Callable[..., Any], str]] = [
    (made(mean={"w": torch.tensor([1.0, NAN])}), "mean of 'w' holds NaN or inf"),
    (made(mean={}), "at least one parameter"),
    (made(mean=[torch.ones(2)]), "mean must be a dict of tensors by parameter name, got list"),
    (made(precision={"w": torch.tensor([1.0, -2.0])}), "'w' must be positive, .* -2; give"),
    (made(precision={"w": torch.ones(3)}), r"w: \(2,\) in the mean, \(3,\) in the precision"),
    (made(precision={"v": torch.ones(2)}), r"absent in the precision; v: absent in the mean"),
    (made(prior_precision=-1.0), "prior_precision must be finite and at least 0, got -1.0"),
    (made(prior_precision="1e-3 "), "prior_precision must be a number"),
    (made(prior_precision={"v": 1.0}), r"missing \['w'\], unknown \['v'\]"),
    (made(record="laplace"), "record must be a dict, got str"),
    (made(n_data=-1), "n_data must be"),
    (fit(prior_precision=0.0), "prior_precision must be finite and above 0, got 0.0"),
    (fit(structure="diagonal"), "structure must be one of"),
    (fit(curvature="hessian"), "curvature must be one of"),
    (what_if(), "nothing to change: give remove=, add= or relabel="),
    (what_if(remove=range(N)), "remove selects all 12 examples; leave at least one, or add"),
    (what_if(remove=[0], solver="newton"), "solver must be one of"),
    (what_if(remove=[0], seeds=0), "seeds must be a positive integer"),
    (what_if(remove=[0], evaluate=data()), "evaluate must be a blr_analysis.Task .* got tuple"),
    (what_if(add=data()), "add must be a blr_analysis.Task with the new examples, got tuple"),
    (what_if(relabel=[1, 2]), "relabel must be a dict from index to new target, got list"),
    (what_if(relabel={3: 1}, remove=[2, 3]), "example 3 is both removed and relabelled"),
    (what_if(relabel={3: 5}), "must lie in 0 … 2"),
    (what_if(relabel={3: "cat"}), "'cat' is no number"),
    (lambda task, q: blr.suspicious(task, q, seed="a"), "seed must be a whole number"),  # type: ignore[arg-type]
    (lambda task, q: blr.calibrate(task, q, seed=-1), "seed must be a whole number"),
    (lambda task, q: blr.Monitor(task, examples=2, seed=0.5), "seed must be a whole number"),  # type: ignore[arg-type]
    (lambda task, q: blr.leave_one_out(task, q, correction="Cavity"), "correction must be one of"),
    (lambda task, q: blr.sensitivity(task, q, variance="full"), "variance must be True, False or"),  # type: ignore[arg-type]
    (lambda task, q: q.variance("weights"), "no parameter 'weights'; it covers"),
    (lambda task, q: q.sample(n=0), "n must be a positive integer, got 0"),
    (lambda task, q: q.to("cpu", torch.int64), r"floating-point torch\.dtype, got torch\.int64"),
    (lambda task, q: q.save(None), "path must be a file or folder name, got None"),
]


@pytest.mark.parametrize(("call", "word"), CALLS)
def test_bad_questions(call: Callable[..., Any], word: str) -> None:
    task = task_of()
    q = fitted(task)
    with untouched(task.model), pytest.raises(InputError, match=word):
        call(task, q)


def test_a_posterior_of_another_model() -> None:
    renamed = nn.Sequential()
    for name, layer in zip(("a", "b", "c"), mlp().children(), strict=True):
        renamed.add_module(name, layer)
    grown = nn.Sequential(*mlp().children(), nn.Linear(3, 3).double())
    for model, word in (
        (mlp(hidden=6), r"0.weight: \(5, 4\) in the posterior, \(6, 4\) in the mo"),
        (renamed, r"\(5, 4\) in the posterior, absent in the model; .*a.weight: ab"),
        (grown, r"another model: 3.weight: absent in the posterior, \(3, 3\) in"),
    ):
        refused(task_of(model=model), PosteriorError, word, posterior_for(N))
    frozen = mlp()
    frozen[0].requires_grad_(False)
    q = fitted(task_of(model=frozen))
    with pytest.raises(PosteriorError, match=r"2.weight: \(3, 5\)") as caught:
        blr.sensitivity(task_of(model=mlp(outputs=2)), q)
    assert "0.weight" not in str(caught.value)  # which is no difference


def test_weights_at_which_the_model_breaks_down() -> None:
    """A step so long that the outputs overflow is blamed on the step, not on the model."""
    torch.manual_seed(0)
    task = task_of("poisson", nn.Linear(4, 1).double())
    word = r"at the weights after the change the model.*The step is too long for this"
    with untouched(task.model), pytest.raises(PosteriorError, match=word):
        thin = posterior_for(N, task.model, 1e-8)
        blr.what_if(task, thin, remove=[0, 1, 2], solver="posterior")


# Files.


PICKLE = b"cos\nmkdir\n(S'exploded'\ntR."  # makes a folder when it is unpickled


def test_pickles_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("q.pt", "q.pth", "q.bin", "q.ckpt", "q.pkl", "q.pickle", "q.safetensors"):
        Path(name).write_bytes(PICKLE)
        for read in (blr.Posterior.load, lambda name: task_of(checkpoints=[name])):
            with pytest.raises(StorageError):
                read(name)
    with pytest.raises(StorageError, match="has the name of a pickle"):
        fitted(task_of()).save(tmp_path / "mine.pt")
    assert not Path("exploded").exists()
    assert not Path("mine.pt").exists()
