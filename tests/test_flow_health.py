"""The ``flow`` plugin: known signal-to-noise ratios, planted standstills, dead units and growth over depth."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dynguard import Severity
from dynguard.testing import check_plugin, gradient_event
from dynguard_plugins.stability.flow import Flow
from dynguard_plugins.stability.flow_sample import PER_LAYER, TOTAL, Layout

pytestmark = pytest.mark.usefixtures("one_thread")


def play(flow, optimizer, gradients, steps):
    """Steps with gradients of our own making."""
    for step in range(steps):
        for parameter, gradient in zip(flow.played, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()


@pytest.fixture
def watched(watch):
    """``(model, optimizer, **options) -> (flow, plugin)``, several windows in a few hundred steps."""

    def make(model, optimizer, **options):
        plugin = Flow(**{"every": 1, "window": 20} | options)
        flow = watch(model, optimizer, plugins=[plugin])
        flow.played = list(model.parameters())
        return flow, plugin

    return make


def rows(plugin):
    return {row[0]: dict(zip(("velocity", "gradient", "snr", "dead", "status"), row[1:], strict=True))
            for row in plugin.summarize().tables[0].rows}  # fmt: skip


def of_kind(flow, *kinds):
    flow.close()
    return [f for f in flow.findings if f.kind in kinds]


def test_the_contract():
    check_plugin(Flow)
    check_plugin(Flow, options={"every": 1, "window": 5})


# -- signal-to-noise ratio


@pytest.mark.parametrize("snr", [0.01, 0.3, 10.0])
def test_a_known_signal_to_noise_ratio_is_found(watched, snr):
    torch.manual_seed(0)
    model = nn.Linear(40, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    flow, plugin = watched(model, optimizer, window=40)
    mean = [torch.randn_like(p) for p in model.parameters()]  # |E g|^2 / tr Var is mean^2 / sigma^2 = snr
    factor = [snr**0.5 / m.square().mean().sqrt() for m in mean]
    play(flow, optimizer, lambda _: [m * f + torch.randn_like(m) for m, f in zip(mean, factor, strict=True)], 401)
    flow.close()
    assert rows(plugin)["weight"]["snr"] == pytest.approx(snr, rel=0.15)


def test_pure_noise_has_no_signal(watched):
    torch.manual_seed(0)
    model = nn.Linear(40, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    flow, plugin = watched(model, optimizer)
    play(flow, optimizer, lambda _: [torch.randn_like(p) for p in flow.played], 201)
    assert rows(plugin)["weight"]["snr"] < 0.005  # without the correction it would be 1 / 20


def test_velocity_and_gradient_norm_of_gradient_descent(watched):
    torch.manual_seed(0)
    model = nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    flow, plugin = watched(model, optimizer)
    length = model.weight.norm().item()
    gradient = torch.randn(10, 10)
    play(flow, optimizer, lambda step: [gradient * (-1) ** step], 101)
    assert rows(plugin)["weight"]["gradient"] == pytest.approx(gradient.norm().item(), rel=1e-3)
    assert rows(plugin)["weight"]["velocity"] == pytest.approx(1e-3 * gradient.norm().item() / length, rel=1e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_learned(watched, bad):
    torch.manual_seed(0)
    model = nn.Linear(30, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    flow, plugin = watched(model, optimizer)

    def gradients(step):
        found = [1 + torch.randn_like(p) for p in flow.played]
        if step % 7 == 3:
            found[0][1, 1] = bad
        return found

    play(flow, optimizer, gradients, 201)
    assert rows(plugin)["weight"]["snr"] == pytest.approx(1.0, rel=0.2)


def test_a_rejected_step_is_not_learned():
    plugin = Flow(every=1, window=5)
    torch.manual_seed(0)
    weight = torch.ones(20, 20)
    for step in range(11):
        gradient = torch.ones(20, 20) * (1e6 if step == 3 else 1) + torch.randn(20, 20)
        plugin.on_gradients(
            gradient_event(step, gradients={"w": gradient}, parameters={"w": weight}, rejected=step == 4)
        )
    assert rows(plugin)["w"]["gradient"] < 100
    assert rows(plugin)["w"]["snr"] == pytest.approx(1, rel=0.3)


# -- standstill


def test_a_group_with_no_learning_rate_is_an_aside(watched):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=1e-2)
    flow, plugin = watched(model, optimizer)
    play(flow, optimizer, lambda _: [torch.randn_like(p) for p in flow.played], 101)
    (found,) = of_kind(flow, "stagnation")
    assert found.severity is Severity.INFO
    assert "0.weight, 0.bias" in found.premise
    assert "learning rate is exactly 0" in found.premise
    assert rows(plugin)["0.weight"]["status"] == "frozen"
    assert rows(plugin)["2.weight"]["status"] == "moving"


@pytest.mark.parametrize("spike_at", [5, 150])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_a_second_moment_blown_up_by_a_spike_is_named(watched, spike_at, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.999), **options)
    flow, _ = watched(model, optimizer)

    def gradients(step):
        found = [torch.randn_like(p) for p in flow.played]
        if step == spike_at:
            found[0].mul_(1e5)
        return found

    play(flow, optimizer, gradients, 301)
    (found,) = of_kind(flow, "stagnation")
    assert (found.subject, found.severity) == ("0.weight", Severity.WARNING)
    assert found.value("cause") == "second_moment"
    # v keeps (1 - b2) b2^t of the spike's square (AMSGrad all of it), over the bias correction
    kept = 1e-3 * (1.0 if options.get("amsgrad") else 0.999 ** (found.step - spike_at)) / (1 - 0.999**found.step)
    expected = 1e5 * kept**0.5
    assert found.value("second_moment_over_gradient") == pytest.approx(expected, rel=0.05)


def test_updates_below_the_weights_last_digit(watched):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    with torch.no_grad():
        model[1].weight.add_(100.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    flow, _ = watched(model, optimizer)
    play(flow, optimizer, lambda _: [torch.ones_like(p) for p in flow.played], 101)
    found = {f.subject: f.value("cause") for f in of_kind(flow, "stagnation")}
    assert found == {"1.weight": "rounding"}


def test_a_hook_that_takes_the_update_back(watched):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    flow, _ = watched(model, optimizer)
    kept = model[1].weight.detach().clone()
    optimizer.register_step_post_hook(lambda *_: model[1].weight.data.copy_(kept))
    play(flow, optimizer, lambda _: [torch.randn_like(p) for p in flow.played], 101)
    (found,) = of_kind(flow, "stagnation")
    assert (found.subject, found.value("cause")) == ("1.weight", "unknown")
    assert found.value("relative_movement") == 0


def test_a_layer_that_swings_to_and_fro_moves(watched):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    flow, _ = watched(model, optimizer)
    play(flow, optimizer, lambda step: [torch.full_like(p, (-1.0) ** step) for p in flow.played], 201)
    assert of_kind(flow, "stagnation") == []


def test_a_layer_whose_gradient_fell_may_rest(watched):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    flow, _ = watched(model, optimizer)
    play(flow, optimizer, lambda step: [torch.randn_like(p) * 0.9**step for p in flow.played], 301)
    assert of_kind(flow, "stagnation") == []


def test_the_end_of_a_schedule_may_rest(watched):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    flow, _ = watched(model, optimizer)
    for _ in range(300):
        play(flow, optimizer, lambda _: [torch.randn_like(p) for p in flow.played], 1)
        schedule.step()
    assert of_kind(flow, "stagnation") == []


# -- dead units


def relu_net(dead):
    """Two hidden layers of 32 units; the first ``dead`` of the second are never active."""
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    with torch.no_grad():
        model[2].bias[:dead] = -1e3
    return model


def train(model, optimizer, steps, batch=32, width=8, seed=0):
    random = torch.Generator().manual_seed(seed)
    teacher = torch.randn(width, 2, generator=random)
    for _ in range(steps):
        x = torch.randn(batch, width, generator=random)
        (model(x) - torch.tanh(x @ teacher)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("dead", "severity"), [(28, Severity.WARNING), (14, Severity.INFO), (3, None)])
def test_dead_units_are_counted(watched, dead, severity):
    torch.manual_seed(0)
    model = relu_net(dead)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    flow, plugin = watched(model, optimizer)
    train(model, optimizer, 121)
    found = of_kind(flow, "dead_units")
    assert [(f.subject, f.severity) for f in found] == ([("2.weight", severity)] if severity else [])
    table = rows(plugin)
    for layer in (0, 2):
        active = (model[: layer + 1](torch.randn(20_000, 8)) > 0).any(0)
        silent = 1 - active.float().mean().item()
        assert table[f"{layer}.weight"]["dead"] == pytest.approx(silent, abs=1e-3)
    assert dead / 32 <= table["2.weight"]["dead"] <= dead / 32 + 0.1
    assert table["2.bias"]["dead"] is None


def test_masked_rows_tables_and_weights_that_are_not_a_modules_are_not_units(watched):
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(40, 8)
            self.free = nn.Parameter(torch.randn(8, 8))
            self.pruned = nn.Linear(8, 8)

    model = Net()
    with torch.no_grad():
        model.pruned.weight[:6] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    flow, _ = watched(model, optimizer)

    def gradients(_):
        found = [torch.randn_like(p) for p in flow.played]
        for gradient in found:
            gradient[:6] = 0
        return found

    play(flow, optimizer, gradients, 121)
    assert of_kind(flow, "dead_units") == []


# -- growth over depth


class Chain(nn.Module):
    """h <- gain * h + bias, layer by layer: the gradient of a bias is that of the next one times ``gain``."""

    def __init__(self, depth, gain):
        super().__init__()
        self.gain = gain
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(4)) for _ in range(depth))

    def forward(self, x):
        for bias in self.biases:
            x = self.gain * x + bias
        return x


@pytest.mark.parametrize(("gain", "kind"), [(4.0, "exploding_gradients"), (0.2, "vanishing_gradients")])
def test_a_known_jacobian_is_the_factor_per_layer(watched, gain, kind):
    model = Chain(8, gain)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    flow, _ = watched(model, optimizer)
    for _ in range(101):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (found,) = of_kind(flow, "exploding_gradients", "vanishing_gradients")
    assert (found.kind, found.severity) == (kind, Severity.WARNING)
    assert found.value("factor_per_layer") == pytest.approx(gain, rel=1e-4)
    assert found.value("r_squared") == pytest.approx(1, abs=1e-6)
    assert found.subject == "biases.0"


@pytest.mark.parametrize(("depth", "gain"), [(12, 1.0), (5, 4.0), (8, 1.5)])
def test_flat_or_shallow_chains_are_not_told(watched, depth, gain):
    model = Chain(depth, gain)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    flow, _ = watched(model, optimizer)
    for _ in range(101):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert of_kind(flow, "exploding_gradients", "vanishing_gradients") == []


def test_saturated_tanh_layers_explode_backwards(watched):
    """Orthogonal layers of gain 6 whose units stay small: each Jacobian multiplies the gradient by 6."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers)
    for layer in model[::2]:
        nn.init.orthogonal_(layer.weight, gain=6.0)
        nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    flow, _ = watched(model, optimizer)
    for _ in range(101):
        (model(torch.randn(32, 16) * 1e-9) * torch.randn(16)).sum().backward()  # far from saturation
        optimizer.step()
        optimizer.zero_grad()
    (found,) = of_kind(flow, "exploding_gradients", "vanishing_gradients")
    assert (found.subject, found.severity) == ("0.bias", Severity.WARNING)
    assert found.value("factor_per_layer") == pytest.approx(6.0, rel=0.05)


