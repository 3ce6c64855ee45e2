"""Table 1: every algorithm as a choice of family, look, curvature and named departures.

Khan & Rue, "The Bayesian Learning Rule", JMLR 2023, Table 1, with Vprop and Vadam (Khan et al.,
2017 and ICML 2018), IVON (Shen et al., ICML 2024) and bSAM (Möllenhoff & Khan, ICLR 2023).
:class:`~blr_analysis.learning_rule.optim.RowOptimizer` runs the rows for which
:func:`runs_elementwise` is true, as they stand here; ``runs`` names the code of every row.

    >>> adam = row("Adam")
    >>> adam.look.name, adam.curvature.name
    ('at the mean (delta method)', 'squared minibatch gradient')
    >>> adam.move
    Move(power=0.5, momentum='average', debias=True, debias_hess=True, damping='eps',
    decay='gradient', positive=False, entropy=True,
    memory='average', rescaled=False)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.expectations import (
    AT_ADVERSARY,
    AT_DROPPED_OUT_MEAN,
    AT_MEAN,
    AT_MODE_OF_PARAMETERS,
    AT_NEIGHBOUR,
    AT_RELAXED_SAMPLES,
    AT_SAMPLES,
    AT_SIGN,
    BY_DRAWS,
    BY_NODES,
    EXACT,
    EXACT_OR_GAUSS_NEWTON,
    EXACTLY,
    FIXED_PRECONDITIONER,
    GAUSS_NEWTON,
    GENERALISED,
    NO_CURVATURE,
    PRICE,
    ROOT_MAGNITUDE,
    SQUARED_GRADIENT,
    HessianEstimate,
    Look,
)
from blr_analysis.learning_rule.moves import Move
from blr_analysis.views import Tabular

LEARNING_RULE = "blr_analysis.learning_rule"
OPTIM = "blr_analysis.learning_rule.optim"
INFERENCE = "blr_analysis.learning_rule.inference"
POSTERIOR = "blr_analysis.posterior"

FIXED = "Gaussian, fixed covariance"
DIAGONAL = "Gaussian, diagonal covariance"
FULL = "Gaussian"
ANY = "exponential family"
MEAN_FIELD = "exponential family, mean field"
SPIKED = "mixture of Gaussians (spike and slab)"

NOT_LEARNED = ""
OPTIMIZER = "Posterior.from_optimizer"
OWN_POSTERIOR = "optimizer.posterior()"
LAPLACE = "fit_laplace"
SITES = "sites of the fitted model"


@dataclass(frozen=True)
class Row:
    """One algorithm.

    Attributes:
        algorithm: the name of the algorithm.
        family: the family of the posterior.
        look: the weights at which the loss is evaluated.
        curvature: the estimate that takes the place of the Hessian.
        move: how the step departs from the rule.
        approximations: all of that in the words of Table 1.
        section: the section of Khan & Rue, or another source.
        analysable: how sensitivity, leave-one-out and merging get the posterior; empty where the
            algorithm learns none.
        runs: the module that runs the algorithm.
    """

    algorithm: str
    family: str
    look: Look
    curvature: HessianEstimate
    move: Move
    approximations: str
    section: str
    analysable: str
    runs: str


RULE = Move()
L2 = Move(decay="gradient")
HEAVY_BALL = Move(momentum="heavy ball", decay="gradient")
NATURAL_MOMENTUM = Move(momentum="natural")
PRECONDITIONED = Move(damping="eps", decay="gradient")
ROOT = Move(power=0.5, damping="eps", decay="gradient")
ADAGRAD = replace(ROOT, memory="sum")
ADADELTA = replace(ROOT, damping="eps inside", rescaled=True)
SMOOTH = Move(momentum="average", debias=True)
CORRECTED = replace(SMOOTH, power=0.5, debias_hess=True)
ADAM = replace(CORRECTED, damping="eps", decay="gradient")
ADAMW = replace(CORRECTED, damping="eps", decay="decoupled")
VADAM = replace(CORRECTED, damping="after root", decay="momentum")
RETRACTED = replace(SMOOTH, positive=True)
BSAM = Move(momentum="average", decay="momentum")

DELTA = "delta method"
STOCHASTIC = "delta method, stochastic approximation"
ROOTED = f"{STOCHASTIC}, Hessian approximation, square-root scaling, slow-moving scale vectors"
ADAPTED = f"{ROOTED}, momentum, bias correction"
VARIATIONAL = f"{OPTIM}.variational"
ROW_OPTIMIZER = f"{OPTIM}.row_optimizer"
BINARY = f"{OPTIM}.binary"

# fmt: off
_ROWS = (
    Row("mirror descent", ANY, EXACTLY, EXACT, RULE,
        "none: the rule, in the expectation parameters",
        "2.2, Eq. 22", NOT_LEARNED, f"{LEARNING_RULE}.mirror"),
    Row("natural momentum", ANY, EXACTLY, EXACT, NATURAL_MOMENTUM,
        "none: mirror descent with a momentum of its own geometry",
        "App. F, Eq. 80", NOT_LEARNED, f"{LEARNING_RULE}.moves"),
    Row("any family, any loss", ANY, AT_SAMPLES, BY_DRAWS, RULE,
        "stochastic approximation of the expectation by draws",
        "3", NOT_LEARNED, f"{LEARNING_RULE}.by_samples"),
    Row("gradient descent", FIXED, AT_MEAN, NO_CURVATURE, L2, DELTA,
        "1.3.1", LAPLACE, ROW_OPTIMIZER),
    Row("Newton", FULL, AT_MEAN, EXACT, RULE, DELTA,
        "1.3.2", LAPLACE, f"{OPTIM}.newton"),
    Row("ridge regression", FULL, EXACTLY, EXACT, RULE, "none, learning rate 1",
        "1.3.3", SITES, f"{INFERENCE}.conjugate"),
    Row("multimodal optimisation", "mixture of Gaussians", AT_SAMPLES, EXACT, Move(positive=True),
        f"none of the expectation ({DELTA} by choice); retraction keeps the precisions positive",
        "3.2", NOT_LEARNED, f"{INFERENCE}.functions"),
    Row("SGD", FIXED, AT_MEAN, NO_CURVATURE, L2, STOCHASTIC,
        "4.1", LAPLACE, ROW_OPTIMIZER),
    Row("preconditioned SGD", FIXED, AT_MEAN, FIXED_PRECONDITIONER, PRECONDITIONED,
        f"{STOCHASTIC}, a fixed covariance that is no multiple of I",
        "4.1, Eq. 35", LAPLACE, f"{OPTIM}.preconditioned"),
    Row("SGD with momentum", FIXED, AT_MEAN, NO_CURVATURE, HEAVY_BALL,
        f"{STOCHASTIC}, natural momentum", "4.1, App. F", LAPLACE, ROW_OPTIMIZER),
    Row("diagonal online Newton", DIAGONAL, AT_MEAN, EXACT, RULE, STOCHASTIC,
        "4.2, Eqs. 36, 37 and 44", OPTIMIZER, f"{OPTIM}.diagonal_newton"),
    Row("AdaGrad", DIAGONAL, AT_MEAN, SQUARED_GRADIENT, ADAGRAD,
        f"{STOCHASTIC}, Hessian approximation, square-root scaling, no forgetting",
        "Duchi et al. 2011", OPTIMIZER, ROW_OPTIMIZER),
    Row("AdaDelta", DIAGONAL, AT_MEAN, SQUARED_GRADIENT, ADADELTA,
        f"{ROOTED}, rescaled steps", "4.2; Zeiler 2012", OPTIMIZER, ROW_OPTIMIZER),
    Row("RMSprop", DIAGONAL, AT_MEAN, SQUARED_GRADIENT, ROOT, ROOTED,
        "4.2", OPTIMIZER, ROW_OPTIMIZER),
    Row("Adam", DIAGONAL, AT_MEAN, SQUARED_GRADIENT, ADAM, ADAPTED,
        "4.2, App. F", OPTIMIZER, ROW_OPTIMIZER),
    Row("AdamW", DIAGONAL, AT_MEAN, SQUARED_GRADIENT, ADAMW, f"{ADAPTED}, decoupled decay",
        "4.2, App. F", OPTIMIZER, ROW_OPTIMIZER),
    Row("dropout", SPIKED, AT_DROPPED_OUT_MEAN, NO_CURVATURE, L2,
        f"{STOCHASTIC}, responsibility approximation", "4.3", LAPLACE, f"{OPTIM}.dropout"),
    Row("dropout, rate learned", f"{SPIKED} × Bernoulli", AT_DROPPED_OUT_MEAN, NO_CURVATURE, L2,
        f"{STOCHASTIC}, responsibility approximation, relaxed units",
        "4.3; Gal et al. 2017", LAPLACE, f"{OPTIM}.learned_dropout"),
    Row("OGN", DIAGONAL, AT_MEAN, GAUSS_NEWTON, SMOOTH,
        f"{STOCHASTIC}, Gauss–Newton, no square-root scaling", "4.4", OPTIMIZER, VARIATIONAL),
    Row("VOGN", DIAGONAL, AT_SAMPLES, GAUSS_NEWTON, SMOOTH,
        "stochastic approximation, Gauss–Newton (OGN without the delta method)",
        "4.4", OPTIMIZER, VARIATIONAL),
    Row("Vprop", DIAGONAL, AT_SAMPLES, SQUARED_GRADIENT, Move(power=0.5),
        "stochastic and Hessian approximation, square-root scaling",
        "Khan et al. 2017", OPTIMIZER, VARIATIONAL),
    Row("Vadam", DIAGONAL, AT_SAMPLES, SQUARED_GRADIENT, VADAM,
        "Vprop with momentum and bias correction", "Khan et al. 2018", OPTIMIZER, VARIATIONAL),
    Row("IVON", DIAGONAL, AT_SAMPLES, PRICE, RETRACTED,
        "stochastic approximation, momentum, retraction keeps the precision positive",
        "Shen et al. 2024", OPTIMIZER, f"{OPTIM}.ivon"),
    Row("IVON, mixture", "mixture of Gaussians, diagonal covariance", AT_SAMPLES, PRICE, RETRACTED,
        "stochastic approximation, momentum, retraction keeps the precisions positive",
        "3.2", OPTIMIZER, f"{OPTIM}.mixture"),
    Row("noisy K-FAC", "Gaussian, Kronecker factors by layer", AT_SAMPLES, GAUSS_NEWTON, SMOOTH,
        "stochastic approximation, Gauss–Newton, independent inputs and errors of a layer",
        "Zhang et al. 2018", OWN_POSTERIOR, f"{OPTIM}.structured"),
    Row("SLANG", "Gaussian, low rank plus diagonal", AT_SAMPLES, GAUSS_NEWTON, SMOOTH,
        "stochastic approximation, Gauss–Newton, leading directions and the rest's diagonal",
        "Mishkin et al. 2018", OWN_POSTERIOR, f"{OPTIM}.structured"),
    Row("OGGN", "Gaussian, low rank plus diagonal", AT_MEAN, GENERALISED, SMOOTH,
        f"{STOCHASTIC}, generalised Gauss–Newton, leading directions and the rest's diagonal",
        "4.4; Khan et al. 2019", OWN_POSTERIOR, f"{OPTIM}.structured"),
    Row("VOGGN", "Gaussian, low rank plus diagonal", AT_SAMPLES, GENERALISED, SMOOTH,
        "stochastic approximation, generalised Gauss–Newton (OGGN without the delta method)",
        "4.4; Khan et al. 2019", OWN_POSTERIOR, f"{OPTIM}.structured"),
    Row("SAM", FIXED, AT_NEIGHBOUR, NO_CURVATURE, HEAVY_BALL,
        f"{STOCHASTIC}, expected loss relaxed, no width",
        "Foret et al. 2021", LAPLACE, f"{OPTIM}.sam"),
    Row("bSAM", DIAGONAL, AT_ADVERSARY, ROOT_MAGNITUDE, BSAM,
        "stochastic approximation, expected loss relaxed to its Fenchel biconjugate",
        "Möllenhoff & Khan 2023", OPTIMIZER, f"{OPTIM}.bsam"),
    Row("STE", "Bernoulli", AT_SIGN, NO_CURVATURE, Move(entropy=False),
        f"{STOCHASTIC}, no entropy: the latent weights do not decay",
        "4.5", NOT_LEARNED, BINARY),
    Row("BayesBiNN", "Bernoulli", AT_RELAXED_SAMPLES, NO_CURVATURE, RULE,
        "stochastic approximation (STE without the delta method)",
        "4.5", NOT_LEARNED, BINARY),
    Row("conjugate Bayes", "exponential family", EXACTLY, EXACT, RULE, "none, learning rate 1",
        "5.1", SITES, f"{INFERENCE}.conjugate"),
    Row("Kalman filter", FULL, EXACTLY, EXACT, RULE, "none, learning rate 1",
        "5.1", SITES, f"{INFERENCE}.kalman"),
    Row("Laplace", FULL, AT_MEAN, EXACT_OR_GAUSS_NEWTON, RULE, DELTA,
        "4.4", LAPLACE, f"{POSTERIOR}.laplace"),
    Row("EM", "exponential family × Gaussian", AT_MODE_OF_PARAMETERS, EXACT, RULE,
        "delta method for the parameters, coordinate-wise, learning rate 1",
        "5.2", SITES, f"{INFERENCE}.em"),
    Row("online EM", "exponential family × Gaussian", AT_MODE_OF_PARAMETERS, EXACT, RULE,
        "delta method for the parameters, stochastic approximation, local learning rate 1",
        "5.2; Cappé & Moulines 2009", SITES, f"{INFERENCE}.em"),
    Row("SVI", MEAN_FIELD, EXACTLY, EXACT, RULE,
        "stochastic approximation, local learning rate 1",
        "5.3", SITES, f"{INFERENCE}.lda"),
    Row("VMP", MEAN_FIELD, EXACTLY, EXACT, RULE, "learning rate 1 for all nodes",
        "5.3", SITES, f"{INFERENCE}.messages"),
    Row("non-conjugate VMP", MEAN_FIELD, BY_NODES, EXACT, RULE, "learning rate 1 for all nodes",
        "5.3", SITES, f"{INFERENCE}.mean_field"),
    Row("non-conjugate VI", "exponential family, or a mixture of them (skew normal)", BY_NODES,
        EXACT, RULE, "none",
        "5.4", SITES, f"{INFERENCE}.cvi"),
    Row("factor analysis, PPCA", FULL, AT_MODE_OF_PARAMETERS, EXACT, RULE,
        "delta method for the parameters, coordinate-wise, learning rate 1",
        "5.2; Rubin & Thayer 1982", SITES, f"{INFERENCE}.factor_analysis"),
    Row("message passing", MEAN_FIELD, EXACTLY, EXACT, RULE,
        "learning rate 1 for local nodes; 1 for global ones, or stochastic",
        "5.4, Eqs. 58–60", SITES, f"{INFERENCE}.messages"),
    Row("hidden Markov model", MEAN_FIELD, EXACTLY, EXACT, RULE,
        "learning rate 1 for all nodes, chains as wholes",
        "5.4; Beal 2003", SITES, f"{INFERENCE}.messages"),
    Row("sparse Gaussian process", FULL, BY_NODES, EXACT, RULE,
        "inducing inputs, stochastic on minibatches",
        "5.4; Titsias 2009", SITES, f"{INFERENCE}.gp"),
    Row("exponential weights", "categorical", EXACTLY, EXACT, RULE,
        "none, learning rate 1 for the loss times η",
        "5.4", SITES, f"{INFERENCE}.online"),
    Row("online Newton", FULL, AT_MEAN, GAUSS_NEWTON, RULE,
        f"{DELTA}, one example at a time, relative to the last posterior",
        "5.4", SITES, f"{INFERENCE}.online"),
    Row("natural-gradient MLE", "the model of the data", EXACTLY, EXACT,
        Move(entropy=False), "no entropy: maximum likelihood",
        "2, Eq. 19", NOT_LEARNED, f"{INFERENCE}.online"),
)
# fmt: on

ROWS: dict[str, Row] = {row.algorithm: row for row in _ROWS}


def row(algorithm: str) -> Row:
    """The row of this name, in capitals or small letters.

    Raises:
        InputError: no row has this name.

    >>> row("vogn").section
    '4.4'
    """
    lowercase = str(algorithm).lower()
    for name in ROWS:
        if name.lower() == lowercase:
            return ROWS[name]
    raise InputError(f"no row is called {algorithm!r}; there are {', '.join(ROWS)}")


@dataclass(frozen=True)
class Table1(Tabular):
    """All rows; :attr:`table` makes a DataFrame of them."""

    rows: tuple[Row, ...] = _ROWS


def table1() -> Any:
    """Table 1 as a DataFrame, one row per algorithm.

    The columns are algorithm, family, loss (where it is evaluated), hessian, departures,
    approximations, section, analysable, through (the call that returns the posterior) and runs; see
    :func:`blr_analysis.tables.rule_table`.

    >>> table1().set_index("algorithm").loc["VOGN", "hessian"]
    'Gauss–Newton: sum of squared gradients'
    """
    return Table1().table


def runs_elementwise(row: Row) -> bool:
    """Whether :class:`~blr_analysis.learning_rule.optim.RowOptimizer` can run a row as it is."""
    is_gaussian = row.family in (FIXED, DIAGONAL)
    has_estimate = row.curvature.estimate is not None and bool(row.curvature.method)
    needs_no_estimate = row.curvature is NO_CURVATURE
    return is_gaussian and (has_estimate or needs_no_estimate)
