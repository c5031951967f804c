"""Build the inference engine of a loaded model: KV cache, draft tokens, adapters."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from megalith.config.kernels import (
    OPS,
    KernelsConfig,
    expand_kernel_setting,
)
from megalith.config.model import ModelConfig
from megalith.config.serve import (
    EngineConfig,
    bucket_settings,
    engine_problems,
)
from megalith.errors import ConfigError, raise_all
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
from megalith.infer.draft_model import DraftModelProposer
from megalith.infer.engine import InferenceEngine
from megalith.infer.graphs import plan_graphs
from megalith.infer.kv_offload import HostBlockPool, count_host_block_bytes, plan_host_blocks
from megalith.infer.load import TextGenerator
from megalith.infer.mtp_drafts import MTPProposer, plan_mtp_cache
from megalith.infer.outputs import EngineCallback
from megalith.infer.refit import WeightUpdater
from megalith.infer.runner import ModelRunner
from megalith.infer.speculative import (
    NUM_DRAFT_TOKENS,
    DraftLengthController,
    DraftProposer,
    NGramProposer,
    PipelineSpeculator,
    Speculator,
    check_speculation,
)
from megalith.kernels.linear_small_batch import ALL_ROW_COUNTS, NO_ROW_COUNTS, SmallBatchLimits
from megalith.kernels.small_batch_limits import load_or_measure_limits
from megalith.observe.limits import free_memory
from megalith.parallel.group import (
    gather_objects,
)

logger = logging.getLogger(__name__)


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
    plan, draft_plan = _plan_caches(generator, config)
    plan, free_bytes = _divide_memory(generator, plan, draft_plan)
    size = plan_pool(model.config, config, plan, free_bytes=free_bytes)
    kernels = expand_kernel_setting(generator.kernels)
    graphs = plan_graphs(
        config,
        model,
        plan,
        max_model_len=size.max_model_len,
        num_drafts=count_draft_tokens(config, draft_plan),
        kernels=kernels,
        expert_group=generator.expert_group,
    )
    cache = PagedKVCache(
        plan,
        num_blocks=size.num_blocks,
        block_size=config.cache.block_size,
        batch_invariant=config.batch_invariant,
        kernel=kernels.backend_name("attention"),
        has_padding=graphs is not None or _has_padding(generator),
        groups=token_groups(model),
    )
    if config.batch_invariant:
        _check_invariant_backends(kernels)
    limits = _small_batch_limits(generator, config)
    adapters = build_adapter_manager(generator, config)
    runner = ModelRunner(
        model,
        cache,
        limits=limits,
        link=generator.link,
        adapters=adapters,
        expert_group=generator.expert_group,
        host_pool=build_host_pool(generator, config, cache),
        graphs=graphs,
        is_recorded=config.graphs.mode in ("auto", "recorded"),
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
    if runner.graphs is None and config.graphs.mode == "auto":
        for name, value in bucket_settings(config.graphs).items():
            logger.warning("graphs.%s=%s has no effect without CUDA graphs", name, value)
    if runner.recorded is None:
        check_mode_is_not_recorded(config, _device_of(generator), num_ranks=generator.ranks.size)
    runner.capture_graphs()
    for entry in config.adapters:
        engine.load_adapter(*entry.split("=", 1))
    logger.info("%s", engine.describe())
    if config.max_model_len is None:
        _warn_if_context_is_reduced(size.max_model_len, model.config, config)
    return engine


def _has_padding(generator: TextGenerator) -> bool:
    """Return whether steps may have tokens of padding."""
    return not generator.model.tp_comm.invariant or generator.expert_group.size > 1


def check_mode_is_not_recorded(
    config: EngineConfig, device: torch.device, *, num_ranks: int
) -> None:
    """Check that the settings do not require recorded forward passes, which the engine of a device
    and a number of ranks does not have.

    Raises:
        ConfigError: they do.
    """
    if config.graphs.mode == "recorded":
        raise ConfigError(
            f"graphs.mode=recorded on {device.type} with {num_ranks} processes: passes are "
            "recorded on CPUs in one process. Set graphs.mode to auto."
        )


def _device_of(generator: TextGenerator) -> torch.device:
    return next(generator.model.parameters()).device


def _plan_caches(
    generator: TextGenerator, config: EngineConfig
) -> tuple[CachePlan, CachePlan | None]:
    """Plan the KV cache of the model, and that of its draft tokens if they have one.

    Raises:
        ConfigError: the device does not support the format, or the model no draft tokens.
    """
    model = generator.model
    check_cache_dtype(config.cache.dtype, _device_of(generator))
    plan = plan_cache(
        model.config,
        tp=model.tp_comm.group.size,
        element_size=model.dtype.itemsize,
        dtype=config.cache.dtype,
        replicate_kv_heads=generator.replicate_kv_heads,
        layers=model.stage.layers,
    )
    check_speculation(config, plan)
    return plan, plan_draft_cache(generator, config)


def _divide_memory(
    generator: TextGenerator, plan: CachePlan, draft_plan: CachePlan | None
) -> tuple[CachePlan, int]:
    """Return the plan of the stage with the largest cache, and the free bytes for it. Both caches
    store as many tokens. Collective."""
    free_bytes, bytes_per_token = _reduce_memory(generator, plan, _device_of(generator))
    plan = replace(plan, bytes_per_token=bytes_per_token)
    own_bytes = max(1, plan.bytes_per_token * len(plan.layout.groups))
    draft_bytes = 0
    if draft_plan is not None:
        draft_bytes = draft_plan.bytes_per_token * len(draft_plan.layout.groups)
    return plan, free_bytes * own_bytes // (own_bytes + draft_bytes)


def build_host_pool(
    generator: TextGenerator, config: EngineConfig, cache: PagedKVCache
) -> HostBlockPool | None:
    """Allocate the host memory for offloaded blocks; None without KV offloading. Collective.

    Raises:
        ConfigError: on every rank: it holds no block, or exceeds the free memory of the host.
    """
    if not config.cache.host_gb:
        return None
    num_ranks = generator.ranks.size // generator.dp.size
    values = gather_objects(free_memory(), generator.ranks)
    free_bytes = min(each for each in values if isinstance(each, int)) // generator.dp.size
    device = _device_of(generator)
    if device.type == "cpu":  # the blocks of the pool are not allocated yet
        block_nbytes = count_host_block_bytes(cache.plan, cache.block_size)
        free_bytes = max(0, free_bytes - num_ranks * cache.num_blocks * block_nbytes)
    num_blocks = plan_host_blocks(
        config.cache, cache.plan, num_ranks=num_ranks, free_bytes=free_bytes
    )
    return HostBlockPool(cache, num_blocks, device)


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
        if backend not in ("auto", "numba", "paged", "triton"):
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
    if generator.draft_config is None:
        raise ConfigError(
            f"speculation.draft_model={speculation.draft_model}: the model was loaded without it. "
            "Pass the same config to load_generator."
        )
    plan = plan_cache(
        generator.draft_config,
        tp=tp,
        element_size=element_size,
        dtype=config.cache.dtype,
        replicate_kv_heads=generator.replicate_kv_heads,
    )
    check_speculation(config, plan)
    return plan


def count_draft_tokens(config: EngineConfig, draft_plan: CachePlan | None) -> int:
    """Return the largest number of draft tokens of a row; `draft_plan`: of `plan_draft_cache`."""
    if config.speculation.method == "none":
        return 0
    if config.speculation.method == "mtp" and draft_plan is not None:
        return len(draft_plan.slots)
    return config.speculation.num_draft_tokens or NUM_DRAFT_TOKENS


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
    longest = count_draft_tokens(config, draft_plan)
    # the clocks of ranks differ
    measures_time = generator.ranks.size == 1
    lengths = DraftLengthController(longest, measures_time=measures_time)
    if draft_plan is None:
        return Speculator(NGramProposer(), lengths)
    proposer = None
    if runner.is_last_stage:
        proposer = _build_model_proposer(generator, config, runner, draft_plan)
    return (Speculator if runner.num_stages == 1 else PipelineSpeculator)(proposer, lengths)


def _build_model_proposer(
    generator: TextGenerator, config: EngineConfig, runner: ModelRunner, draft_plan: CachePlan
) -> DraftProposer:
    """Return the proposer of drafts of a draft model or of MTP layers."""
    num_groups = max(1, len(runner.cache.plan.layout.groups))
    cache = PagedKVCache(
        draft_plan,
        num_blocks=-(-runner.cache.num_blocks * len(draft_plan.layout.groups) // num_groups),
        block_size=runner.cache.block_size,
        kernel=runner.cache.kernel,
        has_padding=_has_padding(generator),
        groups=token_groups(generator.draft_model or runner.model),
    )
    max_tokens = config.max_num_batched_tokens
    if generator.draft_model is None:
        return MTPProposer(runner, cache, max_tokens=max_tokens)
    return DraftModelProposer(
        ModelRunner(
            generator.draft_model,
            cache,
            limits=runner.limits,
            is_recorded=runner.recorded is not None,
        ),
        vocab_size=runner.model.config.vocab_size,
        max_num_batched_tokens=max_tokens,
    )


def _small_batch_limits(generator: TextGenerator, config: EngineConfig) -> SmallBatchLimits:
    """Return the numbers of rows for which matmuls use the small-batch kernel, the same on all
    tensor-parallel ranks."""
    backend = expand_kernel_setting(generator.kernels).backend_name("small_batch_matmul")
    if backend in ("numba", "triton"):
        return ALL_ROW_COUNTS
    if backend != "auto" or config.batch_invariant:
        return NO_ROW_COUNTS
    group = generator.model.tp_comm.group
    limits = gather_objects(load_or_measure_limits(device=_device_of(generator)), group)[0]
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
