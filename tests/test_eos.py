"""``eos``: thresholds against torch's own optimizers, findings on whole runs, and what it must leave alone."""

import io
import logging
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dynguard import Action, FlowManager, Severity
from dynguard.errors import OptionError
from dynguard.testing import check_plugin
from dynguard_plugins.stability.eos import Eos
from dynguard_plugins.stability.eos_forecast import forecast
from dynguard_plugins.stability.eos_thresholds import UnknownThresholdError, edge


def test_the_plugin_keeps_the_contract():
    check_plugin(Eos)


# -- thresholds: on h x^2 / 2 torch's optimizer must shrink x just below the threshold and blow it up just above

NEVER = 1 - 1e-13  # decay of a second moment that stays what it is


def settled(**kept):
    return lambda p: {"step": torch.tensor(1e6), **{k: torch.full_like(p, v) for k, v in kept.items()}}


ADAM = settled(exp_avg=0.0, exp_avg_sq=1e-7)
RULES = {
    "gd": (torch.optim.SGD, {}, None),
    "coupled decay": (torch.optim.SGD, {"weight_decay": 3.0}, None),
    "heavy ball": (torch.optim.SGD, {"momentum": 0.9}, None),
    "ema": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.9}, None),
    "dampening": (torch.optim.SGD, {"momentum": 0.8, "dampening": 0.3}, None),
    "dampening alone": (torch.optim.SGD, {"dampening": 0.3}, None),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, None),
    "rmsprop": (torch.optim.RMSprop, {"alpha": NEVER}, settled(square_avg=4.0)),
    "rmsprop momentum": (torch.optim.RMSprop, {"alpha": NEVER, "momentum": 0.9},
                         settled(square_avg=4.0, momentum_buffer=0.0)),
    "rmsprop centered": (torch.optim.RMSprop, {"alpha": NEVER, "centered": True},
                         settled(square_avg=4.0, grad_avg=1.0)),
    "adagrad": (torch.optim.Adagrad, {}, settled(sum=1e8)),
    "adam": (torch.optim.Adam, {"betas": (0.9, NEVER)}, ADAM),
    "adam coupled": (torch.optim.Adam, {"betas": (0.8, NEVER), "weight_decay": 5.0}, ADAM),
    "amsgrad": (torch.optim.Adam, {"betas": (0.9, NEVER), "amsgrad": True},
                settled(exp_avg=0.0, exp_avg_sq=1e-7, max_exp_avg_sq=4e-7)),
    "adamw": (torch.optim.AdamW, {"betas": (0.9, NEVER), "weight_decay": 0.8}, ADAM),
    "adamax": (torch.optim.Adamax, {"betas": (0.9, NEVER)}, settled(exp_avg=0.0, exp_inf=2.0)),
}  # fmt: skip


@pytest.mark.parametrize(("name", "tensor_rate"), [*((name, False) for name in RULES), ("gd", True), ("adam", True)])
def test_the_threshold_is_where_the_optimizer_turns_unstable(name, tensor_rate):
    make, options, state = RULES[name]
    ends = []
    for factor in (0.99, 1.01):
        x = nn.Parameter(torch.full((1,), 1e-9, dtype=torch.float64))
        optimizer = make([x], lr=torch.tensor(0.1) if tensor_rate else 0.1, foreach=False, **options)
        if state:
            optimizer.state[x] = state(x)
        limits = edge(SimpleNamespace(optimizer=optimizer, groups=[0]), [x])
        # scale x (h + decay) = 1 at the edge
        h = factor / float(limits.scales[0]) - limits.decay[0]
        assert h > 0
        sizes = []
        for _ in range(900):
            x.grad = h * x.detach()
            optimizer.step()
            sizes.append(abs(x.item()))
            if sizes[-1] > 1e-6:
                break
        ends.append(max(sizes[-50:]))
    assert ends[0] < 0.5e-9
    assert ends[1] > 1e-6


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.Rprop, torch.optim.Adafactor])
def test_unknown_optimizers_are_refused(make):
    x = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(UnknownThresholdError, match=make.__name__):
        edge(SimpleNamespace(optimizer=make([x]), groups=[0]), [x])


def test_coordinates_whose_gradient_is_rounding_noise_are_left_out():
    x = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([x])
    x.grad = torch.tensor([1.0, 0.5, 1e-10, 0.0])
    optimizer.step()
    scale = edge(SimpleNamespace(optimizer=optimizer, groups=[0]), [x]).scales[0]
    assert (scale > 0).tolist() == [True, True, False, False]


# -- whole runs


