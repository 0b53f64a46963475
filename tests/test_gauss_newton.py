"""The diagonal of the Gauss-Newton matrix by sampled labels, against J^T H J written out with torch.func."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

from dynguard.torch.gauss_newton import SampledLabels, diagonal, part
from dynguard.torch.probe import Probe, ProbeError

DRAWS = 500


@pytest.fixture(autouse=True)
def one_thread():
    """Nets this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def exact(model, x, loss_of_output):
    """J^T H J of the whole batch, its diagonal, flat, by reverse-mode Jacobian and dense output Hessian."""
    named = {n: p.detach().double() for n, p in model.double().named_parameters()}

    def out(p):
        return functional_call(model, p, (x.double(),)).flatten()

    jacobian = jacrev(out)(named)
    shape = model(x.double()).shape
    h = jacrev(jacrev(lambda z: loss_of_output(z.view(shape))))(out(named)).detach()
    rows = []
    for j in jacobian.values():
        flat = j.reshape(j.shape[0], -1).detach()
        rows.append(torch.einsum("ik,ij,jk->k", flat, h, flat))
    model.float()
    return torch.cat(rows)


def drawn(model, loss_fn, batch, draws=DRAWS):
    """Without a Probe, whose care costs more than these nets do."""
    weights, rows = list(model.parameters()), []
    for seed in range(draws):
        with SampledLabels(seed):
            found = torch.autograd.grad(loss_fn(model, batch), weights)
        rows.append(torch.cat([g.flatten() for g in found]).double().square())
    return torch.stack(rows)


def net(outputs, seed=0, inputs=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))


def dense(outputs=3, dims=()):
    """Logits (N, C, *dims) from a net."""
    model = net(outputs * (2 if dims else 1))
    return nn.Sequential(*model, nn.Unflatten(1, (outputs, 2))) if dims else model


G = torch.Generator().manual_seed(3)
X = torch.randn(6, 4, generator=G)
Y = torch.randint(0, 3, (6,), generator=G)
Y2 = torch.randint(0, 3, (6, 2), generator=G)
IGNORED = torch.where(torch.arange(6) % 3 == 0, torch.tensor(-100), Y)
P = torch.softmax(torch.randn(6, 3, generator=G), 1)
B = torch.rand(6, 2, generator=G).round()
R = torch.randn(6, 2, generator=G)
W = torch.tensor([0.5, 1.0, 3.0])

CASES = {
    "cross_entropy": (dense, lambda z: F.cross_entropy(z, Y)),
    "sum": (dense, lambda z: F.cross_entropy(z, Y, reduction="sum")),
    "none, masked by the caller": (
        dense,
        lambda z: (F.cross_entropy(z, Y, reduction="none") * torch.tensor([1.0, 0, 1, 2, 0, 1])).sum() / 5,
    ),
    "scaled and added up": (dense, lambda z: 0.25 * F.cross_entropy(z, Y) + 3 * F.cross_entropy(z[:2], Y[:2])),
    "ignored": (dense, lambda z: F.cross_entropy(z, IGNORED)),
    "dimensions": (lambda: dense(dims=(2,)), lambda z: F.cross_entropy(z, Y2)),
    "weights": (dense, lambda z: F.cross_entropy(z, IGNORED, weight=W.to(z.dtype))),
    "smoothing": (dense, lambda z: F.cross_entropy(z, Y, weight=W.to(z.dtype), label_smoothing=0.2)),
    "probabilities": (dense, lambda z: F.cross_entropy(z, P.to(z.dtype))),
    "weighted probabilities": (dense, lambda z: F.cross_entropy(z, P.to(z.dtype), weight=W.to(z.dtype))),
    "nll_loss": (dense, lambda z: nn.NLLLoss()(F.log_softmax(z, 1), Y)),
    "nll_loss, weights": (dense, lambda z: F.nll_loss(F.log_softmax(z, 1), IGNORED, weight=W.to(z.dtype))),
    "binary": (lambda: net(2), lambda z: nn.BCEWithLogitsLoss()(z, B.to(z.dtype))),
    "binary, pos_weight": (
        lambda: net(2),
        lambda z: F.binary_cross_entropy_with_logits(z, B.to(z.dtype), pos_weight=torch.tensor([4.0, 0.5]).to(z)),
    ),
    "binary on probabilities": (lambda: net(2), lambda z: F.binary_cross_entropy(torch.sigmoid(z), B.to(z.dtype))),
    "mse": (lambda: net(2), lambda z: F.mse_loss(z, R.to(z.dtype))),
    "mse by the old argument": (lambda: net(2), lambda z: F.mse_loss(z, R.to(z.dtype), size_average=False)),
    "mse, weight": (lambda: net(2), lambda z: F.mse_loss(z, R.to(z.dtype), weight=torch.arange(12.0).view(6, 2).to(z))),
}


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_mean_of_many_draws_is_the_exact_diagonal(name):
    make, loss = CASES[name]
    model = make()
    truth = exact(model, X, loss)
    draws = drawn(model, lambda m, b: loss(m(b)), X)
    error = draws.std(0) / DRAWS**0.5
    z = (draws.mean(0) - truth) / error.clamp_min(1e-12 * truth.max())
    assert z.abs().max() < 4.5, name  # of some 40 entries
    assert abs(draws.sum(1).mean() - truth.sum()) < 4 * draws.sum(1).std() / DRAWS**0.5
    assert torch.corrcoef(torch.stack([draws.mean(0), truth]))[0, 1] > 0.9


