"""The rule's optimizers in Lightning, beside what every trainer promises
(``tests/huggingface/test_contract.py``): without a callback, by hand, watched, and broken."""

from __future__ import annotations

import logging
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from optimizers import ROWS, make
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.lightning import LightningMonitor, VariationalSteps

N = 24
BATCH = 4
G = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=G)
Y = torch.randint(2, (N,), generator=G)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(num_workers|log_every_n_steps|exists and is not empty|litlogger|LeafSpec).*"
)


def backward(net: nn.Module, x: Tensor, y: Tensor, optimizer: Any, run: Any = None) -> None:
    """Draws around each forward and backward pass of a batch."""
    contexts = []
    if hasattr(optimizer, "sampled_params"):
        contexts.append(partial(optimizer.sampled_params, train=True))
    if hasattr(optimizer, "adversarial_params"):
        contexts.append(optimizer.adversarial_params)
    for context in contexts:
        with context():
            (run or Tensor.backward)(nn.functional.cross_entropy(net(x), y))


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
        backward(self.net, x, y, optimizer, self.manual_backward)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return make(self.row, self.net, N)


def fit(
    folder: Path, module: Module, *callbacks: Any, resume: Path | None = None, **settings: Any
) -> Module:
    trainer = lightning.Trainer(
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=False,
        accelerator="cpu",
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{"max_epochs": 2, **settings},
    )
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=BATCH), ckpt_path=resume)
    return module


def by_hand(row: str, closure: Any = None) -> nn.Module:
    net = Module(row).net
    optimizer = make(row, net, N)
    for part in torch.arange(N).split(BATCH) * 2:
        optimizer.zero_grad()
        backward(net, X[part], Y[part], optimizer)
        optimizer.step(closure)
    return net


def same(net: nn.Module, expected: nn.Module) -> None:
    for p, q in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.slow
def test_without_a_callback_and_by_manual_optimisation(tmp_path: Path, row: str) -> None:
    same(fit(tmp_path, Module(row)).net, by_hand(row))
    nothing = by_hand(row, closure=lambda: None)  # what Lightning passes to the step
    same(fit(tmp_path, Module(row, manual=True)).net, nothing)


def test_a_monitor_watches_and_is_restored(tmp_path: Path) -> None:
    def watched(module: Module) -> tuple[blr.Monitor, LightningMonitor]:
        monitor = blr.Monitor(blr.Task(module.net, (X, Y)), test=blr.Task(module.net, (X, Y)))
        return monitor, LightningMonitor(monitor)

    module = Module("IVON")
    monitor, callback = watched(module)
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, monitor="loo_nll")
    fit(tmp_path, module, callback, saver)
    same(module.net, by_hand("IVON"))  # it is watched, not disturbed
    assert monitor.table["epoch"].tolist() == [1, 2]
    assert float(saver.best_model_score) == pytest.approx(monitor.table["loo_nll"].min())  # type: ignore[arg-type]
    resumed = Module("IVON")
    again, callback = watched(resumed)
    fit(tmp_path, resumed, callback, resume=tmp_path / "epoch=0.ckpt")
    assert again.table["loo_nll"].tolist() == monitor.table["loo_nll"].tolist()
    before = deepcopy(resumed.net)
    with pytest.raises(InputError, match="build a new Monitor"):
        fit(tmp_path, resumed, callback)  # another run
    same(resumed.net, before)


@pytest.mark.parametrize("settings", [{}, {"n_data": len(X)}])
def test_a_monitor_fits_unless_the_optimizers_posterior_is_asked_for(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    structures: list[str] = []

    class Spy(blr.Monitor):
        def __call__(self, posterior: Any, epoch: int) -> Any:
            structures.append("fitted" if posterior is None else posterior().structure)
            return super().__call__(posterior, epoch)

    module = Module("IVON")
    fit(tmp_path, module, LightningMonitor(Spy(blr.Task(module.net, (X, Y))), **settings))
    assert structures == 2 * ["diag" if settings else "fitted"]


def test_between_looks_nothing_stops_and_nothing_is_saved(tmp_path: Path) -> None:
    module = Module("IVON")
    monitor = blr.Monitor(blr.Task(module.net, (X, Y)), every=2)
    stopper = EarlyStopping(monitor="loo_nll", strict=False, patience=2, min_delta=100.0)
    options = {"save_top_k": -1, "monitor": "loo_nll", "filename": "{epoch} {loo_nll:.5f}"}
    saver = ModelCheckpoint(tmp_path, **options, every_n_epochs=2)
    fit(tmp_path, module, LightningMonitor(monitor), stopper, saver, max_epochs=9)
    assert monitor.epochs == [2, 4, 6]
    assert stopper.stopped_epoch == 5
    saved = {f"epoch={row['epoch'] - 1} loo_nll={row['loo_nll']:.5f}" for row in monitor.rows}
    assert {path.stem for path in tmp_path.glob("*.ckpt")} == saved


def test_what_cannot_work(tmp_path: Path) -> None:
    for row, manual, word in (("IVON", True, "manual"), ("torch", False, "AdamW")):
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
