"""What the posterior's room refuses: a call, the error, and a word of what it says."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from models import Graph, mlp, normal, randomised
from safetensors.torch import save_file
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import (
    BLRError,
    InputError,
    ModelError,
    OptimizerError,
    PosteriorError,
    StorageError,
)
from blr_analysis.files.headers import read_record, record_text
from blr_analysis.learning_rule.optim import Newton, RowOptimizer
from blr_analysis.posterior import KroneckerRecorder, read_precision_record, write_precision

N = 9
TOLD: dict[str, Any] = {"n_data": N, "prior_precision": 1.0}
ABOUT: dict[str, Any] = {"kind": "ggn", "definition": "d", "n_data": N}
FLAT = {"w": torch.ones(2)}
NAN = math.nan
ADDED = nn.Parameter(torch.zeros(3))
TOKEN = Graph(lambda m, x: m.layer(x) + m.token, layer=nn.Linear(4, 3), token=ADDED)


def task_of(model: nn.Module | None = None, **options: Any) -> blr.Task:
    data = normal(N, 4), torch.arange(N) % 3
    return blr.Task(mlp() if model is None else model, data, **options)


def fit(model: nn.Module | None = None, **options: Any) -> Any:
    return blr.fit_laplace(task_of(model), **{"prior_precision": 1.0, **options})


def words(**options: Any) -> Any:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    ids = torch.zeros(4, 3, dtype=torch.long)
    return blr.fit_laplace(blr.Task(model, (ids, ids), likelihood="tokens"), **options)


def file_in(folder: Path) -> Path:
    file = folder / "file"
    file.write_text("no folder")
    return file


def resumed_from(state: dict[str, Any]) -> None:
    blr.Checkpoints(mlp()).load_state_dict(state)


def unfrozen_meanwhile() -> blr.Posterior:
    """The first layer trains from the second half on."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoints = blr.Checkpoints(model, steps=8, optimizer=optimizer)
    inputs = normal(N, 4)
    for step in range(8):
        model[0].requires_grad_(step >= 4)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        checkpoints.step()
    return checkpoints.posterior(**TOLD)


def flat(bias: float = 0.0, scale: float = 1.0, label: int = 0, **options: Any) -> Any:
    """A fit where no parameter has curvature."""
    model = nn.Linear(4, 2).double()
    model.bias.data = torch.tensor([bias, 0.0]).double()
    labels = torch.full((N,), label)
    loss = nn.CrossEntropyLoss()
    task = blr.Task(model, (scale * normal(N, 4), labels), likelihood=loss)
    return blr.fit_laplace(task, **options)


def dead() -> nn.Module:
    """A network whose hidden units are all off."""
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3, bias=False)).double()
    model[0].bias.data.fill_(-1e3)
    return model


class Surprise:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return shutil.rmtree, ("nowhere", True)


def weight_normed() -> nn.Module:
    """A second derivative that torch has wrong."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return randomised(nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3)))


def stepped(make: Callable[..., Any] = torch.optim.Adam, **settings: Any) -> tuple[nn.Module, Any]:
    model = mlp()
    optimizer = make(model.parameters(), **settings)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


def live(
    make: Callable[..., Any] = torch.optim.Adam,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **arguments: Any,
) -> Any:
    model, optimizer = stepped(make, **settings)
    return blr.Posterior.from_optimizer(optimizer, model, **{**TOLD, **arguments})


def muon() -> tuple[Callable[[], Any], Any]:
    """Which has SGD's ``nesterov``, and takes matrices alone."""
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return lambda: blr.Posterior.from_optimizer(optimizer, model, **TOLD), optimizer


def sampled() -> Any:
    model = mlp()
    optimizer = blr.IVON(model.parameters(), lr=0.1, ess=N)
    with optimizer.sampled_params():
        return blr.Posterior.from_optimizer(optimizer, model)


def saved(path: Path, content: Any, model: nn.Module | None = None, **arguments: Any) -> Any:
    torch.save(content, path / "state.pt")
    model = mlp() if model is None else model
    return blr.Posterior.from_checkpoint(path / "state.pt", model, **{**TOLD, **arguments})


