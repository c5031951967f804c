import pytest
import torch
from torch import Tensor

from megalith.config.moe import RouterConfig
from megalith.kernels.linear import CastMatmulOps, add_product_, linear
from megalith.kernels.routing import (
    DROPPED_CHOICE,
    SINKHORN_LOOKS,
    Choice,
    balancing_offsets,
    choose_experts,
    drop_choices,
    expert_capacity,
    log_scores,
    mask_other_groups,
    normalized_scores,
    round_weights,
    score_experts,
    select_within_capacity,
    sinkhorn,
    top_k_indices,
)

LOGITS = torch.tensor(
    [[2, 1, 0, -1], [1.5, 2.5, 0.5, -0.5], [3, 0, 1, 0.5], [0, 1, -1, 2]], dtype=torch.float64
)
"""Four tokens, four experts."""


def close(x: Tensor, *rows: tuple[float, ...]) -> bool:
    return torch.allclose(x, torch.tensor(rows, dtype=x.dtype), rtol=0, atol=6e-7)


def test_normalized_softmax_weights_are_a_softmax_over_the_chosen() -> None:
    choice = choose_experts(LOGITS, RouterConfig(), 2)
    assert choice.experts.tolist() == [[0, 1], [1, 0], [0, 2], [3, 1]]
    pair = (0.731059, 0.268941)
    assert close(choice.weights, pair, pair, (0.880797, 0.119203), pair)


def test_weights_without_normalization_are_the_scores() -> None:
    choice = choose_experts(LOGITS, RouterConfig(norm_topk_prob=False), 2)
    pair = (0.643914, 0.236883)
    assert close(choice.weights, pair, pair, (0.789137, 0.106798), pair)


def test_normalized_scores_are_a_softmax_over_the_chosen() -> None:
    scores = choose_experts(LOGITS, RouterConfig(norm_topk_prob=False), 3).weights
    renormalized = choose_experts(LOGITS, RouterConfig(), 3).weights
    assert torch.allclose(scores / scores.sum(1, keepdim=True), renormalized, rtol=1e-14)


def test_sigmoid_weights_are_scaled_after_normalization() -> None:
    choice = choose_experts(LOGITS, RouterConfig(score="sigmoid", routed_scaling_factor=2.5), 2)
    rows = (1.366123, 1.133877), (1.326482, 1.173518), (1.414462, 1.085538), (1.366123, 1.133877)
    assert close(choice.weights, *rows)


def test_expert_bias_affects_the_choice_but_not_the_weights() -> None:
    bias = torch.tensor([0, 0.3, 0, -0.3], dtype=torch.float64)
    choice = choose_experts(LOGITS, RouterConfig(score="sigmoid", expert_bias=True), 2, bias)
    assert choice.experts.tolist() == [[1, 0], [1, 0], [0, 1], [1, 3]]
    assert close(choice.weights[:1], (0.453551, 0.546449))


def test_experts_are_chosen_from_the_best_groups() -> None:
    router = RouterConfig(norm_topk_prob=False, num_groups=2, topk_groups=1)
    scores = LOGITS.softmax(1)
    of_groups = scores.view(4, 2, 2).sum(2)  # of each group its best two, and it has no more
    assert close(
        of_groups,
        (0.880797, 0.119203),
        (0.880797, 0.119203),
        (0.828426, 0.171574),
        (0.324027, 0.675973),
    )
    masked = mask_other_groups(scores, router, 2)
    assert masked.isinf().tolist() == [[False, False, True, True]] * 3 + [
        [True, True, False, False]
    ]
    choice = choose_experts(LOGITS, router, 2)
    assert choice.experts.tolist() == [[0, 1], [1, 0], [0, 1], [3, 2]]


