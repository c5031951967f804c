"""KV cache groups of models with several kinds of attention."""

import pytest

from megalith.plan.serving.cache_layout import AttentionView, plan_cache_layout
from tests.cases import loop_over

FULL = AttentionView()
VIEWS = [
    *[AttentionView(window) for window in (1, 2, 5, 16)],
    *[AttentionView(window, chunked=True) for window in (1, 2, 5, 16)],
    FULL,
]


@loop_over("view", VIEWS)
def test_first_needed_is_the_first_token_of_this_and_later_queries(view: AttentionView) -> None:
    for position in range(40):
        later = [query - view.before(query) for query in range(position, position + 40)]
        assert view.first_needed(position) == min(later)


def test_gemma_3_layers_form_five_sliding_groups_and_one_full_group() -> None:
    local = AttentionView(1024)
    layout = plan_cache_layout(([local] * 5 + [FULL]) * 8)
    assert layout.num_slots == 8
    assert sorted(layout.groups, key=str) == sorted([local] * 5 + [FULL], key=str)


@pytest.mark.parametrize(
    ("num_local", "num_full", "num_slots", "num_groups"),
    [(12, 12, 12, 2), (22, 4, 4, 7), (0, 32, 32, 1), (3, 1, 1, 4)],
)
def test_group_size_is_the_number_of_attentions_of_the_rarest_view(
    num_local: int, num_full: int, num_slots: int, num_groups: int
) -> None:
    layout = plan_cache_layout([AttentionView(128)] * num_local + [FULL] * num_full)
    assert (layout.num_slots, len(layout.groups)) == (num_slots, num_groups)


def test_every_attention_has_its_own_slot_in_a_group_of_its_view() -> None:
    views = [VIEWS[(3 * layer) % 5] for layer in range(23)]
    layout = plan_cache_layout(views)
    assert len(set(layout.slots)) == len(views)
    for view, (group, slot) in zip(views, layout.slots, strict=True):
        assert layout.groups[group] == view
        assert 0 <= slot < layout.num_slots
    used = dict.fromkeys(range(len(layout.groups)), 0)
    for group, _ in layout.slots:
        used[group] += 1
    for view in set(views):
        counts = [used[group] for group, other in enumerate(layout.groups) if other == view]
        assert len(counts) == -(-views.count(view) // layout.num_slots), "more groups than needed"


def test_consecutive_attentions_have_consecutive_slots() -> None:
    """So a pipeline stage with a part of the layers stores a part of the bytes."""
    full, window = AttentionView(), AttentionView(4)
    layout = plan_cache_layout([full if layer % 6 == 5 else window for layer in range(24)])
    assert layout.num_slots == 4
    for stage in range(4):
        slots = {slot for _, slot in layout.slots[6 * stage : 6 * stage + 6]}
        assert slots == {stage}


def test_model_without_attention_has_no_groups() -> None:
    layout = plan_cache_layout([])
    assert (layout.groups, layout.slots, layout.num_slots) == ((), (), 0)
