"""The plugin contract: every hook has a runnable example, its place in the documentation and a test."""

from __future__ import annotations

import doctest
import inspect
import json
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import BaseModel, Field, ValidationError

from dynguard import Action, Evidence, Finding, Intervention, Section, Severity, Table, hookimpl, registry, validated
from dynguard import hookspecs as contract
from dynguard.errors import OptionError
from dynguard.testing import check_plugin, hooks_of

ROOT = Path(__file__).parents[1]
PLUGINS_PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")


def signature(hook: str) -> str:
    """``on_loss(event: LossEvent) -> Signal | None``, as the documentation has it."""
    found = inspect.signature(getattr(contract.Hooks, hook))
    arguments = [f"{p.name}: {p.annotation}" for p in found.parameters.values() if p.name != "self"]
    return f"{hook}({', '.join(arguments)}) -> {found.return_annotation}"


# -- hooks


@pytest.mark.parametrize("hook", contract.ALL)
def test_the_example_of_every_hook_runs(hook: str) -> None:
    example = doctest.DocTestFinder().find(getattr(contract.Hooks, hook), hook, globs={})
    assert sum(len(test.examples) for test in example) >= 3
    for test in example:
        result = doctest.DocTestRunner(verbose=False).run(test)
        assert result.failed == 0


def test_the_examples_of_the_module_run() -> None:
    result = doctest.testmod(contract)
    assert (result.failed, result.attempted > 30) == (0, True)


def test_every_hook_is_documented_with_its_exact_signature_in_the_order_of_a_step() -> None:
    assert re.findall(r"^### `(.+)`$", PLUGINS_PAGE, re.MULTILINE) == [signature(hook) for hook in contract.ALL]


@pytest.mark.parametrize("hook", contract.ALL)
def test_documentation_and_docstring_agree_on_the_kind_of_a_hook(hook: str) -> None:
    kind = inspect.getdoc(getattr(contract.Hooks, hook)).split(".")[0]  # type: ignore[union-attr]
    section = PLUGINS_PAGE.split(f"### `{signature(hook)}`\n")[1]
    assert section.lstrip().startswith(f"{kind}. ")
    table = {
        row[0].strip(): row[1]
        for row in (line.strip("|").split("|") for line in PLUGINS_PAGE.splitlines() if line.startswith("| "))
    }
    assert f"`{hook}`" in table[kind.lower()]


@pytest.mark.parametrize("hook", contract.ALL)
def test_every_hook_is_exercised_by_a_test(hook: str) -> None:
    others = [path for path in (ROOT / "tests").glob("test_*.py") if path.name != Path(__file__).name]
    assert any(re.search(rf'def {hook}\(|"{hook}"', path.read_text(encoding="utf-8")) for path in others)


def test_the_groups_name_hooks_that_exist() -> None:
    groups = (contract.DETECTORS, contract.GUARDS, contract.SINKS, contract.HOT)
    assert {hook for group in groups for hook in group} <= set(contract.ALL)
    assert not set(contract.DETECTORS) & set(contract.GUARDS)


# -- documentation


def blocks(language: str) -> Iterator[str]:
    for info, text in re.findall(r"^```(\w[^\n]*)\n(.*?)^```$", PLUGINS_PAGE, re.MULTILINE | re.DOTALL):
        if info == language:
            yield text


def test_the_code_of_the_documentation_runs_and_its_plugins_obey_the_contract() -> None:
    names: dict[str, Any] = {"__name__": "documentation"}
    for text in blocks("python"):
        exec(compile(text, "docs/plugins.md", "exec", dont_inherit=True), names)
    plugins = [thing for thing in names.values() if inspect.isclass(thing) and hooks_of(thing)]
    shown = {hook for plugin in plugins for hook in hooks_of(plugin)}
    assert shown >= set(contract.ALL)
    for plugin in plugins:
        check_plugin(plugin)


def test_the_configuration_of_the_documentation_is_accepted(tmp_path: Path) -> None:
    for number, text in enumerate(blocks("toml")):
        if "entry-points" in text:
            assert tomllib.loads(text)["project"]["entry-points"]["dynguard"]
            continue
        path = tmp_path / f"{number}.toml"
        path.write_text(text, encoding="utf-8")
        assert registry.load_config(path).options["configurable"] == {"limit": 5.0, "action": "skip"}


