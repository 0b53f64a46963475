"""The ``collapse`` plugin: planted collapses of tables, outputs and codebooks; silence on sound runs of many kinds."""

import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dynguard import Severity
from dynguard.testing import check_plugin, embedding_event
from dynguard.torch.probe import as_probe
from dynguard_plugins.embeddings import measures
from dynguard_plugins.embeddings.collapse import Collapse
from dynguard_plugins.embeddings.collapse_outputs import representations, spread
from dynguard_plugins.embeddings.collapse_tables import Tables, measure

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_contract():
    check_plugin(Collapse)
    check_plugin(Collapse, options={"every": 1, "forwards": 1})


def train(watch, model, loss_of, batches, *, lr=1e-2, plugin=None, optimizer=torch.optim.Adam, observe=True):
    """A plain loop; (manager, plugin)."""
    optimizer = optimizer(model.parameters(), lr=lr)
    plugin = plugin or Collapse(forwards=10, every=50)
    flow = watch(model, optimizer, plugins=[plugin])
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if observe:
            flow.observe(loss=loss)
        optimizer.step()
    flow.close()
    return flow, plugin


def found(flow):
    return [(f.kind, f.subject, f.severity) for f in flow.findings]


# -- measures on the device


@pytest.mark.parametrize("shape", [(300, 12), (8, 40), (64, 64)])
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_table_measures_are_those_of_numpy(shape, scale):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * scale + 0.3 * scale
    rank, abundance, distance, norm, apart = measure(x).tolist()
    values, a = measures.singular_values(x.numpy()), x.numpy()
    assert rank == pytest.approx(measures.effective_rank(values), rel=1e-5)
    assert abundance == pytest.approx(measures.information_abundance(values), rel=1e-5)
    pairs = ((a[:, None] - a[None]) ** 2).sum(-1).mean()
    assert distance == pytest.approx(pairs**0.5, rel=1e-6)
    assert norm == pytest.approx((a**2).sum(1).mean() ** 0.5, rel=1e-6)
    assert apart == pytest.approx(1 - (a.mean(0) ** 2).sum() / (a**2).sum(1).mean(), rel=1e-6)


def test_measures_of_what_is_no_number():
    assert measure(torch.full((4, 3), float("nan"))).isnan().all()
    assert measure(torch.zeros(4, 3)).isnan().all()
    assert measure(torch.zeros(2, 600).index_fill_(1, torch.tensor([0]), 1.0))[0] == pytest.approx(1, abs=1e-3)


def test_spread_of_known_outputs():
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]) + torch.tensor([3.0, 4.0])
    assert spread(x, None).tolist()[:4] == pytest.approx([1.0, 25.0, 2.0, 1.0])  # equal in both directions
    assert spread(x[:2], torch.tensor([1, 1])).tolist()[2:4] == pytest.approx([1.0, 0.0])
    assert spread(torch.ones(4, 3, 5, 5), torch.arange(4)).tolist() == pytest.approx([0.0, 3.0, 0.0, 1.0, 0.0])
    line = torch.tensor([[1.0, 1.0], [2.0, 2.0], [9.0, 9.0]])
    assert spread(line, None)[4] == pytest.approx(0, abs=1e-6)
    assert spread(line * torch.tensor([[1.0], [-1.0], [-1.0]]), None)[4] == pytest.approx(1 - 1 / 9)


# -- tables


def gathered(trained, *, steps=(150, 260), rank_share=0.2, start=None):
    """Findings about a table that begins random and ends as told."""
    tables = Tables(100, rank_share)
    g = torch.Generator().manual_seed(0)
    start = torch.randn((300, 16), generator=g) * 0.1 if start is None else start
    for step in range(10):
        event = embedding_event(step, table="t", ids=torch.randint(0, 300, (100,), generator=g), weight=start)
        tables.see(event)
    for step in steps:
        tables.see(embedding_event(step, table="t", ids=torch.tensor([1]), weight=trained(start)))
    return list(tables.findings())


def low_rank(start):
    """What a factorisation of a rank-2 truth makes of it: far apart, in few directions."""
    g = torch.Generator().manual_seed(1)
    return torch.randn((300, 2), generator=g) @ torch.randn((2, 16), generator=g) + 0.01 * start


def test_a_table_whose_rows_become_one_is_told():
    (finding,) = gathered(lambda w: torch.ones(300, 16) + 0.001 * w)
    assert (finding.kind, finding.subject, finding.severity) == ("embedding_collapse", "t", Severity.WARNING)
    assert finding.value("rank") < 2 < finding.value("rank_at_start")
    assert finding.value("rank_at_start") == pytest.approx(15.5, abs=0.5)
    assert gathered(lambda w: w.new_ones(300, 1) * w[:1] + 0.01 * w)  # no shared offset: all become the first row


