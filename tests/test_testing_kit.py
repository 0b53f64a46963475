"""The kit for plugin authors: events, hooks called by hand, the sink, reads of the device."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dynguard import Action, Finding, FlowManager, Intervention, Metrics, Section, Signal, hookimpl
from dynguard import hookspecs as contract
from dynguard.findings import RunEnd, RunStart
from dynguard.testing import (
    MemorySink,
    call,
    count_reads,
    embedding_event,
    gradient_event,
    loss_event,
    on_ranks,
    parameter_event,
    run_info,
    tree_event,
)

NAN, INF = math.nan, math.inf


def floats(values: Any) -> list[float]:
    return [float(value) for value in values]


# -- events


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_statistics_of_given_gradients_are_those_of_the_definition(make: Callable[[Any], Any]) -> None:
    event = gradient_event(
        3,
        gradients={"a": make([3.0, -4.0]), "b": make([[0.0, 12.0]]), "none": None},
        second_moments={"a": make([4.0, 16.0])},
        previous={"a": make([4.0, 3.0]), "b": make([[0.0, 2.0]])},
        lr=0.5,
        tables=["b"],
    )
    assert (event.names, event.tables) == (("a", "b", "none"), {1})
    assert floats(event.norms) == [5.0, 12.0, 0.0]
    assert float(event.global_norm) == 13.0
    assert floats(event.max_abs) == [4.0, 12.0, 0.0]
    np.testing.assert_allclose(floats(event.rms_ratio), [math.sqrt((9 / 4 + 16 / 16) / 2), NAN, NAN], rtol=1e-6)
    np.testing.assert_allclose(floats(event.cosine), [0.0, 1.0, NAN], atol=1e-6)
    assert event.learning_rates == (0.5, 0.5, 0.5)
    kind = torch.Tensor if make is torch.tensor else np.ndarray
    assert isinstance(event.norms, kind)
    assert all(str(getattr(event, name).dtype).endswith("float32") for name in ("norms", "global_norm", "rms_ratio"))


def test_norms_alone_make_gradients_that_have_them() -> None:
    event = gradient_event(norms={"a": 2.0, "b": NAN, "c": INF, "d": 0.0})
    assert floats(event.norms)[0::2] == [2.0, INF]
    assert [float(np.linalg.norm(gradient)) for gradient in event.gradients][0::3] == [2.0, 0.0]
    assert math.isnan(event.norms[1])
    assert math.isnan(event.global_norm)


def test_a_half_precision_norm_does_not_overflow() -> None:
    entries = [60000.0] * 4  # each finite in fp16, whose largest number is 65504; the norm is not
    assert floats(gradient_event(gradients={"a": np.array(entries, dtype=np.float16)}).norms) == [120000.0]
    assert floats(gradient_event(gradients={"a": torch.tensor(entries, dtype=torch.float16)}).norms) == [120000.0]


def test_sparse_and_complex_gradients_have_the_norm_of_their_entries() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 2]]), torch.tensor([3.0, 1.0, 3.0]), (4,), check_invariants=True
    )
    event = gradient_event(gradients={"s": sparse, "c": torch.tensor([3 + 4j])})
    assert floats(event.norms) == [5.0, 5.0]  # the two entries of row 2 add up to 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norms": {"a": 1.0}, "gradients": {"a": None}}, "not both"),
        ({"norms": {"a": -1.0}}, "never negative"),
        ({"norms": {"a": 1.0}, "lr": [0.1, 0.2]}, "2 entries for 1"),
    ],
)
def test_events_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gradient_event(**arguments)


def test_losses_are_detached_and_wide_enough() -> None:
    loss = torch.tensor(2.0, dtype=torch.bfloat16, requires_grad=True) * 1
    event = loss_event(4, loss, metrics={"accuracy": 0.5})
    assert (event.step, event.loss.dtype, event.loss.requires_grad) == (4, torch.float32, False)
    assert loss_event(loss=torch.tensor(1.0, dtype=torch.float64)).loss.dtype is torch.float64
    assert loss_event(loss=None).loss is None
    assert loss_event(loss=3).loss.shape == ()


def test_parameters_have_the_norms_that_were_asked_for() -> None:
    assert floats(parameter_event(norms={"a": 3.0, "b": INF}).norms) == [3.0, INF]
    assert floats(parameter_event(parameters={"a": torch.tensor([3.0, 4.0])}).norms) == [5.0]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_lookups_become_unique_rows_with_summed_gradients(make: Callable[[Any], Any]) -> None:
    gradients = make([[1.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
    event = embedding_event(ids=make([7, 2, 2]), gradients=gradients, labels=None)
    assert (event.rows.tolist(), event.counts.tolist()) == ([2, 7], [2, 1])
    assert event.gradients.tolist() == [[3.0, 4.0], [1.0, 0.0]]
    assert event.row_gradient_norms.tolist() == [5.0, 1.0]


def test_a_tree_has_the_leaves_that_were_asked_for() -> None:
    event = tree_event(5, values=[0.5, -2.0, 3.0], metrics={"valid": {"rmse": 0.3}})
    leaves = event.trees["leaf"]
    assert event.trees["value"][leaves].tolist() == [0.5, -2.0, 3.0]
    assert (event.round, set(event.trees["round"])) == (5, {5})
    assert (event.trees["feature"] >= 0).tolist() == (~leaves).tolist()
    assert event.trees["depth"].tolist() == [0, 1, 1, 2, 2]
    assert {len(column) for column in event.trees.values()} == {5}
    assert tree_event(values=[0.1]).trees["leaf"].tolist() == [True]


# -- calls


class Watcher:
    @hookimpl
    def on_gradients(self, event: Any) -> Any:
        return event.step

    @hookimpl
    def on_run_end(self, error: BaseException | None) -> Any:
        return error

    def on_loss(self, event: Any) -> None:
        """Not marked."""


def test_call_passes_only_what_the_implementation_names() -> None:
    assert call(Watcher(), "on_gradients", event=gradient_event(8)) == 8
    assert call(Watcher(), "on_run_end", run=run_info(), error=None) is None


@pytest.mark.parametrize(
    ("hook", "arguments", "kind", "message"),
    [
        ("on_gradient", {}, AttributeError, "Did you mean 'on_gradients'"),
        ("on_trees", {}, AttributeError, "its hooks are: on_gradients, on_run_end"),
        ("on_loss", {}, AttributeError, "@hookimpl above it"),
        ("on_gradients", {}, TypeError, "needs event="),
        ("on_gradients", {"events": 1}, TypeError, "no argument 'events'"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(hook: str, arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call(Watcher(), hook, **arguments)


# -- the sink


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, flow: FlowManager) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        loss = model(torch.randn(8, 4)).square().mean()
        flow.observe(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def test_the_memory_sink_keeps_a_run_in_order() -> None:
    class Talkative:
        @hookimpl
        def diagnose(self) -> list[Finding]:
            return [Finding(kind="stagnation")]

        @hookimpl
        def summarize(self) -> Section:
            return Section(title="Costs")

    model, optimizer = parts()
    sink = MemorySink()
    with FlowManager(model, optimizer, plugins=[sink, Talkative()], strict=True) as flow:
        train(model, optimizer, 3, flow)
    assert isinstance(sink.records[0], RunStart)
    assert isinstance(sink.records[-1], RunEnd)
    assert [metrics.step for metrics in sink.metrics] == [0, 1, 2]
    assert [finding.kind for finding in sink.findings] == ["stagnation"]
    assert [(section.title, section.plugin) for section in sink.sections] == [("Costs", "talkative")]
    assert sink.of(RunEnd)[0].steps == 3
    assert (sink.closed, sink.flushed > 0) == (True, True)
    assert (sink.interventions, sink.of(Metrics)) == ([], sink.metrics)


# -- reads of the device


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (lambda t: t[0].item(), "Tensor.item"),
        (lambda t: t.tolist(), "Tensor.tolist"),
        (lambda t: t.numpy(), "Tensor.numpy"),
        (np.asarray, "Tensor.__array__"),
        (lambda t: t.cpu(), "Tensor.cpu"),
        (lambda t: t.to("cpu"), "Tensor.to"),
        (lambda t: t.to(device="cpu:0"), "Tensor.to"),
        (lambda t: t.index_put_((t > 0,), t + 1), "aten::index_put_"),
        (lambda t: float(t[0]), "Tensor.__float__"),
        (lambda t: int(t[0]), "Tensor.__int__"),
        (lambda t: t[0] > 1 or None, "Tensor.__bool__"),
        (max, "Tensor.__bool__"),
        (lambda t: f"{t[0]:.3f}", "Tensor.item"),
        (lambda t: t[t > 1], "aten::index"),
        (lambda t: t.nonzero(), "aten::nonzero"),
        (lambda t: t.unique(), "aten::_unique2"),
        (lambda t: torch.equal(t, t), "aten::equal"),
        (lambda t: t.masked_select(t > 1), "aten::masked_select"),
        (lambda t: print(t, end=""), None),
    ],
)
def test_what_reads_the_device_is_counted_and_located(read: Callable[[Any], Any], what: str | None) -> None:
    tensor = torch.tensor([1.0, 2.0])
    with count_reads() as reads:
        read(tensor)
    assert len(reads) == 1 or what is None
    assert {place.split(" at ")[1].split(":")[0] for place in reads.places} == {"test_testing_kit.py"}
    assert what is None or reads.places[0].startswith(f"{what} at ")


def test_arithmetic_reads_nothing() -> None:
    tensor = torch.rand(5)
    with count_reads() as reads:
        fired = (tensor.log() - tensor.mean() > 3) & tensor.isfinite()
        torch.where(fired, tensor, torch.zeros_like(tensor)).sum() + fired.any()
        torch.cat([tensor[:2], tensor[2:]]).sort()
        torch._foreach_norm([tensor, tensor])
        tensor[torch.tensor([0, 1])]
        tensor[fired] = 0.0
        tensor.to(torch.float64).to(device=tensor.device)
        torch.as_tensor(False) | fired
        _ = tensor.shape, len(tensor), tensor.device, tensor.dtype
    assert reads.places == []


def test_counting_ends_with_the_block_even_when_it_fails() -> None:
    before = dict(vars(torch.Tensor))
    with pytest.raises(KeyError), count_reads() as reads:
        raise KeyError
    assert torch.ones(1).item() == 1.0
    assert len(reads) == 0
    assert dict(vars(torch.Tensor)) == before


# -- all hooks, called in a real run


def test_every_kind_of_hook_is_reached_in_a_run_or_by_hand() -> None:
    told: list[str] = []

    class All:
        @hookimpl
        def on_run_start(self, run: Any) -> None:
            told.append("on_run_start")

        @hookimpl
        def on_loss(self, event: Any) -> None:
            told.append("on_loss")

        @hookimpl
        def on_gradients(self, event: Any) -> Any:
            told.append("on_gradients")
            found = [Finding(kind="grad_spike", action=Action.SKIP)]
            return Signal(0.0, event.step == 1, lambda: found, Action.SKIP)

        @hookimpl
        def on_parameters(self, event: Any) -> None:
            told.append("on_parameters")

        @hookimpl
        def on_intervention(self, intervention: Intervention) -> None:
            told.append("on_intervention")

        @hookimpl
        def on_embeddings(self, event: Any) -> None:
            told.append("on_embeddings")

        @hookimpl
        def on_trees(self, event: Any) -> None:
            told.append("on_trees")

        @hookimpl
        def diagnose(self) -> list[Finding]:
            told.append("diagnose")
            return []

        @hookimpl
        def summarize(self) -> None:
            told.append("summarize")

        @hookimpl
        def on_run_end(self, error: BaseException | None) -> None:
            told.append("on_run_end")

        @hookimpl
        def write(self, record: Any) -> None:
            """Counted by the memory sink's test."""

        @hookimpl
        def flush(self, timeout: float) -> None:
            """As above."""

        @hookimpl
        def close(self, timeout: float) -> None:
            """As above."""

    class Guard:
        @hookimpl
        def adjust_gradients(self, event: Any) -> None:
            told.append("adjust_gradients")

        @hookimpl
        def adjust_embeddings(self, event: Any) -> None:
            told.append("adjust_embeddings")

    model, optimizer = parts()
    with FlowManager(model, optimizer, plugins=[All(), Guard()], strict=True, parameters_every=1) as flow:
        train(model, optimizer, 2, flow)
    clean = ["on_loss", "on_gradients", "adjust_gradients", "on_parameters"]
    skipped = ["on_loss", "on_gradients", "on_intervention", "on_parameters"]
    assert told == ["on_run_start", *clean, *skipped, "diagnose", "summarize", "on_run_end"]
    call(All(), "on_embeddings", event=embedding_event())
    call(Guard(), "adjust_embeddings", event=embedding_event())
    call(All(), "on_trees", event=tree_event())
    assert set(told) == set(contract.ALL) - set(contract.SINKS)


def sums(rank: int, path: Any) -> None:
    total = torch.tensor(rank + 1.0)
    torch.distributed.all_reduce(total)
    (path / f"{rank}").write_text(str(float(total)))


def fails_on_one(rank: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("as planted")


def dies(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_work_on_ranks(tmp_path: Any) -> None:
    on_ranks(sums, tmp_path, size=3)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(3)] == ["6.0"] * 3
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*as planted"):
        on_ranks(fails_on_one)
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] have died"):
        on_ranks(dies)
