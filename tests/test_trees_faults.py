"""The ``trees`` plugin on faults: what each library does under a known one, and hand-made rounds."""

import numpy as np
import pytest

from dynguard import Action, Severity, trees
from dynguard.testing import check_plugin, tree_event
from dynguard.trees.table import TreeTable
from dynguard_plugins.trees import names
from dynguard_plugins.trees.watch import Trees

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own


def test_the_contract():
    check_plugin(Trees)
    check_plugin(Trees, options={"action": "warn", "top": 3})


class Watch:
    """Stops where the plugin asks for it, as a manager does."""

    def __init__(self, **options):
        self.plugin, self.findings, self.stopped = Trees(**options), [], None

    def __call__(self, event):
        signal = self.plugin.on_trees(event)
        found = list(signal.explain()) if signal.fired else []
        self.findings += found
        if any(f.action is Action.RAISE for f in found):
            self.stopped = event.round
        return self.stopped is not None

    def kinds(self, least=Severity.WARNING):
        return [f.kind for f in self.findings if f.severity >= least]

    def one(self, kind):
        (found,) = [f for f in self.findings if f.kind == kind]
        return found


def xgboost(x, y, params, rounds, valid=None, watch=None, **rest):
    import xgboost as xgb

    watch = watch or Watch()
    data = xgb.DMatrix(x, y)
    evals = [(data, "train")] + ([(xgb.DMatrix(*valid), "valid")] if valid else [])
    evals = [] if valid is False else evals
    xgb.train({"nthread": 1, **params}, data, rounds, evals=evals, verbose_eval=False,
              callbacks=[trees.xgboost(watch)], **rest)  # fmt: skip
    return watch


def lightgbm(x, y, params, rounds, watch=None):
    import lightgbm as lgb

    watch, data = watch or Watch(), lgb.Dataset(x, y)
    lgb.train({"num_threads": 1, "verbosity": -1, **params}, data, rounds, valid_sets=[data],
              callbacks=[trees.lightgbm(watch)])  # fmt: skip
    return watch


def catboost(x, y, params, rounds, watch=None):
    import catboost as cb

    watch = watch or Watch()
    quiet = {"logging_level": "Silent", "allow_writing_files": False, "thread_count": 1}
    model = cb.CatBoost({**quiet, **params, "iterations": rounds})
    with trees.catboost(model, watch) as callback:
        model.fit(x, y, callbacks=[callback])
    return watch