def state(make: Callable[..., Any] = torch.optim.Adam, **settings: Any) -> dict[str, Any]:
    return stepped(make, **settings)[1].state_dict()


def damaged(change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    content = state()
    for slots in content["state"].values():
        slots["exp_avg_sq"] = change(slots["exp_avg_sq"])
    return content


def trainer(path: Path, *, decay: float = 0.0, **files: Any) -> Any:
    """A Trainer's folder, of other files where they are given; None: of none."""

    def grouped(params: Any) -> torch.optim.Optimizer:
        parameters = list(params)
        spared = {"params": [p for p in parameters if p.ndim == 1], "weight_decay": decay}
        rest = {"params": [p for p in parameters if p.ndim > 1]}
        return torch.optim.AdamW([rest, spared])

    model, optimizer = stepped(grouped)
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    save_file(model.state_dict(), path / "model.safetensors")
    for name, content in files.items():
        file = path / name.replace("_dot_", ".")
        file.unlink() if content is None else file.write_bytes(content)
    return blr.Posterior.from_checkpoint(path, model, **TOLD)


def recorded(x: Any = 1.0, model: nn.Module | None = None, **changes: Any) -> Any:
    model = (mlp() if model is None else model).train()
    recorder = KroneckerRecorder(model, every=1)
    if x is not None:
        data = x * torch.ones(6, 4, dtype=torch.float64)
        nn.functional.cross_entropy(model(data), torch.arange(6) % 3).backward()
    later_model = changes.get("change", lambda m: m)(model)
    return blr.Posterior.from_recorder(changes.get("recorder", recorder), later_model, **TOLD)


def precision(path: Path, tensors: Any = None, **changes: Any) -> Any:
    tensors = FLAT if tensors is None else tensors
    return write_precision(path / "p", tensors, **{**ABOUT, **changes})


def record(path: Path, **changes: Any) -> Any:
    write_precision(path / "p", FLAT, **ABOUT)
    config = path / "p" / "precision_config.json"
    config.write_text(record_text({**read_record(config), **changes}))
    return read_precision_record(path / "p")


def beside(path: Path, model: Any, **fields: Any) -> Any:
    write_precision(path / "p", FLAT, **ABOUT, **fields)
    return blr.Posterior.load(path / "p", model=model, prior_precision=1.0)


def without_prior(path: Path) -> Any:
    write_precision(path / "p", {"w": torch.tensor([0.0, 1.0])}, **ABOUT)
    return blr.Posterior.load(path / "p", model=FLAT)


def kept(path: Path, **load: Any) -> Any:
    blr.Posterior(FLAT, FLAT, prior_precision=0.5, n_data=N).save(path / "q")
    return blr.Posterior.load(path / "q", **load)


def given(mean: Any = FLAT, precision: Any = FLAT, **fields: Any) -> Any:
    return blr.Posterior(mean, precision, **{"prior_precision": 1.0, "n_data": N, **fields})


CASES: list[tuple[Callable[[Path], Any], type[BLRError], str]] = [
    # posteriors that are given; the rest in test_bad_input
    (lambda p: given(prior_precision=torch.ones(2)), PosteriorError, "must be a number"),
    # fits
    (lambda p: fit(rank=3), InputError, "lowrank"),
    (lambda p: fit(structure="lowrank", rank=43), InputError, "structure='full'"),
    (lambda p: fit(structure="kron", curvature="exact"), InputError, "exact"),
    (lambda p: fit(structure="gram", curvature="exact"), InputError, "leave curvature out"),
    (lambda p: fit(nn.Linear(4, 5001).double(), structure="full"), InputError, "'lowrank'"),
    (
        lambda p: fit(prior_precision=dict.fromkeys(mlp().state_dict(), 1.0) | {"2.bias": 2.0}),
        InputError,
        "2.bias",
    ),
    (lambda p: fit(initial={"0.weight": torch.zeros(5, 4)}), PosteriorError, "0.bias"),
    (lambda p: fit(prior_precision=None, initial=mlp().state_dict()), PosteriorError, "initial"),
    (lambda p: (lambda m: fit(m, initial=m.state_dict()))(mlp()), PosteriorError, "deepcopy"),
    (lambda p: words(prior_precision=1.0, curvature="exact"), InputError, "exact"),
    (lambda p: fit(weight_normed(), curvature="exact", structure="full"), ModelError, "symmetric"),
    (
        lambda p: blr.fit_laplace(
            blr.Task(nn.Linear(3, 2), (torch.full((6, 3), 1e20), torch.arange(6) % 2))
        ),
        ModelError,
        "overflow",
    ),
    *(
        (lambda p, label=label, how=how: flat(1e4, label=label, **how), PosteriorError, "certain")
        for label, how in (
            (0, {}),
            (1, {}),
            (0, {"curvature": "empirical_fisher"}),
            (0, {"curvature": "mc_fisher"}),
            (0, {"structure": "diag"}),
        )
    ),
    (lambda p: flat(label=-100), PosteriorError, "no example counts"),
    (lambda p: fit(dead(), prior_precision=None), ModelError, "no output moves.*dead"),
    # live optimizers
    (lambda p: live(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), OptimizerError, "fit_laplace"),
    (lambda p: live(lambda w: RowOptimizer(w, "SGD", lr=0.1)), OptimizerError, "SGD keeps no"),
    (
        lambda p: blr.Posterior.from_optimizer(Newton(mlp().parameters()), mlp()),
        OptimizerError,
        "Newton keeps no",
    ),
    (lambda p: live(torch.optim.Rprop), OptimizerError, "can be read from Rprop"),
    (lambda p: muon()[0](), OptimizerError, "can be read from Muon"),
    (lambda p: saved(p, muon()[1].state_dict()), OptimizerError, "can be read from the saved"),
    (lambda p: live(n_data=None), OptimizerError, "n_data"),
    (lambda p: live(scaling="ess"), InputError, "scaling"),
    (lambda p: live(scaling="squared"), InputError, "batch_size"),
    (lambda p: sampled(), OptimizerError, "are a sample"),
    # saved ones
    (lambda p: blr.Posterior.from_checkpoint(p / "x", mlp(), **TOLD), StorageError, "nothing"),
    (lambda p: saved(p, {"state": {}, "hyper": Surprise()}), StorageError, "weights_only"),
    (lambda p: saved(p, [1, 2]), StorageError, "no optimizer's state_dict"),
    (
        lambda p: saved(p, torch.optim.Adam(mlp().parameters()).state_dict()),
        OptimizerError,
        "no state",
    ),
    (lambda p: saved(p, state(torch.optim.SGD, lr=0.1)), OptimizerError, "SGD"),
    (lambda p: saved(p, {"model": [1], "optimizer": state()}), StorageError, "list"),
    (
        lambda p: saved(p, {"state_dict": {}, "optimizer_states": [state()] * 2}),
        OptimizerError,
        "2 optimizers",
    ),
    (lambda p: saved(p, state(), names=["0.weight", "nonsense"]), OptimizerError, "not fit"),
    (lambda p: saved(p, state(), nn.Linear(4, 4)), OptimizerError, "does not fit"),
    (
        lambda p: saved(p, {"model": {"v": torch.ones(1)}, "optimizer": state()}),
        ModelError,
        "absent in the checkpoint",
    ),
    (lambda p: saved(p, damaged(torch.neg)), PosteriorError, "negative"),
    (lambda p: saved(p, damaged(Tensor.half)), OptimizerError, "cannot fall"),
    (lambda p: trainer(p, decay=0.1), OptimizerError, "not fit"),
    (lambda p: trainer(p, optimizer_dot_pt=None), StorageError, "no optimizer.pt"),
    (lambda p: trainer(p, optimizer_dot_pt=b"half"), StorageError, "truncated"),
    (lambda p: trainer(p, optimizer_dot_pt=b""), StorageError, "truncated"),
    (lambda p: trainer(p, model_dot_safetensors=None), StorageError, "no model.safetensors"),
    # recorders
    (lambda p: KroneckerRecorder(mlp(), reduction="max"), InputError, "reduction"),
    (lambda p: KroneckerRecorder(TOKEN), ModelError, "token"),
    (lambda p: KroneckerRecorder(mlp()).load_state_dict({"state": {}}), InputError, "state"),
    (
        lambda p: KroneckerRecorder(nn.Linear(2, 2)).load_state_dict(
            KroneckerRecorder(mlp()).state_dict()
        ),
        ModelError,
        "another model",
    ),
    (lambda p: recorded(None), PosteriorError, "nothing was recorded"),
    (lambda p: recorded(NAN), PosteriorError, "finite"),
    (lambda p: recorded(change=lambda m: mlp(hidden=6)), ModelError, "changed"),
    # files
    (lambda p: precision(p, {"w": torch.tensor([1.0, -2.0])}), PosteriorError, "'w'.*1 of 2"),
    (lambda p: precision(p, {"w": torch.tensor([1e300]).double()}), PosteriorError, "not finite"),
    (lambda p: precision(p, {"w": torch.ones(2, device="meta")}), PosteriorError, "meta"),
    (lambda p: precision(p, kind="hessian"), InputError, "kind"),
    (lambda p: precision(p, prior_precision=1.0, prior_outside=1.0), InputError, "not both"),
    (lambda p: record(p, n_data=None), StorageError, "n_data"),
    (lambda p: without_prior(p), PosteriorError, "0 in 1 of 2.*prior_precision="),
    (lambda p: beside(p, None), PosteriorError, "pass model="),
    (lambda p: beside(p, {"w": torch.ones(5)}), PosteriorError, r"w: \(5,\) in the model"),
    (lambda p: beside(p, nn.Linear(2, 2)), PosteriorError, "absent in the model"),
    (lambda p: beside(p, p / "nowhere"), StorageError, "no folder"),
    (lambda p: kept(p, model=FLAT), PosteriorError, "leave model out"),
    (lambda p: kept(p, prior_precision=5.0), PosteriorError, "with its prior in it"),
    (
        lambda p: given(
            {"w": FLAT["w"], "w.mean": FLAT["w"]}, {"w": FLAT["w"], "w.mean": FLAT["w"]}
        ).save(p / "q"),
        InputError,
        r"\['w\.mean'\].*rename",
    ),
    (lambda p: precision(p, dtype=torch.float16), InputError, "dtype"),
    (lambda p: precision(p, dtype=torch.bfloat16, prior_precision=1.0), InputError, "outside"),
    # predictions and checkpoints
    (lambda p: blr.Checkpoints(mlp()).posterior(n_data=N), InputError, "optimizer="),
    (lambda p: blr.Checkpoints(mlp(), structure="diag"), InputError, "structure"),
    (lambda p: blr.Checkpoints(mlp(), optimizer="adam"), InputError, "optimizer must be"),  # type: ignore[arg-type]
    (lambda p: blr.Checkpoints(mlp().requires_grad_(False)).step(), ModelError, "unfreeze some"),
    (lambda p: blr.Checkpoints(mlp(), folder=file_in(p) / "run").begin(), StorageError, "written"),
    (lambda p: resumed_from({"done": "a", "snapshots": {}}), InputError, "no state"),
    (lambda p: resumed_from({"done": 1, "snapshots": 3}), InputError, "no state"),
    (lambda p: resumed_from({"done": 1, "snapshots": {1: {}}}), ModelError, "another model's"),
    (lambda p: unfrozen_meanwhile(), ModelError, "unfroze"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_refused(number: int, tmp_path: Path) -> None:
    call, error, word = CASES[number]
    with pytest.raises(error, match=word):
        call(tmp_path)


def test_a_refused_file_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(PosteriorError):
        precision(tmp_path, {"w": torch.tensor([-1.0])})
    assert list(tmp_path.iterdir()) == []
