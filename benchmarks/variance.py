"""Prediction variances V_i and self-influence: ours, the floor, the published way, the peers.

    python benchmarks/variance.py [--out FILE.json] [--quick] [--device cuda]

Every method runs in a process of its own with two threads, next to the floor (C backward passes
that stop at the layers' outputs, written without this package) in the same process, so that each
ratio comes from one run. "large" is 60,000 images of an MLP 784-500-300-10.

* floor: for self-influence an ordinary forward and backward pass.
* V diag, V kron: the whole C × C prediction variance of every example.
* sensitivity: `blr.sensitivity` end to end: V, errors, deviations, losses, self-influence.
* self-influence: `blr.sensitivity(..., variance=False)`, one backward pass.
* published: `vmap(jacrev)` and an einsum over P × C Jacobians, 100 images at a time.
* laplace-torch: its functional variance with Kronecker factors, curvlinops backend.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import CLASSES, case, layer_modules
from measure import interleaved, peak_above, threads
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

CHUNK = 100  # images per chunk of the floor and of the published way


def floor(model: nn.Module, x: Tensor, classes: int = CLASSES) -> Callable[[], None]:
    """A forward pass and C backward passes that stop at the layers' outputs; nothing else."""
    layers = layer_modules(model)
    size = min(len(x), 2000) if x.ndim == 2 else CHUNK

    def run() -> None:
        caught: list[Tensor] = []

        def hook(_: nn.Module, __: object, z: Tensor) -> Tensor:
            if not z.requires_grad:
                z = z.detach().requires_grad_()
            caught.append(z)
            return z

        for p in model.parameters():
            p.requires_grad_(False)
        handles = [layer.register_forward_hook(hook) for layer in layers]
        for part in x.split(size):
            caught.clear()
            f = model(part)
            for c in range(classes):
                one = torch.zeros_like(f)
                one[:, c] = 1
                torch.autograd.grad(f, caught, one, retain_graph=c < classes - 1)
        for handle in handles:
            handle.remove()
        for p in model.parameters():
            p.requires_grad_(True)

    return run


def forward_backward(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One ordinary training pass: the floor of self-influence."""

    def run() -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()

    return run


def published(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """vmap(jacrev) and an einsum over P × C Jacobians, as memory-perturbation does it."""
    params = {n: p.detach() for n, p in model.named_parameters()}
    variance = torch.cat([torch.full_like(p, 0.5).flatten() for p in params.values()])

    def outputs(p: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, p, (one.unsqueeze(0),)).squeeze(0)

    def run() -> Tensor:
        found = []
        for part in x.split(CHUNK):
            tree = vmap(jacrev(outputs), (None, 0))(params, part)
            jac = torch.cat([j.flatten(2) for j in tree.values()], dim=-1)
            found.append(torch.einsum("ncp,p,ndp->ncd", jac, variance, jac))
        return torch.cat(found)

    return run


def posterior(structure: str, task: Any) -> Any:
    """A Kronecker posterior that is fitted, or a diagonal one that is given."""
    import blr_analysis as blr

    if structure == "kron":
        return blr.fit_laplace(task, structure="kron", prior_precision=1.0)
    params = task.parameters()
    precision = {n: torch.full_like(p, 2.0) for n, p in params.items()}
    return blr.Posterior(params, precision, prior_precision=1.0, n_data=task.n_data)


def ours(structure: str, model: nn.Module, x: Tensor, y: Tensor, variance: bool | None):
    """``sensitivity``, end to end, at a posterior that is there already."""
    import blr_analysis as blr

    task = blr.Task(model, (x, y))
    q = posterior(structure, task)
    return lambda: blr.sensitivity(task, q, variance=variance)


def v_only(structure: str, model: nn.Module, x: Tensor, y: Tensor):
    """The engine alone: V_i of every example, without the scores made from it."""
    import blr_analysis as blr
    from blr_analysis.backprop.engine import chunks

    task = blr.Task(model, (x, y))
    q = posterior(structure, task)
    return lambda: torch.cat([q.form.gram(c.jacobian_terms()) for c in chunks(task.quiet, q.mean)])


def laplace_torch(model: nn.Module, x: Tensor, y: Tensor, images: int) -> Callable[[], Tensor]:
    """laplace-torch's functional variance with Kronecker factors (curvlinops backend)."""
    from laplace import Laplace
    from laplace.curvature import CurvlinopsGGN
    from torch.utils.data import DataLoader, TensorDataset

    la = Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        backend=CurvlinopsGGN,
    )
    la.fit(DataLoader(TensorDataset(x, y), batch_size=CHUNK))

    def run() -> Tensor:
        return torch.cat(
            [la._glm_predictive_distribution(p)[1].detach() for p in x[:images].split(CHUNK)]
        )

    return run


def worker(method: str, name: str, quick: bool, device: str) -> dict[str, float]:
    """Measure one method beside its floor in this process."""
    threads(2)
    model, x, y = (part.to(device) for part in case(name))
    bottom = floor(model, x)
    scale = 1.0
    if method == "published":
        call = published(model, x)
    elif method == "laplace-torch":
        images = 200 if name == "mlp" else 20
        scale = len(x) / images
        call = laplace_torch(model, x, y, images)
    elif method.startswith("V "):
        call = v_only(method.removeprefix("V "), model, x, y)
    elif method.startswith("self-influence "):
        call = ours(method.removeprefix("self-influence "), model, x, y, False)
        bottom = forward_backward(model, x, y)
    else:
        call = ours(method.removeprefix("sensitivity "), model, x, y, None)
    bottom()
    peak = peak_above(call)
    rounds = 1 if method in ("published", "laplace-torch") and quick else 3
    if method not in ("published", "laplace-torch"):
        rounds = {"mlp": 21, "lenet": 7, "large": 3}[name] // (3 if quick else 1)
    taken = interleaved({"floor": bottom, "method": call}, rounds=rounds, warm=1)
    return {
        "seconds": taken["method"] * scale,
        "floor": taken["floor"],
        "peak_mb": peak / 2**20,
        "scaled_by": scale,
    }


METHODS = [
    "V diag",
    "sensitivity diag",
    "published",
    "V kron",
    "sensitivity kron",
    "self-influence diag",
    "self-influence kron",
    "laplace-torch",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--worker", nargs=2, metavar=("METHOD", "CASE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(*args.worker, args.quick, args.device)))
        return
    results: dict[str, dict[str, dict[str, float]]] = {}
    methods = [m for m in METHODS if m != "laplace-torch" or find_spec("laplace")]
    for name in ("mlp", "lenet", "large"):
        results[name] = {}
        for method in methods if name != "large" else ["sensitivity diag"]:
            command = [sys.executable, "-W", "ignore", __file__, "--worker", method, name]
            command += ["--device", args.device]
            results[name][method] = run(command + (["--quick"] if args.quick else []))
            print(name, method, results[name][method], flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


def run(command: list[str]) -> dict[str, float]:
    """The JSON that a worker prints last; its error where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
