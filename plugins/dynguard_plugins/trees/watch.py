"""``trees``: watches boosting rounds of XGBoost, LightGBM and CatBoost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dynguard import Action, Finding, Section, Signal, hookimpl, validated
from dynguard_plugins.trees import report
from dynguard_plugins.trees.diverging import diverging_rounds
from dynguard_plugins.trees.dominance import concentrated, feature_dominance
from dynguard_plugins.trees.exploding import exploding_leaves
from dynguard_plugins.trees.history import History, restored, saved
from dynguard_plugins.trees.offset import bad_base_score
from dynguard_plugins.trees.onset import overfit_cost, overfit_onset
from dynguard_plugins.trees.progress import slow_progress
from dynguard_plugins.trees.stagnation import stagnating_trees
from dynguard_plugins.trees.velocity import leaf_velocity, overspecialised_trees, unstable_importance

if TYPE_CHECKING:
    from dynguard.events import TreeEvent

EACH_ROUND = (
    exploding_leaves, diverging_rounds, stagnating_trees, bad_base_score, feature_dominance, overfit_onset,
)  # fmt: skip
NOW_AND_THEN = (slow_progress, overfit_cost, concentrated, overspecialised_trees, unstable_importance)


class Trees:
    """Watches boosting rounds: leaves that explode, rounds that diverge or stagnate, leaks, overfitting.

    No threshold has the target's unit, and none depends on the order of columns. Each kind is told once a fit.

    Cost of a round: O(nodes of its trees), whatever the round's number. Memory: about 0.6 kB a round, and the gain
    of each feature in at most 64 blocks of rounds.

    Args:
        action: the farthest that may be asked for: ``raise`` stops where no round can help, ``warn`` only says so.
        top: how many features the report names.
    """

    @validated
    def __init__(self, *, action: Action = Action.RAISE, top: Annotated[int, Field(ge=1)] = 10) -> None:
        self.action = action
        self.top = top
        self._histories: dict[str, History] = {}

    @hookimpl
    def on_trees(self, event: TreeEvent) -> Signal:
        """Take up the round; the score is the leaf velocity, log(rms_t / rms_{t-1}) of the leaf values."""
        history = self._history(event)
        history.add(event)
        findings = [self._bounded(f) for f in (look(history) for look in EACH_ROUND) if f is not None]
        return Signal(
            score=leaf_velocity(history.rounds),
            fired=bool(findings),
            explain=lambda: findings,
            action=max((f.action for f in findings), key=lambda a: a.rank, default=Action.WARN),
        )

    @hookimpl
    def diagnose(self) -> Iterable[Finding]:
        """What only many rounds show."""
        for history in self._histories.values():
            if history.rounds or history.curves.train is not None:
                yield from (f for f in (look(history) for look in NOW_AND_THEN) if f is not None)

    @hookimpl
    def summarize(self) -> Section | None:
        """Boosters, features, and figures over the rounds."""
        seen = [history for history in self._histories.values() if history.newest >= 0]
        if not seen:
            return None
        return Section(
            title="Boosted trees",
            text="Leaf values include the learning rate. Leaf velocity is log(rms_t / rms_{t-1}) of the leaf values, "
            "weighted by cover; feature split concentration is the Herfindahl-Hirschman index of the number of splits "
            "by feature.",
            tables=(report.overview(seen), *(report.importances(h, self.top) for h in seen if h.sums.gain)),
            figures=tuple(figure for history in seen for figure in report.figures(history, self.top)),
        )

    def state_dict(self) -> dict[str, Any]:
        """All that is known of the runs, as plain numbers, strings, lists and dicts."""
        return {"histories": [saved(history) for history in self._histories.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._histories = {one["source"]: restored(one) for one in state["histories"]}

    def _history(self, event: TreeEvent) -> History:
        """The source's history; a new one where another fit begins."""
        history = self._histories.get(event.source)
        if history is None or history.begins_again(event):
            history = self._histories[event.source] = History()
        return history

    def _bounded(self, finding: Finding) -> Finding:
        return finding if finding.action <= self.action else finding.model_copy(update={"action": self.action})
