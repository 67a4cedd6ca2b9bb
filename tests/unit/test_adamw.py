"""`adamw_` against PyTorch's optimizers and against its own equations in float64."""

import math

import pytest
import torch

from lightning_zenflow.adamw import Hyper, adamw_, deferred_lr

SETTINGS = Hyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1)


def random_state(numel=1000, seed=0):
    """Weight, gradient, first and (positive) second moment, fp32 `[numel]`."""
    generator = torch.Generator().manual_seed(seed)
    weight, grad, exp_avg, exp_avg_sq = (torch.randn(numel, generator=generator) for _ in range(4))
    return weight, grad, exp_avg, exp_avg_sq.square()


def adamw_in_float64(weight, grad, exp_avg, exp_avg_sq, hyper, clock, steps):
    """The docstring's equations, word by word."""
    w, g, m, v = (x.double() for x in (weight, grad, exp_avg, exp_avg_sq))
    beta1, beta2 = hyper.beta1**steps, hyper.beta2**steps
    if hyper.decoupled:
        w = w - hyper.lr * hyper.weight_decay * w
    else:
        g = g + hyper.weight_decay * w
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    w = w - hyper.lr * (m / (1 - hyper.beta1**clock)) / ((v / (1 - hyper.beta2**clock)).sqrt() + hyper.eps)
    return w, m, v


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9), (0.0, 0.95)])
@pytest.mark.parametrize(("optimizer", "decoupled"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)])
def test_many_steps_equal_those_of_torch(optimizer, decoupled, betas):
    settings = {"lr": 1e-2, "betas": betas, "eps": 1e-6, "weight_decay": 0.1}
    weight = random_state()[0]
    parameter = torch.nn.Parameter(weight.clone())
    torch_optimizer = optimizer([parameter], foreach=False, fused=False, **settings)
    exp_avg, exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
    hyper = Hyper.of({**settings, "decoupled_weight_decay": decoupled})
    for clock in range(1, 51):
        grad = random_state(seed=clock)[1]
        parameter.grad = grad.clone()
        torch_optimizer.step()
        adamw_(weight, grad, exp_avg, exp_avg_sq, hyper, clock=clock)
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exp_avg, torch_optimizer.state[parameter]["exp_avg"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exp_avg_sq, torch_optimizer.state[parameter]["exp_avg_sq"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(("clock", "steps"), [(1, 1), (4, 4), (7, 3), (1000, 4), (10, 16), (100_003, 7)])
def test_one_update_for_several_steps_follows_its_equations(clock, steps, decoupled):
    hyper = Hyper(lr=3e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=decoupled)
    weight, grad, exp_avg, exp_avg_sq = random_state()
    expected = adamw_in_float64(weight, grad, exp_avg, exp_avg_sq, hyper, clock, steps)
    adamw_(weight, grad, exp_avg, exp_avg_sq, hyper, clock=clock, steps=steps)
    for got, wanted in zip((weight, exp_avg, exp_avg_sq), expected, strict=True):
        torch.testing.assert_close(got, wanted.float(), rtol=2e-5, atol=1e-6)


def test_constant_gradients_may_be_taken_in_one_update_instead_of_n():
    # m and v after one update for n equal steps are exactly those after n steps: that is why betas are raised to n.
    _, grad, _, _ = random_state()
    one_by_one, at_once = ([torch.zeros_like(grad) for _ in range(3)] for _ in range(2))
    for clock in range(1, 5):
        adamw_(one_by_one[0], grad, one_by_one[1], one_by_one[2], SETTINGS, clock=clock)
    adamw_(at_once[0], grad, at_once[1], at_once[2], SETTINGS, clock=4, steps=4)
    torch.testing.assert_close(at_once[1:], one_by_one[1:])


def test_the_gradient_is_left_as_it_is():
    for decoupled in (True, False):  # the L2 form adds the decay to the gradient, which must not show
        hyper = Hyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, decoupled=decoupled)
        weight, grad, exp_avg, exp_avg_sq = random_state()
        before = grad.clone()
        adamw_(weight, grad, exp_avg, exp_avg_sq, hyper, clock=3, steps=2)
        assert torch.equal(grad, before)


def test_an_empty_tensor_is_accepted():
    weight, grad, exp_avg, exp_avg_sq = (torch.empty(0) for _ in range(4))
    adamw_(weight, grad, exp_avg, exp_avg_sq, SETTINGS, clock=1)
    assert weight.numel() == 0


def test_a_slice_of_a_tensor_is_updated_in_place_and_its_neighbours_are_not():
    weight, grad, exp_avg, exp_avg_sq = random_state(10)
    expected = adamw_in_float64(weight, grad, exp_avg, exp_avg_sq, SETTINGS, 5, 2)[0].float()
    before = weight.clone()
    part = slice(3, 7)
    adamw_(weight[part], grad[part], exp_avg[part], exp_avg_sq[part], SETTINGS, clock=5, steps=2)
    torch.testing.assert_close(weight[part], expected[part])
    assert torch.equal(weight[:3], before[:3])
    assert torch.equal(weight[7:], before[7:])


def test_nothing_is_recorded_for_autograd():
    _, grad, exp_avg, exp_avg_sq = random_state()
    weight = torch.nn.Parameter(torch.zeros_like(grad))
    adamw_(weight, grad, exp_avg, exp_avg_sq, SETTINGS, clock=1)
    assert weight.grad_fn is None


def test_hyper_reads_a_group_as_it_stands():
    group = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
    assert Hyper.of(group) == Hyper(lr=0.5, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2, decoupled=True)
    group.update(lr=torch.tensor(0.25), decoupled_weight_decay=False)
    assert Hyper.of(group) == Hyper(lr=0.25, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2, decoupled=False)


def test_the_deferred_rate_is_the_sum_the_damped_sum_or_the_mean():
    assert deferred_lr(0.6, 4, "linear") == 0.6
    assert deferred_lr(0.6, 4, "sqrt") == 0.6 / math.sqrt(4)
    assert deferred_lr(0.6, 4, "none") == 0.6 / 4
