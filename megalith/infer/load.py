"""Load a trained model with its tokenizer for text generation."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.fields import range_problems
from megalith.config.kernels import (
    OPS,
    KernelsConfig,
    KernelSetting,
    expand_kernel_setting,
    is_explicit_backend,
)
from megalith.config.model import ModelConfig, MTPConfig
from megalith.config.parallel import ParallelConfig, PipelineConfig
from megalith.config.serve import (
    EngineConfig,
    InferenceParallelConfig,
    Quantization,
    SpeculationConfig,
    engine_problems,
    parallel_problems,
)
from megalith.config.train import TrainRun
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import ConfigError, DataError, raise_all
from megalith.hf.pretrained import (
    Pretrained,
    check_has_adapters,
    load_weights,
    locate_source,
    open_pretrained,
)
from megalith.hf.release import release_run
from megalith.infer.adapters import AdapterManager
from megalith.infer.batch_invariance import check_batch_invariance
from megalith.infer.cache import (
    CachePlan,
    PagedKVCache,
    check_cache_dtype,
    plan_cache,
    plan_pool,
    token_groups,
)
from megalith.infer.draft_model import DraftModelProposer, check_same_vocabulary
from megalith.infer.engine import EngineCallback, InferenceEngine
from megalith.infer.mtp_drafts import MTPProposer, plan_mtp_cache
from megalith.infer.pipeline import PipelineLink
from megalith.infer.quantize import (
    build_int8_grouped_matmul_ops,
    build_int8_matmul_ops,
    check_int8_supported,
    iter_quantized_weights,
    load_int8_weights,
    set_int8_dtype,
)
from megalith.infer.refit import WeightUpdater
from megalith.infer.runner import ModelRunner
from megalith.infer.speculative import (
    NUM_DRAFT_TOKENS,
    DraftLengthController,
    DraftProposer,
    NGramProposer,
    Speculator,
    check_speculation,
)
from megalith.kernels.backend import select_backends, unavailable_backends
from megalith.kernels.linear_small_batch import ALL_ROW_COUNTS, NO_ROW_COUNTS, SmallBatchLimits
from megalith.kernels.small_batch_limits import load_or_measure_limits
from megalith.models.decoder import Decoder, allocate, build_chunks, iter_parameter_specs
from megalith.nn.batched_lora import StepAdapters
from megalith.nn.build import build_context, fastest_matmul_ops, plain_matmul_ops
from megalith.nn.mlp import ChunkedPrefillMLP
from megalith.observe.limits import free_memory
from megalith.parallel.group import (
    SINGLE_RANK,
    Group,
    gather_objects,
    raise_on_all_ranks,
)
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.plan.grid import divisors, model_grid
from megalith.plan.kernels import find_backend_spec, why_not
from megalith.plan.shards import DENSE_AXES
from megalith.plan.stages import plan_stages
from megalith.rules.moe import expert_layout_problems
from megalith.rules.run import check_kv_heads_fit_tp, model_problems

logger = logging.getLogger(__name__)

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

DEFAULT_CONFIG = EngineConfig()
DEFAULT_PARALLEL = InferenceParallelConfig()

MTP_PARAMETERS = ("mtp.*",)
"""Parameters of MTP layers, which are not loaded unless they propose draft tokens."""


@dataclass(frozen=True, slots=True)
class TextGenerator:
    """A model with its tokenizer and stop tokens, ready to generate text."""

    model: Decoder
    tokenizer: Tokenizer
    stops: frozenset[int]
    """Tokens that end a text."""

    kernels: KernelSetting = "auto"
    """Kernel backends of the model and its engine."""

    source: Pretrained | None = None
    """What it was loaded from."""

    quantization: Quantization = "none"

    draft_model: Decoder | None = None
    """Smaller model that proposes draft tokens."""

    ranks: Group = SINGLE_RANK
    """Ranks that share the model."""

    dp: Group = SINGLE_RANK
    """Data-parallel ranks, which have requests of their own."""

    expert_group: Group = SINGLE_RANK
    """Ranks with other requests that share experts, and the other tensor-parallel ranks."""

    link: PipelineLink | None = None
    """Connection to the other pipeline stages."""

    step_adapters: StepAdapters | None = None
    """Adapters of the tokens of a step; None: the model was built without."""

    replicate_kv_heads: bool = False
    """See `InferenceParallelConfig`."""


def open_source(
    source: str,
    ranks: int,
    *,
    base: str | None = None,
    parallel: InferenceParallelConfig = DEFAULT_PARALLEL,
) -> Pretrained:
    """Open the model named by `source` and check that `ranks` can share it; `base`: folder of the
    base of adapters.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: the number of ranks is not that of the layout, or tp is too large or does not
            divide the heads; or there is a base but no adapters.
    """
    opened = open_pretrained(locate_source(source), base=base)
    if base is not None:
        check_has_adapters(opened, base)
    raise_all(_model_problems(opened, 1) + generation_problems(opened.model))
    raise_all(inference_layout_problems(opened.model, ranks, parallel))
    if problems := _model_problems(opened, ranks, parallel):
        others = parallel.pp * parallel.dp
        heads = opened.model.num_heads
        counts = [others * tp for tp in sorted({*range(1, min(heads, 16) + 1), *divisors(heads)})]
        fits = [str(each) for each in counts if not _model_problems(opened, each, parallel)]
        raise ConfigError(
            f"--nproc={ranks}: this number of processes cannot share {opened.path}: "
            f"{_why_not(opened, ranks, parallel, problems[0])}. "
            f"Set --nproc to one of {', '.join(fits)}."
        )
    return opened


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
        tp=tp, pp=parallel.pp, sp=parallel.sp, pipeline=generation_pipeline(model, parallel.pp)
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
    """Return which layers each of `pp` stages has: equally many, or the first ones one more."""
    if pp == 1:
        return PipelineConfig()
    counts = [model.num_layers // pp + (stage < model.num_layers % pp) for stage in range(pp)]
    return PipelineConfig(layout="E" + "|".join(f"t*{count}" for count in counts) + "L")


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
    others = parallel.pp * parallel.dp
    if ranks % others:
        problems.append(
            f"parallel.pp={parallel.pp} and parallel.dp={parallel.dp} with --nproc={ranks}: every "
            "stage and every data-parallel rank has equally many processes. Set --nproc to a "
            f"multiple of {others}."
        )
    elif parallel.tp not in (None, ranks // others):
        problems.append(
            f"parallel.tp={parallel.tp}, parallel.pp={parallel.pp} and parallel.dp={parallel.dp} "
            f"with --nproc={ranks}: tp x pp x dp is the number of processes. Set --nproc to "
            f"{parallel.tp * others}."
        )
    elif parallel.sp and model.mla is not None:
        problems.append(
            "parallel.sp=true with model.mla: every rank caches the latent vectors of all tokens. "
            "Set parallel.sp to false; parallel.dp divides the sequences among ranks."
        )
    elif parallel.sp and ranks == others:
        problems.append(
            f"parallel.sp=true with --nproc={ranks}: there is one tensor-parallel rank, and no "
            "tokens to share. Set parallel.sp to false."
        )
    return problems


def generation_problems(model: ModelConfig) -> list[str]:
    """Return why a model cannot generate text token by token, as messages."""
    if model.attention.causal:
        return []
    return [
        f"model.attention.causal={str(model.attention.causal).lower()}: its tokens attend to later "
        "tokens, which are not generated yet. Use a model with model.attention.causal=true to "
        "generate."
    ]


def load_text_generator(
    source: Pretrained,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    *,
    kernels: KernelSetting = "auto",
    mlp_chunks: int = 1,
    config: EngineConfig = DEFAULT_CONFIG,
    parallel: InferenceParallelConfig = DEFAULT_PARALLEL,
) -> TextGenerator:
    """Build and load this rank's shard of the model, or of its pipeline stage. Collective over the
    mesh.

    `kernels`: backends; `mlp_chunks`: chunks in which MLPs process prompts; `config`: that of the
    engine, for the format of the weights, and the draft model or MTP layers; `parallel`: that of
    the mesh.

    Raises:
        CheckpointError: its weights are damaged.
        ConfigError: mlp_chunks is set, and no MLP supports it; a backend that is set by name cannot
            be used; or the device or the kernels do not support the quantization.
        DataError: its tokenizer no longer exists, or has more tokens than the model.
    """
    backends = expand_kernel_setting(kernels)
    raise_all(kernel_problems(backends, source.model, device, dtype))
    raise_all(parallel_problems(config, parallel))
    if backends.attention == "paged":  # of the engine; gathered keys use the fastest backend
        backends = replace(backends, attention="auto")
    tokenizer = build_tokenizer(source.tokenizer)
    check_vocabulary(tokenizer, source.model, source.path)
    draft_model = None
    if config.speculation.draft_model is not None:
        opened = open_draft_model(config.speculation.draft_model, source.model, mesh.tp.size)
        draft_config = replace(config, speculation=SpeculationConfig(), max_adapters=0, adapters=())
        draft = load_text_generator(
            opened, mesh, device, dtype, kernels=kernels, config=draft_config
        )
        check_same_vocabulary(tokenizer, draft.tokenizer, config.speculation.draft_model)
        draft_model = draft.model
    # MTP layers are used in training, and for draft tokens.
    model_config = source.model
    if config.speculation.method != "mtp":
        model_config = replace(model_config, mtp=MTPConfig())
    step_adapters = None if config.max_adapters == 0 else StepAdapters()
    if step_adapters is not None and mlp_chunks > 1:
        raise ConfigError(
            f"--mlp-chunks={mlp_chunks} with max_adapters={config.max_adapters}: chunks of MLPs "
            "have no adapters. Remove --mlp-chunks, or set max_adapters to 0."
        )
    quantizes = config.quantization == "int8"
    if quantizes:
        check_int8_supported(device, backends)
    layout = generation_layout(model_config, mesh.world.size, parallel)
    if model_config.moe is not None and layout.ep < layout.tp * parallel.dp:
        logger.warning(
            "%d experts do not divide over %d tensor- and data-parallel ranks, so that some ranks "
            "hold the same experts",
            model_config.moe.num_experts,
            layout.tp * parallel.dp,
        )
    context = build_context(
        model_config,
        mesh,
        layout,
        dtype=dtype,
        backends=select_backends(backends),
        prefill_mlp_chunks=mlp_chunks,
        step_adapters=step_adapters,
        build_matmul_ops=build_int8_matmul_ops if quantizes else plain_matmul_ops,
        build_grouped_matmul_ops=(
            build_int8_grouped_matmul_ops if quantizes else fastest_matmul_ops
        ),
    )
    (model,) = build_chunks(context)
    check_mlp_chunks(model, mlp_chunks, source.path)
    load_decoder(model, source, device, mesh.world)
    return TextGenerator(
        model=model.eval(),
        tokenizer=tokenizer,
        stops=stop_ids(source, tokenizer),
        kernels=kernels,
        source=source,
        quantization=config.quantization,
        draft_model=draft_model,
        ranks=mesh.world,
        dp=mesh.dp,
        expert_group=find_expert_group(layout, mesh),
        link=connect_stages(model, mesh.pp, device),
        step_adapters=step_adapters,
        replicate_kv_heads=parallel.replicate_kv_heads,
    )


def find_expert_group(layout: ParallelConfig, mesh: Mesh) -> Group:
    """Return the ranks of a pipeline stage if its data-parallel ranks share experts."""
    return mesh.over(*DENSE_AXES) if layout.ep > layout.tp else SINGLE_RANK


def connect_stages(model: Decoder, pp: Group, device: torch.device) -> PipelineLink | None:
    """Connect the pipeline stages of a model, of which this rank has `model`; None for one stage.
    Collective over the world."""
    if pp.size == 1:
        return None
    pipeline = generation_pipeline(model.config, pp.size)
    stages = plan_stages(pipeline, pp=pp.size, num_layers=model.config.num_layers, depths=0)
    return PipelineLink(pp, model, stages, device)


def check_mlp_chunks(model: Decoder, mlp_chunks: int, path: Path) -> None:
    """Check that a model has MLPs that process prompts in chunks, if there are several.

    Raises:
        ConfigError: it has none.
    """
    has_mlps = any(isinstance(module, ChunkedPrefillMLP) for module in model.modules())
    if mlp_chunks > 1 and not has_mlps:
        raise ConfigError(
            f"--mlp-chunks={mlp_chunks} chunks the input of dense MLPs, but no layer of {path} has "
            "one. Remove --mlp-chunks, or set it to 1."
        )


def load_decoder(model: Decoder, source: Pretrained, device: torch.device, world: Group) -> None:
    """Allocate a model and load its weights; those of int8 matmuls are quantized. Collective.

    Raises:
        CheckpointError: the weights are damaged.
    """
    quantized_weights = list(iter_quantized_weights(model))
    set_int8_dtype(quantized_weights)
    allocate(model, device)
    own_names = {shard.name for quantized in quantized_weights for shard in quantized.shards}
    # the check of the names covers the weights of all stages
    gathered = gather_objects(sorted(own_names), world)
    quantized_names = {str(name) for names in gathered if isinstance(names, list) for name in names}
    entries = [
        CheckpointEntry(spec.shard, "param", getattr(module, name))
        for spec, module, name in iter_parameter_specs(model)
        if spec.shard.name not in quantized_names
    ]
    skipped_mtp = MTP_PARAMETERS if model.config.mtp != source.model.mtp else ()
    rules = CheckpointConfig(skip=(*sorted(quantized_names), *skipped_mtp))
    load_weights(source, entries, world, rules=rules)
    raise_on_all_ranks(lambda: load_int8_weights(quantized_weights, source.weights), world)


def open_draft_model(source: str, model: ModelConfig, tp: int) -> Pretrained:
    """Open a draft model and check that the `tp` ranks of a model can share it.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: it needs another parallel layout.
    """
    opened = open_source(source, tp)
    layout = generation_layout(model, tp)
    if opened.model.moe is not None and generation_layout(opened.model, tp) != layout:
        raise ConfigError(
            f"speculation.draft_model={source}: its experts need another parallel layout than the "
            f"model on {tp} processes. Use a draft model without experts, or --nproc=1."
        )
    return opened


def kernel_problems(
    kernels: KernelsConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Return a message for every backend that is set by name and that inference cannot use."""
    problems = []
    for op in OPS:
        backend = kernels.backend_name(op)
        if not is_explicit_backend(backend):
            continue
        reason = why_not(
            find_backend_spec(op, backend),
            DTYPE_NAMES.get(dtype, "fp64"),
            device.type,
            unavailable_backends(),
        )
        if op in ("dropout", "cross_entropy"):
            reason = "only training uses it"
        elif op == "attention" and backend != "paged":
            reason = "the keys and values are in a paged KV cache, which it does not read"
        elif op == "attention" and model.positions == "relative":
            reason = "it does not support relative position biases"
        if reason is not None:
            reason = reason.replace("precision.params", "dtype")
            problems.append(f"kernels.{op}={backend}: {reason}. Set kernels.{op} to auto.")
    return problems


