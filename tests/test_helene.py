"""``helene``: the clip against the rule written out, what enters it and what must not, and a planted spike."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dynguard import Action, FlowManager, Intervention
from dynguard.testing import call, check_plugin, count_reads, gradient_event
from dynguard_plugins.stability.helene import Helene
from dynguard_plugins.stability.helene_curvature import Curvature


@pytest.fixture(autouse=True)
def one_thread():
    """Nets this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Fake:
    """A Training of one model."""

    def __init__(self, model, loss_fn=None):
        self.model, self.loss_fn, self.optimizer, self.scaler, self.groups = model, loss_fn, None, None, ()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(count, seed=1, rows=32):
    g = torch.Generator().manual_seed(seed)
    truth = torch.randn(6, 3, generator=g)
    xs = [torch.randn(rows, 6, generator=g) for _ in range(count)]
    return [(x, (x @ truth).argmax(1)) for x in xs]


def event_of(model, gradients, step=0, *, fn=loss_fn, batch=None, **more):
    names = [n for n, _ in model.named_parameters()]
    return gradient_event(
        step,
        gradients=dict(zip(names, gradients, strict=True)),
        parameters=dict(model.named_parameters()),
        training=Fake(model, fn),
        batches=[batch] if batch is not None else [],
        **more,
    )


def ordinary(model, seed):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=g) for p in model.parameters()]


def adjust(plugin, event):
    call(plugin, "adjust_gradients", event=event)


def feed(plugin, model, data, steps):
    """Ordinary steps."""
    for step in steps:
        adjust(plugin, event_of(model, ordinary(model, step), step, batch=data[step]))


def only(plugin, source=""):
    return plugin._watched[source]


def test_contract():
    check_plugin(Helene)


def test_entries_are_bounded_by_the_rule():
    """base_clip fixed; h is one draw, so that h = curvature.values and the rule can be written out."""
    model, data = net(), batches(1)[0]
    plugin = Helene(base_clip=2.0, floor_ratio=0.3, share=1.0)
    gradients = ordinary(model, 3)
    before = [g.clone() for g in gradients]
    adjust(plugin, event_of(model, gradients, batch=data))
    some = 0
    for i, (g, raw) in enumerate(zip(gradients, before, strict=True)):
        h = only(plugin).curvature.values[i]
        limit = 2.0 * torch.maximum(h, 0.3 * h.mean())
        expected = torch.sign(raw) * torch.minimum(raw.abs(), limit)
        torch.testing.assert_close(g, expected)
        some += int((g != raw).sum())
    assert 0 < some < sum(g.numel() for g in gradients)


def test_h_is_the_running_mean_of_the_published_estimates():
    from dynguard.torch.gauss_newton import diagonal
    from dynguard.torch.probe import Probe

    model, data = net(), batches(3)
    plugin = Helene(every=1, share=1.0)
    for step, batch in enumerate(data):
        adjust(plugin, event_of(model, ordinary(model, step), step, batch=batch))
    draws = [diagonal(Probe(model, loss_fn, b, list(model.parameters())), s) for s, b in enumerate(data)]
    for i in range(4):
        torch.testing.assert_close(only(plugin).curvature.values[i], torch.stack([d[i] for d in draws]).mean(0))
    assert only(plugin).curvature.sampled == 3


