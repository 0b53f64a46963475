"""The tools that the benchmarks measure with: a count or a timing is only worth what these are."""

from __future__ import annotations

from operator import methodcaller

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402 - after the skip

from benchmarks import movielens, paired, timing  # noqa: E402
from benchmarks.reads import HostReads  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402

VECTOR = torch.tensor([1.0, 2.0, 3.0])
SCALAR = torch.tensor(2.0)


@pytest.mark.parametrize(
    "read",
    [
        lambda: methodcaller("item")(SCALAR),
        lambda: float(SCALAR),
        lambda: int(SCALAR),
        lambda: bool(SCALAR > 1.0),
        lambda: [1, 2, 3][torch.tensor(1)],
        lambda: methodcaller("tolist")(VECTOR),
        lambda: methodcaller("numpy")(VECTOR),
        lambda: np.asarray(VECTOR),
        lambda: VECTOR.cpu().numpy().tolist(),
        lambda: VECTOR[VECTOR > 1.0],
        lambda: methodcaller("nonzero")(VECTOR),
        lambda: torch.equal(VECTOR, VECTOR),
        lambda: f"{SCALAR.item():.1f}",
    ],
)
def test_each_way_to_wait_for_the_device_counts_once(read) -> None:  # type: ignore[no-untyped-def]
    with HostReads().counting() as reads:
        read()
    assert sum(reads.counts.values()) == 1, reads.counts


def test_work_on_the_device_counts_nothing() -> None:
    with HostReads().counting() as reads:
        norm = torch._foreach_norm([VECTOR, VECTOR])[0]
        torch.where(norm < VECTOR, VECTOR, 0.0).cumsum(0).max(dim=0)
        torch.cat([VECTOR, torch.stack([norm])]).isfinite().any()
        VECTOR.to(torch.float64).clone().mul_(2.0)
    assert not reads.counts


def test_counting_leaves_no_trace() -> None:
    before = {name: getattr(torch.Tensor, name) for name in ("item", "cpu", "__bool__", "__array__")}
    with HostReads().counting():
        pass
    assert {name: getattr(torch.Tensor, name) for name in before} == before


def test_two_copies_of_one_tensor_are_two_reads() -> None:
    with HostReads().counting() as reads:
        VECTOR.cpu()
        VECTOR.cpu()
    assert reads.counts == {"cpu": 2}


def test_contenders_take_turns_and_only_rounds_are_compared() -> None:
    calls: list[str] = []
    works = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = timing.interleave(works, rounds=5, calls=3, prepare=lambda: calls.append("prepare"))
    assert [len(seconds[name]) for name in works] == [5, 5]
    assert calls[::2] == ["prepare"] * 30
    for start in range(0, 30, 6):
        turn = calls[1::2][start : start + 6]
        assert turn in (["a"] * 3 + ["b"] * 3, ["b"] * 3 + ["a"] * 3)
    assert timing.ratios({"a": [2.0, 9.0], "b": [1.0, 3.0]}, "a", "b") == [2.0, 3.0]


