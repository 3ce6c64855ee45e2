"""The steps of the papers, line by line, over all weights of a network as one vector of float64.

A transcription yields the weights after every step, and the precision or Hessian learned. It draws
what the optimizer draws, or takes the weights that the loss has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
from optimizer_makers import BATCH, N, X, Y, dropout, flat, network, of, row, whole
from optimizer_makers import preconditioned as make_preconditioned
from oracles import rows as rows_of
from oracles import unflatten
from torch import Tensor, nn

from blr_analysis.learning_rule import optim

Steps = Iterator[tuple[Tensor, Tensor | None]]
MODEL = network()
SHAPES = {name: p.shape for name, p in MODEL.named_parameters()}
START = flat(MODEL.parameters())


class Run:
    """A training for the transcriptions: its noise, its losses, and the weights that it drew."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.drawn_weights: list[Tensor] = []  # one vector a draw

    def noise(self) -> Tensor:
        return torch.empty_like(START).normal_(generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=self.generator)

    def outputs(self, at: Tensor, t: int) -> Tensor:
        sizes = [shape.numel() for shape in SHAPES.values()]
        parts = zip(SHAPES.items(), at.split(sizes), strict=True)
        named = {n: part.view(shape) for (n, shape), part in parts}
        return torch.func.functional_call(MODEL, named, (batch(t)[0],))

    def loss(self, at: Tensor, t: int) -> Tensor:
        return nn.functional.cross_entropy(self.outputs(at, t), batch(t)[1])

    def gradient(self, at: Tensor, t: int) -> Tensor:
        return torch.func.grad(self.loss)(at, t)

    def each(self, at: Tensor, t: int) -> Tensor:
        """The gradient of every example's loss, ``[B, P]``."""
        losses = partial(nn.functional.cross_entropy, reduction="none")
        return torch.func.jacrev(lambda w: losses(self.outputs(w, t), batch(t)[1]))(at)

    def curved(self, at: Tensor, t: int) -> Tensor:
        """Rows R with RᵀR = Σ_i J_iᵀ (diag p_i − p_i p_iᵀ) J_i."""
        p = self.outputs(at, t).softmax(-1)
        hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        values, turn = torch.linalg.eigh(hessian)
        root = turn * values.clamp_min(0).sqrt()[:, None]
        return (root.mT @ torch.func.jacrev(self.outputs)(at, t)).flatten(0, 1)


def batch(t: int) -> tuple[Tensor, Tensor]:
    rows = slice(BATCH * t % N, BATCH * t % N + BATCH)
    return X[rows].double(), Y[rows]


# Diagonal Gaussians ------------------------------------------------------------------------------

LR = 0.05
ESS = 40.0
B1 = 0.9
B2 = 0.97
DECAY = 0.075
COMMON = {"lr": LR, "ess": ESS, "weight_decay": DECAY, "beta1": B1, "beta2": B2}


def vadam(run: Run, start: float = 0.0) -> Steps:
    """Khan et al., ICML 2018, Figure 1 (right); s that starts above 0 is not corrected."""
    m = START
    s = torch.full_like(START, start)
    u = torch.zeros_like(START)
    for t in count(1):
        g = run.gradient(m + run.noise() / torch.sqrt(ESS * (s + DECAY)), t)
        u = B1 * u + (1 - B1) * (g + DECAY * m)
        s = B2 * s + (1 - B2) * g * g
        s_hat = s if start else s / (1 - B2**t)
        m = m - LR * (u / (1 - B1**t)) / (torch.sqrt(s_hat) + DECAY)
        yield m, s


def vprop(run: Run) -> Steps:
    """Khan et al., 2017, scaled by ess."""
    m = START
    s = torch.zeros_like(START)
    for t in count(1):
        g = run.gradient(m + run.noise() / torch.sqrt(ESS * (s + DECAY)), t)
        s = B2 * s + (1 - B2) * g**2
        m = m - LR * (g + DECAY * m) / torch.sqrt(s + DECAY)
        yield m, s


