"""The float64 comparison passes for correct layouts and reports wrong values of each kind."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig
from megalith.testing.ranks import run_ranks
from megalith.verify.ranks import (
    STEPS,
    Boxes,
    Difference,
    Gathered,
    RaggedRows,
    RankResult,
    choose_micro_batch_size,
    compare_results,
    compare_with_one_process,
    layout_case,
    run_case,
)

KINDS = (
    "first loss",
    "losses of all steps",
    "gradient norm",
    "initial weights",
    "gradients",
    f"weights after {STEPS} steps",
    "checkpoint",
    "weights one step after reload",
    "gradient norm against torch",
    "weights against torch.optim",
    "moments against torch.optim",
    "reloaded weights against torch.optim",
    "checkpoint under another layout",
    "replicas are equal",
)


def model(*, heads: int, keys: int, tied: bool = False) -> ModelConfig:
    """One layer with odd sizes."""
    return ModelConfig(
        vocab_size=61,
        pad_vocab_to_multiple_of=4,
        hidden_size=24,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=keys,
        head_dim=6,
        ffn_hidden_size=20,
        tied_embeddings=tied,
    )


LAYOUTS = {
    "three ranks share the only key/value head": (model(heads=3, keys=1), ParallelConfig(tp=3), 3),
    "two and one query heads for each key/value head": (
        model(heads=6, keys=2),
        ParallelConfig(tp=4, sp=True),
        4,
    ),
    "three ranks for two heads each and one": (
        model(heads=5, keys=5),
        ParallelConfig(tp=3, sp=True),
        3,
    ),
    "all in one": (model(heads=2, keys=1, tied=True), ParallelConfig(), 1),
}


def test_rerun_after_a_transient_fault_of_one_rank_matches_one_process() -> None:
    """Expert loads, aux losses, gradients and the optimizer count the step once."""
    experts = MoEConfig(
        num_experts=4, ffn_hidden_size=10, aux_loss=AuxLossConfig(global_batch_coeff=0.5)
    )
    case = layout_case(
        replace(model(heads=2, keys=1), moe=experts), ParallelConfig(dp=2, zero=1), 2
    )
    differences = compare_with_one_process(replace(case, transient_fault=True))
    assert [each for each in differences if not each.holds] == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_outside_the_matrix_match_one_process(name: str) -> None:
    built, parallel, world = LAYOUTS[name]
    differences = compare_with_one_process(
        layout_case(built, parallel, world, micro_batch_size=choose_micro_batch_size(parallel))
    )
    same = (
        {"checkpoint under another layout": "checkpoint under the same layout"}
        if world == 1
        else {}
    )
    assert [difference.what for difference in differences] == [
        same.get(kind, kind) for kind in KINDS
    ]
    assert all(difference.holds for difference in differences), differences


def test_mock_rows_are_uneven_and_some_have_no_label() -> None:
    rows = RaggedRows(seq_len=12, vocab_size=61, num_samples=200, masked=(0, 1, 2, 17))
    counts = [int(rows.sample(k).valid[1:].sum()) for k in range(len(rows))]
    assert [k for k, count in enumerate(counts) if count == 0] == [0, 1, 2, 17]
    assert set(counts) == set(range(13))
    assert all((rows.sample(k).ids == rows.sample(k).ids).all() for k in range(4))
    assert rows.sample(3).ids.max() < 61


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> RankResult:
    """One process's answer."""
    case = layout_case(model(heads=2, keys=1), ParallelConfig(), 1)
    result = run_case(0, 1, case, str(tmp_path_factory.mktemp("reference")))
    return result


def failing(found: list[Difference]) -> set[str]:
    """What does not hold."""
    return {difference.what for difference in found if not difference.holds}


def changed(gathered: Gathered, name: str, factor: float) -> Gathered:
    """The same slices, one tensor scaled."""
    boxes = gathered[name]
    return gathered | {
        name: Boxes(boxes.shape, [(box, values * factor) for box, values in boxes.parts])
    }


def test_result_matches_itself(reference: RankResult) -> None:
    result = compare_results(reference, reference)
    assert failing(result) == set()
    assert all(difference.error == 0 or "torch" in difference.what for difference in result), result


