"""One training in every trainer: what a loop by hand takes for steps, and leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
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

N, BATCH, EPOCHS = 24, 4, 2
EACH = N // BATCH  # steps of an epoch
STEPS = EPOCHS * EACH
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 3, generator=G), torch.randint(2, (N,), generator=G)
DATA = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
BFLOAT = "bf16"
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
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return loss | {"logits": logits}


def optimizer(kind: str, model: nn.Module) -> Any:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    if kind == "ivon":
        own: Any = {"weight_decay": 1 / N, "steps": STEPS}
        own["generator"] = torch.Generator().manual_seed(3)
        return blr.IVON(model.parameters(), lr=0.1, ess=N, **own)
    return make(kind, model, N)


def contexts(own: Any, divided_by: int = 1) -> Iterator[Any]:
    """Around each forward and backward pass of a minibatch."""
    draws = hasattr(own, "sampled_params")
    yield own.sampled_params(train=True, divided_by=divided_by) if draws else nullcontext()
    if hasattr(own, "adversarial_params"):
        yield own.adversarial_params(divided_by=divided_by)


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
    own = optimizer(kind, model)
    checkpoints = blr.Checkpoints(model, steps=STEPS, optimizer=own)
    for step in torch.arange(N).split(BATCH * count) * EPOCHS:
        own.zero_grad()
        for part in step.split(BATCH):
            for context in contexts(own):
                with context:
                    model(X[part], Y[part])["loss"].backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        own.step()
        checkpoints.step()
    decay = {"weight_decay": 0.1} if kind == "adamw" else {"weight_decay": 1 / N, "steps": STEPS}
    lr = 0.05 if kind == "adamw" else 0.1
    told = {"lr": lr, "epochs": EPOCHS, "batch_size": BATCH, **decay}
    recipe = blr.Recipe(kind, **told) if kind not in ROWS else None
    return Run(model, checkpoints, recipe, lambda: checkpoints.posterior(n_data=N))


def near(ours: nn.Module, theirs: nn.Module, **how: float) -> None:
    mine = state_of(ours)
    for name, value in state_of(theirs).items():
        torch.testing.assert_close(mine[name], value, **(how or {"rtol": 1e-4, "atol": 1e-5}))


class TrainerContract:
    """Every way of training takes the steps of the loop by hand, and leaves what it leaves."""

    @classmethod
    def trained(
        cls, kind: str, folder: Path, count: int = 1, clip: float = 0.0, half: Any = None,
        resume: bool = False,
    ) -> Run:  # fmt: skip
        """In order, the minibatches of :func:`looped`; ``half``: in bfloat16, or in float16 with a
        scaled loss by means of a monkeypatch; ``resume``: after the first epoch of such a run."""
        raise NotImplementedError

    @pytest.fixture(scope="class", params=["adamw", "ivon"])
    @classmethod
    def runs(cls, request: Any, tmp_path_factory: Any) -> tuple[Run, Run]:
        kind: str = request.param
        return cls.trained(kind, tmp_path_factory.mktemp("run")), looped(kind)

    def test_the_same_weights_and_buffers(self, runs: tuple[Run, Run]) -> None:
        near(runs[0].model, runs[1].model)

    def test_the_same_checkpoints(self, runs: tuple[Run, Run]) -> None:
        ours, theirs = (blr.Task(r.model.eval(), DATA, checkpoints=r.checkpoints) for r in runs)
        assert len(ours.checkpoints) == len(theirs.checkpoints) == 3
        for one, other in zip(ours.checkpoints, theirs.checkpoints, strict=True):
            for name, value in other.items():
                torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-5)

    def test_the_same_recipe(self, runs: tuple[Run, Run]) -> None:
        ours, theirs = (r.recipe for r in runs)
        assert ours.record == theirs.record
        for name, value in state_of(Net("")).items():
            assert torch.equal(ours.initial[name], value)

    def test_the_same_posterior_with_its_earlier_ones(self, runs: tuple[Run, Run]) -> None:
        ours, theirs = (r.posterior() for r in runs)
        assert len(ours.run) == len(theirs.run) == 4
        for p, q in zip(ours.run, theirs.run, strict=True):
            for name in q.mean:
                torch.testing.assert_close(p.mean[name], q.mean[name], rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(p.precision(name), q.precision(name), rtol=1e-3, atol=0)

    @pytest.mark.parametrize("row", ROWS)
    def test_gradients_accumulate_over_draws_and_are_clipped(
        self, tmp_path: Path, row: str
    ) -> None:
        how: Any = {"count": 2, "clip": 0.1}
        near(self.trained(row, tmp_path, **how).model, looped(row, **how).model)

    @pytest.mark.parametrize("row", [row for row in ROWS if row != "BSAM"])
    def test_float16_with_a_loss_scale(
        self, tmp_path: Path, row: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ours = self.trained(row, tmp_path, count=2, half=monkeypatch).model
        near(ours, looped(row, count=2).model, rtol=0.1, atol=0.1)
        with pytest.raises(AssertionError):
            near(ours, Net(row))

    def test_bfloat16(self, tmp_path: Path) -> None:
        ours = self.trained("ivon", tmp_path, clip=0.1, half=BFLOAT).model
        near(ours, looped("ivon", clip=0.1).model, rtol=0.1, atol=0.05)

    @pytest.mark.parametrize("row", ROWS)
    def test_a_resumed_run_ends_with_the_same_bits(self, tmp_path: Path, row: str) -> None:
        whole, again = (self.trained(row, tmp_path, resume=resume) for resume in (False, True))
        near(again.model, whole.model, rtol=0, atol=0)


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    how = {
        "num_train_epochs": EPOCHS, "per_device_train_batch_size": BATCH, "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant", "save_steps": EACH, **settings,
    }  # fmt: skip
    return TrainingArguments(str(folder), **how)


class Ordered(Trainer):
    """Whose minibatches are those of the loop."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class Drawing(VariationalTrainer, Ordered):
    """Another Trainer that draws weights."""


