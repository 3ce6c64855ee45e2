"""One training in every trainer: what a loop by hand takes for steps, and leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from optimizers import ROWS, float16_on_a_cpu, make
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainingArguments

import blr_analysis as blr
from blr_analysis.huggingface import CheckpointsCallback, IVONTrainer, VariationalTrainer
from blr_analysis.huggingface.recording import recipe_of
from blr_analysis.lightning import LightningCheckpoints, VariationalSteps
from blr_analysis.snapshots import state_of

N = 24
BATCH = 4
EPOCHS = 2
EACH = N // BATCH  # steps of an epoch
STEPS = EPOCHS * EACH
G = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=G)
Y = torch.randint(2, (N,), generator=G)
DATA = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
TOLD: dict[str, Any] = {
    "adamw": {"lr": 0.05, "weight_decay": 0.1},
    "ivon": {"lr": 0.1, "weight_decay": 1 / N, "steps": STEPS},
}
# One of each way of drawing and of each way of moving; each row resumes and bears a loss scale in
# tests/learning_rule/optim/test_contract.py.
KINDS = ("IVON", "VOGN", "BSAM", "BayesBiNN", "SGD")
BFLOAT = "bf16"
FULL = (None, BFLOAT)  # no loss is scaled
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(num_workers|log_every_n_steps|exists and is not empty|litlogger|LeafSpec).*",
    "ignore::blr_analysis.errors.InitialPrecisionWarning",
)


class Net(nn.Module):
    """A network that answers as Hugging Face's do, with BatchNorm but for rows of the rule."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        norm = [nn.Identity()] if kind in ROWS else [nn.BatchNorm1d(4)]
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *norm, nn.Linear(4, 2))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def optimizer_of(kind: str, model: nn.Module) -> Any:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), **TOLD[kind])
    if kind == "ivon":
        generator = torch.Generator().manual_seed(3)
        return blr.IVON(model.parameters(), ess=N, generator=generator, **TOLD[kind])
    return make(kind, model, N)


def contexts(optimizer: Any, divided_by: int = 1) -> Iterator[Any]:
    """Around each forward and backward pass of a minibatch."""
    draws = hasattr(optimizer, "sampled_params")
    yield optimizer.sampled_params(train=True, divided_by=divided_by) if draws else nullcontext()
    if hasattr(optimizer, "adversarial_params"):
        yield optimizer.adversarial_params(divided_by=divided_by)


@dataclass
class Run:
    """What a training leaves."""

    model: nn.Module
    checkpoints: Any
    recipe: Any
    posterior: Callable[..., blr.Posterior]


def looped(kind: str, count: int = 1, clip: float = 0.0) -> Run:
    """By hand: ``count`` minibatches a step, a draw for each."""
    model = Net(kind)
    optimizer = optimizer_of(kind, model)
    checkpoints = blr.Checkpoints(model, steps=STEPS, optimizer=optimizer)
    for step in torch.arange(N).split(BATCH * count) * EPOCHS:
        optimizer.zero_grad()
        for part in step.split(BATCH):
            for context in contexts(optimizer):
                with context:
                    model(X[part], Y[part])["loss"].backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        checkpoints.step()
    recipe = None
    if kind in TOLD:
        recipe = blr.Recipe(kind, epochs=EPOCHS, batch_size=BATCH, **TOLD[kind])
    return Run(model, checkpoints, recipe, lambda: checkpoints.posterior(n_data=N))


def near(ours: Any, theirs: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    ours, theirs = (state_of(m) if isinstance(m, nn.Module) else m for m in (ours, theirs))
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=rtol, atol=atol)


@dataclass
class Variant:
    """``half``: in bfloat16, or in float16 with a scaled loss by means of a monkeypatch;
    ``resume``: after the first epoch of such a run, from other weights."""

    count: int = 1
    clip: float = 0.0
    half: Any = None
    resume: bool = False