NAME = "layers.0.mlp.down"


@pytest.mark.parametrize("factor", [1 + 1e-8, 0.5, float("nan")])
def test_one_wrong_tensor_is_reported_by_name(reference: RankResult, factor: float) -> None:
    wrong = {
        "initial weights": replace(reference, initial=changed(reference.initial, NAME, factor)),
        "gradients": replace(reference, gradients=changed(reference.gradients, NAME, factor)),
        f"weights after {STEPS} steps": replace(
            reference, weights=changed(reference.weights, NAME, factor)
        ),
        "weights one step after reload": replace(
            reference, reloaded=changed(reference.reloaded, NAME, factor)
        ),
        "checkpoint": replace(
            reference,
            stored=reference.stored | {f"model.{NAME}": reference.stored[f"model.{NAME}"] * factor},
        ),
    }
    for what, result in wrong.items():
        results = [
            difference for difference in compare_results(result, reference) if not difference.holds
        ]
        assert NAME in {difference.what: difference.name for difference in results}[what], (
            what,
            results,
        )
        by_torch = {
            f"weights after {STEPS} steps": "weights",
            "weights one step after reload": "reloaded weights",
        }
        # a NaN is no copy of itself
        also = {
            "replicas are equal",
            f"{by_torch.get(what)} against torch.optim",
        }
        assert {difference.what for difference in results} <= {what, *also}


def test_initial_weights_are_compared_bitwise(reference: RankResult) -> None:
    result = replace(reference, initial=changed(reference.initial, NAME, 1 + 2**-52))
    assert failing(compare_results(result, reference)) == {"initial weights"}


def test_wrong_losses_and_norms_are_reported(reference: RankResult) -> None:
    result = replace(reference, losses=[reference.losses[0] * (1 + 1e-7), *reference.losses[1:]])
    assert failing(compare_results(result, reference)) == {"first loss", "losses of all steps"}
    result = replace(reference, losses=[*reference.losses[:-1], reference.losses[-1] * (1 + 1e-7)])
    assert failing(compare_results(result, reference)) == {"losses of all steps"}
    result = replace(reference, grad_norms=[*reference.grad_norms[:-1], 0.0])
    assert failing(compare_results(result, reference)) == {
        "gradient norm",
        "gradient norm against torch",
    }


def test_wrong_moments_and_wrong_state_after_loading_are_reported(reference: RankResult) -> None:
    moment = f"optimizer.exp_avg_sq.{NAME}"
    result = replace(
        reference, stored=reference.stored | {moment: reference.stored[moment] * (1 + 1e-8)}
    )
    assert failing(compare_results(result, reference)) == {
        "checkpoint",
        "moments against torch.optim",
    }
    for name in (moment, f"model.{NAME}", "optimizer step"):  # to the last bit
        result = replace(reference, resharded=changed(reference.resharded, name, 1 + 2**-52))
        differences = {
            one.what: one.name for one in compare_results(result, reference) if not one.holds
        }
        assert differences == {"checkpoint under the same layout": name}
    lost = {name: boxes for name, boxes in reference.resharded.items() if name != moment}
    assert failing(compare_results(replace(reference, resharded=lost), reference)) == {
        "checkpoint under the same layout"
    }


def test_gradient_that_is_zero_on_both_sides_is_rejected(reference: RankResult) -> None:
    zero = replace(reference, gradients=changed(reference.gradients, NAME, 0.0))
    results = {difference.what: difference for difference in compare_results(zero, zero)}
    assert failing(list(results.values())) == {"gradients"}
    assert results["gradients"].name == f"{NAME} is all zero"


def test_missing_tensor_and_missing_slice_are_reported(reference: RankResult) -> None:
    missing = {name: boxes for name, boxes in reference.gradients.items() if name != NAME}
    assert failing(compare_results(replace(reference, gradients=missing), reference)) == {
        "gradients"
    }
    boxes = reference.gradients[NAME]
    (_, values) = boxes.parts[0]
    half = [(((0, 12), (0, 20)), values[:12])]
    holed = reference.gradients | {NAME: Boxes(boxes.shape, half)}
    assert failing(compare_results(replace(reference, gradients=holed), reference)) == {"gradients"}


