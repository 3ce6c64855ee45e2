"""Fitted posteriors: brute force, closed forms, Monte Carlo, curvlinops and laplace-torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from contracts import kept
from curvlinops import EFLinearOperator, EKFACLinearOperator, GGNLinearOperator
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from models import HFConv1D, example_models, mlp, randomised, seeded
from oracles import (
    dense_ggn,
    dense_jacobian,
    dense_precision,
    flatten,
    outputs_of,
    relative,
    unflatten,
)
from parts import normal
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.utils.data import DataLoader, TensorDataset

from blr_analysis.backprop.engine import Chunking, chunks
from blr_analysis.errors import InputError, ModelError
from blr_analysis.likelihoods import Gaussian
from blr_analysis.posterior import fit_laplace
from blr_analysis.posterior.structures import Full, contract
from blr_analysis.task import Task

STRUCTURES = ("diag", "kron", "full", "lowrank")
EXACT = 1e-10


def small(kind: str = "categorical", n: int = 9) -> Task:
    """An MLP with three outputs and targets of any kind."""
    targets = {
        "categorical": torch.arange(n) % 3,
        "bernoulli": torch.arange(3 * n).view(n, 3) % 2,
        "gaussian": normal(n, 3, seed=1),
        "poisson": torch.arange(3 * n).view(n, 3) % 4,
    }[kind]
    return Task(mlp(), (normal(n, 4), targets), likelihood=kind)


def convolutional(**settings: int) -> Task:
    with seeded(0):
        model = nn.Sequential(
            nn.Conv2d(2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)
        )
    return Task(randomised(model), (normal(9, 2, 3, 3), torch.arange(9) % 3), **settings)


def curvature_of(task: Task, structure: str, **options) -> Tensor:
    """S − δI as a dense matrix."""
    q = fit_laplace(task, structure=structure, prior_precision=1.0, **options)
    return dense_precision(q) - torch.eye(len(flatten(q.mean)), dtype=torch.float64)


def gradients_of(task: Task, jacobian: Tensor) -> Tensor:
    """∇ℓ_i, ``[N, P]``."""
    targets = torch.cat([task.run(b, task.parameters())[1] for _, b in task.batches()])
    error = task.likelihood.error(outputs_of(task), targets)
    return torch.einsum("nc,ncp->np", error, jacobian)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("curvature", ["ggn", "empirical_fisher"])
@pytest.mark.parametrize("name", ["mlp", "images", "volumes", "words_tied", "words"])
def test_against_brute_force(name: str, curvature: str, structure: str) -> None:
    model, x = example_models()[name]
    with torch.no_grad():
        task = Task(model, (x, torch.arange(len(x)) % model(x).shape[-1]))
    jacobian = dense_jacobian(task, task.parameters())
    g = gradients_of(task, jacobian)
    truth = dense_ggn(task, jacobian) if curvature == "ggn" else g.mT @ g
    settings = dict(prior_precision=0.3, curvature=curvature)
    q = fit_laplace(task, structure=structure, **settings)
    truth = kept(q.form, truth) + 0.3 * torch.eye(len(truth), dtype=truth.dtype)
    assert relative(dense_precision(q), truth) < EXACT
    assert q.structure == structure
    assert q.n_data == len(x)
    for parameter, m in task.parameters().items():
        assert torch.equal(q.mean[parameter], m)
        assert q.mean[parameter].data_ptr() != m.data_ptr(), "training on must not move the mean"


def many_outputs(kind: str = "categorical", hidden: int = 5, *, bias: bool = True) -> Task:
    """An MLP with 64 outputs, of which some are nearly certain."""
    with seeded(0):
        layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, hidden), nn.Tanh()
        model = nn.Sequential(*layers, nn.Linear(hidden, 64, bias=bias))
    targets = {
        "categorical": torch.arange(7),
        "weighted": torch.arange(7),
        "bernoulli": torch.arange(7 * 64).view(7, 64) % 2,
        "gaussian": normal(7, 64, seed=1),
    }[kind]
    of = "categorical" if kind == "weighted" else kind
    weights = 0.1 + torch.arange(7) if kind == "weighted" else None
    model = randomised(model)
    model[-1].weight.data *= 5
    return Task(model, (normal(7, 3), targets), likelihood=of, weights=weights)


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("hidden", [5, 20])
@pytest.mark.parametrize("kind", ["categorical", "weighted", "bernoulli", "gaussian"])
def test_many_outputs_against_brute_force(kind: str, hidden: int, structure: str) -> None:
    task = many_outputs(kind, hidden, bias=kind != "bernoulli")
    params = task.parameters()
    for chunk in chunks(task, params, Chunking(progress=False)):
        found = chunk.few_columns()
        assert found is not None
        assert (found[0] is None) == (hidden == 20)
    jacobian = dense_jacobian(task, params)
    lambdas = torch.cat([c.likelihood.hessian(c.outputs, c.targets) for c in chunks(
        task, params, Chunking(progress=False))])  # fmt: skip
    truth = torch.einsum("ncp,ncd,ndq->pq", jacobian, lambdas, jacobian)
    q = fit_laplace(task, structure=structure, prior_precision=0.3)
    truth = kept(q.form, truth) + 0.3 * torch.eye(len(truth), dtype=truth.dtype)
    assert relative(dense_precision(q), truth) < EXACT


def test_what_is_added_to_the_last_layer_is_seen() -> None:
    task = many_outputs()
    task.model[-1].register_forward_hook(lambda *seen: seen[2] + seen[1][0][:, :1])
    for chunk in chunks(task, task.parameters(), Chunking(progress=False)):
        assert chunk.few_columns() is None


@pytest.mark.parametrize("layer", ["linear", "transposed", "no_bias"])
def test_kronecker_of_one_linear_output_is_exact(layer: str) -> None:
    """With one layer and one output, the GGN is a Kronecker product: kron equals full."""
    with seeded(0):
        model = {
            "linear": lambda: nn.Linear(4, 1),
            "transposed": lambda: HFConv1D(1, 4),
            "no_bias": lambda: nn.Linear(4, 1, bias=False),
        }[layer]()
    x, y = normal(9, 4), normal(9, seed=2)
    task = Task(randomised(model), (x, y), likelihood=Gaussian(0.5))
    truth = (x if layer == "no_bias" else torch.cat([x, torch.ones(9, 1).double()], 1)) / 0.5**0.5
    full = curvature_of(task, "full")
    assert relative(full, truth.mT @ truth) < EXACT
    assert relative(curvature_of(task, "kron"), full) < EXACT
    assert relative(curvature_of(task, "diag"), full.diagonal().diag()) < EXACT


def exact_hessian(task: Task) -> Tensor:
    """Σ_i ∇²ℓ_i by plain automatic differentiation of the summed loss."""
    params = task.parameters()
    (batch,) = [batch for _, batch in task.batches()]

    def loss(flat: Tensor) -> Tensor:
        f, y = task.run(batch, unflatten(flat, params))
        return task.likelihood.nll(f, y).sum()

    found = hessian(loss, flatten(params))
    assert isinstance(found, Tensor)
    return found


@pytest.mark.filterwarnings("ignore:.*raised to the prior")
@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian", "poisson"])
def test_exact_curvature_is_the_hessian(kind: str, structure: str, monkeypatch) -> None:
    monkeypatch.setattr(contract, "HELD", 200)  # unit vectors in several runs
    task = small(kind)
    truth = exact_hessian(task)
    size = len(truth)
    assert relative(dense_ggn(task, dense_jacobian(task, task.parameters())), truth) > 1e-3
    if structure == "diag":
        kept_part, share = truth.diagonal().clamp_min(0).diag(), truth.diagonal() < 0
    else:
        values, vectors = torch.linalg.eigh(truth)
        kept_part, share = (vectors * values.clamp_min(0)) @ vectors.mT, values < -1e-6
    q = fit_laplace(task, structure=structure, prior_precision=0.3, curvature="exact")
    assert relative(dense_precision(q), kept_part + 0.3 * torch.eye(size).double()) < EXACT
    assert q.record["kind"] == "hessian"
    assert q.record["floored"] == pytest.approx(float(share.double().mean()))


def test_exact_curvature_of_a_linear_model_is_the_ggn() -> None:
    """f is linear in θ, so ∇²f = 0; by hand the Hessian is Σ_i p_i (1 − p_i) x_i x_iᵀ."""
    x, y = normal(20, 3), torch.arange(20) % 2
    model = randomised(nn.Linear(3, 1, bias=False))
    task = Task(model, (x, y), likelihood="bernoulli")
    p = (x @ model.weight.detach().mT).sigmoid()
    truth = x.mT @ (p * (1 - p) * x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing to raise
        assert relative(curvature_of(task, "full", curvature="exact"), truth) < EXACT
        diagonal = curvature_of(task, "diag", curvature="exact")
    assert relative(diagonal, truth.diagonal().diag()) < EXACT


def test_an_indefinite_hessian_is_raised_to_the_prior_and_says_so() -> None:
    """ℓ = ½ (θ₁θ₂ − y)² at θ = (1, 1), y = 9 has the Hessian [[1, −7], [−7, 1]]."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.ones(2).double())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.theta.prod()

    task = Task(Product(), (torch.ones(1, 1).double(), torch.tensor([9.0])), likelihood="gaussian")
    with pytest.warns(UserWarning, match="negative"):
        q = fit_laplace(task, structure="full", prior_precision=0.5, curvature="exact")
    # Eigenvalues 8 along (1, −1) and −6 along (1, 1): the second becomes 0.
    truth = torch.tensor([[4.5, -4.0], [-4.0, 4.5]]).double()
    assert relative(dense_precision(q), truth) < EXACT
    assert q.record["floored"] == 0.5


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_a_second_derivative_that_torch_has_wrong_is_refused(structure: str) -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = randomised(nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3)))
    task = Task(model, (normal(9, 4), torch.arange(9) % 3))
    with pytest.raises(ModelError, match="symmetric"):
        curvature_of(task, structure, curvature="exact")


