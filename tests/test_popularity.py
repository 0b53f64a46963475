"""The ``popularity`` plugin: exposures as counted, log q with the wrong and the right sign, planted recommendations."""

import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dynguard import Severity
from dynguard.testing import check_plugin, embedding_event
from dynguard_plugins.embeddings.popularity import Popularity

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_contract():
    check_plugin(Popularity)
    check_plugin(Popularity, options={"least_steps": 1, "least_rows": 10, "labels": {"a": ["x"]}})


class Scores(nn.Module):
    """User and item factors and item biases."""

    def __init__(self, users=100, items=60, sparse=False):
        super().__init__()
        self.user, self.item = nn.Embedding(users, 4, sparse=sparse), nn.Embedding(items, 4, sparse=sparse)
        self.item_bias, self.user_bias = nn.Embedding(items, 1, sparse=sparse), nn.Embedding(users, 1, sparse=sparse)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.user_bias, self.item_bias):
            nn.init.zeros_(table.weight)

    def forward(self, users, items):
        product = (self.user(users) * self.item(items)).sum(-1, keepdim=True)
        return (product + self.item_bias(items) + self.user_bias(users)).squeeze(-1)


def zipf(n, generator):
    q = 1.0 / torch.arange(1, n + 1).float()
    return (q / q.sum())[torch.randperm(n, generator=generator)]


def in_batch_softmax(watch, sign, optimizer, sparse=False, steps=250):
    g = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    model, q = Scores(sparse=sparse), zipf(60, g)
    optimizer = optimizer(model.parameters())
    plugin = Popularity(labels={"item_bias.weight": [f"item {i}" for i in range(60)]})
    flow = watch(model, optimizer, plugins=[plugin])
    for _ in range(steps):
        users, items = torch.randint(0, 100, (64,), generator=g), torch.multinomial(q, 64, True, generator=g)
        scores = model.user(users) @ model.item(items).T + model.item_bias(items).T + sign * q[items].log()
        again = (items[:, None] == items[None]) & ~torch.eye(64, dtype=torch.bool)
        optimizer.zero_grad()
        F.cross_entropy(scores.masked_fill(again, -1e9), torch.arange(64)).backward()
        optimizer.step()
    flow.close()
    return flow, plugin, q


def told(flow):
    return [f for f in flow.findings if f.kind == "popularity_bias"]


@pytest.mark.parametrize(("optimizer", "sparse"), [
    (lambda p: torch.optim.Adam(p, lr=2e-2), False), (lambda p: torch.optim.SparseAdam(list(p), lr=2e-2), True),
    (lambda p: torch.optim.Adagrad(p, lr=0.1), False),
])  # fmt: skip
def test_log_q_with_the_wrong_sign_is_told_and_with_the_right_sign_is_not(watch, optimizer, sparse):
    flow, _, q = in_batch_softmax(watch, +1.0, optimizer, sparse)
    (finding,) = told(flow)
    assert (finding.subject, finding.severity) == ("item_bias.weight", Severity.WARNING)
    assert finding.value("rank_correlation") < -0.6
    assert f"item {int(q.argmax())}" in finding.premise
    assert finding.confidence > 0.999
    flow, _, _ = in_batch_softmax(watch, -1.0, optimizer, sparse)
    assert not told(flow)


def pointwise(watch, labels, *, bias=False, steps=300, plugin=None):
    """Binary cross-entropy, users and items by Zipf."""
    g = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    model, of_users, of_items = Scores(), zipf(100, g), zipf(60, g)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    plugin = plugin or Popularity()
    flow = watch(model, optimizer, plugins=[plugin])
    exposures = np.zeros(60, dtype=np.int64)
    for _ in range(steps):
        users, items = (torch.multinomial(p, 64, True, generator=g) for p in (of_users, of_items))
        exposures += np.bincount(items.numpy(), minlength=60)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(users, items), labels(items, g)).backward()
        optimizer.step()
    return flow, plugin, exposures


@pytest.mark.parametrize("rate", [0.03, 0.5, 0.97])
def test_a_pull_that_all_rows_share_is_no_inversion(watch, rate):
    """A rare target and no global bias: rows seen often are pushed down farther, and none is pushed up."""
    flow, _, _ = pointwise(watch, lambda items, g: (torch.rand(len(items), generator=g) < rate).float())
    flow.close()
    assert not told(flow)


