"""``helene`` on two ranks that hold copies of a model: one estimate for both, whoever fails to make it."""

import torch
from torch import nn
from torch.nn import functional as F

from dynguard.testing import call, gradient_event, on_ranks
from dynguard.torch.gauss_newton import diagonal
from dynguard.torch.probe import Probe
from dynguard_plugins.stability.helene import Helene


class Fake:
    """A Training of one model."""

    def __init__(self, model, loss_fn):
        self.model, self.loss_fn, self.optimizer, self.scaler, self.groups = model, loss_fn, None, None, ()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batch_of(rank):
    g = torch.Generator().manual_seed(rank)
    return torch.randn(32, 6, generator=g), torch.randint(0, 3, (32,), generator=g)


def ordinary(model, seed):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=g) for p in model.parameters()]


def event_of(model, step, fn, batch):
    named = dict(model.named_parameters())
    gradients = dict(zip(named, ordinary(model, step), strict=True))
    return gradient_event(step, gradients=gradients, parameters=named, training=Fake(model, fn), batches=[batch])


def two_ranks(rank, folder):
    """Each with its own batch; the second one's loss can't be evaluated at step 1, and nobody's at step 2."""
    model, data = nn.parallel.DistributedDataParallel(net()), batch_of(rank)
    works = {0: (loss_fn, loss_fn), 1: (loss_fn, None), 2: (None, None)}
    plugin = Helene(every=1, share=1.0)
    for step, fns in works.items():
        call(plugin, "adjust_gradients", event=event_of(model, step, fns[rank], data))
    curvature = plugin._watched[""].curvature
    torch.save([curvature.values, curvature.fallbacks], folder / f"{rank}.pt")


def test_ranks_with_copies_of_the_model_clip_alike(tmp_path):
    on_ranks(two_ranks, tmp_path)
    (mine, fell), (theirs, _) = (torch.load(tmp_path / f"{r}.pt") for r in range(2))
    assert fell == 1
    model = net()
    probes = [Probe(model, loss_fn, batch_of(r), list(model.parameters())) for r in range(2)]
    first, second = ([diagonal(p, seed) for p in probes] for seed in (0, 1))
    third = [g**2 for g in ordinary(model, 2)]
    for i in range(4):
        assert torch.equal(mine[i], theirs[i])
        mean = ((first[0][i] + first[1][i]) / 2 + second[0][i]) / 2
        last = third[i] * min(1.0, float(10 * mean.mean() / third[i].mean()))
        torch.testing.assert_close(mine[i], mean + (last - mean) / 3, rtol=1e-4, atol=1e-7)
