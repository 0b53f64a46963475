"""``spam``: clips against closed forms, resets against an optimizer made anew, schedulers that see their own rates."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dynguard import Action, FlowManager, Intervention
from dynguard.errors import OptionError
from dynguard.events import GradientEvent
from dynguard.testing import check_plugin, count_reads, on_ranks
from dynguard_plugins.stability.spam import Spam, recovery

LR = torch.optim.lr_scheduler
QUIET = {"interval": None, "warmup": 0}


def shapes(n=3):
    g = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(s, generator=g)) for s in ((4, 5), (6,), (2, 3))[:n]]


def gradients(steps, seed=0, size=1.0, sizes=((4, 5), (6,), (2, 3))):
    g = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=g) * size for s in sizes] for _ in range(steps)]


def walk(parameters, optimizer, series, scheduler=None):
    rates = []
    for row in series:
        for p, grad in zip(parameters, row, strict=False):
            p.grad = None if grad is None else grad.clone().to(p.dtype)
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*([1.0] if isinstance(scheduler, LR.ReduceLROnPlateau) else []))
        rates.append([(float(g["lr"]), g.get("betas"), g.get("momentum")) for g in optimizer.param_groups])
    return rates


def section(flow):
    (table,) = next(s for s in flow.summarize() if s.title == "SPAM").tables
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_contract():
    check_plugin(Spam)


def test_wrong_options_are_told():
    for wrong in ({"clip": "both"}, {"theta": 0.5}, {"gamma": 1.0}, {"interval": 1}, {"reset_on": ("warn",)},
                  {"lr_reduction": 0.0}):  # fmt: skip
        with pytest.raises(OptionError, match=next(iter(wrong))):
            Spam(**wrong)


# -- clipping


@pytest.mark.parametrize(
    ("make", "name", "beta2"),
    [
        (lambda p: torch.optim.Adam(p, foreach=False), "exp_avg_sq", 0.999),
        (lambda p: torch.optim.AdamW(p, fused=True, betas=(0.9, 0.95)), "exp_avg_sq", 0.95),
        (torch.optim.NAdam, "exp_avg_sq", 0.999),
        (lambda p: torch.optim.RMSprop(p, alpha=0.9), "square_avg", 0.9),
    ],
)
def test_entries_are_bounded_by_the_corrected_second_moment(watch, make, name, beta2):
    p = shapes()
    optimizer = make(p)
    flow = watch(nn.ParameterList(p), optimizer, plugins=[Spam(theta=50.0, **QUIET)])
    series = gradients(20)
    walk(p, optimizer, series)
    v = [optimizer.state[q][name].double().numpy() / (1 - beta2**20) for q in p]
    raw = [g * 10.0 for g in gradients(1, seed=9)[0]]
    before = section(flow)[0]["entries clipped"]
    walk(p, optimizer, [raw])
    over = 0
    for q, g, second in zip(p, raw, v, strict=True):
        limit = np.sqrt(50.0 * second)
        over += int((np.abs(g.numpy()) > limit).sum())
        np.testing.assert_allclose(q.grad.numpy(), np.clip(g.numpy(), -limit, limit), rtol=1e-5)
    assert 0 < over < 32
    assert section(flow)[0]["entries clipped"] - before == over
    assert section(flow)[0]["of"] == 32 * 20  # all but the first step, which has no second moment


def test_an_entry_without_a_past_is_free_to_learn(watch):
    p = shapes(1)
    optimizer = torch.optim.Adam(p)
    watch(nn.ParameterList(p), optimizer, plugins=[Spam(theta=2.0, **QUIET)])
    first = torch.zeros(4, 5)
    first[0] = 1.0
    walk(p, optimizer, [[first]] * 5)
    walk(p, optimizer, [[torch.full((4, 5), 1e6)]])
    assert bool((p[0].grad[1:] == 1e6).all())
    torch.testing.assert_close(p[0].grad[0], torch.full((5,), math.sqrt(2.0)), rtol=1e-3, atol=0)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_ordinary_gradients_pass_unchanged(watch, size):
    p = shapes()
    free = copy.deepcopy(p)
    a, b = torch.optim.AdamW(p, lr=1e-2), torch.optim.AdamW(free, lr=1e-2)
    # A v of one square may be far below the next: an entry in a hundred is 71 times its predecessor or more.
    walk(p, a, gradients(53, size=size)[:3])
    walk(free, b, gradients(53, size=size)[:3])
    flow = watch(nn.ParameterList(p), a, plugins=[Spam(interval=None)])
    walk(p, a, gradients(53, size=size)[3:])
    walk(free, b, gradients(53, size=size)[3:])
    assert all(torch.equal(x, y) for x, y in zip(p, free, strict=True))
    assert (section(flow)[0]["entries clipped"], section(flow)[0]["of"]) == (0, 32 * 50)


def levels(series, gamma):
    """AdaClip in double precision: the paper's equations with the total step count."""
    level, out = 0.0, []
    for t, g in enumerate(series, 1):
        top = float(np.abs(g).max())
        level = gamma * level + (1 - gamma) * top
        usual = level / (1 - gamma**t)
        out.append(np.where(np.abs(g) > usual, g / top * usual, g))
    return out


