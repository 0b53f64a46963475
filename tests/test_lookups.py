"""The embedding source: every lookup counted, every touched row's gradient, against plain counting and autograd."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from dynguard import FlowManager, hookimpl
from dynguard.arrays import as_on_device
from dynguard.torch.embeddings import counted, some_of


class Keeps:
    """Keeps every event."""

    def __init__(self):
        self.events = []

    @hookimpl
    def on_embeddings(self, event):
        self.events.append(event)


class Two(nn.Module):
    def __init__(self, sparse=False, **options):
        super().__init__()
        self.user = nn.Embedding(20, 4, sparse=sparse, **options)
        self.bag = nn.EmbeddingBag(10, 4, sparse=sparse, mode="sum")
        self.head = nn.Linear(4, 1)

    def forward(self, users, bags):
        return self.head(self.user(users).mean(1) + self.bag(bags)).squeeze(1)


def watch(model, plugin, tmp_path, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, FlowManager(model, optimizer, plugins=[plugin], run_dir=tmp_path / "run", strict=True, **options)


@pytest.mark.parametrize("sparse", [False, True])
def test_every_lookup_counts_and_every_row_has_its_gradient(sparse, tmp_path):
    torch.manual_seed(0)
    model, plugin = Two(sparse), Keeps()
    optimizer, flow = watch(model, plugin, tmp_path)
    users, bags = torch.tensor([[1, 1], [7, 2], [1, 19]]), torch.tensor([[3, 3, 3], [0, 9, 3], [5, 5, 0]])
    model(users, bags).square().sum().backward()
    expected = {n: (g.grad.to_dense() if sparse else g.grad.clone()) for n, g in
                (("user.weight", model.user.weight), ("bag.weight", model.bag.weight))}  # fmt: skip
    optimizer.step()
    flow.close()
    assert {e.table for e in plugin.events} == set(expected)
    for event, ids in zip(plugin.events, (users, bags), strict=True):
        rows, counts = np.unique(ids.numpy(), return_counts=True)
        assert event.rows.tolist() == rows.tolist()
        assert event.counts.tolist() == counts.tolist()
        torch.testing.assert_close(event.gradients, expected[event.table][rows])
        torch.testing.assert_close(event.row_gradient_norms, expected[event.table][rows].norm(dim=1))
        assert event.learning_rate == 0.1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=12), min_size=1, max_size=4), st.booleans())
def test_accumulated_lookups_add_up(tmp_path_factory, batches, sparse):
    model, plugin = nn.Sequential(nn.Embedding(20, 3, sparse=sparse), nn.Linear(3, 1)), Keeps()
    optimizer, flow = watch(model, plugin, tmp_path_factory.mktemp("run"))
    for batch in batches:
        model(torch.tensor(batch)).sum().backward()
    optimizer.step()
    flow.close()
    (event,) = plugin.events
    rows, counts = np.unique(np.concatenate(batches), return_counts=True)
    assert event.rows.tolist() == rows.tolist()
    assert event.counts.tolist() == counts.tolist()


def test_what_does_not_train_is_not_counted(tmp_path):
    model, plugin = nn.Sequential(nn.Embedding(20, 3), nn.Linear(3, 1)), Keeps()
    optimizer, flow = watch(model, plugin, tmp_path)
    with torch.no_grad():
        model(torch.tensor([1, 2]))
    model.eval()
    model(torch.tensor([3]))
    model.train()
    checkpoint(model, torch.tensor([4, 4]), use_reentrant=False).sum().backward()
    optimizer.step()
    flow.close()
    (event,) = plugin.events
    assert (event.rows.tolist(), event.counts.tolist()) == ([4], [2])


def test_tied_tables_are_one_and_padding_is_told(tmp_path):
    model = nn.ModuleList([nn.Embedding(6, 2, padding_idx=0), nn.Embedding(6, 2, padding_idx=0)])
    model[1].weight = model[0].weight
    plugin = Keeps()
    optimizer, flow = watch(model, plugin, tmp_path)
    (model[0](torch.tensor([1, 0])).sum() + model[1](torch.tensor([1, 5])).sum()).backward()
    optimizer.step()
    flow.close()
    (event,) = plugin.events
    assert (event.rows.tolist(), event.counts.tolist(), event.padding) == ([0, 1, 5], [1, 2, 1], 0)
    assert event.row_gradient_norms[0] == 0


def test_a_table_without_gradient_or_lookup(tmp_path):
    """Looked up but not in the loss: norms of 0. Not looked up: no event."""
    model, plugin = nn.ModuleList([nn.Embedding(6, 2), nn.Embedding(6, 2), nn.Linear(2, 1)]), Keeps()
    optimizer, flow = watch(model, plugin, tmp_path)
    model[0](torch.tensor([3]))
    model[2](torch.ones(2)).sum().backward()
    optimizer.step()
    flow.close()
    (event,) = plugin.events
    assert (event.table, event.rows.tolist(), event.row_gradient_norms.tolist()) == ("0.weight", [3], [0.0])


def test_a_sparse_gradient_tells_of_a_functional_lookup(tmp_path):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(8, 2))

        def forward(self, ids):
            return nn.functional.embedding(ids, self.table, sparse=True)

    model, plugin = Functional(), Keeps()
    optimizer, flow = watch(model, plugin, tmp_path)
    model(torch.tensor([5, 5, 2])).sum().backward()
    optimizer.step()
    flow.close()
    (event,) = plugin.events
    assert (event.table, event.rows.tolist(), event.counts.tolist()) == ("table", [2, 5], [1, 2])
    torch.testing.assert_close(event.gradients, torch.tensor([[1.0, 1.0], [2.0, 2.0]]))


def test_without_a_plugin_that_looks_nothing_is_hooked(tmp_path):
    model = nn.Sequential(nn.Embedding(6, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlowManager(model, optimizer, plugins=["spike"], run_dir=tmp_path / "run"):
        assert not model[0]._forward_pre_hooks
    plugin = Keeps()
    _, flow = watch(model, plugin, tmp_path / "two")
    assert model[0]._forward_pre_hooks
    flow.close()
    assert not model[0]._forward_pre_hooks


class Holds:
    """Takes only a part of the way of some rows."""

    @hookimpl
    def adjust_gradients(self, event):
        event.training.scale_rows(0, torch.tensor([1, 2]), torch.tensor([0.0, 0.25]))


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)])
def test_the_way_of_single_rows_can_be_shortened(make, tmp_path):
    ends = []
    for plugins in ([], [Holds()]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 1))
        start = model[0].weight.detach().clone()
        optimizer = make(model.parameters())
        with FlowManager(model, optimizer, plugins=plugins, run_dir=tmp_path / f"run{len(ends)}", strict=True):
            model(torch.tensor([0, 1, 2])).sum().backward()
            optimizer.step()
        ends.append(model[0].weight.detach() - start)
    plain, held = ends
    torch.testing.assert_close(held, plain * torch.tensor([[1.0], [0.0], [0.25], [1.0]]))


class Slows:
    """Scales the gradients of two rows, and says which tables it was asked about."""

    def __init__(self, skip=False):
        self.tables, self.skip = [], skip

    @hookimpl
    def adjust_embeddings(self, event):
        self.tables.append((event.step, event.table, event.rows.tolist()))
        event.training.scale_row_gradients(event.index, torch.tensor([1, 2]), torch.tensor([0.0, 0.25]))


@pytest.mark.parametrize("sparse", [False, True])
def test_row_gradients_are_scaled_in_place(sparse, tmp_path):
    """For gradient descent the way is the gradient, so a row's way is multiplied by its factor; repeats included."""
    ends = []
    for plugins in ([], [Slows()]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 2, sparse=sparse), nn.Linear(2, 1))
        start = model[0].weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with FlowManager(model, optimizer, plugins=plugins, run_dir=tmp_path / f"run{len(ends)}", strict=True):
            model(torch.tensor([0, 2, 1, 2, 2])).sum().backward()
            optimizer.step()
        ends.append(model[0].weight.detach() - start)
    plain, slowed = ends
    torch.testing.assert_close(slowed, plain * torch.tensor([[1.0], [0.0], [0.25], [1.0]]))
    assert plugins[0].tables == [(0, "0.weight", [0, 1, 2])]