def grid(seed=0):
    """Few distinct rows, so that a tree fits them in full."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 4, size=(300, 2)).astype(float)
    y = 2 * x[:, 0] - x[:, 1]
    return x, y - y.mean()


STEEP = {
    xgboost: {"eta": 2.3, "reg_lambda": 0, "min_child_weight": 0, "base_score": 0.0},
    lightgbm: {"objective": "l2", "metric": "rmse", "learning_rate": 2.3, "min_data_in_leaf": 1},
    catboost: {"loss_function": "RMSE", "learning_rate": 2.3, "l2_leaf_reg": 1e-9, "depth": 4, "random_strength": 0,
               "bootstrap_type": "No", "boosting_type": "Plain"},
}  # fmt: skip


@pytest.mark.parametrize("library", STEEP)
@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e6])
def test_a_learning_rate_above_two_diverges_whatever_the_unit(library, unit):
    x, y = grid()
    watch = library(x, unit * y, STEEP[library], 20)
    assert watch.kinds() == ["diverging_rounds"]
    assert watch.stopped <= 5
    (cure,) = watch.one("diverging_rounds").prescriptions
    assert cure.parameter in STEEP[library]
    assert cure.current == pytest.approx(2.3, abs=1e-5)
    assert cure.proposed < 1


@pytest.mark.parametrize("rate", [0.3, 1.0, 1.9])
def test_a_learning_rate_below_two_does_not(rate):
    x, y = grid()
    assert xgboost(x, y, {**STEEP[xgboost], "eta": rate}, 20).kinds() == []


def test_leaves_that_swing_ever_farther_are_seen_without_any_metric():
    x, y = grid()
    watch = xgboost(x, y, STEEP[xgboost], 20, valid=False)
    assert watch.kinds() == ["diverging_rounds"]
    assert watch.stopped <= 8


def counts(seed, n=500):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 5))
    return x, rng.poisson(np.exp(2 * x[:, 0]))


LOOSE = {"objective": "count:poisson", "eta": 1.0, "min_child_weight": 0, "reg_lambda": 0, "max_delta_step": 0}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("evals", [None, False])
def test_poisson_steps_without_bound_explode(seed, evals):
    watch = xgboost(*counts(seed), LOOSE, 10, valid=evals)
    assert watch.kinds() == ["exploding_leaves"]
    assert watch.stopped <= 1
    cures = {p.parameter: p.proposed for p in watch.one("exploding_leaves").prescriptions}
    assert cures["max_delta_step"] == 0.7  # XGBoost's own default for counts
    assert cures["reg_lambda"] == 1.0


@pytest.mark.parametrize("rate", [5.0, 20.0])
def test_log_odds_without_bound_explode(rate):
    watch = xgboost(*noisy_classes(), {"objective": "binary:logistic", "eta": rate}, 30)
    assert watch.kinds() == ["exploding_leaves"]
    assert watch.stopped <= 4


def test_a_run_that_blew_up_and_stands_still_has_diverged():
    watch = xgboost(*noisy_classes(), {"objective": "reg:pseudohubererror", "eta": 5.0}, 30)
    assert "diverging_rounds" in watch.kinds() + watch.kinds(Severity.INFO)


@pytest.mark.parametrize("times", [1, 100, 10_000])
def test_poisson_steps_within_the_default_bound_do_not_whatever_the_unit(times):
    x, y = counts(0)
    assert xgboost(x, times * y, {"objective": "count:poisson", "eta": 0.3}, 30).kinds() == []


def test_catboost_that_dies_of_infinity_is_told_of():
    from catboost import CatBoostError

    x, y = counts(0)
    y[:3] = 2000
    watch = Watch()
    with pytest.raises(CatBoostError, match="inf"):
        catboost(x, y, {"loss_function": "Poisson", "learning_rate": 1.0, "l2_leaf_reg": 1e-6}, 30, watch)
    assert watch.kinds() == ["exploding_leaves"]
    assert "l2_leaf_reg" in {p.parameter for p in watch.one("exploding_leaves").prescriptions}


def test_a_leaf_far_beyond_those_before_needs_training_to_get_worse():
    for worse in (True, False):
        watch = Watch()
        for i in range(8):
            size, loss = (5e4, 9.0 if worse else 0.1) if i == 7 else (1.0, 2.0 - 0.1 * i)
            watch(tree_event(i, values=[size, -size / 2], metrics={"train": {"rmse": loss}}))
        assert watch.kinds() == (["exploding_leaves"] if worse else [])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_leaf_that_is_not_finite(value):
    watch = Watch()
    watch(tree_event(0, values=[0.1, value]))
    assert watch.kinds() == ["exploding_leaves"]


def noisy_classes(n=800, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 5))
    return x, (x[:, 0] + rng.normal(size=n) > 0).astype(int)


def test_no_split_at_all_stops_within_three_rounds():
    watch = lightgbm(*noisy_classes(1500), {"objective": "binary", "min_data_in_leaf": 1000}, 100)
    found = watch.one("stagnating_trees")
    assert (watch.stopped, found.action) == (2, Action.RAISE)
    assert [(p.parameter, p.current, p.proposed) for p in found.prescriptions] == [("min_data_in_leaf", 1000, 20)]


def test_a_constant_target_is_no_fault():
    x, _ = noisy_classes()
    assert lightgbm(x, np.full(len(x), 7.0), {"objective": "l2"}, 30).kinds() == []
    assert xgboost(x, np.full(len(x), 7.0), {}, 30).kinds() == []


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gamma_beyond_any_gain_is_told_of_after_ten_rounds_and_stops_nothing(seed):
    watch = xgboost(*noisy_classes(seed=seed), {"objective": "binary:logistic", "gamma": 30.0}, 60)
    found = watch.one("stagnating_trees")
    assert (watch.kinds(), watch.stopped, found.action) == (["stagnating_trees"], None, Action.WARN)
    assert found.value("rounds_without_split") == 10
    assert found.prescriptions[0].parameter == "gamma"


@pytest.mark.parametrize("evals", [None, False])
def test_gamma_that_ends_the_splits_when_much_was_learnt_is_information(evals):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 6))
    y = x[:, 0] + 0.5 * x[:, 1] ** 2 + rng.normal(size=1000)
    watch = xgboost(x, y, {"gamma": 1.0}, 120, valid=evals)
    assert [(f.kind, f.severity) for f in watch.findings] == [("stagnating_trees", Severity.INFO)]


def test_rows_of_one_class_are_no_fault():
    x, _ = noisy_classes()
    for params in ({}, {"min_child_weight": 0, "reg_lambda": 0}):
        assert xgboost(x, np.zeros(len(x)), {"objective": "binary:logistic", **params}, 30).kinds() == []
    assert lightgbm(x, np.zeros(len(x)), {"objective": "binary"}, 30).kinds() == []


def test_a_metric_that_does_not_fit_the_objective_is_not_believed():
    """XGBoost's binary:logitraw takes the logloss of margins, which rises as the model gets better."""
    assert xgboost(*noisy_classes(), {"objective": "binary:logitraw", "eta": 0.1, "max_depth": 3}, 60).kinds() == []


def test_a_huber_loss_whose_scale_does_not_fit_makes_slow_progress():
    x, y = counts(0)
    watch = lightgbm(x, 1e6 * y, {"objective": "huber"}, 60)
    (found,) = [f for f in watch.plugin.diagnose() if f.severity >= Severity.WARNING]
    assert (found.kind, found.prescriptions[0].parameter) == ("slow_progress", "target")


