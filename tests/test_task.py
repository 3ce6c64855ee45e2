"""What a task takes, in what order it hands it out, and how it runs the model."""

from __future__ import annotations

import copy
import datetime
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from models import Graph, mlp, normal
from oracles import relative
from torch import Tensor, nn
from torch.utils import data as tud

import blr_analysis as blr
from blr_analysis.data import read_data
from blr_analysis.data.examples import evenly_spread
from blr_analysis.errors import DataError, InputError
from blr_analysis.likelihoods import Gaussian
from blr_analysis.task import Task

X = normal(10, 4)
Y = torch.arange(10) % 3
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
        (X.flip(0).numpy()[::-1], Y.flip(0).numpy()[::-1]),
        (X.numpy().astype(">f8"), Y.numpy().astype(">i8")),
        (X.numpy().astype(np.longdouble), Y.numpy()),
        (np.ma.masked_array(X.numpy()), Y.numpy()),
        WHOLE,
        Rows(),
        list(zip(X, Y.tolist(), strict=True)),
        tud.DataLoader(WHOLE, batch_size=3, shuffle=True, drop_last=True),
        tud.DataLoader(Rows(), sampler=tud.RandomSampler(range(10))),
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


def tagged(m: Graph, features: Tensor, scale: Tensor) -> SimpleNamespace:
    """As Hugging Face's models: keyword inputs, an object with ``.logits``."""
    return SimpleNamespace(logits=m.body(features) * scale, loss=None)


Pair = namedtuple("Pair", ["inputs", "target"])


def test_a_method_of_the_users_dataset_is_not_asked_for_lengths() -> None:
    class WithLength(Rows):
        def length(self) -> int:
            return len(self)

    model = torch.nn.Linear(4, 3)
    of_rows = blr.fit_laplace(Task(model, Rows()))
    of_others = blr.fit_laplace(Task(model, WithLength()))
    assert torch.equal(of_rows.variance("weight"), of_others.variance("weight"))


def test_batches_of_every_form_are_run() -> None:
    model = mlp()
    pairs = list(zip(X, Y, strict=True))
    tagger = Graph(tagged, body=model)
    truth = model(X).detach()
    one = torch.ones(1).double()
    dicts = [{"features": x, "scale": one, "labels": y} for x, y in pairs]
    mixed = [({"features": x, "scale": one}, y) for x, y in pairs]
    named = [Pair({"a": x}, {"deep": [y]}) for x, y in pairs]
    for task in (
        Task(tagger, dicts),
        Task(tagger, mixed),
        Task(model, named, forward=lambda m, b: (m(b.inputs["a"]), b.target["deep"][0])),
        Task(model, (X, Y)),
    ):
        outputs, targets = run(task)
        assert relative(outputs, truth) < 1e-12
        assert torch.equal(targets, Y)
    assert run(Task(model, (X.float(), Y)))[0].dtype == torch.float64


def test_run_is_at_the_given_parameters_and_buffers_which_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double().eval()
    own = copy.deepcopy(model.state_dict())
    task = Task(model, (X, Y))
    other = {"0.bias": torch.ones(3).double(), "1.running_mean": torch.full((3,), 2.0).double()}
    outputs, _ = run(task, **other)
    assert all(torch.equal(t, own[n]) for n, t in model.state_dict().items())
    model.load_state_dict(own | other)
    torch.testing.assert_close(outputs, model(X).detach())
    torch.testing.assert_close(run(Task(model, (X, Y)).holding(own))[0], run(task, **own)[0])


def test_parameters_are_the_trainable_ones_and_tied_ones_once() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model.append(nn.Linear(3, 3).double())
    model[3].bias = model[2].bias
    actual = Task(model, (X, Y)).parameters()
    assert list(actual) == ["0.bias", "2.weight", "2.bias", "3.weight"]
    assert not any(p.requires_grad for p in actual.values())


def test_parts_of_tensors_are_read_as_tensors_and_faults_named() -> None:
    x = torch.arange(20.0).view(10, 2)
    y = ALL
    whole = tud.TensorDataset(x, y)
    examples = read_data(tud.Subset(tud.Subset(whole, [9, 0, 4, 5]), torch.tensor([3, 1, 2])))
    assert examples.is_tensors
    for chosen in ([0, 1, 2], [2], [1, 1], []):
        places = torch.tensor(chosen, dtype=torch.long)
        rows = torch.tensor([5, 0, 4])[places]
        got = examples.batch(places)
        assert torch.equal(got[0], x[rows])
        assert torch.equal(got[1], y[rows])
    last = read_data(tud.Subset(whole, [-2, -1]))
    assert torch.equal(last.batch(torch.arange(2))[1], y[8:])
    with pytest.raises(DataError, match="example 1"):
        read_data(tud.Subset(whole, [0, 10])).batch(torch.tensor([1]))


