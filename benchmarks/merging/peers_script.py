"""The merge as published scripts do it: every model and every Hessian in memory, then a loop.

    python peers_script.py METHOD ROOT OUT

Plain torch and safetensors. The sum over tasks, the preconditioner and the step are formed tensor
by tensor, in float32, from state dicts that are all loaded before and stay until the end.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

State = dict[str, Tensor]


def merged(
    base: State, models: list[State], alphas: list[float], hessians: list[State], delta: float
) -> State:
    """θ_0 + Σ α_t (H_0 + H_t)(θ_t − θ_0) / (H_0 + Σ α_t H_t); ``hessians`` begins with H_0."""
    result = {}
    for name, start in base.items():
        origin = start.float()
        gaps = [model[name].float() - origin for model in models]
        if hessians:
            first, *others = [h[name] for h in hessians]
            first = first + delta
            total = first + sum(a * h for a, h in zip(alphas, others, strict=True))
            scaled = [(first + h) / total for h in others]
            gaps = [s * g for s, g in zip(scaled, gaps, strict=True)]
        step = sum(a * g for a, g in zip(alphas, gaps, strict=True))
        result[name] = (origin + step).to(start.dtype)
    return result


@torch.no_grad()
def main() -> None:
    method, root, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    given = json.loads((root / "merge.json").read_text())
    started = time.perf_counter()
    folders = [root / "base", *(root / name for name in given["models"])]
    base, *models = [load_file(f / "model.safetensors") for f in folders]
    hessians: list[State] = []
    if method == "gradient_matching":
        hessians = [load_file(f / "precision" / "precision.safetensors") for f in folders]
    result = merged(base, models, given["weights"], hessians, given["delta"])
    out.mkdir(parents=True)
    save_file(result, out / "model.safetensors", metadata={"format": "pt"})
    print(json.dumps({"inner": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
