"""The lazy statistics of real steps: against Adam's update rule written out, and against the gradients themselves."""

import math

import pytest
import torch
from torch import nn

from dynguard import FlowManager, Signal, hookimpl


class Asks:
    """Asks for statistics at every step, and keeps what it was told."""

    def __init__(self, *wanted):
        self.wanted = wanted
        self.seen = {name: [] for name in wanted}
        self.gradients = []

    @hookimpl
    def on_gradients(self, event):
        self.gradients.append([None if g is None else g.detach().clone() for g in event.gradients])
        for name in self.wanted:
            self.seen[name].append(getattr(event, name).clone())
        return Signal(0.0, False, list)


def train(optimizer_of, plugin, tmp_path, steps=5, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    optimizer = optimizer_of(model.parameters())
    with FlowManager(model, optimizer, plugins=[plugin], run_dir=tmp_path / "run", strict=True):
        for _ in range(steps):
            model(torch.randn(8, 3, dtype=dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_rms_ratio_is_that_of_adams_own_second_moment(fused, tmp_path):
    plugin = Asks("rms_ratio")
    train(lambda p: torch.optim.AdamW(p, betas=(0.8, 0.9), fused=fused), plugin, tmp_path)
    assert plugin.seen["rms_ratio"][0].isnan().all()  # no second moment yet
    for layer in range(4):
        v = torch.zeros_like(plugin.gradients[0][layer])
        for step, gradients in enumerate(plugin.gradients):
            g = gradients[layer]
            if step:
                ratio = (g / (v / (1 - 0.9**step)).sqrt()).square().mean().sqrt()
                torch.testing.assert_close(plugin.seen["rms_ratio"][step][layer], ratio, rtol=1e-4, atol=0)
            v = 0.9 * v + 0.1 * g.square()


def test_rms_ratio_is_unknown_where_no_second_moment_is_kept(tmp_path):
    plugin = Asks("rms_ratio")
    train(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), plugin, tmp_path)
    assert all(values.isnan().all() for values in plugin.seen["rms_ratio"])


def test_rms_ratio_of_half_precision_is_computed_wider(tmp_path):
    plugin = Asks("rms_ratio")
    train(lambda p: torch.optim.Adam(p, lr=1e-4), plugin, tmp_path, dtype=torch.bfloat16)
    assert plugin.seen["rms_ratio"][-1].dtype == torch.float32
    assert plugin.seen["rms_ratio"][-1].isfinite().all()


def test_cosine_is_that_of_successive_gradients(tmp_path):
    plugin = Asks("cosine")
    train(lambda p: torch.optim.SGD(p, lr=0.1), plugin, tmp_path)
    assert plugin.seen["cosine"][0].isnan().all()
    for step in range(1, 5):
        for layer in range(4):
            a, b = (plugin.gradients[s][layer].flatten().double().tolist() for s in (step - 1, step))
            dot = sum(x * y for x, y in zip(a, b, strict=True))
            expected = dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
            assert float(plugin.seen["cosine"][step][layer]) == pytest.approx(expected, abs=1e-5)


def test_rms_ratio_of_complex_gradients_goes_by_their_magnitude(tmp_path):
    """torch keeps the squares of real and imaginary parts apart: |g|^2 / (v_re + v_im)."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(6, dtype=torch.complex64))])
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    plugin = Asks("rms_ratio")
    with FlowManager(model, optimizer, plugins=[plugin], run_dir=tmp_path / "run", strict=True):
        for _ in range(2):
            (model[0] * torch.randn(6, dtype=torch.complex64)).abs().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    first, second = (g[0] for g in plugin.gradients)
    expected = (second.abs().square() / first.abs().square()).mean().sqrt()
    torch.testing.assert_close(plugin.seen["rms_ratio"][1][0], expected, rtol=1e-4, atol=0)
