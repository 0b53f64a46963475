"""Choosing plugins: names, pairs, instances, presets, configuration files, and what goes wrong there."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynguard import hookimpl, registry, validated
from dynguard.errors import OptionError, PluginError


class Mine:
    @validated
    def __init__(self, *, limit: float = 1.0) -> None:
        self.limit = limit

    @hookimpl
    def write(self, record: object) -> None:
        """Takes it."""


class Unvalidated:
    def __init__(self, *, limit: int = 1) -> None:
        self.limit = limit

    @hookimpl
    def write(self, record: object) -> None:
        """Takes it."""


def names(wanted: object, **more: object) -> list[str]:
    return [name for name, _ in registry.resolve(wanted, **more)]  # type: ignore[arg-type]


def test_first_party_plugins_are_found_through_entry_points() -> None:
    assert {"spike", "console", "history", "json", "memory"} <= set(registry.available())


def test_the_default_preset_is_sorted_by_name() -> None:
    assert names("default") == sorted(registry.PRESETS["default"])


def test_names_pairs_and_instances_may_be_mixed_and_replace_the_presets_own() -> None:
    chosen = dict(registry.resolve(["default", ("spike", {"warmup": 7}), Mine(limit=2.0)]))
    assert chosen["spike"].warmup == 7  # type: ignore[attr-defined]
    assert chosen["mine"].limit == 2.0  # type: ignore[attr-defined]
    assert len(chosen) == len(registry.PRESETS["default"]) + 1


def test_an_instance_of_an_installed_plugin_takes_its_installed_name() -> None:
    assert names([registry.create("spike")]) == ["spike"]


def test_a_minus_leaves_out_what_a_preset_brings() -> None:
    assert "console" not in names(["default", "-console"])
    with pytest.raises(PluginError, match="console"):
        names(["default", "-consle"])


def test_two_of_a_kind_are_told_apart() -> None:
    assert names([Mine(), Mine()]) == ["mine", "mine-2"]


def test_a_name_alone_takes_its_options_from_the_configuration() -> None:
    chosen = dict(registry.resolve(["spike"], {"spike": {"warmup": 9}}))
    assert chosen["spike"].warmup == 9  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("spik", "Did you mean 'spike'"),
        (("spike", 3), "3 is neither a plugin's name, nor (name, options)"),
        ([("spike", 3)], "(name, options)"),
        ([Mine], "Mine()"),
    ],
)
def test_a_wrong_choice_says_what_to_type(wanted: object, message: str) -> None:
    with pytest.raises(PluginError) as caught:
        registry.resolve(wanted)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda options: Mine(**options),
        lambda options: registry.build(Mine, options),
        lambda options: registry.build(Unvalidated, options),
        lambda options: registry.create("spike", options),
        lambda options: registry.resolve(["spike"], {"spike": options}),
    ],
)
def test_wrong_options_fail_alike_however_they_are_given(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(OptionError, match="unknown option 'limmit'"):
        make({"limmit": 3})


def test_a_wrong_value_names_plugin_option_and_what_is_allowed() -> None:
    with pytest.raises(OptionError) as caught:
        registry.create("spike", {"action": "explode"})
    for part in ("'Spike'", "'action'", "rollback", "'explode'"):
        assert part in str(caught.value)


def test_options_are_converted_by_their_annotations_even_without_the_decorator() -> None:
    assert registry.build(Unvalidated, {"limit": "3"}).limit == 3  # type: ignore[attr-defined]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_dynguard_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "dynguard.toml", 'plugins = ["spike"]\n[plugin.spike]\nwarmup = 5\n[flow]\nmode = "observe"\n')
    config = registry.load_config()
    assert list(config.plugins or ()) == ["spike"]
    assert config.options == {"spike": {"warmup": 5}}
    assert config.flow == {"mode": "observe"}


def test_pyproject_table_and_the_lack_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert registry.load_config() == registry.Config()
    write(tmp_path / "pyproject.toml", "[project]\nname='x'\n")
    assert registry.load_config() == registry.Config()
    write(tmp_path / "pyproject.toml", "[tool.dynguard.plugin.spike]\nwarmup = 5\n")
    assert list(registry.load_config().plugins or ()) == ["default", "spike"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plugin = 3", "table"),
        ("plugins = 'spike'", "list of names"),
        ("plugns = []", "Did you mean"),
        ("= nonsense", "dynguard.toml"),
    ],
)
def test_a_wrong_configuration_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PluginError) as caught:
        registry.load_config(write(tmp_path / "dynguard.toml", text))
    assert message in str(caught.value)


def test_a_broken_pyproject_of_somebody_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pyproject.toml", "= broken")
    assert registry.load_config() == registry.Config()
