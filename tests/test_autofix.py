"""The auto-fix of rows: its posteriors against planted truth and scipy, its repair against the unrepaired update."""

from __future__ import annotations

import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402 - after the skip
from hypothesis import strategies as st  # noqa: E402
from hypothesis.extra.numpy import arrays  # noqa: E402
from scipy import special, stats  # noqa: E402
from torch import nn  # noqa: E402

from dynguard import FlowManager  # noqa: E402
from dynguard.testing import check_plugin  # noqa: E402
from dynguard.testing.reads import count_reads  # noqa: E402
from dynguard_plugins.embeddings import autofix_posterior as posterior  # noqa: E402
from dynguard_plugins.embeddings.autofix import Losses, Repair  # noqa: E402
from dynguard_plugins.embeddings.ledger import Columns  # noqa: E402
from dynguard_plugins.embeddings.rows import Rows  # noqa: E402


@pytest.fixture(autouse=True)
def _alone(one_thread):
    pass


def test_it_keeps_the_contract():
    check_plugin(Rows, options={"autofix": True, "room": 0.0})


# Posteriors


def test_the_trend_is_that_of_a_one_sided_regression():
    generator = np.random.default_rng(0)
    for slope in (-0.02, 0.0, 0.01):
        losses = 3 + slope * np.arange(60) + generator.normal(size=60)
        expected = stats.linregress(np.arange(60), losses, alternative="greater").pvalue
        assert posterior.improving(losses) == pytest.approx(expected)


def test_the_trend_of_mere_noise_is_uniform():
    generator = np.random.default_rng(1)
    found = [posterior.improving(generator.normal(size=50)) for _ in range(300)]
    assert stats.kstest(found, "uniform").pvalue > 0.01


@given(arrays(np.float32, st.integers(0, 60), elements=st.floats(width=32)))
def test_any_losses_have_a_trend_or_none(losses):
    with np.errstate(over="ignore"):
        found = posterior.improving(losses.clip(-1e30, 1e30))
    assert (found is None) == (np.isfinite(losses.clip(-1e30, 1e30)).sum() < 20)
    assert found is None or 0 <= found <= 1


def test_a_straight_line_is_certain():
    assert posterior.improving(np.linspace(4, 1, 40)) == pytest.approx(1.0)
    assert posterior.improving(np.linspace(1, 4, 40)) == pytest.approx(0.0)
    assert posterior.improving(np.full(40, 2.0)) == 0.5


def headings(generator, resultant, visits):
    """Sums of directions on five projections whose mean square is ``resultant`` times the visits."""
    return generator.normal(size=(len(visits), 5)) * np.sqrt(resultant * visits)[:, None]


def columns_of(generator, resultant, visits, energy):
    return Columns(visits, visits, energy, energy, headings(generator, resultant, visits))


def test_whether_rows_add_up_is_told_from_chance():
    generator = np.random.default_rng(2)
    visits = generator.integers(30, 300, 400)
    chance = [posterior.adding_up(columns_of(generator, 1.0, visits, np.ones(400))) for _ in range(200)]
    assert stats.kstest(chance, "uniform").pvalue > 0.01
    assert posterior.adding_up(columns_of(generator, 2.0, visits, np.ones(400))) > 0.999
    assert posterior.adding_up(columns_of(generator, 2.0, visits[:9], np.ones(9))) is None


def planted(generator, rows=2000, share=0.05, usual=6.0):
    """Rows of which the first ``share`` oscillate: three times the energy, gradients that do not add up."""
    visits = generator.integers(30, 300, rows)
    bad = np.arange(rows) < share * rows
    energy = np.where(bad, 3.0, 1.0) * generator.lognormal(0, 0.3, rows)
    return columns_of(generator, np.where(bad, 0.8, usual), visits, energy), bad