# -- healthy runs, and what must be survived


def conv_net():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2),
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.body(x.unflatten(1, (4, 16))).mean(1))


def mlp(activation):
    return nn.Sequential(nn.Linear(64, 64), activation(), nn.Linear(64, 64), activation(), nn.Linear(64, 2))


@pytest.mark.parametrize(
    ("model", "optimizer", "batch"),
    [
        (lambda: mlp(nn.ReLU), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), 8),
        (lambda: mlp(nn.ReLU), lambda p: torch.optim.Adam(p, lr=3e-3), 64),
        (lambda: mlp(nn.Tanh), lambda p: torch.optim.AdamW(p, lr=1e-3), 8),
        (conv_net, lambda p: torch.optim.SGD(p, lr=0.05), 16),
        (conv_net, lambda p: torch.optim.Adam(p, lr=1e-3), 16),
        (Attention, lambda p: torch.optim.AdamW(p, lr=1e-3), 16),
    ],
)
def test_healthy_runs_give_no_warning(watched, model, optimizer, batch):
    torch.manual_seed(0)
    net = model()
    steps = optimizer(net.parameters())
    flow, _ = watched(net, steps, every=2, window=40)
    train(net, steps, 250, batch=batch, width=64)
    flow.close()
    assert [f for f in flow.findings if f.severity > Severity.INFO] == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_sample_holds_entries_of_its_own_layer(shapes, random):
    parameters = [torch.full(shape, float(i + 1)) for i, shape in enumerate(shapes)]
    layout = Layout(parameters)
    flat, missing = layout.gather(parameters)
    assert missing == []
    assert [s.index for s in layout.sections] == [i for i, p in enumerate(parameters) if p.numel()]
    for s in layout.sections:
        part = flat[s.start : s.stop]
        assert (part == s.index + 1).all()
        assert len(part) == parameters[s.index].numel() or len(part) >= 8  # small ones whole
    gone = random.randrange(len(parameters))
    flat, missing = layout.gather([None if i == gone else p for i, p in enumerate(parameters)])
    assert missing == ([gone] if parameters[gone].numel() else [])
    expected = [
        0.0 if i == gone or not p.numel() else (i + 1.0) * (flat == i + 1).sum() for i, p in enumerate(parameters)
    ]
    assert layout.sums(flat).tolist() == pytest.approx([float(v) for v in expected])


