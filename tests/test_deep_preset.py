"""The preset ``deep`` on whole runs: what it must see and do, and what it must leave alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dynguard import Action, FlowManager, Severity

LOUD = {Severity.WARNING, Severity.ERROR, Severity.CRITICAL}


def run(model, optimizer, batches, loss_fn, tmp_path, *, accumulate=1, preset="deep"):
    """A plain loop under a manager; returns the closed manager and the losses."""
    losses = []
    with FlowManager(
        model, optimizer, plugins=[preset], loss_fn=loss_fn, run_dir=tmp_path / "run", strict=True
    ) as flow:
        for i, batch in enumerate(batches):
            loss = loss_fn(model, batch)
            flow.observe(loss=loss, batch=batch)
            losses.append(loss.item())
            loss.backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    return flow, losses


def loud(flow):
    return [(f.kind, f.subject, f.step, f.premise) for f in flow.findings if f.severity in LOUD]


class Gated(nn.Module):
    """A part of the input sleeps and then wakes up; its weights' second moment has decayed by then."""

    def __init__(self):
        super().__init__()
        self.main = nn.Linear(16, 1)
        self.gate = nn.Linear(256, 1, bias=False)
        nn.init.zeros_(self.gate.weight)

    def forward(self, x, r):
        return self.main(x) + self.gate(r)


def waking(seed, quiet, wake=300, steps=340):
    g = torch.Generator().manual_seed(seed)
    w, u = torch.randn(16, 1, generator=g), torch.randn(256, 1, generator=g) * 0.01
    for i in range(steps):
        x = torch.randn(64, 16, generator=g)
        r = torch.randn(64, 256, generator=g) * (1.0 if i >= wake else quiet)
        yield x, r, x @ w + r @ u * (i >= wake) + 0.3 * torch.randn(64, 1, generator=g)


def squares(model, batch):
    return (model(batch[0], batch[1]) - batch[2]).square().mean()


@pytest.mark.parametrize("quiet", [0.0, 1e-9])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_a_layer_that_wakes_up_with_a_stale_second_moment_is_repaired(make, quiet, tmp_path):
    """allenai/OLMo#245: the second moment goes to zero, then a big update, then a loss spike."""
    peaks = {}
    for preset in ("none", "deep"):
        torch.manual_seed(0)
        model = Gated()
        optimizer = make(model.parameters(), lr=1e-2)
        batches = list(waking(0, quiet))
        if preset == "deep":
            flow, losses = run(model, optimizer, batches, squares, tmp_path)
        else:
            losses = []
            for batch in batches:
                loss = squares(model, batch)
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        peaks[preset] = max(losses[300:])
    assert peaks["none"] > 0.7
    assert peaks["deep"] < 0.5 * peaks["none"]
    hits = [f for f in flow.findings if f.kind == "update_spike"]
    assert [f.subject for f in hits][:1] == ["gate.weight"]
    assert 298 <= hits[0].step <= 302
    assert {i.action for i in flow.interventions} == {Action.CLIP}
    assert min(i.step for i in flow.interventions) >= 298


def test_full_batch_gradient_descent_at_the_edge_of_stability_is_told_and_left_alone(tmp_path):
    """Cohen et al. 2021: sharpness rises to 2 / lr and hovers there while the loss goes on falling."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(128, 6)
    y = torch.sign(x[:, :1] * x[:, 1:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
    flow, losses = run(model, optimizer, [(x, y)] * 600, lambda m, b: (m(b[0]) - b[1]).square().mean(), tmp_path)
    assert losses[-1] < losses[0]
    assert "edge_of_stability" in {f.kind for f in flow.findings}
    assert flow.interventions == []


def mlp():
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def conv():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                         nn.Dropout(0.1), nn.Linear(32, 3))  # fmt: skip


class Bytes(nn.Module):
    """A very small causal transformer."""

    def __init__(self, vocabulary=17, width=16):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(12, width) * 0.02)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.block(self.token(ids) + self.place[: ids.shape[1]], src_mask=mask, is_causal=True))


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def clusters(g, shape, steps):
    centres = torch.randn(3, *shape, generator=g)
    for _ in range(steps):
        y = torch.randint(0, 3, (32,), generator=g)
        yield centres[y] + torch.randn(32, *shape, generator=g), y


def walks(g, steps):
    for _ in range(steps):
        start, stride = torch.randint(0, 17, (2, 16, 1), generator=g)
        yield (start + stride.clamp(1, 4) * torch.arange(12)) % 17


HEALTHY = {
    "mlp-adam": (mlp, classify, lambda g, n: clusters(g, (10,), n), lambda p: torch.optim.Adam(p, 3e-3)),
    "mlp-sgd": (mlp, classify, lambda g, n: clusters(g, (10,), n), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "conv-adamw": (conv, classify, lambda g, n: clusters(g, (1, 8, 8), n), lambda p: torch.optim.AdamW(p, 3e-3)),
    "bytes-adamw": (Bytes, next_token, walks, lambda p: torch.optim.AdamW(p, 3e-3, betas=(0.9, 0.95))),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_stays_silent_and_is_not_changed(name, tmp_path):
    build, loss_fn, data, optimize = HEALTHY[name]
    torch.manual_seed(0)
    model = build()
    flow, losses = run(
        model, optimize(model.parameters()), data(torch.Generator().manual_seed(1), 300), loss_fn, tmp_path
    )
    assert loud(flow) == []
    assert flow.interventions == []
    torch.manual_seed(0)
    twin = build()
    optimizer = optimize(twin.parameters())
    for i, batch in enumerate(data(torch.Generator().manual_seed(1), 300)):
        loss = loss_fn(twin, batch)
        assert loss.item() == losses[i]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_accumulation_stays_silent(tmp_path):
    torch.manual_seed(0)
    model = mlp()
    data = clusters(torch.Generator().manual_seed(2), (10,), 800)
    flow, _ = run(model, torch.optim.AdamW(model.parameters(), 2e-3), data, classify, tmp_path, accumulate=4)
    assert loud(flow) == []
