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
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from blr_analysis.data import read_data
from blr_analysis.errors import DataError, ModelError
from blr_analysis.likelihoods import Gaussian
from blr_analysis.task import Task

X, Y = normal(10, 4), torch.arange(10) % 3


class Rows(Dataset):
    """A map-style dataset that says which indices were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.asked.append(index)
        return X[index], int(Y[index])


def order_of(task: Task, size: int = 4) -> Tensor:
    """The inputs in the order in which the task hands them out."""
    return torch.cat([batch[0] for _, batch in task.batches(size)])


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        [X, Y],
        (X.numpy(), Y.numpy()),
        TensorDataset(X, Y),
        Rows(),
        list(zip(X, Y.tolist(), strict=True)),
        DataLoader(TensorDataset(X, Y), batch_size=3),
        DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True, drop_last=True),
        DataLoader(Rows(), sampler=RandomSampler(range(10))),
        DataLoader(Rows(), sampler=SequentialSampler(range(10))),
    ],
    ids=["pair", "list", "numpy", "tensors", "rows", "rows_list", "loader", "shuffled", "random",
         "sequential"],
)  # fmt: skip
def test_every_form_is_handed_out_in_dataset_order(data) -> None:
    task = Task(mlp(), data)
    assert len(task) == task.n_data == 10
    assert torch.equal(order_of(task), X)
    indices = torch.cat([i for i, _ in task.batches(4)])
    assert torch.equal(indices, torch.arange(10))


def test_batches_of_chosen_indices() -> None:
    for data in ((X, Y), Rows()):
        task = Task(mlp(), data)
        chosen = torch.tensor([7, 2, 2, 9])
        found = list(task.batches(3, chosen))
        assert [i.tolist() for i, _ in found] == [[7, 2, 2], [9]]
        assert torch.equal(torch.cat([b[0] for _, b in found]), X[chosen])


def test_no_example_is_read_before_it_is_needed() -> None:
    rows = Rows()
    task = Task(mlp(), rows)
    rows.asked.clear()
    task.fetch(torch.tensor([3, 5]))
    assert rows.asked == [3, 5]


class Tagger(nn.Module):
    """A model as Hugging Face's are: keyword inputs, an object with ``.logits``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, features: Tensor, scale: Tensor | None = None) -> SimpleNamespace:
        logits = self.body(features)
        return SimpleNamespace(logits=logits if scale is None else logits * scale, loss=None)


def test_dict_batches() -> None:
    rows = [
        {"features": x, "scale": torch.ones(1).double(), "labels": y}
        for x, y in zip(X, Y, strict=True)
    ]
    task = Task(Tagger(), rows)
    outputs, targets = task.run(task.fetch(torch.arange(10)), task.parameters())
    assert relative(outputs, mlp()(X).detach()) < 1e-12
    assert torch.equal(targets, Y)
    nameless = Task(Tagger(), [{"features": x, "target": 0} for x in X])
    with pytest.raises(DataError, match=r"'labels'.*features"):
        nameless.run(nameless.fetch(torch.arange(2)), nameless.parameters())


Pair = namedtuple("Pair", ["inputs", "target"])


def test_a_forward_function_reads_any_batch() -> None:
    rows = [Pair({"a": x}, {"deep": [y]}) for x, y in zip(X, Y, strict=True)]
    task = Task(
        mlp(), rows,
        forward=lambda model, b: (model(b.inputs["a"]) + 1, b.target["deep"][0]),
    )  # fmt: skip
    outputs, targets = task.run(task.fetch(torch.arange(10)), task.parameters())
    assert relative(outputs, mlp()(X).detach() + 1) < 1e-12
    assert torch.equal(targets, Y)


def test_inputs_follow_the_models_dtype() -> None:
    task = Task(mlp(), (X.float(), Y))
    outputs, _ = task.run(task.fetch(torch.arange(3)), task.parameters())
    assert outputs.dtype == torch.float64


def test_run_is_at_the_given_parameters_and_others_stay_the_models_own() -> None:
    model = mlp()
    task = Task(model, (X, Y))
    bias = torch.tensor([5.0, 0.0, -5.0], dtype=torch.float64)
    outputs, _ = task.run(task.fetch(torch.arange(10)), {"2.bias": bias})
    truth = model(X) - model[2].bias + bias
    assert relative(outputs, truth.detach()) < 1e-12


def test_single_outputs_get_their_dimension() -> None:
    model = graph(lambda m, x: m.one(x).squeeze(-1), one=nn.Linear(4, 1))
    task = Task(model, (X, normal(10)), likelihood="gaussian")
    outputs, targets = task.run(task.fetch(torch.arange(10)), task.parameters())
    assert outputs.shape == targets.shape == (10, 1)


def test_parameters_are_the_trainable_ones_and_tied_ones_once() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model.append(nn.Linear(3, 3).double())
    model[3].bias = model[2].bias
    found = Task(model, (X, Y)).parameters()
    assert list(found) == ["0.bias", "2.weight", "2.bias", "3.weight"]
    assert not any(p.requires_grad for p in found.values())


