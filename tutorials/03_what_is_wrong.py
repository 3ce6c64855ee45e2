# %% [markdown]
# # What is wrong with these data?
#
# A data set can be wrong in several ways: labels that are false, images that do not belong, the
# same image twice. `blr.suspicious` looks for all three at once, in the network that you have
# trained anyway. Here we plant all three in real images and see what it finds.
#
# Run it with `python tutorials/03_what_is_wrong.py`; every figure in the output is computed.

# %%
from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from data import read
from matplotlib.figure import Figure
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.plots import plot_examples

DATA = os.environ.get("BLR_DATA", "digits")  # or "fashion-mnist"
N = int(os.environ.get("BLR_IMAGES", "1300"))
EPOCHS = int(os.environ.get("BLR_EPOCHS", "40"))
OUT = Path(os.environ.get("BLR_OUT", "out/03_what_is_wrong"))
BATCH = 50
RATE = 2e-3
OUT.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## 1. Three faults, planted
#
# We change one label in twenty. We add strangers, images upside down or plain noise, with random
# labels. And we add some images a second time, a little brighter or darker.

# %%
data = read(DATA)
g = torch.Generator().manual_seed(0)
images = data.images[:N].clone()
labels = data.labels[:N].clone()
N = len(images)
few = N // 50

flipped = torch.randperm(N, generator=g)[: N // 20]
labels[flipped] = (labels[flipped] + torch.randint(1, 10, (len(flipped),), generator=g)) % 10

strangers = torch.cat(
    [data.test_images[:few].rot90(1, (2, 3)), torch.rand(few, 1, 28, 28, generator=g)]
)
copied = torch.randperm(N, generator=g)[:few]
brightness = 0.8 + 0.4 * torch.rand(few, 1, 1, 1, generator=g)
copies = (images[copied] * brightness).clamp(0, 1)

x = torch.cat([images, strangers, copies])
y = torch.cat([labels, torch.randint(10, (len(strangers),), generator=g), labels[copied]])
planted = {
    "label": torch.isin(torch.arange(len(x)), flipped),
    "unfamiliar": (torch.arange(len(x)) >= N) & (torch.arange(len(x)) < N + 2 * few),
    "duplicate": torch.isin(torch.arange(len(x)), copied) | (torch.arange(len(x)) >= N + 2 * few),
}
print(f"{len(x):,} images of {DATA}:", *(f"{int(f.sum())} {k}" for k, f in planted.items()))

# %% [markdown]
# ## 2. One training, looked at four times
#
# A network learns a false label late, if at all: it first believes what the other images say. So we
# keep the weights at an eighth, a quarter and half of the training, beside those of its end: that
# is what `blr.Checkpoints` does. `fit_laplace` then fits a posterior at each of them. Adam's own
# state does not describe the curvature.
#
# This network stops after its epochs, before a minimum. So we measure how far it would move without
# an example: `calibrate` trains it once more by its recipe, without a tenth of the data.

# %%
torch.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
)
optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
checkpoints = blr.Checkpoints(model, steps=EPOCHS * math.ceil(len(x) / BATCH))
for _ in range(EPOCHS):
    for batch in torch.randperm(len(x)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        checkpoints.step()
recipe = blr.Recipe("adam", lr=RATE, epochs=EPOCHS, batch_size=BATCH)
task = blr.Task(model, (x, y), checkpoints=checkpoints, recipe=recipe)
posterior = blr.calibrate(task, blr.fit_laplace(task))

# %% [markdown]
# ## 3. The suspicious examples
#
# * `loss`: the mean loss of the label over the four moments; the table is ordered by it.
# * `wrong`: the probability that the label is wrong. Labels above one half are called wrong.
# * `unfamiliarity`: how many of the network's parameters the example takes up, whatever its label.
# * `closeness`: how closely its predictions follow those of another example, its *twin*, when the
#   weights move.

# %%
found = blr.suspicious(task, posterior)
print(found)
print(found.table.head(12).to_string(index=False, float_format="{:.3f}".format))
found.plot().figure.savefig(OUT / "map.png", dpi=150)

# %% [markdown]
# ## 4. Did it find what we planted?
#
# AUROC is how often a planted fault ranks above an example without any fault. Beside each score
# stands what one would use without this package.

# %%
with torch.no_grad():
    outputs = model(x)
    features = F.normalize(model[:-1](x), dim=1)
likeness = features @ features.T
nearest = likeness.fill_diagonal_(-1).amax(1)
simple = {
    "label": ("plain loss", F.cross_entropy(outputs, y, reduction="none")),
    "unfamiliar": ("1 - largest probability", 1 - outputs.softmax(1).amax(1)),
    "duplicate": ("cosine of the last features", nearest),
}
clean = ~(planted["label"] | planted["unfamiliar"] | planted["duplicate"])


def row(fault: str, name: str, score: Tensor) -> dict[str, object]:
    wrong = planted[fault]
    asked = wrong | clean
    order = torch.argsort(score[asked], descending=True)[: int(wrong.sum())]
    return {
        "fault": fault,
        "score": name,
        "AUROC": roc_auc_score(wrong[asked], score[asked]),
        "precision": float(wrong[asked][order].double().mean()),
    }


table = pd.DataFrame(
    [
        line
        for fault, (name, score) in simple.items()
        for line in (row(fault, name, score), row(fault, "ours", found.score(fault)))
    ]
)
print(table.to_string(index=False, float_format="{:.3f}".format))
true_kind = np.select([fault.numpy() for fault in planted.values()], list(planted), "none")
columns = pd.Series(true_kind, name="planted"), pd.Series(found.kind, name="suspected")
print(pd.crosstab(*columns).to_string())

# %% [markdown]
# Look at the pictures before you throw anything away: an unfamiliar image may be the only one of
# its kind, and you decide what to do with it. A stranger with a random label is both a stranger and
# mislabelled. The table names the fault that stands out more.

# %%
figure = Figure(figsize=(9.5, 4.8), layout="constrained")
panels = figure.subplots(3)
words = {"label": "Label", "unfamiliar": "Unfamiliar", "duplicate": "Duplicate"}
assert found.proposed is not None and found.twin is not None
assert found.unfamiliarity is not None
for ax, (kind, title) in zip(panels, words.items(), strict=True):
    worst = [i for i in found.order.tolist() if found.kind[i] == kind][:12]
    if not worst:  # nothing is called by this name
        ax.set_axis_off()
        continue
    said = {
        "label": [f"{data.names[y[i]]} → {data.names[found.proposed[i]]}" for i in worst],
        "unfamiliar": [f"tr ΛV {found.unfamiliarity[i]:.1f}" for i in worst],
        "duplicate": [f"{i} = {int(found.twin[i])}" for i in worst],
    }[kind]
    plot_examples(
        x, worst, said, ax, columns=12, title=f"{title}: the most suspicious", cmap="gray_r"
    )
    for text, i in zip(ax.texts, worst, strict=True):
        text.set(color="#D55E00" if planted[kind][i] else "black")
figure.suptitle("Orange: planted by us")
figure.savefig(OUT / "worst.png", dpi=150)

# %%
table.to_csv(OUT / "scores.csv", index=False)
found.table.to_csv(OUT / "suspicious.csv", index=False)
print(f"written to {OUT}: {', '.join(sorted(path.name for path in OUT.iterdir()))}")
