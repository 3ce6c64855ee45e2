"""What the posterior's room refuses: a call, the error, and a word of what it says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import mlp
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
from blr_analysis.learning_rule.optim import Newton, RowOptimizer
from blr_analysis.posterior import KroneckerRecorder, read_precision_record, write_precision
from blr_analysis.posterior.structures import LowRank

N = 9
TOLD: dict[str, Any] = {"n_data": N, "prior_precision": 1.0}
ABOUT: dict[str, Any] = {"kind": "ggn", "definition": "d", "n_data": N}
FLAT = {"w": torch.ones(2)}
NAN = math.nan


def task_of(model: nn.Module | None = None, **how: Any) -> blr.Task:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=g, dtype=torch.float64)
    return blr.Task(mlp() if model is None else model, (x, torch.arange(N) % 3), **how)


def fit(model: nn.Module | None = None, **how: Any) -> Any:
    return blr.fit_laplace(task_of(model), **{"prior_precision": 1.0, **how})


def words(**how: Any) -> Any:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    ids = torch.zeros(4, 3, dtype=torch.long)
    return blr.fit_laplace(blr.Task(model, (ids, ids), likelihood="tokens"), **how)


def spoilt(value: float) -> nn.Module:
    model = mlp()
    model[0].weight.data[0, 0] = value
    return model


def stepped(make: Callable[..., Any] = torch.optim.Adam, **how: Any) -> tuple[nn.Module, Any]:
    model = mlp()
    optimizer = make(model.parameters(), **how)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


def live(make: Callable[..., Any] = torch.optim.Adam, how: Any = None, **told: Any) -> Any:
    model, optimizer = stepped(make, **(how or {}))
    return blr.Posterior.from_optimizer(optimizer, model, **{**TOLD, **told})


def damaged(value: float) -> Any:
    model, optimizer = stepped()
    optimizer.state[model[0].bias]["exp_avg_sq"][1] = value
    return blr.Posterior.from_optimizer(optimizer, model, **TOLD)


def saved(path: Path, content: Any, model: nn.Module | None = None, **told: Any) -> Any:
    torch.save(content, path / "state.pt")
    model = mlp() if model is None else model
    return blr.Posterior.from_checkpoint(path / "state.pt", model, **{**TOLD, **told})


def state(make: Callable[..., Any] = torch.optim.Adam, **how: Any) -> dict[str, Any]:
    return stepped(make, **how)[1].state_dict()


def trainer(path: Path, *, decay: float = 0.0, **files: Any) -> Any:
    """A Trainer's folder, of other files where they are given; None: of none."""
    model = mlp()
    spared = [p for n, p in model.named_parameters() if n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    groups = [{"params": rest}, {"params": spared, "weight_decay": decay}]
    optimizer = torch.optim.AdamW(groups)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
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
    other = changes.get("change", lambda m: m)(model)
    return blr.Posterior.from_recorder(changes.get("recorder", recorder), other, **TOLD)


def frozen(model: nn.Module) -> nn.Module:
    model[2].bias.requires_grad_(False)
    return model


def with_token() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3))
    model.register_parameter("token", nn.Parameter(torch.zeros(3)))
    return model


def low(change: Callable[[LowRank], LowRank]) -> Any:
    form = fit(structure="lowrank", rank=3).form
    return change(form).check()


def precision(path: Path, tensors: Any = None, **changes: Any) -> Any:
    tensors = FLAT if tensors is None else tensors
    return write_precision(path / "p", tensors, **{**ABOUT, **changes})


def record(path: Path, **changes: Any) -> Any:
    write_precision(path / "p", FLAT, **ABOUT)
    config = path / "p" / "precision_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    return read_precision_record(path / "p")


def beside(path: Path, model: Any, **how: Any) -> Any:
    write_precision(path / "p", FLAT, **ABOUT, **how)
    return blr.Posterior.load(path / "p", model=model, prior_precision=1.0)


def kept(path: Path, load: dict[str, Any] | None = None, **how: Any) -> Any:
    q = blr.Posterior(FLAT, FLAT, prior_precision=0.5, n_data=N, initial=how.pop("initial", None))
    q.save(path / "q", **how)
    return blr.Posterior.load(path / "q", **(load or {}))


