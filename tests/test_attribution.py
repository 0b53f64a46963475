"""Where a non-finite step began, on faults planted in known places."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynguard import Action, Finding, Severity
from dynguard.torch.attribution import attribute
from dynguard.torch.names import modules_by_key

NAN, INF = float("nan"), float("inf")


class Call(nn.Module):
    """A module without parameters that applies a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Tensor:
        return self.function(*args)


def mean_output(model: Any, batch: Any) -> Tensor:
    out: Tensor = model(batch[0])
    return out.float().mean()


def blame(model: nn.Module, batch: Any, loss_fn: Any = mean_output, **options: Any) -> list[Finding]:
    return attribute(modules_by_key(model), loss_fn, model, [batch], step=7, source="main", **options)


def one(findings: list[Finding], kind: str = "nan_forward") -> Finding:
    assert [f.kind for f in findings] == [kind]
    return findings[0]


def values(finding: Finding) -> dict[str, Any]:
    return {item.name: item.value for item in finding.evidence}


def ramp(rows: int = 4, columns: int = 4) -> Tensor:
    return torch.arange(float(rows * columns)).reshape(rows, columns) / 10


# -- the module

FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "root of a negative number": (lambda x: (x - 100).sqrt(), "sqrt", "nan_entries"),
    "log of zero": (lambda x: (x * 0).log() + x, "log", "inf_entries"),
    "zero by zero": (lambda x: (x - x) / (x - x), "div", "nan_entries"),
    "in place": (lambda x: x.clone().sub_(100).log_(), "log", "nan_entries"),
    "cast to fp16": (lambda x: (x + 1e6).half(), "_to_copy", "inf_entries"),
    "exponential": (lambda x: (x + 1e3).exp(), "exp", "inf_entries"),
    "mean over nothing": (lambda x: x[x > 1e9].mean() + x, "mean", "nan_entries"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_module_is_named_in_a_nested_net(name: str) -> None:
    fault, operation, entries = FAULTS[name]
    inner = nn.Sequential(Call(lambda x: x + 1), Call(fault), nn.ReLU(inplace=True))
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Identity(), inner), nn.Dropout(0.1))
    found = one(blame(model, (ramp(),)))
    assert found.subject == "1.1.1"
    assert (found.severity, found.action, found.step, found.source) == (Severity.ERROR, Action.SKIP, 7, "main")
    assert (found.detector, found.confidence) == ("attribution", 1.0)
    assert found.value("operation") == operation
    assert found.value(entries) == found.value("entries") == 16
    assert found.value("nonfinite_parameters") == 0
    assert "'1.1.1' (Call)" in found.premise


def test_rows_and_columns_of_the_output_are_counted() -> None:
    found = one(blame(nn.Sequential(Call(lambda x: 1 / (x - 0.6))), (ramp(),)))  # 0.6 is entry [1, 2]
    assert values(found) | {"inf_entries": 1, "rows": "1", "columns": "2", "rows_hit": 1, "columns_hit": 1} == values(
        found
    )


def test_a_sequence_that_is_all_padding() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor, pad: Tensor) -> Tensor:
            out: Tensor = self.head(self.attn(x, x, x, key_padding_mask=pad, need_weights=True)[0])
            return out

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return model(*batch)[~batch[1]].mean()  # finite: only the gradient is not

    pad = torch.zeros(3, 5, dtype=torch.bool)
    pad[:, 3:] = True
    model = Net()
    assert blame(model, (torch.randn(3, 5, 8), pad), loss_fn) == []
    pad[1] = True
    found = one(blame(model, (torch.randn(3, 5, 8), pad), loss_fn))
    assert (found.subject, found.value("rows"), found.value("operation")) == ("attn", "1", "_softmax")
    assert "masked" in found.premise