def test_pseudo_huber_far_from_its_target_stalls():
    x = np.resize([0.0, 1.0, 10.0], 1000)[:, None]
    y = x[:, 0] ** 2 + np.random.default_rng(0).normal(size=1000) ** 2
    watch = xgboost(x, y, {"objective": "reg:pseudohubererror"}, 50)
    assert watch.kinds() == ["stagnating_trees"]
    assert "min_child_weight" in {p.parameter for p in watch.one("stagnating_trees").prescriptions}
    assert xgboost(x, y, {"objective": "reg:pseudohubererror", "min_child_weight": 0}, 50).kinds() == []


def own_loss(predicted, data):
    return predicted - data.get_label(), np.ones(len(predicted))


@pytest.mark.parametrize("unit", [1e-2, 1.0, 1e4])
def test_a_start_far_from_the_target_is_estimated(unit):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(800, 5))
    y = unit * (1e4 + 100 * x[:, 0])
    watch = xgboost(x, y, {"eta": 0.1, "max_depth": 3}, 40, obj=own_loss)
    found = watch.one("bad_base_score")
    assert (watch.kinds(), watch.stopped, found.step) == (["bad_base_score"], None, 4)
    assert [f.kind for f in watch.findings] == ["bad_base_score"]  # roots that make up for it do not stagnate
    (cure,) = found.prescriptions
    assert (cure.parameter, cure.current) == ("base_score", 0.5)
    assert cure.proposed == pytest.approx(y.mean(), rel=0.01)
    assert xgboost(x, y, {"eta": 0.1, "max_depth": 3}, 40).kinds() == []  # XGBoost's own estimate


def leaky(seed, leak=True, n=3000):
    """Column 7 is a row number whose order follows the label, in the training rows only."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 8))
    y = (x[:, 0] + 0.7 * x[:, 1] + 0.7 * rng.normal(size=n) > 0).astype(int)
    if leak:
        x[:2000, 7] = np.argsort(np.argsort(y[:2000] + 0.3 * rng.random(2000)))
        x[2000:, 7] = rng.permutation(1000) * 2
    return (x[:2000], y[:2000]), (x[2000:], y[2000:])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_a_leak_is_named_wherever_its_column_stands(seed, order):
    (x, y), (v, w) = leaky(seed)
    watch = xgboost(x[:, order], y, {"objective": "binary:logistic", "max_depth": 4}, 20, valid=(v[:, order], w))
    found = watch.one("feature_dominance")
    assert (found.subject, watch.stopped) == ("f7" if order == slice(None) else "f0", None)
    assert found.step <= 5
    assert found.value("gain_share") > 0.9


def test_no_leak_and_one_real_feature_are_silent():
    train, valid = leaky(0, leak=False)
    assert "feature_dominance" not in xgboost(*train, {"objective": "binary:logistic"}, 30, valid=valid).kinds()
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2000, 6))
    y = 5 * x[:, 2] + 0.5 * rng.normal(size=2000)
    watch = xgboost(x[:1400], y[:1400], {}, 30, valid=(x[1400:], y[1400:]))
    assert watch.kinds() == []
    assert [(f.subject, f.severity) for f in watch.plugin.diagnose() if f.kind == "feature_dominance"] == [
        ("f2", Severity.INFO)
    ]


def test_a_tiny_learning_rate_makes_slow_progress():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 3))
    y = 3 * x[:, 0]
    watch = xgboost(x, y, {"eta": 1e-5}, 60)
    assert [f.kind for f in watch.plugin.diagnose() if f.severity >= Severity.WARNING] == ["slow_progress"]
    watch = xgboost(x, y, {"eta": 0.05}, 60)
    assert [f.kind for f in watch.plugin.diagnose() if f.severity >= Severity.WARNING] == []


def test_the_action_can_be_bounded():
    x, y = grid()
    watch = xgboost(x, y, STEEP[xgboost], 12, watch=Watch(action="warn"))
    assert watch.one("diverging_rounds").action is Action.WARN
    assert watch.stopped is None


def test_another_fit_begins_anew():
    x, y = grid()
    watch = Watch(action="warn")
    for _ in range(2):
        xgboost(x, y, STEEP[xgboost], 8, watch=watch)
    assert watch.kinds() == ["diverging_rounds", "diverging_rounds"]
    catboost(x, y, {"learning_rate": 0.3}, 8, watch)
    assert len(watch.plugin._histories[""].rounds) == 8
    assert len(watch.kinds()) == 2


def test_a_model_of_no_trees_and_no_metrics():
    watch = Watch()
    watch(tree_event(0, trees=TreeTable.empty()))
    assert watch.findings == []
    assert list(watch.plugin.diagnose()) == []


@pytest.mark.parametrize(
    ("metric", "direction"),
    [("rmse", -1), ("RMSE", -1), ("auc", 1), ("ndcg@5", 1), ("NDCG:top=10", 1), ("quantile", -1), ("my own", 0),
     ("tweedie-nloglik@1.5", -1), ("poisson-nloglik", -1), ("Logloss", -1), ("binary_logloss", -1)],
)  # fmt: skip
def test_which_way_a_metric_is_better(metric, direction):
    assert names.direction(metric) == direction
