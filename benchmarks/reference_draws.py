"""Long NUTS runs that the tests of non-conjugate inference are held against, kept as a file.

    python -m venv .venv-peers/numpyro
    .venv-peers/numpyro/bin/pip install numpyro==0.22.0 scikit-learn
    .venv-peers/numpyro/bin/python benchmarks/reference_draws.py

writes ``tests/learning_rule/inference/nuts.npz`` (two minutes on one core).

Eight chains of 10,000 draws after 1,000 of warm-up, in float64, for each of

* ``logistic``: breast_cancer, six columns and an intercept, θ ~ N(0, 1/δ);
* ``poisson``: diabetes' progression in units of 25 (counts), four columns and an intercept;
* ``iris``: a Gaussian process under a logistic link, two kinds of iris in alternation halved into
  examples and held-out points, squared exponential kernel.

The file holds, under ``<problem>/<name>``: the mean and covariance of θ (of f at the examples for
the process), the Monte Carlo standard error of each mean and variance, the largest R-hat, the
smallest effective sample size, the constants of the problem, and a thinned set of float32 draws;
for the process the mean probability of each held-out point as well.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris

numpyro.enable_x64()

CHAINS = 8
DRAWS = 10_000
WARMUP = 1_000
KEPT = 1_000
OUT = Path(__file__).parents[1] / "tests/learning_rule/inference/nuts.npz"
COLUMNS = {"logistic": [0, 1, 4, 6, 8, 9], "poisson": [2, 3, 7, 8]}
PRIOR_PRECISION = 1.0
LENGTHSCALE = 1.5
VARIANCE = 4.0


def design(x, columns):
    """An intercept and these columns, standardised."""
    x = np.asarray(x, dtype=np.float64)[:, columns]
    x = (x - x.mean(0)) / x.std(0)
    return np.concatenate([np.ones((len(x), 1)), x], 1)


def regression(x, y, likelihood):
    def model():
        scale = PRIOR_PRECISION**-0.5
        theta = numpyro.sample("theta", dist.Normal(0, scale).expand([x.shape[1]]).to_event(1))
        numpyro.sample("y", likelihood(x @ theta), obs=y)

    return model


def process(x, y):
    gaps = ((x[:, None] - x[None]) ** 2).sum(-1)
    kernel = VARIANCE * np.exp(-0.5 * gaps / LENGTHSCALE**2)
    values, vectors = np.linalg.eigh(kernel)
    kept = values > 1e-13 * values[-1]
    root = jnp.asarray(vectors[:, kept] * np.sqrt(values[kept]))

    def model():
        v = numpyro.sample("v", dist.Normal(0, 1).expand([root.shape[1]]).to_event(1))
        f = numpyro.deterministic("f", root @ v)
        numpyro.sample("y", dist.Bernoulli(logits=f[: len(y)]), obs=y)

    return model


def draw(model, site, seed):
    mcmc = MCMC(
        NUTS(model, target_accept_prob=0.9),
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=CHAINS,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.PRNGKey(seed))
    return np.asarray(mcmc.get_samples(group_by_chain=True)[site])


def statistics(chains):
    """Moments of ``[chains, draws, P]``, with their Monte Carlo errors."""
    flat = chains.reshape(-1, chains.shape[-1])
    mean = flat.mean(0)
    squares = (chains - mean) ** 2
    ess = effective_sample_size(chains)
    ess_squares = effective_sample_size(squares)
    return {
        "mean": mean,
        "covariance": np.cov(flat.T).astype(np.float32 if flat.shape[1] > 20 else np.float64),
        "mean_error": flat.std(0) / np.sqrt(ess),
        "variance_error": squares.reshape(flat.shape).std(0) / np.sqrt(ess_squares),
        "r_hat": np.max(split_gelman_rubin(chains)),
        "ess": np.min(ess),
        "chains_and_draws": np.array(chains.shape[:2]),
    }


def main():
    kept = {}

    def keep(problem, **entries):
        kept.update({f"{problem}/{name}": value for name, value in entries.items()})
        for name in ("r_hat", "ess"):
            print(problem, name, float(entries[name]), flush=True)

    data = {"logistic": load_breast_cancer(), "poisson": load_diabetes()}
    targets = {"logistic": data["logistic"].target, "poisson": data["poisson"].target // 25}
    kinds = {
        "logistic": lambda f: dist.Bernoulli(logits=f),
        "poisson": lambda f: dist.Poisson(jnp.exp(f)),
    }
    for seed, (problem, columns) in enumerate(COLUMNS.items()):
        x = design(data[problem].data, columns)
        y = targets[problem].astype(np.float64)
        chains = draw(regression(x, y, kinds[problem]), "theta", seed)
        flat = chains.reshape(-1, chains.shape[-1])
        keep(
            problem,
            columns=np.array(columns),
            prior_precision=np.array(PRIOR_PRECISION),
            draws=flat[:: len(flat) // KEPT].astype(np.float32),
            **statistics(chains),
        )

    x, y = (np.asarray(part) for part in load_iris(return_X_y=True))
    x = x[y > 0]
    y = (y[y > 0] == 2).astype(np.float64)
    x = (x - x.mean(0)) / x.std(0)
    train = slice(0, None, 2)
    test = slice(1, None, 2)
    ordered = np.concatenate([x[train], x[test]])
    chains = draw(process(ordered, y[train]), "f", 2)
    n = len(y[train])
    held_out = 1 / (1 + np.exp(-chains[..., n:]))
    told = statistics(held_out)
    keep(
        "iris",
        lengthscale=np.array(LENGTHSCALE),
        variance=np.array(VARIANCE),
        probability=told["mean"],
        probability_error=told["mean_error"],
        **statistics(chains[..., :n]),
    )
    np.savez_compressed(OUT, **kept)
    print(OUT, OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
