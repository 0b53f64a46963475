"""The ``towers`` plugin: planted standstills, velocities known from the optimizer, and their correlation."""

import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dynguard import Severity
from dynguard.testing import check_plugin
from dynguard_plugins.embeddings.towers import Towers, _partners, _top

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_contract():
    check_plugin(Towers)
    check_plugin(Towers, options={"every": 2, "warmup": 0, "towers": {"a": ["*"], "b": ["*.bias"]}})


class TwoTower(nn.Module):
    def __init__(self, sparse=False, mlp=True):
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Sequential(nn.Embedding(400, 8, sparse=sparse), *([nn.Linear(8, 8)] if mlp else []))
        self.item = nn.Sequential(nn.Embedding(300, 8, sparse=sparse), *([nn.Linear(8, 8)] if mlp else []))
        self.detached = False

    def forward(self, users, items):
        of_users = self.user(users).detach() if self.detached else self.user(users)
        return (of_users * self.item(items)).sum(-1)


def train(watch, model, optimizer, steps=160, plugin=None):
    plugin = plugin or Towers(every=5, warmup=20)
    flow = watch(model, optimizer, plugins=[plugin])
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        users, items = torch.randint(0, 400, (32,), generator=g), torch.randint(0, 300, (32,), generator=g)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(users, items), ((users + items) % 3 == 0).float()).backward()
        optimizer.step()
    flow.close()
    return [f for f in flow.findings if f.kind == "stalled_tower"], plugin


def groups(model, user, item):
    return [{"params": model.user.parameters(), "lr": user}, {"params": model.item.parameters(), "lr": item}]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_tower_with_far_too_small_steps_is_told(watch, kind):
    model = TwoTower()
    (finding,), _ = train(watch, model, kind(groups(model, 1e-6, 1e-2)))
    assert (finding.subject, finding.severity) == ("user", Severity.WARNING)
    assert finding.value("gradient") == "alive"
    assert finding.value("partner") == "item"
    assert finding.value("velocity_ratio") < 0.001


def test_a_tower_that_the_loss_does_not_reach_has_a_zero_gradient(watch):
    model = TwoTower()
    model.detached = True
    (finding,), _ = train(watch, model, torch.optim.Adam(model.parameters(), lr=1e-2))
    assert (finding.subject, finding.value("gradient"), finding.value("velocity")) == ("user", "zero", 0.0)


@pytest.mark.parametrize("make", [
    lambda m: torch.optim.Adam(m.parameters(), lr=1e-2), lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
    lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05), lambda m: torch.optim.Adam(groups(m, 1e-3, 1e-2)),
    lambda m: torch.optim.SGD(groups(m, 0.0, 0.5)),
], ids=["Adam", "SGD", "Adagrad", "ten times apart", "one is frozen by its rate"])  # fmt: skip
def test_towers_that_learn_together_are_silent(watch, make):
    model = TwoTower()
    found, plugin = train(watch, model, make(model))
    assert not found
    assert {r[0] for r in plugin.summarize().tables[0].rows} == {"user", "item"}


def test_parts_that_are_no_partners_may_differ(watch):
    def run(plugin):
        torch.manual_seed(0)
        model = nn.ModuleDict({"wte": nn.Embedding(400, 8), "head": nn.Linear(8, 1)})
        optimizer = torch.optim.SGD([{"params": model["wte"].parameters(), "lr": 1e-6},
                                     {"params": model["head"].parameters(), "lr": 0.1}])  # fmt: skip
        flow = watch(model, optimizer, plugins=[plugin])
        for _ in range(160):
            optimizer.zero_grad()
            model["head"](model["wte"](torch.randint(0, 400, (32,)))).square().mean().backward()
            optimizer.step()
        flow.close()
        return [f.subject for f in flow.findings if f.kind == "stalled_tower"]

    assert run(Towers(every=5, warmup=20)) == []
    assert run(Towers(every=5, warmup=20, towers={"words": ["wte.*"], "top": ["head.*"]})) == ["words"]


