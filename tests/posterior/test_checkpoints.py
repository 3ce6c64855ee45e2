"""Saved training states: names for numbered tensors, or a refusal that lists what differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ivon
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from blr_analysis.errors import ModelError, OptimizerError, StorageError
from blr_analysis.learning_rule.optim import IVON
from blr_analysis.posterior.capture import from_checkpoint, from_optimizer

N, DELTA = 200, 3.0


class RootNorm(nn.Module):
    """A norm that is no ``nn.LayerNorm``, as in Llama and T5."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 6)
        self.key = nn.Linear(6, 6)
        self.LayerNorm = nn.LayerNorm(6)
        self.q_norm = RootNorm(6)


class Tiny(nn.Module):
    """Same shapes over and over, an embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.final = nn.LayerNorm(6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight


def step(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int = 3) -> None:
    """Gradients that differ everywhere and stay the same, so that √v̂ is their absolute value."""
    for _ in range(steps):
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator) if p.requires_grad else None
        optimizer.step()


def groups(model: nn.Module, spared: list[str], decay: float = 0.01) -> list[dict[str, Any]]:
    """As Trainer builds them; ``spared`` is written out by hand in the tests."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    assert set(spared) <= {name for name, _ in named}
    return [
        {"params": [p for n, p in named if n not in spared], "weight_decay": decay},
        {"params": [p for n, p in named if n in spared], "weight_decay": 0.0},
    ]


BIASES = [f"blocks.{k}.{layer}.bias" for k in (0, 1) for layer in ("query", "key", "LayerNorm")]
LAYER_NORMS = [
    *BIASES,
    "final.weight",
    "final.bias",
    *(f"blocks.{k}.LayerNorm.weight" for k in (0, 1)),
]
ALL_NORMS = [*LAYER_NORMS, *(f"blocks.{k}.q_norm.weight" for k in (0, 1))]