@pytest.mark.parametrize("multiple", [3.0, 5.0])
def test_auto_leaves_ordinary_steps_alone_and_bounds_a_spike(multiple):
    """Gaussian gradients at a flat h: the level is their RMS, a share erfc(multiple / sqrt 2) is above the limit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 100, bias=False))
    curvature_of = lambda m, b: (m[0].weight * b).sum() ** 2 * 0 + F.mse_loss(m[0].weight, torch.zeros(100, 100))  # noqa: E731
    plugin = Helene(multiple=multiple, warmup=5, every=5, floor_ratio=50.0)  # the floor rules: h is flat
    clipped = 0
    for step in range(200):
        (g,) = gradients = [torch.randn(100, 100) * 1e-3]
        raw = g.clone()
        adjust(plugin, event_of(model, gradients, step, fn=curvature_of, batch=torch.ones(1)))
        clipped += int((g != raw).sum()) if step >= 20 else 0
    assert abs(clipped / (180 * 1e4) - math.erfc(multiple / 2**0.5)) < 1e-3
    (g,) = gradients = [torch.randn(100, 100)]
    adjust(plugin, event_of(model, gradients, 200, fn=curvature_of, batch=torch.ones(1)))
    assert float(g.abs().max()) == pytest.approx(multiple * 1e-3, rel=0.1)


def test_a_spike_moves_neither_level_nor_h_far():
    model, data = net(), batches(40)
    plugin = Helene(every=1, warmup=3, share=1.0)
    feed(plugin, model, data, range(30))
    level, means = only(plugin).limits.level.clone(), dict(only(plugin).curvature.means)
    poisoned = (data[30][0] * 1e4, data[30][1])
    spike = [g * 1000 for g in ordinary(model, 30)]
    adjust(plugin, event_of(model, spike, 30, batch=poisoned))
    adjust(plugin, event_of(model, ordinary(model, 31), 31, batch=data[31]))
    assert (only(plugin).limits.level < 1.3 * level).all()
    for i, mean in only(plugin).curvature.means.items():
        assert mean < means[i] * (1 + 9 / 31) * 1.3
        assert float(only(plugin).curvature.values[i].mean()) == pytest.approx(mean, rel=1e-3)


def test_what_is_not_finite_is_not_learned():
    model, data = net(), batches(20)
    plugin = Helene(every=1, warmup=3)
    feed(plugin, model, data, range(6))
    h = {i: v.clone() for i, v in only(plugin).curvature.values.items()}
    bad = ordinary(model, 6)
    bad[0][0, 0] = math.nan
    adjust(plugin, event_of(model, bad, 6, batch=data[6]))
    assert bad[0].isnan().sum() == 1  # not hidden
    assert all(torch.equal(h[i], v) for i, v in only(plugin).curvature.values.items())
    nan_batch = (data[7][0] * math.nan, data[7][1])
    adjust(plugin, event_of(model, ordinary(model, 7), 7, batch=nan_batch))
    assert all(torch.equal(h[i], v) for i, v in only(plugin).curvature.values.items())
    adjust(plugin, event_of(model, ordinary(model, 8), 8, batch=data[8]))
    assert not any(torch.equal(h[i], v) for i, v in only(plugin).curvature.values.items())
    assert only(plugin).limits.level.isfinite().all()


@pytest.mark.parametrize("how", ["flag", "tensor", "rollback"])
def test_rejected_steps_are_not_learned(how):
    model, data = net(), batches(8)
    plugin = Helene()
    feed(plugin, model, data, range(4))
    adjust(plugin, event_of(model, [g * 2 for g in ordinary(model, 4)], 4, batch=data[4]))
    before = only(plugin).limits.level.clone()
    rejected = {"flag": True, "tensor": torch.tensor(True), "rollback": False}[how]
    if how == "rollback":
        call(plugin, "on_intervention", intervention=Intervention(step=4, action=Action.ROLLBACK))
    event = event_of(model, ordinary(model, 5), 5, batch=data[5], rejected=rejected)
    adjust(plugin, event)
    assert torch.equal(before, only(plugin).limits.level)


@pytest.mark.parametrize(
    ("fn", "batch", "why"),
    [
        (None, (torch.zeros(8, 6),), "no loss_fn"),
        (loss_fn, None, "no batch was observed"),
        (lambda m, b: m(b[0]).abs().mean(), batches(1)[0], "none of the losses"),
        (lambda m, b: 1 / 0, batches(1)[0], "ZeroDivisionError"),
    ],
)
def test_the_fallback_is_the_squared_gradient_and_is_told_once(fn, batch, why, caplog):
    model = net()
    plugin = Helene(every=1)
    rows = [ordinary(model, s) for s in range(5)]
    copies = [[g.clone() for g in r] for r in rows]
    for step, gradients in enumerate(rows):
        adjust(plugin, event_of(model, gradients, step, fn=fn, batch=batch))
    for i in range(4):
        expected = torch.stack([c[i] ** 2 for c in copies]).mean(0)
        torch.testing.assert_close(only(plugin).curvature.values[i], expected)
    assert len([r for r in caplog.records if "squared gradients" in r.getMessage()]) == 1
    text = plugin.summarize().text
    assert why in text
    assert "0 by sampled labels, 5 by" in text


def test_a_loss_that_takes_whole_batches_only():
    model, data = net(), batches(2)

    def strict(m, b):
        if len(b[0]) != 32:
            raise ValueError("32 rows")
        return loss_fn(m, b)

    plugin = Helene(every=1)
    for step in range(2):
        adjust(plugin, event_of(model, ordinary(model, step), step, fn=strict, batch=data[step]))
    assert (only(plugin).curvature.sampled, only(plugin).curvature.share) == (2, 1.0)


def test_scale_of_a_fused_optimizer_is_honoured():
    model, data = net(), batches(12)
    plain, scaled = Helene(warmup=3), Helene(warmup=3)
    factor = torch.tensor(1024.0)
    for step in range(12):
        gradients = [g * (1000 if step == 11 else 1) for g in ordinary(model, step)]
        larger = [g * factor for g in gradients]
        adjust(plain, event_of(model, gradients, step, batch=data[step]))
        adjust(scaled, event_of(model, larger, step, batch=data[step], scale=factor))
    for mine, theirs in zip(larger, gradients, strict=True):
        torch.testing.assert_close(mine / factor, theirs)
    assert max(float(g.abs().max()) for g in gradients) < 50  # so they were clipped


def test_the_fallback_is_unscaled_too():
    model, factor = net(), torch.tensor(1024.0)
    plugin, (gradients, raw) = Helene(), (ordinary(model, 0), ordinary(model, 0))
    larger = [g * factor for g in gradients]
    adjust(plugin, event_of(model, larger, fn=None, scale=factor))
    for i, g in enumerate(raw):
        torch.testing.assert_close(only(plugin).curvature.values[i], g**2)
        assert only(plugin).curvature.means[i] == pytest.approx(float((g**2).mean()), rel=1e-5)


def test_nothing_is_clipped_while_it_warms_up_and_inf_is_not_learned():
    model, data = net(), batches(20)
    plugin = Helene(warmup=6)
    for step in range(12):
        gradients = [g * (100 if step == 3 else 1) for g in ordinary(model, step)]
        if step == 2:
            gradients[0][0, 0] = math.inf
        raw = [g.clone() for g in gradients]
        adjust(plugin, event_of(model, gradients, step, batch=data[step]))
        assert step > 6 or all(torch.equal(a, b) for a, b in zip(gradients, raw, strict=True))
    assert only(plugin).limits.level.isfinite().all()
    assert only(plugin).limits.counts.tolist() == [10, 11, 11, 11]  # the last step is not settled, inf was left out


def test_odd_gradients():
    """None, sparse, complex, empty, transposed and half precision, side by side."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(9, 4, sparse=True)
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.narrow = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
            self.empty = nn.Parameter(torch.ones(0))
            self.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
            self.plain = nn.Parameter(torch.ones(3, 5))

    model = Odd()
    plugin = Helene(warmup=2, every=2)
    sparse = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 4), (9, 4), check_invariants=True)
    for step in range(8):
        size = 1000.0 if step == 7 else 1.0
        g = torch.Generator().manual_seed(step)
        half = (torch.randn(4, 4, generator=g) * size).to(torch.bfloat16)
        wave = torch.ones(2, dtype=torch.complex64) * size
        plain = (torch.randn(5, 3, generator=g) * size).t()
        names = [n for n, _ in model.named_parameters()]
        given = {"table.weight": sparse * size, "frozen": None, "narrow": half, "empty": torch.ones(0), "wave": wave}
        gradients = [given.get(n, plain) for n in names]
        adjust(plugin, event_of(model, gradients, step, fn=None))
    assert half.dtype == torch.bfloat16
    assert half.abs().max() < 20
    assert plain.abs().max() < 20
    assert torch.equal(wave, torch.full((2,), 1000.0 + 0j))
    assert (sparse * size).coalesce().values().max() == 2000
    assert "table.weight" in plugin.summarize().text
    assert "wave" in plugin.summarize().text