def build_engine(
    generator: TextGenerator, config: EngineConfig, *, callbacks: Sequence[EngineCallback] = ()
) -> InferenceEngine:
    """Build an inference engine for a loaded model. Collective over its ranks.

    Raises:
        ConfigError: settings are invalid, or the memory does not suffice for the KV cache.
    """
    raise_all(engine_problems(config))
    if config.quantization not in ("none", generator.quantization):
        raise ConfigError(
            f"engine.quantization={config.quantization}: the model was loaded with quantization="
            f"{generator.quantization}. Load it with quantization={config.quantization}."
        )
    model = generator.model
    group, device = model.tp_comm.group, next(model.parameters()).device
    check_cache_dtype(config.cache.dtype, device)
    plan = plan_cache(
        model.config,
        tp=group.size,
        element_size=model.dtype.itemsize,
        dtype=config.cache.dtype,
        replicate_kv_heads=generator.replicate_kv_heads,
        layers=model.stage.layers,
    )
    check_speculation(config, plan)
    draft_plan = plan_draft_cache(generator, config)
    free_bytes, bytes_per_token = _reduce_memory(generator, plan, device)
    plan = replace(plan, bytes_per_token=bytes_per_token)
    # bytes of a token in all groups: both caches store as many tokens
    own_bytes = max(1, plan.bytes_per_token * len(plan.layout.groups))
    draft_bytes = 0
    if draft_plan is not None:
        draft_bytes = draft_plan.bytes_per_token * len(draft_plan.layout.groups)
    size = plan_pool(
        model.config,
        config,
        plan,
        free_bytes=free_bytes * own_bytes // (own_bytes + draft_bytes),
    )
    kernels = expand_kernel_setting(generator.kernels)
    cache = PagedKVCache(
        plan,
        num_blocks=size.num_blocks,
        block_size=config.cache.block_size,
        batch_invariant=config.batch_invariant,
        kernel=kernels.backend_name("attention"),
        has_padding=not model.tp_comm.invariant or generator.expert_group.size > 1,
        groups=token_groups(model),
    )
    if config.batch_invariant:
        _check_invariant_backends(kernels)
    limits = _small_batch_limits(generator, config, device)
    adapters = build_adapter_manager(generator, config)
    runner = ModelRunner(
        model,
        cache,
        limits=limits,
        link=generator.link,
        adapters=adapters,
        expert_group=generator.expert_group,
    )

    def build(callbacks: Sequence[EngineCallback]) -> InferenceEngine:
        return InferenceEngine(
            runner,
            config,
            max_model_len=size.max_model_len,
            tokenizer=generator.tokenizer,
            eos_token_ids=generator.stops,
            callbacks=callbacks,
            speculator=build_speculator(generator, config, runner, draft_plan),
            dp=generator.dp,
            updater=WeightUpdater(model, generator.ranks, generator.source),
        )

    if config.batch_invariant:
        check_batch_invariance(build(()))
    engine = build(callbacks)
    for entry in config.adapters:
        engine.load_adapter(*entry.split("=", 1))
    logger.info("%s", engine.describe())
    if config.max_model_len is None:
        _warn_if_context_is_reduced(size.max_model_len, model.config, config)
    return engine