def save_trainer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    save_file(unique(model), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def unique(model: nn.Module, keep_last: bool = False) -> dict[str, Tensor]:
    """A state dict in which tied tensors stand once, by their first or their last name."""
    items = list(model.state_dict().items())
    by_memory = {value.data_ptr(): name for name, value in (items if keep_last else items[::-1])}
    return {name: value for name, value in items if name in by_memory.values()}


def assert_like_live(captured: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    own = {} if isinstance(optimizer, IVON | ivon.IVON) else {"n_data": N, "prior_precision": DELTA}
    live = from_optimizer(optimizer, model, **own)
    assert list(captured.precision) == list(live.precision)
    for name in live.precision:
        assert live.precision[name].unique().numel() > 1  # something to mix up
        assert torch.equal(captured.precision[name], live.precision[name]), name
        assert torch.equal(captured.mean[name], live.mean[name]), name
    assert (captured.n_data, captured.prior_precision) == (live.n_data, live.prior_precision)
    assert captured.record["kind"] == live.record["kind"]
    assert json.loads(json.dumps(captured.record)) == captured.record


def read(path: Path, model: nn.Module, **arguments: Any) -> Any:
    return from_checkpoint(path, model, **{"n_data": N, "prior_precision": DELTA, **arguments})


# --------------------------------------------------------------------------------- Trainer


@pytest.mark.parametrize("spared", [LAYER_NORMS, ALL_NORMS])
@pytest.mark.parametrize("decay", [0.01, 0.0])
def test_a_trainer_folder(tmp_path: Path, spared: list[str], decay: float) -> None:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(groups(model, spared, decay))
    step(optimizer, model)
    captured = read(save_trainer(tmp_path / "checkpoint-3", model, optimizer), Tiny())
    assert_like_live(captured, optimizer, model)
    assert captured.record["source"] == "trainer"
    assert captured.record["order"].startswith("Trainer's groups")
    assert captured.record["mean_from"] == "checkpoint"
    assert captured.record["tied"] == {"embed.weight": ["head.weight"]}


def test_frozen_parameters_of_a_trainer_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tiny()
    model.blocks[0].requires_grad_(False)
    spared = [name for name in ALL_NORMS if not name.startswith("blocks.0")]
    optimizer = torch.optim.AdamW(groups(model, spared))
    step(optimizer, model)
    folder = save_trainer(tmp_path / "c", model, optimizer)
    assert_like_live(read(folder, model), optimizer, model)
    with pytest.raises(OptimizerError, match=r"groups of \[3, 7\].*not fit.*groups of \[5, 12\]"):
        read(folder, Tiny())  # nothing frozen here


@pytest.mark.parametrize("layout", ["last name of the tied", "bin", "sharded", "sharded bin"])
def test_weights_in_every_layout_of_hugging_face(tmp_path: Path, layout: str) -> None:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(groups(model, ALL_NORMS))
    step(optimizer, model)
    folder = save_trainer(tmp_path / "c", model, optimizer)
    (folder / "model.safetensors").unlink()
    weights = unique(model, keep_last=True)
    assert "embed.weight" not in weights
    half = dict(list(weights.items())[:5]), dict(list(weights.items())[5:])
    if layout == "last name of the tied":
        save_file(weights, folder / "model.safetensors")
    elif layout == "bin":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    else:
        stem, suffix, save = (
            ("model", "safetensors", save_file)
            if layout == "sharded"
            else ("pytorch_model", "bin", torch.save)
        )
        weight_map = {}
        for k, part in enumerate(half):
            save(part, folder / f"{stem}-{k}.{suffix}")
            weight_map |= dict.fromkeys(part, f"{stem}-{k}.{suffix}")
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_like_live(read(folder, Tiny()), optimizer, model)


def test_a_checkpoint_of_another_model_lists_the_shapes(tmp_path: Path) -> None:
    model, other = Tiny(), Tiny()
    other.blocks[1].key = nn.Linear(5, 6)
    optimizer = torch.optim.AdamW(groups(model, ALL_NORMS))
    step(optimizer, model)
    message = r"1 shapes differ \('blocks\.1\.key\.weight \(6, 5\) with a state of \(6, 6\)'\)"
    with pytest.raises(OptimizerError, match=message):
        read(save_trainer(tmp_path / "c", model, optimizer), other)


def test_two_readings_that_both_fit_are_refused_unless_the_names_are_given(tmp_path: Path) -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # By its class RootNorm is a norm, by its name it is not: two readings of one size.
            self.scale = RootNorm(4)
            self.layernorm = nn.Module()
            self.layernorm.register_parameter("gain", nn.Parameter(torch.ones(4)))

    model = Norms()
    optimizer = torch.optim.AdamW(groups(model, ["scale.weight"]))
    step(optimizer, model)
    folder = save_trainer(tmp_path / "c", model, optimizer)
    with pytest.raises(OptimizerError, match=r"2 ways.*Pass names="):
        read(folder, model)
    captured = read(folder, model, names=["layernorm.gain", "scale.weight"])
    assert_like_live(captured, optimizer, model)
    with pytest.raises(OptimizerError, match="'nonsense'"):
        read(folder, model, names=["layernorm.gain", "nonsense"])
    with pytest.raises(OptimizerError, match="a name occurs twice"):
        read(folder, model, names=["scale.weight", "scale.weight"])


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = torch.optim.AdamW(groups(model, ALL_NORMS))
    step(optimizer, model)
    folder = save_trainer(tmp_path / "c", model, optimizer)
    weights = {**unique(model), "final.bias": torch.ones(7)}
    del weights["final.weight"]
    save_file(weights, folder / "model.safetensors")
    message = r"final\.weight: not there', 'final\.bias: \(7,\), not \(6,\)"
    with pytest.raises(ModelError, match=message):
        read(folder, model)


# ------------------------------------------------------------- Lightning and other files


def trained(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Tiny, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tiny()
    optimizer = make(model.parameters())
    step(optimizer, model)
    return model, optimizer


@pytest.mark.parametrize("prefix", ["", "model.", "net._orig_mod."])
def test_a_lightning_checkpoint(tmp_path: Path, prefix: str) -> None:
    model, optimizer = trained(torch.optim.Adam)
    content = {
        "epoch": 2,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": {prefix + name: value for name, value in model.state_dict().items()},
        "optimizer_states": [optimizer.state_dict()],
    }
    torch.save(content, tmp_path / "last.ckpt")
    captured = read(tmp_path / "last.ckpt", Tiny())
    assert_like_live(captured, optimizer, model)
    assert captured.record["source"] == "lightning"
    content["optimizer_states"] *= 2
    torch.save(content, tmp_path / "two.ckpt")
    with pytest.raises(OptimizerError, match="holds 2 optimizers"):
        read(tmp_path / "two.ckpt", model)


def test_of_two_networks_in_one_file_the_given_one(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.Adam)
    both = {"student.": model, "teacher.": Tiny()}
    weights = {p + n: v for p, net in both.items() for n, v in net.state_dict().items()}
    content = {"state_dict": weights, "optimizer_states": [optimizer.state_dict()]}
    torch.save(content, tmp_path / "last.ckpt")
    for net in both.values():
        mean = read(tmp_path / "last.ckpt", net).mean
        assert all(torch.equal(mean[name], p) for name, p in net.named_parameters())
    with pytest.raises(ModelError, match=r"student.*teacher.*load"):
        read(tmp_path / "last.ckpt", Tiny())


@pytest.mark.parametrize(
    "keys", [("model_state_dict", "optimizer_state_dict"), ("model", "optimizer")]
)
def test_the_customary_pair_in_one_file(tmp_path: Path, keys: tuple[str, str]) -> None:
    model, optimizer = trained(torch.optim.AdamW)
    content = dict(zip(keys, (model.state_dict(), optimizer.state_dict()), strict=True))
    torch.save(content, tmp_path / "last.tar")
    assert_like_live(read(tmp_path / "last.tar", Tiny()), optimizer, model)
    torch.save({**content, keys[0]: [1]}, tmp_path / "odd.tar")
    with pytest.raises(StorageError, match="no state_dict but a list"):
        read(tmp_path / "odd.tar", model)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda p: torch.optim.Adam(p, amsgrad=True), "adam_v"),
        (lambda p: torch.optim.NAdam(p), "adam_v"),
        (lambda p: torch.optim.RMSprop(p, centered=True), "rmsprop_v"),
        (lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.2), "adagrad_v"),
    ],
)
def test_an_optimizers_state_alone_tells_its_kind(
    tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer], kind: str
) -> None:
    model, optimizer = trained(make)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    captured = read(tmp_path / "state.pt", model)
    assert_like_live(captured, optimizer, model)
    assert captured.record["kind"] == kind
    assert captured.record["mean_from"] == "model"
    assert captured.record["order"] == "the model's parameters in turn"


