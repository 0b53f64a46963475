"""The tools that the benchmarks measure with: a count or a timing is only worth what these are."""

from __future__ import annotations

from operator import methodcaller

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402 - after the skip

from benchmarks import timing  # noqa: E402
from benchmarks.reads import HostReads  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402

VECTOR = torch.tensor([1.0, 2.0, 3.0])
SCALAR = torch.tensor(2.0)


@pytest.mark.parametrize(
    "read",
    [
        lambda: methodcaller("item")(SCALAR),
        lambda: float(SCALAR),
        lambda: int(SCALAR),
        lambda: bool(SCALAR > 1.0),
        lambda: [1, 2, 3][torch.tensor(1)],
        lambda: methodcaller("tolist")(VECTOR),
        lambda: methodcaller("numpy")(VECTOR),
        lambda: np.asarray(VECTOR),
        lambda: VECTOR.cpu().numpy().tolist(),
        lambda: VECTOR[VECTOR > 1.0],
        lambda: methodcaller("nonzero")(VECTOR),
        lambda: torch.equal(VECTOR, VECTOR),
        lambda: f"{SCALAR.item():.1f}",
    ],
)
def test_each_way_to_wait_for_the_device_counts_once(read) -> None:  # type: ignore[no-untyped-def]
    with HostReads().counting() as reads:
        read()
    assert sum(reads.counts.values()) == 1, reads.counts


def test_work_on_the_device_counts_nothing() -> None:
    with HostReads().counting() as reads:
        norm = torch._foreach_norm([VECTOR, VECTOR])[0]
        torch.where(norm < VECTOR, VECTOR, 0.0).cumsum(0).max(dim=0)
        torch.cat([VECTOR, torch.stack([norm])]).isfinite().any()
        VECTOR.to(torch.float64).clone().mul_(2.0)
    assert not reads.counts


def test_counting_leaves_no_trace() -> None:
    before = {name: getattr(torch.Tensor, name) for name in ("item", "cpu", "__bool__", "__array__")}
    with HostReads().counting():
        pass
    assert {name: getattr(torch.Tensor, name) for name in before} == before


def test_two_copies_of_one_tensor_are_two_reads() -> None:
    with HostReads().counting() as reads:
        VECTOR.cpu()
        VECTOR.cpu()
    assert reads.counts == {"cpu": 2}


def test_contenders_take_turns_and_only_rounds_are_compared() -> None:
    calls: list[str] = []
    works = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    seconds = timing.interleave(works, rounds=5, calls=3, prepare=lambda: calls.append("prepare"))
    assert [len(seconds[name]) for name in works] == [5, 5]
    assert calls[::2] == ["prepare"] * 30
    for start in range(0, 30, 6):
        turn = calls[1::2][start : start + 6]
        assert turn in (["a"] * 3 + ["b"] * 3, ["b"] * 3 + ["a"] * 3)
    assert timing.ratios({"a": [2.0, 9.0], "b": [1.0, 3.0]}, "a", "b") == [2.0, 3.0]


def test_a_figure_is_median_and_quartiles() -> None:
    figure = timing.Figure.of("step", "mlp", "dynguard", "x", [5.0, 1.0, 2.0, 4.0, 3.0], ms=7.0)
    assert (figure.low, figure.median, figure.high) == (2.0, 3.0, 4.0)
    assert figure.notes == {"ms": 7.0}


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("mlp", 4 * (1024 * 1024 + 1024), 8),
        ("narrow", 100 * (64 * 64 + 64), 200),
        ("gpt", 6 * (12 * 384 * 384 + 13 * 384) + (2 * 256 + 64 + 2) * 384, 6 * 12 + 5),
        ("conv", 27 * 32 + 288 * 64 + 576 * 128 + 2 * (32 + 64 + 128) + 1290, 11),
    ],
)
def test_workloads_are_the_models_they_say(name: str, parameters: int, tensors: int) -> None:
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model = workload.build()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(list(model.parameters())) == tensors
    loss = workload.loss(model, workload.draw())
    torch.autograd.backward(loss)
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
