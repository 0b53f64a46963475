"""The row ledger: counts against numpy, means against autograd's own numbers, ranks against one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from dynguard.testing import on_ranks  # noqa: E402 - after the skip
from dynguard_plugins.embeddings.ledger import Ledger  # noqa: E402

ids = st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=20), min_size=1, max_size=8)


def feed(ledger: Ledger, weight: Any, batches: Any, gradient: Any = None, ok: Any = True, first: int = 0) -> None:
    for step, batch in enumerate(batches, first):
        rows, counts = torch.unique(torch.as_tensor(batch), return_counts=True)
        g = torch.ones(len(rows), weight.shape[1]) if gradient is None else gradient(step, rows)
        ledger.see(step, rows, counts, g, weight, ok)


def exposures(batches: Any, size: int = 12) -> Any:
    return np.bincount(np.concatenate([np.asarray(b) for b in batches]), minlength=size)


@settings(max_examples=30, deadline=None)
@given(ids)
def test_exposures_are_the_counts_of_all_lookups(batches):
    weight = torch.zeros(12, 4)
    ledger = Ledger(weight)
    feed(ledger, weight, batches)
    assert ledger.columns().exposures.tolist() == exposures(batches).tolist()


@settings(max_examples=15, deadline=None)
@given(ids, ids)
def test_merged_counts_add_up_and_do_not_depend_on_the_order(a, b):
    weight = torch.zeros(12, 4)
    both = []
    for first, second in ((a, b), (b, a)):
        one, two = Ledger(weight), Ledger(weight)
        feed(one, weight, first)
        feed(two, weight, second)
        one.merge(two)
        both.append(one.columns())
    assert both[0].exposures.tolist() == (exposures(a) + exposures(b)).tolist() == both[1].exposures.tolist()
    assert both[0].visits.tolist() == both[1].visits.tolist()


def test_exposures_go_beyond_31_bits_and_then_saturate():
    weight = torch.zeros(3, 2)
    ledger = Ledger(weight)
    for step in range(3):
        ledger.see(step, torch.tensor([1]), torch.tensor([2**31 - 1]), None, weight, True)
    assert ledger.columns().exposures.tolist() == [0, 2**32 - 1, 0]


def test_at_most_16_bytes_a_row_beside_a_large_table():
    for rows in (10_000, 300_000):
        ledger = Ledger(torch.zeros(1, 64).expand(rows, 64))
        assert ledger.bytes <= 16 * rows


def test_energy_and_velocity_are_means_over_visits():
    """SGD: the way of a visit is rate x gradient, and the energy |g|^2 / count, both by plain arithmetic."""
    torch.manual_seed(0)
    weight = torch.randn(12, 6)
    ledger, generator = Ledger(weight), np.random.default_rng(0)
    energies: dict[int, list[float]] = {}
    ways: dict[int, list[float]] = {}
    for step in range(60):
        rows, counts = np.unique(generator.integers(0, 12, 9), return_counts=True)
        g = generator.normal(size=(len(rows), 6)) * 1e-4
        rate = 0.01 * (1 + step % 3)
        rows_, g_ = torch.from_numpy(rows), torch.from_numpy(g).float()
        ledger.see(step, rows_, torch.from_numpy(counts), g_, weight, True)
        weight[rows_] -= rate * g_ * 1e3
        for row, count, one in zip(rows, counts, g, strict=True):
            energies.setdefault(row, []).append(float(one @ one) / count)
            ways.setdefault(row, []).append(rate * 1e3 * float(np.linalg.norm(one)))
    ledger.see(60, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64), None, weight, True)
    columns = ledger.columns()
    for row in range(12):
        assert columns.visits[row] == len(energies[row])
        assert columns.energy[row] == pytest.approx(np.mean(energies[row]), rel=0.01)
        assert columns.velocity[row] == pytest.approx(np.mean(ways[row]), rel=0.01)


def test_the_resultant_tells_independent_aligned_and_opposed_directions_apart():
    """Rows 0..399 independent: 1 on average. 400..799 aligned: n. 800..: in turn +g, -g: near 0."""
    visits, width, size = 40, 16, 1200
    generator = torch.Generator().manual_seed(1)
    weight, fixed = torch.zeros(size, width), torch.randn(size, width, generator=generator)
    kind = torch.arange(size) // 400

    def gradient(step, rows):
        free = torch.randn(size, width, generator=generator)
        turned = fixed * (1 if step % 2 else -1)
        return torch.where(kind[:, None] == 0, free, torch.where(kind[:, None] == 1, fixed, turned))

    ledger = Ledger(weight)
    feed(ledger, weight, [range(size)] * visits, gradient)
    feed(ledger, weight, [[0]], gradient=lambda *_: torch.zeros(1, width), first=visits)
    resultant = ledger.columns().resultant
    assert resultant[:400].mean() == pytest.approx(1.0, abs=0.25)
    assert resultant[400:800].mean() == pytest.approx(visits, rel=0.15)
    assert resultant[800:].mean() < 0.1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_is_learned_from_non_finite_gradients(bad):
    weight = torch.zeros(12, 4)
    clean, hit = Ledger(weight), Ledger(weight)
    feed(clean, weight, [[1, 2], [1, 2], [5]])
    feed(hit, weight, [[1, 2], [1, 2], [5]], lambda s, r: torch.full((len(r), 4), bad if s == 0 else 1.0))
    assert hit.columns().visits.tolist() == [0, 1, 1] + [0] * 9
    assert clean.columns().visits.tolist() == [0, 2, 2] + [0] * 9
    assert np.isfinite(hit.columns().energy).all()
    assert hit.columns().exposures.tolist() == clean.columns().exposures.tolist()


@pytest.mark.parametrize("rejected", [True, torch.tensor(True)])
def test_nothing_is_learned_from_a_rejected_step(rejected):
    weight = torch.zeros(12, 4)
    ledger = Ledger(weight)
    feed(ledger, weight, [[1, 2]])
    feed(ledger, weight, [[3]], ok=not rejected if isinstance(rejected, bool) else ~rejected, first=1)
    feed(ledger, weight, [[3]], first=2)
    assert ledger.columns().visits.tolist() == [0, 0, 0, 1] + [0] * 8
    assert ledger.columns().exposures[[1, 2, 3]].tolist() == [1, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_and_double_tables(dtype):
    weight = torch.zeros(12, 4, dtype=dtype)
    ledger = Ledger(weight)
    feed(ledger, weight, [[1, 1], [1], [2]], lambda s, r: torch.ones(len(r), 4, dtype=dtype))
    assert ledger.columns().energy[1] == pytest.approx((4 / 2 + 4) / 2, rel=1e-3)


def test_a_table_that_grows_keeps_what_is_known():
    weight = torch.zeros(12, 4)
    ledger = Ledger(weight)
    feed(ledger, weight, [[1, 1], [2]])
    feed(ledger, torch.zeros(20, 4), [[19]], first=2)
    assert ledger.columns().exposures[[1, 2, 19]].tolist() == [2, 1, 1]
    assert len(ledger.followed.rows) == 20


def test_an_empty_step_and_an_empty_table():
    for size in (12, 0):
        weight = torch.zeros(size, 4)
        ledger = Ledger(weight)
        nothing = torch.zeros(0, dtype=torch.int64)
        for step in range(3):
            ledger.see(step, nothing, nothing, torch.zeros(0, 4), weight, True)
        assert ledger.columns().exposures.sum() == 0


def test_the_state_survives_a_checkpoint(tmp_path):
    torch.manual_seed(0)
    weight = torch.randn(12, 4)
    ledger = Ledger(weight)
    feed(ledger, weight, [[1, 1, 3], [2, 3], [3]], lambda s, r: torch.randn(len(r), 4))
    torch.save(ledger.state_dict(), tmp_path / "state.pt")
    again = Ledger.from_state(torch.load(tmp_path / "state.pt", weights_only=True), "cpu")
    for name in ("exposures", "visits", "energy", "velocity", "heading"):
        np.testing.assert_array_equal(getattr(again.columns(), name), getattr(ledger.columns(), name))
    torch.testing.assert_close(again.followed.last, ledger.followed.last)
    feed(again, weight, [[3], [3]], first=3)
    assert again.columns().exposures[3] == 5


def test_no_host_read_in_a_step():
    from benchmarks.reads import HostReads
    from dynguard.arrays import as_on_device

    weight = torch.zeros(5000, 64)
    ledger = Ledger(weight)
    feed(ledger, weight, [[1, 2], [1]])
    rows = torch.tensor([1, 4999])
    with as_on_device(), HostReads().counting() as reads:
        for step in (2, 3):
            ledger.see(step, rows, torch.ones_like(rows), torch.ones(2, 64), weight, torch.tensor(True))
    assert not reads.counts


def test_a_ledger_on_a_device_comes_to_the_same():
    """Where the number of rows is not known without a wait, events have places left over (see EmbeddingEvent)."""
    from dynguard.arrays import as_on_device
    from dynguard.torch.embeddings import counted

    kept = []
    for device in (False, True):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(400, 8, generator=generator)
        ledger = Ledger(weight)
        for step in range(120):
            ids = (400 * torch.rand(64, generator=generator) ** 3).long()
            gradient = torch.randn(400, 8, generator=generator)
            with as_on_device() if device else nullcontext():
                rows, counts = counted(ids, 400)
                ledger.see(step, rows, counts, gradient.index_select(0, rows), weight, True)
            weight = weight - 0.01 * gradient * torch.bincount(ids, minlength=400).clamp_max(1)[:, None]
        kept.append(ledger.columns())
    host, device_side = kept
    assert device_side.exposures.tolist() == host.exposures.tolist()
    assert device_side.visits.tolist() == host.visits.tolist()
    np.testing.assert_allclose(device_side.heading, host.heading)
    np.testing.assert_allclose(device_side.energy, host.energy, rtol=2e-3)
    np.testing.assert_allclose(device_side.velocity, host.velocity, rtol=2e-3)


def child(rank: int) -> None:
    from dynguard import FlowManager
    from dynguard_plugins.embeddings.rows import Rows

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(30, 4, sparse=True), torch.nn.Linear(4, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer, rows = torch.optim.SGD(ddp.parameters(), lr=0.1), Rows()
    flow = FlowManager(ddp, optimizer, plugins=[rows], strict=True)
    seen = []
    for step in range(10):
        batch = torch.randint(0, 30, (16,), generator=torch.Generator().manual_seed(100 * step + rank))
        seen.append(batch)
        ddp(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    merged = rows.ledger("0.weight").merged().columns()
    mine = torch.bincount(torch.cat(seen), minlength=30)
    assert rows.columns("0.weight").exposures.tolist() == mine.tolist()
    torch.distributed.all_reduce(mine)
    assert merged.exposures.tolist() == mine.tolist()
    flow.close()


def test_counts_of_two_ranks_add_up_exactly():
    on_ranks(child)
