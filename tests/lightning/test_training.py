"""The rule's optimizers in Lightning: the steps of a loop by hand, resumed to the bit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from optimizers import ROWS, make
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.lightning import LightningMonitor, VariationalSteps

N, BATCH = 24, 4
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(N, 3, generator=G), torch.randint(2, (N,), generator=G)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(num_workers|log_every_n_steps|exists and is not empty|litlogger|LeafSpec).*"
)


def contexts(optimizer: Any) -> Iterator[Any]:
    """Around each forward and backward pass of a batch."""
    yield optimizer.sampled_params(train=True)
    if hasattr(optimizer, "adversarial_params"):
        yield optimizer.adversarial_params()


class Module(lightning.pytorch.LightningModule):
    def __init__(self, row: str, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.row = row

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor | None:
        x, y = batch
        if self.automatic_optimization:
            return nn.functional.cross_entropy(self.net(x), y)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for context in contexts(optimizer):
            with context:
                self.manual_backward(nn.functional.cross_entropy(self.net(x), y))
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return make(self.row, self.net, N)


def fit(
    folder: Path, module: Module, *callbacks: Any, resume: Path | None = None, **settings: Any
) -> Module:
    trainer = lightning.Trainer(
        default_root_dir=str(folder), logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks),
        **{"accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False, **settings},
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=BATCH), ckpt_path=resume)
    return module


def by_hand(
    row: str, microbatches: int = 1, clip: float | None = None, closure: Any = None
) -> nn.Module:
    net = Module(row).net
    optimizer = make(row, net, N)
    for batch in torch.arange(N).split(BATCH * microbatches) * 2:
        optimizer.zero_grad()
        for part in batch.split(BATCH):
            for context in contexts(optimizer):
                with context:
                    nn.functional.cross_entropy(net(X[part]), Y[part]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step(closure)
    return net


def same(net: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("callback", [False, True])
def test_automatic_optimisation(tmp_path: Path, row: str, callback: bool) -> None:
    module = fit(tmp_path, Module(row), *([VariationalSteps()] if callback else []))
    same(module.net, by_hand(row))
    assert "step" not in vars(module.trainer.optimizers[0])  # as it was


@pytest.mark.parametrize("row", ROWS)
def test_manual_optimisation(tmp_path: Path, row: str) -> None:
    nothing = by_hand(row, closure=lambda: None)  # what Lightning passes to the step
    same(fit(tmp_path, Module(row, manual=True)).net, nothing)


@pytest.mark.parametrize("row", ROWS)
def test_accumulation_and_clipping_keep_the_gradients_scale(tmp_path: Path, row: str) -> None:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    module = fit(tmp_path, Module(row), VariationalSteps(), **settings)
    same(module.net, by_hand(row, 2, 0.1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_bfloat16(tmp_path: Path, clip: float | None) -> None:
    settings = {"precision": "bf16-mixed", "gradient_clip_val": clip}
    module = fit(tmp_path, Module("IVON"), VariationalSteps(), **settings)
    same(module.net, by_hand("IVON", clip=clip), rtol=0.1, atol=0.02)
    assert module.trainer.optimizers[0]._step_supports_amp_scaling  # as it was


GPU = pytest.param(
    "gpu", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)


@pytest.mark.parametrize("accelerator", ["cpu", GPU])
@pytest.mark.parametrize("row", [row for row in ROWS if row != "BSAM"])
def test_float16_with_a_loss_scale(tmp_path: Path, row: str, accelerator: str) -> None:
    """Lightning asks for the plugin by name on a CPU, where "16-mixed" alone means bfloat16."""
    settings: dict[str, Any] = {"accelerator": accelerator, "accumulate_grad_batches": 2}
    if accelerator == "cpu":
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        settings["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    else:
        settings["precision"] = "16-mixed"
    module = fit(tmp_path, Module(row), VariationalSteps(), **settings)
    expected = fit(tmp_path, Module(row), VariationalSteps(), accumulate_grad_batches=2)
    same(module.net.cpu(), expected.net, rtol=0.1, atol=0.1)
    assert not torch.equal(module.net[0].weight, Module(row).net[0].weight)


@pytest.mark.parametrize("row", ROWS)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, row: str) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    kept = {"enable_checkpointing": True}
    whole = fit(tmp_path, Module(row), saver, **kept)
    again = fit(tmp_path, Module(row), resume=tmp_path / "epoch=0.ckpt")
    same(whole.net, again.net)


def test_a_monitor_watches_and_is_restored(tmp_path: Path) -> None:
    def watched(module: Module) -> tuple[blr.Monitor, LightningMonitor]:
        monitor = blr.Monitor(blr.Task(module.net, (X, Y)), test=blr.Task(module.net, (X, Y)))
        return monitor, LightningMonitor(monitor)

    module = Module("IVON")
    monitor, callback = watched(module)
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, monitor="loo_nll")
    fit(tmp_path, module, callback, saver, enable_checkpointing=True)
    same(module.net, by_hand("IVON"))  # it is watched, not disturbed
    assert monitor.table["epoch"].tolist() == [1, 2]
    assert float(saver.best_model_score) == pytest.approx(monitor.table["loo_nll"].min())
    other = Module("IVON")
    again, callback = watched(other)
    fit(tmp_path, other, callback, resume=tmp_path / "epoch=0.ckpt")
    assert again.table["loo_nll"].tolist() == monitor.table["loo_nll"].tolist()
    before = deepcopy(other.net)
    with pytest.raises(InputError, match="build a new Monitor"):
        fit(tmp_path, other, callback)  # another run
    same(other.net, before)


def test_between_looks_nothing_stops_and_nothing_is_saved(tmp_path: Path) -> None:
    module = Module("IVON")
    monitor = blr.Monitor(blr.Task(module.net, (X, Y)), every=2)
    stopper = EarlyStopping(monitor="loo_nll", strict=False, patience=2, min_delta=100.0)
    options = {"save_top_k": -1, "monitor": "loo_nll", "filename": "{epoch} {loo_nll:.5f}"}
    saver = ModelCheckpoint(tmp_path, **options, every_n_epochs=2)
    kept = {"enable_checkpointing": True, "max_epochs": 9}
    fit(tmp_path, module, LightningMonitor(monitor), stopper, saver, **kept)
    assert monitor.epochs == [2, 4, 6] and stopper.stopped_epoch == 5
    saved = {f"epoch={row['epoch'] - 1} loo_nll={row['loo_nll']:.5f}" for row in monitor.rows}
    assert {path.stem for path in tmp_path.glob("*.ckpt")} == saved
    for impatient in (EarlyStopping(monitor="loo_nll"), ModelCheckpoint(tmp_path, **options)):
        other = Module("IVON")
        watching = LightningMonitor(blr.Monitor(blr.Task(other.net, (X, Y)), every=2))
        with pytest.raises(InputError, match="every 2 epochs"):
            fit(tmp_path, other, watching, impatient, **kept)


@pytest.mark.parametrize(
    ("row", "manual", "word"), [("IVON", True, "manual"), ("torch", False, "AdamW")]
)
def test_what_cannot_work(tmp_path: Path, row: str, manual: bool, word: str) -> None:
    with pytest.raises(InputError, match=word):
        fit(tmp_path, Module(row, manual), VariationalSteps())
    with pytest.warns(UserWarning, match="VariationalSteps"):
        fit(tmp_path, Module("IVON"), accumulate_grad_batches=2)


def test_a_body_that_raises_leaves_the_mean(tmp_path: Path) -> None:
    class Broken(Module):
        def training_step(self, batch: Any, index: int) -> Tensor | None:
            if index == 3:
                raise RuntimeError("no data")
            return None if index == 1 else super().training_step(batch, index)

    module = Broken("IVON")
    with pytest.raises(RuntimeError, match="no data"):
        fit(tmp_path, module, VariationalSteps())
    optimizer = module.trainer.optimizers[0]
    assert int(optimizer.state[module.net[0].weight]["step"]) == 2  # the second was skipped
    optimizer.state_dict()  # refused inside a draw