def test_exposures_are_counted_with_their_multiplicity_and_survive_a_resume(watch):
    flow, plugin, exposures = pointwise(watch, lambda items, g: torch.ones(len(items)), steps=30)
    assert plugin.exposures("item.weight").tolist() == exposures.tolist()
    flow.close()
    section = plugin.summarize()
    row = dict(
        zip(section.tables[0].columns, next(r for r in section.tables[0].rows if r[0] == "item.weight"), strict=True)
    )
    x = exposures.astype(float)
    assert row["Gini"] == pytest.approx(np.abs(x[:, None] - x).mean() / (2 * x.mean()), rel=1e-3)
    buffer = io.BytesIO()
    torch.save(plugin.state_dict(), buffer)
    buffer.seek(0)
    other = Popularity()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    other.on_embeddings(embedding_event(table="item.weight", ids=torch.tensor([7, 7, 7]), weight=torch.zeros(60, 4)))
    exposures[7] += 3
    assert other.exposures("item.weight").tolist() == exposures.tolist()


def lists_of(exposures, weight, n=200):
    random = np.random.default_rng(0)
    p = exposures.astype(float) ** weight
    return np.stack([random.choice(len(p), 5, replace=False, p=p / p.sum()) for _ in range(n)])


@pytest.mark.parametrize(("make", "what"), [
    (lambda x: np.tile(np.argsort(-x)[:3], (100, 1)), "amplifies"),  # the same three top items for everyone
    (lambda x: lists_of(x, -2.0), "inverts"),
    (lambda x: np.random.default_rng(1).choice(len(x), (200, 1), p=x / x.sum()), None),  # what the data shows
    (lambda x: np.tile(np.argsort(-x)[:3], (20, 1)), None),  # too few lists to say
])  # fmt: skip
def test_recommendations_are_compared_with_the_data(watch, make, what):
    flow, plugin, exposures = pointwise(watch, lambda items, g: torch.ones(len(items)), steps=120)
    lists = make(exposures)
    plugin.recommended("item.weight", torch.from_numpy(lists[:10]))
    plugin.recommended("item.weight", lists[10:].tolist())
    flow.close()
    assert [f.value("what") for f in told(flow)] == ([what] if what else [])
    if what:
        (finding,) = told(flow)
        mean = exposures[lists].mean()
        usual = np.square(exposures).sum() / exposures.sum()
        assert finding.value("average_recommendation_popularity") == pytest.approx(mean)
        assert finding.value("popularity_lift") == pytest.approx(mean / usual - 1)
        assert finding.value("lower") - 1e-9 <= mean / usual - 1 <= finding.value("upper") + 1e-9
    assert any(t.title == "Recommendations" for t in plugin.summarize().tables)


def test_a_later_evaluation_replaces_the_earlier(watch):
    flow, plugin, exposures = pointwise(watch, lambda items, g: torch.ones(len(items)), steps=120)
    plugin.recommended("item.weight", np.tile(np.argsort(-exposures)[:3], (100, 1)))
    plugin.on_embeddings(embedding_event(120, table="item.weight", ids=torch.tensor([1]), weight=torch.zeros(60, 4)))
    plugin.recommended("item.weight", [[0], [1]])
    flow.close()
    assert not told(flow)


def test_wrong_recommendations_are_refused(watch):
    plugin = Popularity()
    with pytest.raises(KeyError, match="no table 'item' has been looked up"):
        plugin.recommended("item", [[1]])
    plugin.on_embeddings(embedding_event(table="item", ids=torch.tensor([0]), weight=torch.zeros(5, 2)))
    with pytest.raises(ValueError, match="rows 0 to 4"):
        plugin.recommended("item", [[1], [5]])


def test_a_table_that_grows_keeps_its_counts():
    plugin = Popularity()
    for size, ids in ((4, [3, 3]), (9, [3, 8])):
        plugin.on_embeddings(embedding_event(table="t", ids=torch.tensor(ids), weight=torch.zeros(size, 1)))
    assert plugin.exposures("t").tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_rows_that_are_not_finite(dtype):
    plugin = Popularity(least_steps=1, least_rows=10)
    weight = torch.randn(40, 1).to(dtype)
    plugin.on_embeddings(embedding_event(table="t", ids=torch.arange(40), weight=weight))
    weight[3] = float("nan")
    assert not list(plugin.diagnose())
    assert plugin.summarize().tables[0].rows[0][0] == "t"
