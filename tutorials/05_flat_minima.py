# %% [markdown]
# # Why be Bayesian about a minimum?
#
# A minimum beside a wall, and a sharp minimum beside a flat one: Khan and Rue's Figure 1. Newton's
# method and the variational solution are the same rule; one looks at the loss at the mean only, the
# other all around it, as far as the posterior reaches. That is enough to leave the wall, and to
# prefer the flat minimum.
#
# Run it with `python tutorials/05_flat_minima.py`; every figure in the output is computed.

# %%
from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from blr_analysis.learning_rule.families import FullGaussian
from blr_analysis.learning_rule.inference import VariationalNewton, minima

OUT = Path(os.environ.get("BLR_OUT", "out/05_flat_minima"))
OUT.mkdir(parents=True, exist_ok=True)
torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## Two losses of one variable


# %%
def wall(t: Tensor) -> Tensor:
    """Least at 0; rises exponentially to the left, gently to the right."""
    return torch.exp(-4 * t[0]) / 4 + t[0]


def two_wells(t: Tensor) -> Tensor:
    """A deep sharp well at −1 and a shallow flat one at 2."""
    sharp = -3 * torch.exp(-0.5 * ((t[0] + 1) / 0.25) ** 2)
    flat = -2.5 * torch.exp(-0.5 * ((t[0] - 2) / 1.2) ** 2)
    return sharp + flat + 0.01 * t[0] ** 2


def start_at(mean: float) -> FullGaussian:
    return FullGaussian(torch.tensor([mean]), torch.tensor([[0.5]]))


# %% [markdown]
# ## The same rule, with and without an expectation
#
# `look="mean"` is the delta method, and at ρ = 1 Newton's method. `look="quadrature"` takes the
# expectation exactly. `temperature` says how much the posterior may spread.

# %%
rows = []
found = {}
for panel, loss, temperature, begin in (
    ("wall", wall, 1.0, 0.3),
    ("two wells", two_wells, 0.4, -0.6),
):
    (lowest,) = minima(loss, torch.tensor([[begin]]))
    rule = VariationalNewton(samples=80, rho=0.2, temperature=temperature)
    fitted = rule.fit(loss, start_at(begin), tol=1e-9, max_iter=2000, progress=False)
    mean = float(fitted.q.mean)
    sd = float(fitted.q.covariance.sqrt())
    found[panel] = loss, float(lowest), mean, sd
    pushes = torch.linspace(-6 * sd, 6 * sd, 4001)
    share = torch.exp(-0.5 * (pushes / sd) ** 2)
    for name, place in (("Newton", float(lowest)), ("variational", mean)):
        rows.append(
            {
                "loss": panel,
                "method": name,
                "place": place,
                "loss there": float(loss(torch.tensor([place]))),
                "mean loss after a push": float(
                    (share * loss((place + pushes)[None])).sum() / share.sum()
                ),
            }
        )
table = pd.DataFrame(rows)
print(table.to_string(index=False, float_format="{:.3f}".format))

# %% [markdown]
# Newton finds the lower loss. The variational solution finds the lower mean loss after a random
# push of the posterior's size: its loss is a little higher at its own place, and lower all around.


# %%
def draw(ax: Axes, panel: str, low: float, high: float) -> None:
    loss, newton, mean, sd = found[panel]
    at = np.linspace(low, high, 600)
    values = loss(torch.tensor(at)[None]).numpy()
    ax.plot(at, values, color="black", linewidth=1.2)
    bell = np.exp(-0.5 * ((at - mean) / sd) ** 2)
    bottom = values.min()
    top = np.quantile(values, 0.97)
    ax.fill_between(at, bottom, bottom + 0.35 * (top - bottom) * bell, alpha=0.25, color="#0072B2")
    for place, color, word in ((newton, "#D55E00", "Newton"), (mean, "#0072B2", "variational")):
        ax.axvline(place, color=color, linestyle="--", linewidth=1)
        ax.plot([place], [float(loss(torch.tensor([place])))], "o", color=color, label=word)
    ax.set(title=panel, xlabel="θ", ylabel="loss", ylim=(bottom - 0.05 * (top - bottom), top))
    ax.legend(frameon=False)


figure = Figure(figsize=(9, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
draw(left, "wall", -0.6, 2.2)
draw(right, "two wells", -2.5, 5.0)
figure.suptitle("Shaded: the posterior")
figure.savefig(OUT / "minima.png", dpi=150)
table.to_csv(OUT / "minima.csv", index=False)
print(f"written to {OUT}: {', '.join(sorted(path.name for path in OUT.iterdir()))}")
