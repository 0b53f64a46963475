"""CowClip against the definition, torch's own clipping of a single vector, and what the update makes of it."""

from __future__ import annotations

import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402 - after the skip
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

from dynguard import FlowManager  # noqa: E402
from dynguard.errors import OptionError  # noqa: E402
from dynguard.testing import FakeTraining, check_plugin, embedding_event, run_info  # noqa: E402
from dynguard_plugins.embeddings.cowclip import CowClip  # noqa: E402


@pytest.fixture(autouse=True)
def _alone(one_thread):
    pass


def test_it_keeps_the_contract():
    check_plugin(CowClip)
    check_plugin(CowClip, options={"tables": ("embedding.*",), "r": 0.1})


def test_wrong_options_are_refused():
    for wrong in ({"r": 0.0}, {"zeta": -1.0}, {"ratio": 1.0}):
        with pytest.raises(OptionError):
            CowClip(**wrong)


def asked(clip, ids, gradients, weight, **options):
    event = embedding_event(
        ids=torch.tensor(ids), gradients=gradients, weight=weight, training=FakeTraining(), **options
    )
    clip.adjust_embeddings(event=event)
    return event, event.training.asked


def test_the_threshold_is_lookups_times_the_rows_norm_but_not_below_zeta():
    weight = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.3, 0.4], [1.0, 0.0]])
    gradients = torch.tensor([[0.0, 10.0], [0.0, 5.0], [0.0, 10.0], [2.0, 0.0], [1.0, 0.0], [0.1, 0.0]])
    event, ((name, (index, rows, factors)),) = asked(CowClip(r=0.5, zeta=0.1), [0, 0, 0, 1, 2, 3], gradients, weight)
    assert (name, index, rows.tolist()) == ("scale_row_gradients", event.index, [0, 1, 2, 3])
    # Row 0: three look-ups of 0.5 x 5 allow 7.5 of 25; row 1: zeta; row 2: 0.25 of 1; row 3: 0.5 is more than 0.1.
    assert factors.tolist() == pytest.approx([7.5 / 25, 0.1 / 2, 0.25, 1.0])


def trained(sparse, path, plugins, make, steps=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(12, 4, mode="sum", sparse=sparse), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.mul_(0.01)
    optimizer = make(model.parameters())
    start = model[0].weight.detach().clone()
    ids = torch.tensor([[0, 1, 1], [2, 1, 9], [9, 9, 4]])
    with FlowManager(model, optimizer, plugins=plugins, run_dir=path, strict=True) as flow:
        for _ in range(steps):
            model(ids).mul(torch.tensor([[1.0], [0.1], [3.0]])).sum().backward()
            gradient = model[0].weight.grad.to_dense().clone()
            optimizer.step()
            optimizer.zero_grad()
    return start, gradient, model[0].weight.detach(), flow


@pytest.mark.parametrize("sparse", [False, True])
def test_the_update_is_that_of_rows_clipped_one_by_one(sparse, tmp_path):
    """torch's clip_grad_norm_ on each row as a parameter of its own (it adds 1e-6 to the norm)."""

    def make(parameters):
        return torch.optim.SGD(parameters, lr=1.0)

    start, _, plain, _ = trained(sparse, tmp_path / "plain", [], make)
    _, _, clipped, _ = trained(sparse, tmp_path / "clipped", [CowClip(r=0.7)], make)
    gradient = start - plain
    counts = {0: 1, 1: 3, 2: 1, 4: 1, 9: 3}
    for row in range(12):
        one = nn.Parameter(start[row].clone())
        one.grad = gradient[row].clone()
        nn.utils.clip_grad_norm_([one], counts.get(row, 1) * max(0.7 * float(start[row].norm()), 1e-5))
        torch.testing.assert_close(start[row] - clipped[row], one.grad, rtol=1e-3, atol=1e-7)
    assert (clipped - start).norm() < 0.5 * (plain - start).norm()


def test_what_is_below_its_threshold_is_bit_equal(tmp_path):
    def make(parameters):
        return torch.optim.Adam(parameters, lr=0.1)

    *_, plain, _ = trained(False, tmp_path / "plain", [], make, steps=3)
    *_, clipped, _ = trained(False, tmp_path / "clipped", [CowClip(r=1e6)], make, steps=3)
    assert torch.equal(plain, clipped)


values = st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, float("nan"), float("inf")])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), values, values), min_size=1, max_size=12), st.floats(0, 10, width=32))
def test_no_row_exceeds_its_threshold_whatever_comes(lookups, size):
    ids = [row for row, *_ in lookups]
    gradients = torch.tensor([pair for _, *pair in lookups])
    weight = torch.full((5, 2), size)
    event, ((_, (_, _, factors)),) = asked(CowClip(), ids, gradients, weight)
    assert ((factors >= 0) & (factors <= 1)).all()
    norms = event.row_gradient_norms
    finite = torch.isfinite(norms)
    limits = event.counts * max(size * 2**0.5, 1e-5)
    assert (norms * factors <= limits * 1.0001)[finite].all()
    assert (factors == 1)[~finite | (norms <= limits * 0.999)].all()


def test_tables_of_one_column_and_those_not_named_are_left_alone():
    ones = torch.ones(2, 1)
    assert asked(CowClip(), [0, 1], 100 * ones, ones)[1] == []
    assert asked(CowClip(tables=("embedding.*",)), [0, 1], 100 * ones, ones)[1]
    pairs = torch.ones(2, 2)
    assert asked(CowClip(tables=("user.*",)), [0, 1], 100 * pairs, pairs)[1] == []
    assert asked(CowClip(tables=("user.*",)), [0, 1], 100 * pairs, pairs, table="user.weight")[1]


def test_the_report_says_how_often_and_by_how_much():
    clip = CowClip(zeta=1.0)
    assert clip.summarize() is None
    weight = torch.zeros(6, 2)
    wanted = np.random.default_rng(0).uniform(0.01, 2.0, size=(50, 6))
    for factors in wanted:
        gradients = torch.tensor(1 / factors, dtype=torch.float32).unsqueeze(1) * torch.tensor([[1.0, 0.0]])
        asked(clip, list(range(6)), gradients, weight)
    ((table, steps, rows, clipped, share, median),) = clip.summarize().tables[0].rows
    below = wanted[wanted < 1]
    assert (table, steps, rows, clipped) == ("embedding.weight", 50, 300, len(below))
    assert share == pytest.approx(len(below) / 300, rel=1e-3)
    assert median == pytest.approx(np.median(below), rel=0.09)
    again = CowClip(zeta=1.0)
    again.load_state_dict(clip.state_dict())
    assert again.state_dict() == clip.state_dict()
    asked(again, [0], torch.tensor([[4.0, 0.0]]), weight)
    assert again.summarize().tables[0].rows[0][1:4] == (51, 301, len(below) + 1)


def test_it_stands_aside_where_several_processes_train(caplog):
    clip = CowClip()
    with caplog.at_level(logging.WARNING, logger="dynguard"):
        clip.on_run_start(run=run_info("run", world_size=2))
    assert "stands aside" in caplog.text
    assert asked(clip, [0], torch.full((1, 2), 1e3), torch.ones(1, 2))[1] == []
