"""The rows of Table 1 that fit probabilistic models: ``Model(prior…).fit(data) -> Fitted``.

Each part needs only the parts above it.

1. *Fits.* :mod:`.fitted`: the posterior is a sum of sites, one per example, so that a subtraction
   removes an example.
2. *One step, ρ = 1* (K&R 5.1). :mod:`.conjugate`: which likelihoods are conjugate to which family,
   and why one step is Bayes' rule. :mod:`.kalman`: Bayes' rule along a chain of states.
   :mod:`.online`: one example after another, exponential weights and natural gradients.
3. *Hidden classes* (K&R 5.2, 5.3). :mod:`.em`: the parameters are at their mode.
   :mod:`.factor_analysis`: EM with hidden numbers. :mod:`.messages`: parameters are averaged over;
   mixtures, chains of classes, and other models with local and global parameters.
   :mod:`.lda`: the topics of documents, on minibatches with ρ < 1.
4. *Likelihoods that are not conjugate* (K&R 5.3, 5.4). :mod:`.scalar_likelihoods`: integrals over
   one Gaussian number. :mod:`.latent_problem`: examples and their sites. :mod:`.ascent`: steps of
   the rule on sites. :mod:`.cvi`: regression with a link, prediction, cavities. :mod:`.gp`:
   Gaussian processes. :mod:`.mean_field`: one node after another. :mod:`.skew_normal`: asymmetric
   posteriors of one number.
5. *Any function* (K&R 1.3, 3.2). :mod:`.functions`: Newton's method with an expectation; several
   minima at once.
"""

from __future__ import annotations

from blr_analysis.learning_rule.inference.conjugate import (
    Conjugate,
    Factor,
    bernoulli,
    categorical,
    gaussian,
    linear,
    poisson,
)
from blr_analysis.learning_rule.inference.cvi import GeneralizedLinear, LatentFitted
from blr_analysis.learning_rule.inference.em import GaussianMixtureEM
from blr_analysis.learning_rule.inference.factor_analysis import FactorAnalysis
from blr_analysis.learning_rule.inference.fitted import Fitted, NotConverged
from blr_analysis.learning_rule.inference.functions import (
    MultimodalOptimisation,
    VariationalNewton,
    minima,
)
from blr_analysis.learning_rule.inference.gp import GaussianProcess, rbf
from blr_analysis.learning_rule.inference.kalman import FittedStates, StateSpace
from blr_analysis.learning_rule.inference.lda import LDA, FittedTopics
from blr_analysis.learning_rule.inference.mean_field import MeanFieldRegression
from blr_analysis.learning_rule.inference.messages import (
    BayesianGaussianMixture,
    HiddenMarkov,
    MessagePassing,
)
from blr_analysis.learning_rule.inference.online import (
    OnlineNewton,
    experts,
    likelihood_step,
)
from blr_analysis.learning_rule.inference.skew_normal import (
    SkewNormal,
    fit_skew_normal,
)

__all__ = [
    "LDA",
    "BayesianGaussianMixture",
    "Conjugate",
    "Factor",
    "FactorAnalysis",
    "Fitted",
    "FittedStates",
    "FittedTopics",
    "GaussianMixtureEM",
    "GaussianProcess",
    "GeneralizedLinear",
    "HiddenMarkov",
    "LatentFitted",
    "MeanFieldRegression",
    "MessagePassing",
    "MultimodalOptimisation",
    "NotConverged",
    "OnlineNewton",
    "SkewNormal",
    "StateSpace",
    "VariationalNewton",
    "bernoulli",
    "categorical",
    "experts",
    "fit_skew_normal",
    "gaussian",
    "likelihood_step",
    "linear",
    "minima",
    "poisson",
    "rbf",
]
