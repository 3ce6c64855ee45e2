# %% [markdown]
# # Which speeches shape a language model?
#
# A small causal language model reads the State-of-the-Union speeches, 1790 to 2021. Which of them
# shape it most? Which words of them does it know by heart? And how much worse would it read a
# president's other passages if it had never seen a speech of theirs? For the last question we also
# train again without that president, and compare the prediction with the result.
#
# Nothing here needs the outputs of all passages at once: 64 words times a vocabulary of 2,000 are
# 128,000 numbers for each. One gradient per passage is enough.
#
# Run it with `python tutorials/02_speeches.py`; every figure in the output is computed.

# %%
from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from speeches import excerpts, read, vocabulary_of
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.sensitivity import Scores, token_sensitivity

DATA = os.environ.get("BLR_DATA", "sotu")  # or "made-up", which needs no download
EACH = int(os.environ.get("BLR_EXCERPTS", "8"))  # passages from every speech
EPOCHS = int(os.environ.get("BLR_EPOCHS", "5"))
REMOVALS = int(os.environ.get("BLR_REMOVALS", "4"))  # presidents to train again without
VOCABULARY = int(os.environ.get("BLR_VOCABULARY", "2000"))
OUT = Path(os.environ.get("BLR_OUT", "out/02_speeches"))
LENGTH = 65
WIDTH = 64
BATCH = 32
PRIOR = 20.0  # precision δ of the prior: a penalty of δ/2 ‖θ‖² beside the summed loss
OUT.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## 1. The speeches
#
# We take a few passages of 65 words and punctuation marks from every speech, evenly spaced, and
# hold every fourth one out. Words outside the vocabulary are one word, `<other>`.

# %%
speeches = read(DATA)
vocabulary = vocabulary_of(speeches, VOCABULARY)
VOCABULARY = len(vocabulary)
passages = excerpts(speeches, vocabulary, EACH, LENGTH)
held_out = torch.arange(len(passages)) % 4 == 3
about = pd.DataFrame(
    {"speech": passages.speech, "president": passages.president, "year": passages.year}
)
train_about, test_about = (
    about[mask.numpy()].reset_index(drop=True) for mask in (~held_out, held_out)
)
train_ids = passages.ids[~held_out]
test_ids = passages.ids[held_out]
TOKENS = train_ids[:, 1:].numel()
print(
    f"{len(speeches)} speeches by {about.president.nunique()} presidents: {len(train_ids):,} "
    f"passages to learn ({TOKENS:,} words to predict), {len(test_ids):,} held out"
)

# %% [markdown]
# ## 2. A small language model
#
# One block of attention, 64 numbers wide, trained with Adam. The penalty is the prior's: with a
# loss averaged over words, `weight_decay` is δ divided by their number. A passage with a weight of
# 0 is left out of the training. Everything else stays as it was, also the order and the first
# weights, so that two trainings differ only by their passages.


# %%
class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.before, self.between, self.after = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.read = nn.Linear(WIDTH, VOCABULARY)
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = (
            y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.between(x))))
        return self.read(self.after(x))


def word_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Losses of the words 1 … 64 of each passage, ``[B, 64]``."""
    logits = model(ids[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1)


def trained(kept: Tensor, seed: int = 0) -> nn.Module:
    """A model of the passages where ``kept`` is true."""
    torch.manual_seed(seed)
    model = LanguageModel()
    steps = EPOCHS * math.ceil(len(train_ids) / BATCH)
    words = int(kept.sum()) * (LENGTH - 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=PRIOR / words)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(train_ids)).split(BATCH):
            left = batch[kept[batch]]
            if len(left):
                optimizer.zero_grad()
                (word_losses(model, train_ids[left]).sum() / (BATCH * (LENGTH - 1))).backward()
                optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def losses_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Each passage's loss per word, in nats."""
    return torch.cat([word_losses(model, part).mean(1) for part in ids.split(64)])


def perplexity(losses: Tensor) -> float:
    return math.exp(float(losses.double().mean()))


start = time.perf_counter()
everything = torch.ones(len(train_ids), dtype=torch.bool)
model = trained(everything)
seconds = time.perf_counter() - start
print(
    f"trained in {seconds:.0f} s: perplexity {perplexity(losses_of(model, train_ids)):.1f} on what "
    f"it learned, {perplexity(losses_of(model, test_ids)):.1f} on held-out passages"
)

# %% [markdown]
# ## 3. Which speeches shape it
#
# `likelihood="causal_lm"` takes the ids as labels and shifts them itself. The posterior is a
# diagonal Laplace approximation, from one gradient per passage (`curvature="empirical_fisher"`). A
# passage's self-influence is how much its own loss would rise without it, to first order, in nats
# over its 64 words. Every speech has the same number of passages here, so that sums over speeches
# can be compared.