class Scores(nn.Module):
    """Attention by separate modules, of which ``scores`` hands on minus infinity among other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = Call(lambda x, mask: (x @ x.mT).masked_fill(mask, -INF))
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.softmax(self.scores(x, mask)) @ x
        return out


def test_infinities_that_mask_are_no_fault_until_a_row_has_nothing_else() -> None:
    mask = torch.ones(4, 4).triu(1).bool()
    assert blame(Scores(), (ramp(), mask), lambda m, b: m(*b).sum()) == []
    mask[2] = True
    found = one(blame(Scores(), (ramp(), mask), lambda m, b: m(*b).sum()))
    assert (found.subject, found.value("rows")) == ("softmax", "2")


class Masked(nn.Module):
    """Softmax over scores to which ``make(x, own, given)`` adds a mask, of its own or from the batch."""

    own: Tensor

    def __init__(self, make: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("own", torch.full((4, 4), -INF).triu(1) - torch.arange(4.0))  # with the slopes of ALiBi
        self.make = make
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        out: Tensor = self.softmax(self.make(x, self.own, given))
        return out


def uninitialised(x: Tensor, own: Tensor, given: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x).masked_fill(own.isinf(), -INF)


MASKS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "buffer": lambda x, own, given: x + own,
    "input": lambda x, own, given: x + given,
    "computed": lambda x, own, given: x + own.isfinite().float().log(),
    "where": lambda x, own, given: torch.where(own.isinf(), torch.tensor(-INF), x),
    "in place": lambda x, own, given: x.clone().masked_fill_(own.isinf(), -INF),
    "in memory that was never written": uninitialised,
}
GIVEN = torch.full((4, 4), -INF).triu(1)


@pytest.fixture
def memory_is_nan() -> Iterator[None]:
    """torch.empty gives memory full of NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_is_nan")
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_all_sorts(name: str) -> None:
    model, batch = nn.ModuleDict({"net": Masked(MASKS[name])}), (ramp(), GIVEN)
    model["root"] = Call(torch.sqrt)
    assert blame(model, batch, lambda m, b: m["net"](*b).sum()) == []
    assert one(blame(model, batch, lambda m, b: m["net"](*b).sum() / 0)).subject == "loss_fn"
    # Other infinities are not taken for masks because there is one.
    assert one(blame(model, batch, lambda m, b: m["root"](m["net"](*b) - 100).sum())).subject == "root"
    overflow = nn.Sequential(model, Call(lambda x: (x + 1e6).half()), nn.Identity())
    assert one(blame(overflow, batch, lambda m, b: m[1:](m[0]["net"](*b)).float().sum())).subject == "1"
    x = ramp()
    x[0, 0] = INF
    assert one(blame(model, (x, GIVEN), lambda m, b: m["net"](b[0] * 2, b[1]).sum()), "nan_input").subject == "batch[0]"


def test_code_between_the_submodules_is_their_parents() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.lin((x - 100).log())
            return out.nan_to_num()

    found = one(blame(nn.Sequential(nn.Identity(), Block()), (ramp(),)))
    assert (found.subject, found.value("handed_to"), found.value("operation")) == ("1", "1.lin", "log")
    assert one(blame(Block(), (ramp(),))).subject == "Block"  # the model itself has no other name


def test_a_row_of_a_table_that_is_nan_already() -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(10, 3), "out": nn.Linear(3, 1)})
    with torch.no_grad():
        model["emb"].weight[6] = NAN
    loss_fn = lambda m, b: m["out"](m["emb"](b[0])).sum()  # noqa: E731
    assert blame(model, (torch.tensor([1, 2]),), loss_fn) == []
    found = one(blame(model, (torch.tensor([1, 6]),), loss_fn))
    assert (found.subject, found.rows, found.value("names")) == ("emb", (6,), "emb.weight")
    assert "nonfinite_param" in found.premise


def test_a_shared_module_is_told_with_its_call() -> None:
    root = Call(torch.sqrt)
    model = nn.ModuleDict({"root": root, "again": root})
    found = one(blame(model, (ramp(),), lambda m, b: m["again"](m["root"](b[0]) - 1).sum()))
    assert (found.subject, found.value("call")) == ("root", 1)


def test_a_fault_of_the_loss_function_itself() -> None:
    found = one(blame(nn.Linear(4, 4), (ramp(),), lambda m, b: m(b[0]).sum() / (b[0] - b[0]).sum()))
    assert (found.subject, found.value("operation")) == ("loss_fn", "div")
    criterion = nn.CrossEntropyLoss()
    ignored = (ramp(), torch.full((4,), -100))
    found = one(blame(nn.Linear(4, 4), ignored, lambda m, b: criterion(m(b[0]), b[1])))
    assert found.subject == "loss_fn"


def test_a_parameter_used_outside_of_any_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_parameter("scale", nn.Parameter(torch.tensor(NAN)))
    found = one(blame(model, (ramp(),), lambda m, b: (m(b[0]) * m.scale).mean()))
    assert (found.subject, found.value("names"), found.value("nonfinite_parameters")) == ("loss_fn", "scale", 1)


def test_nothing_is_said_where_the_forward_is_finite() -> None:
    model = nn.Linear(4, 4)

    def loss_fn(m: Any, b: Any) -> Tensor:
        distance: Tensor = (m(b[0]) - m(b[0])).pow(2).sum(1).sqrt()  # gradient: infinity by zero
        return distance.mean()

    loss_fn(model, (ramp(),)).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.isnan().all()
    assert blame(model, (ramp(),), loss_fn) == []


def test_memory_that_was_never_written_is_no_fault() -> None:
    model = nn.Sequential(Call(lambda x: torch.empty_like(x).copy_(x)), nn.Linear(4, 4))
    assert blame(model, (ramp(),)) == []


def test_several_models_are_named_by_their_keys() -> None:
    models = {"g": nn.Sequential(nn.Linear(4, 4)), "d": nn.Sequential(Call(lambda x: (x - 100).log()))}
    found = attribute(models, lambda m, b: m["d"](m["g"](b[0])).sum(), models, [(ramp(),)], step=0, source="")
    assert one(found).subject == "d.0"
    both = {**models, "e": models["d"][0]}  # a module has one name
    assert one(attribute(both, lambda m, b: m["e"](b[0]).sum(), both, [(ramp(),)], step=0, source="")).subject == "d.0"


