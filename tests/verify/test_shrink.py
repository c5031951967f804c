"""The tiny copy of a layout keeps what makes it hard, and can always be run."""

from collections.abc import Iterator
from itertools import product

import pytest

from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.plan.shards import split_evenly, split_heads
from megalith.recipes import recipes
from megalith.testing.tiny import tiny_run
from megalith.train.rules import model_problems, run_problems
from megalith.verify.ranks import LayoutCase
from megalith.verify.shrink import shrink


def run_of(heads: int, keys: int, tp: int, dp: int, *, ffn: int = 64, sp: bool = False, tied: bool = False) -> TrainRun:
    """A run of that shape."""
    sizes = {"num_heads": heads, "num_kv_heads": keys, "ffn_hidden_size": ffn, "tied_embeddings": tied}
    layout = {"tp": tp, "dp": dp, "sp": sp}
    settings = {f"model.{name}": value for name, value in sizes.items()} | {
        f"parallel.{name}": value for name, value in layout.items()
    }
    return tiny_run({name: str(value) for name, value in settings.items()})


def layouts() -> Iterator[TrainRun]:
    """Every way in which up to 16 ranks divide up to 16 heads, as far as the rules allow it."""
    for heads, tp, dp in product(range(1, 17), range(1, 17), (1, 2, 3, 6)):
        for keys in (number for number in range(1, heads + 1) if heads % number == 0):
            run = run_of(heads, keys, tp, dp, sp=tp > 1 and heads % 2 == 0)
            if not model_problems(run):
                yield run


def parts(model: ModelConfig, tp: int) -> tuple[bool, bool, bool, bool]:
    """Whether ranks share a key/value head, whether all share one, and whether heads and features part unevenly."""
    heads = split_heads(model.num_heads, model.num_kv_heads, tp)
    uneven = len(set(heads.queries)) > 1
    return (
        len(heads.keys) < tp,
        tp > 1 and len(heads.keys) == 1,
        uneven,
        len(set(split_evenly(model.ffn_hidden_size, tp))) > 1,
    )


def test_every_layout_has_a_tiny_copy_that_breaks_no_rule_and_is_as_hard() -> None:
    count = 0
    for run in layouts():
        world = run.parallel.tp * (run.parallel.dp or 1)
        case = shrink(run, world)
        where = (run.model.num_heads, run.model.num_kv_heads, run.parallel)
        assert run_problems(case.run, case.world) == [], where
        assert case.world <= 8, where
        p, small = run.parallel, case.run.parallel
        assert ((small.tp > 1), (small.dp or 1) > 1, small.sp) == (p.tp > 1, (p.dp or 1) > 1, p.sp), where
        assert parts(case.run.model, small.tp) == parts(run.model, p.tp), where
        count += 1
    assert count > 1000


@pytest.mark.parametrize(
    ("run", "tp", "dp", "keys", "heads"),
    [
        (run_of(8, 2, 4, 2), 4, 2, 2, 4),  # two ranks for each of the key/value heads
        (run_of(8, 1, 8, 1), 2, 1, 1, 2),  # all share one
        (run_of(6, 1, 3, 1), 3, 1, 1, 3),
        (run_of(6, 2, 4, 1), 4, 1, 2, 6),  # two and one query heads
        (run_of(64, 8, 8, 512), 2, 2, 2, 4),
        (run_of(9, 9, 9, 1), 3, 1, 3, 3),
        (run_of(10, 10, 4, 1), 2, 1, 3, 3),  # uneven
        (run_of(8, 8, 1, 12), 1, 3, 1, 1),
        (run_of(8, 8, 1, 1), 1, 1, 1, 1),
    ],
)
def test_the_copy_is_as_small_as_can_be(run: TrainRun, tp: int, dp: int, keys: int, heads: int) -> None:
    case = shrink(run, run.parallel.tp * (run.parallel.dp or 1))
    assert (case.run.parallel.tp, case.run.parallel.dp, case.world) == (tp, dp, tp * dp)
    assert (case.run.model.num_kv_heads, case.run.model.num_heads) == (keys, heads)


def test_ties_biases_order_and_overlap_stay() -> None:
    run = run_of(4, 4, 2, 2, tied=True)
    settings = {"model.qkv_bias": "true", "parallel.order": "dp-tp-cp-ep-pp", "parallel.overlap": "false"}
    case = shrink(tiny_run({"model.tied_embeddings": "true", "parallel.tp": "2", "parallel.dp": "2"} | settings), 4)
    assert case.run.model.tied_embeddings and case.run.model.qkv_bias
    assert (case.run.parallel.order, case.run.parallel.overlap) == ("dp-tp-cp-ep-pp", False)
    assert shrink(run, 4).run.model.tied_embeddings


def test_dp_follows_from_the_world_where_it_is_unset() -> None:
    assert shrink(tiny_run({"parallel.tp": "2"}), 12).run.parallel.dp == 2
    assert shrink(tiny_run(), 1).world == 1


def test_a_fault_goes_along() -> None:
    assert isinstance(shrink(tiny_run(), 2, fault="dp_sum_averaged"), LayoutCase)
    assert shrink(tiny_run(), 2, fault="dp_sum_averaged").fault == "dp_sum_averaged"


@pytest.mark.parametrize("name", list(recipes()))
def test_every_recipe_has_a_copy(name: str) -> None:
    run = recipes()[name]()
    case = shrink(run, run.parallel.tp * (run.parallel.dp or 1))
    assert run_problems(case.run, case.world) == []


def test_it_recomputes_and_offloads_as_the_run_does() -> None:
    settings = {"recompute.granularity": "full", "recompute.num_layers": "4", "offload.layers": "3"}
    case = shrink(tiny_run({"parallel.tp": "2", "model.num_layers": "5"} | settings), 2)
    assert case.run.recompute.granularity == "full" and case.run.recompute.num_layers == 4
    assert case.run.offload.layers == 3 and case.run.offload.min_numel == 1