def bsam(run: Run) -> Steps:
    """Möllenhoff & Khan, ICLR 2023, Algorithm 1 (right), with s = h + δ."""
    m = START
    s = torch.full_like(START, 1.0 + DECAY)
    u = torch.zeros_like(START)
    for t in count(1):
        g = run.gradient(m + run.noise() / torch.sqrt(ESS * s), t)
        u = B1 * u + (1 - B1) * (run.gradient(m + 0.3 * g / s, t) + DECAY * m)
        s = B2 * s + (1 - B2) * (torch.sqrt(s) * g.abs() + DECAY + 0.2)
        m = m - LR * u / s
        yield m, s - DECAY


def ivon(
    run: Run,
    approx: str = "price",
    debias: bool = True,
    rate: float = LR,
    clip: float = 9e9,
    draws: int = 2,
    by_gradient: bool = False,
) -> Steps:
    """Shen et al., ICML 2024, Algorithm 1; rate and clip in units of the first gradient."""
    m = START
    h = torch.full_like(START, 0.7)
    u = torch.zeros_like(START)
    for t in count(1):
        variance = 1 / (ESS * (h + DECAY))
        g_hat = torch.zeros_like(m)
        h_hat = torch.zeros_like(m)
        for _ in range(draws):
            noise = run.noise() * variance.sqrt()
            g = run.gradient(m + noise, t)
            g_hat += g / draws
            h_hat += (g * noise / variance if approx == "price" else ESS * g**2) / draws
        if by_gradient and t == 1:
            size = g_hat[g_hat != 0].square().mean().sqrt()
            rate = float(rate / size)
            clip = float(clip * size)
        u = B1 * u + (1 - B1) * g_hat
        gap = h - h_hat
        h = h - (1 - B2) * gap + (1 - B2) ** 2 * gap**2 / (2 * (h + DECAY))
        u_bar = u / (1 - B1**t) if debias else u
        m = m - rate * ((u_bar + DECAY * m) / (h + DECAY)).clamp(-clip, clip)
        yield m, h


def vogn(run: Run, noisy: bool) -> Steps:
    """Khan & Rue, Eqs. 44 to 46, with momentum."""
    m = START
    h = torch.full_like(START, 0.7)
    u = torch.zeros_like(START)
    for t in count(1):
        at = m + run.noise() / torch.sqrt(ESS * (h + DECAY)) if noisy else m
        gradients = run.each(at, t)
        h = B2 * h + (1 - B2) * gradients.square().mean(0)
        u = B1 * u + (1 - B1) * gradients.mean(0)
        m = m - LR * (u / (1 - B1**t) + DECAY * m) / (h + DECAY)
        yield m, h


def torchs(
    run: Run, kind: Any, look: Callable[[Tensor], Tensor] = torch.clone, **settings: Any
) -> Steps:
    """An optimizer of torch, with the gradients at ``look`` of its parameters."""
    theta = nn.Parameter(START.clone())
    optimizer = kind([theta], **settings)
    for t in count(1):
        theta.grad = run.gradient(look(theta.detach()), t)
        optimizer.step()
        yield theta.detach(), None


# Dropout: K&R's Eqs. 42 and 43, by units that are multiplied by z (Eq. 39) -----------------------

UNITS = flat([torch.full(shape, float(name == "2.weight")) for name, shape in SHAPES.items()]) > 0


def masked(run: Run) -> tuple[Tensor, Tensor]:
    """z and π₁ of every weight."""
    z = (run.uniform(1, 6) < 0.6).double()
    mask = torch.ones_like(START)
    mask[UNITS] = z.expand(3, 6).flatten()
    return mask, 1 - 0.4 * UNITS.double()


def dropped_sgd(run: Run) -> Steps:
    """S = I and no smoothing: ordinary dropout, with lr/π₁ for the weights that leave units."""
    m = START
    for t in count(1):
        z, keep_rate = masked(run)
        m = m - 0.1 * z * run.gradient(z * m, t) / keep_rate
        yield m, None


