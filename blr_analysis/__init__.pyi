"""The names of :mod:`blr_analysis` and where they live: one line each, loaded when first used."""

from . import (
    errors as errors,
    likelihoods as likelihoods,
)
from .checkpoints import (
    Checkpoints as Checkpoints,
)
from .errors import (
    BLRError as BLRError,
)
from .learning_rule.optim import (
    IVON as IVON,
    VOGN as VOGN,
)
from .learning_rule.table import (
    table1 as table1,
)
from .likelihoods import (
    Bernoulli as Bernoulli,
    Categorical as Categorical,
    CausalLM as CausalLM,
    Gaussian as Gaussian,
    Likelihood as Likelihood,
    Poisson as Poisson,
    TokenCategorical as TokenCategorical,
)
from .memory_map import (
    memory_map as memory_map,
)
from .merging import (
    gradient_mismatch as gradient_mismatch,
    merge as merge,
    merge_curve as merge_curve,
)
from .posterior import (
    Posterior as Posterior,
    fit_laplace as fit_laplace,
)
from .recipe import (
    Recipe as Recipe,
)
from .report import (
    report as report,
)
from .sensitivity import (
    Index as Index,
    Monitor as Monitor,
    acquire as acquire,
    adapt as adapt,
    calibrate as calibrate,
    influence as influence,
    leave_one_out as leave_one_out,
    select_prior_precision as select_prior_precision,
    sensitivity as sensitivity,
    suspicious as suspicious,
    rerun as rerun,
    validate as validate,
    what_if as what_if,
    what_if_each as what_if_each,
)
from .task import (
    Task as Task,
)

__version__: str
