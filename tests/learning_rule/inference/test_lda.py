"""Online LDA against scikit-learn's, against its own guarantees, and on what it must refuse."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from sklearn.decomposition import LatentDirichletAllocation

import blr_analysis as blr
from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.inference import LDA, NotConverged, documents
from blr_analysis.learning_rule.inference.documents import local_step, read_counts

K, V = 4, 60


def corpus(n: int, seed: int = 0, words: int = V) -> sp.csr_matrix:
    """Documents of 1 to some 300 words from planted topics."""
    rng = np.random.default_rng(seed)
    topics = rng.dirichlet(np.full(words, 0.1), K)
    lengths = np.maximum(1, rng.lognormal(3, 1, n).astype(int))
    mixed = rng.dirichlet(np.full(K, 0.3), n) @ topics
    return sp.csr_matrix(
        np.stack([rng.multinomial(m, p) for m, p in zip(lengths, mixed, strict=True)])
    )


class Fixed(np.random.RandomState):
    """Hands scikit-learn these topics to start from, and ones for its documents."""

    def __init__(self, components: np.ndarray) -> None:
        super().__init__(0)
        self.components = components

    def gamma(self, shape, scale=1.0, size=None):
        return self.components.copy() if size == self.components.shape else np.ones(size)


def random_topics(seed: int = 0, words: int = V) -> np.ndarray:
    return np.random.default_rng(seed).gamma(2.0, 1.0, (K, words)) + 0.01


def theirs(components: np.ndarray, **options) -> LatentDirichletAllocation:
    return LatentDirichletAllocation(K, random_state=Fixed(components), **options)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("turns", [1, 7, 100])
def test_a_step_is_scikit_learns(turns):
    counts, start = corpus(64), random_topics()
    model = theirs(start, total_samples=1000, batch_size=64, max_doc_update_iter=turns)
    model.partial_fit(counts.astype(float))
    lda = LDA(K, max_local_iter=turns)
    q = lda.step(Dirichlet(torch.tensor(start)), counts, n_documents=1000, rho=lda.rho(1))
    np.testing.assert_allclose(q.concentration, model.components_, rtol=1e-6)
    assert (q.concentration / torch.tensor(start) - 1).abs().max() > 0.1


def test_a_sequence_of_steps_is_scikit_learns():
    counts, start = corpus(120), random_topics()
    options = dict(doc_topic_prior=0.3, topic_word_prior=0.05)
    schedule = dict(learning_decay=0.9, learning_offset=3.0)
    model = theirs(start, total_samples=120, batch_size=30, **options, **schedule)
    model.partial_fit(counts.astype(float))
    lda, q = LDA(K, **options, **schedule), Dirichlet(torch.tensor(start))
    for t in range(4):
        batch = counts[30 * t : 30 * t + 30]
        q = lda.step(q, batch, n_documents=120, rho=lda.rho(t + 1))
    np.testing.assert_allclose(q.concentration, model.components_, rtol=1e-6)


def test_fit_is_its_steps_in_some_order():
    counts = corpus(50)
    lda, start = LDA(K), Dirichlet(torch.tensor(random_topics()))
    fitted = lda.fit(counts, passes=1, batch_size=50, start=start, progress=False)
    q = lda.step(start, counts, n_documents=50, rho=lda.rho(1))
    torch.testing.assert_close(fitted.q.concentration, q.concentration, rtol=1e-9, atol=0)


def test_transform_perplexity_and_history_are_scikit_learns():
    counts, held_out, start = corpus(80), corpus(37, seed=1), random_topics()
    model = theirs(start, learning_method="batch", max_iter=1).fit(counts.astype(float))
    lda, first = LDA(K), Dirichlet(torch.tensor(start))
    fitted = lda.fit(counts, passes=1, batch_size=None, start=first, progress=False)
    np.testing.assert_allclose(fitted.q.concentration, model.components_, rtol=1e-6)
    np.testing.assert_allclose(fitted.transform(held_out), model.transform(held_out), rtol=1e-5)
    assert fitted.perplexity(held_out) == pytest.approx(model.perplexity(held_out), rel=1e-8)
    again = lda.fit(counts, passes=1, batch_size=None, start=fitted.q, progress=False)
    assert again.history[0] == pytest.approx(-np.log(model.perplexity(counts)), rel=1e-8)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), alpha=st.sampled_from([0.02, 0.25, 2.0]))
def test_in_batches_of_everything_the_elbo_never_falls(seed, alpha):
    lda = LDA(K, doc_topic_prior=alpha, max_local_iter=10)
    fitted = lda.fit(corpus(30, seed), passes=25, batch_size=None, seed=seed, progress=False)
    steps = np.diff(fitted.history)
    assert len(steps) == 24 and steps.min() >= -1e-12 * abs(fitted.history[-1])
    assert fitted.history[-1] > fitted.history[0] + 0.05


def test_documents_go_on_from_where_they_were_once_starting_afresh_lowers_the_elbo():
    fresh = []

    class Worsening(LDA):
        """Its local step stops after one turn when it starts afresh for the sixth time."""

        def local(self, data, rows, q, *, start=None, expected="sum"):
            fresh.append(start is None)
            hasty = start is None and sum(fresh) > 5
            model = LDA(K, max_local_iter=1) if hasty else LDA(K)
            return model.local(data, rows, q, start=start, expected=expected)

    fitted = Worsening(K).fit(corpus(30), passes=9, batch_size=None, progress=False)
    assert fresh == [True] * 6 + [False] * 4
    assert np.diff(fitted.history).min() > 0


@pytest.fixture(scope="module")
def settled():
    counts = corpus(40, seed=5)
    lda = LDA(K, topic_word_prior=0.1, local_tol=1e-11, max_local_iter=20_000)
    fitted = lda.fit(counts, passes=3000, batch_size=None, tol=1e-13, progress=False)
    assert fitted.converged
    return counts, lda, fitted


def test_sites_and_prior_add_up_to_the_posterior(settled):
    counts, _, fitted = settled
    sites = fitted.sites["log"]
    assert sites.shape == (40, K, V)
    total = fitted.prior.natural["log"] + sites.sum(0)
    torch.testing.assert_close(total, fitted.q.natural["log"], rtol=1e-4, atol=1e-4)
    for_each_word = torch.tensor(counts.toarray()).double()
    torch.testing.assert_close(sites.sum(1), for_each_word, rtol=1e-12, atol=1e-12)


def test_taking_documents_out_is_the_first_step_of_fitting_the_rest(settled):
    counts, lda, fitted = settled
    for gone in ([0], [3, 17, 29]):
        rest = np.setdiff1d(np.arange(40), gone)
        data = read_counts(counts, torch.float64)
        start = fitted.documents.concentration[rest]
        local = local_step(data, torch.tensor(rest), fitted.q, lda.document_prior(), start=start)
        wanted = 0.1 + local.expected
        found = fitted.without(gone).concentration
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        moved = (fitted.q.concentration - found).sum()
        assert float(moved) == pytest.approx(counts[gone].sum(), rel=1e-9)
    mask = np.isin(np.arange(40), [3, 17, 29])
    assert torch.equal(fitted.without(mask).concentration, found)
    assert torch.equal(fitted.without([]).concentration, fitted.q.concentration)


def by_hand(topics: np.ndarray, counts: np.ndarray, alpha: float, gamma: np.ndarray) -> tuple:
    """The bound of one document, E_q[log β] in it; the same with β integrated; γ; n_w φ_wk."""
    words = np.flatnonzero(counts)
    n, psi, log_gamma = counts[words], special.psi, special.gammaln
    logs, totals = psi(topics[:, words]) - psi(topics.sum(1))[:, None], topics.sum(1)
    for _ in range(20_000):
        score = psi(gamma)[:, None] + logs
        phi = np.exp(score - special.logsumexp(score, 0))
        last, gamma = gamma, alpha + (n * phi).sum(1)
        if np.abs(gamma - last).max() < 1e-13:
            break
    theta, prior = psi(gamma) - psi(gamma.sum()), np.full(len(gamma), alpha)
    joint = (n * phi * (logs + theta[:, None])).sum() + ((prior - gamma) * theta).sum()
    entropy = -(n * special.xlogy(phi, phi)).sum()
    norms = [log_gamma(c).sum() - log_gamma(c.sum()) for c in (prior, gamma)]
    bound = joint + entropy - norms[0] + norms[1]
    sites = n * phi
    seen = log_gamma(topics[:, words] + sites) - log_gamma(topics[:, words])
    every = log_gamma(totals + sites.sum(1)) - log_gamma(totals)
    return bound, bound - (sites * logs).sum() + seen.sum() - every.sum(), gamma, sites


def test_left_out_documents_by_hand(settled):
    """Each under λ − λ̃_d, its factors found afresh."""
    matrix, _, fitted = settled
    dense, topics = matrix.toarray().astype(float), fitted.q.concentration.numpy()
    left_out, before = fitted.left_out(), fitted.log_predictive(matrix)
    for d in range(40):
        *_, sites = by_hand(topics, dense[d], 0.25, fitted.documents.concentration[d].numpy())
        less = topics.copy()
        less[:, np.flatnonzero(dense[d])] -= sites
        for under, found in ((topics, before), (less, left_out)):
            wanted = by_hand(under, dense[d], 0.25, np.ones(K))[1]
            assert float(found[d]) == pytest.approx(wanted, rel=1e-7)
    assert float((before - left_out).min()) > 0


def test_the_predictive_is_a_tighter_bound_than_the_perplexitys():
    """Against the exact log ∫ p(w|β) q(β) dβ, by all assignments of topics to four words."""
    rng = np.random.default_rng(3)
    counts = np.stack([rng.multinomial(4, rng.dirichlet(np.full(9, 0.3))) for _ in range(12)])
    lda = LDA(2, topic_word_prior=0.1)
    fitted = lda.fit(counts, passes=3, batch_size=4, progress=False)
    topics, log_gamma = fitted.q.concentration.numpy(), special.gammaln
    loose = lda.local(fitted.data, torch.arange(12), fitted.q, expected=None).bound
    exact = []
    for row in counts:
        words, terms = np.repeat(np.arange(9), row), []
        for chosen in itertools.product(range(2), repeat=4):
            told = np.zeros((2, 9))
            np.add.at(told, (np.array(chosen), words), 1.0)
            parts = [(topics[k], told[k]) for k in range(2)] + [(np.full(2, 0.5), told.sum(1))]
            terms.append(
                sum(
                    (log_gamma(c + n) - log_gamma(c)).sum()
                    - log_gamma((c + n).sum())
                    + log_gamma(c.sum())
                    for c, n in parts
                )
            )
        exact.append(special.logsumexp(terms))
    ours = fitted.log_predictive(counts).numpy()
    assert (loose.numpy() < ours - 1e-4).all() and (ours < np.array(exact)).all()
    assert fitted.perplexity(counts) > np.exp(-ours.sum() / counts.sum())


def refits() -> tuple[sp.csr_matrix, LDA]:
    rng = np.random.default_rng(5)
    mixed = rng.dirichlet(np.full(K, 0.3), 100) @ rng.dirichlet(np.full(V, 0.05), K)
    matrix = sp.csr_matrix(np.stack([rng.multinomial(50, p) for p in mixed]))
    return matrix, LDA(K, topic_word_prior=0.1, local_tol=1e-7, max_local_iter=2000)


@pytest.mark.slow
def test_taking_a_document_out_foretells_fitting_without_it():
    matrix, lda = refits()
    fitted = lda.fit(matrix, passes=2000, batch_size=None, tol=1e-10, progress=False)
    foretold, refitted, losses = [], [], []
    left_out, before = fitted.left_out(), fitted.log_predictive(matrix)
    for gone in range(0, 100, 10):
        rest = matrix[np.setdiff1d(np.arange(100), [gone])]
        again = lda.fit(rest, passes=300, batch_size=None, start=fitted.q, tol=1e-8, progress=False)
        refitted.append((again.q.mean - fitted.q.mean).flatten())
        foretold.append((fitted.without([gone]).mean - fitted.q.mean).flatten())
        losses.append(float(again.log_predictive(matrix[gone])[0]))
    together = torch.stack([torch.cat(foretold), torch.cat(refitted)])
    assert float(torch.corrcoef(together)[0, 1]) > 0.9
    chosen = slice(0, 100, 10)
    fall, truth = (before - left_out)[chosen], before[chosen] - torch.tensor(losses)
    assert float(torch.corrcoef(torch.stack([fall, truth]))[0, 1]) > 0.9
    assert float(fall.sum() / truth.sum()) == pytest.approx(1, abs=0.15)


def test_leave_one_out_and_sensitivity_take_documents(settled):
    matrix, _, fitted = settled
    loo = blr.leave_one_out(None, fitted)
    scores = blr.sensitivity(None, fitted)
    torch.testing.assert_close(-loo.losses, fitted.left_out())
    torch.testing.assert_close(scores.deviation, loo.losses - loo.losses_before)
    table = fitted.table
    np.testing.assert_allclose(table.gain, scores.deviation)
    np.testing.assert_allclose(table.log_predictive, fitted.log_predictive(matrix))


def test_topics_that_lag_behind_keep_their_prior_and_say_so():
    start = Dirichlet(torch.full((K, V), 0.3, dtype=torch.float64))
    fitted = LDA(K, learning_offset=1e6).fit(
        corpus(20), passes=1, batch_size=5, start=start, progress=False
    )
    with pytest.warns(NotConverged, match=r"\d\d.\d% of the words cannot be taken out"):
        left_out = fitted.left_out()
    assert bool(torch.isfinite(left_out).all())
    near = LDA(K).fit(corpus(20), passes=300, batch_size=None, tol=1e-9, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near.left_out()


def test_topics_that_lag_behind_refuse_to_give_back_more_than_they_hold():
    start = Dirichlet(torch.full((K, V), 0.01, dtype=torch.float64))
    lda = LDA(K, learning_offset=1e6)
    fitted = lda.fit(corpus(20), passes=1, batch_size=5, start=start, progress=False)
    with pytest.raises(InputError, match="go on with fit"):
        fitted.without(range(20))


@pytest.mark.parametrize("turns", [1, 4, 100])
def test_documents_alone_are_documents_together(turns):
    """Each stops by itself, in whatever block it stands."""
    data, q = read_counts(corpus(50), torch.float64), Dirichlet(torch.tensor(random_topics()))
    rows, prior = torch.randperm(50)[:33], LDA(K).document_prior()
    together = local_step(data, rows, q, prior, max_iter=turns, expected="each")
    summed = local_step(data, rows, q, prior, max_iter=turns).expected
    for at, row in enumerate(rows):
        alone = local_step(data, row.view(1), q, prior, max_iter=turns)
        torch.testing.assert_close(together.gamma[at], alone.gamma[0], rtol=1e-9, atol=0)
        torch.testing.assert_close(together.bound[at], alone.bound[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(together.expected[at], alone.expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(together.expected.sum(0), summed, rtol=1e-9, atol=1e-12)


def test_blocks_hold_every_entry_once():
    matrix = corpus(50)
    rows = torch.arange(49, 9, -1)
    found = torch.zeros(40, V, dtype=torch.float64)
    for at, words, number in read_counts(matrix, torch.float64).blocks(rows, 1 << 10):
        found[at] += torch.zeros(len(at), V).double().scatter_add_(1, words, number)
        assert int((number == 0).sum()) << 10 <= documents.WASTE
    assert torch.equal(found, torch.tensor(matrix.toarray()[rows.numpy()]).double())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_every_form_of_counts_is_read_alike():
    counts = corpus(12)
    dense = torch.tensor(counts.toarray())
    wanted = LDA(2).fit(counts, passes=2, batch_size=5, progress=False)
    forms = [counts.tocoo(), counts.tocsc(), sp.csr_array(counts.astype(np.uint16)), dense]
    forms += [dense.to_sparse(), dense.float().to_sparse_csr(), dense.numpy(), dense.tolist()]
    for form in forms:
        found = LDA(2).fit(form, passes=2, batch_size=5, progress=False)
        torch.testing.assert_close(found.q.concentration, wanted.q.concentration)
        assert found.history == pytest.approx(wanted.history, rel=1e-12)


def test_a_seed_is_a_fit():
    fits = [
        LDA(K).fit(corpus(30), passes=2, batch_size=7, seed=s, progress=False) for s in (1, 1, 2)
    ]
    first, same, other = (fitted.q.concentration for fitted in fits)
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_planted_topics_are_found_online():
    rng = np.random.default_rng(0)
    planted = np.kron(np.eye(K), np.full(V // K, K / V))
    mixed = rng.dirichlet(np.full(K, 0.1), 400) @ planted
    counts = np.stack([rng.multinomial(50, p) for p in mixed])
    fitted = LDA(K, topic_word_prior=0.1).fit(counts, passes=15, batch_size=40, progress=False)
    names = [str(i // (V // K)) for i in range(V)]
    words = fitted.topics(names, top=V // K).words
    assert sorted({*row}.pop() for row in words) == [*"0123"]
    assert all(len({*row}) == 1 for row in words)
    assert fitted.history[-1] > fitted.history[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_priors_that_underflow_leave_finite_answers(dtype):
    lda = LDA(K, doc_topic_prior=1e-4, topic_word_prior=1e-4, dtype=dtype)
    fitted = lda.fit(corpus(40), passes=5, batch_size=10, progress=False)
    assert fitted.q.concentration.dtype == dtype
    assert np.isfinite(fitted.history).all() and np.isfinite(fitted.perplexity(corpus(9, seed=2)))


def test_single_precision_is_close():
    fits = [
        LDA(K, dtype=dtype).fit(corpus(60), passes=3, batch_size=20, progress=False)
        for dtype in (torch.float32, torch.float64)
    ]
    single, double = (fitted.perplexity(corpus(20, seed=1)) for fitted in fits)
    assert single != double
    start = Dirichlet(torch.tensor(random_topics()))
    steps = [
        LDA(K, dtype=d).step(start, corpus(60), n_documents=60, rho=0.5).concentration.double()
        for d in (torch.float32, torch.float64)
    ]
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-3, atol=0)


def test_tables_of_words():
    fitted = LDA(2).fit(corpus(20), passes=2, batch_size=None, progress=False)
    names = [f"word{i}" for i in range(V)]
    topics = fitted.topics(names, top=3)
    table = topics.table
    assert table.columns.tolist() == ["topic", "rank", "word", "probability"]
    assert table["rank"].tolist() == [1, 2, 3, 1, 2, 3]
    best = fitted.q.mean[1].argmax()
    assert table.word[3] == names[int(best)]
    assert table.probability[3] == pytest.approx(float(fitted.q.mean[1, best]))
    assert str(topics).splitlines()[1].split() == ["1", *topics.words[1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((3, 5, -1), "word 5 in document 3 is negative: -1.0"),
        ((2, 7, 0.5), "word 7 in document 2 is not a whole number: 0.5"),
        ((4, 1, np.nan), "word 1 in document 4 is not finite"),
        ((4, 1, np.inf), "word 1 in document 4 is not finite"),
        ((6, slice(None), 0), "document 6 .* has no words"),
    ],
)
def test_bad_counts_are_named(change, message):
    counts = np.ones((8, V))
    row, column, value = change
    counts[row, column] = value
    for form in (counts, sp.csr_matrix(counts), torch.tensor(counts)):
        with pytest.raises(DataError, match=message):
            LDA(2).fit(form, progress=False)
    with pytest.raises(DataError, match=message):
        LDA(2).fit(np.ones((3, V)), passes=1, progress=False).transform(counts)


def test_explicit_zeros_do_not_make_a_document():
    counts = sp.csr_matrix(([0.0, 2.0], ([0, 1], [3, 4])), shape=(2, V))
    with pytest.raises(DataError, match="document 0"):
        LDA(2).fit(counts, progress=False)


@pytest.mark.parametrize(
    "counts",
    [None, "the cat", ["the cat", "a dog"], [["1", "2"], ["3", "4"]], [[1, 2], [3]]],
    ids=["none", "text", "texts", "strings", "ragged"],
)
def test_what_is_no_matrix_of_numbers_is_refused(counts):
    fitted = LDA(2).fit(corpus(10), passes=1, progress=False)
    for call in (LDA(2).fit, fitted.perplexity, fitted.log_predictive):
        with pytest.raises(DataError, match=r"counts must be a real matrix"):
            call(counts)


@pytest.mark.parametrize("value", ["0.5", None, True, np.nan, -1.0, [0.1, 0.2]])
@pytest.mark.parametrize(
    "name",
    ["doc_topic_prior", "topic_word_prior", "learning_decay", "learning_offset", "local_tol"],
)
def test_settings_that_are_no_numbers_are_named(name, value):
    if value is None and name.endswith("_prior"):
        assert LDA(2, **{name: value}).document_prior().concentration[0] == 0.5
        return
    with pytest.raises(InputError, match=f"{name} must"):
        LDA(2, **{name: value})


@pytest.fixture(scope="module")
def small():
    return LDA(2).fit(corpus(10), passes=1, progress=False)


def refit(**options):
    return LDA(2).fit(corpus(10), progress=False, **options)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda fitted: fitted.transform(corpus(3)[:, :59]), DataError, "59 .* 60"),
        (lambda fitted: fitted.perplexity(corpus(3)[:, :59]), DataError, "59 .* 60"),
        (lambda _: LDA(2).fit(np.ones(3)), DataError, r"real matrix \[N, V\]"),
        (lambda _: LDA(2).fit(np.ones((3, 1))), DataError, "two words or more"),
        (lambda fitted: LDA(3).fit(corpus(10), start=fitted.q), InputError, r"\[2, 60\]"),
        (lambda _: LDA(1), InputError, "n_topics"),
        (lambda _: LDA(2, doc_topic_prior=0.0), InputError, "doc_topic_prior"),
        (lambda _: LDA(2, learning_decay=1.5), InputError, "learning_decay"),
        (lambda _: LDA(2, dtype=torch.float16), InputError, "dtype"),
        (lambda _: refit(passes=0), InputError, "passes"),
        (lambda _: refit(passes="3"), InputError, "passes must"),
        (lambda _: refit(batch_size=0), InputError, "batch_size"),
        (lambda _: refit(batch_size="all"), InputError, "batch_size must"),
        (lambda _: refit(seed=-1), InputError, "seed must .* at least 0, got -1"),
        (lambda _: refit(seed=None), InputError, "seed must"),
        (lambda _: refit(seed="0"), InputError, "seed must"),
        (lambda _: refit(tol=-1.0), InputError, "tol must be 0 or more"),
        (lambda _: refit(tol="small"), InputError, "tol must"),
        (lambda _: refit(start=np.ones((2, V))), InputError, "must be a Dirichlet.* got ndarray"),
        (lambda fitted: fitted.without([10]), InputError, "example 10"),
        (
            lambda fitted: LDA(2).step(fitted, corpus(5), n_documents=5, rho=0.5),
            InputError,
            "Topics",
        ),
        (lambda fitted: fitted.topics(["one", "two"]), InputError, "vocabulary"),
        (lambda fitted: fitted.topics(None), InputError, "vocabulary"),
        (lambda fitted: fitted.topics("a" * V), InputError, "vocabulary"),
        (lambda fitted: fitted.topics(3), InputError, "vocabulary"),
    ],
)
def test_mistakes_are_named(small, call, error, match):
    with pytest.raises(error, match=match):
        call(small)
