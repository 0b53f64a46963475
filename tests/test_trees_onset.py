"""``overfit_onset``, leaf velocity, concentration, the report and the state of the ``trees`` plugin."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynguard import Severity
from dynguard.testing import tree_event
from dynguard_plugins.trees.history import measured, restored, saved
from dynguard_plugins.trees.onset import ALPHA, factor
from dynguard_plugins.trees.velocity import leaf_velocity, split_concentration
from dynguard_plugins.trees.watch import Trees


def fed(train, valid, plugin=None, metric="rmse"):
    """The findings of a run with these losses."""
    plugin, found = plugin or Trees(), []
    for i, pair in enumerate(zip(train, valid, strict=True)):
        metrics = {name: {metric: value} for name, value in zip(("train", "valid"), pair, strict=True)}
        signal = plugin.on_trees(tree_event(i, values=[0.9**i, -(0.9**i)], metrics=metrics))
        found += signal.explain() if signal.fired else ()
    return [f for f in found if f.kind == "overfit_onset"]


def turning(turn, rounds=200, noise=0.002, seed=0, rise=0.004):
    """Validation falls to 0.5 at ``turn`` and rises from there."""
    t = np.arange(rounds)
    smooth = 0.5 + 0.5 * np.maximum(1 - t / turn, 0) ** 2 + rise * np.maximum(t - turn, 0)
    return 1.0 * 0.98**t, smooth + noise * np.random.default_rng(seed).normal(size=rounds)


@pytest.mark.parametrize("turn", [30, 60, 120])
@pytest.mark.parametrize("seed", range(5))
def test_the_onset_is_near_the_best_round(turn, seed):
    train, valid = turning(turn, seed=seed)
    (found,) = fed(train, valid)
    best = int(np.argmin(valid))
    assert abs(found.step - best) <= 0.1 * best or valid[found.step] <= 1.01 * valid.min()
    assert 0.9 * turn <= found.step <= found.value("noticed") <= turn + 40
    assert found.severity is Severity.INFO


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_the_unit_does_not_matter(unit):
    train, valid = turning(60)
    (one,), (other,) = fed(train, valid), fed(unit * train, unit * valid)
    assert (one.step, one.value("noticed")) == (other.step, other.value("noticed"))


def test_a_falling_validation_loss_and_a_still_one_are_silent():
    t = np.arange(300)
    assert fed(0.98**t, 0.5 + 0.5 * 0.98**t) == []
    assert fed(0.98**t, np.full(300, 0.5)) == []


def test_no_onset_where_training_gets_worse_as_well():
    _, valid = turning(60)
    assert fed(valid, valid) == []


def test_a_metric_of_which_more_is_better_turns_downwards():
    train, valid = turning(60)
    (found,) = fed(1 - train, 1 - valid, metric="auc")
    assert found.step == fed(train, valid)[0].step
    assert found.value("least_validation_auc") == pytest.approx(1 - valid.min())


def test_what_is_lost_again_is_a_warning_at_the_end():
    for rise, loud in ((0.02, True), (0.002, False)):
        plugin = Trees()
        fed(*turning(60, rise=rise), plugin)
        told = [f for f in plugin.diagnose() if f.severity >= Severity.WARNING]
        assert [f.kind for f in told] == (["overfit_onset"] if loud else [])
        assert [f for f in plugin.diagnose() if f.severity >= Severity.WARNING] == []


def test_false_alarms_of_steps_as_often_up_as_down_are_as_rare_as_stated():
    """Ville's inequality for an e-CUSUM: the mean time to an alarm is at least 1 / ALPHA rounds."""
    rng = np.random.default_rng(0)
    times = []
    for _ in range(200):
        evidence, steps, t = 1.0, rng.normal(size=21).tolist(), 0
        while evidence < 1 / ALPHA and t < 3000:
            steps = [*steps[-20:], float(rng.standard_t(4))]
            evidence, t = max(evidence, 1.0) * factor(steps[-1], steps[:-1]), t + 1
        times.append(t)
    assert np.mean(times) > 1 / ALPHA


def test_leaf_velocity_is_the_log_of_what_a_round_leaves_of_a_residual():
    """Squared error fitted in full: leaves shrink by 1 - eta a round."""
    plugin, eta = Trees(), 0.3
    scores = [plugin.on_trees(tree_event(i, values=[7 * (1 - eta) ** i, -5 * (1 - eta) ** i])).score for i in range(5)]
    assert scores == pytest.approx([0.0, *[math.log(1 - eta)] * 4])
    assert leaf_velocity([]) == 0.0


def test_split_concentration_is_the_herfindahl_index():
    assert split_concentration({0: 3, 1: 1}) == pytest.approx(0.75**2 + 0.25**2)
    assert split_concentration({5: 9}) == 1.0
    assert split_concentration({}) == 0.0


def test_a_rounds_record_is_weighted_by_cover():
    event = tree_event(2, values=[3.0, -1.0, 2.0])
    event.trees["cover"] = np.array([10.0, 4.0, 6.0, 1.0, 3.0])  # root, split, three leaves
    round_ = measured(2, event.trees)
    assert round_.rms == pytest.approx(math.sqrt((6 * 9 + 1 * 1 + 3 * 4) / 10))
    assert round_.mean == pytest.approx((6 * 3 - 1 + 6) / 10)
    assert (round_.extreme, round_.thin, round_.cover, round_.sign) == (3.0, 0.6, 10.0, 0)
    assert (round_.trees, round_.splits) == (1, 2)


def test_the_report_shows_leaves_gain_and_the_onset():
    plugin = Trees()
    (found,) = fed(*turning(60), plugin)
    section = plugin.summarize()
    leaves, gain, curves = section.figures
    assert leaves.series["100%"][10] == pytest.approx(0.9**10, rel=1e-3)
    assert len(leaves.x) == 200
    assert gain.mark == "heatmap"
    assert len(gain.x) <= 64
    assert gain.series == {"a": (1.0,) * len(gain.x)}
    marked = curves.series[f"onset: round {found.step}"]
    assert [x for x, y in zip(curves.x, marked, strict=True) if y is not None] == [found.step]
    assert section.tables[1].rows[0][:2] == ("a", 1.0)


def test_a_run_goes_on_from_its_saved_state():
    train, valid = turning(60)
    whole, first, second = Trees(), Trees(), Trees()
    expected = fed(train, valid, whole)
    fed(train[:50], valid[:50], first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found = []
    for i in range(50, 200):
        metrics = {"train": {"rmse": train[i]}, "valid": {"rmse": valid[i]}}
        signal = second.on_trees(tree_event(i, values=[0.9**i, -(0.9**i)], metrics=metrics))
        found += signal.explain() if signal.fired else ()
    assert [f.step for f in found if f.kind == "overfit_onset"] == [f.step for f in expected]
    assert second.summarize() == whole.summarize()
    history = whole._histories[""]
    assert restored(json.loads(json.dumps(saved(history)))) == history


values = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(values, st.floats(), st.floats()), min_size=1, max_size=15))
def test_any_rounds_are_taken(rounds):
    plugin = Trees()
    for i, (leaves, train, valid) in enumerate(rounds):
        metrics = {"train": {"rmse": train}, "valid": {"rmse": valid}}
        signal = plugin.on_trees(tree_event(i, values=leaves, metrics=metrics))
        assert bool(signal.fired) == bool(list(signal.explain()))
    list(plugin.diagnose())
    assert plugin.summarize().model_dump_json()
    json.dumps(plugin.state_dict())
