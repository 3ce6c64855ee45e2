"""Saved training states: names for numbered tensors, or a refusal that lists what differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from blr_analysis.errors import ModelError, OptimizerError, StorageError
from blr_analysis.posterior.capture import from_checkpoint, from_optimizer

TOLD: dict[str, Any] = {"n_data": 200, "prior_precision": 3.0}


class RootNorm(nn.Module):
    """A norm that is no ``nn.LayerNorm``, as in Llama and T5."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)
        self.LayerNorm, self.q_norm = nn.LayerNorm(6), RootNorm(6)


class Tiny(nn.Module):
    """Same shapes over and over, an embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.final = nn.LayerNorm(6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight


BIASES = [f"blocks.{k}.{layer}.bias" for k in (0, 1) for layer in ("query", "key", "LayerNorm")]
LAYER_NORMS = [*BIASES, "final.weight", "final.bias"]
LAYER_NORMS += [f"blocks.{k}.LayerNorm.weight" for k in (0, 1)]
ALL_NORMS = [*LAYER_NORMS, *(f"blocks.{k}.q_norm.weight" for k in (0, 1))]


def groups(model: nn.Module, spared: list[str], decay: float = 0.01) -> list[dict[str, Any]]:
    """As Trainer builds them; ``spared`` is written out by hand."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in named if n not in spared], "weight_decay": decay},
        {"params": [p for n, p in named if n in spared], "weight_decay": 0.0},
    ]


def trained(make: Callable[[Any], Any], model: Any = None) -> tuple[Any, torch.optim.Optimizer]:
    """After steps of gradients that differ everywhere."""
    torch.manual_seed(0)
    model = Tiny() if model is None else model
    optimizer = make(model)
    for _ in range(3):
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator) if p.requires_grad else None
        optimizer.step()
    return model, optimizer


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def trainers(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model, ALL_NORMS))


def unique(model: nn.Module, keep_last: bool = False) -> dict[str, Tensor]:
    """A state dict in which tied tensors stand once, by their first or their last name."""
    items = list(model.state_dict().items())
    by_memory = {value.data_ptr(): name for name, value in (items if keep_last else items[::-1])}
    return {name: value for name, value in items if name in by_memory.values()}


