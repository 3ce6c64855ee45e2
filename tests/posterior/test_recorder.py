"""Kronecker factors collected while a model trains, and the checkpoints that keep them."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import graph, mlp, normal, seeded, tokens
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, unfold

import blr_analysis as blr
from blr_analysis.errors import ModelError, PosteriorError
from blr_analysis.posterior import KroneckerRecorder

N = 24


def images(m: Any, x: Tensor) -> Tensor:
    """Convolutions in groups, a norm, and a layer that is called twice."""
    h = m.norm(torch.tanh(m.first(x))).mean((2, 3))
    return m.last(torch.tanh(m.twice(torch.tanh(m.twice(h)))))


def words(m: Any, ids: Tensor) -> Tensor:
    return m.last(torch.tanh(m.inner(m.norm(m.table(ids)))).mean(1))


def example(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    if name == "mlp":
        model = mlp()
        x = normal(N, 4)
    elif name == "images":
        first = nn.Conv2d(2, 4, 3, padding=1, groups=2)
        twice = nn.Linear(4, 4)
        last = nn.Linear(4, 3, bias=False)
        model = graph(images, first=first, norm=nn.GroupNorm(2, 4), twice=twice, last=last)
        x = normal(N, 2, 5, 5)
    else:
        ends = {"table": nn.Embedding(7, 4), "last": nn.Linear(5, 3)}
        model = graph(words, norm=nn.LayerNorm(4), inner=nn.Linear(4, 5), **ends)
        x = tokens(N, 6)
    return model.train(), x, torch.arange(N) % 3


def passed(model: nn.Module, x: Tensor, y: Tensor, size: int, lr: float = 0.0, **loss: Any) -> None:
    """One epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for chosen in torch.arange(len(x)).split(size):
        optimizer.zero_grad()
        reduction = loss.get("reduction", "mean")
        value = cross_entropy(model(x[chosen]), y[chosen], reduction=reduction)
        (loss.get("times", 1.0) * value).backward()
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
    assert recorder.factors
    assert recorder.recorded == N // 6
    q = blr.Posterior.from_recorder(recorder, model, n_data=N, prior_precision=2.0)
    task = blr.Task(model, (x, y))
    fit = blr.fit_laplace(task, curvature="empirical_fisher", prior_precision=2.0)
    for theirs in fit.form.blocks:
        right, left = recorder.factors[theirs.key]
        for basis, factor in ((theirs.right, right), (theirs.left, left)):
            turned = basis.mT @ factor @ basis  # the eigenvectors of one are those of the other
            off = turned - torch.diag_embed(turned.diagonal(0, -2, -1))
            assert float(off.norm()) < 1e-10 * float(factor.norm())
        inputs = float(right.diagonal(0, -2, -1).mean())
        assert N * inputs == pytest.approx(theirs.inputs)  # and of the same scale
    for parameter in fit.form.plain:  # norms and embeddings: exactly
        torch.testing.assert_close(q.precision(parameter), fit.precision(parameter))


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_is_scaled_by_its_positions(stride: int) -> None:
    """S = N · A ⊗ G / T, of sums over the T positions, by patches and gradients cut out by hand."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 2, stride=stride)
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)).double()
    x = torch.randn(N, 2, 5, 5).double()
    y = torch.arange(N) % 3
    model(x)
    recorder = KroneckerRecorder(model.train(), every=1)
    passed(model, x, y, 8)
    q = blr.Posterior.from_recorder(recorder, model, n_data=N, prior_precision=2.0)
    z = conv(x).detach().requires_grad_()
    cross_entropy(model[1:](z), y, reduction="sum").backward()
    d = z.grad.flatten(2).mT  # [N, T, O]
    a = unfold(x, 2, stride=stride).mT
    a = torch.cat([a, torch.ones(*a.shape[:2], 1).double()], 2)
    positions = d.shape[1]
    assert positions == (16 if stride == 1 else 4)
    inputs, outputs = (torch.einsum("nti,ntj->ij", v, v) / N for v in (a, d))
    block = next(b for b in q.form.blocks if b.key == "0.weight")
    s = q.form.values[block.key][0] - 2.0
    u = torch.kron(block.left[0].contiguous(), block.right[0].contiguous())
    dense = (u * s.flatten()) @ u.mT
    torch.testing.assert_close(dense, N * torch.kron(outputs, inputs) / positions)


@pytest.mark.parametrize("every", [1, 100])
def test_accumulated_microbatches_take_a_scale_and_are_warned_of_without(every: int) -> None:
    for scale in (1.0, 0.5):
        model, x, y = example("mlp")
        recorder = KroneckerRecorder(model, every=every, scale=scale)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for chosen in torch.arange(N).split(N // 2):
                (cross_entropy(model(x[chosen]), y[chosen]) / 2).backward()
        recorder.remove()
        assert [("scale=1/k" in str(w.message)) for w in caught] == [True] * (scale == 1)
    recorded_rows = slice(None) if every == 1 else slice(N // 2)
    d = (model(x).softmax(1) - nn.functional.one_hot(y, 3)).detach()[recorded_rows]
    torch.testing.assert_close(recorder.factors["2.weight"][1][0], d.T @ d / len(d))


@pytest.mark.parametrize("beta2", [None, 0.9])
def test_what_is_kept_is_the_mean_over_the_recorded_passes(beta2: float | None) -> None:
    model, x, y = example("mlp")
    recorder = KroneckerRecorder(model, every=3, beta2=beta2)
    factors = []
    for k in range(7):
        if k % 3 == 0:
            alone = KroneckerRecorder(copy.deepcopy(model), every=1)
            passed(alone._model, x, y, N)
            factors.append(alone.factors["0.weight"][1])
        passed(model, x, y, N, lr=0.5)
    weights = torch.tensor([1.0] * 3 if beta2 is None else [beta2**2, beta2, 1.0]).double()
    mean = sum(w * g for w, g in zip(weights / weights.sum(), factors, strict=True))
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
    whole, first = (KroneckerRecorder(model, every=1) for _ in range(2))
    passed(model, x, y, 6)
    torch.save({"recorder": first.state_dict()}, tmp_path / "run.pt")
    first.remove()
    restored = KroneckerRecorder(model, every=1)
    restored.load_state_dict(torch.load(tmp_path / "run.pt", weights_only=True)["recorder"])
    passed(model, x, y, 6, lr=0.1)
    of_whole = blr.Posterior.from_recorder(whole, model, n_data=N, prior_precision=1.0)
    of_restored = blr.Posterior.from_recorder(restored, model, n_data=N, prior_precision=1.0)
    for name in of_whole.mean:
        torch.testing.assert_close(of_whole.precision(name), of_restored.precision(name))
    of_whole.save(tmp_path / "q.safetensors")
    again = blr.Posterior.load(tmp_path / "q.safetensors")
    assert again.record["kind"] == "kron_recorded"
    assert again.record["recorded"] == 8


def test_the_prior_is_found_and_the_posterior_serves() -> None:
    model, x, y = example("mlp")
    recorder = KroneckerRecorder(model, every=2)
    for _ in range(10):
        passed(model, x, y, 6, lr=0.3)
    q = blr.Posterior.from_recorder(recorder, model, n_data=N)
    start = {n: torch.zeros_like(p) for n, p in model.state_dict().items()}
    around = blr.Posterior.from_recorder(recorder, model, n_data=N, initial=start)
    wrapped = blr.Posterior.from_recorder(recorder, nn.DataParallel(model), n_data=N)
    assert wrapped.mean.keys() == q.mean.keys()
    assert q.prior_precision == around.prior_precision == wrapped.prior_precision > 0
    assert q.record["prior_choice"]["rule"] == "evidence"
    assert "evidence" in repr(q)
    assert blr.sensitivity(blr.Task(model, (x, y)), q).self_influence.min() >= 0


def test_layers_that_take_no_part_are_named_and_inputs_that_are_overwritten() -> None:
    _, x, y = example("mlp")
    unused = graph(lambda m, x: m.used(x), used=mlp(), spare=nn.Linear(4, 3)).train()
    recorder = KroneckerRecorder(unused, every=1)
    passed(unused, x, y, N)
    with pytest.raises(PosteriorError, match=r"spare\.weight"):
        blr.Posterior.from_recorder(recorder, unused, n_data=N, prior_precision=1.0)

    outer = nn.Sequential(nn.Linear(4, 3))
    outer[0].weight.requires_grad_(False)
    KroneckerRecorder(outer, every=1)
    inputs = torch.randn(6, 4)
    loss = cross_entropy(outer(inputs), torch.arange(6) % 3)
    inputs.add_(1.0)
    with pytest.raises(ModelError, match="in place"):
        loss.backward()


VOCABULARY = 16
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama, tied": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 4},
    "Mistral": {},
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Its import takes seconds, which do not belong to a test."""
    library = pytest.importorskip("transformers")
    for name in LANGUAGE_MODELS:
        getattr(library, f"{name.partition(',')[0]}ForCausalLM")
    return library


