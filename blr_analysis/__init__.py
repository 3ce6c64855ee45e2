"""Post-hoc analysis of models trained with the Bayesian learning rule.

Which data made this model, and what would it be without them? Four lines say:

    task = Task(model, data, likelihood="categorical")
    posterior = fit_laplace(task)
    scores = sensitivity(task, posterior)
    memory_map(scores).plot()
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lazy_loader import attach_stub

from blr_analysis.checks import package_version

# Names and their modules stand in __init__.pyi; a module is loaded with the first of its names.
_public, __dir__, __all__ = attach_stub(__name__, __file__)

__version__ = package_version()


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _public(name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