def run(model, optimizers, batches, loss_fn, tmp_path, eos, *, given=True, name="run"):
    """A plain loop under a manager with ``eos`` alone."""
    several = optimizers if isinstance(optimizers, dict) else {"": optimizers}
    with FlowManager(
        model, optimizers, plugins=[eos], loss_fn=loss_fn if given else None, run_dir=tmp_path / name, strict=True
    ) as flow:
        for batch in batches:
            loss = loss_fn(model, batch)
            flow.observe(loss=loss, batch=batch)
            loss.backward()
            for optimizer in several.values():
                optimizer.step()
                optimizer.zero_grad()
    return flow


def bowl(*curvatures, dtype=torch.float32):
    """Parameters p_i and the loss sum h_i |p_i|^2 / 2, whose Hessian is known."""
    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=dtype)) for _ in curvatures])
    return model, lambda m, b: sum(0.5 * h * p.square().sum() for h, p in zip(curvatures, m, strict=True))


def kinds(flow):
    return [(f.kind, f.severity) for f in flow.findings if f.kind != "run"]


def test_groups_count_by_their_own_rate(tmp_path):
    model, loss_fn = bowl(1.0, 10.0)
    optimizer = torch.optim.SGD([{"params": [model[0]], "lr": 1.2}, {"params": [model[1]], "lr": 0.05}], lr=1.0)
    eos = Eos(every=2)
    run(model, optimizer, [0] * 7, loss_fn, tmp_path, eos)
    checks = eos.checks()
    assert [c.step for c in checks] == [2, 4, 6]
    assert [c.ratio for c in checks] == pytest.approx([0.6] * 3, rel=1e-2)
    assert checks[0].sharpness is None
    assert all(c.gradients <= 4 for c in checks[1:])


def test_one_layer_at_a_time(tmp_path):
    model, loss_fn = bowl(1.0, 10.0)
    eos = Eos(every=1, per_layer=True)
    run(model, torch.optim.SGD(model.parameters(), lr=0.1), [0] * 9, loss_fn, tmp_path, eos)
    assert [c.sharpness for c in eos.checks(subject="0")] == pytest.approx([1.0] * 4, rel=1e-2)
    assert [c.sharpness for c in eos.checks(subject="1")] == pytest.approx([10.0] * 4, rel=1e-2)


def test_a_negative_curvature_is_not_reported_as_sharpness(tmp_path):
    model, loss_fn = bowl(-5.0, 2.0, dtype=torch.float64)
    eos = Eos(every=2)
    run(model, torch.optim.SGD(model.parameters(), lr=0.1), [0] * 9, loss_fn, tmp_path, eos)
    assert [c.sharpness for c in eos.checks()] == pytest.approx([2.0] * 4, rel=1e-2)


def test_two_sources_see_their_own_parameters(tmp_path):
    model, loss_fn = bowl(3.0, 8.0)
    optimizers = {"g": torch.optim.SGD([model[0]], lr=0.1), "d": torch.optim.SGD([model[1]], lr=0.1, momentum=0.5)}
    eos = Eos(every=2)
    run(model, optimizers, [0] * 5, loss_fn, tmp_path, eos)
    assert [c.ratio for c in eos.checks("g")] == pytest.approx([3.0 * 0.1 / 2] * 2, rel=1e-2)
    assert [c.ratio for c in eos.checks("d")] == pytest.approx([8.0 * 0.1 / 3] * 2, rel=1e-2)


class Restless(nn.Module):
    """Dropout, BatchNorm, a frozen weight, an empty one and one that never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 2))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.net(x * self.frozen + self.empty.sum())


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("options", [{}, {"method": "double_backward"}, {"per_layer": True}, {"batch": "first"}])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_run_is_the_same_to_the_bit_with_it_and_without(make, options, tmp_path):
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randn(16, 5, generator=g), torch.randint(0, 2, (16,), generator=g)) for _ in range(20)]
    ends = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = Restless()
        optimizer = make(model.parameters(), lr=1e-2)
        if watched:
            eos = Eos(every=3, **options)
            run(model, optimizer, batches, classify, tmp_path, eos)
            assert sum(len(w.checks) for w in eos._watched[""].values()) >= 3
        else:
            for batch in batches:
                classify(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append({**model.state_dict(), "random": torch.rand(3)})
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def sharpening(lr, steps, seed=0):
    """Full-batch gradient descent on a tanh net (Cohen et al. 2021): model, optimizer, batches, loss_fn."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(128, 6)
    batch = (x, torch.sign(x[:, :1] * x[:, 1:2]))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, optimizer, [batch] * steps, lambda m, b: (m(b[0]) - b[1]).square().mean()