def language_model(transformers: Any, name: str) -> Any:
    family = name.partition(",")[0]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        **LANGUAGE_MODELS[name],
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def ragged_texts() -> list[tuple[Tensor, Tensor]]:
    """Two batches of texts of unequal length, and their labels: -100 for prompts and padding."""
    batches = []
    for seed, length in ((0, 7), (1, 5)):
        ids = torch.randint(
            4, VOCABULARY, (4, length), generator=torch.Generator().manual_seed(seed)
        )
        labels = ids.clone()
        labels[0, :3] = -100
        labels[1, 4:] = -100
        batches.append((ids, labels))
    return batches


def total_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")


def dense_factors(model: Any, path: str) -> tuple[Tensor, Tensor, float]:
    """E Σ a aᵀ, E Σ d dᵀ and E T of one layer over all texts, by hooks of our own."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        inputs.append(args[0].detach())
        outputs.append(output)

    handle = model.get_submodule(path).register_forward_hook(watch)
    losses = [total_loss(model, ids, labels) for ids, labels in ragged_texts()]
    handle.remove()
    gradients = torch.autograd.grad(losses, outputs)
    n_texts = sum(len(ids) for ids, _ in ragged_texts())
    a = torch.cat([x.flatten(0, 1) for x in inputs])
    d = torch.cat([g.flatten(0, 1) for g in gradients])
    used = d.any(1)
    a = a[used]
    d = d[used]
    return a.mT @ a / n_texts, d.mT @ d / n_texts, len(a) / n_texts


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_every_parameter_of_a_language_model_is_recorded(transformers: Any, name: str) -> None:
    """Norms with weights alone, tables, heads and tables that are heads have their squares; other
    matrices have factors, of the positions that have a label."""
    model = language_model(transformers, name).train()
    recorder = KroneckerRecorder(model, every=1, reduction="sum")
    for ids, labels in ragged_texts():
        total_loss(model, ids, labels).backward()
    q = blr.Posterior.from_recorder(recorder, model, n_data=8, prior_precision=1.0)
    recorder.remove()
    parameters = dict(model.named_parameters())
    assert q.mean.keys() == parameters.keys()
    matrices = {n for n in parameters if "_proj" in n}
    assert {block.key for block in q.form.blocks} == matrices
    squares = {n: torch.zeros_like(p) for n, p in parameters.items()}
    for ids, labels in ragged_texts():
        for i in range(len(ids)):
            loss = total_loss(model, ids[i : i + 1], labels[i : i + 1])
            for n, g in zip(
                parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True
            ):
                squares[n] += g.square()
    for parameter in parameters.keys() - matrices:
        torch.testing.assert_close(
            q.precision(parameter) - 1, squares[parameter], rtol=1e-5, atol=1e-9
        )
    for block in q.form.blocks:
        right, left, positions = dense_factors(model, block.key.removesuffix(".weight"))
        s = q.form.values[block.key][0] - 1
        u = torch.kron(block.left[0].contiguous(), block.right[0].contiguous())
        torch.testing.assert_close(
            (u * s.flatten()) @ u.mT, 8 * torch.kron(left, right) / positions, rtol=1e-5, atol=1e-8
        )


class Scale(nn.Module):
    """w ∘ x / rms(x) + b, by nobody's definition; of the batch's rms where it mixes examples."""

    def __init__(self, width: int, mixes: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width).double())
        self.offset = nn.Parameter(torch.zeros(width).double())
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        mean_square = x.square().mean() if self.mixes else x.square().mean(-1, keepdim=True)
        return self.gain * x * mean_square.rsqrt() + self.offset


def with_scale(mixes: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, 5), Scale(5, mixes), nn.Linear(5, 3)
    return nn.Sequential(*layers).double().train()


def test_vectors_of_unknown_modules_are_recorded() -> None:
    _, x, y = example("mlp")
    model = with_scale(mixes=False)
    recorder = KroneckerRecorder(model, every=1)
    passed(model, x, y, 6)
    q = blr.Posterior.from_recorder(recorder, model, n_data=N, prior_precision=1.0)
    recorder.remove()
    for name in ("1.gain", "1.offset"):
        parameter = model.get_parameter(name)
        squares = torch.zeros_like(parameter)
        for i in range(N):
            loss = cross_entropy(model(x[i : i + 1]), y[i : i + 1])
            (gradient,) = torch.autograd.grad(loss, [parameter])
            squares += gradient.square()
        torch.testing.assert_close(q.precision(name) - 1, squares)


def test_vectors_of_modules_that_mix_examples_are_refused() -> None:
    _, x, y = example("mlp")
    model = with_scale(mixes=True)
    KroneckerRecorder(model, every=1)
    with pytest.raises(ModelError, match=r"1\.gain.*mixes examples"):
        passed(model, x, y, 6)


class Bilinear(nn.Module):
    """A matrix that no rule reads."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