@pytest.mark.parametrize("shapes", [[(4096, 4096)], [(512, 64, 3, 3)] * 3, [(300, 300)] * 200, [(7,)] * 3000])
def test_the_sample_is_bounded(shapes):
    layout = Layout([torch.empty(shape, device="meta") for shape in shapes])
    assert all(s.stop - s.start <= PER_LAYER for s in layout.sections)
    assert layout.size <= max(TOTAL, 8 * len(shapes))
    rows, columns = layout.sections[0].rows, layout.sections[0].columns
    assert len(shapes[0]) == 1 or (rows >= 32 and columns >= 8)


def test_the_same_entries_whatever_the_strides():
    weight = torch.randn(16, 8, 5, 5)
    layout = Layout([weight])
    there, _ = layout.gather([weight])
    assert torch.equal(layout.gather([weight.to(memory_format=torch.channels_last)])[0], there)
    whole = weight.reshape(16, -1)
    s = layout.sections[0]
    expected = whole[:: 16 // s.rows][: s.rows, :: 200 // s.columns][:, : s.columns]
    assert torch.equal(there.view(s.rows, s.columns), expected)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.sparse = nn.Embedding(20, 4, sparse=True)
        self.narrow = nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.imaginary = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0))
        self.unused = nn.Linear(4, 4)
        self.late = nn.Linear(4, 4)

    def forward(self, ids):
        x = self.late(self.sparse(ids))
        return (x @ self.narrow.float() + self.wide.float()).square().mean() + self.imaginary.abs().sum()


