# %% [markdown]
# # May I merge these models?
#
# Four teams start from one model of handwritten digits, and each trains it further on pictures of
# its own kind. Can one network do all of it, without training on all the pictures together? Merging
# the weights costs nothing, and sometimes it works. Here we merge in four ways, see which one works
# and *why*, and take one team's part out again.
#
# Run it with `python tutorials/04_merging.py`; every figure in the output is computed.

# %%
from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy.ndimage import rotate
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import Tensor, nn
from training import train_ivon

import blr_analysis as blr

EPOCHS = int(os.environ.get("BLR_EPOCHS", "30"))
OUT = Path(os.environ.get("BLR_OUT", "out/04_merging"))
# DELTA: the prior precision of every weight
BATCH = 25
DELTA = 5.0
OUT.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## 1. One base, four teams
#
# The base sees upright digits. Each team has 200 other images, changed in a way of its own: turned
# left, turned right, in thin strokes, mirrored. Another 597 images are changed in every way: 200 of
# them choose the settings of the merges, and 397 test the merges.

# %%
pixels, digit = load_digits(return_X_y=True)
pixels = pixels.reshape(-1, 8, 8) / 16
order = np.random.default_rng(0).permutation(len(pixels))


def turned(x: np.ndarray, degrees: float) -> np.ndarray:
    return rotate(x, degrees, axes=(1, 2), reshape=False, order=1)


KINDS = {
    "upright": lambda x: x,
    "left": lambda x: turned(x, 20),
    "right": lambda x: turned(x, -20),
    "thin": lambda x: np.clip(2 * x - 0.8, 0, 1),
    "mirrored": lambda x: x[:, :, ::-1],
}
TEAMS = [kind for kind in KINDS if kind != "upright"]


def images(kind: str, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    x = np.ascontiguousarray(KINDS[kind](pixels[rows])).reshape(len(rows), -1)
    return torch.from_numpy(x).float(), torch.from_numpy(digit[rows])


train = {k: images(k, order[400 * (i > 0) + 200 * max(i - 1, 0) :][: 200 if i else 400])
         for i, k in enumerate(KINDS)}  # fmt: skip
validation = {k: images(k, order[1200:1400]) for k in KINDS}
test = {k: images(k, order[1400:]) for k in KINDS}
print("training images:", ", ".join(f"{len(y)} {k}" for k, (_, y) in train.items()))


# %% [markdown]
# ## 2. Training with IVON
#
# IVON learns how sure it is of each weight. `Posterior.from_optimizer` reads it, and merging
# subtracts the prior itself. `joint` is trained on the images of all teams. A merge should come
# close to it.
#
# With so few images most of that precision is still its start, which is the same for every weight.
# `from_optimizer` subtracts it.


# %%
def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))
    return nn.Sequential(*layers)


def fit(kinds: list[str], start: nn.Module | None = None) -> tuple[nn.Module, blr.Posterior]:
    model = network()
    if start is not None:
        model.load_state_dict(start.state_dict())
    x, y = (torch.cat([train[k][part] for k in kinds]) for part in (0, 1))
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "start": 3_000, "fading": 4}
    optimizer = train_ivon(model, x, y, **settings, prior_precision=DELTA)
    return model, blr.Posterior.from_optimizer(optimizer, model)


base, base_posterior = fit(["upright"])
fitted = {team: fit([team], start=base) for team in TEAMS}
joint, joint_posterior = fit(list(KINDS), start=base)

# %% [markdown]
# ## 3. Four merges
#
# * **task arithmetic**: the base plus α times what each team changed, θ_0 + α Σ (θ_t − θ_0); with
#   α = 1/4 it is the average of the four networks;
# * **Fisher average**: an average in which each weight counts by how sure its team is of it;
# * **gradient matching**: the changes, weighed by how sure each team *and the base* are.
#
# `merge_curve` tries values of α on validation images; nothing is written to disk.

# %%
models = {team: model.state_dict() for team, (model, _) in fitted.items()}
precisions = {team: posterior for team, (_, posterior) in fitted.items()}
curve = blr.merge_curve(
    base,
    models,
    {k: blr.Task(network(), validation[k]) for k in KINDS},
    method=["task_arithmetic", "fisher", "gradient_matching"],
    weights=[0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0],
    precisions=precisions,
    base_precision=base_posterior,
    progress=False,
)
print(curve)
curve.plot().figure.savefig(OUT / "alpha.png", dpi=150)


def merged(method: str, alpha: float) -> dict[str, Tensor]:
    inputs = {} if method == "task_arithmetic" else {"precisions": list(precisions.values())}
    if method == "gradient_matching":
        inputs["base_precision"] = base_posterior
    return blr.merge(base, list(models.values()), method=method, weights=alpha, **inputs)