def dropped_adam(run: Run) -> Steps:
    """A diagonal S, its square root, momentum and bias corrections."""
    m = START
    h = torch.zeros_like(START)
    u = torch.zeros_like(START)
    for t in count(1):
        z, keep_rate = masked(run)
        g = z * run.gradient(z * m, t)
        u = 0.9 * u + 0.1 * g / keep_rate
        h = 0.99 * h + 0.01 * g**2 / keep_rate
        m = m - 0.01 * (u / (1 - 0.9**t)) / ((h / (1 - 0.99**t)).sqrt() + 1e-8)
        yield m, h


def dropped_ogn(run: Run) -> Steps:
    """Σ g_i², and a prior."""
    m = START
    h = torch.full_like(START, 0.5)
    for t in count(1):
        z, keep_rate = masked(run)
        gradients = z * run.each(z * m, t)
        h = 0.9 * h + 0.1 * gradients.square().mean(0) / keep_rate
        m = m - 0.05 * (gradients.mean(0) / keep_rate + 0.02 * m) / (h + 0.02)
        yield m, h


def dropped_ivon(run: Run) -> Steps:
    """θ = z ∘ (m + ε), ĥ = S ε ∘ z ∘ g / π₁ (App. G with its ε₁ kept)."""
    m = START
    h = torch.full_like(START, 0.7)
    order = torch.argsort(~UNITS, stable=True)
    for t in count(1):
        noise = torch.empty_like(m)  # drawn group by group
        noise[order[:18]] = torch.empty(18).double().normal_(generator=run.generator)
        noise[order[18:]] = torch.empty(33).double().normal_(generator=run.generator)
        noise = noise / torch.sqrt(ESS * (h + DECAY))
        z, keep_rate = masked(run)
        g = z * run.gradient(z * (m + noise), t) / keep_rate
        gap = h - ESS * (h + DECAY) * noise * g
        h = h - (1 - B2) * gap + (1 - B2) ** 2 * gap**2 / (2 * (h + DECAY))
        m = m - LR * (g + DECAY * m) / (h + DECAY)
        yield m, h


# Binary weights ----------------------------------------------------------------------------------


def signs(theta: Tensor) -> Tensor:
    return 2 * (theta >= 0).double() - 1


def bayesbinn(
    run: Run,
    lr: float,
    tau: float = 1.0,
    floor: float = 0.0,
    beta: float = 0.0,
    prior: float = 0.0,
    draws: int = 1,
) -> Steps:
    """Khan & Rue's Eq. 52 with N/M scaling."""
    lam = START
    average = torch.zeros_like(START)
    for t in count(1):
        total = torch.zeros_like(lam)
        for _ in range(draws):
            u = flat(run.uniform(*shape) for shape in SHAPES.values())
            w = torch.tanh((lam + 0.5 * torch.log(u / (1 - u))) / tau)
            slope = (1 - w**2 + floor) / (tau * (1 - torch.tanh(lam) ** 2 + floor))
            total += N * slope * run.gradient(w, t) / draws
        average = beta * average + (1 - beta) * (total + lam - prior)
        lam = lam - lr * average / (1 - beta**t)
        yield lam, None


# Covariances: dense S ----------------------------------------------------------------------------


def newton(run: Run) -> Steps:
    """Khan & Rue, 1.3.2: Hessians averaged."""
    m = START
    eye = torch.eye(len(START)).double()
    s = N * 2.0 * eye
    for t in count(1):
        hessian = torch.func.hessian(run.loss)(m, t)
        gradient = run.gradient(m, t)
        s = 0.5 * s + 0.5 * N * (hessian + eye)
        m = m - 0.5 * torch.linalg.solve(s, N * (gradient + m))
        yield m, s


