"""What a peer is given and what it gives back: two files, so that it needs nothing of ours.

A problem is a folder: ``problem.npz`` holds the arrays ``x, y, x_test, y_test`` and
``weights.<k>.<name>`` for the trained model (k = 0) and others trained from other seeds;
``problem.json`` the widths of its layers, the likelihood, and dampings
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
        self.widths: list[int] = described["widths"]
        self.likelihood: str = described["likelihood"]
        self.delta: float = described["delta"]
        self.dampings: list[float] = described["dampings"]
        self.folder = folder
        self.dtype = dtype
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
        model = mlp(self.widths).to(self.dtype)
        model.load_state_dict(self.weights[which])
        return model.eval()

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """ℓ_i, ``[B]``."""
        if self.likelihood == "categorical":
            return F.cross_entropy(outputs, y, reduction="none")
        return F.binary_cross_entropy_with_logits(outputs[:, 0], y.flatten(), reduction="none")


def mlp(widths: list[int]) -> nn.Module:
    """Linear layers of these widths with a tanh between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def resident() -> int:
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measured(call: Callable[[], Any]) -> tuple[Any, float, int]:
    """Result, seconds, and peak bytes above what was held before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident()
    highest = 0
    done = threading.Event()

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
