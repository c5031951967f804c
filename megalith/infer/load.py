"""Load a trained model with its tokenizer for text generation."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.kernels import (
    OPS,
    KernelsConfig,
    KernelSetting,
    expand_kernel_setting,
    is_explicit_backend,
)
from megalith.config.model import ModelConfig, MTPConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.serve import (
    EngineConfig,
    InferenceParallelConfig,
    Quantization,
    SpeculationConfig,
    parallel_problems,
)
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import ConfigError, DataError, raise_all
from megalith.hf.pretrained import Pretrained, load_weights, mark_sources
from megalith.infer.draft_model import check_same_vocabulary
from megalith.infer.layout import (
    DEFAULT_PARALLEL,
    generation_layout,
    generation_pipeline,
    open_source,
)
from megalith.infer.pipeline import PipelineLink
from megalith.infer.quantize import (
    build_int8_grouped_matmul_ops,
    build_int8_matmul_ops,
    check_int8_supported,
    iter_quantized_weights,
    load_int8_weights,
    set_int8_dtype,
)
from megalith.kernels.backend import select_backends, unavailable_backends
from megalith.models.decoder import Decoder, allocate, build_chunks, iter_parameter_specs
from megalith.nn.batched_lora import StepAdapters
from megalith.nn.build import build_context, fastest_matmul_ops, plain_matmul_ops
from megalith.nn.mlp import ChunkedPrefillMLP
from megalith.parallel.group import (
    SINGLE_RANK,
    Group,
    gather_objects,
    raise_on_all_ranks,
)
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.parallel.nvls import choose_collectives
from megalith.plan.grid import model_grid
from megalith.plan.kernels import find_backend_spec, why_not
from megalith.plan.shards import DENSE_AXES
from megalith.plan.stages import plan_stages

logger = logging.getLogger(__name__)

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DEFAULT_CONFIG = EngineConfig()

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
    """Smaller model that proposes draft tokens, on the last pipeline stage."""

    draft_config: ModelConfig | None = None
    """Config of the draft model, on all stages."""

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
        ConfigError: mlp_chunks is set, and no MLP supports it; a backend or collectives that are
            set by name cannot be used; or the device or the kernels do not support the
            quantization.
        DataError: its tokenizer no longer exists, or has more tokens than the model.
    """
    backends = expand_kernel_setting(kernels)
    raise_all(kernel_problems(backends, source.model, device, dtype))
    raise_all(parallel_problems(config, parallel))
    # those of the engine; gathered keys use the fastest backend
    if backends.attention in ("paged", "triton"):
        backends = replace(backends, attention="auto")
    tokenizer = build_tokenizer(source.tokenizer)
    check_vocabulary(tokenizer, source.model, source.path)
    _check_adapters_fit_mlp_chunks(config, mlp_chunks)
    # MTP layers are used in training, and for draft tokens.
    model_config = source.model
    if config.speculation.method != "mtp":
        model_config = replace(model_config, mtp=MTPConfig())
    step_adapters = None if config.max_adapters == 0 else StepAdapters()
    quantizes = config.quantization == "int8"
    if quantizes:
        check_int8_supported(device, backends)
    layout = generation_layout(model_config, mesh.world.size, parallel)
    if model_config.moe is not None:  # that of a draft model is smaller
        layout = replace(layout, ep=mesh.over("ep").size)
    _warn_if_experts_are_replicated(model_config, layout, parallel)
    context = build_context(
        model_config,
        mesh,
        layout,
        collectives=choose_collectives(parallel.collectives, mesh.tp, device),
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
    with mark_sources([source] if mesh.world.rank == 0 else []):
        load_decoder(model, source, device, mesh.world)
    draft_config, draft_model = None, None
    if config.speculation.draft_model is not None:
        draft = open_source(config.speculation.draft_model, mesh.tp.size)
        check_same_vocabulary(
            tokenizer, build_tokenizer(draft.tokenizer), config.speculation.draft_model
        )
        draft_config = draft.model
        draft_model = _load_draft_model(draft, mesh, device, dtype, kernels, config, parallel)
    return TextGenerator(
        model=model.eval(),
        tokenizer=tokenizer,
        stops=stop_ids(source, tokenizer),
        kernels=kernels,
        source=source,
        quantization=config.quantization,
        draft_model=draft_model,
        draft_config=draft_config,
        ranks=mesh.world,
        dp=mesh.dp,
        expert_group=find_expert_group(layout, mesh),
        link=connect_stages(model, mesh.pp, device),
        step_adapters=step_adapters,
        replicate_kv_heads=parallel.replicate_kv_heads,
    )


def _load_draft_model(
    source: Pretrained,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelSetting,
    config: EngineConfig,
    parallel: InferenceParallelConfig,
) -> Decoder | None:
    """Load the draft model of an engine on the last pipeline stage of `mesh`; None on the others.
    Each data-parallel rank has one, tensor parallel as its model. Collective."""
    draft_mesh = build_draft_mesh(source.model, mesh)
    if mesh.rank not in draft_mesh.grid.ranks:
        return None
    draft_config = replace(config, speculation=SpeculationConfig(), max_adapters=0, adapters=())
    return load_text_generator(
        source,
        draft_mesh,
        device,
        dtype,
        kernels=kernels,
        config=draft_config,
        parallel=InferenceParallelConfig(
            dp=draft_mesh.world.size // mesh.tp.size, collectives=parallel.collectives
        ),
    ).model


def build_draft_mesh(model: ModelConfig, mesh: Mesh) -> Mesh:
    """Return the mesh of a draft model: the last pipeline stage of `mesh`, whose data-parallel
    ranks share no experts. Collective over the world."""
    num_ranks = mesh.world.size // mesh.pp.size
    layout = generation_layout(model, mesh.tp.size)
    first = mesh.world.size - num_ranks
    return build_mesh(model_grid(layout, model, num_ranks, offset=first), rank=mesh.rank)


def _check_adapters_fit_mlp_chunks(config: EngineConfig, mlp_chunks: int) -> None:
    """Check that prompts are processed by undivided MLPs if there are adapters.

    Raises:
        ConfigError: they are not.
    """
    if config.max_adapters and mlp_chunks > 1:
        raise ConfigError(
            f"--mlp-chunks={mlp_chunks} with max_adapters={config.max_adapters}: chunks of MLPs "
            "have no adapters. Remove --mlp-chunks, or set max_adapters to 0."
        )


def _warn_if_experts_are_replicated(
    model: ModelConfig, layout: ParallelConfig, parallel: InferenceParallelConfig
) -> None:
    """Warn if the experts are not divided over all tensor- and data-parallel ranks: their number is
    not divisible, or each data-parallel rank has its own draft model."""
    if model.moe is not None and layout.ep < layout.tp * parallel.dp:
        logger.warning(
            "%d experts are divided over %d of %d tensor- and data-parallel ranks, so that some "
            "ranks hold the same experts",
            model.moe.num_experts,
            layout.ep,
            layout.tp * parallel.dp,
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
    stages = plan_stages(
        pipeline, pp=pp.size, num_layers=model.config.num_layers, depths=model.config.mtp.num_layers
    )
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
        if op in ("dropout", "cross_entropy", "optimizer"):
            reason = "only training uses it"
        elif op == "attention" and backend not in ("paged", "triton"):
            reason = "the keys and values are in a paged KV cache, which it does not read"
        elif op == "attention" and model.positions == "relative":
            reason = "it does not support relative position biases"
        if reason is not None:
            reason = reason.replace("precision.params", "dtype")
            problems.append(f"kernels.{op}={backend}: {reason}. Set kernels.{op} to auto.")
    return problems


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