best = {m: curve.best_of(m).weights[0] for m in curve.methods}
merges = {
    "base": base.state_dict(),
    "average": merged("task_arithmetic", 1 / len(TEAMS)),
    f"task arithmetic, α = {best['task_arithmetic']:g}": merged(
        "task_arithmetic", best["task_arithmetic"]
    ),
    "task arithmetic, α = 1": merged("task_arithmetic", 1.0),
    "Fisher average": merged("fisher", 1.0),
    f"gradient matching, α = {best['gradient_matching']:g}": merged(
        "gradient_matching", best["gradient_matching"]
    ),
    "gradient matching, α = 1": merged("gradient_matching", 1.0),
    "joint training": joint.state_dict(),
}


def accuracies(state: dict[str, Tensor]) -> dict[str, float]:
    found = {}
    with torch.no_grad():
        for kind, (x, y) in test.items():
            outputs = torch.func.functional_call(network(), state, (x,))
            found[kind] = float((outputs.argmax(1) == y).double().mean())
    return {**found, "mean": sum(found.values()) / len(found)}


table = pd.DataFrame({name: accuracies(state) for name, state in merges.items()}).T
teams = pd.DataFrame({f"team {name}": accuracies(state) for name, state in models.items()}).T
print(pd.concat([teams, table]).to_string(float_format="{:.3f}".format))

# %% [markdown]
# ## 4. Why?
#
# An average is wrong by exactly the *gradient mismatch*: the difference between the gradients of a
# team's loss at the merged weights and at its own. It needs the training images and no test images,
# and it shows for which team the merge is bad. The table compares it with the rise of the loss, on
# the team's training images (`gap`) and on test images (`test_gap`).

# %%
owners = {"upright": base.state_dict(), **models}
mismatch = blr.gradient_mismatch(
    {k: blr.Task(network(), train[k]) for k in KINDS},
    merges,
    models=owners,
    tests={k: blr.Task(network(), test[k]) for k in KINDS},
    progress=False,
)
rows = mismatch.table.assign(test_gap=lambda t: t.test_nll_merged - t.test_nll_own)
columns = ["mismatch_per_example", "gap_per_example", "test_gap"]
print(rows.groupby("merge", sort=False)[columns].mean().to_string(float_format="{:.3f}".format))
found = spearmanr(rows.mismatch_per_example, rows.test_gap).statistic
print(f"rank correlation of mismatch and test loss gap over {len(rows)} pairs: {found:.2f}")
mismatch.plot().figure.savefig(OUT / "mismatch.png", dpi=150)

# %% [markdown]
# ## 5. Taking a team out again
#
# `joint` has seen mirrored images. Now it should forget them, without training on the others again.
# We train it further on the mirrored ones alone, and merge the result with α < 0. The aim is a
# joint training that never saw them. Some weights have nearly all of their precision from the
# mirrored images. Without these hardly any precision is left, and the step would be huge: δ limits
# it.

# %%
forgotten = "mirrored"
more, more_posterior = fit([forgotten], start=joint)
never, _ = fit([k for k in KINDS if k != forgotten], start=base)
removals = {"joint training": joint.state_dict(), f"never saw {forgotten}": never.state_dict()}
for alpha in (-0.5, -1.0):
    removals[f"task arithmetic, α = {alpha:g}"] = blr.merge(
        joint, [more], weights=alpha, method="task_arithmetic"
    )
    for delta in (0.0, 1000.0):
        removals[f"gradient matching, α = {alpha:g}, δ = {delta:g}"] = blr.merge(
            joint,
            [more],
            weights=alpha,
            precisions=[more_posterior],
            base_precision=joint_posterior,
            delta=delta,
        )
removed = pd.DataFrame({name: accuracies(state) for name, state in removals.items()}).T
removed["others"] = removed[[k for k in KINDS if k != forgotten]].mean(axis=1)
print(removed[[forgotten, "others"]].to_string(float_format="{:.3f}".format))

# %%
figure = Figure(figsize=(8.6, 4.2), layout="constrained")
ax = figure.subplots()
shown = table[list(KINDS)]
image = ax.imshow(shown, vmin=0, vmax=1, cmap="Blues", aspect="auto")
ax.set_xticks(range(len(KINDS)), list(KINDS))
ax.set_yticks(range(len(shown)), list(shown.index))
for i, line in enumerate(shown.to_numpy()):
    for j, value in enumerate(line):
        colour = "white" if value > 0.6 else "black"
        ax.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour)
ax.set_title("Accuracy on test images of every kind", loc="left")
figure.colorbar(image, ax=ax, shrink=0.8)
figure.savefig(OUT / "accuracy.png", dpi=150)
table.to_csv(OUT / "accuracy.csv")
removed.to_csv(OUT / "removed.csv")
rows.to_csv(OUT / "mismatch.csv", index=False)
print(f"written to {OUT}: {', '.join(sorted(path.name for path in OUT.iterdir()))}")