@pytest.mark.parametrize("interval", [None, 7])
def test_adaclip_counts_all_steps_whatever_is_reset(watch, interval):
    p = shapes(1)
    optimizer = torch.optim.SGD(p, lr=1e-3, momentum=0.9)
    watch(nn.ParameterList(p), optimizer, plugins=[Spam(gamma=0.9, interval=interval, warmup=3)])
    series = [row[:1] for row in gradients(30)]
    series[20][0] *= 1000.0
    wanted = levels([row[0].double().numpy() for row in series], 0.9)
    for row, expected in zip(series, wanted, strict=True):
        walk(p, optimizer, [row])
        np.testing.assert_allclose(p[0].grad.numpy(), expected, rtol=2e-4)
    top = float(series[20][0].abs().max())
    # T takes in a tenth of the spike, and that is what is left of it
    assert float(np.abs(wanted[20]).max()) == pytest.approx(0.1 * top / (1 - 0.9**21), rel=0.02)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda p: torch.optim.SGD(p, lr=1e-3), "adaclip"),
        (torch.optim.Adafactor, "adaclip"),
        (torch.optim.Adamax, "adaclip"),
        (torch.optim.Adagrad, "adaclip"),
        (torch.optim.Adam, "spike_aware"),
        (torch.optim.Adadelta, "spike_aware"),
    ],
)
def test_auto_takes_the_second_moment_where_there_is_one(watch, make, kind):
    p = shapes()
    spam = Spam(**QUIET)
    optimizer = make(p)
    watch(nn.ParameterList(p), optimizer, plugins=[spam])
    walk(p, optimizer, gradients(5))
    assert bool(spam.state_dict()[""]["clip"]["levels"]["rows"]) == (kind == "adaclip")


@pytest.mark.parametrize("clip", ["spike_aware", "adaclip"])
def test_what_is_not_finite_is_neither_learned_nor_spread(watch, clip):
    p = shapes(1)
    optimizer = torch.optim.Adam(p)
    spam = Spam(clip=clip, theta=4.0, gamma=0.5, **QUIET)
    watch(nn.ParameterList(p), optimizer, plugins=[spam])
    walk(p, optimizer, [row[:1] for row in gradients(10)])
    before = spam.state_dict()[""]["clip"]["levels"]["rows"]
    kept = optimizer.state[p[0]]["exp_avg_sq"].clone()
    bad = torch.ones(4, 5)
    bad[1, 1], bad[2, 2] = math.nan, math.inf
    walk(p, optimizer, [[bad]])
    assert bool(p[0].grad[1, 1].isnan())
    assert int(p[0].grad.isnan().sum()) == 1
    if clip == "adaclip":
        assert torch.equal(p[0].grad.nan_to_num(), bad.nan_to_num())
        after = spam.state_dict()[""]["clip"]["levels"]["rows"]
        assert {n: row[:2] for n, row in after.items()} == {n: row[:2] for n, row in before.items()}
    else:
        limit = 2.0 * (kept / (1 - 0.999**10)).sqrt()
        torch.testing.assert_close(p[0].grad[2, 2], limit[2, 2], rtol=1e-4, atol=0)