class TrainerContract:
    """Every way of training takes the steps of the loop by hand, and leaves what it leaves."""

    @classmethod
    def trained(cls, kind: str, folder: Path, variant: Variant) -> Run:
        """In order, the minibatches of :func:`looped`."""
        raise NotImplementedError

    @pytest.mark.parametrize("kind", ["adamw", "ivon"])
    def test_it_leaves_what_the_loop_leaves(self, tmp_path: Path, kind: str) -> None:
        """Weights and buffers, their checkpoints, the recipe, the posterior with earlier ones."""
        runs = self.trained(kind, tmp_path, Variant()), looped(kind)
        near(runs[0].model, runs[1].model)
        assert runs[0].recipe.record == runs[1].recipe.record
        near(runs[0].recipe.initial, Net(""), 0, 0)
        tasks = [blr.Task(r.model.eval(), DATA, checkpoints=r.checkpoints) for r in runs]
        states = [t.checkpoints for t in tasks]
        posteriors = [r.posterior().run for r in runs]
        assert {*map(len, states)} == {3}
        assert {*map(len, posteriors)} == {4}
        for actual, expected in zip(*states, strict=True):
            near(actual, expected)
        for p, q in zip(*posteriors, strict=True):
            near(p.mean, q.mean)
            near(p.form.diagonal(), q.form.diagonal(), rtol=1e-3, atol=0)

    @pytest.mark.parametrize("row", ROWS)
    def test_gradients_accumulate_and_are_clipped(self, tmp_path: Path, row: str) -> None:
        ours = self.trained(row, tmp_path, Variant(count=2, clip=0.1)).model
        near(ours, looped(row, count=2, clip=0.1).model)

    @pytest.mark.parametrize("row", [row for row in KINDS if row != "BSAM"])
    def test_float16_with_a_loss_scale(
        self, tmp_path: Path, row: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ours = self.trained(row, tmp_path, Variant(2, half=monkeypatch)).model
        near(ours, looped(row, count=2).model, 0.1, 0.1)
        with pytest.raises(AssertionError):
            near(ours, Net(row))

    def test_bfloat16(self, tmp_path: Path) -> None:
        ours = self.trained("ivon", tmp_path, Variant(clip=0.1, half=BFLOAT)).model
        near(ours, looped("ivon", clip=0.1).model, 0.1, 0.05)

    @pytest.mark.parametrize("row", KINDS)
    def test_a_resumed_run_ends_with_the_same_bits(self, tmp_path: Path, row: str) -> None:
        whole = self.trained(row, tmp_path, Variant(resume=False))
        resumed = self.trained(row, tmp_path, Variant(resume=True))
        near(resumed.model, whole.model, 0, 0)


class Ordered(Trainer):
    """Whose minibatches are those of the loop."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class TestTrainer(TrainerContract):
    @classmethod
    def trained(cls, kind: str, folder: Path, variant: Variant) -> Run:
        model = Net(kind, seed=variant.resume)
        callback = CheckpointsCallback()
        settings = {
            "num_train_epochs": EPOCHS,
            "per_device_train_batch_size": BATCH,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "logging_strategy": "no",
            "save_steps": EACH,
            "lr_scheduler_type": "constant",
            "max_grad_norm": variant.clip,
            "gradient_accumulation_steps": variant.count,
            "bf16": variant.half == BFLOAT,
        }
        base = {"ivon": (IVONTrainer,), "adamw": ()}.get(kind, (VariationalTrainer,))
        run: Any = type("Mine", (*base, Ordered), {})(
            model,
            TrainingArguments(str(folder), **settings),
            train_dataset=DATA,
            callbacks=[callback],
            optimizers=(optimizer_of(kind, model), None),
        )
        scaler = None
        if variant.half not in FULL:
            scaler = float16_on_a_cpu(run.accelerator, variant.half)
        place = str(folder / f"checkpoint-{EACH}")
        run.train(resume_from_checkpoint=place if variant.resume else None)
        assert scaler is None or scaler.get_scale() == 2048  # it grew twice, and met no infinity
        checkpoints = callback.checkpoints
        posterior = getattr(run, "posterior", lambda: checkpoints.posterior(n_data=N))  # type: ignore[union-attr]
        return Run(model, checkpoints, callback.recipe, posterior)


class Module(lightning.pytorch.LightningModule):
    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self.net = Net(kind, seed)
        self.kind = kind

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.kind, self.net)


class TestLightning(TrainerContract):
    @classmethod
    def trained(cls, kind: str, folder: Path, variant: Variant) -> Run:
        module = Module(kind, seed=variant.resume)
        callback = LightningCheckpoints(submodule="net")
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        callbacks: list[Any] = [callback, saver]
        if kind != "adamw":
            callbacks.insert(1, VariationalSteps())
        plugins = None
        if variant.half not in FULL:  # by name on a CPU, where "16-mixed" means bfloat16
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
            plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        trainer = lightning.Trainer(
            max_epochs=EPOCHS,
            callbacks=callbacks,
            precision="bf16-mixed" if variant.half == BFLOAT else None,
            plugins=plugins,
            logger=False,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(folder),
            accumulate_grad_batches=variant.count,
            gradient_clip_val=variant.clip or None,
        )
        loader: Any = DataLoader(DATA, batch_size=BATCH)  # type: ignore[arg-type]
        trainer.fit(module, loader, ckpt_path=folder / "epoch=0.ckpt" if variant.resume else None)
        optimizer: Any = trainer.optimizers[0]
        assert "step" not in vars(optimizer)
        assert getattr(optimizer, "_step_supports_amp_scaling", True)
        checkpoints: Any = callback.checkpoints
        posterior = partial(checkpoints.posterior, n_data=N)
        return Run(module.net, checkpoints, callback.recipe, posterior)


class TestAccelerate(TrainerContract):
    @classmethod
    def trained(cls, kind: str, folder: Path, variant: Variant) -> Run:
        """As docs/training.md says."""
        AcceleratorState._reset_state()
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=variant.count,
            mixed_precision=BFLOAT if variant.half == BFLOAT else None,
        )
        if variant.half not in FULL:
            float16_on_a_cpu(accelerator, variant.half)
        model = Net(kind, seed=variant.resume)
        loader = DataLoader(DATA, batch_size=BATCH)  # type: ignore[arg-type]
        net, wrapped, loader = accelerator.prepare(model, optimizer_of(kind, model), loader)
        optimizer = wrapped.optimizer
        checkpoints = blr.Checkpoints(net, steps=STEPS, folder=folder / "run", optimizer=optimizer)
        checkpoints.begin()
        if variant.resume:
            accelerator.load_state(str(folder / "state"))
        for epoch in range(variant.resume, EPOCHS):
            for batch in loader:
                with accelerator.accumulate(net):
                    for context in contexts(optimizer, variant.count):
                        with context:
                            accelerator.backward(net(**batch)["loss"])
                    if variant.clip and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(net.parameters(), variant.clip)
                    wrapped.step()
                    wrapped.zero_grad()
                    if accelerator.sync_gradients:
                        checkpoints.step()
            if epoch == 0 and not variant.resume:
                accelerator.save_state(str(folder / "state"))
        recipe: Any = recipe_of(
            wrapped, model, factors=[1.0] * STEPS, steps=STEPS, batch_size=BATCH, n_data=N
        )
        if recipe is not None:
            recipe.initial = checkpoints.first
        return Run(model, checkpoints, recipe, lambda: checkpoints.posterior(n_data=N))
