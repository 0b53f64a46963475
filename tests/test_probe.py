"""Evaluating the loss again: the right gradient, and nothing left behind."""

import copy

import pytest
import torch
from torch import nn

from dynguard.testing.fingerprints import changed, fingerprint
from dynguard.torch.probe import Probe, ProbeError, probing


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(24, 3)
    )


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch(seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(16, 1, 8, generator=g), torch.randint(0, 3, (16,), generator=g)


def test_the_gradient_is_that_of_backward_at_the_same_random_state():
    model, data = net(), batch()
    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    found = Probe(model, loss_fn, data, list(model.parameters())).gradients()
    torch.manual_seed(7)
    loss_fn(twin, data).backward()
    for mine, theirs in zip(found, twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.grad)


def test_nothing_of_it_stays():
    model, data = net(), batch()
    loss_fn(model, data).backward()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    probe = Probe(model, loss_fn, data, list(model.parameters()))
    first, second = probe.gradients(), probe.gradients()
    assert probe.loss().ndim == 0
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))  # the same dropout masks
    assert probe.evaluations == 2
    assert changed(fingerprint(before), fingerprint(dict(model.state_dict()))) == []
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
    assert torch.equal(random, torch.get_rng_state())


def test_hooks_can_tell_a_probe_and_a_failing_one_leaves_no_mark():
    model, data, seen = net(), batch(), []
    model.register_forward_hook(lambda *_: seen.append(probing()))
    model(data[0])
    Probe(model, loss_fn, data, list(model.parameters())).gradients()
    assert seen == [False, True]

    def breaks(model, data):
        raise ZeroDivisionError("no")

    with pytest.raises(ProbeError, match="ZeroDivisionError: no"):
        Probe(model, breaks, data, list(model.parameters())).gradients()
    assert not probing()


def test_frozen_and_unused_parameters():
    model, data = net(), batch()
    model[0].weight.requires_grad_(False)
    unused = nn.Parameter(torch.ones(2))
    probe = Probe(model, loss_fn, data, [*model.parameters(), unused])
    found = probe.gradients()
    assert len(found) == len(probe.parameters) == len(list(model.parameters()))  # without the frozen, with the unused
    assert torch.equal(found[-1], torch.zeros(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (loss_fn, iter([1])), "iterator"),
        (lambda: (lambda m, b: 1.0, batch()), "returned float"),
        (lambda: (lambda m, b: loss_fn(m, b).detach(), batch()), "does not require grad"),
    ],
)
def test_what_can_not_be_probed_says_why(make, message):
    fn, data = make()
    model = net()
    with pytest.raises(ProbeError, match=message):
        Probe(model, fn, data, list(model.parameters())).gradients()


def test_a_loss_per_sample_is_averaged():
    model, data = nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = Probe(model, lambda m, b: m(b).squeeze(1), data, list(model.parameters())).gradients()
    torch.testing.assert_close(found[0], torch.tensor([[2.0, 3.0]]))
    torch.testing.assert_close(found[1], torch.tensor([1.0]))
