"""The largest eigenvalue from a few gradients, against dense Hessians."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dynguard.torch.curvature import Curvature, sharpness
from dynguard.torch.probe import Probe, ProbeError


def quadratic(spectrum):
    """(parameter, loss) whose Hessian has exactly these eigenvalues."""
    g = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), generator=g, dtype=torch.float64))
    hessian = q @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ q.T
    model = nn.ParameterList([nn.Parameter(torch.randn(len(spectrum), generator=g, dtype=torch.float64))])
    return model, lambda m, b: 0.5 * m[0] @ hessian @ m[0]


@pytest.mark.parametrize("method", ["finite_difference", "double_backward"])
@pytest.mark.parametrize("spectrum", [[9.0, 3.0, 1.0, 0.1], [2.0, -5.0, 1.0, 0.5], [-1.0, -2.0, -3.0, -4.0]])
def test_the_largest_algebraic_eigenvalue_of_a_known_spectrum(spectrum, method):
    """A spectrum whose largest magnitude is negative: -5 must not read as 5."""
    model, loss_fn = quadratic(spectrum)
    found = sharpness(Curvature(Probe(model, loss_fn, None, list(model)), method=method), tolerance=1e-6)
    assert found.value == pytest.approx(max(spectrum), rel=1e-4)
    assert found.residual < 1e-3


def dense(model, loss_fn, batch, scales=None):
    """The matrix itself, by differentiating twice; a (d, d) array of float64."""
    parameters = list(model.parameters())
    shapes = [p.shape for p in parameters]
    flat = torch.cat([p.detach().flatten() for p in parameters])

    def loss(vector):
        parts = torch.split(vector, [s.numel() for s in shapes])
        named = {n: v.view(s) for (n, _), v, s in zip(model.named_parameters(), parts, shapes, strict=True)}
        return loss_fn(lambda x: torch.func.functional_call(model, named, (x,)), batch)

    at = flat.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(at), at, create_graph=True)
    rows = [torch.autograd.grad(g, at, retain_graph=True)[0] for g in gradient]
    hessian = torch.stack(rows).double().numpy()
    roots = np.ones(len(flat)) if scales is None else torch.cat([s.flatten() for s in scales]).sqrt().double().numpy()
    return roots[:, None] * hessian * roots[None]


@pytest.mark.parametrize("preconditioned", [False, True])
def test_warm_started_checks_of_a_training_net_are_within_five_percent(preconditioned):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(64, 5), torch.randint(0, 3, (64,))
    batch = (x, y)

    def loss_fn(m, b):
        return F.cross_entropy(m(b[0]), b[1])

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    vector, errors = None, []
    for step in range(60):
        loss_fn(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            scales = None
            if preconditioned:
                scales = [1 / (optimizer.state[p]["exp_avg_sq"].sqrt() + 1e-3) for p in model.parameters()]
            before = [p.detach().clone() for p in model.parameters()]
            found = sharpness(
                Curvature(Probe(model, loss_fn, batch, list(model.parameters())), scales=scales), start=vector
            )
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            if vector is not None:
                assert found.gradients == 4
                exact = np.linalg.eigvalsh(dense(model, loss_fn, batch, scales))[-1]
                errors.append(abs(found.value / exact - 1))
            vector = found.vector
    assert np.median(errors) < 0.05


def test_kernels_without_a_second_derivative_refuse_and_differences_do_not():
    torch.manual_seed(0)
    model = nn.Linear(8, 24)
    x = torch.randn(2, 2, 6, 8)

    def loss_fn(m, b):
        q, k, v = m(b).chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v).square().mean()

    probe = Probe(model, loss_fn, x, list(model.parameters()))
    with pytest.raises(ProbeError, match="not implemented"):
        sharpness(Curvature(probe, method="double_backward"))
    found = sharpness(Curvature(probe)).value
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = sharpness(Curvature(probe, method="double_backward")).value
    assert found == pytest.approx(exact, rel=0.02)


def test_what_is_not_finite_is_not_measured():
    model = nn.ParameterList([nn.Parameter(torch.ones(3))])
    probe = Probe(model, lambda m, b: m[0].sum() * float("nan"), None, list(model))
    with pytest.raises(ProbeError):
        sharpness(Curvature(probe))


def test_two_steps_of_the_difference_agree_and_leave_the_weights_to_the_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
    batch = (torch.randn(64, 6), torch.randint(0, 3, (64,)))
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]

    def loss_fn(m, b):
        return F.cross_entropy(m(b[0]), b[1])

    exact = np.linalg.eigvalsh(dense(model, loss_fn, batch))[-1]
    for step in (None, 1e-4, 1e-3):
        found = sharpness(Curvature(Probe(model, loss_fn, batch, parameters), step=step), tolerance=0.01)
        assert found.value == pytest.approx(exact, rel=0.01)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_weights_are_put_back_when_the_loss_fails_on_moved_ones():
    model = nn.ParameterList([nn.Parameter(torch.tensor([0.1, 0.7, -0.3]))])
    before = model[0].detach().clone()

    def loss_fn(m, b):
        if not torch.equal(m[0], before):
            raise RuntimeError("not here")
        return m[0].square().sum()

    with pytest.raises(ProbeError, match="not here"):
        sharpness(Curvature(Probe(model, loss_fn, None, list(model))))
    assert torch.equal(model[0], before)


@pytest.mark.parametrize("spectrum", [[3.0], [2.0, 2.0, 2.0], [0.0, 0.0]])
def test_spectra_that_end_the_iteration_early(spectrum):
    model, loss_fn = quadratic(spectrum)
    found = sharpness(Curvature(Probe(model, loss_fn, None, list(model)), method="double_backward"))
    assert found.value == pytest.approx(max(spectrum), abs=1e-9)
    assert found.residual < 1e-6


def test_weights_in_half_precision_refuse_differences():
    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    with pytest.raises(ProbeError, match="half precision"):
        Curvature(Probe(model, lambda m, b: m[0].square().sum(), None, list(model)))
    with pytest.raises(ProbeError, match="entries"):
        Curvature(Probe(model, lambda m, b: m[0].square().sum(), None, [nn.Parameter(torch.zeros(0))]))
