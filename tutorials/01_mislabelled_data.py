# %% [markdown]
# # Which labels are wrong?
#
# Some labels of a data set are wrong, and nobody knows which. A person can look at a few hundred
# of ten thousand images: which ones? Here we know the answer, because we flip 5 % of the labels
# ourselves, train a LeNet on the result, and see which ranking brings the flipped ones to the top:
#
# * **leave-one-out** (this package): how badly would the network predict the label if it had never
#   seen it? The answer comes from *one* training, without leaving anything out.
# * **cleanlab**: how badly does a network predict the label if it has really never seen it? The
#   answer comes from *cross-validation*, five more trainings. For comparison we also give cleanlab
#   the one network that did see it. Its documentation advises against this.
# * **the plain loss** of the trained network.
#
# Run it with `python tutorials/01_mislabelled_data.py`; every figure in the output is computed,
# none is copied. The cells are marked with `# %%` for editors that run them one by one.

# %%
from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores
from data import read
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import rankdata
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from training import train_ivon

import blr_analysis as blr
from blr_analysis.plots import plot_examples
from blr_analysis.sensitivity import Scores

DATA = os.environ.get("BLR_DATA", "fashion-mnist")  # or "digits", which need no download
N = int(os.environ.get("BLR_IMAGES", "10000"))
EPOCHS = int(os.environ.get("BLR_EPOCHS", "20"))
FOLDS = int(os.environ.get("BLR_FOLDS", "5"))
OUT = Path(os.environ.get("BLR_OUT", "out/01_mislabelled_data"))
SHARE_FLIPPED = 0.05
BATCH = 50
OUT.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## 1. Real images, 5 % wrong labels
#
# We draw the labels to flip and their new values with a fixed seed; each of the nine other classes
# is equally likely. That is the easy kind of mistake: a real annotator takes a shirt for a coat and
# hardly ever for a boot. Fashion-MNIST has such mistakes of its own, too, and we do not know them:
# they count against every ranking that finds them.

# %%
data = read(DATA)
images = data.images[:N]
true_labels = data.labels[:N]
N = len(images)

generator = torch.Generator().manual_seed(2024)
chosen = torch.randperm(N, generator=generator)[: round(SHARE_FLIPPED * N)]
flipped = torch.zeros(N, dtype=torch.bool)
flipped[chosen] = True
shift = torch.randint(1, 10, (N,), generator=generator)
labels = torch.where(flipped, (true_labels + shift) % 10, true_labels)
K = int(flipped.sum())  # how many labels our person looks at: 500 of 10,000
print(f"{N:,} training images of {DATA}, {K} labels flipped")

# %% [markdown]
# ## 2. One training with IVON
#
# IVON learns a mean and a precision for every weight: the posterior costs nothing extra. The
# settings are the best of five on *other* 6,000 images of the same data set, by the likelihood
# that the network gave to 3,000 test images, and not by the flips that it found. The weights start
# with a precision of 30,000, a standard deviation of 0.006. During the run that start fades by a
# factor e⁻³, and the precision that the data give takes its place. If it faded faster, the weights
# would be so noisy that a network of this size learns less.


# %%
def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def trained(x: Tensor, y: Tensor, prior_precision: float = 20.0) -> tuple[nn.Module, blr.IVON]:
    torch.manual_seed(0)
    model = lenet()
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "start": 30_000, "fading": 3}
    return model, train_ivon(model, x, y, **settings, prior_precision=prior_precision)


@torch.no_grad()
def probabilities(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.split(1000)]).softmax(1)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((probabilities(model, x).argmax(1) == y).double().mean())


def describe(name: str, model: nn.Module, seconds: float) -> None:
    print(
        f"{name}: trained in {seconds:.0f} s; accuracy "
        f"{accuracy(model, images, labels):.3f} on its training labels, "
        f"{accuracy(model, images[flipped], labels[flipped]):.3f} on the flipped ones, "
        f"{accuracy(model, data.test_images, data.test_labels):.3f} on test images"
    )


start = time.perf_counter()
model, optimizer = trained(images, labels)
ivon_seconds = time.perf_counter() - start
describe("LeNet with IVON", model, ivon_seconds)