def in_shards(path: Path, stem: str, suffix: str, weights: dict[str, Tensor], save: Any) -> None:
    names, weight_map = list(weights), {}
    for k, part in enumerate((names[:5], names[5:])):
        save({n: weights[n] for n in part}, path / f"{stem}-{k}.{suffix}")
        weight_map |= dict.fromkeys(part, f"{stem}-{k}.{suffix}")
    (path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def trainer_folder(weights: str) -> Callable[[Path, nn.Module, Any], Path]:
    def write(path: Path, model: nn.Module, optimizer: Any) -> Path:
        torch.save(optimizer.state_dict(), path / "optimizer.pt")
        held = unique(model, keep_last=weights != "one file")
        if weights == "sharded":
            in_shards(path, "model", "safetensors", held, save_file)
        else:
            save_file(held, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return write


def in_file(content: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Callable[..., Path]:
    def write(path: Path, model: nn.Module, optimizer: Any) -> Path:
        torch.save(content(model.state_dict(), optimizer.state_dict()), path / "last.ckpt")
        return path / "last.ckpt"

    return write


def lightning(prefix: str) -> Callable[..., Path]:
    return in_file(
        lambda w, s: {
            "epoch": 2,
            "state_dict": {prefix + n: t for n, t in w.items()},
            "optimizer_states": [s],
        }
    )


def exported(path: Path, model: nn.Module, optimizer: Any) -> Path:
    """A state by name, as torch.distributed.checkpoint exports it from any sharding."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    torch.save({"model": weights, "optimizer": state}, path / "state.pt")
    return path / "state.pt"


LAYOUTS: dict[str, tuple[Callable[..., Any], Callable[..., Path], str, str]] = {
    # how it was trained and written, the source and the rule that are recorded
    "trainer": (trainers, trainer_folder("one file"), "trainer", "Trainer's groups"),
    "its last names": (trainers, trainer_folder("last names"), "trainer", "Trainer's groups"),
    "its shards": (trainers, trainer_folder("sharded"), "trainer", "Trainer's groups"),
    "an older trainer": (
        lambda m: torch.optim.AdamW(groups(m, LAYER_NORMS, 0.0)),
        trainer_folder("one file"),
        "trainer",
        "Trainer's groups",
    ),
    "lightning": (adam, lightning(""), "lightning", "the model's parameters"),
    "lightning, in a module": (adam, lightning("net._orig_mod."), "lightning", "the model's"),
    "a pair": (
        adam,
        in_file(lambda w, s: {"model_state_dict": w, "optimizer_state_dict": s}),
        "pair",
        "the model's",
    ),
    "a short pair": (adam, in_file(lambda w, s: {"model": w, "optimizer": s}), "short pair", "the"),
    "a state alone": (adam, in_file(lambda w, s: s), "optimizer state", "the model's parameters"),
    "groups of one's own": (
        lambda m: torch.optim.Adam(
            [
                {"params": [*m.embed.parameters(), *m.blocks[0].parameters()]},
                {"params": [*m.blocks[1].parameters(), *m.final.parameters()], "lr": 0.1},
            ]
        ),
        in_file(lambda w, s: s),
        "optimizer state",
        "the model's parameters",
    ),
    "named": (
        lambda m: torch.optim.Adam(list(m.named_parameters())[::-1]),
        in_file(lambda w, s: s),
        "optimizer state",
        "param_names in the file",
    ),
    "exported": (trainers, exported, "short pair", "names in the file"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_like_the_live_optimizer(layout: str, tmp_path: Path) -> None:
    make, write, source, rule = LAYOUTS[layout]
    model, optimizer = trained(make)
    place = write(tmp_path, model, optimizer)
    alone = source == "optimizer state"
    with torch.device("meta"):  # where the weights come with it, none are needed
        empty = Tiny()
    saved = from_checkpoint(place, model if alone else empty, **TOLD)
    live = from_optimizer(optimizer, model, **TOLD)
    assert list(saved.precision) == list(live.precision)
    for name, s in live.precision.items():
        assert s.unique().numel() > 1  # something to mix up
        assert torch.equal(saved.precision[name], s), name
        assert torch.equal(saved.mean[name], live.mean[name]), name
    assert saved.record["source"] == source and saved.record["order"].startswith(rule)
    assert saved.record["mean_from"] == ("model" if alone else "checkpoint")
    assert saved.record["tied"] == {"embed.weight": ["head.weight"]}
    if alone:
        with pytest.raises(ModelError, match="meta device"):
            from_checkpoint(place, empty, **TOLD)


@pytest.mark.parametrize("frozen_too", [True, False])
def test_frozen_parameters_may_or_may_not_be_in_the_state(tmp_path: Path, frozen_too: bool) -> None:
    model = Tiny()
    model.blocks[0].query.requires_grad_(False)
    passed = [p for p in model.parameters() if frozen_too or p.requires_grad]
    _, optimizer = trained(lambda m: torch.optim.Adam(passed), model)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    saved = from_checkpoint(tmp_path / "state.pt", model, **TOLD)
    live = from_optimizer(optimizer, model, **TOLD)
    assert list(saved.precision) == list(live.precision)
    assert "blocks.0.query.weight" not in saved.precision
    assert all(torch.equal(saved.precision[n], s) for n, s in live.precision.items())


def test_of_two_networks_in_one_file_the_bare_one(tmp_path: Path) -> None:
    model, optimizer = trained(adam)
    for head, fits in (("", True), ("student.", False)):
        both = {head: model, "teacher.": Tiny()}
        weights = {p + n: v for p, net in both.items() for n, v in net.state_dict().items()}
        content = {"state_dict": weights, "optimizer_states": [optimizer.state_dict()]}
        torch.save(content, tmp_path / "last.ckpt")
        if fits:
            mean = from_checkpoint(tmp_path / "last.ckpt", Tiny(), **TOLD).mean
            assert all(torch.equal(mean[name], p) for name, p in model.named_parameters())
            continue
        with pytest.raises(ModelError, match=r"student.*teacher.*load"):
            from_checkpoint(tmp_path / "last.ckpt", model, **TOLD)


def test_two_readings_that_both_fit_are_refused_unless_the_names_are_given(tmp_path: Path) -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # By its class RootNorm is a norm, by its name it is not: two readings of one size.
            self.scale, self.layernorm = RootNorm(4), nn.Module()
            self.layernorm.register_parameter("gain", nn.Parameter(torch.ones(4)))

    model, optimizer = trained(lambda m: torch.optim.AdamW(groups(m, ["scale.weight"])), Norms())
    folder = trainer_folder("one file")(tmp_path, model, optimizer)
    with pytest.raises(OptimizerError, match=r"2 ways.*Pass names="):
        from_checkpoint(folder, model, **TOLD)
    names = ["layernorm.gain", "scale.weight"]
    saved = from_checkpoint(folder, model, names=names, **TOLD)
    live = from_optimizer(optimizer, model, **TOLD)
    assert all(torch.equal(saved.precision[n], s) for n, s in live.precision.items())


def test_what_differs_is_listed(tmp_path: Path) -> None:
    model, optimizer = trained(trainers)
    folder = trainer_folder("one file")(tmp_path, model, optimizer)
    other = Tiny()
    other.blocks[1].key = nn.Linear(5, 6)
    with pytest.raises(OptimizerError, match=r"groups of \[5, 12\].*not fit.*Pass names="):
        from_checkpoint(folder, other, **TOLD)
    other = Tiny()
    other.blocks[0].requires_grad_(False)
    with pytest.raises(OptimizerError, match="not fit"):
        from_checkpoint(folder, other, **TOLD)
    weights = {**unique(model), "final.bias": torch.ones(7)}
    del weights["final.weight"]
    save_file(weights, folder / "model.safetensors")
    message = r"final\.weight: not there', 'final\.bias: \(7,\), not \(6,\)"
    with pytest.raises(ModelError, match=message):
        from_checkpoint(folder, model, **TOLD)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_are_refused_with_the_reason(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model, optimizer = trained(
        lambda m: torch.optim.Adam(m.parameters(), eps=1e-4), nn.Linear(3, 2)
    )
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].to(dtype)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    with pytest.raises(OptimizerError, match="cannot fall"):
        from_checkpoint(tmp_path / "state.pt", model, **TOLD)


def test_the_data_part_of_a_saved_state(tmp_path: Path) -> None:
    model, optimizer = trained(adam)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    whole = from_checkpoint(tmp_path / "state.pt", model, **TOLD)
    bare = from_checkpoint(tmp_path / "state.pt", model, n_data=200, bare=True)
    for name, s in whole.precision.items():
        assert torch.equal(bare.precision[name] + 3.0, s), name
    assert bare.prior_precision == 0.0 and "prior_outside" not in bare.record
    assert bare.record["definition"] == "H = N*sqrt(v_hat)" and bare.record["beta2"] == 0.999
    both = from_checkpoint(tmp_path / "state.pt", model, bare=True, **TOLD)
    assert both.record["prior_outside"] == 3.0


# ------------------------------------------------------------------------ what may run code


class Surprise:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return shutil.rmtree, ("nowhere", True)


@pytest.mark.parametrize("content", [Surprise(), {"state": {}, "hyper_parameters": Surprise()}])
def test_only_tensors_and_containers_are_read(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "state.pt")
    with pytest.raises(StorageError, match=r"weights_only=True"):
        from_checkpoint(tmp_path / "state.pt", Tiny(), **TOLD)


@pytest.mark.parametrize("content", [b"", b"half", None])
def test_a_truncated_state(tmp_path: Path, content: bytes | None) -> None:
    model, optimizer = trained(adam)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    whole = (tmp_path / "state.pt").read_bytes()
    (tmp_path / "state.pt").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(StorageError, match="truncated"):
        from_checkpoint(tmp_path / "state.pt", model, **TOLD)
