"""The ``features`` plugin: planted interactions, planted leaks, and what is neither."""

import json

import numpy as np
import pytest
import xgboost as xgb

from dynguard import Severity
from dynguard.testing import check_plugin
from dynguard.trees.inspect import replay
from dynguard.trees.xgb import read
from dynguard_plugins.trees.features import Features
from dynguard_plugins.trees.interactions import pair_gains, suggest_interactions
from dynguard_plugins.trees.leaks import leaks


def test_the_contract():
    check_plugin(Features)
    check_plugin(Features, options={"alpha": 0.05, "top": 3})


def planted(seed, kind, n=1500, d=8):
    """Two interactions on top of four main effects, or none; columns in random order."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    a, b, c, e, f = (int(i) for i in rng.permutation(d)[:5])
    signal = x[:, a] + np.sin(2 * x[:, e]) + 0.5 * x[:, f] ** 2
    truth = set()
    if "none" not in kind:
        signal += x[:, a] * x[:, b] + 2.0 * ((x[:, c] > 0) != (x[:, e] > 0))
        truth = {(min(a, b), max(a, b)), (min(c, e), max(c, e))}
    if "classes" in kind:
        return x, (rng.random(n) < 1 / (1 + np.exp(-2 * (signal - signal.mean())))).astype(int), truth
    return x, signal + rng.normal(size=n), truth


def fitted(x, y, rounds=60):
    objective = "binary:logistic" if set(np.unique(y)) == {0, 1} else "reg:squarederror"
    params = {"objective": objective, "eta": 0.1, "max_depth": 4, "nthread": 1}
    return xgb.train(params, xgb.DMatrix(x, y), rounds)


@pytest.mark.parametrize("kind", ["numbers", "numbers, none", "classes", "classes, none"])
def test_planted_interactions_are_recovered_and_others_are_not(kind):
    right = wrong = missed = 0
    for seed in range(3):
        x, y, truth = planted(seed, kind)
        found = {one.features for one in suggest_interactions(read(fitted(x, y)), x, y)}
        right, wrong, missed = right + len(found & truth), wrong + len(found - truth), missed + len(truth - found)
    assert wrong <= 1
    assert missed <= (1 if "classes" in kind else 0)
    assert (right == 0) == ("none" in kind)


def test_a_near_copy_of_a_feature_is_no_partner_of_it():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1500, 4))
    x[:, 3] = x[:, 0] + 0.01 * rng.normal(size=1500)
    y = x[:, 0] ** 2 + x[:, 0] * x[:, 3] + 0.1 * rng.normal(size=1500)
    assert (0, 3) not in {one.features for one in suggest_interactions(read(fitted(x, y)), x, y)}


def test_the_gain_of_pairs_is_that_of_the_lower_split():
    x, y, _ = planted(0, "numbers")
    table = read(fitted(x, y, 3))
    expected: dict[tuple[int, int], float] = {}
    for i in np.flatnonzero(~table["leaf"] & (table["node"] > 0)):
        up = np.flatnonzero((table["tree"] == table["tree"][i]) & (table["node"] == table["parent"][i]))[0]
        pair = tuple(sorted((int(table["feature"][i]), int(table["feature"][up]))))
        if pair[0] != pair[1]:
            expected[pair] = expected.get(pair, 0.0) + table["gain"][i]
    assert pair_gains(table) == pytest.approx(expected)


def test_inputs_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match=r"X is to be \(n, d\) and y \(n,\)"):
        suggest_interactions({}, np.zeros(3), np.zeros(3))
    with pytest.raises(ValueError, match="X is to be"):
        leaks(np.zeros((3, 1)), np.zeros(4))


def test_odd_columns_are_taken():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 4))
    x[:, 1], x[:, 2] = np.nan, 5.0
    x[::3, 3] = np.nan
    y = x[:, 0] + rng.normal(size=400)
    assert suggest_interactions(read(fitted(x, y)), x, y) == []
    assert leaks(x, y) == []


def test_leaks_are_columns_that_know_the_target():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 4))
    y = np.sort(x[:, 0] + 0.5 * rng.normal(size=1000))
    x[:, 1] = np.arange(1000)  # a row number, in rows that were sorted by the target
    x[:, 2] = -3 * y
    found = {one.name: one for one in leaks(x, y, ["a", "row", "copy", "b"])}
    assert set(found) == {"row", "copy"}
    assert found["row"].identifier
    shuffled = rng.permutation(1000)
    assert not any(one.identifier for one in leaks(x[shuffled], y[shuffled]))


def test_an_honest_feature_is_no_leak():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 3))
    assert leaks(x, x[:, 0] + 0.3 * rng.normal(size=1000)) == []
    assert leaks(x, rng.normal(size=1000)) == []


def test_the_plugin_says_it_once_and_keeps_its_state():
    x, y, truth = planted(0, "numbers")
    model = fitted(x, y)
    plugin = Features()
    for event in replay(model):
        plugin.on_trees(event)
    assert plugin.summarize().tables[0].columns == ("feature", "with", "gain share")
    plugin.given(x, y)
    found = list(plugin.diagnose())
    assert {f.subject for f in found} == {f"f{a} x f{b}" for a, b in truth}
    assert all(f.severity is Severity.INFO and f.confidence > 0.999 for f in found)
    assert list(plugin.diagnose()) == []
    assert len(plugin.summarize().tables[0].rows) == 2
    other = Features()
    other.load_state_dict(json.loads(json.dumps(plugin.state_dict())))
    other.given(x, y)
    assert list(other.diagnose()) == []
    assert other.summarize() == plugin.summarize()
