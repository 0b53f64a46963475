"""Stale second moments, growing logits, and what is left alone."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dynguard import Action, FlowManager
from dynguard.arrays import as_on_device
from dynguard.testing import check_plugin
from dynguard_plugins.stability.precursor import Precursor
from dynguard_plugins.stability.precursor_logits import trend
from dynguard_plugins.stability.precursor_places import places
from dynguard_plugins.stability.precursor_updates import Updates


def wake(optimizer_of, plugins, tmp_path, steps=330, at=300, each=None, **options):
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
            if each is not None:
                each(model, step)
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


def test_the_updates_are_bounded_by_the_learning_rate_on_request(tmp_path):
    make = lambda p: torch.optim.Adam(p, lr=1e-2)  # noqa: E731
    flow, ways = wake(make, [Precursor(repair="update_clip")], tmp_path)
    # v is |g|^2 / n throughout and m is 0.1 g: a tenth of the learning rate, as in the midst of training
    assert ways[300] == pytest.approx(1e-3, rel=0.01)
    assert max(ways) < 1e-2
    assert [(i.step, i.action) for i in flow.interventions] == [(300, Action.CLIP)]


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "centered": True}])
def test_rmsprop_has_no_bias_correction_so_its_second_moment_is_lifted(options, tmp_path):
    make = lambda p: torch.optim.RMSprop(p, lr=1e-2, **options)  # noqa: E731
    _, ways = wake(make, [], tmp_path / "a")
    assert ways[300] == pytest.approx(0.1, rel=0.02)  # 1 / sqrt(1 - 0.99) learning rates
    flow, repaired = wake(make, [Precursor()], tmp_path / "b")
    assert repaired[300] == pytest.approx(1e-2, rel=0.05)
    assert max(repaired) < (0.011 if not options else 0.1)
    assert [i.step for i in flow.interventions] == [300]  # and none in its first steps, which are large by design


@pytest.mark.parametrize("make", [torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adafactor])
def test_optimizers_without_a_mean_of_squares_by_entry_are_left_alone(make, tmp_path):
    flow, _ = wake(make, [Precursor()], tmp_path)
    assert flow.interventions == []
    assert [f for f in flow.findings if f.kind == "update_spike"] == []


def train(model, loss_of, tmp_path, steps, plugins, spoil=None):
    """Train with AdamW; ``spoil(step, parameters)`` may change gradients. The closed manager."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with FlowManager(model, optimizer, plugins=plugins, run_dir=tmp_path / "run", strict=True) as flow:
        for step in range(steps):
            loss_of(step).backward()
            if spoil is not None:
                spoil(step, list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return flow


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


@pytest.mark.parametrize("fault", ["none", "all x8", "smallest x100"])
def test_a_bad_batch_on_an_up_to_date_second_moment_is_left_to_others(fault, tmp_path):
    """Layers whose share of the global norm is small all the time were not quiet."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), *[Residual(16) for _ in range(8)], nn.LayerNorm(16), nn.Linear(16, 5))
    truth = torch.randn(20, 5)

    def spoil(step, parameters):
        if step < 150 or step % 10 or fault == "none":
            return
        chosen = parameters if fault == "all x8" else [min(parameters, key=lambda p: float(p.grad.norm()))]
        for parameter in chosen:
            parameter.grad.mul_(8 if fault == "all x8" else 100)

    def loss_of(step):
        x = torch.randn(16, 20)
        return F.cross_entropy(model(x), (x @ truth).argmax(1))

    flow = train(model, loss_of, tmp_path, 250, [Precursor()], spoil)
    assert flow.findings == []
    assert flow.interventions == []


@pytest.mark.parametrize("asleep", [True, False])
def test_a_table_that_wakes_up_is_a_fault_and_rows_seen_for_the_first_time_are_not(asleep, tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"main": nn.Linear(8, 4), "table": nn.Embedding(60, 4)})
    truth = torch.randn(60, 4)

    def loss_of(step):
        new = step >= 250
        x, rows = torch.randn(32, 8), torch.randint(0 if new else 30, 60, (32,))
        on = 0.0 if asleep and not new else 1.0
        target = x[:, :4] + truth[rows] * on
        return (model["main"](x) + model["table"](rows) * on - target).square().mean()

    flow = train(model, loss_of, tmp_path, 280, [Precursor()])
    expected = [("update_spike", "table.weight", 250)] if asleep else []
    assert [(f.kind, f.subject, f.step) for f in flow.findings] == expected


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


def test_the_same_is_found_on_a_device_and_nonfinite_gradients_are_not_learnt(tmp_path):
    def poison(model, step):
        if step in (50, 120):
            model["main"].weight.grad[0, 0] = math.nan

    make = lambda p: torch.optim.Adam(p, lr=1e-2)  # noqa: E731
    told = []
    for name in ("host", "device"):
        with as_on_device() if name == "device" else nullcontext():
            flow, ways = wake(make, ["spike", Precursor()], tmp_path / name, each=poison)
        told.append([(f.step, f.subject) for f in flow.findings if f.kind == "update_spike"])
        assert max(ways) < 1.1e-2
    assert told == [[(300, "late.weight")]] * 2


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
    """Attention in several spellings, and the logits that it makes, by hand."""

    def __init__(self, kind, width=16, heads=2):
        super().__init__()
        self.kind, self.num_heads, self.width = kind, heads, width
        if kind == "apart":
            self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width // 2)  # keys for one head
        elif kind == "fused":
            self.c_attn = nn.Linear(width, 3 * width)
        elif kind == "normed":
            self.qkv = nn.Linear(width, 3 * width)
            self.q_norm, self.k_norm = nn.LayerNorm(width // heads), nn.LayerNorm(width // heads)
        else:
            self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.out = nn.Linear(width, 5)

    def forward(self, x):
        if self.kind == "whole":
            weights, biases = self.attention.in_proj_weight.chunk(3), self.attention.in_proj_bias.chunk(3)
            q, k = F.linear(x, weights[0], biases[0]), F.linear(x, weights[1], biases[1])
            mixed = self.attention(x, x, x)[0]
        else:
            both = (self.q_proj(x), self.k_proj(x)) if self.kind == "apart" else self.projection(x).chunk(3, -1)[:2]
            q, k, mixed = *both, x
        q, k = (t.unflatten(-1, (-1, self.width // self.num_heads)).transpose(1, 2) for t in (q, k))
        if self.kind == "normed":
            q, k = self.q_norm(q), self.k_norm(k)
        self.largest = float((q @ k.transpose(-1, -2)).detach().abs().max()) / math.sqrt(q.shape[-1])
        return self.out(mixed)

    @property
    def projection(self):
        return self.c_attn if self.kind == "fused" else self.qkv


@pytest.mark.parametrize("kind", ["apart", "fused", "normed", "whole"])
def test_attention_logits_are_those_of_the_heads(kind, tmp_path):
    torch.manual_seed(0)
    model, plugin = Attention(kind), Precursor(every=1)
    optimizer = torch.optim.Adam(model.parameters())
    with FlowManager(model, optimizer, plugins=[plugin], run_dir=tmp_path / "run", strict=True):
        for _ in range(3):
            out = model(torch.randn(2, 6, 16))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        samples = plugin.logits.samples()
    assert samples.keys() == {"attention" if kind == "whole" else "", "out"}
    assert samples["out"][-1][1] == pytest.approx(float(out.detach().abs().max()), rel=1e-5)
    assert samples["attention" if kind == "whole" else ""][-1][1] == pytest.approx(model.largest, rel=1e-4)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())  # taken off at the end


def test_a_module_that_hands_over_something_strange_keeps_its_forward_pass(tmp_path):
    class Pair(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y

    model = nn.ModuleDict({"q_proj": Pair(4, 4), "out": nn.Linear(4, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlowManager(model, optimizer, plugins=[Precursor(every=1)], run_dir=tmp_path / "run", strict=True):
        for _ in range(3):
            model["out"](model["q_proj"](torch.randn(2, 4))[0]).sum().backward()
            optimizer.step()


def test_compiled_models_get_no_hooks():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    assert [p.name for p in places(model)] == ["1"]
    model.compile(backend="eager")
    assert list(places(model)) == []


@pytest.mark.parametrize(("grows", "loss", "told"), [(True, "softmax", True), (False, "softmax", False),
                                                    (True, "squares", False)])  # fmt: skip
def test_growing_logits_are_told_once_and_a_regression_may_grow(grows, loss, told, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with FlowManager(model, optimizer, plugins=[Precursor(every=1)], run_dir=tmp_path / "run") as flow:
        for step in range(30):
            with torch.no_grad():
                model[1].weight.copy_(torch.arange(24.0).reshape(3, 8) * (1.2**step if grows else 50.0))
            out = model(torch.ones(8, 4))
            classes = torch.arange(8) % 3
            (F.cross_entropy(out, classes) if loss == "softmax" else out.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(f.kind, f.subject) for f in flow.findings] == ([("logit_growth", "1")] if told else [])


def test_the_trend_is_that_of_a_known_growth():
    slope, low, p = trend([(10 * i, 2.0 * math.exp(0.03 * i)) for i in range(10)])
    assert slope == pytest.approx(0.003)
    assert low == pytest.approx(0.003)
    assert p < 1e-3


def test_betas_that_are_spiky_by_themselves(tmp_path):
    flow, _ = wake(lambda p: torch.optim.Adam(p, betas=(0.99, 0.9)), [Precursor()], tmp_path, steps=5)
    assert [f.kind for f in flow.findings] == ["spiky_betas"]


def test_it_keeps_the_contract():
    assert check_plugin(Precursor) in (None, [], ())
