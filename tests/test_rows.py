"""The row detectors against planted truth, torch's own optimizers and closed forms."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from scipy.stats import entropy as scipy_entropy  # noqa: E402 - after the skip
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from dynguard import FlowManager, Severity  # noqa: E402
from dynguard.testing import check_plugin  # noqa: E402
from dynguard_plugins.embeddings import rows_report, rows_tests  # noqa: E402
from dynguard_plugins.embeddings.ledger import Columns, Ledger  # noqa: E402
from dynguard_plugins.embeddings.rows import Rows  # noqa: E402


def test_it_keeps_the_contract():
    check_plugin(Rows)


def train(model, optimizer, batches, tmp_path, loss=None, **options):
    rows = Rows(**options)
    with FlowManager(model, optimizer, plugins=[rows], run_dir=tmp_path / "run", strict=True) as flow:
        for batch in batches:
            loss_of = loss or (lambda m, b: F.cross_entropy(m(b), b % 2))
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return rows, {f.kind: f for f in flow.findings}, flow


def tower(size=100, **options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(size, 8, **options), nn.Linear(8, 2))


def drawn(low, high, steps=150, count=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (count,), generator=generator) for _ in range(steps)]


def with_row_3_early(batches):
    for batch in batches[:5]:
        batch[0] = 3
    return batches


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda p, lr: torch.optim.SGD(p, lr=0.5, momentum=0.9)])
def test_a_row_that_moves_after_its_last_lookup_is_a_zombie(make, tmp_path):
    model = tower()
    _, found, _ = train(model, make(model.parameters(), lr=0.01), with_row_3_early(drawn(4, 90)), tmp_path)
    assert found["zombie_rows"].rows == (3,)
    assert found["zombie_rows"].value("share_of_way") > 0.5
    assert found["dead_rows"].rows == (0, 1, 2, *range(90, 100))


def test_a_sparse_optimizer_leaves_no_zombies(tmp_path):
    model = tower(sparse=True)
    sparse, dense = torch.optim.SparseAdam(model[0].parameters(), lr=0.01), torch.optim.Adam(model[1].parameters())
    rows = Rows()
    with FlowManager(model, [sparse, dense], plugins=[rows], run_dir=tmp_path / "run", strict=True) as flow:
        for batch in with_row_3_early(drawn(4, 90)):
            F.cross_entropy(model(batch), batch % 2).backward()
            for optimizer in (sparse, dense):
                optimizer.step()
                optimizer.zero_grad()
    assert {f.kind for f in flow.findings} == {"dead_rows"}


def test_rows_that_are_absent_now_and_then_are_no_zombies(tmp_path):
    """Dense Adam moves them between visits too, but their look-ups go on."""
    model = tower(400)
    _, found, _ = train(model, torch.optim.Adam(model.parameters(), lr=0.01), drawn(0, 400, 300, 16), tmp_path)
    assert "zombie_rows" not in found


def test_rows_that_nothing_looks_up_decay(tmp_path):
    """AdamW multiplies by 1 - rate x decay a step: (1 - 0.01 x 0.2) ^ 150."""
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.2)
    _, found, _ = train(model, optimizer, drawn(0, 90), tmp_path)
    finding = found["decay_without_gradient"]
    assert finding.rows == tuple(range(90, 100))
    assert finding.value("share_of_norm_lost") == pytest.approx(1 - (1 - 0.002) ** 150, rel=1e-4)
    assert finding.severity is Severity.WARNING


def test_rows_that_came_are_never_called_dead_and_rare_ones_may_still_come(tmp_path):
    generator = torch.Generator().manual_seed(0)
    p = 1.0 / torch.arange(1, 2001).float() ** 1.3
    batches = [torch.multinomial(p, 64, replacement=True, generator=generator) for _ in range(200)]
    model = tower(2000)
    seen = np.bincount(torch.cat(batches).numpy(), minlength=2000)
    _, found, _ = train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, tmp_path)
    assert found["dead_rows"].rows == tuple(np.flatnonzero(seen == 0).tolist())
    assert found["dead_rows"].severity is Severity.INFO  # a third of them would come within as many look-ups again
    more = torch.multinomial(p, 12_800, replacement=True, generator=generator).numpy()
    came = (np.bincount(more, minlength=2000)[seen == 0] > 0).mean()
    assert found["dead_rows"].value("share_to_come") == pytest.approx(came, abs=0.1)


def test_nothing_is_said_before_every_row_had_its_chance(tmp_path):
    model = tower(5000)
    _, found, _ = train(model, torch.optim.SGD(model.parameters(), lr=0.1), drawn(0, 5000), tmp_path)
    assert not found


def test_rows_without_gradient(tmp_path):
    model = tower(50)

    def loss(m, batch):
        return F.cross_entropy(m(batch), batch % 2, reduction="none").mul(batch != 7).mean()

    _, found, _ = train(model, torch.optim.SGD(model.parameters(), lr=0.1), drawn(0, 50), tmp_path, loss)
    assert (found["dead_rows"].rows, found["dead_rows"].value("reason")) == ((7,), "no gradient")


def test_a_padding_row_that_moves(tmp_path):
    for shift in (0.0, 0.01):
        model = tower(50, padding_idx=0)

        def loss(m, batch, shift=shift):
            with torch.no_grad():
                m[0].weight[0] += shift
            return F.cross_entropy(m(batch), batch % 2)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, found, _ = train(model, optimizer, drawn(0, 50), tmp_path / str(shift), loss)
        assert ("pad_row_moves" in found) == (shift > 0)
        assert "dead_rows" not in found


def factorisation(seed, tmp_path, planted, steps=2500, items=400, users=300):
    """Items 0..planted-1 meet every user with both labels equally often; 5 % of all labels are noise."""
    generator = np.random.default_rng(seed)
    truth = np.sign(generator.normal(size=(users, 6)) @ generator.normal(size=(6, items)))
    torch.manual_seed(seed)
    model = nn.ModuleDict({"user": nn.Embedding(users, 12), "item": nn.Embedding(items, 12)})
    for table in model.values():
        nn.init.normal_(table.weight, std=0.1)
    optimizer, rows = torch.optim.Adam(model.parameters(), lr=0.01), Rows()
    popularity = 1 / np.arange(1, items + 1) ** 0.7
    popularity = popularity[generator.permutation(items)] / popularity.sum()
    with FlowManager(model, optimizer, plugins=[rows], run_dir=tmp_path / f"run{seed}", strict=True) as flow:
        for _ in range(steps):
            item, user = generator.choice(items, 256, p=popularity), generator.integers(0, users, 256)
            label = truth[user, item] * np.where(generator.random(256) < 0.05, -1, 1)
            label = np.where(item < planted, generator.choice([-1, 1], 256), label)
            score = (model["user"](torch.from_numpy(user)) * model["item"](torch.from_numpy(item))).sum(1)
            F.softplus(-score * torch.from_numpy(label)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return rows, [f for f in flow.findings if f.kind == "oscillating_rows"]


def test_contradictory_rows_are_found_among_ordinary_noise(tmp_path):
    _, found = factorisation(0, tmp_path, planted=8)
    (finding,) = [f for f in found if f.subject == "item.weight"][-1:]
    right = set(finding.rows) & set(range(8))
    assert len(right) == 8
    assert len(finding.rows) - len(right) <= 1
    assert finding.confidence == pytest.approx(1 - finding.value("false_discovery_rate"))


def test_ordinary_noise_alone_is_silent(tmp_path):
    _, found = factorisation(1, tmp_path, planted=0, steps=1200)
    assert sum(len(f.rows) for f in found) <= 1


def test_discoveries_are_those_of_benjamini_and_hochberg():
    from scipy.stats import false_discovery_control

    generator = np.random.default_rng(0)
    for _ in range(20):
        p = np.concatenate([generator.uniform(size=80), generator.uniform(0, 1e-3, size=20)])
        picked, rate = rows_tests.discoveries(p, 0.05)
        adjusted = false_discovery_control(p)
        assert picked.tolist() == np.flatnonzero(adjusted <= 0.05).tolist()
        assert rate == pytest.approx(adjusted[picked].max())


def test_rows_of_one_kind_are_almost_never_called_oscillating():
    """Independent directions and log-normal energies: the share of tables with any row is near the nominal rate."""
    alarms = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        visits = generator.integers(20, 200, 500)
        heading = generator.normal(size=(500, 5)) * np.sqrt(visits)[:, None] * generator.lognormal(0, 0.3, (500, 1))
        energy = generator.lognormal(0, 0.4, 500)
        columns = Columns(visits, visits, energy, energy, heading)
        alarms += bool(len(rows_tests.oscillating(columns, None, 0.01).rows))
    assert alarms <= 5


def test_gini_and_entropy_against_definitions():
    x = np.random.default_rng(0).integers(0, 50, 300)
    pairs = np.abs(x[:, None] - x[None]).sum() / (2 * len(x) ** 2 * x.mean())
    still = np.zeros(300)
    *_, coverage, gini, entropy, _ = rows_report.overview("t", Columns(x, x, still, still, np.zeros((300, 5))), 7, 0)
    assert gini == pytest.approx(pairs, rel=1e-3)
    assert entropy == pytest.approx(scipy_entropy(x), rel=1e-3)
    assert coverage == pytest.approx((x > 0).mean(), rel=1e-3)


def test_rare_rows_do_not_crowd_the_fastest():
    """All rows move alike, but for row 5: it is on top, and the intervals hold the truth about as often as they say."""
    generator = np.random.default_rng(0)
    visits = generator.integers(1, 100, 1000)
    velocity = np.exp(generator.normal(size=1000) / np.sqrt(visits))
    visits[5], velocity[5] = 60, 8.0
    columns = Columns(visits, visits, velocity, velocity, np.zeros((1000, 5)))
    found = rows_report.saliency(columns, 1000)
    assert found[0][0] == 5
    assert np.mean([low <= 1 <= high for row, _, low, high in found if row != 5]) > 0.9


def test_the_report_names_rows_by_label(tmp_path):
    model = tower(50)
    names = [f"film {i}" for i in range(50)]
    rows, _, flow = train(model, torch.optim.SGD(model.parameters(), lr=0.1), drawn(0, 50), tmp_path,
                          labels={"0.weight": names}, top=3)  # fmt: skip
    section = rows.summarize()
    assert [len(t.rows) for t in section.tables] == [1, 3]
    assert all(row[0].startswith("film ") for row in section.tables[1].rows)
    assert {f.mark for f in section.figures} == {"line", "scatter"}
    assert "plugin_failed" not in {f.kind for f in flow.findings}


def test_a_resumed_run_goes_on_counting(tmp_path):
    batches = drawn(0, 50, 40)
    model = tower(50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlowManager(model, optimizer, plugins=[Rows()], run_dir=tmp_path / "a", strict=True) as flow:
        for batch in batches[:20]:
            F.cross_entropy(model(batch), batch % 2).backward()
            optimizer.step()
        torch.save(flow.state_dict(), tmp_path / "state.pt")
    again = Rows()
    with FlowManager(model, optimizer, plugins=[again], run_dir=tmp_path / "b", strict=True) as flow:
        flow.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for batch in batches[20:]:
            F.cross_entropy(model(batch), batch % 2).backward()
            optimizer.step()
    counts = np.bincount(torch.cat(batches).numpy(), minlength=50)
    assert again.columns("0.weight").exposures.tolist() == counts.tolist()
    assert again.ledger("0.weight").steps == 40


def test_half_precision_tables_and_two_sources(tmp_path):
    torch.manual_seed(0)
    a, b = nn.Embedding(30, 4).bfloat16(), nn.EmbeddingBag(30, 4, mode="sum", sparse=True)
    model = nn.ModuleDict({"a": a, "b": b})
    optimizers = [torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.SparseAdam(b.parameters(), lr=0.1)]
    rows = Rows(least_steps=5)
    with FlowManager(model, optimizers, plugins=[rows], run_dir=tmp_path / "run", strict=True) as flow:
        for batch in drawn(0, 30, 30, 16):
            (a(batch).float().square().mean() + b(batch[None]).square().mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        flow.summarize()
    assert {(t.source, t.name) for t in rows._tables.values()} == {
        ("optimizer0", "a.weight"),
        ("optimizer1", "b.weight"),
    }


def test_a_ledger_of_a_moved_table_is_exact_about_the_way():
    weight = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    ledger = Ledger(weight.clone())
    start = weight.clone()
    for step in range(50):
        rows = torch.arange(40) if step < 10 else torch.arange(20)
        ledger.see(step, rows, torch.ones_like(rows), torch.ones(len(rows), 6), weight, True)
        weight += 0.01
    moves = rows_tests.moved(ledger, ledger.columns(), weight)
    assert moves.way[20:] == pytest.approx(0.40 * 6**0.5, rel=1e-4)  # from the update of step 9 on: steps 10..49
    assert moves.total == pytest.approx((weight - start).norm(dim=1).double().numpy(), rel=1e-6)
    assert moves.absent.tolist() == [0] * 20 + [40] * 20


def test_labels_of_no_table_or_too_few_are_said_once_and_kept(tmp_path, caplog):
    model = torch.nn.Sequential(torch.nn.Embedding(30, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = {"0.weight": ["a", "b"], "item.weight": ["x"] * 40}
    rows = Rows(labels=labels)
    with FlowManager(model, optimizer, plugins=[rows], run_dir=tmp_path / "run", strict=True, diagnose_every=5):
        for _ in range(20):
            model(torch.arange(30)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [r.getMessage() for r in caplog.records if "labels" in r.getMessage()]
    assert said == [
        "rows: 2 labels for the 30 rows of '0.weight'",
        "rows: labels for 'item.weight', which was not looked up: there are ['0.weight']",
    ]
    assert rows.labels == labels
