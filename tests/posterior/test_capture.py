"""What optimizers learned: one contract over all of them, live and saved, each in its own scale."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import ivon
import pytest
import torch
from models import Graph
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from blr_analysis.checkpoints import Checkpoints
from blr_analysis.errors import OptimizerError, PosteriorError
from blr_analysis.learning_rule.optim import (
    BSAM,
    IVON,
    OGN,
    VOGN,
    RowOptimizer,
    Vadam,
    Vprop,
)
from blr_analysis.posterior import Posterior
from blr_analysis.task import Task

N = 200
DELTA = 3.0
DECAY = 0.1
STEPS = 5
Tree = dict[str, Tensor]


def net(dtype: torch.dtype = torch.float64) -> Any:
    """Two layers and a norm; in float64 unless said otherwise."""
    parts = dict(first=nn.Linear(3, 4), norm=nn.LayerNorm(4), last=nn.Linear(4, 2))
    return Graph(lambda m, x: m.last(m.norm(torch.tanh(m.first(x)))), **parts).to(dtype)


def gradients(model: nn.Module, seed: int = 0) -> Tree:
    """Of one step, all different, smaller from step to step."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        n: torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for n, p in model.named_parameters()
    }
    return {n: g / (1 + 3 * seed) for n, g in drawn.items()}


def step(optimizer: Any, model: nn.Module, gradients_by_name: Tree) -> None:
    for n, p in model.named_parameters():
        has_gradient = n in gradients_by_name and p.requires_grad
        p.grad = gradients_by_name[n].to(p.dtype) if has_gradient else None
    optimizer.step()


def learn(optimizer: Any, model: nn.Module, steps: int = STEPS) -> None:
    """Steps of an optimizer that draws weights."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(8, 3, generator=generator, dtype=dtype)
        y = torch.randint(2, (8,), generator=generator)
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
        if isinstance(optimizer, BSAM):
            with optimizer.adversarial_params():
                cross_entropy(model(x), y).backward()
        optimizer.step()


def two_groups(model: Any, **last: Any) -> list[dict[str, Any]]:
    """In an order that is not the model's."""
    return [
        {"params": [*model.last.parameters(), *model.norm.parameters()], **last},
        {"params": list(model.first.parameters())},
    ]


class CaptureContract:
    """What every optimizer's posterior promises; a member is how it is made, its kind, and what its
    S is made of."""

    assumed: ClassVar[dict[str, Any]]  # what it does not know itself

    def make(self, member: Any, groups: Any, model: nn.Module) -> Any:
        raise NotImplementedError

    def train(self, optimizer: Any, model: nn.Module) -> None:
        raise NotImplementedError

    def expected(self, member: Any, optimizer: Any, model: nn.Module) -> Tree:
        raise NotImplementedError

    def trained(self, member: Any, groups: Callable[[Any], Any]) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = net()
        optimizer = self.make(member, groups(model), model)
        self.train(optimizer, model)
        return model, optimizer

    @pytest.mark.parametrize("groups", [lambda m: m.parameters(), two_groups])
    def test_live_and_saved_are_the_definition(self, member: Any, groups: Any, tmp_path) -> None:
        model, optimizer = self.trained(member, groups)
        truth = self.expected(member, optimizer, model)
        q = Posterior.from_optimizer(optimizer, model, **self.assumed)
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        order = [
            n
            for g in optimizer.param_groups
            for p in g["params"]
            for n, parameter in model.named_parameters()
            if parameter is p
        ]
        saved = Posterior.from_checkpoint(tmp_path / "state.pt", model, names=order, **self.assumed)
        for name, p in model.named_parameters():
            torch.testing.assert_close(q.precision(name), truth[name], rtol=1e-6, atol=0)
            assert torch.equal(saved.precision(name), q.precision(name))
            assert torch.equal(q.mean[name], p)
            assert torch.equal(saved.mean[name], p)
        assert list(q.mean) == [n for n, _ in model.named_parameters()]
        assert (q.n_data, q.record["kind"]) == (N, member[1])
        assert q.record["step"] == STEPS
        assert json.loads(json.dumps(q.record)) == q.record

    def test_what_is_frozen_or_untouched(self, member: Any) -> None:
        torch.manual_seed(0)
        model = net()
        model.register_parameter("idle", nn.Parameter(torch.ones(3, dtype=torch.float64)))
        model.first.bias.requires_grad_(False)
        groups = [
            {"params": [model.idle, model.first.bias, *model.last.parameters()]},
            {"params": [model.first.weight]},
        ]
        optimizer = self.make(member, groups, model)
        self.train(optimizer, model)
        q = Posterior.from_optimizer(optimizer, model, **self.assumed)
        assert list(q.mean) == ["idle", "first.weight", "last.weight", "last.bias"]
        assert q.record["never_updated"] == ["idle"]
        assert q.record["frozen"] == ["first.bias"]
        assert q.record["not_in_optimizer"] == ["norm.weight", "norm.bias"]
        prior = torch.full_like(model.idle, self.assumed.get("prior_precision", N * DECAY))
        torch.testing.assert_close(q.precision("idle"), prior)

    def test_it_does_not_follow_further_training(self, member: Any) -> None:
        model, optimizer = self.trained(member, lambda m: m.parameters())
        q = Posterior.from_optimizer(optimizer, model, **self.assumed)
        mean = q.mean["first.weight"].clone()
        precision = q.precision("first.weight").clone()
        self.train(optimizer, model)
        assert torch.equal(q.mean["first.weight"], mean)
        assert torch.equal(q.precision("first.weight"), precision)

    def test_one_that_has_not_stepped_is_refused(self, member: Any) -> None:
        model = net()
        with pytest.raises(OptimizerError, match="has not stepped"):
            Posterior.from_optimizer(
                self.make(member, model.parameters(), model), model, **self.assumed
            )


