"""The demo: real text, an ordinary model, planted faults, and a verdict that can turn out bad."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dynguard import cli, demo
from dynguard.history import History
from dynguard.torch import demo as training


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dynguard", "demo", "--quick", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def strict(path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_the_demo_catches_its_faults_and_draws_the_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "here"
    (out / "run").mkdir(parents=True)  # somebody else's, to be left alone
    assert run(monkeypatch, "--out", str(out)) == 0
    text = capsys.readouterr().out
    result = strict(out / "result.json")
    planted = {fault.step: fault for fault in training.faults(training.QUICK)}
    assert result["ok"]
    assert result["same_before_faults"]
    assert [entry["fault"]["step"] for entry in result["catches"]] == sorted(planted)
    assert (out / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (out / "loss.png").stat().st_size > 10_000
    assert list((out / "run").iterdir()) == []
    assert "3 of 3 faults caught" in text
    assert "dynguard report" in text

    # The run's own history says the same.
    with History(out / result["run"]) as history:
        done = {i.step: i for i in history.interventions()}
        assert set(planted) <= set(done)
        layer = next(fault for fault in planted.values() if fault.layer)
        assert done[layer.step].subject.startswith(f"{layer.layer}.")
        kinds = {finding.step: finding.kind for finding in history.findings()}
        assert kinds[max(planted)].startswith("nan_")

    # A run without a guard dies of the NaN batch, at that very step; the guarded one goes on and has learnt.
    plain, guarded = result["plain"], result["guarded"]
    assert plain["dead_since"] == max(planted)
    assert plain["held_out"] == "NaN"
    assert set(plain["losses"][max(planted) :]) == {"NaN"}
    assert len(guarded["losses"]) == training.QUICK.steps
    assert guarded["dead_since"] is None
    assert guarded["held_out"] < 3.2 < guarded["losses"][0]


def test_without_a_detector_the_demo_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "PLUGINS", ["history"])
    assert run(monkeypatch, "--out", str(tmp_path)) == 1
    result = strict(tmp_path / "result.json")
    assert not result["ok"]
    assert not any(entry["ok"] for entry in result["catches"])
    assert result["guarded"]["dead_since"] is not None  # the NaN batch got in; only a snapshot can mend that later
    assert "0 of 3 faults caught" in capsys.readouterr().out


def test_only_the_right_layer_counts() -> None:
    fault = training.Fault("gradient", 5, "x 1000", layer="blocks.1.mlp.0")
    assert demo.Catch(fault, subject="blocks.1.mlp.0.weight", action="skip").ok
    assert not demo.Catch(fault, subject="blocks.1.mlp.01.weight", action="skip").ok
    assert not demo.Catch(fault, subject="blocks.1.mlp.0.weight", action="clip").ok
    assert not demo.Catch(fault).ok


def test_a_worse_or_dead_guarded_run_is_no_success() -> None:
    def result(plain: float, guarded: float) -> demo.Result:
        return demo.Result(training.Outcome(held_out=plain), training.Outcome(held_out=guarded), (), 0, True)

    assert result(2.0, 1.0).ok
    assert result(math.nan, 1.0).ok
    assert not result(1.0, 2.0).ok
    assert not result(2.0, math.nan).ok
    assert not result(math.nan, math.nan).ok


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = demo.importlib.util.find_spec  # type: ignore[attr-defined]  # the module that demo looks with
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert run(monkeypatch, "--out", str(tmp_path / "out")) == 2
    assert "pip install 'dynguard[demo]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["nonsense", "meta:x"])
def test_a_device_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    assert run(monkeypatch, "--out", str(tmp_path), "--device", device) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_folder_that_can_not_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run(monkeypatch, "--out", str(tmp_path / "file" / "out")) == 2
    assert "file" in capsys.readouterr().err


def test_the_text_is_the_standard_library() -> None:
    first = Path(os.__file__).with_name("__future__.py").read_bytes()  # no name sorts before it
    text = training.standard_library_text(len(first) + 500)
    assert text.startswith(first)
    assert len(text) == len(first) + 500


def test_the_model_is_the_size_that_is_told() -> None:
    model = training.CharacterGPT(training.Size())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e6, rel=0.1)


def test_a_fresh_model_knows_nothing_and_sees_no_future() -> None:
    torch.manual_seed(0)
    size = training.QUICK
    model = training.CharacterGPT(size)
    data = training.Data(size, seed=1, device="cpu")
    batch = data.batch(0)
    loss = float(training.loss_of(model, batch).detach())
    assert loss == pytest.approx(math.log(training.VOCABULARY), abs=0.5)  # uniform over the vocabulary
    heavy = training.Batch(batch.tokens, batch.weights * 500)
    assert float(training.loss_of(model, heavy).detach()) == pytest.approx(500 * loss, rel=1e-5)
    changed = batch.tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % training.VOCABULARY
    before, after = model(batch.tokens[:, :-1]), model(changed[:, :-1])
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20], after[:, 20])


def test_batches_are_the_same_for_one_seed() -> None:
    one, two = (training.Data(training.QUICK, seed=3, device="cpu") for _ in range(2))
    other = training.Data(training.QUICK, seed=4, device="cpu")
    assert torch.equal(one.batch(9).tokens, two.batch(9).tokens)
    assert not torch.equal(one.batch(9).tokens, other.batch(9).tokens)
    assert not torch.equal(one.batch(9).tokens, one.batch(10).tokens)