def test_the_posterior_says_how_many_of_the_picked_are_sound():
    generator = np.random.default_rng(3)
    expected, true, count = 0.0, 0, 0
    for _ in range(20):
        columns, bad = planted(generator, rows=1000)
        rows, p = posterior.picked(columns, None, 0.2)
        assert ((p >= 0) & (p <= 1)).all()
        expected, true, count = expected + p.sum(), true + bad[rows].sum(), count + len(rows)
    assert count > 400
    assert expected / count == pytest.approx(true / count, abs=0.1)


def test_the_posterior_falls_from_strict_levels_to_lax_ones():
    columns, _ = planted(np.random.default_rng(4))
    rows, p = posterior.picked(columns, None, 0.2)
    strict, _ = posterior.picked(columns, None, 0.2 / 64)
    inside = np.isin(rows, strict)
    assert 0 < inside.sum() < len(rows)
    assert p[inside].min() >= p[~inside].max()


def test_local_rates_are_those_of_the_bands(monkeypatch):
    """2 false of 10 at the laxest level, 0.3 of 6 at the next, 0.02 of 2 at the other two."""
    answers = {0.2: (10, 0.2), 0.05: (6, 0.05), 0.0125: (2, 0.01), 0.003125: (2, 0.01)}

    def oscillating(columns, skip, level):
        count, rate = answers[level]
        return posterior.rows_tests.Verdict(np.arange(count), rate)

    monkeypatch.setattr(posterior.rows_tests, "oscillating", oscillating)
    rows, p = posterior.picked(None, None, 0.2)
    assert rows.tolist() == list(range(10))
    assert (1 - p).tolist() == pytest.approx([0.01] * 2 + [0.28 / 4] * 4 + [1.7 / 4] * 4)


def test_a_factor_is_the_share_of_signal_beside_that_of_sound_rows_weighted_by_the_posterior(monkeypatch):
    """Sound rows seen as often have a resultant of 4 and keep 1 - 1/4 of their sum as signal, rarer ones of 100."""
    seen = np.array([100] * 302 + [30] * 300)
    resultant = np.array([1.3, 1.3] + [4.0] * 300 + [100.0] * 300)
    columns = Columns(seen, seen, np.ones(602), np.ones(602), np.sqrt(resultant * seen)[:, None] * np.ones((1, 5)))
    monkeypatch.setattr(posterior, "picked", lambda *_: (np.array([0, 1]), np.array([0.5, 1.0])))
    found = posterior.shares(columns, None, level=0.01, floor=0.05, most=9)
    common = np.exp(np.log(1.32) - special.digamma(2.5) + np.log(2.5))  # mean log of chi-squared / 5 taken off
    share = (1 - 1 / common) / 0.75
    assert found.factors.tolist() == pytest.approx([1 - 0.5 * (1 - share), share])
    assert 0.1 < share < 0.9


def test_shrinking_comes_nearer_to_the_truth():
    """True resultants are scaled inverse chi-squared with 8 degrees: the posterior mean, known, is 8 and 5 to 13."""
    generator = np.random.default_rng(5)
    true = 0.8 * 8 / generator.chisquare(8, size=3000)
    seen = true * generator.chisquare(5, size=3000) / 5
    found = posterior.shrunk(seen)
    ideal = (8 * 0.8 + 5 * seen) / 13
    assert np.median(np.abs(found / ideal - 1)) < 0.1
    assert np.square(found - true).mean() < 0.7 * np.square(seen - true).mean()


def test_rows_that_are_alike_are_taken_as_one():
    found = posterior.shrunk(np.array([0.7, 0.9, 0.8, 1.0]))
    assert np.ptp(found) == 0
    assert 0.7 < found[0] < 1.2
    assert posterior.shrunk(np.array([0.7])).tolist() == [0.7]