def test_the_edge_is_forecast_then_told_once_and_survives_a_resume(tmp_path):
    eos = Eos(every=20)
    flow = run(*sharpening(0.08, 600), tmp_path, eos)
    told = [f for f in flow.findings if f.kind == "edge_of_stability"]
    assert [f.severity for f in told] == [Severity.INFO, Severity.WARNING]
    ahead, edge_ = told
    crossed = next(c.step for c in eos.checks() if c.ratio >= 0.99)
    assert ahead.step < crossed
    assert ahead.value("earliest") <= crossed - ahead.step <= ahead.value("latest") + 20
    assert ahead.confidence is None
    assert edge_.action is Action.WARN
    assert 0.97 <= edge_.value("ratio") < 1.2
    assert edge_.value("gradients") == 4
    assert 0.5 <= edge_.confidence <= 1
    assert edge_.prescriptions[0].proposed < 0.08
    late = [c.ratio for c in eos.checks() if c.step >= 300]
    assert 0.95 < sorted(late)[len(late) // 2] < 1.05

    section = eos.summarize()
    assert section.tables[0].rows[-1][2] > 500
    assert len(section.figures[0].x) == len(section.figures[0].series["ratio"]) == len(eos.checks())

    file = io.BytesIO()
    torch.save(eos.state_dict(), file)
    file.seek(0)
    other = Eos(every=20)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.checks() == eos.checks()
    assert other.state_dict() == eos.state_dict()


def test_below_the_edge_nothing_is_told(tmp_path):
    flow = run(*sharpening(0.005, 150), tmp_path, Eos(every=10))
    assert kinds(flow) == []


def test_without_loss_fn_the_curvature_along_the_update_is_told_as_info(tmp_path):
    """It is a lower bound of what hovers at the threshold, and along an oscillating update it is a close one."""
    eos = Eos(every=20)
    flow = run(*sharpening(0.15, 500), tmp_path, eos, given=False)
    rows = eos._along[""].ratios
    assert sum(r for s, r in rows if s < 100) / 5 < 0.3  # in smooth descent it sees next to nothing
    assert [r for s, r in rows if s > 340] == pytest.approx([1.0] * 8, abs=0.05)
    assert kinds(flow) == [("edge_of_stability", Severity.INFO)]
    assert "lower bound" in flow.findings[0].premise
    other = Eos(every=20)
    other.load_state_dict(eos.state_dict())
    assert other.summarize() == eos.summarize()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_the_curvature_along_the_update_of_a_bowl_is_exact(make, tmp_path):
    model, loss_fn = bowl(4.0, 4.0, dtype=torch.float64)
    optimizer = make(model.parameters(), lr=0.1, weight_decay=0.5)
    eos = Eos(every=5)
    run(model, optimizer, [0] * 20, loss_fn, tmp_path, eos, given=False)
    rows = eos._along[""].ratios
    assert len(rows) == 3 if make is torch.optim.Adam else 4
    if make is torch.optim.SGD:
        assert [r for _, r in rows] == pytest.approx([(4.0 + 0.5) * 0.1 / 2] * 4, rel=1e-3)


def test_what_cannot_be_measured_is_said_once_and_tried_more_rarely(tmp_path):
    tries = []

    def loss_fn(m, b):
        if b == ["mine"]:
            tries.append(1)
            raise RuntimeError("no such batch")
        return sum(p.square().sum() for p in m)

    model, _ = bowl(1.0)
    flow = run(
        model, torch.optim.SGD(model.parameters(), lr=0.1), [0] * 61, loss_fn, tmp_path, Eos(every=2, batch=["mine"])
    )
    assert kinds(flow) == [("unmeasurable", Severity.INFO)]
    assert len(tries) == 5 + 3  # at 2, 4, 6, 8, 10, then at 20, 40, 60


@pytest.mark.parametrize(("make", "reason"), [(torch.optim.NAdam, "NAdam"), (torch.optim.Rprop, "Rprop")])
@pytest.mark.parametrize("given", [True, False])
def test_an_unknown_optimizer_is_said_once(make, reason, given, tmp_path):
    model, loss_fn = bowl(1.0)
    flow = run(model, make(model.parameters()), [0] * 9, loss_fn, tmp_path, Eos(every=2), given=given)
    assert kinds(flow) == [("unmeasurable", Severity.INFO)]
    assert reason in flow.findings[0].premise


def test_numbers_that_are_not_finite_are_unmeasurable(tmp_path):
    model, _ = bowl(1.0)
    flow = run(model, torch.optim.SGD(model.parameters(), lr=0.1), [0] * 5, lambda m, b: m[0].sum() * math.nan,
               tmp_path, eos := Eos(every=2))  # fmt: skip
    assert ("unmeasurable", Severity.INFO) in kinds(flow)
    assert eos.checks() == []


def test_attention_without_a_second_derivative_falls_back_out_loud(tmp_path, caplog):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 2)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))

    torch.manual_seed(0)
    model = Attention()
    batch = (torch.randn(16, 5, 8), torch.randint(0, 2, (16,)))
    eos = Eos(every=4, method="double_backward")
    with caplog.at_level(logging.WARNING, "dynguard"):
        run(model, torch.optim.Adam(model.parameters(), lr=1e-3), [batch] * 13, classify, tmp_path, eos)
    assert len([r for r in caplog.records if "no second derivative" in r.getMessage()]) == 1
    assert [c.step for c in eos.checks()] == [4, 8, 12]
    assert all(c.gradients == 4 for c in eos.checks()[1:])