def test_different_replicas_are_reported_even_if_the_last_one_is_correct(
    reference: RankResult,
) -> None:
    boxes = reference.weights[NAME]
    box, values = boxes.parts[0]
    other = Boxes(boxes.shape, [(box, values + 1e-6), (box, values)])
    result = compare_results(
        replace(reference, weights=reference.weights | {NAME: other}), reference
    )
    assert failing(result) == {"replicas are equal"}
    assert result[-1].name == NAME


EXPERTS = replace(
    model(heads=2, keys=2),
    num_layers=2,
    moe=MoEConfig(
        num_experts=3,
        ffn_hidden_size=5,
        router=RouterConfig(score="sigmoid", expert_bias=True),
        aux_loss=AuxLossConfig(batch_coeff=0.1),
    ),
)


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory: pytest.TempPathFactory) -> RankResult:
    """One process's answer, of a model with experts."""
    result = run_case(
        0, 1, layout_case(EXPERTS, ParallelConfig(), 1), str(tmp_path_factory.mktemp("experts"))
    )
    return result


def test_expert_load_is_compared_first_by_step_and_layer(with_experts: RankResult) -> None:
    assert failing(compare_results(with_experts, with_experts)) == set()
    first, *others = with_experts.uses
    (use, last) = first
    counts = use.counts[0] - 1, use.counts[1] + 1, use.counts[2]
    wrong = replace(with_experts, uses=[[use._replace(counts=counts), last], *others])
    result = compare_results(wrong, with_experts)[0]
    got, wanted = ([int(count) for count in each] for each in (counts, use.counts))
    assert result == Difference(
        "expert load",
        f"step 1, layers.0: experts got {got} tokens instead of {wanted}",
        float("inf"),
        False,
    )
    dropping = replace(with_experts, uses=[[use, last._replace(num_dropped=2.0)], *others])
    assert (
        compare_results(dropping, with_experts)[0].name
        == "step 1, layers.1: 2 choices were dropped instead of 0"
    )


def test_wrong_aux_losses_and_expert_biases_are_reported(with_experts: RankResult) -> None:
    first, *others = with_experts.uses
    losses = tuple(loss * (1 + 1e-7) for loss in first[0].losses)
    wrong = replace(with_experts, uses=[[first[0]._replace(losses=losses), first[1]], *others])
    assert failing(compare_results(wrong, with_experts)) == {"aux losses"}
    (name, (bias,)), *_ = with_experts.biases.items()
    assert bool(bias.any())
    moved = replace(with_experts, biases=with_experts.biases | {name: [bias * (1 + 2**-52)]})
    assert failing(compare_results(moved, with_experts)) == {"expert biases"}
    apart = replace(with_experts, biases=with_experts.biases | {name: [bias, bias + 1e-3]})
    assert failing(compare_results(apart, with_experts)) == {"replicas are equal"}


def test_dense_model_has_no_expert_rows(reference: RankResult) -> None:
    assert compare_results(reference, reference)[0].what == "first loss"


def open_files(rank: int, world: int) -> int:
    """Of this process, sockets too, after it has cleaned up; -1 where there is no list of them."""
    gc.collect()
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else -1


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(tp=2, sp=True), ParallelConfig(dp=2, zero=3)],
    ids=["tp2 sp", "zero 3"],
)
def test_worker_destroys_the_process_groups_of_a_case(parallel: ParallelConfig) -> None:
    """They would run out of file descriptors: a case has several groups, and a pool runs hundreds
    of cases."""
    before = run_ranks(open_files, 2)
    compare_with_one_process(layout_case(model(heads=2, keys=2), parallel, 2))
    assert all(
        now <= earlier for now, earlier in zip(run_ranks(open_files, 2), before, strict=True)
    )


def test_number_of_threads_is_restored(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_case(0, 1, layout_case(model(heads=2, keys=2), ParallelConfig(), 1), str(tmp_path))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
