"""Saved training states: names for numbered tensors, or a refusal that lists what differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from blr_analysis.errors import ModelError, OptimizerError, StorageError
from blr_analysis.posterior import Posterior

ASSUMED: dict[str, Any] = {"n_data": 200, "prior_precision": 3.0}


class RootNorm(nn.Module):
    """A norm that is no ``nn.LayerNorm``, as in Llama and T5."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def block() -> nn.Module:
    layers = {"query": nn.Linear(6, 6), "key": nn.Linear(6, 6)}
    return nn.ModuleDict({**layers, "LayerNorm": nn.LayerNorm(6), "q_norm": RootNorm(6)})


class Tiny(nn.Module):
    """Same shapes over and over, an embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([block(), block()])
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


def own_groups(model: nn.Module) -> torch.optim.Optimizer:
    first = {"params": [*model.embed.parameters(), *model.blocks[0].parameters()]}
    last = {"params": [*model.blocks[1].parameters(), *model.final.parameters()], "lr": 0.1}
    return torch.optim.Adam([first, last])


def by_name(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(model.named_parameters())[::-1])


def older_trainers(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model, LAYER_NORMS, 0.0))


def trainers(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model, ALL_NORMS))


def same(saved: Posterior, live: Posterior) -> None:
    assert list(saved.mean) == list(live.mean)
    for name, m in live.mean.items():
        assert live.precision(name).unique().numel() > 1  # something to mix up
        assert torch.equal(saved.precision(name), live.precision(name)), name
        assert torch.equal(saved.mean[name], m), name


def unique(model: nn.Module, keep_last: bool = False) -> dict[str, Tensor]:
    """A state dict in which tied tensors stand once, by their first or their last name."""
    state = model.state_dict()
    names = list(state) if keep_last else list(state)[::-1]
    name_of_memory = {state[name].data_ptr(): name for name in names}
    return {name: tensor for name, tensor in state.items() if name in name_of_memory.values()}


def in_shards(path: Path, weights: dict[str, Tensor]) -> None:
    names = list(weights)
    weight_map = {}
    for k, part in enumerate((names[:5], names[5:])):
        save_file({n: weights[n] for n in part}, path / f"model-{k}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{k}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def trainer_folder(weights: str) -> Callable[[Path, nn.Module, Any], Path]:
    def write(path: Path, model: nn.Module, optimizer: Any) -> Path:
        torch.save(optimizer.state_dict(), path / "optimizer.pt")
        weights_on_disk = unique(model, keep_last=weights != "one file")
        if weights == "sharded":
            in_shards(path, weights_on_disk)
        else:
            save_file(weights_on_disk, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return write


def in_file(content: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Callable[..., Path]:
    def write(path: Path, model: nn.Module, optimizer: Any) -> Path:
        torch.save(content(model.state_dict(), optimizer.state_dict()), path / "last.ckpt")
        return path / "last.ckpt"

    return write


def pair(weights: str, state: str) -> Callable[..., Path]:
    return in_file(lambda w, s: {weights: w, state: s})


def lightning(prefix: str) -> Callable[..., Path]:
    def content(weights: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        renamed = {prefix + n: t for n, t in weights.items()}
        return {"epoch": 2, "state_dict": renamed, "optimizer_states": [state]}

    return in_file(content)


def exported(path: Path, model: nn.Module, optimizer: Any) -> Path:
    """A state by name, as torch.distributed.checkpoint exports it from any sharding."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    torch.save({"model": weights, "optimizer": state}, path / "state.pt")
    return path / "state.pt"


@dataclass
class Layout:
    """How a training is made and written, and what is recorded of its file."""

    make: Callable[..., Any]
    write: Callable[..., Path]
    source: str
    rule: str  # of the order of the state's numbered tensors