def test_matrices_of_unknown_modules_are_refused() -> None:
    """With given labels; drawn ones show their squares."""
    with pytest.raises(ModelError, match=r"no layer rule for '0\.matrix'"):
        KroneckerRecorder(nn.Sequential(Bilinear(), nn.Linear(4, 3)))
    with pytest.raises(ModelError, match="no layer rule for 'matrix'"):
        KroneckerRecorder(Bilinear(), labels="drawn")


class Projected(nn.Module):
    """Parameters of the model itself, attention, and a recurrent layer with time first."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(3, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.states = nn.GRU(4, 3)
        self.read = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.start
        attended, _ = self.attention(x, x, x, need_weights=False)
        return self.read(self.states(attended.transpose(0, 1))[0][-1])


def squares_of(model: nn.Module, losses: list[Tensor]) -> dict[str, Tensor]:
    """The mean square of the losses' gradients, one backward pass after another."""
    totals = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    parameters = list(model.parameters())
    for loss in losses:
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        for total, gradient in zip(totals.values(), gradients, strict=True):
            total += gradient.square() / len(losses)
    return totals


def test_parameters_without_a_rule_have_their_squares() -> None:
    """Single examples of a regression show g_i² itself, whatever sign is drawn."""
    with seeded(0):
        model = Projected().double()
        x, y = torch.randn(6, 5, 3).double(), torch.randn(6, 2).double()
    recorder = KroneckerRecorder(model, every=1, labels="drawn")
    for i in range(6):
        nn.functional.mse_loss(model(x[i : i + 1]), y[i : i + 1]).backward()
    posterior = blr.Posterior.from_recorder(recorder, model, n_data=6, prior_precision=1.0)
    model.eval()
    losses = [nn.functional.mse_loss(model(x[i : i + 1]), y[i : i + 1]) for i in range(6)]
    expected = squares_of(model, losses)
    for name in expected.keys() - {"read.weight", "read.bias"}:
        torch.testing.assert_close(posterior.precision(name) - 1, 6 * expected[name])