class Training:
    """As little of a source's training as the plugin needs."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.groups = [0] * len(optimizer.param_groups[0]["params"])
        self.factors = []

    def scale_learning_rate(self, factor):
        self.factors.append(factor)


def event_of(optimizer, step=0, scale=None, rejected=False):
    p = optimizer.param_groups[0]["params"]
    return GradientEvent(
        step=step, source="", names=tuple(f"p{i}" for i in range(len(p))), statistics=None, parameters=p,
        gradients=[q.grad for q in p], scale=scale, rejected=rejected, adaptive="Adam" in type(optimizer).__name__,
        training=Training(optimizer),
    )  # fmt: skip


@pytest.mark.parametrize("make", [lambda p: torch.optim.Adam(p, lr=0.01), lambda p: torch.optim.SGD(p, lr=0.01)])
def test_a_loss_scale_changes_nothing(make):
    p = shapes()
    optimizer = make(p)
    spams = {scale: Spam(theta=3.0, gamma=0.9, **QUIET) for scale in (1.0, 1024.0)}
    for step, row in enumerate(gradients(12)):
        if step == 10:
            row = [g * 100 for g in row]
        seen = {}
        for scale, spam in spams.items():
            for q, g in zip(p, row, strict=True):
                q.grad = g * scale
            spam.adjust_gradients(event_of(optimizer, step, None if scale == 1.0 else torch.tensor(scale)))
            seen[scale] = [q.grad / scale for q in p]
        torch.testing.assert_close(seen[1.0], seen[1024.0], rtol=1e-5, atol=0)
        for q, g in zip(p, seen[1.0], strict=True):
            q.grad = g
        optimizer.step()
    assert spams[1.0]._watched[""].clip.clipped == spams[1024.0]._watched[""].clip.clipped > 10


@pytest.mark.parametrize("clip", ["spike_aware", "adaclip"])
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    st.integers(0, 4),
)
@settings(max_examples=60, deadline=None)
def test_a_clip_never_enlarges_turns_or_silences_an_entry(clip, values, dtype, history):
    p = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    optimizer = torch.optim.Adam([p], lr=1e-3)
    spam = Spam(clip=clip, theta=1.5, gamma=0.9, **QUIET)
    for step in range(history):
        p.grad = torch.linspace(0.0, 1.0, len(values)).to(dtype)
        spam.adjust_gradients(event_of(optimizer, step))
        optimizer.step()
    raw = torch.tensor(values, dtype=torch.float64).to(dtype)
    p.grad = raw.clone()
    spam.adjust_gradients(event_of(optimizer, history))
    assert torch.equal(p.grad.isnan(), raw.isnan())
    known = ~raw.isnan()
    assert bool((p.grad.abs() <= raw.abs())[known].all())
    assert bool((torch.sign(p.grad) == torch.sign(raw))[known & (raw.abs() > 1e-5)].all())


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.Adam, {}),
        (lambda p: torch.optim.Adam(p, fused=True), {"lr_reduction": 0.5}),
        (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), {}),
        (torch.optim.Adam, {"clip": "adaclip"}),
    ],
)
def test_nothing_is_read_from_the_device(make, options):
    p = [*shapes(), nn.Parameter(torch.zeros(3, dtype=torch.float64)), nn.Parameter(torch.zeros(2, 2).half())]
    optimizer = make(p[:3] if "fused" in repr(optimizer_options(make)) else p)
    p = optimizer.param_groups[0]["params"]
    spam = Spam(interval=4, warmup=2, **options)
    for step in range(12):
        for q in p:
            q.grad = torch.randn(q.shape).to(q.dtype)
        rejected = torch.tensor(step == 7)
        with count_reads() as reads:
            spam.adjust_gradients(event_of(optimizer, step, torch.tensor(2.0), rejected))
            if step == 8:
                spam.on_intervention(Intervention(step=8, action=Action.CLIP))
        assert len(reads) == 0, reads.places
        optimizer.step()


def optimizer_options(make):
    return {k: v for k, v in make([nn.Parameter(torch.zeros(1))]).defaults.items() if v is True}


def test_sparse_half_empty_and_missing_gradients(watch):
    table = nn.Embedding(10, 4, sparse=True)
    p = [table.weight, nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD(p, lr=0.1, momentum=0.9)
    flow = watch(nn.ParameterList(p), optimizer, plugins=[Spam(interval=3, warmup=2, gamma=0.5)])
    for i in range(8):
        table(torch.tensor([1, 1, 2])).sum().backward()
        p[1].grad = torch.zeros(0, 3)
        p[2].grad = torch.full((2, 2), 1.0 + 100.0 * (i == 5))
        optimizer.step()
        optimizer.zero_grad()
    assert section(flow)[0]["entries clipped"] == 4
    assert all(bool(torch.isfinite(q).all()) for q in p)
    assert bool((p[3] == 1).all())


@pytest.mark.parametrize("gamma", [0.3, 0.9, 0.999])
def test_a_gradient_that_never_changes_is_never_clipped(gamma):
    p = shapes()
    optimizer = torch.optim.SGD(p, lr=0.1)
    spam = Spam(gamma=gamma, **QUIET)
    for step in range(300):
        for q, g in zip(p, gradients(1)[0], strict=True):
            q.grad = g
        spam.adjust_gradients(event_of(optimizer, step))
    assert spam._watched[""].clip.clipped == 0


def test_a_second_moment_that_is_broken_or_too_small_for_half_precision_spares_the_gradient():
    p = nn.Parameter(torch.zeros(3).half())
    optimizer = torch.optim.Adam([p])
    second = torch.tensor([math.nan, 1e-24, 1e-24])
    optimizer.state[p] = {"step": torch.tensor(9000.0), "exp_avg": torch.zeros(3), "exp_avg_sq": second}
    p.grad = torch.tensor([2.0, 3.0, -3.0]).half()
    Spam().adjust_gradients(event_of(optimizer, 5))
    assert p.grad[0] == 2.0
    assert 0.0 < float(p.grad[1]) < 1e-3
    assert float(p.grad[2]) == -float(p.grad[1])


def test_large_models_are_clipped_in_portions(monkeypatch):
    from dynguard_plugins.stability import spam_clip

    ends, calls = [], []
    for at_once in (1 << 22, 22):
        monkeypatch.setattr(spam_clip, "AT_ONCE", at_once)
        p = shapes()
        optimizer = torch.optim.Adam(p)
        walk(p, optimizer, gradients(3))
        sqrt = torch._foreach_sqrt
        monkeypatch.setattr(torch, "_foreach_sqrt", lambda v, f=sqrt: calls.append(len(v)) or f(v))
        for q, g in zip(p, gradients(1, seed=4, size=1e3)[0], strict=True):
            q.grad = g
        Spam().adjust_gradients(event_of(optimizer, 3))
        monkeypatch.setattr(torch, "_foreach_sqrt", sqrt)
        ends.append([q.grad for q in p])
    assert calls == [3, 1, 2]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_dropped_update_is_not_learned():
    """Where reads are deferred, the device drops an update after it was clipped, and says so a step later."""
    p = shapes(1)
    optimizer = torch.optim.SGD(p, lr=0.1)
    ends = []
    for dropped, resumed in ((False, False), (torch.tensor(True), False), (True, False), (True, True)):
        spam = Spam(gamma=0.9, **QUIET)
        for step in range(10):
            p[0].grad = torch.full((4, 5), 1.0 + step % 3)
            if step == 6 and dropped is not False:
                p[0].grad *= 1e6
            elif step == 6:
                continue
            spam.adjust_gradients(event_of(optimizer, step, rejected=dropped if step == 7 else False))
            if step == 6 and resumed:  # a checkpoint right after it
                saved, spam = spam.state_dict(), Spam(gamma=0.9, **QUIET)
                spam.load_state_dict(saved)
        ends.append(spam.state_dict()[""]["clip"]["levels"]["rows"]["p0"][:2])
    assert ends[0] == ends[1] == ends[2] == ends[3]


# -- resets


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.NAdam(p, lr=0.01),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        lambda p: torch.optim.Adafactor(p, lr=0.01),
    ],
)
def test_moments_start_afresh_every_interval_and_the_rate_comes_back(watch, make):
    p = shapes()
    mirror = copy.deepcopy(p)
    optimizer = make(p)
    flow = watch(nn.ParameterList(p), optimizer, plugins=[Spam(clip="none", interval=10, warmup=4)])
    series = gradients(35)
    walk(p, optimizer, series)
    other = make(mirror)
    for i, row in enumerate(series):
        if i and i % 10 == 0:
            other = make(mirror)  # made anew: no moments, no steps
        position = i % 10
        factor = 1.0
        if i >= 10 and position < 4:
            factor = 0.5 * (1 - math.cos(math.pi * (position + 1) / 5))
        other.param_groups[0]["lr"] = 0.01 * factor
        walk(mirror, other, [row])
    for a, b in zip(p, mirror, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    row = section(flow)[0]
    assert (row["resets"], row["updates at a lower rate"], row["updates"], row["not reset"]) == (3, 12, 35, "")


def test_the_update_after_a_reset_is_of_the_size_of_the_rate(watch):
    """Zeroed moments with an old counter would make it 18 times as large at this step."""
    p = shapes(1)
    optimizer = torch.optim.Adam(p, lr=0.01)
    watch(nn.ParameterList(p), optimizer, plugins=[Spam(interval=400, warmup=0)])
    for _ in range(405):
        before = p[0].detach().clone()
        walk(p, optimizer, [[torch.ones(4, 5)]])
        torch.testing.assert_close(before - p[0].detach(), torch.full((4, 5), 0.01), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("make", "told", "resets"),
    [
        (lambda p: torch.optim.RMSprop(p, momentum=0.9), "bias-correct", 2),
        (torch.optim.RMSprop, "bias-correct", 0),
        (torch.optim.Adagrad, "no moments", 0),
        (lambda p: torch.optim.SGD(p, lr=0.1), "no", 0),
    ],
)
def test_what_can_not_be_reset_is_said_once(watch, caplog, make, told, resets):
    p = shapes()
    optimizer = make(p)
    flow = watch(nn.ParameterList(p), optimizer, plugins=[Spam(interval=5, warmup=2)])
    walk(p, optimizer, gradients(14))
    warnings = [r.getMessage() for r in caplog.records if "spam" in r.getMessage()]
    assert len(warnings) == 1
    assert told in warnings[0]
    row = section(flow)[0]
    assert told in row["not reset"]
    assert (row["resets"], row["updates at a lower rate"]) == (resets, 2 * resets)


def test_a_parameter_without_a_gradient_so_far_is_no_failure(watch, caplog):
    p = shapes()
    optimizer = torch.optim.Adam(p)
    flow = watch(nn.ParameterList(p), optimizer, plugins=[Spam(interval=3)])
    walk(p, optimizer, [[g, None, None] for g, *_ in gradients(5)])
    assert section(flow)[0]["resets"] == 1
    assert section(flow)[0]["not reset"] == ""
    assert not [r for r in caplog.records if "spam" in r.getMessage()]


@pytest.mark.parametrize(
    ("reset_on", "actions", "resets"),
    [
        (("clip",), {20: Action.CLIP, 21: Action.CLIP, 22: Action.CLIP, 40: Action.CLIP}, 2),
        (("clip",), {20: Action.SKIP}, 0),
        (("skip",), {20: Action.SKIP, 21: Action.SKIP}, 1),
        ((), {20: Action.CLIP}, 0),
        (("rollback", "skip", "clip"), {20: Action.ROLLBACK}, 1),
    ],
)
def test_a_row_of_interventions_makes_one_reset(watch, make_probe, reset_on, actions, resets):
    p = shapes()
    model = nn.ParameterList(p)
    optimizer = torch.optim.Adam(p)
    spam = Spam(interval=None, reset_on=reset_on, warmup=3, cooldown=10)
    flow = watch(
        model, optimizer, plugins=[make_probe(fire_at=actions), spam], snapshot_every=5, max_consecutive_skips=4
    )
    walk(p, optimizer, gradients(60))
    row = section(flow)[0]
    assert (row["resets"], row["updates at a lower rate"]) == (resets, 3 * resets)
    steps = {float(optimizer.state[q]["step"]) for q in p}
    assert len(steps) == 1
    # every moment belongs to its counter: v / (1 - b2^t) is the size of a gradient's square
    for q in p:
        v = optimizer.state[q]["exp_avg_sq"].mean() / (1 - 0.999 ** steps.copy().pop())
        assert 0.3 < float(v) < 3.0


def test_the_clipped_step_itself_meets_fresh_moments(watch, make_probe):
    p = shapes(1)
    optimizer = torch.optim.Adam(p)
    watch(nn.ParameterList(p), optimizer, plugins=[make_probe(fire_at={20: Action.CLIP}), Spam(**QUIET)])
    walk(p, optimizer, [row[:1] for row in gradients(21)])
    assert float(optimizer.state[p[0]]["step"]) == 1.0


def test_the_repair_of_one_layer_is_no_reason_to_reset_all():
    spam = Spam()
    spam.on_intervention(Intervention(step=3, action=Action.CLIP, reason="update_spike"))
    assert not spam.state_dict()
    spam.on_intervention(Intervention(step=3, action=Action.CLIP, reason="grad_spike"))
    assert spam.state_dict()[""]["due"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_intervention_reduces_the_rate_for_a_while_even_with_nothing_to_reset(watch, make_probe, momentum):
    p = shapes(1)
    optimizer = torch.optim.SGD(p, lr=1.0, momentum=momentum)
    spam = Spam(clip="none", interval=None, lr_reduction=0.25, recovery_steps=4)
    watch(nn.ParameterList(p), optimizer, plugins=[make_probe(fire_at={5: Action.CLIP}), spam])
    ways = []
    for i in range(12):
        walk(p, optimizer, [[torch.full((4, 5), 1e-3)]])
        if momentum:
            optimizer.state[p[0]]["momentum_buffer"].zero_()
        ways.append(i)
    assert spam.state_dict()[""]["slow"] == 4


def test_the_way_back_of_the_rate():
    assert [recovery(i, 4, 0.5) for i in range(5)] == pytest.approx([0.5, 0.573223, 0.75, 0.926777, 1.0], abs=1e-6)
    up = [recovery(i, 150, 0.0) for i in range(151)]
    assert 0.0 < up[0] < 1e-3
    assert up == sorted(up)
    assert up[149] < 1.0 == up[150]
    assert recovery(0, 0, 0.0) == recovery(3, 0, 0.5) == recovery(0, 5, 1.0) == 1.0


def schedulers():
    yield "cosine", lambda o: LR.CosineAnnealingLR(o, 40)
    yield "onecycle", lambda o: LR.OneCycleLR(o, max_lr=0.1, total_steps=70)
    yield "plateau", lambda o: LR.ReduceLROnPlateau(o, patience=3, factor=0.5)
    yield "lambda", lambda o: LR.LambdaLR(o, lambda s: 1 / (1 + s))
    yield "chained", lambda o: LR.ChainedScheduler([LR.LinearLR(o, 0.1, total_iters=20), LR.ExponentialLR(o, 0.99)])
    yield "sequential", lambda o: LR.SequentialLR(o, [LR.ConstantLR(o, 0.1, 9), LR.StepLR(o, 5)], [30])


@pytest.mark.parametrize(("name", "schedule"), list(schedulers()))
@pytest.mark.parametrize("tensor", [False, True])
def test_a_scheduler_sees_its_own_rates(watch, make_probe, name, schedule, tensor):
    seen = []
    for guarded in (False, True):
        p = shapes()
        lr = torch.tensor(0.01) if tensor else 0.01
        optimizer = torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:], "weight_decay": 0.1}], lr=lr, foreach=False)
        scheduler = schedule(optimizer)
        if guarded:
            spam = Spam(interval=12, warmup=7, lr_reduction=0.3, recovery_steps=5, cooldown=3)
            fire = make_probe(fire_at={33: Action.CLIP, 45: Action.SKIP})
            watch(nn.ParameterList(p), optimizer, plugins=[fire, spam])
        seen.append(walk(p, optimizer, gradients(60), scheduler))
    assert seen[0] == seen[1]
    assert len({row[0] for row in seen[0][0] + seen[0][-1]}) > 1
    assert spam.state_dict()[""]["slow"] > 20


# -- state


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.AdamW(p, lr=0.01), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)]
)
@pytest.mark.parametrize("at", [3, 12, 15, 21, 31])
def test_a_resumed_run_goes_the_same_way(watch, make_probe, tmp_path, make, at):
    series = gradients(40)
    series[22][0][0, 0] = 1e5
    fire = {30: Action.CLIP}

    def start(p):
        optimizer = make(p)
        spam = Spam(interval=10, warmup=5, gamma=0.9, lr_reduction=0.5, recovery_steps=7, cooldown=2)
        return optimizer, spam, watch(nn.ParameterList(p), optimizer, plugins=[make_probe(fire_at=fire), spam])

    whole = shapes()
    optimizer, _, whole_flow = start(whole)
    walk(whole, optimizer, series)
    p = shapes()
    optimizer, _, flow = start(p)
    walk(p, optimizer, series[:at])
    torch.save(
        {"flow": flow.state_dict(), "optimizer": optimizer.state_dict(), "p": [q.data for q in p]}, tmp_path / "c"
    )
    flow.close()
    saved = torch.load(tmp_path / "c", weights_only=True)
    fresh = [nn.Parameter(t) for t in saved["p"]]
    optimizer, _, flow = start(fresh)
    optimizer.load_state_dict(saved["optimizer"])
    flow.load_state_dict(saved["flow"])
    walk(fresh, optimizer, series[at:])
    assert all(torch.equal(a, b) for a, b in zip(whole, fresh, strict=True))
    assert section(flow) == section(whole_flow)


def test_two_sources_and_a_parameter_that_joins(watch):
    a, b = shapes(1), shapes(2)
    optimizers = {"a": torch.optim.Adam(a), "b": torch.optim.SGD(b[:1], lr=0.1)}
    flow = watch([nn.ParameterList(a), nn.ParameterList(b)], optimizers, plugins=[Spam(interval=4, warmup=2)])
    for i in range(10):
        if i == 5:
            optimizers["b"].add_param_group({"params": b[1:], "lr": 0.01})
        walk(a, optimizers["a"], gradients(1, i))
        if i % 2:
            walk(b[: 1 + (i >= 5)], optimizers["b"], gradients(1, i))
    rows = {row["source"]: row for row in section(flow)}
    assert (rows["a"]["updates"], rows["a"]["resets"]) == (10, 2)
    assert (rows["b"]["updates"], rows["b"]["resets"]) == (5, 0)
    assert rows["b"]["of"] == 20 * 5 + 6 * 3


# -- whole runs


def test_what_a_spike_leaves_in_the_second_moment_is_bounded(watch):
    """By v <- b2 v + (1 - b2) theta v / (1 - b2^t); unbounded, it is as large as the spike, and Adam is blind."""
    left = []
    for guarded in (False, True):
        p = shapes()
        optimizer = torch.optim.AdamW(p, lr=1e-2)
        if guarded:
            watch(nn.ParameterList(p), optimizer, plugins=[Spam(interval=None)])
        walk(p, optimizer, gradients(100))
        before = [optimizer.state[q]["exp_avg_sq"].clone() for q in p]
        walk(p, optimizer, gradients(1, seed=5, size=1e4))
        after = [optimizer.state[q]["exp_avg_sq"] for q in p]
        left.append([a / b for a, b in zip(after, before, strict=True)])
    most = 0.999 + 0.001 * 5000.0 / (1 - 0.999**100)
    assert all(float(ratio.max()) <= most * 1.0001 for ratio in left[1])
    assert all(float(ratio.median()) > 1e3 * most for ratio in left[0])


def test_a_gradscaler_with_a_fused_optimizer(watch):
    ends = []
    for scaled in (False, True):
        p = shapes()
        optimizer = torch.optim.AdamW(p, lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        flow = watch(nn.ParameterList(p), optimizer, plugins=[Spam(theta=20.0, interval=15, warmup=5)])
        flow.track(scaler=scaler)
        for i, row in enumerate(gradients(40)):
            optimizer.zero_grad()
            loss = sum((q * g).sum() * (100.0 if i == 12 else 1.0) for q, g in zip(p, row, strict=True))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append([q.detach() for q in p])
        assert section(flow)[0]["entries clipped"] > 20
        flow.close()
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-6)


def test_observing_changes_nothing(tmp_path):
    p = shapes()
    free = copy.deepcopy(p)
    a, b = torch.optim.Adam(p), torch.optim.Adam(free)
    with FlowManager(
        nn.ParameterList(p),
        a,
        plugins=[Spam(theta=2.0, interval=5)],
        mode="observe",
        run_dir=tmp_path / "r",
        strict=True,
    ):
        walk(p, a, gradients(20))
    walk(free, b, gradients(20))
    assert all(torch.equal(x, y) for x, y in zip(p, free, strict=True))


# -- shards


def rank(number):
    for make in (lambda p: torch.optim.Adam(p, lr=0.01), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)):
        sharded_equals_whole(make)


def sharded_equals_whole(make):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 1))  # one rank holds nothing of the last layer
    shards = copy.deepcopy(whole)
    for layer in (*shards, shards):
        fully_shard(layer)
    runs = []
    for model in (whole, shards):
        optimizer = make(model.parameters())
        spam = Spam(theta=4.0, gamma=0.9, interval=7, warmup=3)
        runs.append((model, optimizer, spam))
    for step in range(20):
        torch.manual_seed(step)
        x = torch.randn(8, 6) * (30.0 if step == 12 else 1.0)
        for model, optimizer, spam in runs:
            optimizer.zero_grad()
            (model(x) - x[:, :1]).square().mean().backward()
            spam.adjust_gradients(event_of(optimizer, step))
            optimizer.step()
    assert runs[0][2]._watched[""].clip.clipped > 10
    for a, b in zip(whole.parameters(), shards.parameters(), strict=True):
        torch.testing.assert_close(b.full_tensor(), a, rtol=1e-5, atol=1e-6)
    mine = runs[1][2].state_dict()[""]["clip"]["levels"]["rows"]
    for name, row in runs[0][2].state_dict()[""]["clip"]["levels"]["rows"].items():
        assert mine[name] == pytest.approx(row, rel=1e-5)


def test_shards_are_clipped_as_the_whole_tensor():
    on_ranks(rank)