class Own(IVONTrainer, Ordered):
    """The package's."""


class TestTrainer(TrainerContract):
    @classmethod
    def trained(
        cls, kind: str, folder: Path, count: int = 1, clip: float = 0.0, half: Any = None,
        resume: bool = False,
    ) -> Run:  # fmt: skip
        model, callback = Net(kind, seed=resume), CheckpointsCallback()
        how = {"gradient_accumulation_steps": count, "max_grad_norm": clip, "bf16": half == BFLOAT}
        run = {"adamw": Ordered, "ivon": Own}.get(kind, Drawing)(
            model, arguments(folder, **how), train_dataset=DATA, callbacks=[callback],
            optimizers=(optimizer(kind, model), None),
        )  # fmt: skip
        scaler = float16_on_a_cpu(run.accelerator, half) if half not in (None, BFLOAT) else None
        run.train(resume_from_checkpoint=str(folder / f"checkpoint-{EACH}") if resume else None)
        assert scaler is None or scaler.get_scale() == 2048  # it grew twice, and met no infinity
        kept = callback.checkpoints
        posterior = getattr(run, "posterior", lambda: kept.posterior(n_data=N))  # type: ignore[union-attr]
        return Run(model, kept, callback.recipe, posterior)


class Module(lightning.pytorch.LightningModule):
    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self.net, self.kind = Net(kind, seed), kind

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return optimizer(self.kind, self.net)


class TestLightning(TrainerContract):
    @classmethod
    def trained(
        cls, kind: str, folder: Path, count: int = 1, clip: float = 0.0, half: Any = None,
        resume: bool = False,
    ) -> Run:  # fmt: skip
        module, callback = Module(kind, seed=resume), LightningCheckpoints(submodule="net")
        saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        draws = [] if kind == "adamw" else [VariationalSteps()]
        how: Any = {"precision": "bf16-mixed"} if half == BFLOAT else {}
        if half not in (None, BFLOAT):  # by name on a CPU, where "16-mixed" means bfloat16
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
            how["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
        trainer = lightning.Trainer(
            max_epochs=EPOCHS, callbacks=[callback, *draws, saver], logger=False,
            accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=str(folder), accumulate_grad_batches=count,
            gradient_clip_val=clip or None, **how,
        )  # fmt: skip
        loader: Any = DataLoader(DATA, batch_size=BATCH)  # type: ignore[arg-type]
        trainer.fit(module, loader, ckpt_path=folder / "epoch=0.ckpt" if resume else None)
        own: Any = trainer.optimizers[0]
        assert "step" not in vars(own) and getattr(own, "_step_supports_amp_scaling", True)
        kept: Any = callback.checkpoints
        return Run(module.net, kept, callback.recipe, lambda: kept.posterior(n_data=N))


class TestAccelerate(TrainerContract):
    @classmethod
    def trained(
        cls, kind: str, folder: Path, count: int = 1, clip: float = 0.0, half: Any = None,
        resume: bool = False,
    ) -> Run:  # fmt: skip
        """As docs/training.md says."""
        how = {"mixed_precision": BFLOAT} if half == BFLOAT else {}
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=count, **how)
        if half not in (None, BFLOAT):
            float16_on_a_cpu(accelerator, half)
        model, loader = Net(kind, seed=resume), DataLoader(DATA, batch_size=BATCH)  # type: ignore[arg-type]
        net, wrapped, loader = accelerator.prepare(model, optimizer(kind, model), loader)
        own = wrapped.optimizer
        checkpoints = blr.Checkpoints(net, steps=STEPS, folder=folder / "run", optimizer=own)
        checkpoints.begin()
        if resume:
            accelerator.load_state(str(folder / "state"))
        for epoch in range(resume, EPOCHS):
            for batch in loader:
                with accelerator.accumulate(net):
                    for context in contexts(own, count):
                        with context:
                            accelerator.backward(net(**batch)["loss"])
                    if clip and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(net.parameters(), clip)
                    wrapped.step()
                    wrapped.zero_grad()
                    if accelerator.sync_gradients:
                        checkpoints.step()
            if epoch == 0 and not resume:
                accelerator.save_state(str(folder / "state"))
        recipe: Any = recipe_of(wrapped, epochs=EPOCHS, batch_size=BATCH, n_data=N)
        if recipe is not None:
            recipe.initial = checkpoints.first
        return Run(model, checkpoints, recipe, lambda: checkpoints.posterior(n_data=N))