def given(mean: Any = FLAT, precision: Any = FLAT, **how: Any) -> Any:
    return blr.Posterior(mean, precision, **{"prior_precision": 1.0, "n_data": N, **how})


CASES: list[tuple[Callable[[Path], Any], type[BLRError], str]] = [
    # posteriors that are given
    (lambda p: given({}, {}), PosteriorError, "at least one parameter"),
    (lambda p: given({"w": torch.tensor([NAN, 1.0])}), PosteriorError, "training stable"),
    (lambda p: given(precision={"w": torch.tensor([0.0, 1.0])}), PosteriorError, "positive"),
    (lambda p: given(precision={"v": torch.ones(2)}), PosteriorError, "disagree"),
    (lambda p: given(n_data=2.5), PosteriorError, "n_data"),
    (lambda p: given(prior_precision=-1.0), PosteriorError, "prior_precision"),
    (lambda p: given(prior_precision={"v": 1.0}), PosteriorError, "one entry per parameter"),
    (lambda p: given(prior_precision=torch.ones(2)), PosteriorError, "must be a number"),
    (lambda p: given().variance("v"), InputError, "no parameter 'v'"),
    (lambda p: given().sample(n=0), InputError, "n must be"),
    (lambda p: given().on(task_of()), PosteriorError, "another model"),
    (lambda p: fit().on(task_of().subset(range(5))), PosteriorError, "n_data=9 examples"),
    # fits
    (lambda p: fit(structure="round"), InputError, "structure"),
    (lambda p: fit(curvature="round"), InputError, "curvature"),
    (lambda p: fit(prior_precision=0.0), PosteriorError, "above 0"),
    (lambda p: fit(rank=3), InputError, "lowrank"),
    (lambda p: fit(structure="lowrank", rank=43), InputError, "structure='full'"),
    (lambda p: fit(structure="lowrank", rank=2.5), InputError, "positive integer"),
    (lambda p: fit(structure="kron", curvature="exact"), InputError, "exact"),
    (lambda p: fit(structure="lowrank", curvature="exact"), InputError, "exact"),
    (lambda p: fit(structure="gram", curvature="exact"), InputError, "leave curvature out"),
    (lambda p: fit(nn.Linear(4, 5001).double(), structure="full"), InputError, "'lowrank'"),
    (lambda p: fit(spoilt(NAN)), ModelError, "0.weight"),
    (lambda p: fit(mlp().requires_grad_(False)), ModelError, "trainable"),
    (lambda p: fit(prior_precision=dict.fromkeys(mlp().state_dict(), 1.0) | {"2.bias": 2.0}),
     InputError, "2.bias"),
    (lambda p: fit(prior_precision={"0.weight": 1.0}), PosteriorError, "2.weight"),
    (lambda p: fit(initial={"0.weight": torch.zeros(5, 4)}), PosteriorError, "0.bias"),
    (lambda p: fit(initial=[1.0]), PosteriorError, "state dict"),
    (lambda p: fit(initial={n: t * NAN for n, t in mlp().state_dict().items()}),
     PosteriorError, "NaN"),
    (lambda p: fit(prior_precision=None, initial=mlp().state_dict()), PosteriorError, "initial"),
    (lambda p: words(prior_precision=1.0), InputError, "mc_fisher"),
    # structures
    (lambda p: low(lambda f: LowRank({**f.base, "0.bias": f.base["0.bias"] - 9}, f.basis, f.core)),
     PosteriorError, "0.bias"),
    (lambda p: low(lambda f: LowRank(f.base, f.basis, f.core - 1e6 * torch.eye(3))),
     PosteriorError, "positive definite"),
    (lambda p: low(lambda f: LowRank(f.base, f.basis, f.core * NAN)), PosteriorError, "NaN"),
    (lambda p: fit(structure="lowrank", rank=3).form.plus(
        blr.fit_laplace(task_of(spoilt(9.0)), structure="lowrank", rank=3).form),
     InputError, "one basis"),
    # live optimizers
    (lambda p: live(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), OptimizerError, "fit_laplace"),
    (lambda p: live(torch.optim.Adadelta), OptimizerError, "fit_laplace"),
    (lambda p: live(torch.optim.Adafactor), OptimizerError, "fit_laplace"),
    (lambda p: live(lambda w: RowOptimizer(w, "SGD", lr=0.1)), OptimizerError, "SGD keeps no"),
    (lambda p: blr.Posterior.from_optimizer(Newton(mlp().parameters()), mlp()),
     OptimizerError, "Newton keeps no"),
    (lambda p: blr.Posterior.from_optimizer({"state": {}}, mlp()), OptimizerError, "expected"),
    (lambda p: live(n_data=None), OptimizerError, "n_data"),
    (lambda p: live(n_data=0), PosteriorError, "n_data"),
    (lambda p: live(prior_precision=-1.0), PosteriorError, "prior_precision"),
    (lambda p: live(prior_precision="strong"), PosteriorError, "prior_precision"),
    (lambda p: live(tokens=0), InputError, "tokens"),
    (lambda p: live(scaling="root"), InputError, "scaling"),
    (lambda p: live(scaling="ess"), InputError, "scaling"),
    (lambda p: live(scaling="squared"), InputError, "batch_size"),
    (lambda p: live(batch_size=8), InputError, "batch_size"),
    (lambda p: damaged(NAN), PosteriorError, "0.bias"),
    (lambda p: damaged(-1.0), PosteriorError, "negative"),
    # saved ones
    (lambda p: blr.Posterior.from_checkpoint(p / "x", mlp(), **TOLD), StorageError, "nothing"),
    (lambda p: saved(p, [1, 2]), StorageError, "no optimizer's state_dict"),
    (lambda p: saved(p, {"state": {}, "param_groups": []}), StorageError, "no optimizer's"),
    (lambda p: saved(p, torch.optim.Adam(mlp().parameters()).state_dict()),
     OptimizerError, "no state"),
    (lambda p: saved(p, state(torch.optim.SGD, lr=0.1)), OptimizerError, "SGD"),
    (lambda p: saved(p, state(torch.optim.Adadelta)), OptimizerError, "square_avg"),
    (lambda p: saved(p, {"model": [1], "optimizer": state()}), StorageError, "list"),
    (lambda p: saved(p, {"state_dict": {}, "optimizer_states": [state()] * 2}),
     OptimizerError, "2 optimizers"),
    (lambda p: saved(p, state(), names=["0.weight", "nonsense"]), OptimizerError, "not fit"),
    (lambda p: saved(p, state(), names=["0.weight"] * 4), OptimizerError, "not fit"),
    (lambda p: saved(p, state(), nn.Linear(4, 4)), OptimizerError, "does not fit"),
    (lambda p: saved(p, {"model": {"v": torch.ones(1)}, "optimizer": state()}),
     ModelError, "not there"),
    (lambda p: saved(p, state(), n_data=None), OptimizerError, "n_data"),
    (lambda p: trainer(p, decay=0.1), OptimizerError, "not fit"),
    (lambda p: trainer(p, optimizer_dot_pt=None), StorageError, "no optimizer.pt"),
    (lambda p: trainer(p, optimizer_dot_pt=b"half"), StorageError, "truncated"),
    (lambda p: trainer(p, model_dot_safetensors=None), StorageError, "no model.safetensors"),
    (lambda p: trainer(p, model_dot_safetensors=b"half"), StorageError, "truncated"),
    # recorders
    (lambda p: KroneckerRecorder(mlp(), every=0), InputError, "every"),
    (lambda p: KroneckerRecorder(mlp(), beta2=1.0), InputError, "beta2"),
    (lambda p: KroneckerRecorder(mlp(), reduction="max"), InputError, "reduction"),
    (lambda p: KroneckerRecorder(mlp(), scale=0), InputError, "scale"),
    (lambda p: KroneckerRecorder(3), InputError, "Module"),  # type: ignore[arg-type]
    (lambda p: KroneckerRecorder(with_token()), ModelError, "token"),
    (lambda p: KroneckerRecorder(nn.ReLU()), ModelError, "trainable"),
    (lambda p: KroneckerRecorder(mlp()).load_state_dict({"state": {}}), InputError, "state"),
    (lambda p: KroneckerRecorder(nn.Linear(2, 2)).load_state_dict(
        KroneckerRecorder(mlp()).state_dict()), ModelError, "another model"),
    (lambda p: recorded(None), PosteriorError, "nothing was recorded"),
    (lambda p: recorded(NAN), PosteriorError, "finite"),
    (lambda p: recorded(recorder=3), InputError, "KroneckerRecorder"),
    (lambda p: recorded(change=lambda m: mlp(hidden=6)), ModelError, "changed"),
    (lambda p: recorded(change=frozen), ModelError, "changed"),
    # files
    (lambda p: precision(p, {"w": torch.tensor([1.0, -2.0])}), PosteriorError, "'w'.*1 of 2"),
    (lambda p: precision(p, {"w": torch.tensor([NAN, 1.0])}), PosteriorError, "not finite"),
    (lambda p: precision(p, {"w": torch.tensor([1e300]).double()}), PosteriorError, "not finite"),
    (lambda p: precision(p, {"w": torch.tensor([1, 2])}), PosteriorError, "real numbers"),
    (lambda p: precision(p, {"w": torch.ones(2, device="meta")}), PosteriorError, "meta"),
    (lambda p: precision(p, {}), InputError, "no tensors"),
    (lambda p: precision(p, kind="hessian"), InputError, "kind"),
    (lambda p: precision(p, n_data=0), PosteriorError, "n_data"),
    (lambda p: precision(p, definition=""), InputError, "definition"),
    (lambda p: precision(p, dtype=torch.float16), InputError, "dtype"),
    (lambda p: precision(p, dtype=torch.bfloat16, prior_precision=1.0), InputError, "lose"),
    (lambda p: precision(p, prior_precision={"v": 1.0}), PosteriorError, "one entry"),
    (lambda p: precision(p, prior_precision=1.0, prior_outside=1.0), InputError, "not both"),
    (lambda p: precision(p, optimizer=object()), InputError, "JSON"),
    (lambda p: record(p, n_data=None), StorageError, "n_data"),
    (lambda p: beside(p, None), PosteriorError, "pass model="),
    (lambda p: beside(p, 3), InputError, "Module"),
    (lambda p: beside(p, {}), InputError, "at least one tensor"),
    (lambda p: beside(p, {"w": torch.ones(5)}), PosteriorError, r"w: \(5,\), not \(2,\)"),
    (lambda p: beside(p, nn.Linear(2, 2)), PosteriorError, "not there"),
    (lambda p: beside(p, p / "nowhere"), StorageError, "no folder"),
    (lambda p: kept(p, {"model": FLAT}), PosteriorError, "leave model out"),
    (lambda p: kept(p, {"prior_precision": 5.0}), PosteriorError, "with its prior in it"),
    (lambda p: blr.Posterior.load(p / "q.pt"), StorageError, "pickle"),
    (lambda p: blr.Posterior.load(p / "nowhere"), StorageError, "nothing is stored"),
    # predictions and checkpoints
    (lambda p: fit().predict(task_of(), draws=-1), InputError, "draws"),
    (lambda p: fit().predict(task_of(nn.Linear(4, 3).double())), PosteriorError, "another model"),
    (lambda p: blr.Checkpoints(mlp()).posterior(n_data=N), InputError, "optimizer="),
    (lambda p: blr.Checkpoints(mlp(), structure="diag"), InputError, "structure"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_refused(number: int, tmp_path: Path) -> None:
    call, error, word = CASES[number]
    with pytest.raises(error, match=word):
        call(tmp_path)


@pytest.mark.parametrize("structure", ["diag", "kron", "lowrank", "full"])
def test_outputs_that_no_parameter_reaches_are_refused(structure: str) -> None:
    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    with pytest.raises(ModelError, match="depend"):
        fit(Detached(4, 3).double(), structure=structure)


def test_a_refused_file_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(PosteriorError):
        precision(tmp_path, {"w": torch.tensor([-1.0])})
    assert list(tmp_path.iterdir()) == []
