"""Stale second moments, growing logits, and what is left alone."""

import math

import pytest
import torch
from torch import nn

from dynguard import Action, FlowManager
from dynguard.testing import check_plugin
from dynguard_plugins.stability.precursor import Precursor
from dynguard_plugins.stability.precursor_logits import places, trend
from dynguard_plugins.stability.precursor_updates import Updates


def wake(optimizer_of, plugins, tmp_path, steps=330, at=300, **options):
    """A layer without gradient (zeros) that gets an ordinary one from step ``at`` on; (flow, ways of its updates)."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"main": nn.Linear(8, 1), "late": nn.Linear(32, 1, bias=False)})
    nn.init.zeros_(model["late"].weight)
    optimizer = optimizer_of(model.parameters())
    ways = []
    with FlowManager(model, optimizer, plugins=plugins, run_dir=tmp_path / "run", strict=True, **options) as flow:
        for step in range(steps):
            x, r = torch.randn(32, 8), torch.randn(32, 32) * float(step >= at)
            target = x.sum(1, keepdim=True) + torch.randn(32, 1)
            (model["main"](x) + model["late"](r) - target).square().mean().backward()
            before = model["late"].weight.detach().clone()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            ways.append(float((model["late"].weight.detach() - before).square().mean().sqrt()))
    return flow, ways


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.Adam(p, lr=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
     lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True)],
)  # fmt: skip
def test_a_reset_brings_the_update_down_to_the_learning_rate(make, tmp_path):
    _, ways = wake(make, [], tmp_path / "a")
    assert ways[300] == pytest.approx(0.1 / math.sqrt(0.001 / (1 - 0.999**301)) * 1e-2, rel=0.02)  # Adam's rule by hand
    flow, repaired = wake(make, [Precursor()], tmp_path / "b")
    assert repaired[300] == pytest.approx(1e-2, rel=1e-3)
    assert max(repaired) < 1.1e-2
    assert [(i.step, i.action, i.subject) for i in flow.interventions] == [(300, Action.CLIP, "late.weight")]
    (finding,) = [f for f in flow.findings if f.kind == "update_spike"]
    assert finding.value("update_rms") == pytest.approx(ways[300] / 1e-2, rel=0.02)


def test_the_update_is_clipped_to_the_learning_rate_on_request(tmp_path):
    flow, ways = wake(lambda p: torch.optim.Adam(p, lr=1e-2), [Precursor(repair="update_clip")], tmp_path)
    assert ways[300] == pytest.approx(1e-2, rel=1e-3)
    assert {i.action for i in flow.interventions} == {Action.CLIP}


def test_rmsprop_has_no_bias_correction_so_its_update_is_clipped(tmp_path):
    make = lambda p: torch.optim.RMSprop(p, lr=1e-2)  # noqa: E731
    _, ways = wake(make, [], tmp_path / "a")
    assert ways[300] == pytest.approx(0.1, rel=0.02)  # 1 / sqrt(1 - 0.99) learning rates
    _, repaired = wake(make, [Precursor()], tmp_path / "b")
    assert repaired[300] == pytest.approx(1e-2, rel=0.02)


def test_nothing_is_done_in_observe_mode_or_without_repair(tmp_path):
    make = lambda p: torch.optim.Adam(p, lr=1e-2)  # noqa: E731
    _, plain = wake(make, [], tmp_path / "a")
    flow, ways = wake(make, [Precursor()], tmp_path / "b", mode="observe")
    assert ways == plain
    flow, ways = wake(make, [Precursor(repair="none")], tmp_path / "c")
    assert ways == plain
    assert flow.interventions == []
    assert [f.kind for f in flow.findings] == ["update_spike"]


def test_deferred_reads_drop_the_step_and_repair_it_late(tmp_path):
    flow, ways = wake(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), [Precursor()], tmp_path, reads="deferred")
    assert ways[300] == 0.0
    assert max(ways) < 1.1e-2
    assert flow.interventions[0].step == 300


def test_sgd_has_no_second_moment(tmp_path):
    flow, _ = wake(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), [Precursor()], tmp_path)
    assert flow.findings == []


def test_mean_second_moments_are_followed_from_the_norms(tmp_path):
    """Against the optimizer's own state after 40 steps without reading it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters())
    plugin = Precursor()
    with FlowManager(model, optimizer, plugins=[plugin], run_dir=tmp_path / "run", strict=True):
        for _ in range(41):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    updates = plugin._watched[""].updates
    assert isinstance(updates, Updates)
    square, present = updates._pending
    mean = updates.mean * (1 - present * 0.001) + present * 0.001 * square
    expected = [float(optimizer.state[p]["exp_avg_sq"].double().mean()) for p in model.parameters()]
    assert mean.tolist() == pytest.approx(expected, rel=1e-4)


class Attention(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, 5)

    def forward(self, x):
        scores = (self.q_proj(x) @ self.k_proj(x).transpose(-1, -2)).softmax(-1)
        return self.out(scores @ x)


def test_logits_are_bounded_by_the_norms_of_queries_and_keys(tmp_path):
    torch.manual_seed(0)
    model, plugin = Attention(), Precursor(every=1)
    assert {(name, what[0]) for name, _, what in places(model)} == {
        ("q_proj", "query"),
        ("k_proj", "key"),
        ("out", "head"),
    }
    optimizer = torch.optim.Adam(model.parameters())
    with FlowManager(model, optimizer, plugins=[plugin], run_dir=tmp_path / "run", strict=True):
        for _ in range(3):
            x = torch.randn(2, 6, 16)
            out = model(x)
            out.square().mean().backward()
            q, k = model.q_proj(x).detach(), model.k_proj(x).detach()
            optimizer.step()
            optimizer.zero_grad()
        samples = plugin.logits.samples()
    assert samples["out"][-1][1] == pytest.approx(float(out.detach().abs().max()), rel=1e-5)
    bound = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) / math.sqrt(8)
    assert samples[""][-1][1] == pytest.approx(bound, rel=1e-4)
    assert not model.out._forward_hooks  # taken off at the end


def test_growing_logits_are_told_once_and_steady_ones_are_not(tmp_path):
    torch.manual_seed(0)
    for grows in (True, False):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with FlowManager(model, optimizer, plugins=[Precursor(every=1)], run_dir=tmp_path / str(grows)) as flow:
            for step in range(30):
                with torch.no_grad():
                    model[1].weight.fill_(10.0 * (1.2**step if grows else 50.0))
                model(torch.ones(8, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert [(f.kind, f.subject) for f in flow.findings] == ([("logit_growth", "1")] if grows else [])


def test_the_trend_is_that_of_a_known_growth():
    slope, low = trend([(10 * i, 2.0 * math.exp(0.03 * i)) for i in range(10)])
    assert slope == pytest.approx(0.003)
    assert low == pytest.approx(0.003)


def test_betas_that_are_spiky_by_themselves(tmp_path):
    flow, _ = wake(lambda p: torch.optim.Adam(p, betas=(0.99, 0.9)), [Precursor()], tmp_path, steps=5)
    assert [f.kind for f in flow.findings] == ["spiky_betas"]


def test_it_keeps_the_contract():
    assert check_plugin(Precursor) in (None, [], ())