def test_parts_of_tensors_are_read_as_tensors_and_faults_named() -> None:
    x, y = torch.arange(20.0).view(10, 2), torch.arange(10)
    part = Subset(Subset(TensorDataset(x, y), [9, 0, 4, 5]), torch.tensor([3, 1, 2]))
    examples = read_data(part)
    assert examples.is_tensors
    for chosen in ([0, 1, 2], [2], [1, 1], []):
        rows = torch.tensor([5, 0, 4])[torch.tensor(chosen, dtype=torch.long)]
        got = examples.batch(torch.tensor(chosen, dtype=torch.long))
        assert torch.equal(got[0], x[rows]) and torch.equal(got[1], y[rows])
    last = read_data(Subset(TensorDataset(x, y), [-2, -1]))
    assert torch.equal(last.batch(torch.arange(2))[1], y[8:])
    with pytest.raises(DataError, match="example 1"):
        read_data(Subset(TensorDataset(x, y), [0, 10])).batch(torch.tensor([1]))


def test_subset_keeps_order_metadata_and_all_settings() -> None:
    likelihood = Gaussian(0.5)
    forward = lambda model, b: (model(b[0])[:, :1], b[1].double())  # noqa: E731
    task = Task(
        mlp(), (X, Y), likelihood=likelihood, forward=forward, batch_size=3,
        metadata={"source": list("abcdefghij")},
    )  # fmt: skip
    part = task.subset([7, 1, 1])
    assert part.n_data == 3
    assert torch.equal(order_of(part), X[[7, 1, 1]])
    assert part.metadata == {"source": ["h", "b", "b"]}
    assert (part.likelihood, part.forward, part.batch_size) == (likelihood, forward, 3)
    assert part.model is task.model
    again = part.subset(torch.tensor([True, False, True]))
    assert torch.equal(order_of(again), X[[7, 1]])


@pytest.mark.parametrize(
    "metadata",
    [
        {"source": list("abcdefghij"), "year": np.arange(10)},
        pd.DataFrame({"source": list("abcdefghij"), "year": range(10)}, index=range(5, 15)),
        {"source": pd.Series(list("abcdefghij"), index=range(5, 15)), "year": torch.arange(10)},
    ],
    ids=["lists", "frame", "series"],
)
def test_metadata_of_every_kind(metadata) -> None:
    task = Task(mlp(), (X, Y), metadata=metadata)
    assert task.metadata["source"] == list("abcdefghij")
    assert [int(y) for y in task.metadata["year"]] == list(range(10))
    assert task.subset([3]).metadata["source"] == ["d"]


def test_parts_of_a_task_know_the_loss_of_training() -> None:
    task = Task(nn.Linear(4, 2), (X, normal(10, 2)), likelihood=nn.MSELoss())
    assert task.mean_over_outputs and task.subset([1, 2]).mean_over_outputs


def test_lazy_modules_must_have_seen_a_batch() -> None:
    with pytest.raises(ModelError, match=r"'0\.weight'.*run a batch"):
        Task(nn.Sequential(nn.LazyLinear(3)), (X, Y))


def test_evaluation_gives_every_module_its_own_mode_back() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Sequential(nn.Dropout())).double()
    model[1].eval()
    task = Task(model, (X, Y))
    for error in (None, KeyboardInterrupt):
        try:
            with task.evaluation():
                assert not any(m.training for m in model.modules())
                if error:
                    raise error
        except KeyboardInterrupt:
            pass
        assert [m.training for m in model.modules()] == [True, True, False, True, True]


def test_repr() -> None:
    assert repr(Task(mlp(), (X, Y))) == "Task(Sequential, 10 examples, categorical, device=cpu)"


def test_the_mean_of_a_half_precision_model_is_a_dict_of_single_precision() -> None:
    model = nn.Linear(4, 3).bfloat16()
    mean = Task(model, (X, Y)).parameters()
    kept = io.BytesIO()
    torch.save(mean, kept)
    kept.seek(0)
    read = torch.load(kept, weights_only=True)
    for made in (mean, dict(mean), {**mean}, mean | {}, {} | mean, deepcopy(mean), read):
        assert list(made) == ["weight", "bias"]
        assert all(
            torch.equal(v, dict(model.named_parameters())[n].float()) for n, v in made.items()
        )
        assert {v.dtype for v in made.values()} == {torch.float32}
    called = torch.func.functional_call(model, dict(mean), (X.float(),))
    assert called.dtype == torch.float32


def test_half_precision_weights_that_are_equal_are_the_models_own() -> None:
    model = nn.Linear(4, 3).bfloat16()
    task = Task(model, (torch.zeros(2, 4), torch.zeros(2).long()))
    given = task.parameters()
    assert all(p.dtype == torch.float32 for p in given.values())
    given["bias"] = given["bias"] + 1
    assert torch.equal(given["bias"], model.bias.float() + 1) and len(given) == 2
    cast, own = task.cast(given), dict(model.named_parameters())
    assert cast["weight"].data_ptr() == own["weight"].data_ptr()
    assert cast["bias"].dtype == torch.bfloat16 and not torch.equal(cast["bias"], own["bias"])