def test_layers_may_join_and_may_be_excluded():
    model, data = net(), batches(8)
    plugin = Helene(warmup=2, every=2, exclude=("2.*",))
    feed(plugin, model, data, range(3))
    model.append(nn.Linear(3, 3))
    for step in range(3, 8):
        gradients = [g * (1000 if step == 7 else 1) for g in ordinary(model, step)]
        raw = [g.clone() for g in gradients]
        adjust(plugin, event_of(model, gradients, step, batch=data[step]))
    changed = [not torch.equal(a, b) for a, b in zip(gradients, raw, strict=True)]
    assert changed == [True, True, False, False, True, True]
    assert {r[1] for r in plugin.summarize().tables[0].rows} == {"0.weight", "0.bias", "3.weight", "3.bias"}


def test_no_host_read_between_estimates():
    model, data = net(), batches(40)
    plugin = Helene(every=10, warmup=3)
    feed(plugin, model, data, range(20))
    for step in range(20, 30):
        event = event_of(model, ordinary(model, step), step, batch=data[step], rejected=torch.tensor(False))
        with count_reads() as reads:
            adjust(plugin, event)
        assert bool(len(reads)) == (step == 20), reads.places


def train(make, plugins, data, spike=None):
    model = net(4)
    optimizer = make(model.parameters())
    with FlowManager(model, optimizer, plugins=plugins, loss_fn=loss_fn, strict=True) as flow:
        for step, batch in enumerate(data):
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            loss.backward()
            if step == spike:
                for p in model.parameters():
                    p.grad *= 1000
            flow.observe(loss=loss.detach(), batch=batch)
            optimizer.step()
    with torch.no_grad():
        return sum(float(loss_fn(model, batch)) for batch in batches(10, seed=1)) / 10


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.999)), lambda p: torch.optim.SGD(p, lr=0.1)],
    ids=["adamw", "sgd"],
)
def test_a_planted_spike_costs_little(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = batches(80)
    clean, hit = train(make, [], data), train(make, [], data, spike=40)
    guarded, saved = train(make, [Helene()], data), train(make, [Helene()], data, spike=40)
    assert guarded == pytest.approx(clean, rel=0.01)  # a clean run is not held up
    assert hit > 1.2 * clean  # unguarded, a spike costs
    assert saved - clean < 0.25 * (hit - clean)


def test_state_survives_weights_only_and_goes_on():
    model, data = net(), batches(40)
    plugin = Helene()
    feed(plugin, model, data, range(25))
    state = plugin.state_dict()
    fresh = Helene()
    fresh.load_state_dict(copy.deepcopy(state))
    assert fresh.state_dict() == state
    spike = [g * 1000 for g in ordinary(model, 25)]
    adjust(fresh, event_of(model, spike, 25, batch=data[25]))
    assert max(float(g.abs().max()) for g in spike) < 100  # from its first step on
    assert fresh.state_dict()[""]["sampled"] == state[""]["sampled"] + 1


def test_one_estimate_counts_for_at_most_ten_times_the_mean():
    curvature = Curvature(decay=0.9, share=1.0)
    for mean in [1.0] * 20 + [1e6]:
        curvature._take(0, torch.full((4,), mean**0.5), mean)
    assert curvature.means[0] == pytest.approx(0.9 + 0.1 * 10)
    torch.testing.assert_close(curvature.values[0], torch.full((4,), 1.9))
