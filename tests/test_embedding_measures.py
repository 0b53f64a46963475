"""Measures of exposure, recommendations and rank: against closed forms, scipy, torch and sums written out."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynguard_plugins.embeddings import measures as m

COUNTS = st.lists(st.integers(0, 10_000), min_size=1, max_size=60).filter(any)


@settings(max_examples=60, deadline=None)
@given(COUNTS)
def test_gini_is_the_mean_difference_over_twice_the_mean(counts):
    x = np.array(counts, dtype=float)
    pairs = np.abs(x[:, None] - x[None, :]).mean()
    assert m.gini(counts) == pytest.approx(pairs / (2 * x.mean()), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(COUNTS)
def test_entropy_and_perplexity_are_those_of_scipy(counts):
    expected = scipy.stats.entropy(counts)
    assert m.entropy(counts) == pytest.approx(expected, abs=1e-6)
    assert m.perplexity(counts) == pytest.approx(math.exp(expected), rel=1e-6)


def test_closed_forms_of_skew():
    assert m.gini([5, 5, 5, 5]) == 0
    assert m.gini([0, 0, 0, 9]) == pytest.approx(3 / 4, abs=1e-12)
    n = 1000
    assert m.gini(np.arange(1, n + 1)) == pytest.approx((n - 1) / (3 * n), abs=1e-12)  # the first n integers
    assert m.perplexity([7] * 32) == pytest.approx(32, abs=1e-9)
    assert m.coverage([0, 3, 0, 1]) == 0.5
    assert m.head_share([10, 1, 1, 1, 7], 0.4) == pytest.approx(17 / 20)
    assert m.head_entries([1, 9, 1, 8], 0.5).tolist() == [False, True, False, True]
    for measure in (m.gini, m.entropy, m.head_share, m.popularity_of_data):
        assert math.isnan(measure([0, 0]))
        assert math.isnan(measure([]))


def test_negative_counts_are_refused():
    with pytest.raises(ValueError, match="counts must be numbers >= 0"):
        m.gini([1, -1])


@settings(max_examples=30, deadline=None)
@given(COUNTS)
def test_twice_the_area_over_the_lorenz_curve_is_gini(counts):
    x, y = m.lorenz(counts, len(counts) + 1)  # the points of the curve themselves
    assert (y[0], y[-1]) == pytest.approx((0, 1))
    assert 1 - 2 * np.trapezoid(y, x) == pytest.approx(m.gini(counts), abs=1e-6)


def test_recommendation_measures_by_hand():
    popularity = [100, 10, 5, 1, 0]
    lists = [[0, 1], [0, 4], [3, 4]]
    assert m.average_recommendation_popularity(lists, popularity) == pytest.approx((55 + 50 + 0.5) / 3)
    assert m.average_share_of_long_tail(lists, popularity, 0.2) == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert m.popularity_of_data([3, 1]) == pytest.approx((3 * 3 + 1 * 1) / 4)  # a random interaction's item


@pytest.mark.parametrize("shape", [(200, 16), (10, 16)])
def test_rank_measures_against_torch(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) @ torch.diag(
        torch.logspace(0, -3, 16, dtype=torch.float64)
    )
    s = torch.linalg.svdvals(x)
    p = s / s.sum() + 1e-7
    values = m.singular_values(x.numpy())
    assert m.effective_rank(values) == pytest.approx(torch.exp(-(p * p.log()).sum()).item(), abs=1e-6)
    assert m.information_abundance(values) == pytest.approx((s.sum() / s[0]).item(), abs=1e-6)


def test_rank_of_known_matrices():
    assert m.effective_rank(m.singular_values(np.eye(8))) == pytest.approx(8, abs=1e-4)  # eps within
    assert m.information_abundance(m.singular_values(np.eye(8))) == pytest.approx(8)
    assert m.effective_rank(m.singular_values(np.outer(np.arange(1, 9), np.ones(8)))) == pytest.approx(1, abs=1e-4)
    assert math.isnan(m.effective_rank(np.zeros(3)))


def test_alignment_and_uniformity_are_those_of_the_authors_code():
    g = torch.Generator().manual_seed(1)
    x, y = (torch.nn.functional.normalize(torch.randn((40, 6), generator=g, dtype=torch.float64)) for _ in range(2))
    expected = (x - y).norm(p=2, dim=1).pow(2).mean().item()  # the appendix of Wang & Isola
    assert m.alignment(3 * x.numpy(), y.numpy()) == pytest.approx(expected, abs=1e-6)
    expected = torch.pdist(x, p=2).pow(2).mul(-2).exp().mean().log().item()
    assert m.uniformity(x.numpy()) == pytest.approx(expected, abs=1e-6)
    assert m.uniformity(np.ones((5, 3))) == pytest.approx(0, abs=1e-9)


def test_rank_correlation_is_that_of_scipy_and_its_interval_covers():
    random = np.random.default_rng(0)
    true = 6 / math.pi * math.asin(0.6 / 2)  # Spearman's of a normal pair with Pearson's 0.6
    hits = 0
    for _ in range(400):
        x = random.normal(size=60)
        y = 0.6 * x + 0.8 * random.normal(size=60)
        r, low, high = m.rank_correlation(x, y, 0.95)
        hits += low <= true <= high
        assert r == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-9)
    assert 0.92 <= hits / 400 <= 0.985
    assert m.rank_correlation([1, 1, 2, 2, 3], [5, 5, 6, 6, 9])[0] == pytest.approx(1)
    assert all(math.isnan(v) for v in m.rank_correlation([1, 1, 1, 1, 1], [1, 2, 3, 4, 5]))


def test_bootstrap_interval_is_that_of_the_normal_for_many():
    x = np.random.default_rng(2).normal(3.0, 2.0, 400)
    low, high = np.quantile(m.bootstrap_means(x), [0.025, 0.975])
    half = 1.96 * x.std() / 20
    assert (low, high) == pytest.approx((x.mean() - half, x.mean() + half), abs=0.03)
