"""Weights go from a training mesh into engines of other layouts, without gathering a tensor."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.config.data import TokenizerConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import CapacityConfig, MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.serve import CacheConfig, EngineConfig, InferenceParallelConfig
from megalith.config.train import TrainRun
from megalith.config.tree import dump_yaml
from megalith.errors import CheckpointError
from megalith.infer.build import build_engine
from megalith.infer.layout import build_generation_mesh, generation_layout, open_source
from megalith.infer.load import find_expert_group, load_text_generator
from megalith.infer.refit import TrainingWeights, send_weights
from megalith.models.decoder import iter_parameter_specs
from megalith.parallel import transfer
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks, world_group
from megalith.testing.tiny import tiny_run
from megalith.train.trainer import build_trainer, checkpoint_entries
from tests.infer.engines import SAMPLED, build, run
from tests.infer.test_load import save

CPU = torch.device("cpu")
PROMPTS = [[5, 17, 36, 3, 14], [8], list(range(1, 12))]


def build_trained(run: TrainRun, rank: int, world: int) -> list[CheckpointEntry]:
    """The entries of a trainer whose weights differ from the initial ones."""
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    trainer = build_trainer(run, mesh, CPU)
    entries = checkpoint_entries(trainer)
    with torch.no_grad():
        for entry in entries:
            entry.tensor.mul_(0.7)
    return entries


def find_peak(profiled: profile) -> int:
    """The largest number of bytes that were allocated at a time since the start."""
    results = profiled.profiler.kineto_results
    events = [each for each in results.events() if each.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def update_on_a_rank(
    rank: int, world: int, training: TrainRun, make: Any, folder: Path, tp: int
) -> tuple[Any, ...]:
    """Update an engine with `tp` ranks; returns whether its weights are those of the checkpoint,
    the bytes of the messages, the peak of allocated memory, and the generated tokens."""
    group = world_group(rank, world, "world")
    config, entries = training.model, build_trained(training, rank, world)
    path = save_checkpoint(folder, 1, entries, {}, group, config_text=dump_yaml(training)).path
    source = TrainingWeights(entries, group)
    sizes: list[int] = []
    start_send = transfer.start_send

    def record(x: Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.append(x.nbytes)
        return start_send(x, *arguments, **options)

    transfer.start_send = record
    model = engine = None
    if tp == world:
        model = make(
            config, build_mesh(model_grid(generation_layout(config, tp), config, tp), rank=rank)
        )
    elif rank == 0:
        model = make(config, build_single_rank_mesh())
    if model is not None:
        engine = build(model)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            if engine is None:
                send_weights(source)
            else:
                engine.update_weights(source)
    finally:
        transfer.start_send = start_send
    if engine is None:
        return True, sizes, find_peak(profiled), None
    checkpoint = open_checkpoint(path)
    is_equal = all(
        torch.equal(
            getattr(module, name).detach().reshape(spec.shard.box_shape),
            checkpoint.read(f"model.{spec.shard.name}", spec.shard.box),
        )
        for spec, module, name in iter_parameter_specs(model)
    )
    outputs = run(engine, [(prompt, SAMPLED) for prompt in PROMPTS])
    return is_equal, sizes, find_peak(profiled), [each.outputs[0] for each in outputs]


LAYOUTS = {
    "tp 2 x dp 2": ParallelConfig(tp=2, dp=2),
    "zero 1": ParallelConfig(tp=2, dp=2, zero=1),
    "zero 3": ParallelConfig(tp=2, dp=2, zero=3),
    "tp 2 x pp 2": ParallelConfig(tp=2, pp=2),
    "experts": ParallelConfig(tp=2, dp=2, ep=2, etp=1),
}


def slow(*values: object) -> Any:
    """Parameters of tests that `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(
    "layout", ["tp 2 x dp 2", "zero 3", *map(slow, ("zero 1", "tp 2 x pp 2", "experts"))]
)
def test_training_mesh_updates_engines_of_other_layouts(
    layout: str, tp: int, tiny: SimpleNamespace, tmp_path: Path
) -> None:
    training = tiny_run({"model.vocab_size": 1000, "model.hidden_size": 48})
    training = replace(training, parallel=LAYOUTS[layout])
    if layout == "experts":
        moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8)
        training = replace(training, model=replace(training.model, moe=moe))
    results = run_ranks(update_on_a_rank, 4, training, tiny.model, tmp_path, tp)
    model = tiny.model(training.model, dtype=torch.float32)
    largest = max(parameter.nbytes for parameter in model.parameters())
    for is_equal, sizes, peak, completions in results:
        assert is_equal
        # halves or less: no tensor that the training mesh shards is gathered
        assert max(sizes, default=0) <= largest // 2
        assert peak <= largest, (peak, largest)
        if completions is not None:
            assert [each.token_ids for each in completions] == [
                each.token_ids for each in results[0][3]
            ]
            assert all(each.weight_versions == [(0, 1)] for each in completions)
    sent = [sum(sizes) for _, sizes, _, _ in results]
    assert sum(sent) > 0
    if tp == 1 and layout == "tp 2 x dp 2":  # rank 0 has its half; ranks 1 and 3 share the other
        assert sent[0] == sent[2] == 0
        assert abs(sent[1] - sent[3]) <= largest // 2


def reject_on_a_rank(
    rank: int, world: int, config: ModelConfig, make: Any, damage: str
) -> tuple[str, bool]:
    group = world_group(rank, world, "world")
    mesh = build_mesh(model_grid(ParallelConfig(tp=2), config, 2), rank=rank)
    trained = make(config, mesh, dtype=torch.float32)
    entries = [
        CheckpointEntry(spec.shard, "param", getattr(module, name).detach())
        for spec, module, name in iter_parameter_specs(trained)
    ]
    if damage == "missing":
        entries = entries[1:]
    elif damage == "nan" and rank == 1:
        entries[3].tensor.fill_(float("nan"))
    elif damage == "hole" and rank == 1:
        entries = entries[:1]
    model = make(config, build_single_rank_mesh()) if rank == 0 else None
    before = [] if model is None else [each.detach().clone() for each in model.parameters()]
    try:
        source = TrainingWeights(entries, group)
        if model is None:
            send_weights(source)
        else:
            build(model).update_weights(source)
    except CheckpointError as error:
        parameters = [] if model is None else model.parameters()
        unchanged = all(map(torch.equal, parameters, before))
        return str(error), unchanged
    return "", False


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "the training mesh cannot replace the weights; missing parameters: embed"),
        ("nan", "has NaN or infinite values, so it cannot replace the weights"),
        ("hole", "rank 0 needs the elements"),
    ],
)
def test_weights_of_a_mesh_are_checked_before_any_is_sent(
    damage: str, message: str, tiny: SimpleNamespace
) -> None:
    for text, unchanged in run_ranks(reject_on_a_rank, 2, tiny.config(), tiny.model, damage):
        assert message in text and unchanged


def update_from_path(
    rank: int, world: int, paths: tuple[Path, Path], pp: int, mode: Any
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Update an engine on several ranks while requests are in flight, and generate again."""
    config = EngineConfig(cache=CacheConfig(num_blocks=64), max_model_len=64, max_num_seqs=4)
    parallel = InferenceParallelConfig(pp=pp)
    source = open_source(str(paths[0]), world, parallel=parallel)
    mesh = build_single_rank_mesh()
    if world > 1:
        mesh = build_generation_mesh(source.model, parallel, rank=rank, world=world)
    generator = load_text_generator(
        source, mesh, CPU, torch.float64, config=config, parallel=parallel
    )
    engine = build_engine(generator, config)
    outputs = [engine.output_of(engine.add_request(prompt, SAMPLED)) for prompt in PROMPTS]
    for _ in range(6):
        engine.step()
    engine.update_weights(paths[1], mode=mode)
    outputs += run(engine, [(prompt, SAMPLED) for prompt in PROMPTS])
    engine.scheduler.check()
    engine.runner.close()
    completions = [output.outputs[0] for output in outputs]
    return [(each.token_ids, each.weight_versions) for each in completions]


@pytest.mark.parametrize("mode", ["drain", "recompute"])
@pytest.mark.parametrize("pp", [1, 2])
def test_ranks_update_from_a_path_as_one_process(
    pp: int, mode: str, tiny: SimpleNamespace, tmp_path: Path
) -> None:
    """With pipeline stages, steps are in flight when the update begins."""
    model = tiny.model(tiny.config(vocab_size=300), dtype=torch.float64)
    old = save(tmp_path / "old", model, TokenizerConfig())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    paths = (old, save(tmp_path / "new", model, TokenizerConfig()))
    first, second = run_ranks(update_from_path, 2, paths, pp, mode)
    assert first == second
    (expected,) = run_ranks(update_from_path, 1, paths, 1, mode)
    if mode == "drain":
        assert first == expected
        return
    assert first[3:] == expected[3:]
    for tokens, versions in first[:3]:
        (start, zero), (boundary, one) = versions
        assert (start, zero, one) == (0, 0, 1) and 1 <= boundary < len(tokens) == 20


def drain_on_a_rank(
    rank: int, world: int, config: ModelConfig, make: Any, weights: dict[str, Tensor]
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Update an engine that shares experts with one that has another number of requests."""
    layout = generation_layout(config, world, InferenceParallelConfig(dp=2))
    mesh = build_mesh(model_grid(layout, config, world), rank=rank)
    model = make(config, mesh, parallel=layout, dtype=torch.float64)
    engine = build(model, expert_group=find_expert_group(layout, mesh), max_num_seqs=4)
    requests = [(prompt, SAMPLED) for prompt in (PROMPTS if rank == 0 else PROMPTS[:1])]
    numbers = [engine.add_request(*request) for request in requests]
    outputs = [engine.output_of(number) for number in numbers]
    for _ in range(3):
        engine.step()
    if rank == 1:
        engine.abort(numbers[0])  # it is drained at once, and rank 0 is not
    engine.update_weights(weights)
    outputs += run(engine, requests)
    return [(each.outputs[0].token_ids, each.outputs[0].weight_versions) for each in outputs]


def test_ranks_that_share_experts_drain_together(tiny: SimpleNamespace) -> None:
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=7, capacity=CapacityConfig())
    config = tiny.config(moe=moe)
    model = tiny.model(config, dtype=torch.float64)
    weights = {
        spec.shard.name: getattr(module, name).detach().reshape(spec.shard.shape) * 0.7
        for spec, module, name in iter_parameter_specs(model)
    }
    requests = [(prompt, SAMPLED) for prompt in PROMPTS]
    engine = build(model)
    expected = [each.outputs[0].token_ids for each in run(engine, requests)]
    engine.update_weights(weights)
    updated = [each.outputs[0].token_ids for each in run(engine, requests)]
    first, second = run_ranks(drain_on_a_rank, 2, config, tiny.model, weights)
    assert first == [
        *((tokens, [(0, 0)]) for tokens in expected),
        *((tokens, [(0, 1)]) for tokens in updated),
    ]
    assert second[1] == (updated[0], [(0, 1)])