@pytest.mark.parametrize("frozen_too", [True, False])
def test_frozen_parameters_may_or_may_not_be_in_the_state(tmp_path: Path, frozen_too: bool) -> None:
    torch.manual_seed(0)
    model = Tiny()
    model.blocks[0].query.requires_grad_(False)
    passed = [p for p in model.parameters() if frozen_too or p.requires_grad]
    optimizer = torch.optim.Adam(passed)
    step(optimizer, model)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    captured = read(tmp_path / "state.pt", model)
    assert_like_live(captured, optimizer, model)
    assert "blocks.0.query.weight" not in captured.precision


def test_names_in_the_file_are_believed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tiny()
    backwards = list(model.named_parameters())[::-1]
    optimizer = torch.optim.Adam(backwards)
    step(optimizer, model)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    captured = read(tmp_path / "state.pt", model)
    assert_like_live(captured, optimizer, model)
    assert captured.record["order"] == "param_names in the file"


# ------------------------------------------------------------- torch.distributed.checkpoint

UNINITIALISED = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def exported(tmp_path: Path) -> tuple[Tiny, torch.optim.Optimizer, dict[str, Any]]:
    """A model and its state by name, as the library exports it from any sharding."""
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(groups(model, ALL_NORMS))
    step(optimizer, model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    return model, optimizer, {"model": weights, "optimizer": state}


@UNINITIALISED
@pytest.mark.parametrize("inside", ["", "checkpoint-3/optimizer_0"])
def test_a_distributed_checkpoint_is_refused_with_the_way_out(tmp_path: Path, inside: str) -> None:
    _, _, state = exported(tmp_path)
    place = tmp_path / "dcp" / inside
    torch.distributed.checkpoint.save(state, checkpoint_id=place)
    assert (place / ".metadata").is_file()
    folder = place.parent if inside else place
    names = [folder, place / ".metadata", *place.glob("*.distcp")]
    assert len(names) > 2
    for name in names:
        with pytest.raises(
            StorageError, match=r"\.metadata is a pickle.*get_state_dict.*torch\.save"
        ):
            read(name, Tiny())


@UNINITIALISED
def test_the_way_out_is_read_by_the_names_in_it(tmp_path: Path) -> None:
    model, optimizer, state = exported(tmp_path)
    torch.save(state, tmp_path / "state.pt")
    with torch.device("meta"):
        empty = Tiny()
    captured = read(tmp_path / "state.pt", empty)
    assert_like_live(captured, optimizer, model)
    assert captured.record["order"] == "names in the file"
    torch.save(state["optimizer"], tmp_path / "alone.pt")
    assert_like_live(read(tmp_path / "alone.pt", model), optimizer, model)
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(OptimizerError, match=r"names in the file.*no parameters 'embed\.weight'"):
        read(tmp_path / "alone.pt", other)


# ------------------------------------------------------------------- the data's part alone


def test_the_data_part_of_a_saved_state(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.Adam)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    bare = from_checkpoint(tmp_path / "state.pt", model, n_data=N, bare=True)
    whole = read(tmp_path / "state.pt", model)
    for name, s in whole.precision.items():
        assert torch.equal(bare.precision[name] + DELTA, s), name
    assert bare.prior_precision == 0.0 and "prior_outside" not in bare.record
    assert bare.record["definition"] == "H = N*sqrt(v_hat)"
    assert bare.record["beta2"] == 0.999
    both = from_checkpoint(tmp_path / "state.pt", model, n_data=N, bare=True, prior_precision=DELTA)
    assert both.record["prior_outside"] == DELTA


# ------------------------------------------------------------------------------- bad input


class Surprise:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return shutil.rmtree, ("nowhere", True)


@pytest.mark.parametrize("content", [Surprise(), {"state": {}, "hyper_parameters": Surprise()}])
def test_only_tensors_and_containers_are_read(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "state.pt")
    with pytest.raises(StorageError, match=r"weights_only=True"):
        read(tmp_path / "state.pt", Tiny())


@pytest.mark.parametrize("content", [b"", b"half", None])
def test_a_truncated_state(tmp_path: Path, content: bytes | None) -> None:
    model, optimizer = trained(torch.optim.Adam)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    whole = (tmp_path / "state.pt").read_bytes()
    (tmp_path / "state.pt").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(StorageError, match="truncated"):
        read(tmp_path / "state.pt", model)


def test_a_model_without_values_needs_weights_in_the_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.Adam)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "both.pt"
    )
    with torch.device("meta"):
        empty = Tiny()
    assert_like_live(read(tmp_path / "both.pt", empty), optimizer, model)
    with pytest.raises(ModelError, match="meta device"):
        read(tmp_path / "state.pt", empty)