def build_adapter_manager(generator: TextGenerator, config: EngineConfig) -> AdapterManager | None:
    """Return the adapters of an engine, none of them loaded; None if it holds none.

    Raises:
        ConfigError: the generator was loaded without them.
    """
    if config.max_adapters == 0:
        return None
    if generator.step_adapters is None or generator.source is None:
        raise ConfigError(
            f"max_adapters={config.max_adapters}: the model was loaded without adapters. Pass the "
            "same config to load_generator."
        )
    return AdapterManager(
        generator.model,
        generator.step_adapters,
        generator.source,
        generator.ranks,
        max_adapters=config.max_adapters,
        max_rank=config.max_lora_rank,
    )


def _warn_if_context_is_reduced(
    max_model_len: int, model: ModelConfig, config: EngineConfig
) -> None:
    """Warn if the KV cache cannot hold a sequence of the model's context length."""
    if max_model_len < model.max_seq_len:
        logger.warning(
            "the KV cache holds sequences of at most %d tokens, less than the context of %d. For "
            "longer ones increase cache.memory_fraction=%s, or free memory.",
            max_model_len,
            model.max_seq_len,
            config.cache.memory_fraction,
        )


def _check_invariant_backends(kernels: KernelsConfig) -> None:
    """Check that no operation is set to a backend whose results depend on the number of tokens.

    Raises:
        ConfigError: there is one.
    """
    for op in OPS:
        backend = kernels.backend_name(op)
        if backend not in ("auto", "numba", "paged"):
            raise ConfigError(
                f"batch_invariant=true with kernels.{op}={backend}: it needs the compiled kernels, "
                "for every number of tokens. Set kernels to auto, or batch_invariant to false."
            )


