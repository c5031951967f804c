"""Each planted fault changes exactly the value that its description names."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megalith.config.lora import LoraConfig
from megalith.kernels.attention.split_kv import init_attention_result
from megalith.kernels.packed import ContextShard, seq_params_from_slices, with_masks
from megalith.nn.build import init_param_
from megalith.nn.lora import column_adapter
from megalith.optim.schedule import GroupRates
from megalith.optim.slots import build_slot, group_by_rates
from megalith.parallel.context import pair_masks_by_group, select_local_heads
from megalith.parallel.cross_entropy import HeadShard, VocabShard, softmax_over_ranks
from megalith.parallel.data import shard_groups
from megalith.parallel.group import Group, single_rank_group
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.parallel.p2p import StageLink, StageMessage, Tensors
from megalith.parallel.tensor import Init, SequenceParallelComm
from megalith.plan.context import Slicing, plan_slices, plan_spans
from megalith.plan.parameters import PLAIN, ParameterRates
from megalith.plan.shards import Shard
from megalith.testing.inject import patched
from megalith.verify.faults import layers, moe, training
from megalith.verify.faults.plant import Fault

FORWARD, BACKWARD = StageMessage("forward", 1, 0), StageMessage("backward", 0, 0)


# --- attention and loss


def test_biases_are_those_of_the_first_ranks_heads_on_every_rank() -> None:
    table = torch.arange(12.0).view(2, 6)
    first, second = (Group(("cp",), (0, 1), rank) for rank in (0, 1))
    local = select_local_heads(table, second)
    assert local is not None and local.tolist() == [[3.0, 4.0, 5.0], [9.0, 10.0, 11.0]]
    wrong = layers.biases_of_other_heads.wrong
    for group in (first, second):
        right = select_local_heads(table, first)
        assert right is not None and torch.equal(wrong(select_local_heads, table, group), right)
    assert wrong(select_local_heads, None, first) is None


def test_off_by_one_score_is_left_out_and_sinks_are_kept() -> None:
    q, sinks = torch.zeros(2, 1, 3, 4), torch.tensor([0.5, 1.5])
    wrong = layers.extra_score_left_out.wrong
    assert init_attention_result(q, 4, off_by_one=True).lse.eq(0).all()
    assert wrong(init_attention_result, q, 4, off_by_one=True).lse.isneginf().all()
    result = wrong(init_attention_result, q, 4, sinks)
    assert torch.equal(result.lse[:, 0, 0], sinks)


def test_spans_are_wrong_only_across_ranks_or_chunks() -> None:
    every, starts = np.arange(8), np.repeat([0, 3], [3, 5])
    joined, chunks = layers.documents_joined_across_ranks.wrong, layers.chunks_of_rows.wrong
    right = plan_spans(every, every, starts).visible.tolist()
    assert joined(plan_spans, every, every, starts).visible.tolist() == right
    across = joined(plan_spans, every[4:], every[:4], starts)
    assert across.visible.tolist() == [[0, 4]] * 4
    assert plan_spans(every[4:], every[:4], starts).visible[0, 0] == 3
    chunked = chunks(plan_spans, every, every, starts, window=4, chunked=True)
    assert chunked.visible[:, 0].tolist() == [0, 0, 0, 3, 4, 4, 4, 4]
    plain = chunks(plan_spans, every, every, starts, window=None, chunked=False)
    assert plain.visible.tolist() == right


def test_second_rank_has_the_masks_of_the_first_or_none() -> None:
    def shard(rank: int) -> ContextShard:
        slicing = Slicing(ranks=2, rank=rank)
        tokens = with_masks(
            seq_params_from_slices(plan_slices([8], row=8, slicing=slicing), slicing),
            [torch.eye(8).bool()],
        )
        assert tokens.context is not None
        return tokens.context

    first, second = shard(0), shard(1)
    wrong = layers.masks_of_another_rank.wrong(pair_masks_by_group, second, 1)
    right = pair_masks_by_group(first, 1)
    assert right is not None
    for pairs, right_pairs in zip(wrong, right, strict=True):
        assert torch.equal(pairs.of_row(0, 1), right_pairs.of_row(0, 1))
    forgotten = layers.masks_forgotten.wrong
    assert forgotten(pair_masks_by_group, first, 1) is not None
    assert forgotten(pair_masks_by_group, second, 1) is None


def test_only_the_logsumexp_is_that_of_the_vocabulary_shard() -> None:
    logits, labels = torch.randn(3, 7, dtype=torch.float64), torch.tensor([0, 6, -1])
    head = HeadShard.build(torch.empty(7, 2), VocabShard(single_rank_group("tp"), 0, 7))
    right = softmax_over_ranks(logits, labels, head)
    wrong = layers.z_loss_of_own_rows.wrong(softmax_over_ranks, logits, labels, head)
    assert all(torch.equal(a, b) for a, b in zip(right, wrong, strict=True))
    torch.testing.assert_close(wrong.logsumexp(), right.logsumexp())  # one rank has all rows
    two = right._replace(total=2 * right.total)  # as if another rank had as much
    assert not torch.equal(two.logsumexp(), wrong.logsumexp())


def test_adapter_declares_its_gradient_invariant() -> None:
    tp_comm = SequenceParallelComm(single_rank_group("tp_kv", "tp_copy"), overlap=False)
    weight = Shard.full("layers.0.mlp.down", (4, 6))
    wrong = layers.adapter_invariant.wrong
    a, _ = wrong(column_adapter, weight, LoraConfig(rank=2), tp_comm)
    assert a.invariant == {"tp_kv", "tp_copy"}


# --- parameters


def test_frozen_weights_become_smaller() -> None:
    data: Any = SimpleNamespace(frozen=[(Shard.full("w", (2,), inputs=0), torch.ones(2))])
    assert training.frozen_weights_decay.wrong(lambda one: [], data) == []
    assert 0 < float(data.frozen[0][1][0]) < 1


def test_rates_move_to_the_next_slot_of_another_group() -> None:
    rates = [PLAIN, ParameterRates(lr_of="own"), PLAIN]
    slots = [
        build_slot(Shard.full(name, (3, 2)), torch.ones(3, 2), (), each)
        for name, each in zip("abc", rates, strict=True)
    ]
    grads, groups = [slot.weight for slot in slots], {"own": GroupRates(0.5, 0.1)}
    wrong = training.rates_of_the_neighbor.wrong

    def own(parts: Sequence[Any]) -> list[str]:
        return [slot.shard.name for part in parts for slot in part.slots if part.lr == 0.5]

    arguments: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.1, "groups": groups}
    assert own(group_by_rates(slots, grads, **arguments)) == ["b"]
    assert own(wrong(group_by_rates, slots, grads, **arguments)) == ["c"]
    assert wrong(group_by_rates, [], [], lr=1.0, weight_decay=0.1) == []


# --- experts


def test_experts_of_the_second_rank_are_initialized_as_those_of_the_first() -> None:
    second = Shard.full("experts.down", (4, 3, 2), inputs=2).split_dim(0, [2, 2], 1, ("ep",))
    right, wrong, dense = (torch.zeros(second.matrix_shape) for _ in range(3))
    init = moe.experts_drawn_by_place.wrong
    init_param_(right, second, Init(1.0), seed=0)
    init(init_param_, dense, second, Init(1.0), seed=0)
    assert torch.equal(right, dense), "parameters on the dense grid are initialized correctly"
    on_expert_grid = Shard(
        second.name, second.shape, second.box, second.cut, grid="expert", inputs=second.inputs
    )
    init(init_param_, wrong, on_expert_grid, Init(1.0), seed=0)
    assert not torch.equal(right, wrong)


def test_faults_of_groups_have_no_effect_on_one_rank() -> None:
    mesh, x = build_single_rank_mesh(), torch.arange(6.0)
    sizes = {
        fault.wrong(shard_groups, 0, mesh, "expert").replicas.size
        for fault in (moe.experts_summed_over_dp, moe.etp_alone_on_dense_grid)
    }
    assert len(sizes) == 1
    assert torch.equal(moe.etp_sum_removed.wrong(None, x, single_rank_group("etp")), x)
    assert moe.balance_of_own_tokens.wrong(None, x, single_rank_group("dp")) is x


def test_expert_outputs_stay_in_the_order_of_computation() -> None:
    wrong = moe.answers_in_wrong_order.wrong
    assert wrong(None, [5, 6, 7], [2, 0, 1]) == ([7, 5, 6], [0, 1, 2])


# --- pipeline


def sent_by(
    fault: Fault, messages: Sequence[tuple[StageMessage, Tensors]]
) -> list[tuple[StageMessage, Tensors]]:
    """Messages that the stage sends with the fault."""
    link: Any = SimpleNamespace(num_microbatches=3)
    sent: list[tuple[StageMessage, Tensors]] = []

    def send(_: object, message: StageMessage, tensors: Tensors, target: int) -> None:
        sent.append((message, tensors))

    with patched(StageLink, "send", send), fault.context():
        for message, tensors in messages:
            StageLink.send(link, message, tensors, 1)
    return sent


def test_neighboring_microbatches_are_swapped_in_forward() -> None:
    messages: list[tuple[StageMessage, Tensors]] = [
        *((FORWARD._replace(microbatch=m), ()) for m in range(3)),
        (BACKWARD, ()),
    ]
    sent = sent_by(training.microbatches_swapped, messages)
    assert [message.microbatch for message, _ in sent] == [1, 0, 2, 0]


@pytest.mark.parametrize(
    "fault",
    [training.memory_gradient_kept, training.depths_gradients_kept],
    ids=["cross_layer_source", "mtp"],
)
def test_only_the_gradient_of_the_residual_stream_is_sent(fault: Fault) -> None:
    both = torch.ones(2), torch.ones(2)
    (_, back), (_, forward) = sent_by(fault, [(BACKWARD, both), (FORWARD, both)])
    assert back[0] is both[0] and not back[1].any() and forward is both


def test_cross_layer_source_is_one_microbatch_late() -> None:
    first, second = ((torch.full((1,), 2.0 * m), torch.full((1,), 2.0 * m + 1)) for m in range(2))
    messages = [(FORWARD, first), (BACKWARD, second), (FORWARD._replace(microbatch=1), second)]
    sent = sent_by(training.memory_of_another_microbatch, messages)
    assert [[float(x) for x in tensors] for _, tensors in sent] == [[0, 1], [2, 3], [2, 1]]


def test_states_of_mtp_layers_are_sent_in_reverse_order() -> None:
    states = tuple(torch.full((1,), float(number)) for number in range(3))
    forward, back = sent_by(training.depths_in_other_order, [(FORWARD, states), (BACKWARD, states)])
    assert [float(x) for x in forward[1]] == [0, 2, 1]
    assert [float(x) for x in back[1]] == [0, 1, 2]


def test_deferred_weight_gradients_are_discarded() -> None:
    store: Any = SimpleNamespace(_deferred={0: [1], 1: [2]})
    training.weights_part_left_out.wrong(None, store, 0)
    assert store._deferred == {1: [2]}


def test_middle_of_three_replicas_is_not_summed() -> None:
    summed: list[list[int]] = []

    def note(x: object, group: object, members: list[int]) -> None:
        summed.append(members)

    for rank in (0, 2, 3):
        group: Any = SimpleNamespace(rank=rank)
        training.mtp_copy_not_summed.wrong(note, torch.ones(1), group, (0, 2, 3))
    assert summed == [[0, 3], [2], [0, 3]]