@pytest.mark.parametrize("trained", [
    lambda w: w, lambda w: 1e-3 * w, low_rank, lambda w: w + 0.1, lambda w: torch.full_like(w, float("nan")),
    torch.zeros_like,
], ids=["at rest", "decayed", "low rank", "offset", "nan", "zero"])  # fmt: skip
def test_what_is_no_collapse_of_a_table(trained):
    assert not gathered(trained)


def test_one_measurement_is_not_enough():
    assert not gathered(lambda w: torch.ones(300, 16) + 0.001 * w, steps=(30,))


# -- outputs


def pairs(steps=300, seed=0):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(0, 200, (48,), generator=g), torch.randint(0, 6, (48,), generator=g)


def hardest_triplet(model, batch):
    e = model(batch[0])
    d = torch.cdist(e, e, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    same = batch[1][:, None] == batch[1][None]
    far = d.masked_fill(~same, 0).amax(1).clamp_min(1e-12).sqrt()
    near = d.masked_fill(same, 1e9).amin(1).clamp_min(1e-12).sqrt()
    return (far - near + 0.2).clamp_min(0).mean()


def metric_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(200, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def test_hardest_triplets_collapse_at_the_last_layer(watch):
    model = metric_model()
    flow, plugin = train(watch, model, hardest_triplet, pairs())
    assert ("embedding_collapse", "3", Severity.WARNING) in found(flow)
    (finding,) = [f for f in flow.findings if f.subject == "3"]
    assert finding.value("loss") == pytest.approx(0.2, abs=0.005)
    assert finding.value("spread") < 0.1 * finding.value("spread_before")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert {t.title for t in plugin.summarize().tables} == {"Tables", "Outputs"}


def siamese(stop):
    """Chen & He 2021, figure 2: without the stop-gradient all outputs become one direction at once."""

    def loss_of(model, x):
        a, b = (model["encoder"](x + 0.1 * torch.randn_like(x)) for _ in range(2))
        p, q = model["predictor"](a), model["predictor"](b)
        a, b = (a.detach(), b.detach()) if stop else (a, b)
        return -(F.cosine_similarity(p, b).mean() + F.cosine_similarity(q, a).mean()) / 2

    return loss_of


def test_a_siamese_network_without_stop_gradient_loses_its_directions(watch):
    torch.manual_seed(0)
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)),
                           "predictor": nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32))})  # fmt: skip
    flow, _ = train(watch, model, siamese(stop=False), numbers(400, 16))
    told = {f.subject: f for f in flow.findings}
    assert "encoder" in told
    assert told["encoder"].value("loss") == pytest.approx(-1, abs=0.01)


def test_without_a_loss_it_is_information(watch):
    flow, _ = train(watch, metric_model(), hardest_triplet, pairs(), observe=False)
    assert ("embedding_collapse", "3", Severity.INFO) in found(flow)


def numbers(steps, width, seed=0, size=64):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn((size, width), generator=g)


def mlp(out, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, out))


TRUTH = torch.randn((8, 4), generator=torch.Generator().manual_seed(9))


def noisy(x):
    return 1.0 + 0.5 * torch.randn((len(x), 4), generator=torch.Generator().manual_seed(int(x[0, 0] * 1e6)))


@pytest.mark.parametrize("loss_of", [
    lambda m, x: F.mse_loss(m(x), x @ TRUTH),
    lambda m, x: F.cross_entropy(m(x), (x @ TRUTH).argmax(1)),
    lambda m, x: F.mse_loss(m(x), torch.full((len(x), 4), 2.0)),
    lambda m, x: F.mse_loss(m(x), noisy(x)),
    lambda m, x: F.cross_entropy(m(x), (noisy(x) > 1.2).int().argmax(1)),
], ids=["regression", "classifier", "constant targets", "noise", "labels without inputs"])  # fmt: skip
def test_sound_heads_are_silent(watch, loss_of):
    for size in (64, 2048):
        flow, plugin = train(watch, mlp(4), loss_of, numbers(300, 8, size=size))
        assert not found(flow)
    assert len(plugin.summarize().tables[0].rows) == 1


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item = nn.Embedding(100, 16), nn.Embedding(80, 16)
        self.user_tower, self.item_tower = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, users, items):
        return (self.user_tower(self.user(users)) * self.item_tower(self.item(items))).sum(-1)


def interactions(steps=300):
    g = torch.Generator().manual_seed(2)
    for _ in range(steps):
        yield tuple(torch.randint(0, n, (64,), generator=g) for n in (100, 80, 80))