@pytest.mark.parametrize(("kind", "group"), [("top", 0), ("max", 1)])
def test_group_score_is_the_sum_or_the_maximum_of_its_best_experts(kind: str, group: int) -> None:
    scores = torch.tensor([[0.5, 0.4, 0.6, 0.1]])
    router = RouterConfig(num_groups=2, topk_groups=1, group_score=kind)  # type: ignore[arg-type]
    assert top_k_indices(mask_other_groups(scores, router, 2), 2)[0].div(
        2, rounding_mode="floor"
    ).tolist() == [
        group,
        group,
    ]


def test_expert_bias_affects_the_choice_of_groups() -> None:
    logits = torch.tensor([[2.0, 1.9, 1.8, 1.7, -3.0, -3.0]])
    router = RouterConfig(score="sigmoid", expert_bias=True, num_groups=3, topk_groups=1)
    assert sorted(choose_experts(logits, router, 2).experts[0].tolist()) == [0, 1]
    bias = torch.tensor([0, 0, 0.3, 0, 0, 0])
    assert choose_experts(logits, router, 2, bias).experts.tolist() == [[2, 3]]
    lifted = torch.tensor([0, 0, 0, 0, 2.0, 2.0])
    assert sorted(choose_experts(logits, router, 2, lifted).experts[0].tolist()) == [4, 5]


def test_ties_are_broken_by_the_lower_expert_index() -> None:
    assert (
        choose_experts(torch.zeros(3, 70), RouterConfig(), 4).experts.tolist() == [[0, 1, 2, 3]] * 3
    )


def test_weights_have_the_dtype_of_logits_and_are_computed_in_fp32() -> None:
    logits = LOGITS.bfloat16()
    weights = choose_experts(logits, RouterConfig(), 2).weights
    assert weights.dtype == torch.bfloat16
    exact = logits.float().gather(1, torch.tensor([[0, 1]])).softmax(1)
    assert torch.equal(weights[:1], exact.bfloat16())
    assert choose_experts(LOGITS, RouterConfig(score="sigmoid"), 2).weights.dtype == torch.float64


def test_normalized_scores_do_not_underflow() -> None:
    shares = normalized_scores(torch.tensor([[-200.0, -201.0]]), "sigmoid")
    assert torch.allclose(shares, torch.tensor([[0.73106, 0.26894]]), atol=1e-5)
    plain = LOGITS.sigmoid()
    assert torch.allclose(
        normalized_scores(LOGITS, "sigmoid"), plain / plain.sum(1, keepdim=True), rtol=1e-13
    )


def test_sinkhorn_balances_the_experts() -> None:
    plan = sinkhorn(LOGITS, lambda x: x, tokens=4)
    assert top_k_indices(plan, 2).tolist() == [[0, 2], [1, 2], [0, 2], [3, 1]]
    assert torch.allclose(plan.sum(0), torch.full((4,), 0.25, dtype=torch.float64), atol=1e-4)


def test_sinkhorn_plan_is_fixed_after_convergence() -> None:
    """Of these logits after 12 rounds, whenever the host looks."""
    of_experts, scores = torch.ones(4, dtype=torch.float64), LOGITS.exp()
    for _ in range(12):
        of_tokens = 1 / 4 / (scores * of_experts).sum(1)
        of_experts = 1 / 4 / (scores * of_tokens[:, None]).sum(0)
    expected = scores * of_experts * of_tokens[:, None]
    rounds: list[Tensor] = []

    def total(x: Tensor) -> Tensor:
        rounds.append(x)
        return x

    assert torch.allclose(sinkhorn(LOGITS, total, tokens=4), expected, rtol=1e-6)
    assert len(rounds) == SINKHORN_LOOKS
    of_tokens = 1 / 4 / (scores * of_experts).sum(1)
    assert not torch.allclose(scores * of_experts * of_tokens[:, None], expected, rtol=1e-6), (
        "another would move it"
    )


def test_sinkhorn_terminates_for_nan_logits() -> None:
    assert sinkhorn(torch.full((2, 3), float("nan")), lambda x: x, tokens=2).isnan().all()


