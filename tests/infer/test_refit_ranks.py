"""Weights go from a training mesh into engines of other layouts, without gathering a tensor."""

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
from megalith.config.parallel import ParallelConfig
from megalith.config.serve import CacheConfig, EngineConfig, InferenceParallelConfig
from megalith.config.tree import dump_yaml
from megalith.errors import CheckpointError
from megalith.hf.release import release_run
from megalith.infer.load import (
    build_engine,
    build_generation_mesh,
    generation_layout,
    load_text_generator,
    open_source,
)
from megalith.infer.refit import TrainingWeights, send_weights
from megalith.models.decoder import Decoder, iter_parameter_specs
from megalith.parallel import transfer
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.plan.shards import is_first_replica, shard_rows
from megalith.testing.ranks import run_ranks, world_group
from tests.infer.engines import SAMPLED, build, run
from tests.infer.test_load import save

PROMPTS = [[5, 17, 36, 3, 14], [8], list(range(1, 12))]


def build_trained(
    config: ModelConfig, make: Any, rank: int, layout: ParallelConfig
) -> tuple[Decoder, Mesh]:
    """A model of the training mesh whose weights differ from the initial ones."""
    mesh = build_mesh(model_grid(layout, config, 4), rank=rank)
    model = make(config, mesh, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    return model, mesh


def list_shards(model: Decoder, mesh: Mesh, *, is_flat: bool) -> list[CheckpointEntry]:
    """The shards of a rank; `is_flat`: data-parallel ranks hold different rows, as with ZeRO."""
    entries = []
    for spec, module, name in iter_parameter_specs(model):
        shard, tensor = spec.shard, getattr(module, name).detach()
        if is_flat:
            shard = shard_rows(shard, mesh.dp.rank, mesh.dp.size, ("dp_shard",))
            assert shard.flat is not None
            tensor = tensor.reshape(-1)[slice(*shard.flat)].clone()
        is_writer = not is_flat and is_first_replica(spec.shard, mesh.coordinates)
        entries.append(CheckpointEntry(shard, "param", tensor, is_writer))
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
    rank: int, world: int, config: ModelConfig, make: Any, folder: Path, tp: int, layout: Any
) -> tuple[Any, ...]:
    """Update an engine with `tp` ranks; returns whether its weights are those of the checkpoint,
    the bytes of the messages, the peak of allocated memory, and generated tokens."""
    group = world_group(rank, world, "world")
    parallel, is_flat = layout
    trained, mesh = build_trained(config, make, rank, parallel)
    text = dump_yaml(release_run("tiny", config, TokenizerConfig(), folder))
    entries = list_shards(trained, mesh, is_flat=False)
    path = save_checkpoint(folder, 1, entries, {}, group, config_text=text).path
    source = TrainingWeights(list_shards(trained, mesh, is_flat=is_flat), group)
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


TP_DP = (ParallelConfig(tp=2), False)
LAYOUTS: dict[str, tuple[ParallelConfig, bool]] = {
    "tp 2 x dp 2": TP_DP,
    "zero": (ParallelConfig(tp=2), True),
}


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_mesh_updates_engines_of_other_layouts(
    layout: str, tp: int, tiny: SimpleNamespace, tmp_path: Path
) -> None:
    config = tiny.config(vocab_size=512, num_heads=4, hidden_size=64, ffn_hidden_size=48)
    results = run_ranks(update_on_a_rank, 4, config, tiny.model, tmp_path, tp, LAYOUTS[layout])
    largest = max(
        parameter.nbytes for parameter in tiny.model(config, dtype=torch.float32).parameters()
    )
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
    entries = list_shards(trained, mesh, is_flat=False)
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
        source, mesh, torch.device("cpu"), torch.float64, config=config, parallel=parallel
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