def diagonal_newton(run: Run) -> Steps:
    """Khan & Rue, Eq. 36, with the prior's share."""
    m = START
    h = torch.ones_like(START)
    for t in count(1):
        hessian = torch.func.hessian(run.loss)(m, t)
        gradient = run.gradient(m, t)
        h = 0.8 * h + 0.2 * hessian.diagonal()
        m = m - 0.3 * (gradient + m) / (h + 1)
        yield m, h


def preconditioned(run: Run) -> Steps:
    """Khan & Rue, Eq. 35, with an L2 penalty."""
    scales = flat(1 + torch.arange(shape.numel()).double() / 10 for shape in SHAPES.values())
    m = START
    for t in count(1):
        m = m - 0.1 * (run.gradient(m, t) + 0.02 * m) / scales
        yield m, scales


def sam(run: Run) -> Steps:
    """Foret et al., ICLR 2021, Algorithm 1, over SGD with momentum."""
    m = START
    u = torch.zeros_like(START)
    for t in count(1):
        g = run.gradient(m, t)
        u = 0.9 * u + run.gradient(m + 0.3 * g / g.norm(), t) + 0.075 * m
        m = m - 0.05 * u
        yield m, None


def learned_dropout(run: Run) -> Steps:
    """Weights as in K&R 42, and λ of the Bernoulli by autograd through the relaxed units."""
    m = START
    lam = torch.tensor(0.6, dtype=torch.float64).logit()
    for t in count(1):
        u = run.uniform(1, 6)

        def loss(m: Tensor, lam: Tensor, u: Tensor = u, t: int = t) -> Tensor:
            z = torch.ones_like(START)
            z = z.masked_scatter(UNITS, ((u.logit() + lam) / 0.1).sigmoid().expand(3, 6))
            return run.loss(z * m, t)

        g, slope = torch.func.grad(loss, argnums=(0, 1))(m, lam)
        share = lam.sigmoid()
        m = m - 0.1 * g / torch.where(UNITS, share, 1.0)
        in_share = slope / (share * (1 - share))
        lam = lam - 0.05 * (N / 6 * in_share + lam - 0.0)
        yield m, None


def structured(run: Run, average: Callable[[int], Tensor]) -> Steps:
    """m ← m − lr (S + δ + Nγ)⁻¹ N (u + δ m / N), S + δ an average over the minibatches."""
    m = START
    u = torch.zeros_like(START)
    eye = torch.eye(len(START)).double()
    for t in count(1):
        s = average(t) + N * 0.05 * eye
        u = 0.9 * u + 0.1 * run.gradient(run.drawn_weights[-1], t)
        step = N * (u / (1 - 0.9**t) + 0.05 * m)
        m = m - 0.1 * torch.linalg.solve(s + N * 0.02 * eye, step)
        yield m, s


def low_rank(run: Run, rows_of: str) -> Steps:
    """Exact at full memory: the running average of outer products."""
    s = N * torch.eye(len(START)).double()

    def average(t: int) -> Tensor:
        nonlocal s
        rows = getattr(run, rows_of)(run.drawn_weights[-1], t)
        s = 0.8 * s + 0.2 * N / BATCH * rows.mT @ rows
        return s

    return structured(run, average)


def kronecker(run: Run) -> Steps:
    """A ⊗ G, from single examples' inputs and output gradients at the drawn weights."""
    moments: list[Tensor] = []

    def average(t: int) -> Tensor:
        nonlocal moments
        x, y = batch(t)
        parts = run.drawn_weights[-1].split([24, 6, 18, 3])
        hidden = torch.tanh(x @ parts[0].view(6, 4).T + parts[1])
        logits = hidden @ parts[2].view(3, 6).T + parts[3]
        error = torch.softmax(logits, 1) - nn.functional.one_hot(y, 3)
        inner = error @ parts[2].view(3, 6) * (1 - hidden**2)
        ones = torch.ones(BATCH, 1).double()
        new = [torch.cat([a, ones], 1) for a in (x, hidden)] + [inner, error]
        new = [a.mT @ a / BATCH for a in new]
        weight = 0.2 / (1 - 0.8**t)
        moments = [o + weight * (n - o) for o, n in zip(moments or new, new, strict=True)]
        blocks = []
        for a, g in zip(moments[:2], moments[2:], strict=True):
            outs = len(g)
            ins = len(a) - 1
            order = [o * (ins + 1) + i for o in range(outs) for i in range(ins)]
            order += [o * (ins + 1) + ins for o in range(outs)]
            blocks.append(N * torch.kron(g, a)[order][:, order])
        return torch.block_diag(*blocks)

    return structured(run, average)