@pytest.mark.parametrize("structure", ["kron", "lowrank"])
def test_exact_curvature_is_for_diag_and_full(structure: str) -> None:
    with pytest.raises(InputError, match="exact"):
        curvature_of(small("categorical"), structure, curvature="exact")


def test_linear_regression_has_the_conjugate_posterior() -> None:
    """Mean of the ridge solution and S = XᵀX/σ² + δI (Gaussian, exact)."""
    x, y, noise, delta = normal(20, 3), normal(20, seed=5), 0.3, 2.0
    precision = x.mT @ x / noise + delta * torch.eye(3).double()
    solution = torch.linalg.solve(precision, x.mT @ y / noise)
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(solution.unsqueeze(0))
    task = Task(model, (x, y), likelihood=Gaussian(noise))
    q = fit_laplace(task, structure="full", prior_precision=delta)
    assert relative(q.form.matrix, precision) < EXACT
    truth = torch.linalg.inv(precision).diagonal().unsqueeze(0)
    assert relative(q.variance("weight"), truth) < EXACT


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("curvature", ["ggn", "empirical_fisher"])
def test_chunks_do_not_matter(structure: str, curvature: str) -> None:
    whole = curvature_of(convolutional(), structure, curvature=curvature)
    for settings in ({"batch_size": 1}, {"batch_size": 4}, {"memory_budget": 10_000}):
        parts = curvature_of(convolutional(**settings), structure, curvature=curvature)
        assert relative(parts, whole) < 1e-9  # kron: of eigenvectors of sums in another order


