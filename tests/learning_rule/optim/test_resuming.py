"""Training goes on from a saved state to the same bits, whatever row of Table 1 trains."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from learning_rule.optim.test_rows import every_row, make_row
from torch import nn
from torch.utils._pytree import tree_flatten

from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim import (
    SLANG,
    STE,
    VOGGN,
    BayesBiNN,
    Dropout,
    Newton,
    NoisyKFAC,
)

N = 60
pytestmark = pytest.mark.filterwarnings("ignore:Using backward")  # as in test_rows
G = torch.Generator().manual_seed(1)
X, Y = torch.randn(N, 4, generator=G), torch.randint(3, (N,), generator=G)

Make = Callable[..., Any]


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def dropout(model: nn.Sequential, row: str, generator: torch.Generator) -> Dropout:
    last = model[2].weight
    groups: list[dict[str, Any]] = [{"params": [last], "keep": 0.6}]
    groups += [{"params": [p for p in model.parameters() if p is not last]}]
    extra = {"model": model, "weight_decay": 0.1} if row == "VOGN" else {}
    return Dropout(groups, lr=0.01, row=row, ess=N, generator=generator, **extra)


WHOLE = (NoisyKFAC, SLANG, VOGGN)  # of a whole model, and one draw a step


def of(kind: type, **options: Any) -> Make:
    return lambda model, generator: kind(
        model if kind in WHOLE else model.parameters(), generator=generator, **options
    )


STRUCTURED = {"lr": 0.1, "ess": N, "weight_decay": 0.05, "beta2": 0.8, "damping": 0.02}
MAKERS: dict[str, Make] = {
    **{name: partial(make_row, name) for name in every_row()},
    **{f"dropout, {row}": partial(dropout, row=row) for row in ("SGD", "Adam", "VOGN")},
    "BayesBiNN": of(BayesBiNN, lr=0.05, ess=N, beta1=0.5, prior=0.3),
    "STE": lambda model, generator: STE(model.parameters(), 0.05),
    "STE with Adam": lambda model, generator: STE(model.parameters(), 0.05, "Adam"),
    **{kind.__name__: of(kind, **STRUCTURED) for kind in WHOLE},
    "Newton": lambda model, generator: Newton(model.parameters(), 0.5, N, weight_decay=1.0),
}


def advance(name: str, model: nn.Module, optimizer: Any, start: int, stop: int) -> None:
    """Draws ``start`` to ``stop``, with a step after every second one where it can take several."""
    for t in range(start, stop):
        rows = slice(12 * t % N, 12 * t % N + 12)

        def loss(rows: slice = rows) -> torch.Tensor:
            outputs = model(X[rows].to(model[0].weight.dtype)).float()
            return nn.functional.cross_entropy(outputs, Y[rows])

        if name == "Newton":
            optimizer.step(loss)
            continue
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss().backward(create_graph=name == "diagonal Newton")
        if name == "bSAM":
            with optimizer.adversarial_params():
                loss().backward()
        if t % 2 or isinstance(optimizer, WHOLE):
            optimizer.step()


@pytest.mark.parametrize("stop", [4, 5])
@pytest.mark.parametrize("name", [*MAKERS, "NoisyKFAC, bfloat16"])
def test_resumes_to_the_bit(name: str, stop: int) -> None:
    """Stopped between two steps, and between the two draws of a step."""
    name, _, half = name.partition(", bf")
    dtype = torch.bfloat16 if half else torch.float32
    model, other = network(dtype), network(dtype)
    optimizer = MAKERS[name](model, generator=torch.Generator().manual_seed(3))
    resumed = MAKERS[name](other, generator=torch.Generator())
    advance(name, model, optimizer, 0, stop)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    middle = model[0].weight.detach().clone()
    advance(name, model, optimizer, stop, 10)  # nothing of this may reach what was saved
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    advance(name, other, resumed, stop, 10)
    assert not torch.equal(model[0].weight, middle)
    ends = [(m.state_dict(), o.state_dict()) for m, o in ((model, optimizer), (other, resumed))]
    (found, kinds), (wanted, same) = map(tree_flatten, ends)
    assert kinds == same
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two
    foreign = MAKERS["STE" if name != "STE" else "BayesBiNN"](network(), generator=None)
    with pytest.raises(OptimizerError):
        resumed.load_state_dict(foreign.state_dict())