def test_weights_in_half_precision_are_measured_by_double_backward(tmp_path):
    model, loss_fn = bowl(2.0, dtype=torch.bfloat16)
    eos = Eos(every=2)
    run(model, torch.optim.SGD(model.parameters(), lr=0.1), [0] * 5, loss_fn, tmp_path, eos)
    assert [c.sharpness for c in eos.checks()] == pytest.approx([2.0, 2.0], rel=0.02)


def test_a_loss_at_half_precision_is_measured_with_a_longer_difference_or_not_at_all(tmp_path):
    def loss_fn(m, b):
        with torch.autocast("cpu", torch.bfloat16):
            out = m(b[0])
        return (out.float() - b[1]).square().mean()

    model, optimizer, batches, _ = sharpening(0.05, 60)
    eos = Eos(every=10)
    run(model, optimizer, batches, loss_fn, tmp_path, eos)
    model, optimizer, batches, plain = sharpening(0.05, 60)
    true = Eos(every=10, method="double_backward", products=8)
    run(model, optimizer, batches, plain, tmp_path, true, name="true")
    expected = {c.step: c.ratio for c in true.checks()}
    assert all(c.ratio == pytest.approx(expected[c.step], rel=0.3) for c in eos.checks())


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings(sparse, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 3))
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randint(0, 50, (8, 3), generator=g), torch.randint(0, 3, (8,), generator=g)) for _ in range(13)]
    make = torch.optim.SGD if sparse else torch.optim.Adam
    eos = Eos(every=3)
    flow = run(model, make(model.parameters(), lr=1e-3), batches, classify, tmp_path, eos)
    assert all(f.severity is Severity.INFO for f in flow.findings)
    assert all(0 < c.ratio < 1 for c in eos.checks())


def test_batches(tmp_path):
    """Curvature b: the newest batch's, the first one's, or that of a batch of one's own."""
    for batch, expected in (("latest", [2.0, 4.0]), ("first", [0.0 + 1, 0.0 + 1]), (torch.tensor(7.0), [7.0, 7.0])):
        model, _ = bowl(1.0, dtype=torch.float64)
        batches = [torch.tensor(float(max(i, 1))) for i in range(5)]
        eos = Eos(every=2, batch=batch)
        run(model, torch.optim.SGD(model.parameters(), lr=1e-3), batches, lambda m, b: 0.5 * b * m[0].square().sum(),
            tmp_path, eos, name=f"run-{expected[0]}")  # fmt: skip
        assert [c.sharpness for c in eos.checks()] == pytest.approx(expected, rel=1e-3)
    with pytest.raises(OptionError, match="'batch'"):
        Eos(batch="lates")


def test_an_exponential_rise_is_forecast_exactly_and_noise_is_not():
    steps = list(range(0, 100, 10))
    ratios = [0.5 * math.exp(0.005 * s) for s in steps]
    found = forecast(steps, ratios)
    assert found.steps == pytest.approx(math.log(2) / 0.005 - 90, rel=1e-6)
    assert found.doubling == pytest.approx(math.log(2) / 0.005, rel=1e-6)
    assert forecast(steps, ratios[::-1]) is None
    assert forecast(steps, [0.7, 0.6, 0.72, 0.61, 0.69, 0.7, 0.6, 0.71, 0.62, 0.68]) is None
    assert forecast(steps[:4], ratios[:4]) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20))
def test_no_ratios_upset_a_forecast(ratios):
    found = forecast(range(0, 10 * len(ratios), 10), ratios)
    assert found is None or 0 <= found.earliest <= found.latest