@pytest.mark.parametrize("structure", STRUCTURES)
def test_prior_by_name(structure: str) -> None:
    task = small()
    names = list(task.parameters())
    prior = {n: 0.5 if n.startswith("0") else 3.0 for n in names}
    options = {"structure": structure, "rank": 42 if structure == "lowrank" else None}
    flat = fit_laplace(task, prior_precision=1.0, **options)
    own = fit_laplace(task, prior_precision=prior, **options)
    for name in names:
        gap = own.precision(name) - flat.precision(name)
        assert relative(gap, torch.full_like(gap, prior[name] - 1)) < 1e-9


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "gaussian", "poisson"])
def test_monte_carlo_fisher_is_unbiased(kind: str) -> None:
    """vᵀF̂v is within four standard errors of vᵀGv, which six thousand labels make small.

    The standard error is taken over the labels: each direction's estimates from 30 independent
    fits of 200 labels an example.
    """
    task = small(kind)
    ggn = dense_ggn(task, dense_jacobian(task, task.parameters()))
    generator = torch.Generator().manual_seed(0)
    fits = torch.stack(
        [
            curvature_of(task, "full", curvature="mc_fisher", samples=200, generator=generator)
            for _ in range(30)
        ]
    )
    v = normal(6, len(ggn), seed=7)
    truth = torch.einsum("dp,pq,dq->d", v, ggn, v)
    estimates = torch.einsum("dp,spq,dq->sd", v, fits, v)
    error = estimates.std(0) / 30**0.5
    assert float((error / truth).max()) < 0.04, "the test must be sharp"
    assert float(((estimates.mean(0) - truth) / error).abs().max()) < 4


