import pytest
import torch

from megalith.config.moe import RouterConfig, RouterScore
from megalith.kernels.routing import (
    DROPPED_CHOICE,
    attach_aux_loss,
    choose_experts,
    count_choices,
    global_load_balancing_loss,
    load_balancing_loss,
    normalized_scores,
    z_loss,
)

LOGITS = torch.tensor(
    [[2, 1, 0, -1], [1.5, 2.5, 0.5, -0.5], [3, 0, 1, 0.5], [0, 1, -1, 2]], dtype=torch.float64
)
ALL = torch.ones(4, dtype=torch.bool)
ONE, TWO = torch.zeros(4, dtype=torch.int32), torch.tensor([0, 1, 0, 1])


def loss(score: RouterScore, sequence: torch.Tensor) -> float:
    experts = choose_experts(LOGITS, RouterConfig(score=score), 2).experts
    counts = count_choices(experts, sequence, ALL, sequences=int(sequence.max()) + 1, num_experts=4)
    return float(
        load_balancing_loss(normalized_scores(LOGITS, score), counts, sequence, ALL, top_k=2)
    )


def test_tokens_per_expert_are_counted() -> None:
    experts = choose_experts(LOGITS, RouterConfig(), 2).experts
    assert count_choices(experts, ONE, ALL, sequences=1, num_experts=4).tolist() == [[3, 3, 1, 1]]


def test_padding_and_dropped_choices_do_not_count() -> None:
    experts = torch.tensor([[0, 1], [DROPPED_CHOICE, 1], [0, 1], [1, DROPPED_CHOICE]])
    valid = torch.tensor([True, True, False, True])
    assert count_choices(experts, TWO, valid, sequences=3, num_experts=2).tolist() == [
        [1, 1],
        [0, 2],
        [0, 0],
    ]


@pytest.mark.parametrize(("score", "value"), [("softmax", 1.2285117348), ("sigmoid", 1.0867542590)])
def test_the_loss_of_a_microbatch(score: RouterScore, value: float) -> None:
    assert loss(score, ONE) == pytest.approx(value, abs=1e-10)


def test_the_loss_by_sequence() -> None:
    assert loss("softmax", TWO) == pytest.approx(1.5244525883, abs=1e-10)


def test_loss_of_balanced_experts_is_one() -> None:
    experts = torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]])
    counts = count_choices(experts, ONE, ALL, sequences=1, num_experts=4)
    shares = torch.full((4, 4), 0.25)
    assert float(load_balancing_loss(shares, counts, ONE, ALL, top_k=2)) == pytest.approx(1.0)
    assert float(
        global_load_balancing_loss(shares, counts[0], 3 * counts[0], ALL, top_k=2)
    ) == pytest.approx(1.0)
    assert float(
        load_balancing_loss(shares, torch.cat([counts, counts]), ONE, ALL, top_k=2)
    ) == pytest.approx(0.5)


def test_batch_and_global_batch_loss_are_equal_for_one_microbatch() -> None:
    shares = normalized_scores(LOGITS, "softmax")
    counts = torch.tensor([[3.0, 3, 1, 1]])
    whole = load_balancing_loss(shares, counts, ONE, ALL, top_k=2)
    assert torch.allclose(
        global_load_balancing_loss(shares, counts[0], counts[0], ALL, top_k=2), whole
    )


def test_local_losses_sum_to_the_global_loss() -> None:
    shares, counts = (
        normalized_scores(LOGITS, "softmax"),
        torch.tensor([[2.0, 0, 1, 1], [1, 3, 0, 0]]),
    )
    whole = load_balancing_loss(shares, counts, TWO, ALL, top_k=2)
    parts = [
        load_balancing_loss(shares[i::3], counts, TWO[i::3], ALL[i::3], top_k=2) for i in range(3)
    ]
    assert torch.allclose(torch.stack(parts).sum(), whole)


def test_padding_does_not_affect_the_loss() -> None:
    valid = torch.tensor([True, True, True, False])
    shares, experts = (
        normalized_scores(LOGITS, "softmax"),
        choose_experts(LOGITS, RouterConfig(), 2).experts,
    )
    padded = count_choices(experts, ONE, valid, sequences=1, num_experts=4)
    text = count_choices(experts[:3], ONE[:3], ALL[:3], sequences=1, num_experts=4)
    assert torch.allclose(
        load_balancing_loss(shares, padded, ONE, valid, top_k=2),
        load_balancing_loss(shares[:3], text, ONE[:3], ALL[:3], top_k=2),
    )
    assert torch.allclose(
        z_loss(LOGITS, torch.tensor(3), valid), z_loss(LOGITS[:3], torch.tensor(3), ALL[:3])
    )


def test_empty_sequences_do_not_affect_the_mean() -> None:
    shares, counts = (
        normalized_scores(LOGITS, "softmax"),
        torch.tensor([[3.0, 3, 1, 1], [0, 0, 0, 0]]),
    )
    assert torch.allclose(
        load_balancing_loss(shares, counts, ONE, ALL, top_k=2),
        load_balancing_loss(shares, counts[:1], ONE, ALL, top_k=2),
    )


def test_the_loss_of_large_logits() -> None:
    assert float(z_loss(LOGITS, torch.tensor(4), ALL)) == pytest.approx(7.7576854623, abs=1e-10)


def test_attached_loss_changes_only_gradients() -> None:
    x = torch.randn(3, requires_grad=True)
    y = torch.randn(3, requires_grad=True)
    out = attach_aux_loss(x * 1.0, (y**2).sum(), 0.25)
    assert torch.equal(out, x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))  # type: ignore[arg-type]
    assert torch.allclose(y.grad, 0.5 * y)  # type: ignore[arg-type]