class Places(nn.Module):
    """All examples share the rows of their places, as in BERT and GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(5, 3)
        self.read = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.read((x + self.places(torch.arange(5)[None])).tanh()).sum(1)


def test_shared_rows_have_their_squares_where_no_labels_are_drawn() -> None:
    """Of a regression: E_i ‖g_i‖² to within five standard errors of the signs that are drawn."""
    with seeded(0):
        model = Places().double()
        x, y = torch.randn(6, 5, 3).double(), torch.randn(6, 2).double()
    gradients = []
    for i in range(6):
        loss = nn.functional.mse_loss(model(x[i : i + 1]), y[i : i + 1])
        gradients.append(torch.autograd.grad(loss, model.places.weight)[0].flatten())
    products = torch.stack(gradients) @ torch.stack(gradients).mT
    expected = float(products.diagonal().sum())
    off_diagonal = float(products.square().sum() - products.diagonal().square().sum())
    n_passes = 60
    recorder = KroneckerRecorder(model, every=1, labels="drawn")
    for _ in range(n_passes):
        nn.functional.mse_loss(model(x), y).backward()
        model.zero_grad()
    q = blr.Posterior.from_recorder(recorder, model, n_data=6, prior_precision=1.0)
    error = (2 * off_diagonal / n_passes) ** 0.5
    actual = float((q.precision("places.weight") - 1).sum())
    assert actual == pytest.approx(expected, abs=5 * error)
    assert q.record["labels"] == "of the loss as trained"


class TimeFirst(nn.Module):
    """Layers whose first dimension is time; the model's own inputs have examples first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.project = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.norm(self.embed(x.transpose(0, 1)).tanh())
        return self.project(embedded).tanh().mean(0)


