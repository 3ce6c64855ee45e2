"""What a task takes, in what order it hands it out, and how it runs the model."""

from __future__ import annotations

import io
from collections import namedtuple
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from models import mlp
from oracles import relative
from parts import graph, normal
from torch import Tensor, nn
from torch.utils import data as tud

from blr_analysis.data import read_data
from blr_analysis.errors import DataError, ModelError
from blr_analysis.likelihoods import Gaussian
from blr_analysis.task import Task

X, Y = normal(10, 4), torch.arange(10) % 3
ALL = torch.arange(10)


class Rows(tud.Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return X[index], int(Y[index])


def order_of(task: Task, chosen: Tensor | None = None) -> Tensor:
    """The inputs in the order in which the task hands them out."""
    return torch.cat([batch[0] for _, batch in task.batches(4, chosen)])


def run(task: Task, indices: Tensor = ALL, **params: Tensor) -> tuple[Tensor, Tensor]:
    return task.run(task.fetch(indices), params or task.parameters())


WHOLE = tud.TensorDataset(X, Y)


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        [X, Y],
        (X.numpy(), Y.numpy()),
        WHOLE,
        Rows(),
        list(zip(X, Y.tolist(), strict=True)),
        tud.DataLoader(WHOLE, batch_size=3),
        tud.DataLoader(WHOLE, batch_size=3, shuffle=True, drop_last=True),
        tud.DataLoader(Rows(), sampler=tud.RandomSampler(range(10))),
        tud.DataLoader(Rows(), sampler=tud.SequentialSampler(range(10))),
    ],
)
def test_every_form_is_handed_out_in_dataset_order(data) -> None:
    task = Task(mlp(), data)
    assert len(task) == task.n_data == 10
    assert torch.equal(order_of(task), X)
    assert torch.equal(torch.cat([i for i, _ in task.batches(4)]), ALL)
    chosen = torch.tensor([7, 2, 2, 9, 1])
    assert [i.tolist() for i, _ in task.batches(3, chosen)] == [[7, 2, 2], [9, 1]]
    assert torch.equal(order_of(task, chosen), X[chosen])


