"""Online LDA against scikit-learn's, against its own guarantees, and on what it must refuse."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from scipy import special
from sklearn.decomposition import LatentDirichletAllocation

from blr_analysis.learning_rule.families.dirichlet import Dirichlet
from blr_analysis.learning_rule.inference import LDA

K = 4
V = 60


def corpus(n: int, seed: int = 0) -> sp.csr_matrix:
    """Documents of 1 to some 300 words from planted topics."""
    rng = np.random.default_rng(seed)
    topics = rng.dirichlet(np.full(V, 0.1), K)
    lengths = np.maximum(1, rng.lognormal(3, 1, n).astype(int))
    mixed = rng.dirichlet(np.full(K, 0.3), n) @ topics
    rows = [rng.multinomial(m, p) for m, p in zip(lengths, mixed, strict=True)]
    return sp.csr_matrix(np.stack(rows))


class Fixed(np.random.RandomState):
    """Hands scikit-learn these topics to start from, and ones for its documents."""

    def gamma(self, shape, scale=1.0, size=None):
        return TOPICS.copy() if size == TOPICS.shape else np.ones(size)


TOPICS = np.random.default_rng(0).gamma(2.0, 1.0, (K, V)) + 0.01
START = Dirichlet(torch.tensor(TOPICS))


def theirs(**options) -> LatentDirichletAllocation:
    return LatentDirichletAllocation(K, random_state=Fixed(0), **options)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("turns", [1, 7, 100])
def test_a_step_is_scikit_learns(turns):
    counts = corpus(64)
    model = theirs(total_samples=1000, batch_size=64, max_doc_update_iter=turns)
    model.partial_fit(counts.astype(float))
    lda = LDA(K, max_local_iter=turns)
    q = lda.step(START, counts, n_documents=1000, rho=lda.rho(1))
    np.testing.assert_allclose(q.concentration, model.components_, rtol=1e-6)
    assert (q.concentration / START.concentration - 1).abs().max() > 0.1


def test_a_sequence_of_steps_is_scikit_learns():
    counts = corpus(120)
    q = START
    options = dict(doc_topic_prior=0.3, topic_word_prior=0.05)
    options |= dict(learning_decay=0.9, learning_offset=3.0)
    model = theirs(total_samples=120, batch_size=30, **options).partial_fit(counts.astype(float))
    lda = LDA(K, **options)
    for t in range(4):
        batch = counts[30 * t : 30 * t + 30]
        q = lda.step(q, batch, n_documents=120, rho=lda.rho(t + 1))
    np.testing.assert_allclose(q.concentration, model.components_, rtol=1e-6)


def test_transform_perplexity_and_history_are_scikit_learns():
    counts = corpus(80)
    held_out = corpus(37, seed=1)
    model = theirs(learning_method="batch", max_iter=1).fit(counts.astype(float))
    one_pass = partial(LDA(K).fit, counts, passes=1, batch_size=None, progress=False)
    fitted = one_pass(start=START)
    np.testing.assert_allclose(fitted.q.concentration, model.components_, rtol=1e-6)
    np.testing.assert_allclose(fitted.transform(held_out), model.transform(held_out), rtol=1e-5)
    assert fitted.perplexity(held_out) == pytest.approx(model.perplexity(held_out), rel=1e-8)
    again = one_pass(start=fitted.q)
    assert again.history[0] == pytest.approx(-np.log(model.perplexity(counts)), rel=1e-8)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_in_batches_of_everything_the_elbo_never_falls(alpha):
    """Local steps run to their end."""
    lda = LDA(K, doc_topic_prior=alpha, local_tol=1e-9, max_local_iter=2000)
    fitted = lda.fit(corpus(15), passes=12, batch_size=None, progress=False)
    steps = np.diff(fitted.history)
    assert len(steps) == 11
    assert steps.min() >= -1e-9 * abs(fitted.history[-1])
    assert fitted.history[-1] > fitted.history[0] + 0.05


@pytest.fixture(scope="module")
def settled():
    counts = corpus(40, seed=5)
    lda = LDA(K, topic_word_prior=0.1, local_tol=1e-8, max_local_iter=2000)
    fitted = lda.fit(counts, passes=400, batch_size=None, tol=1e-8, progress=False)
    assert fitted.converged
    return counts, lda, fitted


@pytest.mark.slow
def test_taking_documents_out_is_the_first_step_of_fitting_the_rest(settled):
    counts, lda, fitted = settled
    for left_out in ([0], [3, 17, 29]):
        remaining = counts[np.setdiff1d(np.arange(40), left_out)]
        expected = lda.step(fitted.q, remaining).concentration
        actual = fitted.without(left_out).concentration
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
        moved = (fitted.q.concentration - actual).sum()
        assert float(moved) == pytest.approx(counts[left_out].sum(), rel=1e-9)
    for_each_word = torch.tensor(counts.toarray()).double()
    torch.testing.assert_close(fitted.sites["log"].sum(1), for_each_word, rtol=1e-9, atol=1e-9)


def by_hand(topics: np.ndarray, counts: np.ndarray, alpha: float, gamma: np.ndarray) -> tuple:
    """Of one document: the bound with E_q[log β], the bound with β integrated out, γ, n_w φ_wk."""
    words = np.flatnonzero(counts)
    n = counts[words]
    psi = special.psi
    log_gamma = special.gammaln
    logs = psi(topics[:, words]) - psi(topics.sum(1))[:, None]
    totals = topics.sum(1)
    for _ in range(20_000):
        score = psi(gamma)[:, None] + logs
        phi = np.exp(score - special.logsumexp(score, 0))
        last = gamma
        gamma = alpha + (n * phi).sum(1)
        if np.abs(gamma - last).max() < 1e-13:
            break
    theta = psi(gamma) - psi(gamma.sum())
    prior = np.full(len(gamma), alpha)
    joint = (n * phi * (logs + theta[:, None])).sum() + ((prior - gamma) * theta).sum()
    entropy = -(n * special.xlogy(phi, phi)).sum()
    norm_of_prior = log_gamma(prior).sum() - log_gamma(prior.sum())
    norm = log_gamma(gamma).sum() - log_gamma(gamma.sum())
    bound = joint + entropy - norm_of_prior + norm
    sites = n * phi
    of_words = log_gamma(topics[:, words] + sites) - log_gamma(topics[:, words])
    of_totals = log_gamma(totals + sites.sum(1)) - log_gamma(totals)
    integrated = bound - (sites * logs).sum() + of_words.sum() - of_totals.sum()
    return bound, integrated, gamma, sites


def test_left_out_documents_by_hand(settled):
    """The bound of each document under λ − λ̃_d, with new factors of its own."""
    matrix, _, fitted = settled
    dense = matrix.toarray().astype(float)
    topics = fitted.q.concentration.numpy()
    left_out = fitted.left_out()
    before = fitted.log_predictive(matrix)
    for d in range(0, 40, 3):
        *_, sites = by_hand(topics, dense[d], 0.25, np.ones(K))
        without = topics.copy()
        without[:, np.flatnonzero(dense[d])] -= sites
        for concentration, actual in ((topics, before), (without, left_out)):
            expected = by_hand(concentration, dense[d], 0.25, np.ones(K))[1]
            assert float(actual[d]) == pytest.approx(expected, rel=1e-7)
    assert float((before - left_out).min()) > 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_every_form_of_counts_is_read_alike():
    counts = corpus(12)
    fit = partial(LDA(2).fit, passes=2, batch_size=5, progress=False)
    dense = torch.tensor(counts.toarray())
    expected = fit(counts)
    forms = [
        counts.tocoo(),
        counts.tocsc(),
        sp.csr_array(counts.astype(np.uint16)),
        dense,
        dense.to_sparse(),
        dense.float().to_sparse_csr(),
        dense.numpy(),
        dense.tolist(),
    ]
    for actual in map(fit, forms):
        torch.testing.assert_close(actual.q.concentration, expected.q.concentration)
        assert actual.history == pytest.approx(expected.history, rel=1e-12)


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