SECOND_MOMENTS: dict[str, tuple[Callable[[Any], Any], str, float]] = {
    "Adam": (torch.optim.Adam, "adam_v", 0.999),
    "Adam, fused": (lambda p: torch.optim.Adam(p, fused=True), "adam_v", 0.999),
    "Adam, amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), "adam_v", 0.999),
    "AdamW": (lambda p: torch.optim.AdamW(p, betas=(0.5, 0.95)), "adam_v", 0.95),
    "NAdam": (torch.optim.NAdam, "adam_v", 0.999),
    "RAdam": (torch.optim.RAdam, "adam_v", 0.999),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, alpha=0.9), "rmsprop_v", 0.9),
    "RMSprop, centered": (lambda p: torch.optim.RMSprop(p, centered=True), "rmsprop_v", 0.99),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.3), "adagrad_v", 1),
    "Adam's row": (lambda p: RowOptimizer(p, "Adam", lr=0.01), "adam_v", 0.999),
    "AdamW's row": (lambda p: RowOptimizer(p, "AdamW", lr=0.01), "adam_v", 0.999),
    "RMSprop's row": (lambda p: RowOptimizer(p, "RMSprop", lr=0.01), "rmsprop_v", 0.999),
}


class TestSecondMoments(CaptureContract):
    """S = N √v̂ + δ, v̂ the mean of squared gradients with the weights of the definition."""

    assumed: ClassVar[dict[str, Any]] = {"n_data": N, "prior_precision": DELTA}

    @pytest.fixture(params=SECOND_MOMENTS)
    def member(self, request: pytest.FixtureRequest) -> Any:
        return SECOND_MOMENTS[request.param]

    def make(self, member: Any, groups: Any, model: nn.Module) -> Any:
        return member[0](groups)

    def train(self, optimizer: Any, model: nn.Module) -> None:
        for t in range(STEPS):
            step(optimizer, model, {n: g for n, g in gradients(model, t).items() if n != "idle"})

    def expected(self, member: Any, optimizer: Any, model: nn.Module) -> Tree:
        return {n: N * v.sqrt() + DELTA for n, v in self.squares(member, model).items()}

    def squares(self, member: Any, model: nn.Module) -> Tree:
        weights = [member[2] ** (STEPS - 1 - t) for t in range(STEPS)]
        history = [gradients(model, t) for t in range(STEPS)]
        return {
            n: torch.stack([w * h[n] ** 2 for w, h in zip(weights, history, strict=True)]).sum(0)
            / sum(weights)
            for n in history[0]
        }

    def test_squared(self, member: Any) -> None:
        model, optimizer = self.trained(member, lambda m: m.parameters())
        q = Posterior.from_optimizer(
            optimizer, model, scaling="squared", batch_size=16, **self.assumed
        )
        for name, v in self.squares(member, model).items():
            torch.testing.assert_close(q.precision(name), N * 16 * v + DELTA)
        assert (q.record["scaling"], q.record["batch_size"]) == ("squared", 16)
        assert q.record["bias_corrected"]
        assert "v_hat" in q.record["definition"]