@pytest.mark.parametrize("kind", [Projected, TimeFirst])
def test_parameters_without_a_rule_have_the_fisher_of_drawn_labels(kind: type[nn.Module]) -> None:
    """Σ_c p_c g_c², to within five standard errors of the draws."""
    n_passes = 80
    with seeded(0):
        model = kind().double()
        x, y = torch.randn(4, 5, 3).double(), torch.randint(2, (4,))
    recorder = KroneckerRecorder(model, every=1, labels="drawn")
    for _ in range(n_passes):
        passed(model, x, y, 4)
    posterior = blr.Posterior.from_recorder(recorder, model, n_data=4, prior_precision=1.0)
    model.eval()
    logits = model(x)
    root = logits.detach().softmax(1).prod(1).sqrt()  # of p (1 − p), two classes
    losses = [root[i] * (logits[i, 0] - logits[i, 1]) for i in range(4)]
    expected = squares_of(model, losses)
    # A square of a sum of four draws has a standard deviation of at most √2 times its mean, or so.
    relative_error = 5 * (3 / n_passes) ** 0.5
    for name in expected.keys() - {"read.weight", "read.bias"}:
        difference = (posterior.precision(name) - 1) / 4 - expected[name]
        assert float(difference.norm()) < relative_error * float(expected[name].norm())


def test_layers_with_time_first_have_the_squares_of_a_regression() -> None:
    """Σ g_i², to within five standard errors of the random signs."""
    n_passes = 80
    with seeded(0):
        model = TimeFirst().double()
        x, y = torch.randn(4, 5, 3).double(), torch.randn(4, 2).double()
    recorder = KroneckerRecorder(model, every=1, labels="drawn")
    for _ in range(n_passes):
        nn.functional.mse_loss(model(x), y).backward()
    posterior = blr.Posterior.from_recorder(recorder, model, n_data=4, prior_precision=1.0)
    assert recorder.recorded == n_passes
    model.eval()
    expected = squares_of(model, [nn.functional.mse_loss(model(x)[i], y[i]) for i in range(4)])
    for name, mean_square in expected.items():
        difference = (posterior.precision(name) - 1) / 4 - mean_square
        assert float(difference.norm()) < 5 * (3 / n_passes) ** 0.5 * float(mean_square.norm())