def plan_draft_cache(generator: TextGenerator, config: EngineConfig) -> CachePlan | None:
    """Plan the KV cache of the draft model or the MTP layers, if the engine uses one.

    Raises:
        ConfigError: the generator was loaded without it, or it has recurrent states.
    """
    speculation, model = config.speculation, generator.model
    tp, element_size = model.tp_comm.group.size, model.dtype.itemsize
    if speculation.method == "mtp":
        num_layers = speculation.num_draft_tokens or max(1, model.config.mtp.num_layers)
        return plan_mtp_cache(
            model.config,
            num_layers=num_layers,
            tp=tp,
            element_size=element_size,
            dtype=config.cache.dtype,
            replicate_kv_heads=generator.replicate_kv_heads,
        )
    if speculation.method != "draft_model":
        return None
    if generator.draft_model is None:
        raise ConfigError(
            f"speculation.draft_model={speculation.draft_model}: the model was loaded without it. "
            "Pass the same config to load_generator."
        )
    plan = plan_cache(
        generator.draft_model.config,
        tp=tp,
        element_size=element_size,
        dtype=config.cache.dtype,
        replicate_kv_heads=generator.replicate_kv_heads,
    )
    check_speculation(config, plan)
    return plan


def build_speculator(
    generator: TextGenerator,
    config: EngineConfig,
    runner: ModelRunner,
    draft_plan: CachePlan | None,
) -> Speculator | None:
    """Return the speculator of an engine; None without drafts. `runner`: of its model. The cache of
    `draft_plan` stores as many tokens as that of the model."""
    if config.speculation.method == "none":
        return None
    model, max_tokens = runner.model, config.max_num_batched_tokens
    longest = config.speculation.num_draft_tokens or NUM_DRAFT_TOKENS
    proposer: DraftProposer = NGramProposer()
    if draft_plan is not None:
        num_groups = max(1, len(runner.cache.plan.layout.groups))
        cache = PagedKVCache(
            draft_plan,
            num_blocks=-(-runner.cache.num_blocks * len(draft_plan.layout.groups) // num_groups),
            block_size=runner.cache.block_size,
            kernel=runner.cache.kernel,
            groups=token_groups(generator.draft_model or model),
        )
        if generator.draft_model is None:
            longest = len(draft_plan.slots)
            proposer = MTPProposer(runner, cache, max_tokens=max_tokens)
        else:
            proposer = DraftModelProposer(
                ModelRunner(generator.draft_model, cache, limits=runner.limits),
                vocab_size=model.config.vocab_size,
                max_num_batched_tokens=max_tokens,
            )
    # the clocks of ranks differ
    measures_time = generator.ranks.size == 1
    return Speculator(proposer, DraftLengthController(longest, measures_time=measures_time))


def _small_batch_limits(
    generator: TextGenerator, config: EngineConfig, device: torch.device
) -> SmallBatchLimits:
    """Return the numbers of rows for which matmuls use the small-batch kernel, the same on all
    tensor-parallel ranks."""
    backend = expand_kernel_setting(generator.kernels).backend_name("small_batch_matmul")
    if backend == "numba":
        return ALL_ROW_COUNTS
    if device.type != "cpu" or backend != "auto" or config.batch_invariant:
        return NO_ROW_COUNTS
    group = generator.model.tp_comm.group
    limits = gather_objects(load_or_measure_limits(), group)[0]
    assert isinstance(limits, SmallBatchLimits)
    return limits


def _reduce_memory(
    generator: TextGenerator, plan: CachePlan, device: torch.device
) -> tuple[int, int]:
    """Return the free bytes of memory of the rank that has least, and the bytes per token of the
    stage that stores most, so that all ranks have the same blocks. Ranks share the memory of
    CPUs."""
    if device.type == "cpu":
        free = free_memory() // generator.ranks.size
    else:
        free, _ = torch.accelerator.memory.get_memory_info(device)
    values = gather_objects((free, plan.bytes_per_token), generator.ranks)
    pairs = [each for each in values if isinstance(each, tuple)]
    return min(pair[0] for pair in pairs), max(pair[1] for pair in pairs)


def check_vocabulary(tokenizer: Tokenizer, model: ModelConfig, path: Path) -> None:
    """Check that the model has a row for every id of the tokenizer.

    Raises:
        DataError: the tokenizer has more tokens.
    """
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, but the model has only "
            f"{model.vocab_size}. "
            f"Use the tokenizer that the model was trained with."
        )


def stop_ids(source: Pretrained, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a text: those that the folder names, and the tokenizer's
    end-of-document token."""
    ids = source.stop_ids()
    # a Hugging Face folder, or converted from one
    is_converted = source.checkpoint is None or bool(source.token_ids)
    if is_converted and source.tokenizer.kind == "null":
        # without a tokenizer, its ids have no meaning
        return ids
    try:
        return ids | {tokenizer.eod}
    except DataError:  # without such a token, generation ends by length
        return ids