DRAWS = 200
SETTINGS: dict[str, Any] = {"lr": 0.01, "ess": N, "weight_decay": DECAY, "hess_init": 0.3}
LEARNED: dict[str, tuple[Callable[[Any, nn.Module], Any], str]] = {
    "VOGN": (lambda g, m: VOGN(g, model=m, **SETTINGS), "vogn"),
    "OGN": (lambda g, m: OGN(g, model=m, **SETTINGS), "ogn"),
    "Vadam": (lambda g, m: Vadam(g, **SETTINGS), "vadam"),
    "Vprop": (lambda g, m: Vprop(g, **SETTINGS), "vprop"),
    "BSAM": (lambda g, m: BSAM(g, **SETTINGS), "bsam"),
    "IVON": (lambda g, m: IVON(g, squares=False, **SETTINGS), "ivon"),
    "IVON's row": (lambda g, m: RowOptimizer(g, "IVON", **SETTINGS), "ivon"),
}


@pytest.mark.filterwarnings("ignore::blr_analysis.errors.InitialPrecisionWarning")
class TestLearned(CaptureContract):
    """S = N (h − β₂ᵗ h₀) / (1 − β₂ᵗ) + λ, not below λ, of the h that the optimizer draws its
    weights with."""

    assumed: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(params=LEARNED)
    def member(self, request: pytest.FixtureRequest) -> Any:
        return LEARNED[request.param]

    def make(self, member: Any, groups: Any, model: nn.Module) -> Any:
        return member[0](groups, model)

    def train(self, optimizer: Any, model: nn.Module) -> None:
        learn(optimizer, model)

    def expected(self, member: Any, optimizer: Any, model: nn.Module) -> Tree:
        left = optimizer.param_groups[0]["beta2"] ** STEPS
        hess = {n: optimizer.state[p]["hess"] for n, p in model.named_parameters()}
        learned = {n: (h - left * SETTINGS["hess_init"]) / (1 - left) for n, h in hess.items()}
        return {n: N * h.clamp_min(0) + N * DECAY for n, h in learned.items()}

    def test_predictions_draw_weights_as_training_did(self, member: Any) -> None:
        model, optimizer = self.trained(member, lambda m: m.parameters())
        q = Posterior.from_optimizer(optimizer, model)
        x = torch.eye(3, dtype=torch.float64)
        task = Task(model, (x, torch.zeros(3).long()))
        ours = q.predict(task, draws=DRAWS).mean
        total = torch.zeros(3, 2, dtype=torch.float64)
        squares = torch.zeros(3, 2, dtype=torch.float64)
        for _ in range(DRAWS):
            with optimizer.sampled_params(), torch.no_grad():
                p = model(x).softmax(-1)
            total += p / DRAWS
            squares += p.square() / DRAWS
        error = ((squares - total.square()) * 2 / DRAWS).sqrt()
        assert ours is not None
        assert ((ours - total).abs() < 5 * error).all()

    def test_it_knows_its_data_and_its_prior(self, member: Any) -> None:
        model, optimizer = self.trained(member, lambda m: m.parameters())
        consistent = Posterior.from_optimizer(optimizer, model, n_data=N, prior_precision=N * DECAY)
        assert consistent.prior_precision == pytest.approx(N * DECAY)
        for wrong, word in (({"n_data": 201}, "201"), ({"prior_precision": 0.01}, "contradicts")):
            with pytest.raises(OptimizerError, match=word):
                Posterior.from_optimizer(optimizer, model, **wrong)
        tempered = Posterior.from_optimizer(optimizer, model, n_data=50, scaling="ess")
        assert tempered.n_data == 50
        assert torch.equal(tempered.precision("last.bias"), consistent.precision("last.bias"))


def test_a_second_moment_that_did_not_start_at_zero_is_taken_as_it_is() -> None:
    model = net()
    optimizer = RowOptimizer(model.parameters(), "Adam", lr=0.01, beta2=0.9, hess_init=0.3)
    step(optimizer, model, gradients(model))
    q = Posterior.from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)
    for name, g in gradients(model).items():
        truth = N * (0.9 * 0.3 + 0.1 * g.square()).sqrt() + DELTA
        torch.testing.assert_close(q.precision(name), truth)


