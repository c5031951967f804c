"""The norm is that of all gradients, each element once; the factor never enlarges."""

import torch

from megalith.optim.clip import clip_factor, global_norm
from megalith.parallel.mesh import mesh_of_one
from megalith.plan.shards import whole


def test_norm_is_that_of_torch() -> None:
    gradients = [torch.randn(5, 3), torch.randn(7)]
    pairs = [(whole("a", (5, 3)), gradients[0]), (whole("b", (7,), inputs=0), gradients[1])]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    norm = global_norm(pairs, mesh_of_one())
    assert norm.dtype == torch.float64
    assert torch.allclose(norm.float(), expected)
    factor = clip_factor(norm, 1.0)
    assert factor is not None
    assert torch.allclose((gradients[0] * factor).float(), parameters[0].grad)


def test_small_gradients_stay_and_zero_turns_clipping_off() -> None:
    factor = clip_factor(torch.tensor(0.5, dtype=torch.float64), 1.0)
    assert factor is not None
    assert float(factor) == 1.0
    assert clip_factor(torch.tensor(5.0), 0.0) is None