@pytest.mark.parametrize("structure", STRUCTURES)
def test_monte_carlo_fisher_is_reproducible(structure: str) -> None:
    """The generator decides the labels, not the global one; both passes of kron see the same."""
    task = small()
    before = torch.get_rng_state()

    def fit(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return curvature_of(task, structure, curvature="mc_fisher", generator=generator, samples=2)

    one, two, other = fit(1), fit(1), fit(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, two)
    assert relative(other, one) > 0.01


def test_monte_carlo_kron_keeps_the_trace_of_its_own_labels() -> None:
    task = small()
    traces = [
        float(
            curvature_of(
                task, structure, curvature="mc_fisher", samples=3,
                generator=torch.Generator().manual_seed(3),
            ).trace()
        )
        for structure in STRUCTURES
    ]  # fmt: skip
    assert traces[1:] == pytest.approx([traces[0]] * 3, rel=1e-10)


@pytest.mark.parametrize("make", [small, convolutional])
def test_ggn_and_empirical_fisher_equal_curvlinops(make) -> None:
    task = make()
    data = [task.dataset.tensors]
    params = list(task.model.parameters())
    eye = torch.eye(sum(p.numel() for p in params), dtype=torch.float64)
    loss = nn.CrossEntropyLoss(reduction="sum")
    ggn = GGNLinearOperator(task.model, loss, params, data) @ eye
    assert relative(curvature_of(task, "full"), ggn) < EXACT
    assert relative(curvature_of(task, "diag"), ggn.diagonal().diag()) < EXACT
    fisher = EFLinearOperator(task.model, loss, params, data) @ eye
    assert relative(curvature_of(task, "full", curvature="empirical_fisher"), fisher) < EXACT


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        (Gaussian(0.5), nn.MSELoss(reduction="sum")),  # Σ (f − y)² has the Hessian 2 = 1/σ²
        ("bernoulli", nn.BCEWithLogitsLoss(reduction="sum")),
    ],
)
def test_other_losses_equal_curvlinops(kind, loss: nn.Module) -> None:
    y = normal(9, 3, seed=1) if isinstance(kind, Gaussian) else torch.arange(27).view(9, 3) % 2
    task = Task(mlp(), (normal(9, 4), y), likelihood=kind)
    params = list(task.model.parameters())
    eye = torch.eye(sum(p.numel() for p in params), dtype=torch.float64)
    data = [(task.dataset.tensors[0], y.double())]
    assert (
        relative(
            curvature_of(task, "full"), GGNLinearOperator(task.model, loss, params, data) @ eye
        )
        < EXACT
    )