# %%
task = blr.Task(
    model,
    (train_ids, train_ids),
    likelihood="causal_lm",
    batch_size=64,
    metadata={name: train_about[name].tolist() for name in train_about},
)
start = time.perf_counter()
posterior = blr.fit_laplace(
    task, structure="diag", curvature="empirical_fisher", prior_precision=PRIOR
)
scores = blr.sensitivity(task, posterior)
loo = blr.leave_one_out(task, posterior)
seconds = time.perf_counter() - start
print(f"posterior, sensitivity and leave-one-out in {seconds:.0f} s: {scores}")
print(
    f"leave-one-out estimate of the perplexity on new passages: {loo.perplexity:.1f} "
    f"(with the passages: {loo.perplexity_before:.1f})"
)


def by(column: str, sort: str, **columns: tuple[str, str]) -> pd.DataFrame:
    """What the passages that share a column come to, the largest first; kept as CSV."""
    table = scores.table.groupby(column).agg(**columns).sort_values(sort, ascending=False)
    table.to_csv(OUT / f"by_{column}.csv")
    return table


by_speech = by(
    "speech",
    "self_influence",
    year=("year", "first"),
    president=("president", "first"),
    passages=("index", "size"),
    loss_per_word=("loss_per_token", "mean"),
    self_influence=("self_influence", "sum"),
)
print("the ten speeches with the most self-influence:")
print(by_speech.head(10).round(3).to_string())
by_president = by(
    "president",
    "per_passage",
    first_year=("year", "min"),
    passages=("index", "size"),
    self_influence=("self_influence", "sum"),
    per_passage=("self_influence", "mean"),
)
print("presidents by self-influence per passage, the first and last five:")
print(pd.concat([by_president.head(5), by_president.tail(5)]).round(3).to_string())
rank = by_speech[["year", "loss_per_word", "self_influence"]].rank().corr()
print(
    f"rank correlation of a speech's self-influence with its loss: "
    f"{rank.loc['self_influence', 'loss_per_word']:.2f}, with the year: "
    f"{rank.loc['self_influence', 'year']:.2f}"
)

# %% [markdown]
# ## 4. Which words
#
# Self-influence is a sum over the words of a passage. The part of a word is g_tᵀ Σ g_i, which takes
# little time for single passages.

# %%
top = int(scores.self_influence.argmax())
words = token_sensitivity(task, posterior, sequences=[top]).table
assert math.isclose(words.change.sum(), float(scores.self_influence[top]), rel_tol=1e-3)
words["word"] = [vocabulary[target] for target in words.target]
row = train_ids[top].tolist()
words["after"] = [
    " ".join(vocabulary[i] for i in row[max(0, p - 3) : p + 1]) for p in words.position
]
print(f"the passage with the most self-influence is from {train_about.speech[top]}; its words:")
columns = ["after", "word", "loss", "change"]
shown = words.sort_values("change", ascending=False)[columns]
print(shown.head(8).round(3).to_string(index=False))

# %% [markdown]
# ## 5. Without one president
#
# One step of `what_if` from the trained model predicts the change; training again without the
# president gives the truth. We take presidents from the top to the bottom of the ranking by total
# self-influence, among those with enough held-out passages. We measure on the president's own
# held-out passages, where it matters, and on everyone else's.
#
# If a network has more weights than words, a diagonal posterior overstates how far the weights can
# move. A training that stops early moves them even less. The held-out passages show by how much:
# the mean loss of passages that are left out should equal that of new ones. So we multiply all
# variances by
#
#     τ = (held-out loss − loss with the passages) / (mean self-influence)
#
# one number for all presidents. The raw posterior is shown, too.

# %%
test_task = blr.Task(model, (test_ids, test_ids), likelihood="causal_lm", batch_size=64)
before = losses_of(model, test_ids).double()


def scaled(q: blr.Posterior, tau: float) -> blr.Posterior:
    """The posterior with its variances multiplied by τ."""
    form = q.form.zeros().plus(q.form, 1 / tau)
    return blr.Posterior(q.mean, form, prior_precision=q.prior_precision, n_data=q.n_data)


def tau_of(found: Scores) -> float:
    gap = float(before.sum()) / len(before) * (LENGTH - 1) - float(found.losses.double().mean())
    return gap / float(found.self_influence.double().mean())