def test_a_figure_is_median_and_quartiles() -> None:
    figure = timing.Figure.of("step", "mlp", "dynguard", "x", [5.0, 1.0, 2.0, 4.0, 3.0], ms=7.0)
    assert (figure.low, figure.median, figure.high) == (2.0, 3.0, 4.0)
    assert figure.notes == {"ms": 7.0}


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("mlp", 4 * (1024 * 1024 + 1024), 8),
        ("narrow", 100 * (64 * 64 + 64), 200),
        ("gpt", 6 * (12 * 384 * 384 + 13 * 384) + (2 * 256 + 64 + 2) * 384, 6 * 12 + 5),
        ("conv", 27 * 32 + 288 * 64 + 576 * 128 + 2 * (32 + 64 + 128) + 1290, 11),
    ],
)
def test_workloads_are_the_models_they_say(name: str, parameters: int, tensors: int) -> None:
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model = workload.build()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(list(model.parameters())) == tensors
    loss = workload.loss(model, workload.draw())
    torch.autograd.backward(loss)
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_paired_comparison_is_scipys() -> None:
    from scipy import stats

    rng = np.random.default_rng(1)
    own, base = rng.normal(1.02, 0.05, 12), rng.normal(1.0, 0.05, 12)
    found, t = paired.compare(own, base), stats.ttest_rel(own, base)
    low, high = t.confidence_interval()
    assert found.p == pytest.approx(t.pvalue)
    assert (found.difference - found.half, found.difference + found.half) == pytest.approx((low, high))
    assert found.wilcoxon == pytest.approx(stats.wilcoxon(own, base).pvalue)
    worse = stats.ttest_1samp((own - base) / base.mean(), -0.01, alternative="greater").pvalue
    assert found.worse == pytest.approx(worse)
    # The interval of the effect size: t lies at the tail quantiles of the distributions its ends stand for.
    for end, level in zip(found.dz[1:], (0.975, 0.025), strict=True):
        assert stats.nct.cdf(t.statistic, 11, end * np.sqrt(12)) == pytest.approx(level, abs=1e-5)
    mirrored = paired.compare(2 - own, 2 - base, better=-1)
    assert mirrored.dz == pytest.approx((-found.dz[0], -found.dz[2], -found.dz[1]), abs=1e-6)
    assert paired.compare(own, own).p == 1.0


def test_holm_by_hand() -> None:
    found = [paired.compare([1.0, 2.0, 3.5], [0.0, 0.0, 0.0]) for _ in range(3)]
    for one, p in zip(found, (0.01, 0.04, 0.03), strict=True):
        one.p = p
    paired.holm(found)
    assert [one.corrected for one in found] == pytest.approx([0.03, 0.06, 0.06])


def test_leave_one_out_by_time_and_ranking_by_hand() -> None:
    ratings = np.array([[1, 1, 5, 30], [1, 2, 5, 10], [1, 3, 5, 20], [2, 3, 1, 5], [2, 1, 1, 5], [2, 4, 1, 5]])
    data = movielens.split(ratings)
    assert (data.users.tolist(), data.items.tolist()) == ([0, 1], [1, 2])
    assert (data.valid.tolist(), data.test.tolist()) == ([2, 0], [0, 3])
    model = movielens.Factors(2, 4, sparse=False)
    with torch.no_grad():
        model.user.weight.zero_()[:, 0] = 1.0
        model.item.weight.zero_()[:, 0] = torch.tensor([1.0, 4.0, 3.0, 2.0])
    # User 0 has rated 1 and 2, so of 0 and 3 item 3 comes first; user 1 has rated 2 and 0, item 1 comes before 3.
    assert movielens.ranking(model, data, test=True) == pytest.approx({"ndcg": 1 / np.log2(3), "hr": 1.0})


@pytest.mark.parametrize("loss", ["bpr", "pointwise"])
def test_planted_interactions_come_with_both_labels(loss: str) -> None:
    rng = np.random.default_rng(0)
    ratings = np.array([[u, i, 1, rng.integers(99)] for u in range(30) for i in rng.choice(40, 12, replace=False)])
    data = movielens.split(ratings)
    bad = movielens.planted(data, "spread", 0)
    assert int(bad.sum()) == round(0.05 * len(bad))
    pairs = {True: [], False: []}  # type: ignore[var-annotated]
    for users, items, *labels in movielens.EPOCHS[loss](data, bad, torch.Generator().manual_seed(0)):
        if loss == "bpr":
            triples = torch.cat([users[:, None], items], 1).tolist()
            pairs[True] += [tuple(t) for t in triples]
            pairs[False] += [(u, j, i) for u, i, j in triples]
        else:
            for u, i, y in zip(users.tolist(), items.tolist(), labels[0].tolist(), strict=True):
                pairs[y > 0].append((u, i))
    both = {t[:2] for t in set(pairs[True]) & set(pairs[False]) if data.seen[t[0], t[1]]}
    assert both == set(zip(data.users[bad].tolist(), data.items[bad].tolist(), strict=True))