@pytest.mark.parametrize("make", [small, convolutional, many_outputs])
@pytest.mark.parametrize(
    ("curvature", "fisher"), [("ggn", "type-2"), ("empirical_fisher", "empirical")]
)
def test_kronecker_equals_curvlinops_ekfac(make, curvature: str, fisher: str) -> None:
    """The same eigenvalue-corrected K-FAC, with the bias joined to the weight as we do.

    curvlinops treats weights and biases apart by default, which is another (coarser) matrix with
    the same trace; it knows Linear and Conv2d without groups, so the comparison stops there.
    """
    task = make()
    data = [task.dataset.tensors]
    params = list(task.model.parameters())
    eye = torch.eye(sum(p.numel() for p in params), dtype=torch.float64)
    loss = nn.CrossEntropyLoss(reduction="sum")
    theirs = [
        EKFACLinearOperator(
            task.model, loss, params, data, fisher_type=fisher, separate_weight_and_bias=apart
        )
        @ eye
        for apart in (False, True)
    ]
    ours = curvature_of(task, "kron", curvature=curvature)
    assert relative(ours, theirs[0]) < EXACT
    assert float(theirs[1].trace()) == pytest.approx(float(ours.trace()), rel=1e-10)


@pytest.fixture
def double() -> Iterator[None]:
    """laplace-torch passes its matrices through torch's default precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_posterior_precision_equals_laplace_torch(kind: str, structure: str) -> None:
    """Prior included; laplace-torch's ``sigma_noise`` is the square root of our variance.

    Its "kron" keeps plain Kronecker factors, without corrected eigenvalues, and is another matrix.
    """
    x = normal(9, 4)
    y = torch.arange(9) % 3 if kind == "categorical" else normal(9, 3, seed=1)
    sigma = torch.tensor([0.4 if kind == "gaussian" else 1.0], dtype=torch.float64)
    model = mlp()
    theirs = Laplace(
        model,
        "classification" if kind == "categorical" else "regression",
        subset_of_weights="all",
        hessian_structure=structure,
        prior_precision=0.5,
        sigma_noise=sigma,
        backend=CurvlinopsGGN,
    )
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=4))
    likelihood = "categorical" if kind == "categorical" else Gaussian(0.4**2)
    task = Task(model, (x, y), likelihood=likelihood)
    ours = fit_laplace(task, structure=structure, prior_precision=0.5)
    if structure == "diag":
        precision = flatten({n: ours.precision(n) for n in ours.mean})
        assert relative(precision, theirs.posterior_precision) < EXACT
    else:
        assert isinstance(ours.form, Full)
        assert relative(ours.form.matrix, theirs.posterior_precision) < EXACT


@pytest.mark.usefixtures("double")
def test_functional_variance_equals_laplace_torch() -> None:
    """V_i = J_i Σ J_iᵀ, which laplace-torch forms from its own Jacobians."""
    x, y = normal(9, 4), torch.arange(9) % 3
    model = mlp()
    theirs = Laplace(
        model, "classification", subset_of_weights="all", hessian_structure="full",
        prior_precision=0.5, backend=CurvlinopsGGN,
    )  # fmt: skip
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=9))
    task = Task(model, (x, y))
    ours = fit_laplace(task, structure="full", prior_precision=0.5)
    parts = chunks(task, ours.mean, Chunking(chunk_size=4, progress=False))
    variance = torch.cat([ours.form.gram(chunk.jacobian_terms()) for chunk in parts])
    jacobian, _ = theirs.backend.jacobians(x)
    assert relative(variance, theirs.functional_variance(jacobian)) < EXACT


def test_inputs_too_large_for_their_dtype_are_told() -> None:
    task = Task(nn.Linear(3, 2), (torch.full((6, 3), 1e20), torch.arange(6) % 2))
    with pytest.raises(ModelError, match="overflow"):
        fit_laplace(task)


class Detached(nn.Linear):
    """A model that forgets how it came to its outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_outputs_that_no_parameter_reaches_are_refused(structure: str) -> None:
    task = Task(Detached(3, 2), (torch.randn(6, 3), torch.arange(6) % 2))
    with pytest.raises(ModelError, match="depend"):
        fit_laplace(task, structure=structure, prior_precision=1.0)