def test_row_guards_are_not_asked_on_a_skipped_step(tmp_path):
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 1))
    optimizer, guard = torch.optim.SGD(model.parameters(), lr=0.1), Slows()
    with FlowManager(model, optimizer, plugins=["spike", guard], run_dir=tmp_path / "run", strict=True) as flow:
        for factor in (1.0, float("nan"), 1.0):
            optimizer.zero_grad()
            (model(torch.tensor([0, 2])).sum() * factor).backward()
            optimizer.step()
    assert [i.step for i in flow.interventions] == [1]
    assert [step for step, _, _ in guard.tables] == [0, 2]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 19), min_size=1, max_size=60), st.integers(1, 8))
def test_counting_on_a_device_needs_no_host_and_gives_the_same(ids, most):
    """Places left over repeat the last row with a count of 0; what is sampled was looked up."""
    given_ids = torch.tensor(ids)
    rows, counts = counted(given_ids, 20)
    with as_on_device():
        padded, padded_counts = counted(given_ids, 20)
        some = some_of(padded, padded_counts, most)
    assert padded.shape == padded_counts.shape == (min(len(ids), 20),)
    kept = padded_counts > 0
    assert (padded[kept].tolist(), padded_counts[kept].tolist()) == (rows.tolist(), counts.tolist())
    assert (padded[~kept] == rows[-1]).all()
    assert (padded.diff() >= 0).all()
    assert set(some.tolist()) <= set(rows.tolist())
    assert len(some) == min(most, len(padded))


@pytest.mark.parametrize("sparse", [False, True])
def test_repeated_rows_are_scaled_once(sparse, tmp_path):
    """As they stand in an event on a device: the first factor of a row counts, for gradients and for the update."""

    class Both:
        @hookimpl
        def adjust_embeddings(self, event):
            rows, factors = torch.tensor([1, 2, 2, 2]), torch.tensor([0.5, 0.5, 0.0, 7.0])
            event.training.scale_row_gradients(event.index, rows, factors)
            event.training.scale_rows(event.index, rows, factors)

    ends = []
    for plugins in ([], [Both()]):
        torch.manual_seed(0)
        model = nn.Embedding(4, 2, sparse=sparse)
        start = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with FlowManager(model, optimizer, plugins=plugins, run_dir=tmp_path / f"run{len(ends)}", strict=True):
            model(torch.tensor([0, 1, 2, 2])).sum().backward()
            optimizer.step()
        ends.append(model.weight.detach() - start)
    torch.testing.assert_close(ends[1], ends[0] * torch.tensor([[1.0], [0.25], [0.25], [1.0]]))
