"""Kronecker factors collected while a model trains."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from models import mlp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.posterior import KroneckerRecorder

N = 24


class Images(nn.Module):
    """Convolutions in groups, a norm, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, groups=2)
        self.norm = nn.GroupNorm(2, 4)
        self.twice = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.first(x))).mean((2, 3))
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(h)))))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Linear(4, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(self.norm(self.table(ids)))).mean(1))


def example(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(0)
    models = {
        "mlp": (mlp(), torch.randn(N, 4, generator=g).double()),
        "images": (Images().double(), torch.randn(N, 2, 5, 5, generator=g).double()),
        "words": (Words().double(), torch.randint(7, (N, 6), generator=g)),
    }
    model, x = models[name]
    return model.train(), x, torch.arange(N) % 3


def passed(model: nn.Module, x: Tensor, y: Tensor, size: int, lr: float = 0.0, **loss) -> None:
    """One epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for chosen in torch.arange(len(x)).split(size):
        optimizer.zero_grad()
        (
            loss.get("times", 1.0)
            * cross_entropy(model(x[chosen]), y[chosen], reduction=loss.get("reduction", "mean"))
        ).backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["mlp", "images", "words"])
@pytest.mark.parametrize(
    "loss", [{}, {"reduction": "sum"}, {"times": 0.25}], ids=["mean", "sum", "scaled"]
)
def test_at_fixed_weights_the_factors_are_those_of_a_fit(name: str, loss: dict) -> None:
    model, x, y = example(name)
    recorder = KroneckerRecorder(
        model, every=1, reduction=loss.get("reduction", "mean"), scale=loss.get("times", 1.0)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passed(model, x, y, 6, **loss)
    assert recorder.factors and recorder.recorded == N // 6
    q = blr.Posterior.from_recorder(recorder, model, n_data=N, prior_precision=2.0)
    task = blr.Task(model, (x, y))
    fit = blr.fit_laplace(task, curvature="empirical_fisher", prior_precision=2.0)
    for theirs in fit.form.blocks:
        right, left = recorder.factors[theirs.key]
        for basis, factor in ((theirs.right, right), (theirs.left, left)):
            turned = basis.mT @ factor @ basis  # the eigenvectors of one are those of the other
            off = turned - torch.diag_embed(turned.diagonal(0, -2, -1))
            assert float(off.norm()) < 1e-10 * float(factor.norm())
    for parameter in fit.form.plain:  # norms and embeddings: exactly
        torch.testing.assert_close(q.precision(parameter), fit.precision(parameter))


@pytest.mark.parametrize("every", [1, 100])
def test_accumulated_microbatches_take_a_scale_and_are_warned_of_without(every: int) -> None:
    def recorded(**scale: float) -> KroneckerRecorder:
        model, x, y = example("mlp")
        recorder = KroneckerRecorder(model, every=every, **scale)
        for chosen in torch.arange(N).split(N // 2):
            (cross_entropy(model(x[chosen]), y[chosen]) / 2).backward()
        return recorder

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled = recorded(scale=0.5)
    with pytest.warns(UserWarning, match="scale="):
        assert recorded().recorded == scaled.recorded
    model, x, y = example("mlp")
    seen = slice(None) if every == 1 else slice(N // 2)
    d = (model(x).softmax(1) - nn.functional.one_hot(y, 3)).detach()[seen]
    torch.testing.assert_close(scaled.factors["2.weight"][1][0], d.T @ d / len(d))


def test_a_linear_layers_precision_is_the_kronecker_product() -> None:
    model, x, y = example("mlp")
    recorder = KroneckerRecorder(model, every=1)
    passed(model, x, y, 8)
    q = blr.Posterior.from_recorder(recorder, model, n_data=N, prior_precision=2.0)
    hidden = model[1](model[0](x))
    a = torch.cat([hidden, torch.ones(N, 1).double()], 1)
    d = (model(x).softmax(1) - nn.functional.one_hot(y, 3)).detach()
    product = torch.outer((d * d).mean(0), (a * a).mean(0)).detach()
    precision = torch.cat([q.precision("2.weight"), q.precision("2.bias")[:, None]], 1)
    torch.testing.assert_close(precision, N * product + 2.0)


@pytest.mark.parametrize("beta2", [None, 0.9])
def test_what_is_kept_is_the_mean_over_the_recorded_passes(beta2: float | None) -> None:
    model, x, y = example("mlp")
    recorder = KroneckerRecorder(model, every=3, beta2=beta2)
    seen = []
    for k in range(7):
        if k % 3 == 0:
            alone = KroneckerRecorder(copy.deepcopy(model), every=1)
            passed(alone._model, x, y, N)
            seen.append(alone.factors["0.weight"][1])
        passed(model, x, y, N, lr=0.5)
    weights = torch.tensor([1.0] * 3 if beta2 is None else [beta2**2, beta2, 1.0]).double()
    mean = sum(w * g for w, g in zip(weights / weights.sum(), seen, strict=True))
    torch.testing.assert_close(recorder.factors["0.weight"][1], mean)
    assert (recorder.passes, recorder.recorded) == (7, 3)


def test_evaluation_copies_and_removed_hooks_record_nothing() -> None:
    model, x, y = example("mlp")
    recorder = KroneckerRecorder(model, every=1)
    passed(model.eval(), x, y, N)
    with torch.no_grad():
        model.train()(x)
    assert recorder.passes == 0
    passed(model, x, y, N)
    passed(copy.deepcopy(model), x[:7], y[:7], 7)  # which takes the hooks along
    recorder.remove()
    passed(model, x, y, N)
    assert recorder.recorded == recorder.passes == 1
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_recording_is_saved_and_goes_on(tmp_path: Path) -> None:
    model, x, y = example("words")
    whole = KroneckerRecorder(model, every=1)
    first = KroneckerRecorder(model, every=1)
    passed(model, x, y, 6)
    torch.save({"recorder": first.state_dict()}, tmp_path / "run.pt")
    first.remove()
    back = KroneckerRecorder(model, every=1)
    back.load_state_dict(torch.load(tmp_path / "run.pt", weights_only=True)["recorder"])
    passed(model, x, y, 6, lr=0.1)
    one, two = (
        blr.Posterior.from_recorder(r, model, n_data=N, prior_precision=1.0) for r in (whole, back)
    )
    for name in one.mean:
        torch.testing.assert_close(one.precision(name), two.precision(name))
    one.save(tmp_path / "q.safetensors")
    again = blr.Posterior.load(tmp_path / "q.safetensors")
    assert again.record["kind"] == "kron_recorded" and again.record["recorded"] == 8


def test_the_prior_is_found_and_the_posterior_serves() -> None:
    model, x, y = example("mlp")
    recorder = KroneckerRecorder(model, every=2)
    for _ in range(10):
        passed(model, x, y, 6, lr=0.3)
    start = {n: torch.zeros_like(p) for n, p in model.state_dict().items()}
    q = blr.Posterior.from_recorder(recorder, model, n_data=N)
    around = blr.Posterior.from_recorder(recorder, model, n_data=N, initial=start)
    wrapped = blr.Posterior.from_recorder(recorder, nn.DataParallel(model), n_data=N)
    assert wrapped.mean.keys() == q.mean.keys()
    assert q.prior_precision == around.prior_precision == wrapped.prior_precision > 0
    assert q.record["prior_choice"]["rule"] == "evidence" and "evidence" in repr(q)
    task = blr.Task(model, (x, y))
    assert blr.sensitivity(task, q).self_influence.min() >= 0


def test_a_model_that_changed_is_refused() -> None:
    model, x, y = example("mlp")
    recorder = KroneckerRecorder(model, every=1)
    passed(model, x, y, N)
    state = recorder.state_dict()
    get = dict(n_data=N, prior_precision=1.0)
    other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with pytest.raises(ModelError, match="changed"):
        blr.Posterior.from_recorder(recorder, other, **get)
    with pytest.raises(ModelError, match="another model"):
        KroneckerRecorder(other).load_state_dict(state)
    model[2].bias.requires_grad_(False)
    with pytest.raises(ModelError, match="changed"):
        blr.Posterior.from_recorder(recorder, model, **get)
    model[2] = nn.Linear(5, 3).double()
    with pytest.raises(ModelError, match="changed"):
        blr.Posterior.from_recorder(recorder, model, **get)


def test_bad_input_is_named() -> None:
    model, x, y = example("mlp")
    for settings, word in (
        ({"every": 0}, "every"),
        ({"beta2": 1.0}, "beta2"),
        ({"reduction": "max"}, "reduction"),
        ({"scale": 0}, "scale"),
    ):
        with pytest.raises(InputError, match=word):
            KroneckerRecorder(model, **settings)
    with pytest.raises(InputError, match="Module"):
        KroneckerRecorder(3)  # type: ignore[arg-type]
    bare = nn.Sequential(nn.Linear(4, 3))
    bare.register_parameter("token", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ModelError, match="token"):
        KroneckerRecorder(bare)
    with pytest.raises(ModelError, match="trainable"):
        KroneckerRecorder(nn.ReLU())
    recorder = KroneckerRecorder(model, every=1)
    get = dict(n_data=N, prior_precision=1.0)
    with pytest.raises(PosteriorError, match="nothing was recorded"):
        blr.Posterior.from_recorder(recorder, model, **get)
    with pytest.raises(InputError, match="KroneckerRecorder"):
        blr.Posterior.from_recorder(model, model, **get)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="state"):
        recorder.load_state_dict({"state": {}})
    passed(model, x * float("nan"), y, N)
    with pytest.raises(PosteriorError, match="finite"):
        blr.Posterior.from_recorder(recorder, model, **get)


def test_clipping_is_no_penalty() -> None:
    model, x, y = example("mlp")
    recorder = KroneckerRecorder(model, every=1)
    cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _ = recorder.factors


def test_layers_that_take_no_part_and_weights_used_elsewhere_are_named() -> None:
    model, x, y = example("mlp")
    unused = nn.ModuleDict({"used": model, "spare": nn.Linear(4, 3).double()})
    unused.forward = lambda x: model(x)  # type: ignore[method-assign]
    recorder = KroneckerRecorder(unused, every=1)
    passed(unused, x, y, N)
    with pytest.raises(PosteriorError, match=r"spare\.weight"):
        blr.Posterior.from_recorder(recorder, unused, n_data=N, prior_precision=1.0)
    recorder = KroneckerRecorder(model, every=1)
    penalty = 5.0 * model[0].weight.square().sum()
    (cross_entropy(model(x), y) + penalty).backward()
    with pytest.warns(UserWarning, match=r"0\.weight"):
        _ = recorder.factors


def test_an_input_that_is_overwritten_is_refused() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            with torch.no_grad():
                out = self.layer(x)
            out = self.layer(x)
            x.detach().add_(1.0)
            return out

    model = Overwrites()
    model.layer.weight.requires_grad_(False)
    KroneckerRecorder(model, every=1)
    with pytest.raises(ModelError, match="in place"):
        cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3).backward()


def test_moments_of_inputs_as_they_are_fitted() -> None:
    """Recorded over one pass at weights that stay, they are those of forward passes alone."""
    model = mlp()
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(N) % 3
    recorder = KroneckerRecorder(model.train(), every=1)
    for k in range(0, N, 8):
        cross_entropy(model(x[k : k + 8]), y[k : k + 8]).backward()
    q = blr.Posterior.from_recorder(
        recorder, model, n_data=N, structure="gram", prior_precision=0.1
    )
    fitted = blr.fit_laplace(blr.Task(model, (x, y)), structure="gram", prior_precision=0.1)
    assert q.structure == "gram"
    sizes = [{b.key: b.inputs for b in form.blocks} for form in (q.form, fitted.form)]
    assert sizes[0] == pytest.approx(sizes[1])
    v = {n: torch.randn_like(m) for n, m in q.mean.items()}
    ours, truth = q.precision_product(v), fitted.precision_product(v)
    assert all(torch.allclose(ours[n], t, rtol=1e-10) for n, t in truth.items())
    with pytest.raises(InputError, match="prior_precision"):
        blr.Posterior.from_recorder(recorder, model, n_data=N, structure="gram")
