"""Evaluating a batch once more: the order of the parameters, and that nothing of it stays."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dynguard import Finding
from dynguard.torch.attribution import attribute, forward_order


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
    return attribute({"": model}, loss_fn, model, [batch], step=0, source="", **options)


def one(findings: list[Finding]) -> Finding:
    assert [f.kind for f in findings] == ["nan_forward"]
    return findings[0]


def ramp() -> Tensor:
    return torch.arange(16.0).reshape(4, 4) / 10


# -- the order of the forward


class Disordered(nn.Module):
    """Registers its modules in another order than it runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 4)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.first = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.token)
        out: Tensor = self.head(self.first(self.rnn(x[None])[0][0]))
        return out


def test_parameters_come_in_the_order_of_their_use() -> None:
    model = Disordered()
    order = forward_order({"": model}, mean_output, model, (ramp(),))
    assert order[:3] == ["token", "first.weight", "first.bias"] or order[:3] == ["token", "first.bias", "first.weight"]
    assert set(order[3:7]) == {f"rnn.{name}" for name, _ in model.rnn.named_parameters()}
    assert set(order[7:]) == {"head.weight", "head.bias"}


def test_the_order_of_several_models_with_a_tied_weight() -> None:
    models = {"dec": nn.Linear(4, 8, bias=False), "enc": nn.Embedding(8, 4), "up": nn.Linear(4, 4, bias=False)}
    models["dec"].weight = models["enc"].weight  # type: ignore[assignment]  # both are parameters
    order = forward_order(models, lambda m, b: m["dec"](m["up"](m["enc"](b))).sum(), models, torch.tensor([1]))
    assert order == ["dec.weight", "up.weight"]


def test_the_order_known_when_the_forward_fails_half_way() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("the user's own")

    model = nn.Sequential(nn.Linear(4, 4, bias=False), Call(fail), nn.Linear(4, 1, bias=False))
    assert forward_order({"": model}, mean_output, model, (ramp(),)) == ["0.weight"]


# -- no trace