def test_expert_keeps_the_tokens_of_largest_weight() -> None:
    choice = choose_experts(LOGITS, RouterConfig(), 2)
    taken = select_within_capacity(choice, 1, "least", num_experts=4)
    kept = drop_choices(choice, taken)
    assert sorted(
        (t, e) for t, row in enumerate(kept.experts.tolist()) for e in row if e != DROPPED_CHOICE
    ) == [
        (1, 1),
        (2, 0),
        (2, 2),
        (3, 3),
    ]
    assert float(kept.weights.sum()) == pytest.approx(2.4621171573, abs=1e-9)


def test_capacity_of_two_drops_the_third_choice() -> None:
    choice = choose_experts(LOGITS, RouterConfig(), 2)
    kept = drop_choices(choice, select_within_capacity(choice, 2, "least", num_experts=4))
    assert sorted(
        (t, e) for t, row in enumerate(kept.experts.tolist()) for e in row if e != DROPPED_CHOICE
    ) == [
        (0, 0),
        (1, 1),
        (2, 0),
        (2, 2),
        (3, 1),
        (3, 3),
    ]
    assert float(kept.weights.sum()) == pytest.approx(3.4621171573, abs=1e-9)


def test_expert_keeps_the_first_tokens_of_the_given_order() -> None:
    choice = Choice(torch.tensor([[0], [0], [0]]), torch.tensor([[0.1], [0.9], [0.5]]))
    assert select_within_capacity(choice, 2, "last", num_experts=1).flatten().tolist() == [
        True,
        True,
        False,
    ]
    late_first = torch.tensor([2, 1, 0])
    taken = select_within_capacity(choice, 2, "last", num_experts=1, order=late_first)
    assert taken.flatten().tolist() == [False, True, True]


def test_of_equal_weights_the_later_token_is_kept() -> None:
    choice = Choice(torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1))
    assert (
        select_within_capacity(choice, 3, "least", num_experts=2).flatten().tolist()
        == [False] * 2 + [True] * 3
    )


@pytest.mark.parametrize(("factor", "capacity"), [(0.5, 1), (1.0, 2), (1.1, 3), (9.0, 4)])
def test_capacity_is_rounded_up_and_never_more_than_all_tokens(
    factor: float, capacity: int
) -> None:
    assert expert_capacity(factor, tokens=4, top_k=2, experts=4) == capacity


def test_capacity_uses_the_decimal_value_of_the_factor() -> None:
    assert expert_capacity(1.1, tokens=1000, top_k=1, experts=10) == 110


