"""What a peer is given and what it gives back: two files, so that it needs nothing of ours.

A problem is a folder: ``problem.npz`` holds the arrays ``x, y, x_test, y_test`` and
``weights.<k>.<name>`` for the trained model (k = 0) and others trained from other seeds;
``problem.json`` the architecture, the likelihood, what is special about the loss, and dampings
(N times what a peer adds to its mean curvature). A peer writes ``scores.npz``:
``influence[i, j]``, the change of test loss j when example i is left out (up to a positive factor
where the method knows none), and ``scores.json``: seconds and bytes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Method = Callable[[], Tensor]


class Problem:
    """A trained model, its data, and the test examples asked about."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        described = json.loads((folder / "problem.json").read_text())
        self.architecture: dict[str, Any] = described["architecture"]
        self.likelihood: str = described["likelihood"]
        self.delta: float = described["delta"]
        self.dampings: list[float] = described["dampings"]
        self.noise: float = described["noise"]
        self.smoothing: float = described["smoothing"]
        self.class_weights: list[float] | None = described["class_weights"]
        self.folder, self.dtype = folder, dtype
        with np.load(folder / "problem.npz", allow_pickle=False) as arrays:
            held = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        self.x, self.x_test = (held[n].to(dtype) for n in ("x", "x_test"))
        self.y, self.y_test = (self._target(held[n]) for n in ("y", "y_test"))
        self.weights: list[dict[str, Tensor]] = [{} for _ in range(described["checkpoints"])]
        for name, value in held.items():
            if name.startswith("weights."):
                _, which, parameter = name.split(".", 2)
                self.weights[int(which)][parameter] = value.to(dtype)

    @property
    def n(self) -> int:
        return len(self.x)

    def _target(self, y: Tensor) -> Tensor:
        return y.long() if self.likelihood == "categorical" else y.to(self.dtype)

    def model(self, which: int = 0) -> nn.Module:
        """The model with the weights of checkpoint ``which``, in evaluation mode."""
        model = build(self.architecture).to(self.dtype)
        model.load_state_dict(self.weights[which])
        return model.eval()

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """ℓ_i as trained, ``[B]``."""
        if self.likelihood == "categorical":
            weight = None
            if self.class_weights:
                weight = torch.tensor(self.class_weights, dtype=outputs.dtype)
            return F.cross_entropy(
                *(outputs, y, weight), reduction="none", label_smoothing=self.smoothing
            )
        return self.judged(outputs, y)

    def judged(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Losses of test examples, without weights and smoothing, ``[B]``."""
        if self.likelihood == "categorical":
            return F.cross_entropy(outputs, y, reduction="none")
        target = y.reshape(outputs.shape)
        if self.likelihood == "bernoulli":
            return F.binary_cross_entropy_with_logits(outputs, target, reduction="none").flatten(1)[
                :, 0
            ]
        return 0.5 * (outputs - target).square().flatten(1).sum(1) / self.noise


def mlp(widths: list[int], activation: str = "tanh", bias: bool = True) -> nn.Module:
    """Linear layers of these widths with an activation between them."""
    between = {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), between()]
    return nn.Sequential(*layers[:-1])


def lenet(classes: int = 10) -> nn.Module:
    """LeNet-5 for 28 × 28 images: two convolutions, three linear layers, tanh."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh()),
        nn.Linear(84, classes),
    )


def convnet(classes: int = 10) -> nn.Module:
    """The demo's network for 8 × 8 images: two convolutions and a linear read-out, tanh."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, classes)),
    )


def build(architecture: dict[str, Any]) -> nn.Module:
    """The model that an architecture describes: ``{"kind": "mlp", **arguments}``, or another."""
    kinds: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "lenet": lenet, "convnet": convnet}
    arguments = dict(architecture)
    return kinds[arguments.pop("kind")](**arguments)


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measured(call: Callable[[], Any]) -> tuple[Any, float, int]:
    """Result, seconds, and peak bytes above what was held before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, highest, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, resident())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    try:
        result = call()
    finally:
        seconds = time.perf_counter() - start
        done.set()
        watcher.join()
    return result, seconds, max(0, max(highest, resident()) - before)


def main(methods: Callable[[Path], dict[str, Method]]) -> None:
    """Run every method on the folder named on the command line; one that fails says why."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    scores: Any = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, call in methods(folder).items():
        try:
            influence, seconds, peak = measured(call)
        except Exception as error:  # one method of a peer must not take its others along
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [type(error).__name__]
            rows[name] = {"error": f"{type(error).__name__}: {lines[0][:150]}"}
            continue
        scores[name] = influence.detach().double().cpu().numpy()
        rows[name] = {"seconds": seconds, "peak": peak}
        np.savez(folder / "scores.npz", **scores)
        (folder / "scores.json").write_text(json.dumps(rows))
    np.savez(folder / "scores.npz", **scores)
    (folder / "scores.json").write_text(json.dumps(rows))
