"""``features``: which features act together, and which columns know the target by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dynguard import Action, Evidence, Finding, Prescription, Section, Severity, Table, hookimpl, validated
from dynguard_plugins.rounding import short
from dynguard_plugins.trees.interactions import Interaction, Pairs, bear_out, pair_gains
from dynguard_plugins.trees.leaks import Leak, leaks

if TYPE_CHECKING:
    from dynguard.events import TreeEvent


class Features:
    """Suggests interactions that the trees found and the data bears out, and looks for leaks of the target.

    The trees come with the rounds; :meth:`given` takes the data. Without data the section lists the pairs of features
    that follow one another in the trees, by gain.

    Cost of a round: O(nodes of its trees). Of the end: see ``suggest_interactions`` and ``leaks``.

    Args:
        alpha: level of the test for interactions, over all that are tested.
        top: how many are named.
    """

    @validated
    def __init__(
        self, *, alpha: Annotated[float, Field(gt=0, lt=1)] = 0.001, top: Annotated[int, Field(ge=1)] = 10
    ) -> None:
        self.alpha = alpha
        self.top = top
        self._gains: dict[str, Pairs] = {}
        self._names: dict[str, tuple[str, ...]] = {}
        self._newest: dict[str, int] = {}
        self._data: dict[str, tuple[Any, Any]] = {}
        self._told: list[list[str]] = []

    def given(self, X: Any, y: Any, source: str = "") -> None:  # noqa: N803
        """Take the data that the trees learnt from: (n, d) numbers and the (n,) target; kept by reference."""
        self._data[source] = (X, y)

    @hookimpl
    def on_trees(self, event: TreeEvent) -> None:
        """Add up the gains of the round's parent-child pairs."""
        if event.round <= self._newest.get(event.source, -1) and len(event.trees["node"]):
            self._gains.pop(event.source, None)  # another fit
        mine = self._gains.setdefault(event.source, {})
        for pair, gain in pair_gains(event.trees).items():
            mine[pair] = mine.get(pair, 0.0) + gain
        if len(event.trees["node"]):
            self._newest[event.source] = event.round
        self._names[event.source] = tuple(event.feature_names) or self._names.get(event.source, ())

    @hookimpl
    def diagnose(self) -> Iterable[Finding]:
        """Interactions and leaks, each once."""
        for source in self._data:
            for finding in (*self._interactions(source), *self._leaks(source)):
                if [source, finding.kind, finding.subject] not in self._told:
                    self._told.append([source, finding.kind, finding.subject])
                    yield finding

    @hookimpl
    def summarize(self) -> Section | None:
        """Pairs on the trees' paths, and what the test says of them where there is data."""
        tables = [
            self._tested(source) if source in self._data else self._paths(source)
            for source, gains in self._gains.items()
            if gains
        ]
        if not tables:
            return None
        return Section(
            title="Features",
            text="Pairs of features that follow one another in the trees. Where data was given, those are listed that "
            "explain what an additive model leaves.",
            tables=tuple(tables),
        )

    def state_dict(self) -> dict[str, Any]:
        """Gains, names and what was told; the data is to be given again."""
        return {
            "gains": {s: [[a, b, gain] for (a, b), gain in gains.items()] for s, gains in self._gains.items()},
            "names": {source: list(names) for source, names in self._names.items()},
            "newest": dict(self._newest),
            "told": [list(one) for one in self._told],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up ``state_dict()``."""
        self._gains = {s: {(int(a), int(b)): gain for a, b, gain in rows} for s, rows in state["gains"].items()}
        self._names = {source: tuple(names) for source, names in state["names"].items()}
        self._newest = dict(state["newest"])
        self._told = [list(one) for one in state["told"]]

    def _suggested(self, source: str) -> list[Interaction]:
        X, y = self._data[source]  # noqa: N806
        return bear_out(self._gains.get(source, {}), X, y, self._names.get(source, ()), alpha=self.alpha, top=self.top)

    def _interactions(self, source: str) -> Iterator[Finding]:
        for one in self._suggested(source):
            both = f"{one.names[0]} x {one.names[1]}"
            yield Finding(
                kind="feature_interaction",
                severity=Severity.INFO,
                step=max(self._newest.get(source, 0), 0),
                subject=both,
                source=source,
                action=Action.WARN,
                premise=f"together they explain {one.explained:.1%} of what an additive model leaves",
                implies="their product or a cross of their bins lets shallow trees, or a linear model, say the same",
                expected_effect="as good a model with fewer or shallower trees",
                confidence=1.0 - one.p_value,
                evidence=(
                    Evidence(name="gain_share_of_pairs", value=short(one.gain_share)),
                    Evidence(name="explained", value=short(one.explained)),
                    Evidence(name="variance_inflation", value=short(one.inflation)),
                    Evidence(name="p_value", value=short(one.p_value)),
                ),
                prescriptions=(Prescription(parameter="features", proposed=both, why="add the product as a column"),),
            )

    def _leaks(self, source: str) -> Iterator[Finding]:
        X, y = self._data[source]  # noqa: N806
        for one in leaks(X, y, self._names.get(source, ())):
            yield _leak(one, source, max(self._newest.get(source, 0), 0))

    def _tested(self, source: str) -> Table:
        rows = self._suggested(source)
        return Table(
            title="Interactions",
            columns=("feature", "with", "gain share", "explained", "variance inflation", "p value"),
            rows=tuple(
                (*one.names, *(short(v) for v in (one.gain_share, one.explained, one.inflation, one.p_value)))
                for one in rows
            ),
        )

    def _paths(self, source: str) -> Table:
        gains, names = self._gains[source], self._names.get(source, ())
        total = sum(gains.values()) or 1.0
        named = {f: names[f] if f < len(names) else f"column {f}" for pair in gains for f in pair}
        order = sorted(gains, key=lambda pair: -gains[pair])[: self.top]
        rows = tuple((named[a], named[b], short(gains[a, b] / total)) for a, b in order)
        return Table(title="Pairs on paths", columns=("feature", "with", "gain share"), rows=rows)


def _leak(one: Leak, source: str, step: int) -> Finding:
    """A warning for an identifier, information else: a real feature may decide the target."""
    what = "is distinct in every row, runs with the rows" if one.identifier else "predicts the target by itself"
    return Finding(
        kind="feature_dominance",
        severity=Severity.WARNING if one.identifier else Severity.INFO,
        step=step,
        subject=one.name,
        source=source,
        action=Action.WARN,
        premise=f"{one.name} {what}: held-out R^2 {one.r2:.4f}",
        implies="it is the target in another guise, follows from it, or decides it",
        expected_effect="if it is not known when predictions are made, leaving it out shows the true score",
        evidence=(
            Evidence(name="held_out_r2", value=short(one.r2)),
            Evidence(name="distinct_share", value=short(one.distinct)),
            Evidence(name="order_correlation", value=short(one.order)),
        ),
        prescriptions=(Prescription(parameter="features", current=one.name, proposed="leave out", why="if it leaks"),),
    )
