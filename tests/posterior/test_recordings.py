"""Kronecker factors with drawn labels, recorded near each checkpoint."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import graph, mlp, normal
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

import blr_analysis as blr
from blr_analysis.posterior import KroneckerRecorder
from blr_analysis.recordings import ENOUGH_PASSES, FAR_INTERVAL

N = 24
X = normal(N, 4)
Y = torch.arange(N) % 3


def trained(model: nn.Module, recorder: KroneckerRecorder, passes: int, **options: Any) -> None:
    """Passes over all data at fixed weights, by loops that people write."""
    labels = options.get("labels", Y)
    parts = options.get("parts", 1)
    reduction = options.get("sum", "mean")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, enabled=options.get("scaled", False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(passes):
        optimizer.zero_grad()
        for chosen in torch.arange(N).split(N // parts):
            loss = cross_entropy(model(X[chosen]), labels[chosen], reduction=reduction)
            scaler.scale(loss / parts).backward()
        scaler.step(optimizer)
        scaler.update()


def drawn(model: nn.Module, passes: int = 3, **options: Any) -> KroneckerRecorder:
    recorder = KroneckerRecorder(model.train(), every=1, labels="drawn")
    trained(model, recorder, passes, **options)
    recorder.remove()
    return recorder


def small() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def checkpointed() -> nn.Module:
    model = graph(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=mlp())
    model.get_submodule("inner").load_state_dict(small().state_dict())
    return model


def test_they_are_the_fishers_in_the_mean() -> None:
    model = small()
    recorder = drawn(model, passes=150)
    q = blr.Posterior.from_recorder(recorder, model, n_data=N, prior_precision=1.0)
    fit = blr.fit_laplace(blr.Task(model, (X, Y)), prior_precision=1.0)
    assert q.record["labels"] == "drawn from the predictions"
    for block in fit.form.blocks:
        left = recorder.factors[block.key][1][0]
        of_fit = block.left[0].mT @ left @ block.left[0]
        off = of_fit - of_fit.diagonal().diag()
        assert float(off.norm()) < 0.14 * float(left.norm())


@pytest.mark.parametrize(
    "options", [{"scaled": True}, {"sum": "sum"}], ids=["a gradient scaler", "a sum"]
)
def test_no_scale_of_the_loss_is_seen(options: dict[str, Any]) -> None:
    plain = drawn(small())
    changed = drawn(small(), **options)
    for key, factors in plain.factors.items():
        torch.testing.assert_close(changed.factors[key], factors)
    torch.testing.assert_close(changed.gradient, plain.gradient)


def test_accumulated_microbatches_give_the_gradient_of_all() -> None:
    model = small()
    recorder = drawn(model, passes=2, parts=3)
    loss = cross_entropy(model(X), Y)
    expected = torch.autograd.grad(loss, [*model.parameters()])
    assert recorder.gradient is not None
    assert recorder.recorded == 6
    for actual, mean in zip(recorder.gradient.values(), expected, strict=True):
        torch.testing.assert_close(actual, mean)


def test_checkpointed_activations_and_the_training_itself() -> None:
    plain = drawn(small())
    recomputed = drawn(checkpointed())
    for key, factors in plain.factors.items():
        torch.testing.assert_close(recomputed.factors[f"inner.{key}"], factors)
    watched = small().train()
    alone = small().train()
    KroneckerRecorder(watched, every=1, labels="drawn")
    for model in (watched, alone):
        cross_entropy(model(X), Y).backward()
    for p, q in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_reentrant_checkpoints_have_the_labels_of_the_loss() -> None:
    parts = {"first": nn.Linear(4, 5), "last": nn.Linear(5, 3)}
    model = graph(lambda m, x: checkpoint(m.last, m.first(x), use_reentrant=True), **parts)
    recorder = drawn(model, passes=1)
    of_loss = KroneckerRecorder(model, every=1)
    trained(model, of_loss, 1)
    assert recorder.labels_used == "of the loss as trained"
    for key, factors in of_loss.factors.items():
        torch.testing.assert_close(recorder.factors[key], factors)


def test_examples_that_the_loss_ignores_do_not_count() -> None:
    labels = torch.where(torch.arange(N) % 3 == 0, -100, Y)
    recorder = drawn(small(), labels=labels)
    inputs = torch.cat([X[labels >= 0], X.new_ones(int((labels >= 0).sum()), 1)], 1)
    right, _ = recorder.factors["0.weight"]
    torch.testing.assert_close(right[0], inputs.mT @ inputs / len(inputs))


def test_what_all_examples_share_is_recorded_in_the_mean() -> None:
    """As of position embeddings, which have one row for all examples."""
    torch.manual_seed(0)
    parts = {"places": nn.Embedding(4, 4), "head": nn.Linear(4, 3)}
    places = torch.arange(4).unsqueeze(0)
    model = graph(lambda m, x: m.head(torch.tanh(x + m.places(places).sum(1))), **parts)
    recorder = drawn(model, passes=600)
    q = blr.Posterior.from_recorder(recorder, model, n_data=N, prior_precision=1.0)
    fit = blr.fit_laplace(blr.Task(model, (X, Y)), prior_precision=1.0)
    ratio = (q.precision("places.weight") - 1).sum() / (fit.precision("places.weight") - 1).sum()
    assert 0.85 < float(ratio) < 1.15


def test_another_loss_has_its_own_labels() -> None:
    model = small().train()
    recorder = KroneckerRecorder(model, every=1, labels="drawn")
    mse_loss(model(X), normal(N, 3)).backward()
    assert recorder.recorded == 1
    assert recorder.labels_used == "of the loss as trained"
    assert recorder.gradient is None


def run(steps: int, resumed_at: int | None) -> blr.Posterior:
    """A training; one that is resumed, from what was saved."""
    model = small().train()
    checkpoints = blr.Checkpoints(model, steps=steps, structure="kron")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        if step == steps // 2:
            state = checkpoints.state_dict()
            if resumed_at is not None:
                assert checkpoints.recordings is not None
                checkpoints.recordings.recorder.remove()
                checkpoints = blr.Checkpoints(model, steps=steps, structure="kron")
                checkpoints.load_state_dict(state)
        optimizer.zero_grad()
        cross_entropy(model(X[step % 3 :: 3]), Y[step % 3 :: 3]).backward()
        optimizer.step()
        checkpoints.step()
    return checkpoints.posterior(n_data=N, prior_precision=1.0)


def test_a_resumed_recording_is_the_same_to_the_bit() -> None:
    whole = run(64, None)
    resumed = run(64, 32)
    assert len(whole.earlier) == len(resumed.earlier) == 3
    for p, q in zip(whole.run, resumed.run, strict=True):
        for name in p.mean:
            assert torch.equal(p.precision(name), q.precision(name))


@pytest.mark.parametrize(("steps", "share"), [(600, 0.25), (3000, 0.12)])
def test_most_recorded_passes_are_near_a_checkpoint(steps: int, share: float) -> None:
    """Enough of them in a short training, and a small share of a long one."""
    model = small().train()
    checkpoints = blr.Checkpoints(model, steps=steps, structure="kron")
    assert checkpoints.recordings is not None
    intervals = []
    for step in range(1, steps + 1):
        intervals.append(checkpoints.recordings.recorder.every)
        checkpoints.recordings.step(step)
    recorded = sum(1 / interval for interval in intervals)
    recorded_near = sum(1 / interval for interval in intervals if interval < FAR_INTERVAL)
    assert recorded < share * steps
    assert recorded_near > 0.6 * recorded
    for target in (steps // 8, steps // 4, steps // 2, steps):
        assert intervals[target - 1] == 1
        near = intervals[int(0.95 * target) : int(1.05 * target)]
        passes = sum(1 / interval for interval in near)
        assert passes >= min(len(near), ENOUGH_PASSES) * 0.9
    assert intervals[3 * steps // 4] == FAR_INTERVAL


LAYERS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "linear": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), X),
    "convolution": (
        nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3)),
        normal(N, 2, 6),
    ),
    "embedding": (
        nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 3)),
        torch.arange(3 * N).view(N, 3) % 5,
    ),
}


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize("layers", LAYERS)
def test_the_memory_that_is_taken_is_said_beforehand(
    layers: str, in_folder: bool, tmp_path: Path
) -> None:
    model, x = LAYERS[layers]
    model = copy.deepcopy(model).double().train()
    folder = tmp_path if in_folder else None
    checkpoints = blr.Checkpoints(model, steps=64, structure="kron", folder=folder)
    announced = checkpoints.bytes_in_memory
    assert f"up to {announced / 1024:.1f} KiB" in repr(checkpoints)
    checkpoints.begin()
    for _ in range(64):
        cross_entropy(model(x), Y).backward()
        checkpoints.step()
    recordings = checkpoints.recordings
    assert recordings is not None
    recorder = recordings.recorder.state_dict()
    states = [recorder["means"], recorder["gradients"]]
    for state in [*recordings.marks.values(), *checkpoints.snapshots.values()]:
        assert isinstance(state, Path) == in_folder
        if isinstance(state, dict):
            states.append(state)
    stored_bytes = sum(tensor.nbytes for state in states for tensor in state.values())
    assert stored_bytes <= announced <= 1.2 * stored_bytes


def test_of_an_adapter_its_own_layers_alone_are_recorded() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    settings = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    model = peft.get_peft_model(base, settings).double().train()
    trained_names = {name for name, p in model.named_parameters() if p.requires_grad}
    checkpoints = blr.Checkpoints(model, steps=8, structure="kron")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    for _ in range(8):
        optimizer.zero_grad()
        cross_entropy(model(X), Y).backward()
        checkpoints.step()
    q = checkpoints.posterior(n_data=N, prior_precision=1.0)
    assert set(q.mean) == trained_names
    assert all("lora_" in name for name in trained_names)
    assert checkpoints.recordings is not None
    factors = checkpoints.recordings.recorder.factors
    first = next(name for name in trained_names if "0.lora_A" in name)
    torch.testing.assert_close(factors[first][0][0], X.T @ X / N)


class Tagger(nn.Module):
    """A class for each token. Its loss may be computed inside, as in transformers."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies = copies
        self.table = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5)
        self.last = nn.Linear(5, 4)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.copies):
            logits = self.last(self.norm(self.table(ids)).tanh())
            loss = cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        logits = logits.float() if self.copies else logits
        return {"loss": loss, "logits": logits}


