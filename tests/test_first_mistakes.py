"""The mistakes that people make first: each is told in names that they type, and at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import blr_analysis as blr
from blr_analysis.errors import BLRError, DataError, DeviceError, InputError, ModelError

N = 60
WHO = ["eve", "ann"] * 30


def inputs() -> Tensor:
    return torch.randn(N, 4, generator=torch.Generator().manual_seed(0))


def labels() -> Tensor:
    return torch.arange(N) % 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def task(data: Any = None, model: nn.Module | None = None, **options: Any) -> blr.Task:
    pair = (inputs(), labels()) if data is None else data
    return blr.Task(network() if model is None else model, pair, **options)


def fit(data: Any = None, model: nn.Module | None = None, **options: Any) -> blr.Posterior:
    return blr.fit_laplace(task(data, model, **options), structure="diag", prior_precision=1.0)


def without(query: str) -> Any:
    subject = task(metadata={"annotator": WHO})
    posterior = blr.fit_laplace(subject, structure="diag", prior_precision=1.0)
    return blr.what_if(subject, posterior, remove=query, solver="posterior")


class Augmented(Dataset):
    """Draws noise whenever an example is read."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return inputs()[index] + torch.randn(4), labels()[index]


def with_nan() -> Tensor:
    x = inputs()
    x[7, 1] = float("nan")
    return x