# Optimizers, the steps of their papers, and the number of draws a step ---------------------------

H7 = {**COMMON, "hess_init": 0.7}
OGN = {"lr": 0.05, "beta1": 0.0, "beta2": 0.9, "weight_decay": 0.02, "hess_init": 0.5}
SMALL = {"eps": 1e-3, "weight_decay": 0.01}
WAYS = [
    (approx, debias, rescale)
    for approx in ("price", "gradsq")
    for debias in (True, False)
    for rescale in (True, False, "gradient")
]
STE = partial(of, optim.STE, lr=0.02)
behind_a_sign = partial(torchs, look=signs, lr=0.02)
T = torch.optim
# row of Table 1, its settings, torch's optimizer, settings that have another name there
TORCH: list[tuple[str, dict[str, Any], Any, dict[str, Any]]] = [
    ("gradient descent", {"lr": 0.1}, T.SGD, {}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.01}, T.SGD, {}),
    ("SGD with momentum", {"lr": 0.1, "beta1": 0.8}, T.SGD, {"momentum": 0.8}),
    (
        "AdaGrad",
        {"lr": 0.05, "hess_init": 0.1, **SMALL},
        T.Adagrad,
        {"initial_accumulator_value": 0.1},
    ),
    ("AdaDelta", {"lr": 1.0, "beta2": 0.9, **SMALL}, T.Adadelta, {"rho": 0.9}),
    ("RMSprop", {"lr": 0.01, "beta2": 0.99, **SMALL}, T.RMSprop, {"alpha": 0.99}),
    ("Adam", {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, **SMALL}, T.Adam, {"betas": (0.8, 0.95)}),
    ("AdamW", {"lr": 0.01, **SMALL}, T.AdamW, {}),
]
Entry = tuple[Callable[..., Any], Callable[[Run], Steps], int]


def beside_torch(name: str, settings: dict[str, Any], kind: Any, torchs_own: dict) -> Entry:
    """A row of Table 1 and torch's optimizer with the same settings."""
    shared = {k: settings[k] for k in ("lr", "weight_decay", "eps") if k in settings}
    make = of(optim.RowOptimizer, row=name, **settings)
    return make, partial(torchs, kind=kind, **torchs_own, **shared), 1


def ivon_of(approx: str, debias: bool, rescale: bool | str) -> Entry:
    """IVON with two draws a step."""
    make = of(
        optim.IVON,
        **H7,
        hess_approx=approx,
        debias=debias,
        rescale_lr=rescale,
        clip_radius=0.4,
    )
    rate = LR * (0.7 + DECAY) if rescale else LR
    settings = {"approx": approx, "debias": debias, "clip": 0.4, "rate": rate}
    return make, partial(ivon, **settings, by_gradient=rescale == "gradient"), 2


def bayesbinn_of(
    lr: float, tau: float, floor: float, beta: float, prior: float, draws: int
) -> Entry:
    make = of(optim.BayesBiNN, ess=N, lr=lr, temperature=tau, floor=floor, beta1=beta, prior=prior)
    settings = {"lr": lr, "tau": tau, "floor": floor, "beta": beta, "prior": prior}
    return make, partial(bayesbinn, **settings, draws=draws), draws