def test_oscillating_rows_are_held_back_to_the_floor_and_no_others():
    columns, bad = planted(np.random.default_rng(6))
    found = posterior.shares(columns, None, level=0.01, floor=0.05, most=10_000)
    assert bad[found.rows].mean() > 0.95
    assert len(found.rows) > 0.4 * bad.sum()
    assert (found.factors >= 0.05).all()
    assert np.median(found.factors) < 0.15
    np.testing.assert_array_less(found.factors, 1 - 0.5 * found.posterior)
    fewer = posterior.shares(columns, None, level=0.01, floor=0.05, most=7)
    assert len(fewer.rows) == 7
    assert fewer.factors.max() <= np.sort(found.factors)[6]


def test_without_a_yardstick_nothing_is_held_back():
    """Sound rows whose own gradients do not add up either."""
    generator = np.random.default_rng(7)
    visits = generator.integers(30, 300, 1000)
    bad = np.arange(1000) < 50
    resultant = np.where(bad, 0.02, 0.8)
    columns = columns_of(generator, resultant, visits, np.where(bad, 5.0, 1.0) * generator.lognormal(0, 0.2, 1000))
    assert len(posterior.picked(columns, None, 0.01)[0]) > 10
    assert len(posterior.shares(columns, None, level=0.01, floor=0.05, most=100).rows) == 0


def test_losses_are_kept_in_order():
    losses = Losses(4)
    assert losses.values().tolist() == []
    for loss in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        losses.note(loss)
    assert losses.values().tolist() == [3.0, 4.0, 5.0, 6.0]
    losses.note(torch.tensor(7.0))
    assert losses.values().tolist() == [4.0, 5.0, 6.0, 7.0]


# The repair


OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), False),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), False),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.1), False),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1), False),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1), False),
    "sparse sgd": (lambda p: torch.optim.SGD(p, lr=0.1), True),
    "sparse adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.1), True),
    "sparse adam": (lambda p: torch.optim.SparseAdam(p, lr=0.1), True),
}


def stepped(make, sparse, path, held):
    """Six steps, the last of them with the rows held back that ``held`` says; the table before and after that one."""
    torch.manual_seed(0)
    table = nn.Embedding(8, 3, sparse=sparse)
    head = torch.randn(3, 5)
    optimizer, rows = make(table.parameters()), Rows(autofix=True)
    with FlowManager(table, optimizer, plugins=[rows], run_dir=path, strict=True):
        for step in range(6):
            # Row 5 is looked up before, but not in the last step.
            ids = torch.tensor([1, 2, 2, 1, 7] if step == 5 else [0, 1, 1, 2, 5, step])
            if step == 5:
                rows._fix.repairs["", "weight"] = Repair(
                    5, 1, list(held), list(held.values()), [1.0] * len(held), room=1.0
                )
            before = table.weight.detach().clone()
            (table(ids) @ head).tanh().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return before, table.weight.detach()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, of its sparse Adagrad
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_held_row_goes_just_that_part_of_its_way_and_others_are_bit_equal(name, tmp_path):
    held = {1: 0.25, 5: 0.5}
    start, plain = stepped(*OPTIMIZERS[name], tmp_path / "plain", {})
    start_too, fixed = stepped(*OPTIMIZERS[name], tmp_path / "fixed", held)
    assert torch.equal(start, start_too)
    for row in range(8):
        if row in held:
            torch.testing.assert_close(fixed[row] - start[row], held[row] * (plain[row] - start[row]))
        else:
            assert torch.equal(fixed[row], plain[row])
    assert not torch.equal(plain[1], start[1])
    # An optimizer that moves rows after their visit is held back there as well.
    assert torch.equal(plain[5], start[5]) == (name in ("sgd", "adagrad") or "sparse" in name)


ROWS, WIDTH, BAD = 120, 6, (3, 40, 77)