sampled = blr.fit_laplace(
    task,
    structure="diag",
    curvature="mc_fisher",
    prior_precision=PRIOR,
)
posteriors = {"empirical Fisher": (posterior, scores)}
posteriors["sampled Fisher"] = (sampled, blr.sensitivity(task, sampled))
methods: dict[str, blr.Posterior] = {}
for name, (q, found) in posteriors.items():
    tau = tau_of(found)
    print(f"{name}: its leave-one-out loss is that of held-out passages for τ = {tau:.2g}")
    methods |= {name: q, f"{name}, times τ": scaled(q, tau)}

counts = test_about.president.value_counts()
enough = by_president.index.map(counts).fillna(0) >= min(8, int(counts.max()))
ranking = by_president[enough].sort_values("self_influence", ascending=False).index.tolist()
places = torch.linspace(0, len(ranking) - 1, min(REMOVALS, len(ranking))).round().long()
chosen = [ranking[i] for i in places.tolist()]
own = {p: torch.tensor((test_about.president == p).to_numpy()) for p in chosen}


def rise(after: Tensor, president: str) -> dict[str, float]:
    """Rise of the perplexity in per cent, on a president's own passages and on all others."""
    change = after.double() - before
    mine = own[president]
    return {
        "own": 100 * math.expm1(float(change[mine].mean())),
        "others": 100 * math.expm1(float(change[~mine].mean())),
    }


rows = []
for president in chosen:
    removed = torch.tensor((train_about.president == president).to_numpy())
    for name, q in methods.items():
        start = time.perf_counter()
        result = blr.what_if(task, q, remove=removed, evaluate=test_task, solver="posterior")
        found = rise(result.after.losses / (LENGTH - 1), president)
        seconds = time.perf_counter() - start
        rows.append({"president": president, "method": name, **found, "seconds": seconds})
    start = time.perf_counter()
    again = losses_of(trained(~removed), test_ids)
    seconds = time.perf_counter() - start
    rows.append({"president": president, "method": "trained again", **rise(again, president)})
    rows[-1]["seconds"] = seconds
    print(f"without {president}: {int(removed.sum())} of {len(removed):,} passages less")
table = pd.DataFrame(rows)
table.to_csv(OUT / "removals.csv", index=False)
print("rise of the perplexity without a president, in per cent:")
print(table.round(2).to_string(index=False))
on_own = table.pivot(index="president", columns="method", values="own").loc[chosen]
for name in methods:
    ratio = on_own[name].sum() / on_own["trained again"].sum()
    order = on_own[name].rank().corr(on_own["trained again"].rank())
    print(
        f"{name}: predicted/true, summed over presidents: {ratio:.2f}; rank correlation {order:.2f}"
    )

# %% [markdown]
# The prediction takes a few seconds for each president. It says whose removal matters more, but not
# how much. A diagonal posterior treats the passages of a president as independent. But their
# gradients share directions, in which the model cannot move freely. τ corrects single passages, not
# the sum over dozens. For the size of the change ask `what_if(solver="cg")`, which looks at the
# passages that stay, or train again.
#
# How much of the true change is chance? Training again on all passages, in another order and from
# other first weights, changes the perplexity on a president's own passages as well.

# %%
other = losses_of(trained(everything, seed=1), test_ids)
noise = pd.Series([abs(rise(other, president)["own"]) for president in chosen])
print(
    f"another seed changes it by {noise.median():.2f} % in the median, {noise.max():.2f} % at most"
)

# %% [markdown]
# ## Pictures

# %%
figure = Figure(figsize=(11, 4.5), layout="constrained")
left, right = figure.subplots(1, 2)
left.scatter(by_speech.year, by_speech.self_influence, s=12)
for title, year, height in by_speech[["year", "self_influence"]].head(5).itertuples():
    left.annotate(title, (year, height), fontsize=7)
left.set_xlabel("year")
left.set_xlim(left.get_xlim()[0], left.get_xlim()[1] + 45)  # room for the names
left.set_ylabel("self-influence of a speech [nats]  (→ shapes more)")
for name in methods:
    if "τ" in name:
        right.scatter(on_own["trained again"], on_own[name], label=name)
low, high = right.get_xlim()
right.plot([low, high], [low, high], color="grey", linewidth=0.8)
for president in chosen:
    place = on_own.loc[president]
    right.annotate(
        president, (place["trained again"], place.drop("trained again").min()), fontsize=7
    )
right.margins(x=0.25)
right.set_xlabel("trained again: rise of the perplexity [%]")
right.set_ylabel("predicted [%]")
right.set_title("own held-out passages, without the president's speeches", fontsize=9)
right.legend()
figure.savefig(OUT / "speeches.png", dpi=120)
print(f"tables and picture are in {OUT}")