def test_router_logits_use_the_router_dtype_in_forward_and_backward() -> None:
    x = torch.randn(5, 7, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(3, 7, dtype=torch.bfloat16, requires_grad=True)
    y = linear(x, [w], matmul_ops=CastMatmulOps(torch.float32))
    assert torch.equal(y, x.float() @ w.float().t())
    y.backward(dy := torch.randn(5, 3))
    assert x.grad is not None and torch.equal(x.grad, (dy @ w.float()).bfloat16())
    assert w.grad is not None and torch.equal(w.grad, (dy.t() @ x.float()).bfloat16())


def test_router_weight_gradient_is_accumulated_unrounded() -> None:
    x, dy = torch.randn(5, 7, dtype=torch.bfloat16), torch.randn(5, 3)
    total = torch.ones(3, 7)
    add_product_(total, x, dy, CastMatmulOps(torch.float32))
    assert torch.equal(total, torch.ones(3, 7) + dy.t() @ x.float())


# --- other scores, and offsets


def test_sqrt_softplus_scores_match_the_formula() -> None:
    scores = score_experts(LOGITS, "sqrt_softplus")
    assert torch.allclose(scores, (1 + LOGITS.exp()).log().sqrt(), rtol=1e-13)
    choice = choose_experts(
        LOGITS, RouterConfig(score="sqrt_softplus", routed_scaling_factor=2.0), 2
    )
    chosen = scores.gather(1, choice.experts)
    assert choice.experts.tolist() == [[0, 1], [1, 0], [0, 2], [3, 1]]
    assert torch.allclose(choice.weights, 2 * chosen / chosen.sum(1, keepdim=True), rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_sqrt_softplus_scores_keep_shares_and_gradients(dtype: torch.dtype) -> None:
    far = torch.tensor([[-200.0, -201.0, -39.0, -41.0, 90.0]], dtype=dtype, requires_grad=True)
    assert torch.allclose(
        log_scores(far, "sqrt_softplus"), torch.cat([far[:, :4] / 2, far[:, 4:].log() / 2], 1)
    )
    normalized_scores(far, "sqrt_softplus")[0, 0].backward()
    score_experts(far, "sqrt_softplus").sum().backward()
    assert far.grad is not None and bool(far.grad.isfinite().all())
    near = LOGITS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: log_scores(x, "sqrt_softplus"), near)


def test_offsets_balance_the_experts() -> None:
    """With offsets that no longer move, each expert has K n / E of n tokens."""
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(240, 6, dtype=torch.float64, generator=draw) + torch.tensor(
        [3.0, 1, 0, 0, -1, -2]
    )
    valid, offsets = torch.ones(240, dtype=torch.bool), torch.zeros(6, dtype=torch.float64)
    free = choose_experts(logits, RouterConfig(), 2).experts.flatten().bincount(minlength=6)
    assert int(free.max()) > 150
    for _ in range(60):
        offsets = balancing_offsets(logits, offsets, valid, 2)
        offsets = offsets - offsets.mean()
    counts = (
        choose_experts(logits, RouterConfig(), 2, offsets=offsets)
        .experts.flatten()
        .bincount(minlength=6)
    )
    assert counts.sub(80).abs().max() <= 3, counts


def test_offset_is_the_demand_quantile() -> None:
    """Of 4 tokens with 2 of 4 experts each, all want an expert by its logit less their third best;
    the third counts."""
    result = balancing_offsets(
        LOGITS, torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.bool), 2
    )
    wants = LOGITS - torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=torch.float64).unsqueeze(1)
    assert torch.equal(result, wants.sort(dim=0, descending=True).values[2])
    padded = torch.cat([LOGITS, torch.full((3, 4), 99.0, dtype=torch.float64)])
    valid = torch.arange(7) < 4
    assert torch.equal(
        balancing_offsets(padded, torch.zeros(4, dtype=torch.float64), valid, 2), result
    )


def test_offsets_affect_the_choice_but_not_the_weights() -> None:
    offsets = torch.tensor([5.0, 0, 0, 0], dtype=torch.float64)
    choice = choose_experts(LOGITS, RouterConfig(), 2, offsets=offsets)
    assert not bool((choice.experts == 0).any())
    assert torch.allclose(choice.weights, LOGITS.gather(1, choice.experts).softmax(1), rtol=1e-14)


@pytest.mark.parametrize(
    ("dtype", "digits"), [(torch.float64, 1e-15), (torch.float32, 1e-7), (torch.bfloat16, 0.0)]
)
def test_rounding_does_not_decide_which_choice_is_dropped(
    dtype: torch.dtype, digits: float
) -> None:
    """Two tokens of one weight, the earlier or the later rounded up; and one that weighs less."""
    for up in (0, 1):
        weights = torch.tensor([0.31, 0.31, 0.3], dtype=torch.float64)
        weights[up] *= 1 + digits
        choice = Choice(torch.zeros(3, 1, dtype=torch.int64), weights.to(dtype).view(3, 1))
        for seats, taken in ((1, [False, True, False]), (2, [True, True, False])):
            assert (
                select_within_capacity(choice, seats, "least", num_experts=1).flatten().tolist()
                == taken
            )
    near = torch.tensor([0.31, 0.3101], dtype=dtype)
    assert round_weights(near).dtype == (torch.float32 if dtype == torch.float64 else dtype)
    assert bool((round_weights(near)[0] < round_weights(near)[1]) == (near[0] < near[1])), (
        "weights that differ still do"
    )
