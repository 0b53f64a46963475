"""Boosting rounds on the bus: stopping by the library's own path, replay, isolation, and the report of such a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynguard import Action, Finding, FlowManager, Severity, Signal, hookimpl

xgb = pytest.importorskip("xgboost")


class StopsAt:
    """Asks for an action at one round."""

    def __init__(self, at: int, action: Action = Action.RAISE) -> None:
        self.at, self.action, self.rounds = at, action, list[int]()

    @hookimpl
    def on_trees(self, event: Any) -> Signal:
        self.rounds.append(event.round)
        finding = Finding(kind="diverging_rounds", severity=Severity.ERROR, action=self.action, subject="x")
        return Signal(float(event.round), event.round == self.at, lambda: [finding], action=self.action)


def train(flow: FlowManager, rounds: int = 12, **more: Any) -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4))
    data = xgb.DMatrix(x, x[:, 0] + rng.normal(size=200))
    return xgb.train(
        {"max_depth": 2, "nthread": 1}, data, rounds, evals=[(data, "train")], verbose_eval=False,
        callbacks=[flow.xgboost(**more)],
    )  # fmt: skip


def test_a_raise_stops_training_and_keeps_the_rounds_before(tmp_path: Path) -> None:
    with FlowManager(plugins=[StopsAt(5)], run_dir=tmp_path / "run", strict=True) as flow:
        model = train(flow)
    assert model.num_boosted_rounds() == 5
    assert [(i.step, i.action, i.carried_out) for i in flow.interventions] == [(5, Action.RAISE, True)]


@pytest.mark.parametrize(("mode", "action"), [("observe", Action.RAISE), ("guard", Action.SKIP)])
def test_nothing_is_stopped_in_observe_mode_nor_by_less_than_a_raise(mode: Any, action: Action, tmp_path: Path) -> None:
    with FlowManager(plugins=[StopsAt(5, action)], run_dir=tmp_path / "run", strict=True, mode=mode) as flow:
        model = train(flow)
    assert model.num_boosted_rounds() == 12
    assert len(flow.findings) == 1
    assert not [i for i in flow.interventions if i.carried_out]


def test_a_second_model_is_judged_anew_and_a_replay_stops_nothing(tmp_path: Path) -> None:
    plugin = StopsAt(5)
    with FlowManager(plugins=[plugin], run_dir=tmp_path / "run", strict=True) as flow:
        lengths = [train(flow, source=source).num_boosted_rounds() for source in ("", "b", "")]
        assert lengths == [5, 5, 5]
        whole = train(flow, 4)
        before = len(flow.interventions)
        assert flow.inspect(whole) == []
        assert plugin.rounds[-4:] == [0, 1, 2, 3]
        assert len(flow.interventions) == before


def test_a_failing_detector_does_not_end_training(tmp_path: Path) -> None:
    class Fails:
        @hookimpl
        def on_trees(self, event: Any) -> Any:
            raise ZeroDivisionError

    class Nonsense:
        @hookimpl
        def on_trees(self, event: Any) -> Any:
            return "fine"

    with FlowManager(plugins=[Fails(), Nonsense()], run_dir=tmp_path / "run") as flow:
        assert train(flow).num_boosted_rounds() == 12
    assert {f.kind for f in flow.findings} == {"plugin_failed"}
    assert len(flow.findings) == 2


def test_the_report_of_a_tree_run_has_its_metrics(tmp_path: Path) -> None:
    with FlowManager(plugins=["default", "-console"], run_dir=tmp_path / "run") as flow:
        train(flow)
    done = subprocess.run(
        [sys.executable, "-m", "dynguard.cli", "report", str(tmp_path / "run")],
        capture_output=True, text=True, check=True, env={"COLUMNS": "160", "PATH": ""},
    )  # fmt: skip
    assert "damaged" not in done.stdout + done.stderr
    assert "train-rmse" in done.stdout
