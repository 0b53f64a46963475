"""Where a non-finite step began: the entries of the batch, else the module that first made one in forward order.

A clean step pays nothing: this runs only once a gradient or the loss was found to be non-finite.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from dynguard.actions import Action
from dynguard.findings import Evidence, Finding, Severity
from dynguard.torch.nonfinite import count, dense, is_finite, is_mask, walk
from dynguard.torch.rerun import Autocast, LossFunction, Producer, rerun

DETECTOR = "attribution"
SHOWN = 10  # tensors of the batch that are told of, and names that are listed
# How finite numbers become non-finite, by torch's name of the operation.
REASONS = {
    "log": "the logarithm of zero or of a negative number",
    "log2": "the logarithm of zero or of a negative number",
    "log10": "the logarithm of zero or of a negative number",
    "sqrt": "the root of a negative number",
    "rsqrt": "the inverse root of zero or of a negative number",
    "div": "a division by zero, or one that overflows",
    "reciprocal": "a division by zero",
    "exp": "an exponential that overflows",
    "softmax": "a row of which every entry is masked",
    "log_softmax": "a row of which every entry is masked",
    "to_copy": "a value beyond the range of the new dtype",
    "mean": "a mean over nothing, or one that overflows",
    "addmm": "a product that overflows",
    "mm": "a product that overflows",
    "bmm": "a product that overflows",
}


def attribute(
    models: Mapping[str, nn.Module],
    loss_fn: LossFunction | None,
    model: Any,
    batches: Sequence[Any],
    *,
    step: int,
    source: str,
    budget_s: float = 30.0,
    autocast: Autocast | None = None,
) -> list[Finding]:
    """``nan_input`` and ``nan_forward`` findings of a step whose loss or gradients are non-finite.

    Args:
        models: modules by key ("" for a single one), as their parameters are named.
        loss_fn: ``(model, batch) -> loss``; without it only the batches are looked at.
        model: what ``loss_fn`` is given; of a DistributedDataParallel, the module inside.
        batches: the observed batches by micro-batch.
        step: of the findings.
        source: of the findings.
        budget_s: seconds after which the search is given up.
        autocast: makes the context that the user's forward ran in; by default the state of the caller holds.

    Returns:
        Nothing where the whole forward is finite or could not be repeated: no guess is made.
    """
    deadline = time.monotonic() + budget_s
    common = {"step": step, "source": source}
    inputs = list(_bad_inputs(batches, common, deadline))
    if loss_fn is None or model is None:
        return inputs
    for micro, batch in enumerate(batches):
        found = rerun(models, loss_fn, model, batch, deadline, autocast=autocast).found
        if found is not None:
            place = {} if len(batches) == 1 else {"micro_batch": micro}
            return [_bad_forward(found, place, common), *(_beside(finding, found) for finding in inputs)]
    return inputs


def forward_order(
    models: Mapping[str, nn.Module],
    loss_fn: LossFunction,
    model: Any,
    batch: Any,
    *,
    budget_s: float = 30.0,
    autocast: Autocast | None = None,
) -> list[str]:
    """Names of the parameters in the order in which the forward uses them, without those of modules that don't run.

    A tied parameter comes under its first name, as elsewhere. Empty where the forward can't be repeated, and what was
    seen so far where it fails on its way.
    """
    deadline = time.monotonic() + budget_s
    return rerun(models, loss_fn, model, batch, deadline, autocast=autocast, looking=False).order


def _finding(common: Mapping[str, Any], numbers: Mapping[str, Any], **fields: Any) -> Finding:
    evidence = tuple(Evidence(name=name, value=value) for name, value in numbers.items() if value is not None)
    words = {"severity": Severity.ERROR, "action": Action.SKIP, "confidence": 1.0, "detector": DETECTOR}
    return Finding.model_validate({**words, **common, **fields, "evidence": evidence})


def _amount(numbers: Mapping[str, Any]) -> str:
    """In words, e.g. ``3 NaN and 1 infinite of 64 entries``."""
    parts = [
        f"{numbers[key]} {word}" for key, word in (("nan_entries", "NaN"), ("inf_entries", "infinite")) if numbers[key]
    ]
    return f"{' and '.join(parts)} of {numbers['entries']} entries"


def _places(numbers: Mapping[str, Any]) -> str:
    parts = []
    for key in ("columns", "rows"):
        hit = numbers.get(f"{key}_hit", 0)
        if hit:
            parts.append(f"{hit} {key}" if hit > SHOWN else f"{key[:-1] if hit == 1 else key} {numbers[key]}")
    return f" ({'; '.join(parts)})" if parts else ""


def _bad_inputs(batches: Sequence[Any], common: Mapping[str, Any], deadline: float) -> Iterator[Finding]:
    """One finding per tensor of a batch that has non-finite entries, 10 at most. An additive mask is not a fault."""
    left = SHOWN
    for micro, batch in enumerate(batches):
        for path, leaf in walk(batch):
            if not left or time.monotonic() > deadline:
                return
            values = dense(leaf)
            if values is not None and not is_finite(values) and not is_mask(values):
                left -= 1
                yield _bad_input(path, count(values), micro, len(batches), common)


def _bad_input(path: str, numbers: dict[str, Any], micro: int, micros: int, common: Mapping[str, Any]) -> Finding:
    which = f" of micro-batch {micro} of {micros}" if micros > 1 else ""
    return _finding(
        common,
        numbers | {"micro_batch": micro if micros > 1 else None},
        kind="nan_input",
        subject=path,
        premise=f"{path}{which} has {_amount(numbers)} that are not finite{_places(numbers)}",
        implies="the data is bad, not the model: one such entry that is not masked makes the loss and all gradients "
        "non-finite",
        expected_effect="the weights do not learn from this batch; mend or drop these entries where the data is loaded",
    )


def _beside(finding: Finding, found: Producer) -> Finding:
    """A bad input next to a module that fails on finite inputs: such entries are often masked (missing labels)."""
    return finding.model_copy(
        update={
            "severity": Severity.WARNING,
            "action": Action.WARN,
            "confidence": None,
            "premise": f"{finding.premise}; they are not what {found.name!r} was given",
        }
    )


def _bad_forward(found: Producer, place: Mapping[str, Any], common: Mapping[str, Any]) -> Finding:
    cause = [*found.parameters, *found.buffers]
    numbers = {
        **found.numbers, **place,
        "module_type": None if found.module is None else type(found.module).__name__,
        "operation": found.operation or None,
        "handed_to": found.handed or None,
        "nonfinite_parameters": len(found.parameters),
        "nonfinite_buffers": len(found.buffers) or None,
        "names": ", ".join(cause[:SHOWN]) or None,
    }  # fmt: skip
    return _finding(
        common,
        numbers,
        kind="nan_forward",
        subject=found.name,
        rows=found.rows,
        premise=_premise(found, cause),
        implies="the fault is older than this batch: every further batch that uses these values fails alike"
        if cause
        else "all that is computed from these numbers is lost, and so are the gradients of this batch",
        expected_effect="the update is dropped, but only going back to finite values helps"
        if cause
        else "weights and optimizer state stay as they were before this batch",
    )


def _premise(found: Producer, cause: Sequence[str]) -> str:
    kind = "" if found.module is None else f" ({type(found.module).__name__})"
    again = found.numbers.get("call")
    nth = f" in its call {again + 1}" if again else ""
    who = "the loss function, outside of any module," if found.module is None else f"{found.name!r}{kind}{nth}"
    what = (
        f"what it hands to {found.handed!r}" if found.handed else "the loss" if found.module is None else "its output"
    )
    text = f"{who} is the first in forward order to make non-finite numbers of inputs that have none: {what} has "
    text += f"{_amount(found.numbers)}{_places(found.numbers)}"
    if cause:
        kinds = " and ".join([*["nonfinite_param"] * bool(found.parameters), *["nan_buffer"] * bool(found.buffers)])
        more = f" and {len(cause) - SHOWN} more" if len(cause) > SHOWN else ""
        return f"{text}, as {', '.join(cause[:SHOWN])}{more} hold non-finite values themselves ({kinds})"
    if found.operation:
        reason = REASONS.get(found.operation.lstrip("_"))
        text += f", from {found.operation.lstrip('_')}" + (f": {reason}" if reason else "")
    return text
