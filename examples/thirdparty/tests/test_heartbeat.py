import json

from dynguard_heartbeat.heartbeat import Heartbeat
from dynguard_heartbeat.pulse import Pulse

from dynguard import Metrics
from dynguard.testing import call, check_plugin, gradient_event, run_info


def test_both_obey_the_contract():
    check_plugin(Pulse, options={"patience": 3})
    check_plugin(Heartbeat)


def test_a_standstill_is_told_once_when_patience_runs_out():
    pulse = Pulse(floor=1e-3, patience=3)
    norms = [1.0, 1e-5, 1e-5, 1.0, 1e-5, 1e-5, 1e-5, 1e-5]
    signals = [call(pulse, "on_gradients", event=gradient_event(i, norms={"a": norm})) for i, norm in enumerate(norms)]
    assert [step for step, signal in enumerate(signals) if signal.fired] == [6]


def test_the_file_says_how_far_the_run_is(tmp_path):
    sink = Heartbeat(every=0)
    call(sink, "on_run_start", run=run_info("r1", directory=tmp_path))
    call(sink, "write", record=Metrics(step=5, values={"loss": float("nan")}))
    beat = json.loads((tmp_path / "heartbeat.json").read_text())
    assert (beat["run"], beat["step"], beat["loss"], beat["alive"]) == ("r1", 5, None, True)
    call(sink, "close", timeout=1.0)
    assert json.loads((tmp_path / "heartbeat.json").read_text())["alive"] is False
