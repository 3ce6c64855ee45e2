"""The names that users type: they exist, take what they should, and give what they should."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import blr_analysis as blr

NAMES = {
    "Task",
    "Recipe",
    "Checkpoints",
    "Posterior",
    "fit_laplace",
    "calibrate",
    "rerun",
    "sensitivity",
    "leave_one_out",
    "influence",
    "what_if",
    "what_if_each",
    "suspicious",
    "Index",
    "select_prior_precision",
    "memory_map",
    "Monitor",
    "report",
    "acquire",
    "adapt",
    "validate",
    "merge",
    "gradient_mismatch",
    "merge_curve",
    "IVON",
    "VOGN",
    "table1",
    "Likelihood",
    "Categorical",
    "Bernoulli",
    "Gaussian",
    "Poisson",
    "CausalLM",
    "TokenCategorical",
    "likelihoods",
    "errors",
    "BLRError",
}

# The first arguments, and the keyword-only ones with their defaults.
SIGNATURES: dict[Callable, tuple[str, dict[str, Any]]] = {
    blr.Task: (
        "model data",
        {
            "likelihood": "categorical",
            "forward": None,
            "batch_size": None,
            "device": None,
            "metadata": None,
        },
    ),
    blr.Posterior.from_optimizer: ("optimizer model", {"n_data": None, "prior_precision": None}),
    blr.Posterior.from_checkpoint: ("path model", {"n_data": None, "prior_precision": None}),
    blr.Posterior.load: ("path", {"model": None, "prior_precision": None}),
    blr.fit_laplace: ("task", {"structure": "kron", "prior_precision": None}),
    blr.sensitivity: ("task posterior", {"variance": None}),
    blr.leave_one_out: ("task posterior", {"correction": "auto"}),
    blr.what_if: (
        "task posterior",
        {
            "remove": None,
            "add": None,
            "relabel": None,
            "evaluate": None,
            "solver": "auto",
            "seeds": 3,
        },
    ),
    blr.what_if_each: ("task posterior", {"by": "target", "evaluate": None}),
    blr.memory_map: ("scores", {}),
}


def test_the_names_exist_and_explain_themselves() -> None:
    assert set(blr.__all__) == NAMES
    assert len(blr.__all__) == len(NAMES)
    assert all(getattr(blr, name).__doc__ for name in NAMES)
    assert isinstance(blr.__version__, str)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signatures(function: Callable) -> None:
    first, keywords = SIGNATURES[function]
    parameters = dict(inspect.signature(function).parameters)
    positional = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    assert positional == first.split()
    assert {name: parameters[name].default for name in keywords} == keywords
    assert parameters[positional[0]].default is inspect.Parameter.empty


def test_all_errors_are_one_family() -> None:
    classes = [
        value
        for value in vars(blr.errors).values()
        if inspect.isclass(value) and value.__module__ == blr.errors.__name__
    ]
    kinds = [kind for kind in classes if not issubclass(kind, Warning)]
    assert len(kinds) >= 8
    assert all(issubclass(kind, blr.BLRError) and kind.__doc__ for kind in kinds)
    assert issubclass(blr.errors.InputError, ValueError)
    assert issubclass(blr.errors.StorageError, OSError)