PLAIN: dict[str, Callable[[Any], Any]] = {
    "one group": lambda m: m.parameters(),
    "two groups": lambda m: two_groups(m, hess_init=0.7, weight_decay=2 * DECAY),
}


def of_ivon_opt(groups: Any, **options: Any) -> Any:
    return ivon.IVON(groups, lr=0.1, ess=N, weight_decay=DECAY, beta2=0.9, hess_init=0.5, **options)


@pytest.mark.filterwarnings("ignore::blr_analysis.errors.InitialPrecisionWarning")
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("groups", PLAIN)
def test_ivon_opts_own_vector_is_read_in_the_order_of_its_groups(
    groups: str, saved: bool, tmp_path: Path
) -> None:
    """As the vectors stand in ``param_groups``, without their start where steps were counted."""
    torch.manual_seed(0)
    model = net()
    model.norm.bias.requires_grad_(False)
    optimizer = of_ivon_opt(PLAIN[groups](model))
    learn(optimizer, model)
    if saved:
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        names = {id(p): n for n, p in model.named_parameters()}
        order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        q = Posterior.from_checkpoint(tmp_path / "state.pt", model, names=order)
    else:
        q = Posterior.from_optimizer(optimizer, model)
    assert q.n_data == N
    assert q.record["kind"] == "ivon"
    assert q.record["step"] == (None if saved else STEPS)  # which its state does not count
    for group in optimizer.param_groups:
        hess = group["hess"]
        if not saved:
            left = 0.9**STEPS
            hess = ((hess - left * group["hess_init"]) / (1 - left)).clamp_min(0)
        vector = N * (hess + group["weight_decay"])
        for p in group["params"]:
            name = next(n for n, parameter in model.named_parameters() if parameter is p)
            part = vector[: p.numel()]
            vector = vector[p.numel() :]
            if p.requires_grad:
                torch.testing.assert_close(q.precision(name), part.view_as(p))
        assert not len(vector)
    assert "norm.bias" not in q.mean
    q.save(tmp_path / "q.safetensors")


def test_ivon_opt_without_a_step_or_of_another_model_is_refused(tmp_path: Path) -> None:
    model = net()
    optimizer = of_ivon_opt(model.parameters())
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    for ask in (
        lambda: Posterior.from_optimizer(optimizer, model),
        lambda: Posterior.from_checkpoint(tmp_path / "state.pt", model),
    ):
        with pytest.raises(OptimizerError, match="has not stepped"):
            ask()
    learn(optimizer, model)
    optimizer.param_groups[0]["hess"] = optimizer.param_groups[0]["hess"][1:]
    with pytest.raises(OptimizerError, match="33 numbers, its parameters 34"):
        Posterior.from_optimizer(optimizer, model)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    with pytest.raises(OptimizerError, match="does not fit this model"):
        Posterior.from_checkpoint(tmp_path / "state.pt", model)


@pytest.mark.filterwarnings("ignore::blr_analysis.errors.InitialPrecisionWarning")
def test_checkpoints_keep_what_ivon_opt_had_learned_by_then(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = net()
    optimizer = of_ivon_opt(model.parameters())
    checkpoints = Checkpoints(model, steps=8, folder=tmp_path, optimizer=optimizer)
    vectors = {}
    for t in range(1, 9):
        learn(optimizer, model, 1)
        checkpoints.step()
        vectors[t] = optimizer.param_groups[0]["hess"].clone()
    q = checkpoints.posterior(n_data=N)
    steps_kept = [earlier.record["step"] for earlier in q.earlier]
    assert steps_kept == [1, 2, 4]
    assert q.record["step"] == optimizer.current_step == 8
    for posterior, t in zip((*q.earlier, q), (1, 2, 4, 8), strict=True):
        flat = torch.cat([posterior.precision(n).flatten() for n in posterior.mean])
        hess = (vectors[t] - 0.9**t * 0.5) / (1 - 0.9**t)
        torch.testing.assert_close(flat, N * (hess.clamp_min(0) + DECAY))


def test_parameters_with_different_numbers_of_steps_are_each_corrected() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    first_gradients = gradients(model)
    step(optimizer, model, first_gradients)
    step(optimizer, model, {n: g for n, g in first_gradients.items() if n.startswith("last")})
    q = Posterior.from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)
    for name, g in first_gradients.items():
        torch.testing.assert_close(q.precision(name), N * g.abs() + DELTA)


