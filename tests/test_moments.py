"""Moments and their reset, against torch's own optimizers; learning rates and updates scaled for one update."""

import math

import pytest
import torch
from torch import nn

from dynguard.arrays import as_on_device
from dynguard.torch.moments import can_reset, moments, reset_moments
from dynguard.torch.source import Source
from dynguard.torch.training import TorchTraining

O = torch.optim  # noqa: E741 - the optimizers are named in every line
WHOLE = {
    "adam": lambda p: O.Adam(p, lr=0.01),
    "adam_single": lambda p: O.Adam(p, lr=0.01, foreach=False),
    "adam_fused": lambda p: O.Adam(p, lr=0.01, fused=True),
    "amsgrad": lambda p: O.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: O.AdamW(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.99)),
    "adamw_tensor_lr": lambda p: O.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "nadam": lambda p: O.NAdam(p, lr=0.01),
    "adamax": lambda p: O.Adamax(p, lr=0.01),
    "adafactor": lambda p: O.Adafactor(p, lr=0.01),
    "sgd_momentum": lambda p: O.SGD(p, lr=0.01, momentum=0.9),
    "sgd_nesterov_fused": lambda p: O.SGD(p, lr=0.01, momentum=0.9, nesterov=True, fused=True),
}
PARTLY = {
    "rmsprop": lambda p: O.RMSprop(p, lr=0.01, momentum=0.9),
    "rmsprop_centered": lambda p: O.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
}
NOTHING = {
    "adadelta": O.Adadelta,
    "rmsprop_plain": lambda p: O.RMSprop(p, lr=0.01),
    "adagrad": O.Adagrad,
    "sgd": lambda p: O.SGD(p, lr=0.01),
    "asgd": O.ASGD,
    "rprop": O.Rprop,
}


def walk(optimizer, parameters, steps, seed, size=1.0):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype) * size
        optimizer.step()


def params(*shapes):
    g = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=g)) for s in shapes]


@pytest.mark.parametrize("name", WHOLE)
def test_a_reset_optimizer_goes_on_as_a_new_one(name):
    old = params((3, 4), (5,))
    optimizer = WHOLE[name](old)
    walk(optimizer, old, 30, 1, size=10.0)
    tensors = {id(t) for p in old for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)}
    for p in old:
        assert can_reset(optimizer, p) == ""
        assert reset_moments(optimizer, p)
    fresh = [nn.Parameter(p.detach().clone()) for p in old]
    walk(optimizer, old, 15, 2)
    walk(WHOLE[name](fresh), fresh, 15, 2)
    for a, b in zip(old, fresh, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    # captured graphs read these very tensors
    assert {id(t) for p in old for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)} == tensors


@pytest.mark.parametrize("name", PARTLY)
def test_without_a_bias_correction_only_momentum_is_reset(name):
    p = params((3, 4))
    optimizer = PARTLY[name](p)
    walk(optimizer, p, 30, 1)
    second = optimizer.state[p[0]]["square_avg"].clone()
    steps = float(optimizer.state[p[0]]["step"])
    assert "bias-correct" in can_reset(optimizer, p[0])
    assert "momentum_buffer" in reset_moments(optimizer, p[0])
    assert not optimizer.state[p[0]]["momentum_buffer"].any()
    assert torch.equal(optimizer.state[p[0]]["square_avg"], second)
    assert float(optimizer.state[p[0]]["step"]) == steps


@pytest.mark.parametrize("name", NOTHING)
def test_what_has_no_moments_to_reset_is_left_alone(name):
    p = params((3, 4))
    optimizer = NOTHING[name](p)
    walk(optimizer, p, 5, 1)
    before = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[p[0]].items()}
    assert can_reset(optimizer, p[0])
    assert reset_moments(optimizer, p[0]) == []
    torch.testing.assert_close(dict(optimizer.state[p[0]]), before, rtol=0, atol=0)


def test_before_the_first_update_there_is_nothing():
    p = params((2,))
    optimizer = O.Adam(p)
    assert moments(optimizer, p[0], optimizer.param_groups[0]) is None
    assert "no state" in can_reset(optimizer, p[0])
    assert reset_moments(optimizer, p[0]) == []