def test_for_a_plain_mean_it_is_the_published_estimator():
    """Sophia's B * g * g with g the gradient of the mean loss at the labels that were drawn."""
    model = net(3)
    labels = SampledLabels(seed=5)
    found = Probe(model, lambda m, b: F.cross_entropy(m(b), Y), X, list(model.parameters())).gradients(within=labels)
    assert (labels.calls, labels.terms) == (1, 6)
    # There are 3^6 ways to label the batch: exactly one of them must explain the gradient.
    candidates = torch.cartesian_prod(*[torch.arange(3)] * 6)
    logits = model(X)
    score = (torch.softmax(logits, 1)[None] - F.one_hot(candidates, 3)) / 6  # d mean loss / d logits
    bias = score.sum(1)  # the gradient of the last bias
    hidden = torch.einsum("nbc,bh->nch", score, model[:2](X))
    match = (6 * bias**2 - found[-1] ** 2).abs().sum(1) + (6 * hidden**2 - found[-2] ** 2).abs().sum((1, 2))
    assert (match < 1e-5).sum() == 1


@pytest.mark.parametrize("draws", [200])
def test_its_mean_ranks_entries_as_the_exact_diagonal_does(draws):
    model = net(3)
    loss = CASES["cross_entropy"][1]
    truth, found = exact(model, X, loss), drawn(model, lambda m, b: loss(m(b)), X, draws).mean(0)
    assert torch.corrcoef(torch.stack([truth, found]))[0, 1] > 0.95
    ranks = torch.stack([t.argsort().argsort().double() for t in (truth, found)])
    assert torch.corrcoef(ranks)[0, 1] > 0.9


def test_random_states_are_the_users_and_seeds_repeat():
    model = nn.Sequential(nn.Dropout(0.5), net(3))
    probe = Probe(model, lambda m, b: F.cross_entropy(m(b), Y), X, list(model.parameters()))
    before = torch.get_rng_state()
    one, again, other = diagonal(probe, 1), diagonal(probe, 1), diagonal(probe, 2)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_predictions_without_gradient_are_left_alone():
    with SampledLabels() as labels:
        assert F.cross_entropy(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)) == pytest.approx(0.6931472)
    assert labels.calls == 0


def test_a_loss_of_another_kind_is_refused():
    model = net(2)
    with pytest.raises(ProbeError, match="none of the losses"):
        diagonal(Probe(model, lambda m, b: (m(b) - R).abs().mean(), X, list(model.parameters())))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_gives_float32(kind):
    model = net(3).to(kind)
    probe = Probe(model, lambda m, b: F.cross_entropy(m(b), Y), X.to(kind), list(model.parameters()))
    found = diagonal(probe)
    assert all(d.dtype == torch.float32 and d.isfinite().all() for d in found)


def test_all_ignored_is_not_finite():
    model = net(3)
    probe = Probe(model, lambda m, b: F.cross_entropy(m(b), torch.full((6,), -100)), X, list(model.parameters()))
    assert not any(d.isfinite().all() for d in diagonal(probe))


def test_part_of_a_batch():
    x, y = torch.arange(20).view(10, 2), torch.arange(10)
    half = part({"x": x, "more": [y, None], "n": 3}, 0.5)
    assert half["x"].tolist() == x[:5].tolist()
    assert half["more"][0].tolist() == [0, 1, 2, 3, 4]
    assert (half["more"][1], half["n"]) == (None, 3)
    for whole in ((x, y[:4]), (x[:3], y[:3]), (x, torch.tensor(1.0)), (x, "text"), [], None, (x, [object()])):
        assert part(whole, 0.5) is whole
    assert part((x, y), 1.0)[0] is x