# %% [markdown]
# The second figure matters: a network that gives the flipped images their *wrong* labels has
# learned them by heart, and their loss is as small as any.
#
# ## 3. What the package sees
#
# `leave_one_out` gives the loss that each label would have without its example. That is the
# quantity that cross-validation measures, and so it was our choice *before* the comparison.
# `sensitivity` gives its ingredients, and we list the rankings by them as well:
#
# * `self_influence`, by how much the example's own loss would rise without it, to first order;
# * error × variance, the size of the push that the example gives to its own prediction;
# * `deviation`, how far its predicted probabilities would move.

# %%
Rankings = dict[str, tuple[Tensor, float]]  # name: the most suspicious has the largest value; s


def our_rankings(task: blr.Task, posterior: blr.Posterior) -> tuple[Rankings, Scores]:
    start = time.perf_counter()
    loo = blr.leave_one_out(task, posterior)
    left_out = time.perf_counter() - start
    start = time.perf_counter()
    scores = blr.sensitivity(task, posterior)
    scored = time.perf_counter() - start
    found = scores.deviation
    assert found is not None
    print(
        f"leave-one-out estimate on these labels: loss {loo.nll:.3f}, accuracy {loo.accuracy:.3f}"
        f" (with the examples: {scores.losses.mean():.3f})"
    )
    return {
        "leave-one-out loss": (loo.losses, left_out),
        "self-influence": (scores.self_influence, scored),
        "error × variance": (blr.memory_map(scores).product, scored),
        "deviation": (found, scored),
    }, scores


start = time.perf_counter()
task = blr.Task(model, (images, labels), likelihood="categorical")
posterior = blr.Posterior.from_optimizer(optimizer, model)
capture_seconds = time.perf_counter() - start
ours, scores = our_rankings(task, posterior)

# %% [markdown]
# The memory map sets error against variance. Flipped labels gather at the top: the network predicts
# something else than the label says. Most of them are *unpredictable*, not *memorable*: many other
# examples support the network's prediction, so that its variance there is ordinary.

# %%
memory = blr.memory_map(scores)
regions = pd.DataFrame({"region": memory.region, "flipped": flipped.numpy()})
print(regions.groupby("region")["flipped"].agg(examples="size", flipped="sum").to_string())

figure = Figure(figsize=(8.0, 6.0), layout="constrained")
ax = memory.plot(figure.subplots(), n_extremes=0)
across = memory.variance[flipped]
up = memory.error[flipped]
crosses = ax.scatter(across, up, s=14, color="#D55E00", marker="x", lw=0.8, zorder=3)
ax.legend([crosses], ["labels that we flipped"], loc="lower center")
figure.savefig(OUT / "memory_map.png", dpi=150)

# %% [markdown]
# ## 4. The plain loss, and cleanlab
#
# cleanlab's score is 1 minus its label quality (`get_label_quality_scores` with its default,
# self-confidence: the probability of the label). It asks for out-of-sample probabilities, so we
# train once per fold, with the same settings. With the network's own probabilities the score is 1 −
# exp(−loss), which gives the same order as the plain loss.


# %%
def out_of_sample(train: Callable[[Tensor, Tensor], tuple[nn.Module, object]]) -> Tensor:
    found = torch.empty(N, 10)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    for rest, held_out in folds.split(np.zeros(N), labels.numpy()):
        fold_model, _ = train(images[rest], labels[rest])
        found[held_out] = probabilities(fold_model, images[held_out])
    return found


def cleanlab_score(p: Tensor) -> Tensor:
    return torch.from_numpy(1 - get_label_quality_scores(labels.numpy(), p.double().numpy()))


def peer_rankings(model: nn.Module, p_out: Tensor, cv_seconds: float) -> Rankings:
    start = time.perf_counter()
    p_in = probabilities(model, images)
    loss = F.nll_loss(p_in.double().log(), labels, reduction="none")
    seconds = time.perf_counter() - start
    return {
        "plain loss": (loss, seconds),
        "cleanlab, in-sample": (cleanlab_score(p_in), seconds),
        f"cleanlab, {FOLDS}-fold": (cleanlab_score(p_out), cv_seconds),
    }


def describe_crossed(p: Tensor) -> None:
    loss = F.nll_loss(p.double().log(), labels)
    right = (p.argmax(1) == labels).double().mean()
    print(f"cross-validation estimate on these labels: loss {loss:.3f}, accuracy {right:.3f}")


start = time.perf_counter()
p_out = out_of_sample(trained)
cv_seconds = time.perf_counter() - start
describe_crossed(p_out)
peers = peer_rankings(model, p_out, cv_seconds)