def updates_after(steps, names, count):
    """Sizes of Adam's updates in units of lr under a gradient of 1, after zeroing ``names`` (or a whole reset)."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = O.Adam([p], lr=1.0, eps=1e-30)
    sizes = []
    for i in range(steps + count):
        if i == steps and names is None:
            reset_moments(optimizer, p)
        elif i == steps:
            for name in names:
                optimizer.state[p][name].zero_()
        before = p.item()
        p.grad = torch.ones_like(p)
        optimizer.step()
        sizes.append(before - p.item())
    return sizes[steps:]


def test_a_reset_without_the_counter_makes_updates_too_large_and_one_with_it_does_not():
    # (1 - b1^k) / sqrt((1 - b2^k) / (1 - b2^t)), with b1^k left out where only v is zeroed
    corrected = 1 - 0.999**401
    assert updates_after(400, ["exp_avg_sq"], 1)[0] == pytest.approx(math.sqrt(corrected / 0.001), rel=1e-9)
    assert math.sqrt(corrected / 0.001) == pytest.approx(18.2, abs=0.1)
    assert updates_after(8000, ["exp_avg_sq"], 1)[0] == pytest.approx(31.6, abs=0.1)
    both = updates_after(8000, ["exp_avg_sq", "exp_avg"], 30)
    assert both[0] == pytest.approx(0.1 / math.sqrt(0.001), rel=1e-3)
    assert max(both) == pytest.approx(6.5, abs=0.1)
    assert updates_after(400, None, 30) == pytest.approx([1.0] * 30, rel=1e-9)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_constant_gradient_has_its_square_as_variance_from_the_first_step_on(fused, on_device):
    p = nn.Parameter(torch.zeros(3))
    optimizer = O.Adam([p], fused=fused)
    gradient = torch.tensor([1e-3, 2.0, -50.0])
    for step in range(1, 6):
        p.grad = gradient.clone()
        optimizer.step()
        if on_device:
            with as_on_device():
                kept = moments(optimizer, p, optimizer.param_groups[0])
            assert isinstance(kept.step, torch.Tensor)
        else:
            kept = moments(optimizer, p, optimizer.param_groups[0])
        assert float(kept.step) == step
        assert (kept.beta1, kept.beta2, kept.eps, kept.corrected, kept.name) == (0.9, 0.999, 1e-8, True, "exp_avg_sq")
        torch.testing.assert_close(kept.variance(), gradient.square(), rtol=2e-4, atol=0)
        assert float(kept.correction1) == pytest.approx(1 - 0.9**step, rel=1e-5)


def test_variances_of_other_optimizers():
    gradient = torch.tensor([1.0, -3.0])
    for make, expected, name in (
        (O.Adamax, gradient.square(), "exp_inf"),
        (lambda p: O.RMSprop(p, alpha=0.9), 0.1 * gradient.square(), "square_avg"),
        (lambda p: O.Adam(p, amsgrad=True), gradient.square(), "max_exp_avg_sq"),
        (O.Adagrad, gradient.square(), "sum"),
    ):
        p = nn.Parameter(torch.zeros(2))
        optimizer = make([p])
        p.grad = gradient.clone()
        optimizer.step()
        kept = moments(optimizer, p, optimizer.param_groups[0])
        assert kept.name == name
        torch.testing.assert_close(kept.variance(), expected, rtol=1e-4, atol=1e-6)


def test_factored_and_missing_second_moments_are_none():
    for make in (O.Adafactor, lambda p: O.SGD(p, momentum=0.9)):
        p = params((3, 4))
        optimizer = make(p)
        walk(optimizer, p, 2, 0)
        kept = moments(optimizer, p[0], optimizer.param_groups[0])
        assert kept.second is None
        assert kept.variance() is None
        assert kept.name == ""
        assert kept.beta2 == 0.0


def test_a_complex_parameters_variance_is_that_of_its_magnitude():
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = O.Adam([p])
    p.grad = torch.tensor([3 + 4j, 1 - 2j])
    optimizer.step()
    torch.testing.assert_close(
        moments(optimizer, p, optimizer.param_groups[0]).variance(), torch.tensor([25.0, 5.0]), rtol=1e-3, atol=0
    )


class Nobody:
    def __init__(self, act=None):
        self.act = act

    def before_step(self, source, loss):
        if self.act:
            self.act(source.training)

    def after_step(self, source):
        pass

    def dropped_step(self, source, scaler):
        pass


def guarded(optimizer, act):
    source = Source(optimizer, {}, "", Nobody(act))
    source.training = TorchTraining(source, None, None, {})
    return source


@pytest.mark.parametrize("tensor", [False, True])
def test_a_rate_is_scaled_for_one_update_however_often_and_shared_by_all_groups(tensor):
    a, b = params((2,), (2,))
    lr = torch.tensor(0.5) if tensor else 0.5
    optimizer = O.SGD([{"params": [a]}, {"params": [b]}], lr=lr)
    assert (optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]) or not tensor

    def act(training):
        training.scale_learning_rate(0.1)
        training.scale_learning_rate(torch.tensor(0.5) if tensor else 0.5)

    source = guarded(optimizer, act)
    for _ in range(3):
        before = [p.detach().clone() for p in (a, b)]
        for p in (a, b):
            p.grad = torch.ones_like(p)
        optimizer.step()
        for p, was in zip((a, b), before, strict=True):
            torch.testing.assert_close(was - p.detach(), torch.full((2,), 0.025))
        assert [float(g["lr"]) for g in optimizer.param_groups] == [0.5, 0.5]
        assert optimizer.param_groups[0]["lr"] is lr or not tensor
    source.detach()


class Fragile(O.Optimizer):
    broken = True

    def step(self, closure=None):
        if self.broken:
            raise ZeroDivisionError
        return


def test_rates_of_a_step_that_died_half_way_are_given_back():
    optimizer = Fragile(params((2,)), {"lr": 0.5})
    source = guarded(optimizer, lambda training: training.scale_learning_rate(0.1))
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    optimizer.broken = False
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    source.detach()


def test_a_rate_that_was_set_during_the_update_is_not_taken_back():
    optimizer = Fragile(params((2,)), {"lr": 0.5})
    optimizer.broken = False
    source = guarded(optimizer, lambda training: training.scale_learning_rate(0.1))
    source._handles[1].remove()  # the update's own end, after which the source would settle
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.2
    source.training.settle()
    assert optimizer.param_groups[0]["lr"] == 0.2
    source.detach()


def test_an_update_is_shortened_while_the_state_goes_on_as_ever():
    a, b = params((3, 2), (3, 2))
    with torch.no_grad():
        b.copy_(a)
    free, bound = O.AdamW([a], lr=0.1), O.AdamW([b], lr=0.1)

    def act(training):
        training.scale_update(0, 0.5)
        training.scale_rows(0, torch.tensor([2]), torch.tensor([0.5]))

    source = guarded(bound, act)
    start = a.detach().clone()
    walk(free, [a], 1, 5)
    walk(bound, [b], 1, 5)
    way = (b.detach() - start) / (a.detach() - start)
    torch.testing.assert_close(way, torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.25, 0.25]]), rtol=1e-4, atol=1e-4)
    assert torch.equal(free.state[a]["exp_avg_sq"], bound.state[b]["exp_avg_sq"])
    source.detach()
