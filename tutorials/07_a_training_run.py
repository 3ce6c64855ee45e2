# %% [markdown]
# # A training run, told to the analyses
#
# This network has BatchNorm, and its training stops when the validation loss no longer falls. It is
# then not at the minimum of its loss. Labels that it learned by heart have no error left, so the
# last weights alone do not tell where the training would have ended without an example. Three
# things help: a few
# **checkpoints**, the **recipe** of the training, and a **temperature** that is measured with both.
#
# It takes a minute on two cores. You can set `BLR_EPOCHS` and `BLR_OUT` (a folder).

# %%
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import blr_analysis as blr

EPOCHS = int(os.environ.get("BLR_EPOCHS", "25"))
OUT = Path(os.environ.get("BLR_OUT", "out/07_a_training_run"))
N = 600
WRONG = 30
BATCH = 50
OUT.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)

# %% [markdown]
# ## 1. Data with wrong labels
#
# Six hundred digits, of which one in twenty gets another label.

# %%
pixels, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
images = pixels.float().reshape(-1, 1, 8, 8) / 16
order = torch.randperm(len(images))
train = order[:N]
test = order[N:]
labels = digits[train].clone()
wrong = torch.randperm(N)[:WRONG]
labels[wrong] = (labels[wrong] + torch.randint(1, 10, (WRONG,))) % 10

# %% [markdown]
# ## 2. A loop that keeps checkpoints
#
# One line after each step keeps the weights and BatchNorm's statistics at about 1/8, 1/4 and 1/2 of
# the run. In a trainer of Hugging Face or Lightning a callback does it.

# %%
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
steps = EPOCHS * (N // BATCH)
checkpoints = blr.Checkpoints(model, steps=steps, folder=OUT / "checkpoints")
for _ in range(EPOCHS):
    for batch in torch.randperm(N).split(BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[train[batch]]), labels[batch]).backward()
        optimizer.step()
        checkpoints.step()
model.eval()

# %% [markdown]
# ## 3. A task that knows its training
#
# The recipe says how the model was trained, so that the analyses can train it again: without a
# tenth of the data, or without a group. Trainings run in training mode, BatchNorm included.

# %%
recipe = blr.Recipe("adamw", lr=1e-2, weight_decay=1e-2, epochs=EPOCHS, batch_size=BATCH)
data = (images[train], labels)
task = blr.Task(model, data, checkpoints=checkpoints, recipe=recipe)
test_task = blr.Task(model, (images[test], digits[test]))
posterior = blr.fit_laplace(task)
print(posterior)
end = blr.fit_laplace(blr.Task(model, data))  # what the last weights alone know

# %% [markdown]
# ## 4. Which labels are wrong?
#
# Wrong labels are learned late. Their loss is small at the end, but their mean loss over the run is
# high.

# %%
for name, q in (("end alone", end), ("checkpoints", posterior)):
    first = blr.suspicious(task, q).table["index"][:WRONG]
    found = len({*first} & {*wrong.tolist()})
    print(f"{name}: {found} of the first {WRONG} have a wrong label")

# %% [markdown]
# ## 5. A scale for leave-one-out
#
# The scale of the answers is a guess until it is measured: `calibrate` trains once
# without a random tenth and takes the temperature at which the left-out losses agree.

# %%
calibrated = blr.calibrate(task, posterior)
print(f"temperature {calibrated.temperature:.3g}, give or take {calibrated.temperature_error:.0%}")
guess, measured = (blr.leave_one_out(task, q).nll for q in (posterior, calibrated))
clean = ~torch.isin(torch.arange(N), wrong)  # the test labels are right: compare with such
estimate = blr.leave_one_out(task, calibrated).losses[clean].mean()
with torch.no_grad():
    tested = nn.functional.cross_entropy(model(images[test]), digits[test])
print(f"leave-one-out loss: {guess:.3f} by the guess, {measured:.3f} measured")
print(f"of the right labels {estimate:.3f}; test loss {tested:.3f}")

# %% [markdown]
# ## 6. Without a class
#
# Short trainings by the same recipe, with and without the class, give the answer. We compare it
# with one whole training without the class.

# %%
short = blr.what_if(task, calibrated, remove="target == 3", evaluate=test_task)
whole = blr.what_if(task, calibrated, remove="target == 3", evaluate=test_task,
                    solver="retrain", seeds=1)  # fmt: skip
low, high = short.interval
print(f"test loss without the threes: {short.nll:.2f}, likely {low:.2f} to {high:.2f}")
print(f"retrained without them: {whole.nll:.2f}")