OTHER_INDEX = pd.DataFrame({"annotator": WHO}, index=range(100, 160))
MISTAKES: dict[str, tuple[Callable[[], Any], type[BLRError], str]] = {
    "a loss as torch calls it": (
        lambda: task(likelihood="cross_entropy"),
        InputError,
        'write "categorical"',
    ),
    "a loss by its class's name": (
        lambda: task(likelihood="BCEWithLogitsLoss"),
        InputError,
        'write "bernoulli"',
    ),
    "a loss in short": (lambda: task(likelihood="mse"), InputError, 'write "gaussian"'),
    "a loss with a slip": (lambda: task(likelihood="categorial"), InputError, 'mean "categorical"'),
    "a loss that is not made": (
        lambda: task(likelihood=nn.CrossEntropyLoss),
        InputError,
        r"CrossEntropyLoss\(\)",
    ),
    "a mean loss": (
        lambda: fit(likelihood=nn.functional.cross_entropy),
        InputError,
        'reduction="none"',
    ),
    "one equals sign": (lambda: without("annotator = 'eve'"), InputError, "compare with =="),
    "a filter with another case": (
        lambda: without("annotator == 'Eve'"),
        InputError,
        "annotator has 'ann', 'eve'; did you mean 'eve'",
    ),
    "a filter without quotes": (
        lambda: without("annotator == eve"),
        InputError,
        "put eve in quotes",
    ),
    "a column with a slip": (
        lambda: without("anotator == 'eve'"),
        InputError,
        "did you mean 'annotator'",
    ),
    "an and of another language": (
        lambda: without("annotator == 'eve' && target == 1"),
        InputError,
        "write and in place of &&",
    ),
    "a comparison of another language": (
        lambda: without("annotator is 'eve'"),
        InputError,
        "write == in place of is",
    ),
    "a quote that is not closed": (lambda: without("annotator == 'eve"), InputError, "not closed"),
    "an empty filter": (lambda: without(""), InputError, "compare a column with a value"),
    "a filter that is a number": (
        lambda: without("3"),
        InputError,
        "compare a column with a value",
    ),
    "a filter that is a column": (
        lambda: without("target"),
        InputError,
        "compare a column with a value",
    ),
    "a filter beyond the numbers": (lambda: without("index > 99"), InputError, "between 0 and 59"),
    "a group with a slip": (
        lambda: blr.what_if_each(task(metadata={"annotator": WHO}), fit(), by="anotator"),
        InputError,
        "did you mean 'annotator'",
    ),
    "a number in quotes": (lambda: without("target == '1'"), InputError, "numbers without quotes"),
    "augmented data": (lambda: task(Augmented()), DataError, r"Recipe\(augment=\)"),
    "a device called gpu": (lambda: task(device="gpu"), DeviceError, 'write "cuda"'),
    "a device that is nowhere": (lambda: task(device="tpu"), DeviceError, '"cpu" can'),
    "inputs of a wrong shape": (
        lambda: fit((torch.randn(N, 5), labels())),
        ModelError,
        "shape and dtype of the training",
    ),
    "inputs of whole numbers": (
        lambda: fit((inputs().long(), labels())),
        ModelError,
        "shape and dtype of the training",
    ),
    "inputs that are transposed": (lambda: task((inputs().T, labels())), DataError, "same length"),
    "metadata with another index": (
        lambda: task(metadata=OTHER_INDEX),
        InputError,
        r"reset_index\(drop=True\)",
    ),
    "metadata that are too short": (
        lambda: task(metadata={"annotator": WHO[:50]}),
        InputError,
        "60 values",
    ),
    "metadata without names": (lambda: task(metadata=WHO), InputError, "columns by name"),
    "classes that count from 1": (
        lambda: fit((inputs(), labels() + 1)),
        DataError,
        "count classes from 0",
    ),
    "a class that the model lacks": (lambda: fit((inputs(), labels() * 2)), DataError, "3 logits"),
    "labels as floats": (lambda: fit((inputs(), labels().float())), DataError, r"y\.long\(\)"),
    "labels as one-hot": (
        lambda: fit((inputs(), nn.functional.one_hot(labels(), 3))),
        DataError,
        r"y\.argmax\(-1\)",
    ),
    "labels as words": (
        lambda: task((inputs(), np.array(["a", "b", "c"] * 20))),
        DataError,
        r"pd\.Categorical\(y\)\.codes",
    ),
    "NaN in the inputs": (lambda: fit((with_nan(), labels())), DataError, "index 7"),
    "a structure with a slip": (
        lambda: blr.fit_laplace(task(), structure="diagonal"),
        InputError,
        "did you mean 'diag'",
    ),
    "test data that are no task": (
        lambda: blr.influence(subject := task(), fit(), (inputs(), subject)),
        InputError,
        "must be a blr_analysis.Task",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_its_remedy(mistake: str) -> None:
    attempt, error, remedy = MISTAKES[mistake]
    with pytest.raises(error, match=remedy):
        attempt()


def test_probabilities_in_the_place_of_logits_are_said() -> None:
    confident = nn.Linear(4, 1)
    confident.weight.data.mul_(20)
    both = (inputs()[:, :1] > 0).float()
    with pytest.warns(UserWarning, match="leave softmax or sigmoid out"):
        fit(model=nn.Sequential(network(), nn.Softmax(-1)))
    with pytest.warns(UserWarning, match="leave softmax or sigmoid out"):
        fit((inputs(), both), nn.Sequential(confident, nn.Sigmoid()), likelihood="bernoulli")


def test_one_hot_labels_as_floats_are_said() -> None:
    with pytest.warns(UserWarning, match=r"give y.argmax\(-1\)"):
        fit((inputs(), nn.functional.one_hot(labels(), 3).float()))


def test_raw_beside_standardised_test_data_are_said() -> None:
    subject = task()
    raw = blr.Task(subject.model, (50 * inputs() + 300, labels()))
    assert "other units" in blr.influence(subject, fit(), raw).note


def test_classes_of_the_test_data_that_no_training_example_has_are_said() -> None:
    is_trained_on = labels() != 2
    subject = task((inputs()[is_trained_on], labels()[is_trained_on]))
    posterior = blr.fit_laplace(subject, structure="diag", prior_precision=1.0)
    test = task()
    told = "classes that no training example has: 2"
    assert told in blr.influence(subject, posterior, test).note
    result = blr.what_if(subject, posterior, remove=[3], evaluate=test, solver="posterior")
    assert told in result.note


def test_a_slice_selects_its_rows() -> None:
    subject = task()
    posterior = fit()
    options = {"solver": "posterior"}
    actual = blr.what_if(subject, posterior, remove=slice(-3, None), **options)
    expected = blr.what_if(subject, posterior, remove=[57, 58, 59], **options)
    assert actual.nll == expected.nll


def test_a_shuffled_loader_is_read_in_the_order_of_its_data() -> None:
    loader = DataLoader(TensorDataset(inputs(), labels()), batch_size=10, shuffle=True)
    shuffled = task(loader, metadata={"annotator": WHO})
    in_order = task(metadata={"annotator": WHO})
    assert blr.sensitivity(shuffled, fit()).table.equals(blr.sensitivity(in_order, fit()).table)