def test_odd_parameters_late_ones_and_a_rate_on_the_device(watched):
    torch.manual_seed(0)
    model = Odd()
    early = [p for n, p in model.named_parameters() if not n.startswith("late")]
    optimizer = torch.optim.SGD([{"params": early, "lr": torch.tensor(0.01)}], lr=0.01)
    flow, plugin = watched(model, optimizer)
    for step in range(200):
        if step == 70:
            optimizer.add_param_group({"params": list(model.late.parameters())})
        optimizer.zero_grad()
        model(torch.randint(0, 20, (6,))).backward()
        optimizer.step()
    flow.close()
    assert [f for f in flow.findings if f.severity > Severity.INFO] == []
    table = rows(plugin)
    assert table["narrow"]["snr"] is not None
    assert table["late.weight"]["velocity"] > 0
    assert table["sparse.weight"]["snr"] is None
    assert table["unused.weight"]["snr"] is None


def test_a_fused_optimizer_under_a_scaler_is_measured_unscaled(watched):
    torch.manual_seed(0)
    model = nn.Linear(20, 20)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=30)
    flow, plugin = watched(model, optimizer)
    gradient = []
    for _ in range(101):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 20)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        gradient.append(20.0)  # d loss / d weight is all ones
    flow.close()
    assert rows(plugin)["weight"]["gradient"] == pytest.approx(gradient[0])
    assert rows(plugin)["weight"]["snr"] > 1e4  # a constant gradient, whatever the scale was


def test_a_resumed_run_tells_nothing_twice_and_keeps_its_table(watch, tmp_path):
    torch.manual_seed(0)
    state = None
    told = []
    for part in range(2):
        plugin = Flow(every=1, window=20)
        model = relu_net(28)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        flow = watch(model, optimizer, plugins=[plugin], run_dir=tmp_path / str(part))
        if state is not None:
            flow.load_state_dict(state)
        train(model, optimizer, 121)
        flow.close()
        told.append([f for f in flow.findings if f.kind == "dead_units"])
        buffer = io.BytesIO()
        torch.save(flow.state_dict(), buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
    assert [len(found) for found in told] == [1, 0]
    assert len(plugin._watched[""].layers.history) == 12
    assert np.isfinite(rows(plugin)["2.weight"]["velocity"])


def test_two_sources_are_told_apart(watch):
    torch.manual_seed(0)
    models = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    optimizers = {
        "a": torch.optim.SGD(models["a"].parameters(), lr=0.0),
        "b": torch.optim.SGD(models["b"].parameters(), lr=0.1),
    }
    flow = watch(models, optimizers, plugins=[Flow(every=1, window=20)])
    for _ in range(61):
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            models[name](torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    flow.close()
    found = [f for f in flow.findings if f.kind == "stagnation"]
    assert [f.source for f in found] == ["a"]
