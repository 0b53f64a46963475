"""One batch again and again: spikes are the dynamics' doing, and holding a step back can't help."""

import numpy as np
import pytest
import torch
from torch import nn

from dynguard import Action, FlowManager
from dynguard_plugins.stability.batches import SameBatch


def edge_of_stability(seed, steps, flow_of):
    """Full-batch gradient descent whose sharpness rises to 2 / lr (Cohen et al. 2021); returns losses and weights."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
    x = torch.randn(128, 6)
    y = torch.sign(x[:, :1] * x[:, 1:2])
    flow = flow_of(model, optimizer)
    losses = []
    for _ in range(steps):
        loss = (model(x) - y).square().mean()
        if flow is not None:
            flow.observe(loss=loss, batch=(x, y) if flow.tells else None)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_full_batch_run_is_left_alone(seed, tmp_path):
    flows = []

    def guarded(model, optimizer):
        flows.append(FlowManager(model, optimizer, plugins=["spike"], run_dir=tmp_path / "run"))
        flows[0].tells = True
        return flows[0]

    plain = edge_of_stability(seed, 500, lambda *_: None)
    losses, weights = edge_of_stability(seed, 500, guarded)
    flow = flows[0]
    flow.close()
    assert sum(b > a for a, b in zip(plain[0][100:], plain[0][101:], strict=False)) > 10  # it does oscillate
    assert flow.interventions == []
    assert losses == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(weights, plain[1], strict=True))
    assert all(f.action is Action.WARN and "the data is that of the step before" in f.implies
               for f in flow.findings if f.kind in ("grad_spike", "loss_spike"))  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_without_observed_batches_one_held_step_shows_that_there_is_one_batch_only(seed, tmp_path):
    flows = []

    def guarded(model, optimizer):
        flows.append(FlowManager(model, optimizer, plugins=["spike"], run_dir=tmp_path / "run"))
        flows[0].tells = False
        return flows[0]

    edge_of_stability(seed, 400, guarded)
    flows[0].close()
    assert sum(i.action is Action.SKIP for i in flows[0].interventions) <= 1


def test_a_wild_step_on_the_same_batch_is_clipped_not_skipped(tmp_path):
    """Seen twice the same data: no other batch can come, so a shorter step is the only way out."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(32, 4)
    with FlowManager(model, optimizer, plugins=["spike"], run_dir=tmp_path / "run") as flow:
        for step in range(160):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            flow.observe(loss=loss, batch=x)
            (loss * (1e5 if step == 150 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(i.step, i.action) for i in flow.interventions] == [(150, Action.CLIP)]


def test_batches_are_compared_by_their_arrays():
    same = SameBatch()
    x, y = torch.zeros(3), np.zeros(3)
    assert not same.see([{"x": x, "y": [y]}])
    assert same.see([{"x": x, "y": [y]}])  # another dict, the same arrays
    x.add_(1)
    assert not same.see([{"x": x, "y": [y]}])  # written to since
    assert same.see([{"x": x, "y": [y]}])
    assert not same.see([{"x": x.clone(), "y": [y]}])
    assert not same.see([])
    assert not same.see([(x,)])
    assert not same.see([("text", 3)])


def test_no_batch_is_kept_alive():
    import gc
    import weakref

    same, x = SameBatch(), torch.zeros(3)
    same.see([x])
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    assert not same.see([torch.zeros(3)])
