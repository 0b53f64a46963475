"""What an adversary found in prediction and repair, each with the smallest run that showed it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dynguard import Action, Finding, FlowManager
from dynguard.actions import Arbiter, Policy
from dynguard.errors import SetupError
from dynguard.findings import superseded
from dynguard.torch.curvature import Curvature, sharpness
from dynguard.torch.moments import can_reset, reset_moments
from dynguard.torch.probe import Probe
from dynguard_plugins.embeddings.rows import Rows
from dynguard_plugins.stability.eos import Eos
from dynguard_plugins.stability.health_clip import Clip


def squares(model, batch):
    return model(batch).square().mean()


def test_a_scaler_that_has_unscaled_finds_its_mark_again(tmp_path):
    """GradScaler sets ``grad_scale = None`` on a fused optimizer after ``unscale_`` and deletes it after the step."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu")
    with FlowManager(model, optimizer, plugins=["spike"], reads="deferred", run_dir=tmp_path / "run"):
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(squares(model, torch.randn(8, 4))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert "grad_scale" not in vars(optimizer)
    assert "found_inf" not in vars(optimizer)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.complex128])
def test_weights_of_any_kind_switch_nothing_off(dtype, tmp_path):
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(6, 5, dtype=dtype)), nn.Parameter(torch.randn(5, dtype=dtype))])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_fn(m, batch):
        return (batch.to(dtype) @ m[0] + m[1]).abs().square().mean()

    plugins = ["flow", "precursor", ("eos", {"every": 10})]
    with FlowManager(model, optimizer, plugins=plugins, loss_fn=loss_fn, run_dir=tmp_path / "run", strict=True) as flow:
        for _ in range(60):
            batch = torch.randn(8, 6)
            loss = loss_fn(model, batch)
            flow.observe(loss=loss, batch=batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_the_difference_is_made_longer_once_at_most():
    """Rounding noise in the loss leaves a large residual at any step; the next measurement starts from the last one."""
    torch.manual_seed(0)
    model = nn.Linear(20, 1)
    x = torch.randn(16, 20)

    def noisy(m, batch):
        return m(batch).square().mean() + (m.weight * torch.sin(1e7 * m.weight.detach())).sum()

    step = None
    for _ in range(4):
        curvature = Curvature(Probe(model, noisy, x, list(model.parameters())), step=step)
        found = sharpness(curvature)
        assert curvature.step <= curvature.longest
        step = curvature.step if found.coarse else step


def test_after_failures_the_usual_difference_is_tried_again(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    noise = [1.0]

    def loss_fn(m, batch):
        return m(batch).square().mean() + noise[0] * (m.weight * torch.sin(1e7 * m.weight.detach())).sum()

    plugin = Eos(every=2)
    with FlowManager(
        model, optimizer, plugins=[plugin], loss_fn=loss_fn, run_dir=tmp_path / "run", strict=True
    ) as flow:
        for step in range(24):
            noise[0] = float(step < 8)
            batch = torch.randn(64, 20)
            flow.observe(batch=batch)
            squares(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    (last,) = plugin.checks()[-1:]
    exact = float(torch.linalg.eigvalsh(2 * torch.cov(torch.randn(10_000, 20).T, correction=0))[-1])
    assert last.sharpness == pytest.approx(exact, rel=1.5)  # of 64 samples: up to (1 + sqrt(20 / 64))^2 times as large


def test_second_derivatives_of_sparse_tables(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 4, sparse=True), nn.Linear(4, 3))
    ids = torch.randint(0, 12, (32,))
    probe = Probe(model, lambda m, b: F.cross_entropy(m(b), b % 3), ids, list(model.parameters()))
    double = sharpness(Curvature(probe, method="double_backward")).value
    assert double == pytest.approx(sharpness(Curvature(probe)).value, rel=0.05)


def test_radam_is_refused_a_reset_of_its_second_moment():
    """Its first updates are ``lr * m``, not divided by anything: after a reset, as large as the gradient."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.RAdam([parameter], lr=1e-3)
    for _ in range(20):
        parameter.grad = torch.full((3,), 1e4)
        optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[parameter].items()}
    assert "not divided" in can_reset(optimizer, parameter)
    assert reset_moments(optimizer, parameter) == ["exp_avg"]
    assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], before["exp_avg_sq"])
    assert torch.equal(optimizer.state[parameter]["step"], before["step"])
    at = parameter.detach().clone()
    parameter.grad = torch.full((3,), 1e4)
    optimizer.step()
    assert float((parameter.detach() - at).abs().max()) < 1e-2


def test_a_layer_that_is_frozen_in_mid_run_leaves_helene_whole(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_fn(m, batch):
        return F.cross_entropy(m(batch[0]), batch[1])

    with FlowManager(
        model, optimizer, plugins=["helene"], loss_fn=loss_fn, run_dir=tmp_path / "run", strict=True
    ) as flow:
        for step in range(60):
            if step == 30:
                model[0].requires_grad_(False)
            batch = torch.randn(16, 6), torch.randint(0, 3, (16,))
            loss = loss_fn(model, batch)
            flow.observe(loss=loss, batch=batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def test_ids_of_a_table_that_no_optimizer_holds_are_let_go(tmp_path):
    model = nn.Sequential(nn.Embedding(10, 3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model[1].parameters())
    with FlowManager(model, optimizer, plugins=[Rows()], run_dir=tmp_path / "run", strict=True) as flow:
        for _ in range(5):
            squares(model, torch.tensor([1, 2])).backward()
            optimizer.step()
        assert not flow._watch.lookups._ids


class Dies(torch.optim.SGD):
    dead = False

    def step(self, closure=None):
        if self.dead:
            raise MemoryError
        return super().step(closure)


def test_a_checkpoint_after_a_step_that_died_has_the_users_rate(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = Dies(model.parameters(), lr=0.1, momentum=0.9)
    plugins = [("spam", {"interval": 5, "warmup": 20})]
    with FlowManager(model, optimizer, plugins=plugins, run_dir=tmp_path / "run", strict=True):
        for _ in range(7):
            squares(model, torch.randn(4, 3)).backward()
            optimizer.step()
        optimizer.dead = True
        with pytest.raises(MemoryError):
            optimizer.step()
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
    assert not optimizer._optimizer_state_dict_pre_hooks


def find(kind, action, subject="", supersedes=()):
    return Finding(kind=kind, action=action, subject=subject, supersedes=supersedes)


@pytest.mark.parametrize(
    ("found", "left"),
    [
        ([find("a", Action.CLIP, "x", ("b",)), find("b", Action.SKIP, "x")], [Action.CLIP, Action.WARN]),
        ([find("a", Action.CLIP, "x", ("b",)), find("b", Action.SKIP)], [Action.CLIP, Action.WARN]),
        ([find("a", Action.CLIP, "x", ("b",)), find("b", Action.SKIP, "y")], [Action.CLIP, Action.SKIP]),
        ([find("a", Action.WARN, "x", ("b",)), find("b", Action.SKIP, "x")], [Action.WARN, Action.SKIP]),
        ([find("a", Action.CLIP, "x", ("b",)), find("b", Action.RAISE, "x")], [Action.CLIP, Action.RAISE]),
        ([find("a", Action.CLIP, "x", ("b",)), find("b", Action.SKIP, "x", ("a",))], [Action.CLIP, Action.SKIP]),
        ([find("a", Action.CLIP, "x", ("a",)), find("a", Action.SKIP, "x", ("a",))], [Action.CLIP, Action.SKIP]),
    ],
)
def test_who_may_supersede_whom(found, left):
    assert [f.action for f in superseded(found)] == left


def test_norms_that_overflow_when_squared():
    import numpy as np

    clip = Clip(15)
    clip.see(np.array([1e22, 3e25], np.float32))
    assert clip.level == pytest.approx(3e25, rel=1e-6)


def test_an_intervention_names_all_its_subjects():
    arbiter = Arbiter(Policy())
    verdict = arbiter.decide([find("a", Action.CLIP, "x"), find("b", Action.WARN, "z"), find("a", Action.CLIP, "y")])
    assert verdict.intervention(3, "").subjects == ("x", "y")


def test_a_manager_that_can_not_be_made_leaves_nothing_behind() -> None:
    before = torch.amp.GradScaler.step
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(SetupError, match="are not the model's"):
        FlowManager(model, optimizer, plugins=["spike"])
    assert torch.amp.GradScaler.step is before
    assert not optimizer._optimizer_step_pre_hooks