@pytest.mark.parametrize("first", ["none", "all"])
def test_an_expert_is_recorded_whatever_rows_it_has_in_the_first_pass(first: str) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expert = nn.Linear(3, 3)
            self.read = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            chosen = (x[:, 0] > 0).nonzero().flatten()
            return self.read(x.index_add(0, chosen, self.expert(x[chosen])))

    with seeded(0):
        model = Routed()
        x, y = torch.rand(4, 3), torch.randint(2, (4,))
    recorder = KroneckerRecorder(model, every=1, labels="drawn")
    some_routed = x * torch.tensor([1.0, -1.0, -1.0, 1.0])[:, None]
    passes = [-x, x]  # without rows, with all
    if first == "all":
        passes.reverse()
    for inputs in [*passes, *[some_routed] * 5]:
        nn.functional.cross_entropy(model(inputs), y).backward()
    posterior = blr.Posterior.from_recorder(recorder, model, n_data=4, prior_precision=1.0)
    assert float(posterior.precision("expert.weight").min()) > 1


def test_what_cannot_be_recorded_is_said_in_the_first_pass() -> None:
    """Here a module without a rule mixes examples; many small passes are collected later."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) * (1 + self.shift)

    with seeded(0):
        model = nn.Sequential(nn.Linear(3, 3), Centred(), nn.Linear(3, 2))
        x, y = torch.randn(4, 3), torch.randint(2, (4,))
    KroneckerRecorder(model, every=1, labels="drawn")
    with pytest.raises(ModelError, match="mixes examples"):
        nn.functional.cross_entropy(model(x), y).backward()


class Branches(nn.Module):
    """Two layers, of which positive batches run the second one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.second = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x) if bool((x > 0).all()) else self.first(x)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_layers_count_0_in_passes_without_them(is_resumed: bool) -> None:
    """A mean over all passes, wherever in the training a layer took part."""
    with seeded(0):
        model = Branches().double()
        positive = torch.rand(4, 3).double()
    batches = [-positive, -2 * positive, positive, 2 * positive, -positive]
    recorder = KroneckerRecorder(model, every=1)
    for number, x in enumerate(batches):
        if is_resumed and number == 3:
            state = recorder.state_dict()
            recorder.remove()
            recorder = KroneckerRecorder(model, every=1)
            recorder.load_state_dict(state)
        cross_entropy(model(x), torch.arange(4) % 2).backward()
        model.zero_grad()
    inputs = [torch.cat((x, torch.ones(4, 1)), 1).double() for x in batches]
    moments = [x.mT @ x / 4 for x in inputs]
    expected = {
        "first.weight": (moments[0] + moments[1] + moments[4]) / 5,
        "second.weight": (moments[2] + moments[3]) / 5,
    }
    for key, moment in expected.items():
        torch.testing.assert_close(recorder.factors[key][0].squeeze(0), moment)


def test_a_recurrent_layer_is_recorded_over_several_passes() -> None:
    """Its last states have their examples second, so that passes are not joined."""
    with seeded(0):
        layers = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)
        x, y = torch.randn(12, 5, 3), torch.randint(2, (12,))

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.states, self.read = layers

        def forward(self, x: Tensor) -> Tensor:
            return self.read(self.states(x)[0][:, -1])

    model = Last()
    recorder = KroneckerRecorder(model, every=1, labels="drawn")
    passed(model, x, y, 4)
    assert recorder.recorded == 3
    assert all(bool(mean.isfinite().all()) for pair in recorder.factors.values() for mean in pair)