class Busy(nn.Module):
    """Changes whatever a forward can change."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.codes = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.plain = torch.zeros(3)
        self.register_buffer("mean", torch.tensor([0.0, -0.0, float("nan"), 1.0]))
        self.register_buffer("late", None)
        self.losses: list[Any] = []
        self.last: Any = None
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(x)) + torch.rand(4, generator=self.generator) + random.random() + np.random.rand()
        self.codes.add_(1)
        self.plain.mul_(0).add_(2)
        self.mean.neg_()
        self.late = x
        self.losses.append(x)
        self.last, self.new = x, x
        return x


def state_of(model: Busy, batch: tuple[Tensor, ...]) -> list[Any]:
    """All that Busy changes, as bytes and identities."""
    tensors = [*model.state_dict().values(), model.plain, *batch, torch.get_rng_state(), model.generator.get_state()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    flags = [m.training for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    objects = [id(model.last), id(model.late), *map(id, model.losses), *(id(p.grad) for p in model.parameters())]
    numbers = [str(random.getstate()), str(np.random.get_state()), "new" in vars(model), torch.is_grad_enabled()]
    modes = [torch.is_autocast_cache_enabled(), torch.backends.mha.get_fastpath_enabled()]
    return [[t.contiguous().numpy().tobytes() for t in tensors], flags, hooks, objects, numbers, modes]


@pytest.mark.parametrize("ending", ["finite", "fault", "error", "memory", "exit"])
def test_everything_is_put_back_bit_for_bit(ending: str) -> None:
    model = Busy()
    model.norm.register_forward_hook(lambda *_: None)
    (model.norm(ramp()).pow(2).sum()).backward()
    batch = (ramp(), torch.ones(4))
    calls = 0

    def loss_fn(m: Any, b: Any) -> Tensor:
        nonlocal calls
        calls += 1
        b[0].mul_(3)
        out: Tensor = m(b[0])
        with torch.enable_grad():
            m.norm.weight.sum().backward()
        m.eval()
        if ending == "error":
            raise ValueError("the user's own")
        if ending == "memory":
            raise torch.OutOfMemoryError("no more")
        if ending == "exit":
            raise KeyboardInterrupt
        return out.sum() / (0.0 if ending == "fault" else 1.0)

    before = state_of(model, batch)
    if ending == "exit":
        with pytest.raises(KeyboardInterrupt):
            blame(model, batch, loss_fn)
    else:
        assert [f.kind for f in blame(model, batch, loss_fn)] == (["nan_forward"] if ending == "fault" else [])
    assert calls == 1
    assert state_of(model, batch) == before
    assert before[-1] == [True, True]  # as torch has them


def test_training_goes_on_inside_the_autocast_in_which_it_was_looked() -> None:
    model = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert blame(model, (ramp(),)) == []
        model(ramp()).float().sum().backward()
    assert model.weight.grad is not None


def test_the_users_autocast_can_be_given() -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(1, 1))
    nn.init.constant_(model[1].weight, 1000.0)
    batch = (torch.tensor([[1000.0]]),)
    assert blame(model, batch) == []
    found = one(blame(model, batch, autocast=lambda: torch.autocast("cpu", dtype=torch.float16)))
    assert (found.subject, found.value("autocast"), found.value("dtype")) == ("1", "float16", "float16")


def test_an_iterator_is_left_alone() -> None:
    def numbers() -> Iterator[Tensor]:
        yield ramp()

    batch = numbers()
    assert blame(nn.Linear(4, 4), batch, lambda m, b: m(next(b)).sum() / 0.0) == []
    assert blame(nn.Linear(4, 4), [batch], lambda m, b: m(next(b[0])).sum() / 0.0) == []
    assert torch.equal(next(batch), ramp())


def test_compiled_modules_are_looked_into_and_stay_compiled() -> None:
    compiled = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    for whole in (False, True):
        inner = nn.Sequential(nn.Linear(4, 4), Call(lambda x: (x - 100).log()))
        if not whole:
            inner = torch.compile(inner, backend=backend, fullgraph=True)  # type: ignore[assignment]  # a wrapper
        model: Any = nn.Sequential(nn.Identity(), inner)
        if whole:
            model = torch.compile(model, backend=backend, fullgraph=True)
        model(ramp())
        before = compiled
        assert one(blame(model, (ramp(),))).subject == "1.1"
        model(ramp())
        assert compiled == before > 0


def test_a_module_that_the_users_own_hook_keeps_from_running() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.inner.register_forward_pre_hook(refuse)

        def forward(self, x: Tensor) -> Tensor:
            try:
                out: Tensor = self.inner(x)
            except ValueError:
                out = (x - 100).sqrt()
            return out

    def refuse(*_: Any) -> None:
        raise ValueError("the user's own")

    assert one(blame(nn.Sequential(nn.Identity(), Tries()), (ramp(),))).subject == "1"


def test_buffers_are_a_cause_where_they_are_read_and_not_written() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    norm.running_var = torch.full((4,), float("nan"))
    assert blame(model, (ramp(),)) == []
    found = one(blame(model.eval(), (ramp(),)))
    assert (found.subject, found.value("names")) == ("1", "1.running_var")
    assert "nan_buffer" in found.premise
    model.train()
    found = one(
        blame(model, (ramp(),), lambda m, b: m[1](m[0](b[0]) * 1e38 * torch.tensor([1, 1, 1, 10.0])).sum() * 10)
    )
    assert found.value("nonfinite_parameters") == 0
    assert "nan_buffer" not in found.premise


def test_weights_in_shards_are_left_alone() -> None:
    model = nn.Sequential(Call(lambda x: (x - 100).sqrt()), nn.Linear(4, 4))
    model[1].weight.ds_id = 0  # how ZeRO-3 marks a parameter of which this rank holds a part
    assert blame(model, (ramp(),)) == []


def test_a_parameter_that_leaves_torch() -> None:
    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * float(self.weight.untyped_storage().nbytes())

    model = nn.ModuleDict({"head": nn.Linear(4, 1, bias=False), "foreign": Foreign()})
    order = forward_order({"": model}, lambda m, b: m["head"](m["foreign"](b)).sum(), model, ramp())
    assert order == ["foreign.weight", "head.weight"]


def test_a_loss_that_takes_gradients_itself() -> None:
    def penalty(m: Any, b: Any) -> Tensor:
        x = b[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(m[0](x).sum(), x, create_graph=True)
        out: Tensor = m[1](gradient)
        return out.sum()

    model = nn.Sequential(nn.Linear(4, 4), Call(lambda x: (x - 100).sqrt()))
    assert one(blame(model, (ramp(),), penalty)).subject == "1"
    assert blame(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (ramp(),), penalty) == []
    assert model[0].weight.grad is None


def test_a_loss_under_vmap() -> None:
    def per_row(m: Any, b: Any) -> Tensor:
        return torch.vmap(lambda x: m(x).log())(b[0] - 100).mean()

    assert one(blame(nn.Sequential(Call(lambda x: x + 1)), (ramp(),), per_row)).subject == "loss_fn"


def test_a_higher_order_operation() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def loss_fn(m: Any, b: Any) -> Tensor:
        x = b[0].reshape(1, 1, 4, 4)
        out: Tensor = m[1](flex.flex_attention(m[0](x), x, x))
        return out.sum()

    model = nn.Sequential(nn.Linear(4, 4), Call(lambda x: (x - 100).sqrt()))
    assert one(blame(model, (ramp(),), loss_fn)).subject == "1"


def test_the_budget_ends_the_search() -> None:
    model = nn.Sequential(Call(lambda x: (x - 100).sqrt()))
    assert blame(model, (ramp(),), budget_s=-1.0) == []


def test_no_other_rank_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4), Call(lambda x: (x - 100).sqrt())))
        assert one(blame(model, (ramp(),))).subject == "1"

        def gathers(m: Any, b: Any) -> Tensor:
            total = b[0].sum()
            torch.distributed.all_reduce(total)
            out: Tensor = m(b[0]).sum()
            return out / total

        with caplog.at_level(logging.DEBUG, "dynguard"):
            assert blame(model, (ramp(),), gathers) == []
        assert "other ranks" in caplog.text
    finally:
        torch.distributed.destroy_process_group()
