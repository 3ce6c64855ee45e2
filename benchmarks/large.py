"""ResNet-50 on ImageNet and GPT-2 on OpenWebText, from scratch: IVON beside SGD and AdamW, on GPUs.

**Not run:** for want of such a machine. The tests run all of it but the download, at toy size. With
Hugging Face's transformers and datasets beside the package, and ImageNet's folders train/CLASS/ and
val/CLASS/ of pictures:

    torchrun --standalone --nproc-per-node 8 -m benchmarks.large imagenet IMAGENET --out RUN
    python -m benchmarks.large tokens OWT      # once: train.bin and val.bin of OpenWebText
    torchrun --standalone --nproc-per-node 8 -m benchmarks.large gpt2 OWT --out RUN

``--optimizer`` is IVON, or SGD (pictures) or AdamW (texts). RUN holds the last checkpoint, from
which the same command goes on, and in the end the model's weights and IVON's posterior, for every
analysis. Printed: NLL, accuracy and ECE on validation data, at the mean and averaged over draws.
IVON draws other weights in every process and microbatch, and averages over them (``sync=True``).

Settings are starting points after He et al. (2016), Radford et al. (2019) and Shen et al. (2024):
nothing was tuned. Minibatches are counted over all processes; a microbatch is what one holds.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

import blr_analysis as blr

MEAN, SCALE = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BINS = 15


@dataclass(frozen=True)
class Recipe:
    """What is trained on what, and how long."""

    model: Callable[[], nn.Module]
    data: Callable[[Path], tuple[Dataset, Dataset]]
    steps: int
    warmup: int
    batch: int
    micro: int
    terms: int
    """Of the loss's mean in an example."""
    ess: float | None
    """None: the number of terms in the training data."""
    optimizers: dict[str, dict[str, Any]]


def resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig()  # whose layers are ResNet-50's
    config.num_labels = 1000
    return ResNetForImageClassification(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


class Pictures(Dataset):
    """Images in a folder for each class: a random part of each to train on, else its middle."""

    def __init__(self, folder: Path, size: int, train: bool) -> None:
        self.paths = sorted(p for p in folder.glob("*/*") if p.is_file())
        classes = sorted({p.parent.name for p in self.paths})
        self.labels = [classes.index(p.parent.name) for p in self.paths]
        self.size, self.train = size, train

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        with Image.open(self.paths[i]) as file:
            image = file.convert("RGB")
        box = self._box(*image.size)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        if self.train and torch.rand(()) < 0.5:
            pixels = pixels.flip(-1)
        return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(SCALE)[
            :, None, None
        ], self.labels[i]

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Left, top, right, bottom: of 8 to 100 % of the area, up to 4 by 3; or 7/8 of the side."""
        wide = high = 7 / 8 * min(width, height)
        left, top = (width - wide) / 2, (height - high) / 2
        if self.train:
            area, turn, across, down = torch.rand(4).tolist()
            side = math.sqrt((0.08 + 0.92 * area) * width * height)
            ratio = (4 / 3) ** (turn - 0.5)
            wide, high = min(side * ratio, width), min(side / ratio, height)
            left, top = across * (width - wide), down * (height - high)
        return left, top, left + wide, top + high


class Windows(Dataset):
    """Stretches of a file of tokens (uint16), and the tokens after each."""

    def __init__(self, path: Path, length: int) -> None:
        self.tokens, self.length = np.memmap(path, np.uint16, "r"), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        part = self.tokens[i * self.length : (i + 1) * self.length + 1].astype(np.int64)
        return torch.from_numpy(part[:-1]), torch.from_numpy(part[1:])


def write_tokens(folder: Path, texts: Iterable[str], encode: Callable[[str], list[int]]) -> None:
    """train.bin, and of every 2,000th text val.bin."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for k, text in enumerate(texts):
            (train if k % 2000 else val).write(np.array(encode(text), np.uint16).tobytes())


def open_web_text(folder: Path) -> None:
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained("gpt2")
    data = load_dataset("Skylion007/openwebtext", split="train", streaming=True)
    end = [tokenizer.eos_token_id]
    write_tokens(folder, (row["text"] for row in data), lambda t: tokenizer(t)["input_ids"] + end)


def pictures_of(size: int) -> Callable[[Path], tuple[Dataset, Dataset]]:
    return lambda folder: (
        Pictures(folder / "train", size, train=True),
        Pictures(folder / "val", size, train=False),
    )


def windows_of(length: int) -> Callable[[Path], tuple[Dataset, Dataset]]:
    return lambda folder: (
        Windows(folder / "train.bin", length),
        Windows(folder / "val.bin", length),
    )


RECIPES = {
    "imagenet": Recipe(
        resnet50, pictures_of(224), 250_000, 6_250, 1024, 128, 1, None,
        {"IVON": {"lr": 2.5, "hess_init": 0.05, "weight_decay": 5e-5},
         "SGD": {"lr": 0.5, "momentum": 0.9, "weight_decay": 5e-5}},
    ),
    "gpt2": Recipe(
        gpt2, windows_of(1024), 100_000, 2_000, 480, 10, 1024, 1e10,
        {"IVON": {"lr": 0.3, "hess_init": 1e-3, "weight_decay": 1e-6, "clip_radius": 1e-3},
         "AdamW": {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}},
    ),
}  # fmt: skip


class Order(Sampler[list[int]]):
    """Microbatches of one process, from a step on: every epoch in another order."""

    def __init__(self, n: int, recipe: Recipe, start: int, rank: int, world: int) -> None:
        self.n, self.recipe, self.start, self.rank, self.world = n, recipe, start, rank, world

    def __iter__(self) -> Iterator[list[int]]:
        batch, share = self.recipe.batch, self.recipe.batch // self.world
        order, epoch = torch.empty(0, dtype=torch.long), -1
        for step in range(self.start, self.recipe.steps):
            now, k = divmod(step, self.n // batch)
            if now != epoch:
                order = torch.randperm(self.n, generator=torch.Generator().manual_seed(now))
                epoch = now
            own = order[k * batch + self.rank * share :][:share]
            yield from (part.tolist() for part in own.split(self.recipe.micro))


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """``[…, C]``, in half precision inside on a GPU."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        return model(x).logits.float()


def make_optimizer(
    kind: str, recipe: Recipe, model: nn.Module, n: int, draws: torch.Generator
) -> torch.optim.Optimizer:
    given = dict(recipe.optimizers[kind])
    if kind == "IVON":
        ess = recipe.ess or float(n * recipe.terms)
        together = {"sync": dist.is_initialized(), "generator": draws}
        return blr.IVON(model.parameters(), ess=ess, steps=recipe.steps, **together, **given)
    return getattr(torch.optim, kind)(model.parameters(), **given)


def train(
    recipe: Recipe, kind: str, folder: Path, out: Path, device: str, every: int, until: int | None
) -> tuple[nn.Module, torch.optim.Optimizer, Dataset]:
    """To the last step, or ``until`` another, from the checkpoint if there is one."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data, held_out = recipe.data(folder)
    n = len(data)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = recipe.model().to(device)
    draws = torch.Generator(device)
    optimizer = make_optimizer(kind, recipe, model, n, draws)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: rate(t, recipe))
    start, saved = 0, out / "checkpoint.pt"
    if saved.exists():
        kept = torch.load(saved, map_location=device, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        schedule.load_state_dict(kept["schedule"])
        start = kept["step"]
    ivon, learner = isinstance(optimizer, blr.IVON), model
    if world > 1 and not ivon:
        learner = nn.parallel.DistributedDataParallel(model)
    order = Order(n, recipe, start, rank, world)
    workers = 8 if device.startswith("cuda") else 0
    batches = iter(
        DataLoader(data, batch_sampler=order, num_workers=workers, pin_memory=workers > 0)
    )
    count = -(-(recipe.batch // world) // recipe.micro)
    learner.train()
    for step in range(start, until or recipe.steps):
        draws.manual_seed(step * world + rank)
        if not ivon:
            optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for _ in range(count):
            x, y = (part.to(device, non_blocking=True) for part in next(batches))
            with optimizer.sampled_params(train=True) if ivon else nullcontext():  # type: ignore[attr-defined]
                if ivon:
                    optimizer.zero_grad()
                loss = F.cross_entropy(logits_of(learner, x).flatten(0, -2), y.flatten())
                (loss if ivon else loss / count).backward()
            total += loss.detach() / count
        optimizer.step()
        schedule.step()
        if rank == 0 and (step + 1) % every == 0:
            print(f"step {step + 1}: {float(total):.4f}", flush=True)
            states = (model, optimizer, schedule)
            held = dict(zip(("model", "optimizer", "schedule"), states, strict=True))
            kept = {name: part.state_dict() for name, part in held.items()}
            torch.save({"step": step + 1, **kept}, out / "unfinished.pt")
            os.replace(out / "unfinished.pt", saved)
    if world > 1:
        for b in filter(torch.is_floating_point, model.buffers()):  # running means of each process
            dist.all_reduce(b.div_(world))
    return model, optimizer, held_out


def rate(step: int, recipe: Recipe) -> float:
    """Linear to 1, then a cosine to 0."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    share = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.5 * (1 + math.cos(math.pi * share))


@torch.no_grad()
def judged(
    model: nn.Module, optimizer: Any, data: Dataset, draws: int, micro: int, device: str
) -> dict[str, float]:
    """NLL, accuracy and ECE, at the mean (0 draws) or averaged; each process has its share."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = range(rank, len(data), world)  # type: ignore[arg-type]
    loader = DataLoader(torch.utils.data.Subset(data, mine), micro)
    sums = torch.zeros(3 + BINS, dtype=torch.float64, device=device)  # n, NLL, right, gaps by bin
    model.eval()
    for x, y in loader:
        x, y, logs = x.to(device), y.to(device).flatten(), []
        for _ in range(max(1, draws)):
            with optimizer.sampled_params() if draws else nullcontext():
                logs.append(logits_of(model, x).flatten(0, -2).log_softmax(-1))
        log_p = torch.stack(logs).logsumexp(0) - math.log(len(logs))
        confidence, said = log_p.max(-1)
        gap = (said == y).double() - confidence.double().exp()
        nll = -log_p.gather(1, y[:, None]).double().sum()
        sums[:3] += torch.stack([torch.full_like(nll, len(y)), nll, (said == y).double().sum()])
        bins = (confidence.exp() * BINS).long().clamp(max=BINS - 1)
        sums[3:].index_add_(0, bins, gap)
    if world > 1:
        dist.all_reduce(sums)
    n, nll, right = sums[:3].tolist()
    return {"nll": nll / n, "accuracy": right / n, "ece": float(sums[3:].abs().sum()) / n}


def main(given: list[str] | None = None, recipes: dict[str, Recipe] = RECIPES) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*recipes, "tokens"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("large"))
    parser.add_argument("--optimizer", default="IVON")
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--until", type=int, help="stop at this step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(given)
    if args.what == "tokens":
        open_web_text(args.folder)
        return
    recipe, device = recipes[args.what], args.device
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
    args.out.mkdir(parents=True, exist_ok=True)
    model, optimizer, held_out = train(
        recipe, args.optimizer, args.folder, args.out, device, args.every, args.until
    )
    ways = {"at the mean": 0, f"{args.draws} draws": args.draws}
    for way, draws in ways.items():
        if draws and args.optimizer != "IVON":
            continue
        found = judged(model, optimizer, held_out, draws, recipe.micro, device)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(way, {key: round(value, 4) for key, value in found.items()}, flush=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_model(model, str(args.out / "model.safetensors"))
        if isinstance(optimizer, blr.IVON):
            posterior = blr.Posterior.from_optimizer(optimizer, model)
            posterior.save(args.out / "posterior.safetensors")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