def tagger(*, copies: bool = False) -> tuple[Tagger, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    ids, labels = torch.randint(7, (8, 6)), torch.randint(4, (8, 6))
    labels[torch.rand(8, 6) < 0.2] = -100
    return Tagger(copies).train(), ids, labels


def test_labels_are_drawn_where_a_model_returns_copies_of_its_outputs() -> None:
    """As under the Trainer's ``bf16=True``: the same factors up to rounding."""
    factors = []
    for copies in (False, True):
        model, ids, labels = tagger(copies=copies)
        recorder = KroneckerRecorder(model, every=1, labels="drawn")
        for _ in range(3):
            model(ids, labels)["loss"].backward()
        assert recorder.labels_used == "drawn from the predictions"
        factors.append(recorder.factors["last.weight"])
    for exact, rounded in zip(*factors, strict=True):
        assert float((exact - rounded).norm()) < 0.02 * float(exact.norm())


def test_another_loss_of_sequences_is_a_mean_over_tokens() -> None:
    """Smoothed labels: N · E_i g_i² of each text's summed loss, by autograd."""
    model, ids, labels = tagger()

    def loss(rows: slice, reduction: str) -> torch.Tensor:
        logits = model(ids[rows], labels[rows])["logits"].flatten(0, 1)
        targets = labels[rows].flatten()
        return cross_entropy(logits, targets, reduction=reduction, label_smoothing=0.1)

    recorder = KroneckerRecorder(model, every=1, labels="drawn")
    loss(slice(None), "mean").backward()
    assert recorder.labels_used == "of the loss as trained"
    q = blr.Posterior.from_recorder(recorder, model, n_data=8, prior_precision=1.0)
    recorder.remove()
    for name in ("norm.weight", "norm.bias", "table.weight"):
        parameter = model.get_parameter(name)
        squares = torch.zeros_like(parameter)
        for i in range(8):
            (g,) = torch.autograd.grad(loss(slice(i, i + 1), "sum"), parameter)
            squares += g.square()
        torch.testing.assert_close(q.precision(name) - 1, squares, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("n_microbatches", [1, 2])
def test_accumulation_is_warned_of_where_no_labels_are_drawn(n_microbatches: int) -> None:
    """Its factor is not seen in a squared error, as it is in a cross-entropy."""
    model = small().train()
    recorder = KroneckerRecorder(model, every=1, labels="drawn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model.zero_grad()
            for _ in range(n_microbatches):
                (mse_loss(model(X), torch.zeros(N, 3)) / n_microbatches).backward()
    recorder.remove()
    said = [str(warning.message) for warning in caught]
    assert len(said) == n_microbatches - 1
    assert all("use fit_laplace" in words for words in said)


@pytest.mark.parametrize("idle", [0, 2])
def test_the_prior_of_a_recorded_posterior_is_around_the_first_weights(idle: int) -> None:
    """As in a fit by the recipe; while a warmup has not moved them, around 0."""
    model = small().train()
    first = copy.deepcopy(dict(model.named_parameters()))
    checkpoints = blr.Checkpoints(model, steps=16, structure="kron")
    checkpoints.begin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(16):
        optimizer.param_groups[0]["lr"] = 0.1 if step >= idle else 0.0
        optimizer.zero_grad()
        cross_entropy(model(X), Y).backward()
        optimizer.step()
        checkpoints.step()
    q = checkpoints.posterior(n_data=N)
    torch.testing.assert_close(dict(q.prior.mean or {}), first, rtol=0, atol=0)
    zero = {name: torch.zeros_like(p) for name, p in first.items()}
    around_zero = checkpoints.posterior(n_data=N, initial=zero)
    assert q.prior_precision != around_zero.prior_precision
    if idle:
        assert q.earlier[0].prior.mean is None
        assert q.earlier[0].prior_precision == around_zero.earlier[0].prior_precision
        return
    around_first = checkpoints.posterior(n_data=N, initial=first)
    deltas = [[p.prior_precision for p in run] for run in (q.run, around_first.run)]
    assert deltas[0] == deltas[1]


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Its import takes seconds, which do not belong to a test."""
    library = pytest.importorskip("transformers")
    assert library.LlamaForCausalLM
    return library


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_training_of_a_whole_llama_leaves_a_posterior_of_every_parameter(
    transformers: Any, is_tied: bool
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=12,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=is_tied,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(12, (N, 6))
    checkpoints = blr.Checkpoints(model, steps=16, structure="kron")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(16):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        checkpoints.step()
    q = checkpoints.posterior(n_data=N)
    assert checkpoints.recordings is not None
    assert checkpoints.recordings.recorder.labels_used == "drawn from the predictions"
    assert q.mean.keys() == dict(model.named_parameters()).keys()
    texts = [{"input_ids": row, "labels": row} for row in ids]
    task = blr.Task(model.eval(), texts, likelihood="causal_lm", progress=False)
    assert bool(blr.sensitivity(task, q).self_influence.gt(0).all())