def test_half_precision_is_widened_with_a_warning() -> None:
    dtype = torch.bfloat16
    model = net(dtype)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    step(optimizer, model, gradients(model))
    with pytest.warns(UserWarning, match=r"'first\.weight'.*half precision"):
        q = Posterior.from_optimizer(optimizer, model, n_data=N, prior_precision=DELTA)
    assert q.precision("first.weight").dtype == torch.float32
    assert q.mean["first.weight"].dtype == dtype
    expected = N * gradients(model)["first.weight"].to(dtype).float().abs() + DELTA
    torch.testing.assert_close(q.precision("first.weight"), expected, rtol=0.01, atol=0.1)


def test_a_subclass_and_a_wrapper_are_read_like_their_base() -> None:
    class Mine(torch.optim.AdamW):
        pass

    model = net()
    inner = Mine(model.parameters())
    step(inner, model, gradients(model))
    wrapped: Any = SimpleNamespace(optimizer=inner)
    assumed = {"n_data": N, "prior_precision": DELTA}
    of_inner = Posterior.from_optimizer(inner, model, **assumed)
    of_wrapped = Posterior.from_optimizer(wrapped, model, **assumed)
    assert torch.equal(of_inner.precision("last.bias"), of_wrapped.precision("last.bias"))
    assert of_inner.record["optimizer"].endswith("Mine")


@pytest.mark.parametrize(("start", "rounds"), [(1e4, 4), (1e-4, 1)])
def test_an_estimate_that_is_mostly_its_start_is_said_to_be(
    start: float, rounds: int, tmp_path: Path
) -> None:
    """By what is left of it in h, for long of a large one; a small one by its weight."""
    torch.manual_seed(0)
    model = net()
    optimizer = VOGN(model.parameters(), model=model, lr=1e-3, ess=N, beta2=0.9, hess_init=start)
    learn(optimizer, model, 5 * rounds)
    q = Posterior.from_optimizer(optimizer, model)
    share = q.record["initial_share"]
    weight = 0.9 ** (5 * rounds)
    hess = torch.cat([optimizer.state[p]["hess"].flatten() for p in model.parameters()])
    left = min(weight * start / float(hess.mean()), 1.0)
    assert share == pytest.approx(weight if start < 1 else left)
    assert "of hess is its start, which was subtracted" in q.note
    q.save(tmp_path / "q.safetensors")
    loaded = Posterior.load(tmp_path / "q.safetensors")
    assert repr(loaded) == repr(q)
    assert f"initial_share={share:.2g}" in repr(q)
    assert loaded.start == q.start
    learn(optimizer, model, 200)
    after = Posterior.from_optimizer(optimizer, model)
    assert after.record["initial_share"] < 0.1
    assert not after.note


@pytest.mark.parametrize("kind", [IVON, torch.optim.Adam])
def test_tokens_scale_the_precision_and_sequences_are_counted(kind: Any) -> None:
    """A mean over the tokens of 6 sequences, as of so many examples of one token each."""
    torch.manual_seed(0)
    ids = torch.randint(5, (6, 4))
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)).double()
    settings: dict[str, Any] = {}
    prior = {"prior_precision": 2.0}
    contradictions = []
    if kind is IVON:
        settings = {"ess": 24, "weight_decay": 0.1, "beta2": 0.5}
        prior = {}  # it knows its own
        contradictions = [{"n_data": 6}, {"n_data": 6, "tokens": 7}, {"tokens": 24}]
    optimizer = kind(model.parameters(), lr=0.01, **settings)
    for _ in range(3):
        draw = optimizer.sampled_params(train=True) if kind is IVON else nullcontext()
        with draw:
            optimizer.zero_grad()
            cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
    q = Posterior.from_optimizer(optimizer, model, n_data=6, tokens=24, **prior)
    one_by_one = Posterior.from_optimizer(optimizer, model, n_data=24, **prior)
    assert (q.n_data, q.record["tokens"]) == (6, 24)
    for name in q.mean:
        assert torch.equal(q.precision(name), one_by_one.precision(name))
    task = Task(model, (ids, ids), likelihood="tokens")
    assert q.on(task).n_data == task.n_data
    for wrong in contradictions:
        with pytest.raises(OptimizerError, match="tokens"):
            Posterior.from_optimizer(optimizer, model, **wrong)
    with pytest.raises(PosteriorError, match="tokens"):
        one_by_one.on(task)