# -- the input

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Item:
    x: Any
    y: Any


class Thing:
    def __init__(self, x: Any) -> None:
        self.x = x
        self.me = self  # a cycle


def holey(column: int = 3) -> Tensor:
    x = ramp(5, 4)
    x[1, column] = x[4, column] = NAN
    return x


CONTAINERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "tensor": (lambda x: x, "batch"),
    "tuple": (lambda x: (ramp(), x), "batch[1]"),
    "dict": (lambda x: {"ids": torch.arange(3), "pixel_values": x}, "batch['pixel_values']"),
    "user dict": (lambda x: UserDict({"a": [ramp(), {"b": x}]}), "batch['a'][1]['b']"),
    "named tuple": (lambda x: Pair(ramp(), x), "batch.y"),
    "dataclass": (lambda x: Item(x, None), "batch.x"),
    "object": (lambda x: [Thing(x)], "batch[0].x"),
    "array": (lambda x: (x.numpy(), "text", 3), "batch[0]"),
    "complex": (lambda x: (x.to(torch.complex64),), "batch[0]"),
    "float8": (lambda x: (x.to(torch.float8_e4m3fn),), "batch[0]"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_input_is_told_as_the_user_would_write_it(name: str) -> None:
    make, path = CONTAINERS[name]
    found = one(attribute({}, None, None, [make(holey())], step=2, source=""), "nan_input")
    assert (found.subject, found.action, found.step) == (path, Action.SKIP, 2)
    assert values(found) | {"nan_entries": 2, "entries": 20, "columns": "3", "rows": "1, 4"} == values(found)
    assert "2 NaN of 20 entries" in found.premise


def test_bad_inputs_are_counted_but_ten_are_listed() -> None:
    x = torch.full((30, 20), NAN)
    found = one(attribute({}, None, None, [x], step=0, source=""), "nan_input")
    assert found.value("columns") == ", ".join(map(str, range(10)))
    assert (found.value("columns_hit"), found.value("rows_hit")) == (20, 30)
    assert "20 columns; 30 rows" in found.premise
    many = attribute(
        {}, None, None, [[torch.tensor([NAN])] * 3 + [torch.tensor([NAN]) for _ in range(30)]], step=0, source=""
    )
    assert [f.subject for f in many] == ["batch[0]"] + [f"batch[{i}]" for i in range(3, 12)]


def test_the_micro_batch_is_told() -> None:
    batches = [(ramp(),), (ramp(),), (holey(),)]
    found = one(attribute({}, None, None, batches, step=0, source=""), "nan_input")
    assert (found.value("micro_batch"), found.subject) == (2, "batch[0]")
    model = nn.Sequential(Call(lambda x: x.sqrt()))
    batches = [(ramp(),), (-ramp(),), (-ramp(),)]
    found = one(attribute({"": model}, mean_output, model, batches, step=0, source=""))
    assert (found.value("micro_batch"), found.subject) == (1, "0")


def test_masks_and_healthy_batches_are_no_bad_input() -> None:
    mask = torch.full((2, 1, 4, 4), -INF).triu(1)
    batch = {
        "mask": mask,
        "half": mask.half(),
        "array": mask.numpy(),
        "x": ramp(),
        "ids": torch.arange(4),
        "none": None,
    }
    assert attribute({}, None, None, [batch], step=0, source="") == []
    assert (
        one(attribute({}, None, None, [{"x": mask + ramp()}], step=0, source=""), "nan_input").subject == "batch['x']"
    )


def test_a_bad_input_that_goes_through_the_model_is_the_only_cause() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    for bad in (NAN, INF):
        x = ramp()
        x[0, 0] = bad
        assert one(blame(model, (x,), lambda m, b: m(b[0] * 2).sum()), "nan_input").subject == "batch[0]"


def test_labels_count_but_not_for_a_module_that_fails_without_them() -> None:
    y = torch.tensor([1.0, NAN, 2.0, NAN])
    healthy, failing = nn.Sequential(nn.Linear(4, 1)), nn.Sequential(nn.Linear(4, 1), Call(lambda x: (x - 100).sqrt()))

    def loss_fn(m: Any, b: Any) -> Tensor:
        known = ~b[1].isnan()
        return F.mse_loss(m(b[0])[known, 0], b[1][known])

    assert one(blame(healthy, (ramp(), y), loss_fn), "nan_input").subject == "batch[1]"
    first, second = blame(failing, (ramp(), y), loss_fn)
    assert (first.kind, first.subject, first.severity) == ("nan_forward", "1", Severity.ERROR)
    assert (second.kind, second.subject, second.severity, second.action) == (
        "nan_input", "batch[1]", Severity.WARNING, Action.WARN,
    )  # fmt: skip