# %% [markdown]
# cleanlab also decides how many labels to call wrong (`find_label_issues` with its defaults).

# %%
issues = torch.from_numpy(find_label_issues(labels.numpy(), p_out.double().numpy(), n_jobs=1))
print(
    f"cleanlab calls {int(issues.sum())} labels wrong; {int((issues & flipped).sum())} of them "
    f"are among the {K} flipped"
)

# %% [markdown]
# ## 5. The comparison
#
# * AUROC: the probability that a flipped label is ranked above a correct one.
# * gain: AUROC minus that of the plain loss, with the standard error of this difference (DeLong,
#   DeLong and Clarke-Pearson, 1988). A gain below two standard errors is no gain. It covers the
#   choice of images and flips, not that of the network's seed.
# * precision: the share of flipped labels among the first K = N/20 (500 of 10,000).
# * seconds: the time including the training; for cross-validation, all of its trainings.


# %%
def placements(score: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The share of correct labels below each flipped one, of flipped ones above each correct."""
    value = score.double().numpy()
    positive = flipped.numpy()
    ranks = rankdata(value)
    below = (ranks[positive] - rankdata(value[positive])) / (N - K)
    above = 1 - (ranks[~positive] - rankdata(value[~positive])) / K
    return below, above


def compare(rankings: Rankings, network: str, train_seconds: float) -> pd.DataFrame:
    base_below, base_above = placements(rankings["plain loss"][0])
    rows = []
    for name, (score, seconds) in rankings.items():
        below, above = placements(score)
        variance = np.var(below - base_below, ddof=1) / K
        variance += np.var(above - base_above, ddof=1) / (N - K)
        first = torch.argsort(score, descending=True, stable=True)[:K]
        crossed = name.endswith("-fold")
        rows.append(
            {
                "network": network,
                "ranking": name,
                "AUROC": below.mean(),
                "gain": below.mean() - base_below.mean(),
                "± s.e.": math.sqrt(variance),
                f"precision at {K}": float(flipped[first].double().mean()),
                "trainings": FOLDS if crossed else 1,
                "seconds": seconds + (0 if crossed else train_seconds),
            }
        )
    return pd.DataFrame(rows)


def show(table: pd.DataFrame) -> None:
    written: dict[str | int, Callable[[float], str]] = {
        "seconds": "{:.1f}".format,
        f"precision at {K}": "{:.3f}".format,
    }
    shown = table.drop(columns="network")
    print(shown.to_string(index=False, float_format="{:.4f}".format, formatters=written))


rankings = peers | ours
table = compare(rankings, "IVON", ivon_seconds + capture_seconds)
show(table)

# %% [markdown]
# What to look at: the network that IVON trained predicts few of the flipped labels, so its own
# loss is already a good detector, and the plain loss, the leave-one-out loss and cleanlab's
# cross-validation come out alike. So the package's ranking is *not* better than the plain loss
# here; what one gets is the answer of cross-validation from one training.
#
# The other three rankings find flips less well, deviation least of all, because they answer
# another question: how much the example shapes the network. A boot with the label "shirt" is a
# hopeless case: its predicted probabilities would not move without it. An image between two
# classes moves most. Use deviation to find the examples that matter, not those that are wrong.

# %%
figure = Figure(figsize=(7.2, 5.0), layout="constrained")
ax = figure.subplots()
styles = {
    "leave-one-out loss": ("#0072B2", "-"),
    f"cleanlab, {FOLDS}-fold": ("#D55E00", "--"),
    "plain loss": ("#000000", ":"),
    "self-influence": ("#56B4E9", "-."),
    "deviation": ("#009E73", (0, (6, 2, 1, 2, 1, 2))),
}
looked_at = np.arange(1, 3 * K + 1)
for name, (colour, dash) in styles.items():
    order = torch.argsort(rankings[name][0], descending=True, stable=True)[: 3 * K]
    ax.plot(looked_at, flipped[order].cumsum(0), color=colour, ls=dash, lw=1.8, label=name)
ax.plot(looked_at, np.minimum(looked_at, K), color="0.7", lw=1, zorder=0, label="best possible")
ax.set(xlim=(0, 3 * K), ylim=(0, K * 1.04), xlabel="labels looked at, most suspicious first")
ax.set(ylabel=f"flipped labels found, of {K}", title="How many wrong labels does one find?")
ax.legend(loc="center right")
figure.savefig(OUT / "found.png", dpi=150)

# %% [markdown]
# ## 6. The worst
#
# The upper row shows the labels with the largest left-out loss. The lower row shows the worst of
# those that we did *not* flip: a person who looks through the real Fashion-MNIST would see these
# first. Each title has the label and, in brackets, the network's prediction.


# %%
def show_worst(ax: Axes, among: Tensor, title: str, count: int = 30) -> Tensor:
    worst = among[torch.argsort(suspicion[among], descending=True)][:count]
    said = labels[worst].tolist()
    answered = scores.predictions[worst].tolist()
    titles = [f"{data.names[a]}\n({data.names[b]})" for a, b in zip(said, answered, strict=True)]
    plot_examples(images, worst, titles, ax, columns=10, title=title, cmap="gray_r")
    for text, wrong in zip(ax.texts, flipped[worst].tolist(), strict=True):
        text.set(color="#D55E00" if wrong else "black")
    return worst


suspicion = ours["leave-one-out loss"][0]
figure = Figure(figsize=(9.5, 9.6), layout="constrained")
above, below = figure.subplots(2)
worst = show_worst(above, torch.arange(N), "The most suspicious labels (orange: flipped by us)")
show_worst(below, (~flipped).nonzero().flatten(), "The most suspicious labels that we did not flip")
figure.savefig(OUT / "worst.png", dpi=150)
print(f"{int(flipped[worst].sum())} of the {len(worst)} most suspicious labels are flipped")

# %% [markdown]
# ## 7. When the network has learned its labels by heart
#
# Now Adam trains the same LeNet, for twice the epochs and with hardly any weight decay: an everyday
# training that goes too far. Adam's own state describes gradients, not curvature; `fit_laplace`
# gives a posterior in a few passes over the data. Now the plain loss is too good: the wrong labels
# have been learned.


# %%
def train_adam(x: Tensor, y: Tensor, prior_precision: float = 1.0) -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    model = lenet()
    epochs = 2 * EPOCHS
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=prior_precision / len(x))
    steps = epochs * math.ceil(len(x) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
    return model, optimizer


start = time.perf_counter()
by_heart, _ = train_adam(images, labels)
adam_seconds = time.perf_counter() - start
describe("LeNet with Adam", by_heart, adam_seconds)

start = time.perf_counter()
task = blr.Task(by_heart, (images, labels), likelihood="categorical")
laplace = blr.fit_laplace(task, structure="kron", prior_precision=1.0)
laplace_seconds = time.perf_counter() - start
ours, _ = our_rankings(task, laplace)
ours = {name: (score, seconds + laplace_seconds) for name, (score, seconds) in ours.items()}

start = time.perf_counter()
p_out = out_of_sample(train_adam)
cv_seconds = time.perf_counter() - start
describe_crossed(p_out)
peers = peer_rankings(by_heart, p_out, cv_seconds)
second = compare(peers | ours, "Adam", adam_seconds)
show(second)

# %% [markdown]
# Here it matters that the network has seen the example, and taking it out helps: leave-one-out
# loss, self-influence and error × variance separate flipped labels better than the plain loss.
# Cross-validation separates them better still, because it really takes the example out. The
# posterior describes the network near its weights, and a label that is learned by heart has already
# changed these weights.
#
# Compare also the two estimates of the loss, leave-one-out and cross-validation, for both networks:
# IVON's precision, part of which is still its start, makes the network look too sure of itself; the
# Laplace posterior of a network that fits so well makes it look too unsure. A wrong scale does less
# harm to a ranking than to an estimate.
#
# In short: if the training does not learn labels by heart, one training is enough, for the plain
# loss and for the leave-one-out loss. If it does, leave-one-out repairs a part of the damage, and
# cross-validation more of it, by five more trainings.

# %%
pd.concat([table, second]).to_csv(OUT / "rankings.csv", index=False)
examples = pd.DataFrame({name: score.numpy() for name, (score, _) in rankings.items()})
examples.insert(0, "true_label", true_labels.numpy())
examples.insert(0, "label", labels.numpy())
examples.insert(0, "flipped", flipped.numpy())
examples.to_csv(OUT / "examples.csv", index_label="index")
print(f"written to {OUT}: {', '.join(sorted(path.name for path in OUT.iterdir()))}")