class Tagger(nn.Module):
    """A model as Hugging Face's are: keyword inputs, an object with ``.logits``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, features: Tensor, scale: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.body(features) * scale, loss=None)


Pair = namedtuple("Pair", ["inputs", "target"])


def test_batches_of_every_form_are_run() -> None:
    model, pairs = mlp(), list(zip(X, Y, strict=True))
    truth, one = model(X).detach(), torch.ones(1).double()
    dicts = [{"features": x, "scale": one, "labels": y} for x, y in pairs]
    mixed = [({"features": x, "scale": one}, y) for x, y in pairs]
    named = [Pair({"a": x}, {"deep": [y]}) for x, y in pairs]

    def forward(model: nn.Module, b: Pair) -> tuple[Tensor, Tensor]:
        return model(b.inputs["a"]), b.target["deep"][0]

    for task in (
        Task(Tagger(), dicts),
        Task(Tagger(), mixed),
        Task(model, named, forward=forward),
        Task(model, (X, Y)),
    ):
        outputs, targets = run(task)
        assert relative(outputs, truth) < 1e-12 and torch.equal(targets, Y)
    assert run(Task(model, (X.float(), Y)))[0].dtype == torch.float64


def test_run_is_at_the_given_parameters_and_buffers_which_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().eval()
    own, task = deepcopy(model.state_dict()), Task(model, (X, Y))
    other = {"0.bias": torch.ones(3).double(), "1.running_mean": torch.full((3,), 2.0).double()}
    outputs, _ = run(task, **other)
    assert all(torch.equal(t, own[n]) for n, t in model.state_dict().items())
    model.load_state_dict(own | other)
    torch.testing.assert_close(outputs, model(X).detach())
    torch.testing.assert_close(run(Task(model, (X, Y)).holding(own))[0], run(task, **own)[0])


def test_single_outputs_get_their_dimension_and_inputs_are_left_alone() -> None:
    x = X.clone()
    model = graph(lambda m, x: m.one(x.relu_()).squeeze(-1), one=nn.Linear(4, 1))
    task = Task(model, (x, normal(10)), likelihood="gaussian")
    (first, targets), (again, _) = (run(task) for _ in range(2))
    assert first.shape == targets.shape == (10, 1)
    assert torch.equal(first, again) and torch.equal(x, X)


def test_parameters_are_the_trainable_ones_and_tied_ones_once() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model.append(nn.Linear(3, 3).double())
    model[3].bias = model[2].bias
    found = Task(model, (X, Y)).parameters()
    assert list(found) == ["0.bias", "2.weight", "2.bias", "3.weight"]
    assert not any(p.requires_grad for p in found.values())


def test_parts_of_tensors_are_read_as_tensors_and_faults_named() -> None:
    x, y = torch.arange(20.0).view(10, 2), ALL
    whole = tud.TensorDataset(x, y)
    examples = read_data(tud.Subset(tud.Subset(whole, [9, 0, 4, 5]), torch.tensor([3, 1, 2])))
    assert examples.is_tensors
    for chosen in ([0, 1, 2], [2], [1, 1], []):
        places = torch.tensor(chosen, dtype=torch.long)
        rows, got = torch.tensor([5, 0, 4])[places], examples.batch(places)
        assert torch.equal(got[0], x[rows]) and torch.equal(got[1], y[rows])
    last = read_data(tud.Subset(whole, [-2, -1]))
    assert torch.equal(last.batch(torch.arange(2))[1], y[8:])
    with pytest.raises(DataError, match="example 1"):
        read_data(tud.Subset(whole, [0, 10])).batch(torch.tensor([1]))


def test_subset_keeps_order_metadata_and_all_settings() -> None:
    likelihood, source = Gaussian(0.5), {"source": list("abcdefghij")}
    forward = lambda model, b: (model(b[0])[:, :1], b[1].double())  # noqa: E731
    how = {"likelihood": likelihood, "forward": forward, "batch_size": 3, "metadata": source}
    task = Task(mlp(), (X, Y), **how)
    part = task.subset([7, 1, 1])
    assert part.n_data == 3 and torch.equal(order_of(part), X[[7, 1, 1]])
    assert part.metadata == {"source": ["h", "b", "b"]}
    assert (part.likelihood, part.forward, part.batch_size) == (likelihood, forward, 3)
    assert part.model is task.model
    again = part.subset(torch.tensor([True, False, True]))
    assert torch.equal(order_of(again), X[[7, 1]])
    mean = Task(nn.Linear(4, 2), (X, normal(10, 2)), likelihood=nn.MSELoss())
    assert mean.mean_over_outputs and mean.subset([1, 2]).mean_over_outputs
    with pytest.raises(ValueError, match="select none"):
        task.subset([])


@pytest.mark.parametrize("kind", [dict, pd.DataFrame, pd.Series])
def test_metadata_of_every_kind(kind) -> None:
    source, index = list("abcdefghij"), range(5, 15)
    given = {"source": source, "year": np.arange(10)}
    if kind is pd.Series:
        given = {"source": pd.Series(source, index=index), "year": torch.arange(10)}
    elif kind is pd.DataFrame:
        given = pd.DataFrame(given, index=index)
    task = Task(mlp(), (X, Y), metadata=given)
    assert task.metadata == {"source": source, "year": list(range(10))}
    assert task.subset([3]).metadata["source"] == ["d"]


def test_evaluation_gives_every_module_its_own_mode_back() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Sequential(nn.Dropout())).double()
    model[1].eval()
    with pytest.raises(KeyboardInterrupt), Task(model, (X, Y)).evaluation():
        assert not any(m.training for m in model.modules())
        raise KeyboardInterrupt
    assert [m.training for m in model.modules()] == [True, True, False, True, True]
    assert repr(Task(mlp(), (X, Y))) == "Task(Sequential, 10 examples, categorical, device=cpu)"
    with pytest.raises(ModelError, match=r"'0\.weight'.*run a batch"):
        Task(nn.Sequential(nn.LazyLinear(3)), (X, Y))


def test_the_mean_of_a_half_precision_model_is_read_in_single_precision() -> None:
    model = nn.Linear(4, 3).bfloat16()
    task, own = Task(model, (X, Y)), dict(model.named_parameters())
    mean, kept = task.parameters(), io.BytesIO()
    torch.save(mean, kept)
    kept.seek(0)
    read = torch.load(kept, weights_only=True)
    for made in (mean, dict(mean), {**mean}, mean | {}, {} | mean, deepcopy(mean), read):
        assert list(made) == ["weight", "bias"]
        assert all(torch.equal(v, own[n].float()) for n, v in made.items())
        assert {v.dtype for v in made.values()} == {torch.float32}
    mean["bias"] = mean["bias"] + 1
    assert torch.equal(mean["bias"], model.bias.float() + 1) and len(mean) == 2
    cast = task.cast(mean)
    assert cast["weight"].data_ptr() == own["weight"].data_ptr()
    assert cast["bias"].dtype == torch.bfloat16 and not torch.equal(cast["bias"], own["bias"])
