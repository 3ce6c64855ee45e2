"""The data of every case, from pinned sources, standardised, split, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.truth import store
from benchmarks.truth.recipes import Recipe
from blr_analysis.errors import DataError, InputError


class Split(NamedTuple):
    """Inputs and targets to train on, and held out."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def read(recipe: Recipe) -> Split:
    """The data of a recipe.

    Raises:
        InputError: an unknown source.
        DataError: the source has too few examples, or cannot be fetched.
    """
    if recipe.source not in SOURCES:
        raise InputError(f"source must be one of {', '.join(SOURCES)}; got {recipe.source!r}")
    split = SOURCES[recipe.source](recipe)
    if len(split.x) != recipe.n_train or len(split.x_test) != recipe.n_test:
        raise DataError(
            f"{recipe.source} gave {len(split.x)} + {len(split.x_test)} examples, but the recipe "
            f"asks for {recipe.n_train} + {recipe.n_test}"
        )
    return split


def fashion(recipe: Recipe) -> Split:
    """The first images of Fashion-MNIST's two parts, flat; one mean and scale for all pixels."""
    images = fashion_images(recipe)
    return images._replace(x=images.x.flatten(1), x_test=images.x_test.flatten(1))


def fashion_images(recipe: Recipe) -> Split:
    """The same as images ``[N, 1, 28, 28]``."""
    from tutorials.data import read as read_images

    data = read_images("fashion-mnist")
    x, x_test = data.images[: recipe.n_train], data.test_images[: recipe.n_test]
    return _alike(
        x.double(),
        data.labels[: recipe.n_train],
        x_test.double(),
        data.test_labels[: recipe.n_test],
    )


def digits(recipe: Recipe) -> Split:
    """scikit-learn's digits, shuffled; one mean and scale for all pixels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return _alike(*_shuffled(torch.from_numpy(x).double(), torch.from_numpy(y).long(), recipe))


def breast_cancer(recipe: Recipe) -> Split:
    """scikit-learn's breast cancer table, shuffled; every column by its own mean and scale."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return _columns(*_shuffled(torch.from_numpy(x).double(), torch.from_numpy(y).double(), recipe))


def concrete(recipe: Recipe) -> Split:
    """The strength of concrete, shuffled; every column and the strength standardised."""
    from benchmarks.truth.tables import concrete as table

    x, y, x_test, y_test = _columns(*_shuffled(*table(), recipe))
    mean, scale = y.mean(), y.std()
    return Split(x, (y - mean) / scale, x_test, (y_test - mean) / scale)


def newsgroups(recipe: Recipe) -> Split:
    """20 Newsgroups as frozen sentence features; every feature standardised."""
    from benchmarks.truth.tables import newsgroups as texts

    return _columns(*texts(recipe.n_train, recipe.n_test, recipe.seed))


def _shuffled(x: Tensor, y: Tensor, recipe: Recipe) -> Split:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(recipe.seed))
    train, test = order[: recipe.n_train], order[recipe.n_train :][: recipe.n_test]
    return Split(x[train], y[train], x[test], y[test])


def _alike(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> Split:
    mean, scale = x.mean(), x.std()
    return Split((x - mean) / scale, y, (x_test - mean) / scale, y_test)


def _columns(x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> Split:
    mean, scale = x.mean(0), x.std(0).clamp_min(1e-12)
    return Split((x - mean) / scale, y, (x_test - mean) / scale, y_test)


SOURCES: dict[str, Callable[[Recipe], Split]] = {
    "fashion": fashion,
    "fashion_images": fashion_images,
    "digits": digits,
    "breast_cancer": breast_cancer,
    "concrete": concrete,
    "newsgroups": newsgroups,
}


def stored(case: str, recipe: Recipe) -> Split:
    """The data of a case as they were kept with its results; read from the source once."""
    path = store.folder(case) / "data.safetensors"
    found = store.read(path, recipe.hash)
    if found is None:
        split = read(recipe)
        store.write(path, split._asdict(), {"hash": recipe.hash, "source": recipe.source})
        return split
    return Split(**found.tensors)