STEPS: dict[str, Entry] = {
    **{f"torch's {name}": beside_torch(name, *settings) for name, *settings in TORCH},
    "Vadam": (of(optim.Vadam, **COMMON), vadam, 1),
    "Vadam, s above 0": (of(optim.Vadam, **COMMON, hess_init=0.4), partial(vadam, start=0.4), 1),
    "Vprop": (of(optim.Vprop, **COMMON), vprop, 1),
    "bSAM": (of(optim.BSAM, **COMMON, radius=0.3, damping=0.2), bsam, 1),
    "VOGN": (partial(row, name="VOGN", **H7), partial(vogn, noisy=True), 1),
    "OGN": (partial(row, name="OGN", **H7), partial(vogn, noisy=False), 1),
    "IVON's row": (of(optim.RowOptimizer, row="IVON", **H7), partial(ivon, draws=3), 3),
    **{
        f"IVON, {approx}, {debias}, {rescale}": ivon_of(approx, debias, rescale)
        for approx, debias, rescale in WAYS
    },
    "dropout": (partial(dropout, row="SGD", lr=0.1), dropped_sgd, 1),
    "dropout, Adam": (partial(dropout, row="Adam", lr=0.01, beta2=0.99), dropped_adam, 1),
    "dropout, OGN": (partial(dropout, row="OGN", **OGN), dropped_ogn, 1),
    "dropout, IVON": (partial(dropout, row="IVON", **{**H7, "beta1": 0.0}), dropped_ivon, 1),
    "BayesBiNN": bayesbinn_of(lr=0.002, tau=1.0, floor=0.0, beta=0.0, prior=0.0, draws=1),
    "BayesBiNN, momentum": bayesbinn_of(lr=0.002, tau=0.7, floor=0.0, beta=0.9, prior=0.0, draws=1),
    "BayesBiNN, prior": bayesbinn_of(lr=0.002, tau=1.0, floor=0.0, beta=0.5, prior=0.3, draws=1),
    "BayesBiNN, floor": bayesbinn_of(lr=0.005, tau=1.0, floor=1e-3, beta=0.0, prior=0.0, draws=3),
    "STE": (STE(), partial(behind_a_sign, kind=T.SGD), 1),
    "STE, momentum": (
        STE(row="SGD with momentum"),
        partial(behind_a_sign, kind=T.SGD, momentum=0.9),
        1,
    ),
    "STE, Adam": (STE(row="Adam"), partial(behind_a_sign, kind=T.Adam), 1),
    "Newton": (of(optim.Newton, lr=0.5, ess=N, weight_decay=1.0), newton, 1),
    "DiagonalNewton": (
        of(optim.DiagonalNewton, lr=0.3, ess=N, weight_decay=1.0, beta2=0.8),
        diagonal_newton,
        1,
    ),
    "PreconditionedSGD": (make_preconditioned, preconditioned, 1),
    "SAM": (of(optim.SAM, lr=0.05, radius=0.3, weight_decay=0.075), sam, 1),
    "LearnedDropout": (
        partial(dropout, row="SGD", lr=0.1, kind=optim.LearnedDropout, keep_lr=0.05),
        learned_dropout,
        1,
    ),
    "SLANG": (partial(whole(optim.SLANG), rank=50), partial(low_rank, rows_of="each"), 1),
    "VOGGN": (partial(whole(optim.VOGGN), rank=50), partial(low_rank, rows_of="curved"), 1),
    "OGGN": (partial(whole(optim.OGGN), rank=50), partial(low_rank, rows_of="curved"), 1),
    "NoisyKFAC": (whole(optim.NoisyKFAC), kronecker, 1),
}


def learned(model: nn.Module, optimizer: Any) -> Tensor:
    """The precision or Hessian, dense where it is not diagonal."""
    states = [optimizer.state[p] for p in model.parameters()]
    if hasattr(optimizer, "form"):
        like = {n: torch.empty(shape) for n, shape in optimizer.form.shapes.items()}
        eye = torch.eye(len(START)).double()
        return rows_of(optimizer.form.times(unflatten(eye, like)))
    return states[0]["precision"] if len(states[-1]) == 0 else flat(s["hess"] for s in states)
