"""Parallel layout of a model during inference: which processes can share it, and their mesh."""

import re
from collections.abc import Sequence
from dataclasses import replace

from megalith.checkpoint.load import WeightsRole
from megalith.config.fields import range_problems
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig, PipelineConfig
from megalith.config.serve import (
    InferenceParallelConfig,
    process_count_problems,
)
from megalith.config.train import TrainRun
from megalith.errors import UserError, raise_all
from megalith.hf.pretrained import (
    Pretrained,
    check_has_adapters,
    locate_source,
    open_pretrained,
)
from megalith.hf.release import release_run
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.plan.grid import divisors, model_grid
from megalith.rules.moe import expert_layout_problems
from megalith.rules.run import check_kv_heads_fit_tp, model_problems

DEFAULT_PARALLEL = InferenceParallelConfig()


def open_source(
    source: str,
    ranks: int,
    *,
    base: str | None = None,
    parallel: InferenceParallelConfig = DEFAULT_PARALLEL,
    problems: Sequence[str] = (),
    role: WeightsRole = "param",
) -> Pretrained:
    """Open the model named by `source` and check that `ranks` can share it; `base`: folder of the
    base of adapters; `problems`: with other settings, which are reported with those of the layout;
    `role` ema: with the moving average of the weights.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: the number of ranks is not that of the layout, or tp is too large or does not
            divide the heads; or there is a base but no adapters; or there are other problems.
    """
    try:
        opened = open_pretrained(locate_source(source), base=base, role=role)
        if base is not None:
            check_has_adapters(opened, base)
    except UserError:
        raise_all(problems)
        raise
    own_problems = _model_problems(opened, 1) + generation_problems(opened.model)
    own_problems = own_problems or _layout_problems(opened, ranks, parallel)
    raise_all([*problems, *own_problems])
    return opened


def _layout_problems(
    opened: Pretrained, ranks: int, parallel: InferenceParallelConfig
) -> list[str]:
    """Return why ranks cannot share a model."""
    problems = inference_layout_problems(opened.model, ranks, parallel)
    if problems or not (model_problems := _model_problems(opened, ranks, parallel)):
        return problems
    others = parallel.pp * parallel.dp
    heads = opened.model.num_heads
    counts = [others * tp for tp in sorted({*range(1, min(heads, 16) + 1), *divisors(heads)})]
    fits = [str(each) for each in counts if not _model_problems(opened, each, parallel)]
    return [
        f"--nproc={ranks}: this number of processes cannot share {opened.path}: "
        f"{_why_not(opened, ranks, parallel, model_problems[0])}. "
        f"Set --nproc to one of {', '.join(fits)}."
    ]


def _model_problems(
    opened: Pretrained, ranks: int, parallel: InferenceParallelConfig = DEFAULT_PARALLEL
) -> list[str]:
    """Return the problems with a model or with its parallel layout."""
    run = _run(opened, ranks, parallel)
    problems = model_problems(run, trains=False)
    return problems or expert_layout_problems(opened.model, run.parallel, ranks, trains=False)


def _run(opened: Pretrained, ranks: int, parallel: InferenceParallelConfig) -> TrainRun:
    run = release_run("generate", opened.model, opened.tokenizer, opened.path)
    return replace(run, parallel=generation_layout(opened.model, ranks, parallel))


def _why_not(
    opened: Pretrained, ranks: int, parallel: InferenceParallelConfig, problem: str
) -> str:
    """Return why ranks cannot share a model, in terms of --nproc instead of the settings of a
    run."""
    run = _run(opened, ranks, parallel)
    if check_kv_heads_fit_tp(run, run.parallel.tp) is not None:
        return (
            f"each process needs complete KV heads of model.num_heads={opened.model.num_heads} and "
            f"model.num_kv_heads={opened.model.num_kv_heads}, or an equal number of processes "
            "per KV head"
        )
    reason = re.sub(r"parallel\.\w+=\d+ with ", "", problem.partition(". Set ")[0])
    return re.sub(r"parallel\.\w+=\d+", f"--nproc={ranks}", reason)


def generation_layout(
    model: ModelConfig, ranks: int, parallel: InferenceParallelConfig = DEFAULT_PARALLEL
) -> ParallelConfig:
    """Return the parallel layout for generation: experts are distributed over the tensor- and
    data-parallel ranks of a pipeline stage if they divide evenly, else over the tensor-parallel
    ones.

    Ranks that share experts take part in every all-to-all: see `InferenceEngine.step`.
    """
    tp = ranks // (parallel.pp * parallel.dp)
    layout = ParallelConfig(
        tp=tp,
        pp=parallel.pp,
        sp=parallel.sp,
        overlap=False,  # there is no backward
        pipeline=generation_pipeline(model, parallel.pp),
    )
    if model.moe is None:
        return layout
    for ep in (tp * parallel.dp, tp):
        if model.moe.num_experts % ep == 0:
            return replace(layout, ep=ep, etp=1)
    return layout


def build_generation_mesh(
    model: ModelConfig, parallel: InferenceParallelConfig, *, rank: int, world: int
) -> Mesh:
    """Return the mesh of this rank. Collective over the world."""
    layout = generation_layout(model, world, parallel)
    return build_mesh(model_grid(layout, model, world), rank=rank)


def generation_pipeline(model: ModelConfig, pp: int) -> PipelineConfig:
    """Return which layers each of `pp` stages has: equally many, or the first ones one more; the
    last one has the MTP layers."""
    if pp == 1:
        return PipelineConfig()
    counts = [model.num_layers // pp + (stage < model.num_layers % pp) for stage in range(pp)]
    layers = "|".join(f"t*{count}" for count in counts)
    return PipelineConfig(layout=f"E{layers}{'m' * model.mtp.num_layers}L")


def inference_layout_problems(
    model: ModelConfig, ranks: int, parallel: InferenceParallelConfig
) -> list[str]:
    """Return a message for every setting of a layout that does not fit the processes or the
    model."""
    problems = range_problems(parallel, "parallel")
    if problems:
        return problems
    if parallel.pp > model.num_layers:
        problems.append(
            f"parallel.pp={parallel.pp} is more than model.num_layers={model.num_layers}: every "
            f"stage has a layer. Set parallel.pp to at most {model.num_layers}."
        )
    copies = parallel.dp_replicate or parallel.dp
    num_experts = 0 if model.moe is None else model.moe.num_experts
    num_ranks = ranks // (parallel.pp * copies)  # of a stage
    if parallel.dp > copies and (num_experts == 0 or num_experts % max(num_ranks, 1)):
        problems.append(
            f"parallel.dp_replicate={copies} with parallel.dp={parallel.dp}: {num_ranks} ranks "
            f"cannot share the {num_experts} experts of the model equally. Leave "
            "parallel.dp_replicate unset."
        )
    return problems + process_count_problems(parallel, ranks)


def generation_problems(model: ModelConfig) -> list[str]:
    """Return why a model cannot generate text token by token, as messages."""
    if model.attention.causal:
        return []
    return [
        f"model.attention.causal={str(model.attention.causal).lower()}: its tokens attend to later "
        "tokens, which are not generated yet. Use a model with model.attention.causal=true to "
        "generate."
    ]