def pulled(path, steps=460, labels=None, losses=None, rows=None, **options):
    """A table whose rows are each pulled one way with some noise, but for three that are pulled to and fro.

    The loss is linear in the table, so that gradients do not depend on what is repaired.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    table = nn.Embedding(ROWS, WIDTH)
    ways = torch.randn(ROWS, WIDTH, generator=generator)
    optimizer, rows = torch.optim.SGD(table.parameters(), lr=0.01), rows or Rows(labels=labels, **options)
    trail = []
    with FlowManager(table, optimizer, plugins=[rows], run_dir=path, strict=True, diagnose_every=50) as flow:
        for step in range(steps):
            ids = torch.randint(0, ROWS, (48,), generator=generator)
            noise = torch.randn(48, WIDTH, generator=generator)
            bad = torch.isin(ids, torch.tensor(BAD)).unsqueeze(1)
            pull = torch.where(bad, 6 * noise, 0.5 * ways[ids] + 1.5 * noise)
            loss = (table(ids) * pull).sum()
            if losses is not None:
                flow.observe(loss=torch.tensor(losses(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trail.append(table.weight.detach().clone())
    return torch.stack(trail), rows, flow


def falling(step):
    return 3.0 - 0.005 * step + 0.01 * (step % 7)


def test_rows_that_oscillate_are_held_back_and_told(tmp_path):
    plain, *_ = pulled(tmp_path / "plain")
    names = {"weight": [f"film {i}" for i in range(ROWS)]}
    fixed, rows, flow = pulled(tmp_path / "fixed", losses=falling, labels=names, autofix=True)
    good = [row for row in range(ROWS) if row not in BAD]
    assert torch.equal(fixed[:, good], plain[:, good])
    assert torch.equal(fixed[199], plain[199])
    told = [f for f in flow.findings if f.kind == "rows_held_back"]
    assert told
    assert set(told[-1].rows) == set(BAD)
    assert told[-1].subject == "weight"
    assert "film 3" in told[-1].premise
    assert told[-1].confidence > 0.9
    assert 0 < told[-1].value("smallest_factor") < 0.3
    factor = dict(zip(rows._fix.repairs["", "weight"].rows, rows._fix.repairs["", "weight"].factors, strict=True))
    last = rows._fix.repairs["", "weight"].last
    for row in BAD:  # from the last look on
        way, whole = fixed[-1, row] - fixed[last - 1, row], plain[-1, row] - plain[last - 1, row]
        torch.testing.assert_close(way, factor[row] * whole, rtol=1e-3, atol=1e-5)
    tables = {t.title: t for t in rows.summarize().tables}
    assert {row[0] for row in tables["Rows of weight held back"].rows} == {"film 3", "film 40", "film 77"}
    (line,) = tables["Rows held back"].rows
    assert (line[0], line[2], line[5]) == ("weight", 3, "awake")


def test_it_sleeps_when_the_loss_rises_and_wakes_where_rows_add_up(tmp_path):
    _, rows, flow = pulled(tmp_path / "up", losses=lambda step: -falling(step), autofix=True)
    assert rows._fix.repairs["", "weight"].room < 0.01
    assert not [f for f in flow.findings if f.kind == "rows_held_back"]
    assert rows.summarize().tables[-1].rows[0][5] == "asleep"
    _, rows, _ = pulled(tmp_path / "unseen", autofix=True)  # no loss is observed
    assert rows._fix.repairs["", "weight"].room > 0.99
    assert set(rows._fix.repairs["", "weight"].rows) == set(BAD)


def test_a_row_that_has_something_to_learn_is_let_go(tmp_path):
    """Row 9, which does learn, is held back by mistake; the next look sees that its gradients add up."""
    plain, *_ = pulled(tmp_path / "plain", steps=230)
    mistaken = Rows(autofix=True)
    mistaken._fix.repairs["", "weight"] = Repair(0, 1, [9], [0.05], [1.0], room=1.0)
    fixed, rows, _ = pulled(tmp_path / "fixed", steps=230, rows=mistaken)
    repair = rows._fix.repairs["", "weight"]
    assert repair.last == 200
    assert 9 not in repair.rows
    torch.testing.assert_close(fixed[199, 9] - fixed[0, 9], 0.05 * (plain[199, 9] - plain[0, 9]), rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(fixed[229, 9] - fixed[199, 9], plain[229, 9] - plain[199, 9], rtol=1e-2, atol=1e-5)


def test_large_tables_are_looked_at_less_often():
    from dynguard.testing import FakeTraining, embedding_event

    rows = Rows(autofix=True, every=10, exact_bytes=0)
    weight = torch.randn(100_000, 2)
    looks = []
    for step in range(60):
        event = embedding_event(
            step, ids=torch.arange(step % 7, 900), gradients=None, weight=weight, training=FakeTraining()
        )
        rows.on_embeddings(event=event)
        rows.adjust_embeddings(event=event)
        looks.append(rows._fix.repairs["", "embedding.weight"].looks)
    assert [step for step in range(1, 60) if looks[step] > looks[step - 1]] == [10, 30, 50]  # 100,000 / 5,000 = 20


def test_a_resumed_run_holds_the_same_rows_back(tmp_path):
    _, rows, _ = pulled(tmp_path / "a", losses=falling, autofix=True)
    torch.save(rows.state_dict(), tmp_path / "state.pt")
    again = Rows(autofix=True)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.state_dict() == rows.state_dict()
    assert len(again._fix.losses.values()) == 200
    without = Rows()
    without.load_state_dict(rows.state_dict())
    assert without.state_dict()["autofix"] is None


def test_an_ordinary_step_reads_nothing(tmp_path):
    from dynguard.testing import FakeTraining, embedding_event, loss_event

    rows = Rows(autofix=True)
    weight = torch.randn(8, 3)
    places = []
    for step in range(30):
        event = embedding_event(
            step, ids=torch.tensor([1, 2, 2, 6]), gradients=torch.randn(4, 3), weight=weight, training=FakeTraining()
        )
        if step == 20:
            rows._fix.repairs["", "embedding.weight"] = Repair(20, 1, [2, 5], [0.1, 0.2], [1.0, 1.0], room=1.0)
        with count_reads() as reads:
            rows.on_loss(event=loss_event(step, loss=torch.tensor(1.0)))
            rows.on_embeddings(event=event)
            rows.adjust_embeddings(event=event)
        places += reads.places
        asked = event.training.asked
        assert [name for name, _ in asked] == (["scale_rows"] if step >= 20 else [])
    assert places == []
    _, (_, held, factors) = asked[0]
    assert held.tolist() == [2, 5]
    assert factors.tolist() == pytest.approx([0.1, 0.2])


def test_it_stands_aside_where_several_processes_train(caplog):
    from dynguard.testing import FakeTraining, embedding_event, run_info

    rows = Rows(autofix=True)
    with caplog.at_level(logging.WARNING, logger="dynguard"):
        rows.on_run_start(run=run_info("run", world_size=2))
    assert "stands aside" in caplog.text
    rows._fix.repairs["", "embedding.weight"] = Repair(0, 1, [2], [0.1], [1.0], room=1.0)
    event = embedding_event(
        0, ids=torch.tensor([2]), gradients=torch.ones(1, 3), weight=torch.randn(8, 3), training=FakeTraining()
    )
    rows.on_embeddings(event=event)
    rows.adjust_embeddings(event=event)
    assert event.training.asked == []


def test_a_table_that_has_shrunk_is_left_alone():
    from dynguard.testing import FakeTraining, embedding_event

    rows = Rows(autofix=True)
    rows._fix.repairs["", "embedding.weight"] = Repair(0, 1, [2, 30], [0.1, 0.1], [1.0, 1.0], room=1.0)
    event = embedding_event(
        0, ids=torch.tensor([2]), gradients=torch.ones(1, 3), weight=torch.randn(8, 3), training=FakeTraining()
    )
    rows.on_embeddings(event=event)
    rows.adjust_embeddings(event=event)
    assert event.training.asked == []