@pytest.mark.parametrize("sparse", [False, True])
def test_velocity_gradient_and_drift_are_those_of_the_update(watch, sparse):
    """SGD moves a row by rate times gradient: known without looking at the weights."""
    model = TwoTower(sparse=sparse, mlp=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plugin = Towers(every=2, warmup=0)
    flow = watch(model, optimizer, plugins=[plugin])
    begun = model.user[0].weight.detach().clone()
    users, items = torch.arange(20), torch.arange(20)
    expected = []
    for _ in range(6):
        optimizer.zero_grad()
        model(users, items).square().mean().backward()
        gradient = model.user[0].weight.grad.to_dense()[:20]
        expected.append((0.5 * gradient.norm() / model.user[0].weight[:20].norm()).item())
        optimizer.step()
    flow.close()
    (_, values) = plugin._watched[""].read()
    assert plugin._watched[""].read()[0].tolist() == [0, 2, 4]
    assert values[:, 0, 0] == pytest.approx(expected[::2][:3], rel=1e-4)
    assert values[0, 2, 0] == pytest.approx(expected[0] * begun[:20].norm().item() / begun.norm().item(), rel=0.5)


def test_towers_driven_together_are_correlated(watch):
    model = TwoTower(mlp=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10 ** np.sin(step / 8))
    plugin = Towers(every=3, warmup=0)
    flow = watch(model, optimizer, plugins=[plugin])
    g = torch.Generator().manual_seed(1)
    for _ in range(150):
        users, items = torch.randint(0, 400, (64,), generator=g), torch.randint(0, 300, (64,), generator=g)
        optimizer.zero_grad()
        (model(users, items) - 1).square().mean().backward()
        optimizer.step()
        schedule.step()
    flow.close()
    (table,) = [t for t in plugin.summarize().tables if t.title == "Correlations"]
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["velocity"] > 0.9
    assert row["drift"] > 0.9


def test_a_rejected_step_is_no_standstill(watch):
    """A loss that is not a number is skipped: the velocity of 0 that this makes is not entered."""
    model = TwoTower(mlp=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plugin = Towers(every=2, warmup=0)
    flow = watch(model, optimizer, plugins=["spike", plugin])
    for step in range(12):
        optimizer.zero_grad()
        loss = model(torch.arange(20), torch.arange(20)).square().mean() * (float("nan") if step == 4 else 1.0)
        loss.backward()
        optimizer.step()
    flow.close()
    steps, values = plugin._watched[""].read()
    assert [a.step for a in flow.interventions] == [4]
    assert steps[np.isfinite(values).all(axis=(1, 2))].tolist() == [0, 2, 6, 8, 10][: len(steps)]
    assert (values[np.isfinite(values[:, 0, 0]), 0] > 0).all()


def test_names_of_towers():
    assert _partners("user_tower", "item_tower")
    assert _partners("TextEncoder", "ImageEncoder")
    assert not _partners("user_tower", "item_bias")
    assert not _partners("wte", "head")
    names = ("module.user.0.weight", "module.item.0.weight")
    assert [_top(n, names) for n in names] == ["user", "item"]
    assert _top("weight", ("weight",)) == "weight"


def test_the_state_survives_a_checkpoint(watch):
    model = TwoTower()
    _, plugin = train(watch, model, torch.optim.Adam(groups(model, 1e-6, 1e-2)), steps=100)
    buffer = io.BytesIO()
    torch.save(plugin.state_dict(), buffer)
    buffer.seek(0)
    other = Towers(every=5, warmup=20)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert repr(other.state_dict()) == repr(plugin.state_dict())
    model = TwoTower()
    again, _ = train(watch, model, torch.optim.Adam(groups(model, 1e-6, 1e-2)), plugin=other)
    assert not again  # it was told before