TRAINER = "Trainer's groups"
PARAMETERS = "the model's parameters"
ALONE = in_file(lambda weights, state: state)
NAMED_PAIR = pair("model_state_dict", "optimizer_state_dict")
LAYOUTS = {
    "trainer": Layout(trainers, trainer_folder("one file"), "trainer", TRAINER),
    "its last names": Layout(trainers, trainer_folder("last names"), "trainer", TRAINER),
    "its shards": Layout(trainers, trainer_folder("sharded"), "trainer", TRAINER),
    "an older trainer": Layout(older_trainers, trainer_folder("one file"), "trainer", TRAINER),
    "lightning": Layout(adam, lightning(""), "lightning", PARAMETERS),
    "lightning, in a module": Layout(adam, lightning("net._orig_mod."), "lightning", PARAMETERS),
    "a pair": Layout(adam, NAMED_PAIR, "pair", PARAMETERS),
    "a short pair": Layout(adam, pair("model", "optimizer"), "short pair", PARAMETERS),
    "a state alone": Layout(adam, ALONE, "optimizer state", PARAMETERS),
    "groups of one's own": Layout(own_groups, ALONE, "optimizer state", "the model's"),
    "named": Layout(by_name, ALONE, "optimizer state", "param_names in the file"),
    "exported": Layout(trainers, exported, "short pair", "names in the file"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read_like_the_live_optimizer(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    model, optimizer = trained(layout.make)
    place = layout.write(tmp_path, model, optimizer)
    alone = layout.source == "optimizer state"
    with torch.device("meta"):  # where the weights come with it, none are needed
        empty = Tiny()
    saved = Posterior.from_checkpoint(place, model if alone else empty, **ASSUMED)
    live = Posterior.from_optimizer(optimizer, model, **ASSUMED)
    same(saved, live)
    assert saved.record["source"] == layout.source
    assert saved.record["order"].startswith(layout.rule)
    assert saved.record["mean_from"] == ("model" if alone else "checkpoint")
    assert saved.record["tied"] == {"embed.weight": ["head.weight"]}
    if alone:
        with pytest.raises(ModelError, match="meta device"):
            Posterior.from_checkpoint(place, empty, **ASSUMED)


@pytest.mark.parametrize("frozen_too", [True, False])
def test_frozen_parameters_may_or_may_not_be_in_the_state(tmp_path: Path, frozen_too: bool) -> None:
    model = Tiny()
    model.blocks[0]["query"].requires_grad_(False)
    passed = [p for p in model.parameters() if frozen_too or p.requires_grad]
    _, optimizer = trained(lambda m: torch.optim.Adam(passed), model)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    saved = Posterior.from_checkpoint(tmp_path / "state.pt", model, **ASSUMED)
    live = Posterior.from_optimizer(optimizer, model, **ASSUMED)
    same(saved, live)
    assert "blocks.0.query.weight" not in saved.mean


@pytest.mark.parametrize("heads", [("", "average."), ("student.", "teacher.")])
def test_of_two_networks_in_one_file_the_one_without_a_prefix(heads: Any, tmp_path: Path) -> None:
    model, optimizer = trained(adam)
    prefix, prefix_of_untrained = heads
    weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    for name, tensor in Tiny().state_dict().items():
        weights[prefix_of_untrained + name] = tensor
    content = {"state_dict": weights, "optimizer_states": [optimizer.state_dict()]}
    torch.save(content, tmp_path / "last.ckpt")
    with nullcontext() if "" in heads else pytest.raises(ModelError, match=r"student.*teacher"):
        mean = Posterior.from_checkpoint(tmp_path / "last.ckpt", Tiny(), **ASSUMED).mean
        assert all(torch.equal(mean[name], p) for name, p in model.named_parameters())


def test_two_readings_that_both_fit_are_refused_unless_the_names_are_given(tmp_path: Path) -> None:
    # By its class RootNorm is a norm, by its name it is not: two readings of one size.
    norms = nn.ModuleDict({"scale": RootNorm(4), "layernorm": nn.Module()})
    norms["layernorm"].register_parameter("gain", nn.Parameter(torch.ones(4)))
    model, optimizer = trained(lambda m: torch.optim.AdamW(groups(m, ["scale.weight"])), norms)
    folder = trainer_folder("one file")(tmp_path, model, optimizer)
    with pytest.raises(OptimizerError, match=r"2 ways.*Pass names="):
        Posterior.from_checkpoint(folder, model, **ASSUMED)
    names = ["layernorm.gain", "scale.weight"]
    saved = Posterior.from_checkpoint(folder, model, names=names, **ASSUMED)
    same(saved, Posterior.from_optimizer(optimizer, model, **ASSUMED))


def test_another_models_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(trainers)
    folder = trainer_folder("one file")(tmp_path, model, optimizer)
    another_model = Tiny()
    another_model.blocks[1]["key"] = nn.Linear(5, 6)
    with pytest.raises(OptimizerError, match="does not fit"):
        Posterior.from_checkpoint(folder, another_model, **ASSUMED)
    another_model = Tiny()
    another_model.blocks[0].requires_grad_(False)
    with pytest.raises(OptimizerError, match=r"groups of \[5, 12\].*not fit"):
        Posterior.from_checkpoint(folder, another_model, **ASSUMED)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_is_refused(tmp_path: Path) -> None:
    model, _ = trained(adam)
    torch.distributed.checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    for place, word in ((tmp_path, r"torch\.save"), (tmp_path / ".metadata", "weights_only")):
        with pytest.raises(StorageError, match=word):
            Posterior.from_checkpoint(place, Tiny(), **ASSUMED)