def test_every_kind_that_dynguard_names_is_in_the_vocabulary() -> None:
    page = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    documented = {
        kind for row in re.findall(r"^\| ((?:`\w+` ?)+)\|", page, re.MULTILINE) for kind in re.findall(r"\w+", row)
    }
    sources = [*(ROOT / "dynguard").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]
    examples = ("hookspecs.py", "scaffold.py")
    used = {
        (kind, path.name)
        for path in sources
        if path.name not in examples
        for kind in re.findall(r'Finding\(\s*kind="(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert {(kind, name) for kind, name in used if kind not in documented} == set()
    assert len(documented) >= 40


# -- first-party plugins


@pytest.mark.parametrize(
    "name", [n for n, e in registry.available().items() if e.value.startswith("dynguard_plugins.")]
)
def test_every_first_party_plugin_obeys_the_contract(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_plugin(registry.load(name))


# -- options


class Options:
    @validated
    def __init__(
        self, *, needed: int, limit: Annotated[float, Field(gt=0)] = 1.0, action: Action = Action.WARN
    ) -> None:
        self.needed, self.limit, self.action = needed, limit, action


def test_options_are_converted_to_their_types() -> None:
    plugin = Options(needed="3", limit=2, action="rollback")  # type: ignore[arg-type]
    assert (plugin.needed, plugin.limit, plugin.action) == (3, 2.0, Action.ROLLBACK)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["'Options'", "'needed'", "required"]),
        ({"needed": 1, "limt": 2}, ["'limt'", "Did you mean 'limit'", "limit: float"]),
        ({"needed": 1, "limit": -1}, ["'limit'", "greater than 0", "-1"]),
        ({"needed": 1, "action": "explode"}, ["'action'", "'explode'", "proceed|warn|clip|skip|rollback|raise"]),
        ({"needed": "many", "limit": 0}, ["'needed'", "'many'", "'limit'"]),
    ],
)
def test_a_wrong_option_is_one_error_that_says_which_and_what_is_allowed(
    options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(OptionError) as caught:
        Options(**options)
    assert [word for word in words if word not in str(caught.value)] == []


def test_options_are_keyword_only() -> None:
    with pytest.raises(OptionError, match="keyword-only"):
        Options(3)  # type: ignore[call-arg,misc]


def test_an_error_inside_the_plugins_own_init_is_not_mistaken_for_a_wrong_option() -> None:
    class Inner(BaseModel):
        size: int

    class Broken:
        @validated
        def __init__(self, *, size: str = "x") -> None:
            Inner(size=size)  # type: ignore[arg-type]

    with pytest.raises(ValidationError, match="Inner"):
        Broken()


# -- findings


def no_constants(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=no_constants)


def test_findings_are_strict_json_whatever_they_hold_and_come_back_whole() -> None:
    name = '<w> & "q" \u00e9 \U0001f600 \x00'
    values = [math.nan, math.inf, -math.inf, 0.1, 3, True, "text", None]
    finding = Finding(
        kind="grad_spike",
        severity=Severity.CRITICAL,
        subject=name,
        rows=(0, 7),
        action=Action.ROLLBACK,
        evidence=tuple(Evidence(name=f"{name}{i}", value=value) for i, value in enumerate(values)),
        confidence=0.5,
    )
    data = strict(finding.model_dump_json())
    assert (data["severity"], data["action"], data["subject"], data["rows"]) == ("critical", "rollback", name, [0, 7])
    assert [item["value"] for item in data["evidence"]] == ["NaN", "Infinity", "-Infinity", 0.1, 3, True, "text", None]
    again = Finding.model_validate_json(finding.model_dump_json())
    assert again.model_dump_json() == finding.model_dump_json()


def test_sections_and_interventions_are_strict_json() -> None:
    table = Table(columns=("a",), rows=((math.nan,), (-math.inf,)))
    data = strict(Section(title="t", tables=(table,)).model_dump_json())
    assert data["tables"][0]["rows"] == [["NaN"], ["-Infinity"]]
    assert strict(Intervention(step=1, action=Action.SKIP).model_dump_json())["action"] == "skip"


@pytest.mark.parametrize(
    "wrong", [{"kind": "Not a word"}, {"kind": "a", "confidence": 1.5}, {"kind": "a", "colour": "red"}, {}]
)
def test_a_malformed_finding_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Finding(**wrong)


def test_a_finding_can_not_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError):
        Finding(kind="a").step = 3  # type: ignore[misc]


def test_evidence_is_found_by_name() -> None:
    finding = Finding(kind="a", evidence=(Evidence(name="x", value=2.5),))
    assert finding.value("x") == 2.5
    with pytest.raises(KeyError):
        finding.value("y")


def test_severities_and_actions_are_ordered_and_only_among_themselves() -> None:
    assert [str(severity) for severity in sorted(Severity, reverse=True)] == ["critical", "error", "warning", "info"]
    assert sorted(Action, reverse=True)[0] is Action.RAISE
    assert [str(action) for action in Action] == ["proceed", "warn", "clip", "skip", "rollback", "raise"]
    assert [action for action in Action if action.intervenes] == [
        Action.CLIP,
        Action.SKIP,
        Action.ROLLBACK,
        Action.RAISE,
    ]
    with pytest.raises(TypeError):
        _ = Action.WARN < Severity.ERROR


def test_the_kit_needs_neither_torch_nor_pytest() -> None:
    code = "import sys, dynguard.testing; print(sorted({'torch', 'pytest', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_a_plugin_may_hold_numpy_options() -> None:
    class Limits:
        @validated
        def __init__(self, *, limits: np.ndarray) -> None:
            self.limits = limits

        @hookimpl
        def diagnose(self) -> list[Finding]:
            return []

    check_plugin(Limits, options={"limits": np.ones(2)})
