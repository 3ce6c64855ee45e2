"""Refusals of the optimizers: a call, its error, and a word of the message."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_makers import BY_CLOSURE, MAKERS, draw, make, network, same, state_of, trained
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import InputError, OptimizerError, PosteriorError
from blr_analysis.learning_rule import optim
from blr_analysis.learning_rule.optim import BSAM, IVON, OGN, Newton, RowOptimizer, Vadam
from blr_analysis.recipe import OPTIMIZERS


def param(*shape: int, **kind: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape or (2,), **kind))


def ivon(**options: Any) -> IVON:
    return IVON([param()], **{"lr": 0.1, "ess": 10.0, **options})


def inside(act: Callable[[Any], Any]) -> None:
    """Acts on an optimizer inside a context of its draw."""
    optimizer = ivon()
    with optimizer.sampled_params():
        act(optimizer)


def after(name: str, act: Callable[[Any, Any], Any]) -> None:
    """Acts on an optimizer and its model after one draw."""
    model, optimizer = trained(name, stop=0)
    with optimizer.sampled_params(train=True):
        model(torch.ones(3, 4).double()).square().mean().backward()
    act(optimizer, model)


def graded(grad: Tensor | None, kind: Any = IVON, **options: Any) -> Any:
    """A step with this gradient."""
    weight = param()
    optimizer = kind([weight], 0.1, 10, **options)
    with optimizer.sampled_params(train=True):
        weight.grad = grad
    optimizer.step()
    return optimizer


def called_backward() -> Tensor:
    loss = A.weight.square().sum()
    loss.backward()
    return loss


def foreign(name: str, value: Any) -> None:
    """Loads a state in which one entry has another value."""
    state = copy.deepcopy(graded(torch.ones(2)).state_dict())
    state["state"][0][name] = value
    ivon().load_state_dict(state)


def saved(name: str) -> Any:
    return trained(name)[1].state_dict()


def draws(optimizer: Any, **options: Any) -> None:
    """Opens a context of a training draw."""
    optimizer.sampled_params(True, **options).__enter__()


def prior(**shapes: int) -> blr.Posterior:
    mean = {name: torch.ones(size) for name, size in shapes.items()}
    return blr.Posterior(mean, mean, prior_precision=1.0, n_data=1)


def unfrozen() -> None:
    """A parameter that the prior lacks was frozen first and is trained now."""
    frozen = param(3).requires_grad_(False)
    optimizer = IVON([param(), frozen], 0.1, 10, prior=prior(w=2))
    frozen.requires_grad_(True)
    draws(optimizer)


A = nn.Linear(2, 1)
B = nn.Linear(2, 1)
OTHER = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).double()
BROKEN_OF_IVON = (
    ("lr", -0.1),
    ("lr", "fast"),
    ("ess", 0.0),
    ("ess", "many"),
    ("hess_init", 0.0),
    ("beta1", 1.0),
    ("beta2", 1.5),
    ("weight_decay", -1e-4),
    ("clip_radius", 0.0),
    ("hess_approx", "exact"),
    ("rescale_lr", "adam"),
)
BROKEN_OF_BAYESBINN = (
    ("lr", 1.5),
    ("temperature", 0.0),
    ("floor", -1.0),
    ("noise", -1.0),
    ("prior", math.nan),
    ("prior", [torch.ones(3)]),
)
NO_ROWS = {
    "Kalman filter": "no elementwise",
    "Newton": "newton runs",
    "STE": "binary runs",
    "SAM": "use SAM",
    "preconditioned SGD": "preconditioned runs",
    "diagonal online Newton": "diagonal_newton runs",
    "natural momentum": "moves runs",
    "bSAM": "use BSAM",
    "adamm": "no row",
    "VOGN": "model must",
}
KINDS = ("IVON", "bSAM", "SLANG", "Newton")
STATES = (None, 3, {}, torch.optim.Adam([param()]).state_dict())
INPUT: list[tuple[Callable[[], Any], str]] = [
    *((lambda n=n, v=v: ivon(**{n: v}), n) for n, v in BROKEN_OF_IVON),
    *(
        (lambda n=n, v=v: IVON([{"params": [param()], n: v}], 0.1, 10), n)
        for n, v in BROKEN_OF_IVON
    ),
    (lambda: ivon().add_param_group({"params": [param()], "hess_approx": "gradsq"}), "all groups"),
    (lambda: ivon(mc_samples=0), "mc_samples"),
    (lambda: ivon(generator=3), r"torch\.Generator"),
    *((lambda n=n: ivon(steps=n), "steps") for n in (0, -3, 2.5, True)),
    (lambda: ivon(steps=9, lr="fast"), "lr"),
    (lambda: ivon(ess=0, hess_init="weights"), "ess"),
    (lambda: ivon(hess_init="weight"), "hess_init"),
    (lambda: IVON([nn.Parameter(torch.zeros(3, 2))], 0.1, 10, hess_init="weights"), "all 0"),
    (lambda: Vadam([param()], 0.1, 9, weight_decay=0), "starts at 0"),
    (lambda: BSAM([param()], 0.1, 10, radius=-1.0), "radius"),
    (lambda: draws(ivon(), divided_by=0), "divided_by"),
    *((lambda lr=lr: Newton([param()], lr=lr), "lr") for lr in (0, -1, 2, math.nan, None)),
    *(
        (lambda n=n, v=v: optim.BayesBiNN([param()], **{"lr": 0.1, "ess": 9, n: v}), n)
        for n, v in BROKEN_OF_BAYESBINN
    ),
    (lambda: optim.STE([param(dtype=torch.half)], 0.1), "float32"),
    (lambda: optim.STE([param()], 0.1, clip=0.0), "clip"),
    *(
        (lambda n=n: optim.STE([param()], 0.1, n), word)
        for n, word in (("IVON", "IVON"), ("OGN", "OGN"), ("bSAM", "BSAM"))
    ),
    (lambda: optim.Dropout([param()], 0.1, keep=0.5), "biases"),
    (lambda: optim.Dropout([param(2, 2)], 0.1, keep=1.5), "keep"),
    (lambda: optim.Dropout([param(2, 2)], 0.1, keep=0.5, dim=2), "dim"),
    (lambda: optim.Dropout([param()], 0.1, "bSAM"), "BSAM"),
    *(
        (lambda n=n, v=v: optim.LearnedDropout([param(2, 2)], 0.1, keep=0.5, **{n: v}), n)
        for n, v in (("keep_lr", -1.0), ("keep_prior", 1.0), ("temperature", 0.0))
    ),
    (lambda: ivon(prior=3), "prior must"),
    (lambda: ivon(prior=prior(w=2), weight_decay=0.1), "leave weight_decay out"),
    (lambda: IVON([param(), param()], 0.1, 10, prior=prior(v=2, w=2)), "named_parameters"),
    (lambda: ivon(prior=prior(w=2)).add_param_group({"params": [param()]}), "of all parameters"),
    (lambda: optim.SAM([param()], 0.1, radius=-1.0), "radius"),
    *(
        (lambda s=s: optim.PreconditionedSGD([param()], 0.1, s), word)
        for s, word in (
            ([], "one tensor of each"),
            ([torch.ones(3)], "one tensor of each"),
            ([1.0], "one tensor"),
            ([torch.tensor([1.0, 0.0])], "positive"),
            ([torch.tensor([1.0, math.nan])], "positive"),
        )
    ),
    (lambda: optim.DiagonalNewton([param()], lr=2.0), "lr"),
    (lambda: optim.Dropout([param()], 0.1, "OGN", weight_decay=1.0), "model"),
    *((lambda n=n: RowOptimizer([param()], n, 0.1), word) for n, word in NO_ROWS.items()),
    (lambda: RowOptimizer([param()], "Adam", 0.1, model=A), "leave it out"),
    (lambda: optim.SLANG(nn.Linear(2, 1), 0.1, 9, rank=3), "rank"),
    (lambda: optim.VOGGN(A, 0.1, 9, likelihood="huber"), "likelihood"),
    (lambda: optim.NoisyKFAC(A, -1.0, 9), "lr"),
    (lambda: optim.Mixture([ivon()]), "two or more"),
    (lambda: optim.Mixture([ivon()] * 2), "same parameter"),
    (lambda: optim.Mixture([ivon(), IVON([param(3)], 0.1, 10)]), "same shapes"),
    (lambda: optim.Mixture([ivon(), Vadam([param()], 0.1, 9)]), "are IVON"),  # type: ignore[list-item]
    *(
        (lambda k=k, p=p: k(p, lr=0.1, ess=10), "params")
        for k in (IVON, Vadam, BSAM, Newton)
        for p in (None, 3, [], A, {param()})
    ),
    *((lambda g=g: ivon().add_param_group(g), "a group") for g in (None, 3, {}, [param()])),
    (lambda: IVON([param(dtype=torch.cfloat)], 0.1, 10), "complex64"),
    (lambda: Newton([{"params": [A.weight]}, {"params": [A.bias]}]), "one group"),
    (lambda: Newton(nn.Linear(2, 1).half().parameters()), "float32"),
    (lambda: Newton(nn.Linear(100, 100).parameters()), "fit_laplace"),
    (lambda: Newton(A.parameters()).step(lambda: -A(torch.eye(2)).square().mean()), "definite"),
]
OPTIMIZER: list[tuple[Callable[[], Any], str]] = [
    (lambda: draws(OGN(A.parameters(), 0.1, 9, model=B)), "not in model"),
    (unfrozen, "frozen: make"),
    (lambda: ivon(prior=prior(w=2)).load_state_dict(graded(torch.ones(2)).state_dict()), "prior="),
    (lambda: ivon().step(), "without a draw"),
    (lambda: RowOptimizer([param()], "Adam", 0.1).step(), "backward"),
    (lambda: RowOptimizer([param()], "Adam", 0.1).sampled_params().__enter__(), "no posterior"),
    (lambda: graded(None), r"loss\.backward"),
    (lambda: graded(torch.ones(2).to_sparse()), "sparse"),
    (lambda: graded(torch.full((2,), 1e20)), "overflow"),
    *(
        (lambda word=word: inside(lambda o: getattr(o, word)()), f"{word}.* inside")
        for word in ("step", "state_dict", "drop_draws")
    ),
    (lambda: inside(lambda o: o.load_state_dict({})), "load_state_dict.* inside"),
    (lambda: inside(draws), "context inside"),
    (lambda: after("IVON", lambda o, m: (m.zero_grad(False), draws(o))), "set_to_none"),
    (lambda: after("bSAM", lambda o, m: o.step()), "without its adversary"),
    (lambda: after("bSAM", lambda o, m: draws(o)), "two samples"),
    (lambda: BSAM([param()], 0.1, 10).adversarial_params().__enter__(), "without a sample"),
    (lambda: after("SLANG", lambda o, m: draws(o)), "one draw"),
    (lambda: copy.deepcopy(make("SLANG", network())), "copied"),
    (lambda: after("IVON", lambda o, m: copy.deepcopy(o)), "copy the optimizer after"),
    (lambda: make("SLANG", network()).posterior(), "after a step"),
    (lambda: Newton([param()]).step(), "closure"),
    (lambda: Newton(A.parameters()).step(called_backward), "without backward"),
    *(
        (lambda loss=loss: Newton([param()]).step(lambda: loss), "loss")
        for loss in (None, 0.3, torch.ones(2), torch.tensor(math.nan))
    ),
    *((lambda n=n: make(n, network()).step(3), "closure") for n in KINDS),
    *(
        (lambda n=n, s=s: make(n, network()).load_state_dict(s), "load a state_dict")
        for n in KINDS
        for s in STATES
    ),
    (lambda: make("Adam", network()).load_state_dict(saved("Vadam")), "Vadam"),
    (lambda: ivon().load_state_dict(saved("IVON itself")), "load a state"),
    (lambda: Newton(OTHER.parameters()).load_state_dict(saved("Newton")), "does not fit"),
    (lambda: foreign("hess", torch.ones(3)), r"Size\(\[3\]\)"),
    (lambda: foreign("hess", -torch.ones(2)), "not positive"),
    (lambda: foreign("hess", torch.full((2,), math.nan)), "finite"),
    (lambda: foreign("momentum", [0.0]), "momentum"),
    (lambda: foreign("momentum", None), "does not fit"),
]


@pytest.mark.parametrize(
    ("error", "call", "word"),
    [
        *((InputError, *case) for case in INPUT),
        *((OptimizerError, *case) for case in OPTIMIZER),
        (TypeError, lambda: Vadam([param()], 0.1, 10, speed=1), "speed"),
        (TypeError, lambda: Vadam([param()], 0.1, 10, prior=prior(w=2)), "prior"),
        (PosteriorError, lambda: ivon(prior=prior(w=3)), "another model"),
    ],
)
def test_refused(error: type[Exception], call: Callable[[], Any], word: str) -> None:
    with pytest.raises(error, match=word):
        call()


BROKEN = {"lr": math.nan, "ess": -5, "weight_decay": -3, "beta1": 1.0, "hess_init": "much"}


@pytest.mark.parametrize("setting", BROKEN)
@pytest.mark.parametrize("name", [n for n in MAKERS if n not in BY_CLOSURE])
def test_a_setting_that_is_broken_later(name: str, setting: str) -> None:
    model, optimizer = trained(name, stop=0)
    before = state_of(model, optimizer)
    optimizer.param_groups[-1][setting] = BROKEN[setting]
    with pytest.raises(InputError, match=f"{setting} must be"):
        draw(name, optimizer, lambda: model(torch.ones(3, 4).double()).square().mean())
    assert same(state_of(model, optimizer), before)


def test_a_schedule_may_end_at_zero_less_rounding() -> None:
    optimizer = graded(torch.full((2,), 1e10))  # large, but no error
    optimizer.param_groups[0]["lr"] = -1e-18
    draws(optimizer)


def test_every_optimizer_has_its_name() -> None:
    classes = [c for c in vars(optim).values() if isinstance(c, type)]
    kinds = {c for c in classes if issubclass(c, RowOptimizer)}
    assert kinds - {RowOptimizer} == {*optim.BY_NAME.values()}
    assert optim.BY_NAME.items() <= OPTIMIZERS.items()
    assert all(name == kind.__name__.lower() for name, kind in optim.BY_NAME.items())
    assert blr.IVON is optim.IVON
    assert blr.VOGN is optim.VOGN
