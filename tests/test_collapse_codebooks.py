"""Codebooks under the ``collapse`` plugin: counted use of planted codes."""

import pytest
import torch
from torch import nn

from dynguard_plugins.embeddings.collapse import Collapse


def train(watch, model, loss_of, batches):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    plugin = Collapse(forwards=10, every=50)
    flow = watch(model, optimizer, plugins=[plugin])
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    flow.close()
    return flow, plugin


class Quantised(nn.Module):
    def __init__(self, name="codebook"):
        super().__init__()
        torch.manual_seed(0)
        self.add_module(name, nn.Embedding(64, 4))
        self.name = name
        self.head = nn.Linear(4, 4)

    def forward(self, ids):
        return self.head(getattr(self, self.name)(ids))


class VectorQuantize(nn.Module):
    """Without an embedding of its own: gives what it chose."""

    def __init__(self):
        super().__init__()
        self.codebook_size = 64
        self.codes = nn.Parameter(torch.randn(64, 4))

    def forward(self, ids):
        return self.codes[ids], ids, self.codes.new_zeros(())


def codes(high, steps=300):
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, high, (64,), generator=g) for _ in range(steps)]


def told_codes(watch, model, batches, take=lambda out: out):
    flow, plugin = train(watch, model, lambda m, b: take(m(b)).square().mean(), batches)
    return [f for f in flow.findings if f.kind == "codebook_collapse"], plugin


@pytest.mark.parametrize(("model", "take", "name"), [
    (Quantised, lambda out: out, "codebook"), (lambda: Quantised("quantizer"), lambda out: out, "quantizer"),
    (lambda: nn.Sequential(VectorQuantize()), lambda out: out[0], "0"),
])  # fmt: skip
def test_a_codebook_of_which_three_codes_are_used(watch, model, take, name):
    (finding,), plugin = told_codes(watch, model(), codes(3), take)
    assert (finding.subject, finding.value("codes")) == (name, 64)
    assert finding.value("perplexity") == pytest.approx(3, abs=0.05)
    none, plugin = told_codes(watch, model(), codes(64), take)
    assert not none
    (table,) = [t for t in plugin.summarize().tables if t.title == "Codebooks"]
    assert table.rows[0][-1] == pytest.approx(64, rel=0.05)


def test_an_ordinary_table_is_no_codebook(watch):
    none, _ = told_codes(watch, Quantised("words"), codes(3))
    assert not none