class LastState(nn.Module):
    """A prediction by the state after the last step."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.states = kind(3, 4, batch_first=True)
        self.read = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.states(x)[0][:, -1])


@pytest.mark.parametrize("labels", ["given", "drawn"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_the_curvature_of_a_recurrent_layer_has_the_fishers_trace(
    kind: type[nn.RNNBase], labels: str
) -> None:
    """Exactly where labels are given; where they are drawn, to within five standard errors."""
    with seeded(0):
        model = LastState(kind).double()
        x, y = torch.randn(N, 9, 3).double().cumsum(1), torch.arange(N) % 2
    recorder = KroneckerRecorder(model, every=1, labels=labels)
    n_draws = 1 if labels == "given" else 20
    for _ in range(n_draws):
        passed(model, x, y, 12)
    recorder.remove()
    q = blr.Posterior.from_recorder(recorder, model, n_data=N, prior_precision=1.0)
    log_probabilities = model(x).log_softmax(1)
    squares: dict[str, list[Tensor]] = {}  # of each example and class, ‖g‖² of each matrix
    for example_of_classes in log_probabilities:
        for value in example_of_classes:
            gradients = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
            for (name, _), g in zip(model.named_parameters(), gradients, strict=True):
                suffix = name.replace("bias", "weight")
                squares.setdefault(suffix, []).append(g.square().sum())
    weights = log_probabilities.exp().detach()
    if labels == "given":
        weights = nn.functional.one_hot(y, 2).double()
    for block in q.form.blocks:
        if not block.key.startswith("states"):
            continue
        of_parts = torch.stack(squares[block.key]).view(N, 2, 2).sum(2)  # weight and bias
        mean = (weights * of_parts).sum(1)
        variance = (weights * of_parts.square()).sum(1) - mean.square()
        error = float((variance.clamp_min(0).sum() / n_draws).sqrt())
        trace = float((q.form.values[block.key] - 1).sum())
        assert trace == pytest.approx(float(mean.sum()), abs=5 * error + 1e-9 * trace)


@pytest.mark.parametrize("kind", ["kron", "adam", "ivon"])
def test_checkpoints_on_disk_hold_all_that_was_learned(kind: str, tmp_path: Path) -> None:
    """The same posteriors as from memory, each as it was at its step; nothing but safetensors."""
    makers: dict[str, Any] = {
        "kron": lambda p: torch.optim.SGD(p, lr=0.3),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "ivon": lambda p: blr.IVON(p, lr=0.1, ess=N, weight_decay=0.1, steps=32),
    }
    posteriors = []
    for folder in (None, tmp_path / "run"):
        model, x, y = example("mlp")
        torch.manual_seed(3)
        optimizer = makers[kind](model.parameters())
        checkpoints = blr.Checkpoints(
            model,
            steps=32,
            folder=folder,
            structure="kron" if kind == "kron" else None,
            optimizer=None if kind == "kron" else optimizer,
        )
        for _ in range(32):
            optimizer.zero_grad()
            draws = optimizer.sampled_params(train=True) if kind == "ivon" else torch.enable_grad()
            with draws:
                cross_entropy(model(x), y).backward()
            optimizer.step()
            checkpoints.step()
        before = {n: p.clone() for n, p in model.state_dict().items()}
        prior_precision = None if kind == "ivon" else 1.0  # IVON knows its own
        q = checkpoints.posterior(n_data=N, prior_precision=prior_precision)
        assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
        posteriors.append(q)
    assert [p.record["checkpoint"] for p in posteriors[0].earlier] == [1, 2, 3]
    for in_memory, on_disk in zip(posteriors[0].run, posteriors[1].run, strict=True):
        for name in in_memory.mean:
            assert torch.equal(in_memory.mean[name], on_disk.mean[name])
            assert torch.equal(in_memory.precision(name), on_disk.precision(name))
    files = sorted((tmp_path / "run").iterdir())
    assert files
    assert all(file.suffix == ".safetensors" for file in files)
    task = blr.Task(model, (x, y), checkpoints=files[-3:])  # weights alone are taken
    assert len(task.checkpoints) == 3
