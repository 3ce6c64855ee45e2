"""Every optimizer of the rule, on a small network, with a generator of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.learning_rule import optim
from blr_analysis.learning_rule.expectations import GAUSS_NEWTON
from blr_analysis.learning_rule.table import ROWS, runs_elementwise

N = 60
BATCH = 12
G = torch.Generator().manual_seed(1)
X = torch.randn(N, 4, generator=G)
Y = torch.randint(3, (N,), generator=G)


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def row(model: nn.Module, generator: Any, name: str, params: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"lr": 0.01, "ess": N, "hess_init": 0.5, "weight_decay": 0.01}
    settings |= {"generator": generator}
    if name == "AdaDelta":  # whose first steps are √eps
        settings |= {"lr": 1.0, "eps": 1e-4}
    if ROWS[name].curvature == GAUSS_NEWTON:
        settings["model"] = model
    params = [*model.parameters()] if params is None else params
    if name == "bSAM":
        return optim.BSAM(params, **{**settings, **options})
    return optim.RowOptimizer(params, name, **{**settings, **options})


def dropout(
    model: Any,
    generator: Any,
    row: str,
    params: Any = None,
    kind: Any = optim.Dropout,
    **options: Any,
) -> Any:
    last = model[2].weight
    groups = [{"params": [last], "keep": 0.6}]
    groups += [{"params": [p for p in model.parameters() if p is not last]}]
    settings: dict[str, Any] = {"lr": 0.01, "ess": N, "generator": generator}
    if row in ("VOGN", "OGN"):
        settings |= {"model": model, "weight_decay": 0.1}
    settings |= options
    return kind(groups if params is None else params, row=row, **settings)


def of(kind: type, **settings: Any) -> Callable[..., Any]:
    def make(model: nn.Module, generator: Any, params: Any = None, **options: Any) -> Any:
        params = [*model.parameters()] if params is None else params
        arguments = {**settings, **options}
        if kind not in (optim.STE, optim.Newton):  # they draw nothing
            arguments.setdefault("generator", generator)
        return kind(params, **arguments)

    return make


def preconditioned(model: Any, generator: Any, params: Any = None, **options: Any) -> Any:
    """S counts up from 1, parameter by parameter."""
    parameters = [*model.parameters()] if params is None else params
    groups = parameters if isinstance(parameters[0], dict) else [{"params": parameters}]
    scales = [
        1 + torch.arange(p.numel()).double().view(p.shape) / 10
        for group in groups
        for p in group["params"]
    ]
    settings = {"lr": 0.1, "weight_decay": 0.02, "generator": generator, **options}
    return optim.PreconditionedSGD(parameters, preconditioner=scales, **settings)


def whole(kind: type) -> Callable[..., Any]:
    settings = {"lr": 0.1, "ess": N, "weight_decay": 0.05, "beta2": 0.8, "damping": 0.02}

    def make(model: nn.Module, generator: Any, **options: Any) -> Any:
        return kind(model, generator=generator, **settings, **options)

    return make


STRUCTURED = (optim.NoisyKFAC, optim.SLANG, optim.VOGGN, optim.OGGN)
WHOLE = tuple(kind.__name__ for kind in STRUCTURED)  # of a whole model, and one draw a step
ELEMENTWISE = [name for name, algorithm in ROWS.items() if runs_elementwise(algorithm)]
MAKERS: dict[str, Callable[..., Any]] = {
    **{name: partial(row, name=name) for name in ELEMENTWISE},
    "IVON itself": of(optim.IVON, lr=0.1, ess=N, beta2=0.9),
    "IVON, gradsq": of(optim.IVON, lr=0.1, ess=N, beta2=0.9, hess_approx="gradsq", clip_radius=0.5),
    "IVON, fisher": of(
        optim.IVON, lr=0.1, ess=N, beta2=0.9, hess_approx="fisher", batch_size=BATCH
    ),
    "IVON, by the gradient": of(
        optim.IVON, lr=0.01, ess=N, beta2=0.9, rescale_lr="gradient", clip_radius=5.0
    ),
    "Vadam itself": of(optim.Vadam, lr=0.01, ess=N),
    "Vprop itself": of(optim.Vprop, lr=0.01, ess=N),
    **{f"dropout, {name}": partial(dropout, row=name) for name in ("SGD", "Adam", "VOGN")},
    "BayesBiNN": of(optim.BayesBiNN, lr=0.01, ess=N, beta1=0.5, prior=0.3),
    "STE": of(optim.STE, lr=0.05),
    "STE with Adam": of(optim.STE, lr=0.05, row="Adam", clip=2.0),
    **{kind.__name__: whole(kind) for kind in STRUCTURED},
    "SAM": of(optim.SAM, lr=0.05, radius=0.3, weight_decay=0.075),
    "PreconditionedSGD": preconditioned,
    "LearnedDropout": partial(dropout, row="SGD", lr=0.1, kind=optim.LearnedDropout, keep_lr=0.05),
    "Newton": of(optim.Newton, lr=0.5, ess=N, weight_decay=1.0),
    "DiagonalNewton": of(optim.DiagonalNewton, lr=0.3, ess=N, weight_decay=1.0, beta2=0.8),
}

BINARY = ("BayesBiNN", "STE", "STE with Adam")
BY_CLOSURE = ("Newton", "DiagonalNewton")  # their closure returns the loss, with no backward pass
ALONE = (*BY_CLOSURE, *WHOLE)  # one draw a step


def make(name: str, model: nn.Module, seed: int = 3, **options: Any) -> Any:
    return MAKERS[name](model, torch.Generator().manual_seed(seed), **options)


def loss_of(model: Any, t: int) -> Tensor:
    """The loss of the t-th minibatch."""
    rows = slice(BATCH * t % N, BATCH * t % N + BATCH)
    outputs = model(X[rows].to(model[0].weight.dtype))
    wide = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
    return nn.functional.cross_entropy(wide, Y[rows])


def draw(name: str, optimizer: Any, loss: Callable[[], Tensor], **options: Any) -> None:
    """One draw with its gradients, however many looks the row takes."""
    with optimizer.sampled_params(train=True, **options):
        optimizer.zero_grad()
        loss().backward()
    if hasattr(optimizer, "adversarial_params"):
        with optimizer.adversarial_params(**options):
            loss().backward()


def step(name: str, optimizer: Any, loss: Callable[[], Tensor], draws: int = 1) -> None:
    """One step of any optimizer, after so many draws."""
    if name in BY_CLOSURE:
        optimizer.step(loss)
        return
    for _ in range(draws):
        draw(name, optimizer, loss)
    optimizer.step()


def advance(name: str, model: nn.Module, optimizer: Any, start: int, stop: int) -> None:
    """Draws ``start`` to ``stop``, with a step after every second one where it can take several."""
    for t in range(start, stop):
        if name in ALONE:
            step(name, optimizer, lambda t=t: loss_of(model, t))
            continue
        draw(name, optimizer, lambda t=t: loss_of(model, t))
        if t % 2:
            optimizer.step()


def trained(
    name: str, dtype: torch.dtype = torch.float64, stop: int = 2, seed: int = 3
) -> tuple[Any, Any]:
    """A model and its optimizer after so many draws."""
    model = network(dtype)
    optimizer = make(name, model, seed)
    advance(name, model, optimizer, 0, stop)
    return model, optimizer


def state_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Copies of the weights and of everything in the state."""
    state = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
    tensors = [torch.as_tensor(v) for v in state if isinstance(v, int | float | Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *tensors)]


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))