@pytest.mark.parametrize("loss_of", [
    lambda m, b: F.binary_cross_entropy_with_logits(m(b[0], b[1]), ((b[0] + b[1]) % 4 == 0).float()),
    lambda m, b: -F.logsigmoid(m(b[0], b[1] // 2) - m(b[0], b[2])).mean(),
], ids=["BCE", "BPR"])  # fmt: skip
def test_sound_recommenders_are_silent(watch, loss_of):
    flow, plugin = train(watch, TwoTower(), loss_of, interactions())
    assert not found(flow)
    shown = {t.title: [r[0] for r in t.rows] for t in plugin.summarize().tables}
    assert shown == {"Tables": ["user.weight", "item.weight"], "Outputs": ["user_tower", "item_tower"]}


class Tiny(nn.Module):
    """A language model of one block, its head tied to its table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.block(self.table(ids), mask, is_causal=True))


def test_a_language_model_is_silent(watch):
    q = 1.0 / torch.arange(1, 41)
    g = torch.Generator().manual_seed(0)
    text = [torch.multinomial(q, 8 * 16, True, generator=g).reshape(8, 16) for _ in range(200)]

    def loss_of(model, ids):
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    flow, _ = train(watch, Tiny(), loss_of, text, lr=3e-3)
    assert not found(flow)


def test_only_training_forwards_count(watch):
    model = mlp(4)
    plugin = Collapse(forwards=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flow = watch(model, optimizer, plugins=[plugin])

    def step():
        optimizer.zero_grad()
        checkpoint(model, torch.randn(4, 8, requires_grad=True), use_reentrant=False).sum().backward()
        optimizer.step()

    step()  # puts the hooks on
    step()
    with torch.no_grad():
        model(torch.randn(4, 8))
    model.eval()
    model(torch.randn(4, 8))
    model.train()
    with as_probe():
        model(torch.randn(4, 8))
    assert [p.calls for p in plugin._made[1].places.values()] == [1]
    flow.close()


def one_step(watch, model, *inputs, plugin=None):
    plugin = plugin or Collapse(forwards=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flow = watch(model, optimizer, plugins=[plugin])
    for x in inputs:
        optimizer.zero_grad()
        torch.as_tensor(model(x)).sum().backward()
        optimizer.step()
    return flow, plugin


def test_a_sample_that_fails_never_stops_the_forward(watch, monkeypatch, caplog):
    from dynguard_plugins.embeddings import collapse_outputs

    def fail(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(collapse_outputs, "spread", fail)
    model = mlp(4)
    flow, _ = one_step(watch, model, *(torch.randn(3, 8) for _ in range(3)))
    assert "no such kernel" in caplog.text
    assert not any(m._forward_hooks for m in model.modules())
    flow.close()
    assert not flow.findings


def test_vmapped_and_compiled_forwards_are_left_alone(watch):
    model = mlp(4)
    flow, plugin = one_step(watch, model, torch.randn(3, 8))
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    torch.func.vmap(lambda x: torch.func.functional_call(model, parameters, (x[None],)))(torch.randn(5, 8))
    assert plugin._made[1].places["2"].calls == 0
    flow.close()
    compiled = torch.compile(mlp(4), backend="eager")
    flow, plugin = one_step(watch, compiled, *(torch.randn(3, 8) for _ in range(3)))
    flow.close()
    assert not flow.findings


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(watch, dtype):
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 4)).to(dtype)
    flow, plugin = one_step(watch, model, *(torch.randint(0, 30, (16,)) for _ in range(12)), plugin=Collapse(every=1))
    flow.close()
    tables, outputs = plugin.summarize().tables
    assert len(tables.rows) == len(outputs.rows) == 1


def test_which_modules_are_watched():
    model = nn.ModuleDict({"encoder": mlp(4), "blocks": nn.ModuleList([nn.Linear(2, 2)]), "head": nn.Linear(4, 2)})
    assert [name for name, _ in representations(model, ("encoder",))] == ["encoder", "head"]
    assert [name for name, _ in representations(model, ("blocks.*",))] == ["blocks.0", "head"]
    assert [name for name, _ in representations({"a": mlp(2), "b": mlp(2)}, ())] == ["a.2", "b.2"]


# -- state


def test_the_state_survives_a_checkpoint_and_goes_on(watch):
    model, plugin = metric_model(), Collapse(forwards=10, every=50)
    batches = list(pairs())
    train(watch, model, hardest_triplet, batches[:200], plugin=plugin)
    buffer = io.BytesIO()
    torch.save(plugin.state_dict(), buffer)
    buffer.seek(0)
    other = Collapse(forwards=10, every=50)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert repr(other.state_dict()) == repr(plugin.state_dict())
    told = {f for p in plugin._made[1].places.values() if (f := p.told)}
    flow, _ = train(watch, model, hardest_triplet, batches[200:], plugin=other)
    assert told or ("embedding_collapse", "3", Severity.WARNING) in found(flow)
    samples = other._made[1].places["3"].read()
    assert np.sqrt(samples[0][1][0]) > 0.1  # the spread before the collapse is remembered