def test_subset_keeps_order_metadata_and_all_settings() -> None:
    likelihood = Gaussian(0.5)
    source = {"source": list("abcdefghij")}
    forward = lambda model, b: (model(b[0])[:, :1], b[1].double())  # noqa: E731
    how = {"likelihood": likelihood, "forward": forward, "batch_size": 3, "metadata": source}
    task = Task(mlp(), (X, Y), **how)
    part = task.subset([7, 1, 1])
    assert part.n_data == 3
    assert torch.equal(order_of(part), X[[7, 1, 1]])
    assert part.metadata == {"source": ["h", "b", "b"]}
    assert (part.likelihood, part.forward, part.batch_size) == (likelihood, forward, 3)
    assert part.model is task.model
    again = part.subset(torch.tensor([True, False, True]))
    assert torch.equal(order_of(again), X[[7, 1]])
    mean = Task(nn.Linear(4, 2), (X, normal(10, 2)), likelihood=nn.MSELoss())
    assert mean.mean_over_outputs
    assert mean.subset([1, 2]).mean_over_outputs
    with pytest.raises(ValueError, match="select none"):
        task.subset([])


def test_metadata_of_every_kind() -> None:
    source = list("abcdefghij")
    plain = {"source": source, "year": np.arange(10)}
    series = {"source": pd.Series(source), "year": torch.arange(10)}
    for given in (plain, series, pd.DataFrame(plain)):
        task = Task(mlp(), (X, Y), metadata=given)
        assert task.metadata == {"source": source, "year": list(range(10))}


def test_a_wrapped_model_is_taken_out_and_a_task_says_what_it_is() -> None:
    task = Task(nn.DataParallel(model := mlp()), (X, Y))
    assert task.model is model
    assert repr(task) == "Task(Sequential, 10 examples, categorical, device=cpu)"


@pytest.mark.slow
def test_a_compiled_model_is_taken_out() -> None:
    model = mlp()
    assert Task(torch.compile(model), (X, Y)).model is model


def test_the_mean_of_a_half_precision_model_is_read_in_single_precision() -> None:
    model = nn.Linear(4, 3).bfloat16()
    task = Task(model, (X, Y))
    own = dict(model.named_parameters())
    mean = task.parameters()
    for made in (mean, dict(mean), {**mean}, mean | {}, {} | mean, copy.deepcopy(mean)):
        assert list(made) == ["weight", "bias"]
        assert all(torch.equal(v, own[n].float()) for n, v in made.items())
        assert {v.dtype for v in made.values()} == {torch.float32}
    mean["bias"] = mean["bias"] + 1
    assert torch.equal(mean["bias"], model.bias.float() + 1)
    assert len(mean) == 2
    cast = task.cast(mean)
    assert cast["weight"].data_ptr() == own["weight"].data_ptr()
    assert cast["bias"].dtype == torch.bfloat16
    assert not torch.equal(cast["bias"], own["bias"])


# Tables, datasets, dicts of logits: what people have at hand

XS = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
YS = torch.arange(24) % 2


def same(task: blr.Task, other: blr.Task) -> None:
    """Both run alike."""
    chosen = torch.arange(24)
    for ours, theirs in zip(run(task, chosen), run(other, chosen), strict=True):
        assert torch.equal(ours, theirs)


CODES = torch.arange(24) % 3
FRAME = pd.DataFrame(XS.numpy(), columns=["a", "b", "c"]).assign(
    label=np.array(["cat", "dog", "owl"])[CODES], source="web"
)


def of(frame: pd.DataFrame, model: nn.Module, **options: Any) -> blr.Task:
    return blr.Task(model, frame, target="label", **options)


ASKED = {
    "what_if": lambda task, q, test, at: blr.what_if(task, q, remove=[0], evaluate=test),
    "add": lambda task, q, test, at: blr.what_if(task, q, add=test),
    "influence": lambda task, q, test, at: blr.influence(task, q, test),
    "report": lambda task, q, test, at: blr.report(task, q, at / "report.html", test=test),
    "monitor": lambda task, q, test, at: blr.Monitor(task, test=test),
    "index": lambda task, q, test, at: blr.Index.build(task, q, at / "index").top(test, 1),
}


@pytest.mark.parametrize("ask", ASKED)
@pytest.mark.parametrize(
    ("other", "word"),
    [
        (FRAME[FRAME.label != "cat"], "Categorical"),
        (FRAME.assign(label=np.arange(24) % 3), "Categorical"),
        (FRAME[["c", "a", "b", "label"]], "order"),
    ],
)
def test_frames_that_are_coded_differently_are_refused_together(
    other: pd.DataFrame, word: str, ask: str, tmp_path: Path
) -> None:
    model = nn.Linear(3, 3)
    task = of(FRAME, model)
    q = blr.fit_laplace(task, prior_precision=1.0)
    for test in (of(other, model), of(other, copy.copy(model)).subset([1, 0])):
        with pytest.raises(InputError, match=word):
            ASKED[ask](task, q, test, tmp_path)


def test_a_categorical_is_coded_by_its_own_categories() -> None:
    model = nn.Linear(3, 3)
    frame = FRAME.astype({"label": pd.CategoricalDtype(["owl", "dog", "cat"])})
    task = of(frame, model)
    assert torch.equal(task.dataset.tensors[1], 2 - CODES)
    q = blr.fit_laplace(task, prior_precision=1.0)
    told = blr.what_if(task, q, remove=[0], evaluate=of(frame[frame.label != "cat"], model))
    rows = CODES != 0
    expected = nn.functional.cross_entropy(model(XS[rows]), (2 - CODES)[rows])
    assert told.before.nll == pytest.approx(expected.item(), rel=1e-5)


