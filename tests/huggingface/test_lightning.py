"""Precisions written beside the checkpoints of Lightning's own Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from blr_analysis import IVON, Posterior
from blr_analysis.errors import InputError, OptimizerError, PosteriorError
from blr_analysis.files import storage
from blr_analysis.huggingface import LightningPrecision
from blr_analysis.posterior.capture import from_checkpoint, from_optimizer
from blr_analysis.posterior.precision_files import read_precision_record

N, BATCH = 20, 4
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(num_workers|log_every_n_steps|exists and is not empty|litlogger|LeafSpec).*"
)


def module_of(package: Any, make: Any) -> Any:
    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 4, "name": "small"})
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
            self.aside = nn.Linear(1, 1)
            self.aside.requires_grad_(False)

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return make(self)

    return Module()


def adam(module: Any) -> torch.optim.Optimizer:
    # Backwards, so that the model's own order would mislabel the states.
    return torch.optim.AdamW(list(module.net.parameters())[::-1], lr=0.01, weight_decay=0.1)


def loader(n: int = N) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    y = torch.randint(0, 2, (n,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)


def fit(
    folder: Path,
    *callbacks: Any,
    make: Any = adam,
    package: Any = lightning,
    data: Any = None,
    **settings: Any,
) -> tuple[Any, Any]:
    module = module_of(package.pytorch if package is lightning else package, make)
    options = {"max_epochs": 1, "enable_checkpointing": bool(callbacks[1:]), **settings}
    trainer = package.Trainer(
        default_root_dir=str(folder), logger=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(module, loader() if data is None else data)
    return module, trainer


@pytest.mark.parametrize("package", [lightning, pytorch_lightning])
def test_a_precision_beside_every_checkpoint(tmp_path: Path, package: Any) -> None:
    callbacks = lightning.pytorch.callbacks if package is lightning else package.callbacks
    saver = callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, every_n_epochs=1)
    module, trainer = fit(
        tmp_path, LightningPrecision(), saver, package=package, max_epochs=2,
        accumulate_grad_batches=2, gradient_clip_val=0.5,
    )  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "epoch=0-step=3.ckpt", "epoch=0-step=3.precision",
        "epoch=1-step=6.ckpt", "epoch=1-step=6.precision",
    ]  # fmt: skip
    stored, record = storage.read(tmp_path / "epoch=1-step=6.precision")
    expected = from_optimizer(trainer.optimizers[0], module, n_data=N, bare=True)
    assert list(stored) == [n for n, p in module.named_parameters() if p.requires_grad]
    for name, s in expected.precision.items():
        assert torch.equal(stored[name], s), name
    assert (record["kind"], record["n_data"], record["step"]) == ("adam_v", N, 6)
    assert (record["batch_size"], record["per_device_batch_size"]) == (2 * BATCH, BATCH)
    assert record["gradient_accumulation_steps"] == 2
    assert record["clipping"] == {"norm": 0.5}
    (order,) = record["parameter_order"]
    assert order == ["net.2.bias", "net.2.weight", "net.0.bias", "net.0.weight"]
    assert record["prior_outside"]["net.0.bias"] == pytest.approx(N * 0.1)
    assert record["frozen"] == ["aside.weight", "aside.bias"]
    early = read_precision_record(tmp_path / "epoch=0-step=3.precision")
    assert early["step"] == 3
    # The checkpoint beside it, read with the recorded order, says the same.
    captured = from_checkpoint(
        tmp_path / "epoch=1-step=6.ckpt", module, n_data=N, bare=True,
        names=order,
    )  # fmt: skip
    for name, s in captured.precision.items():
        assert torch.equal(stored[name], s), name


def test_the_names_of_a_part_of_the_module(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="last")
    module, _ = fit(tmp_path, LightningPrecision(submodule="net"), saver)
    q = Posterior.load(tmp_path / "last.precision", model=module.net, prior_precision=3.0)
    assert list(q.mean) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert torch.equal(q.mean["0.bias"], module.net[0].bias)
    with pytest.raises(PosteriorError, match=r"0\.weight: not there"):
        Posterior.load(tmp_path / "last.precision", model=module)


def test_a_precision_goes_with_its_checkpoint(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_top_k=1, monitor="loss", mode="max", every_n_epochs=1)
    fit(tmp_path, LightningPrecision(), saver, max_epochs=4)
    (checkpoint,) = tmp_path.glob("*.ckpt")
    assert [p.stem for p in tmp_path.glob("*.precision")] == [checkpoint.stem]


def test_a_checkpoint_saved_by_hand_after_the_fit(tmp_path: Path) -> None:
    module, trainer = fit(tmp_path, LightningPrecision(dtype=torch.bfloat16))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    stored, _ = storage.read(tmp_path / "last.precision")
    expected = from_optimizer(trainer.optimizers[0], module, n_data=N, bare=True).precision
    for name, s in expected.items():
        assert torch.equal(stored[name], s.bfloat16()), name
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())  # a second fit does not listen twice
    assert trainer.current_epoch == 2
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    assert (tmp_path / "again.precision").is_dir()
    assert not hasattr(trainer.strategy.checkpoint_io.inner, "inner")


def test_ivon_in_lightning(tmp_path: Path) -> None:
    def ivon(module: Any) -> IVON:
        return IVON(module.net.parameters(), lr=0.05, ess=N, weight_decay=0.05, beta2=0.9)

    saver = ModelCheckpoint(tmp_path, filename="last")
    module, trainer = fit(tmp_path, LightningPrecision(), saver, make=ivon)
    q = Posterior.load(tmp_path / "last.precision", model=module)
    expected = Posterior.from_optimizer(trainer.optimizers[0], module)
    for name in expected.mean:
        assert torch.equal(q.precision(name), expected.precision(name))
    assert q.prior_precision == pytest.approx(N * 0.05)
    assert read_precision_record(tmp_path / "last.precision")["kind"] == "ivon"


class Unsized(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter([(torch.ones(3), torch.tensor(1))] * 8)


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        (
            {},
            {"make": lambda m: torch.optim.SGD(m.net.parameters(), 0.1)},
            "SGD keeps no precision",
        ),
        ({"submodule": "nothing"}, {}, r"no part 'nothing'; it has \['net', 'aside'\]"),
        ({"submodule": "net.0"}, {}, r"2 of the optimizer's 4 parameters are not the model's"),
        ({}, {"data": DataLoader(Unsized(), batch_size=2)}, "no length.*n_data="),
        ({}, {"precision": "bf16-true"}, "cannot fall"),
        (
            {"scaling": "squared"},
            {"data": DataLoader(loader().dataset, batch_size=None)},
            "batch size",
        ),
    ],
)
def test_what_cannot_work_is_refused_when_training_begins(
    tmp_path: Path, options: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((OptimizerError, InputError), match=message):
        fit(tmp_path, LightningPrecision(**options), **settings)


def test_two_optimizers_are_refused(tmp_path: Path) -> None:
    class Two(lightning.pytorch.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)

        def training_step(self, *_: Any) -> None:
            pass

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam([p]) for p in self.net.parameters()]

    trainer = lightning.pytorch.Trainer(
        default_root_dir=str(tmp_path), logger=False, enable_checkpointing=False, max_epochs=1,
        accelerator="cpu", callbacks=[LightningPrecision()], enable_progress_bar=False,
    )  # fmt: skip
    with pytest.raises(OptimizerError, match="2 optimizers"):
        trainer.fit(Two(), loader())


def test_a_precision_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "last.precision").mkdir()
    (tmp_path / "last.precision" / "notes.txt").write_text("precious")
    with pytest.warns(UserWarning, match=r"no precision was written.*notes\.txt"):
        fit(tmp_path, LightningPrecision(), ModelCheckpoint(tmp_path, filename="last"))
    assert (tmp_path / "last.ckpt").is_file()
    assert (tmp_path / "last.precision" / "notes.txt").read_text() == "precious"