def test_columns_of_numbers_stay_themselves() -> None:
    numbers = [0, 1, 10, 2] * 6
    of_objects = np.array(numbers, dtype=object)
    for labels in (pd.array(numbers, dtype="Int64"), of_objects, [False, True] * 12):
        _, y = of(FRAME.assign(label=labels), nn.Linear(3, 11)).dataset.tensors
        assert y.tolist() == list(labels)
    task = of(FRAME.astype({"b": object}), nn.Linear(3, 3))
    assert torch.equal(task.dataset.tensors[0], XS)
    assert list(task.metadata) == ["source"]
    real = blr.Task(nn.Linear(2, 1), FRAME[["a", "b", "c"]], target="c", likelihood="gaussian")
    assert torch.equal(real.fetch(torch.arange(24))[1], XS[:, 2])


def test_masks_and_weights_that_are_series() -> None:
    model = nn.Linear(3, 2)
    plain = blr.Task(model, (XS, YS)).subset(pd.Series(YS.numpy() == 1))
    assert {int(y) for _, y in plain.dataset} == {1}
    assert plain.n_data == 12
    weights = pd.Series(np.arange(24.0))
    f = torch.ones(24, 2)
    one, other = (
        blr.Task(model, (XS, YS), weights=w).likelihood.nll(f, YS) for w in (weights, range(24))
    )
    assert torch.equal(one, other)
    with pytest.raises(InputError, match="weights has another row index"):
        of(FRAME, nn.Linear(3, 3), weights=weights.set_axis(range(7, 31)))


def test_a_transform_makes_the_examples() -> None:
    """Another factor of it is other data, which no fingerprint shows."""
    datasets = pytest.importorskip("datasets")
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(6) % 3
    factors = [3.0]

    def transform(rows: Any) -> Any:
        return {"input": torch.tensor(rows["x"]) * factors[0], "labels": torch.tensor(rows["y"])}

    data = datasets.Dataset.from_dict({"x": x.tolist(), "y": labels.tolist()})
    data = data.with_transform(transform)
    task = blr.Task(nn.Linear(2, 3), data)
    before = task.examples.sha256({})
    batch = task.fetch(torch.arange(6))
    torch.testing.assert_close(batch["input"], 3 * x)
    assert torch.equal(batch["labels"], labels)
    factors[0] = 2.0
    assert task.examples.sha256({}) != before
    assert task.examples.mark({}) is None
    with pytest.raises(InputError, match="leave target='y' out"):
        blr.Task(nn.Linear(2, 3), data, target="y")


def test_datasets_and_logits_in_a_dict() -> None:
    datasets = pytest.importorskip("datasets")
    model = nn.Linear(3, 2)
    wrapped = Graph(lambda m, x: {"logits": m.inner(x)}, inner=model)  # return_dict, a plain one
    plain = blr.Task(model, (XS, YS))
    same(blr.Task(wrapped, (XS, YS)), plain)
    columns = {"x": XS.tolist(), "label": YS.tolist(), "text": [f"example {i}" for i in range(24)]}
    data = datasets.Dataset.from_dict(columns)
    task = blr.Task(wrapped, data)
    same(task, plain)
    assert task.metadata["text"][3] == "example 3"
    same(blr.Task(wrapped, data.rename_column("label", "animal"), target="animal"), plain)
    spelled = data.remove_columns("label").add_column("kind", ["ab"[k] for k in YS])
    gap = data.remove_columns("label").add_column("kind", ["a", None] * 12)
    with pytest.raises(DataError, match="row 1 has no kind"):
        blr.Task(wrapped, gap, target="kind")
    coded = blr.Task(wrapped, spelled, target="kind")
    same(coded, plain)
    assert coded.examples.classes == ("a", "b")
    assert list(coded.metadata) == ["text"]
    aside = {"labels": [0] * 24, "none": [None] * 24, "tags": [["a"], ["a", "b"]] * 12}
    aside |= {"when": [datetime.datetime(2020, 1, 1)] * 24}
    task = blr.Task(wrapped, datasets.Dataset.from_dict({**columns, **aside}), target="label")
    same(task, plain)
    assert set(task.metadata) == {"text", *aside}
    tasks = [
        blr.Task(wrapped, data.cast_column("label", datasets.ClassLabel(names=names)))
        for names in (["cat", "dog"], ["dog", "cat"])
    ]
    with pytest.raises(InputError, match="Categorical"):
        tasks[0].with_model(tasks[1])


@pytest.mark.parametrize("n_data", [1, 5, 100, 2**24 + 4])
def test_examples_spread_evenly_reach_from_the_first_to_the_last(n_data: int) -> None:
    indices = evenly_spread(n_data, 8).tolist()
    assert (indices[0], indices[-1]) == (0, n_data - 1)
    assert len(indices) == min(8, n_data)
