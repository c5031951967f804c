"""Settings of the inference engine: KV cache, batching and limits."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megalith.config.fields import Example, Ge, Gt, Le, range_problems
from megalith.errors import did_you_mean

Quantization = Literal["none", "int8"]
"""Format of the weights of matmuls during inference. none: the dtype of the model; int8: one scale
per output channel, activations keep their dtype."""

KVCacheDtype = Literal["auto", "int8", "fp8_e4m3"]
"""Format of keys and values in the KV cache. auto: the dtype of the model; int8, fp8_e4m3: one fp32
scale per token and head."""

Pooling = Literal["last", "mean"]
"""Hidden state that is the embedding of a text: that of its last token, or the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV cache of the inference engine."""

    block_size: Annotated[int, Ge(1), Example(16)] = 16
    """Tokens per block of the KV cache."""

    num_blocks: Annotated[int | None, Ge(1), Example(1024)] = None
    """Number of blocks. Unset: as many as memory_fraction allows, and at most as many as
    max_num_seqs sequences of maximum length need."""

    memory_fraction: Annotated[float, Gt(0), Le(1), Example(0.3)] = 0.3
    """Fraction of the memory that is free after loading the model which the KV cache may use."""

    dtype: KVCacheDtype = "auto"
    """Format of the stored keys and values, also of a draft model. auto: the dtype of the model;
    int8 and fp8_e4m3 hold about twice as many tokens as bf16, with a small loss of accuracy."""

    prefix_caching: bool = True
    """Reuse the keys and values of a common prefix with an earlier request."""

    host_gb: Annotated[float, Ge(0), Example(16)] = 0.0
    """GiB of host memory for blocks that the prefix cache evicts (KV offloading): a request with
    their prefix copies them back instead of computing it again. Of one engine, all of its ranks
    together; each replica has as much. On a GPU it is pinned. 0: off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding: draft tokens that the model verifies, several in a step. The generated
    tokens are the same as without."""

    method: Literal["none", "ngram", "draft_model", "mtp"] = "none"
    """Source of draft tokens. ngram: what followed the last tokens when they occurred before;
    draft_model: a smaller model; mtp: the MTP layers of the model."""

    draft_model: str | None = None
    """Folder of the smaller model, which has the same tokenizer: a run, a checkpoint, or a Hugging
    Face model."""

    num_draft_tokens: Annotated[int | None, Ge(1), Le(32), Example(4)] = None
    """Maximum number of draft tokens per sequence and step; fewer where few are accepted. Unset:
    4, or the number of MTP layers."""


def speculation_problems(config: SpeculationConfig) -> list[str]:
    """Return a message for every setting of speculative decoding that does not fit its method."""
    if config.method == "draft_model" and config.draft_model is None:
        return [
            "speculation.method=draft_model needs speculation.draft_model. Set it to the folder of "
            "a smaller model with the same tokenizer, or speculation.method to ngram."
        ]
    if config.method != "draft_model" and config.draft_model is not None:
        return [
            f"speculation.draft_model={config.draft_model} with speculation.method="
            f"{config.method}, which uses no draft model. Set speculation.method to draft_model."
        ]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """Graphs of model steps: the kernels of a step start without the Python code of its layers; on
    GPUs all at once, on a batch that is padded to one of a few sizes (buckets)."""

    mode: Literal["auto", "none", "recorded", "static_replay", "cuda_graph"] = "auto"
    """recorded: forward passes of up to 64 tokens are recorded and repeated with the same bits, on
    CPUs in one process; cuda_graph: CUDA graphs; static_replay: their buffers and padding, executed
    eagerly, to check them without a GPU; auto: cuda_graph on NVIDIA GPUs and recorded on CPUs,
    where the model supports it, else none."""

    num_buckets: Annotated[int | None, Ge(1), Example(8)] = None
    """Number of token counts that have buckets. Unset: as many as the distribution needs."""

    distribution: Literal["exponential", "linear"] = "exponential"
    """Token counts of the buckets. exponential: each is half of the next larger one; linear: equal
    distances."""

    prefills: Literal["none", "mixed", "all"] = "none"
    """Steps with prompts that have buckets. none: only decode steps; mixed: those with at most
    max_tokens tokens; all: all steps, and chunks of prompts have the sizes of buckets."""

    max_tokens: Annotated[int | None, Ge(1), Example(512)] = None
    """Largest number of tokens of a bucket with prompts. Unset: that of a decode step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Inference engine: batching, limits and random seed."""

    cache: CacheConfig = field(default_factory=CacheConfig)

    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    graphs: GraphConfig = field(default_factory=GraphConfig)

    max_num_seqs: Annotated[int, Ge(1), Example(64)] = 64
    """Maximum number of sequences in a step."""

    max_num_batched_tokens: Annotated[int, Ge(1), Example(512)] = 512
    """Maximum number of tokens in a step: one of each decoded sequence, the rest are prompts."""

    min_prefill_chunk_tokens: Annotated[int, Ge(1), Example(16)] = 16
    """Minimum number of tokens of a prompt that a step processes, unless fewer are left."""

    max_model_len: Annotated[int | None, Ge(1), Example(4096)] = None
    """Maximum number of tokens of a sequence, prompt and output. Unset: the model's context
    length."""

    batching: Literal["continuous", "static"] = "continuous"
    """continuous: requests join and leave the batch at every step; static: a new batch starts
    when all requests of the previous one are finished."""

    batch_invariant: bool = False
    """Whether results are bitwise independent of the other requests in the batch."""

    quantization: Quantization = "none"
    """Format in which the weights of matmuls are loaded. int8: a quarter of fp32's memory;
    embedding tables, routers and norms keep their dtype."""

    max_adapters: Annotated[int, Ge(0), Example(4)] = 0
    """Maximum number of LoRA adapters in memory; each request may name one. When another one is
    needed, the least recently used adapter without requests in flight is removed, and read again
    when a request names it."""

    max_lora_rank: Annotated[int, Ge(1), Example(64)] = 64
    """Maximum rank of an adapter."""

    adapters: tuple[str, ...] = ()
    """Adapters that are loaded at the start, each as NAME=FOLDER: a run that trained adapters, its
    checkpoint, or a PEFT folder."""

    seed: int = 1234
    """Seed from which the seeds of requests without one are derived."""


def adapter_problems(config: EngineConfig) -> list[str]:
    """Return a message for every adapter that cannot be loaded at the start."""
    problems = [
        f"adapters={entry}: must be NAME=FOLDER, such as sql=runs/lora_sql."
        for entry in config.adapters
        if not all(entry.partition("="))
    ]
    names = [entry.partition("=")[0] for entry in config.adapters]
    problems += [
        f"adapters={' '.join(config.adapters)}: {name} occurs twice. Use different names."
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if config.adapters and config.max_adapters == 0:
        problems.append(
            f"adapters={' '.join(config.adapters)} with max_adapters=0, which holds none. Set "
            f"max_adapters to {len(config.adapters)}."
        )
    return problems


CollectivesName = Literal["auto", "nvls", "process_group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceParallelConfig:
    """Parallel layout of the processes that run one model (`--nproc`)."""

    tp: Annotated[int | None, Ge(1), Example(2)] = None
    """Tensor-parallel ranks. Unset: all processes of a pipeline stage."""

    pp: Annotated[int, Ge(1), Example(2)] = 1
    """Pipeline stages, each with a part of the layers; as many steps are in flight."""

    dp: Annotated[int, Ge(1), Example(2)] = 1
    """Data-parallel ranks, each with requests of its own. In `megalith serve` they are replicas of
    the engine, to which requests are routed; in `megalith generate` they share the experts of a
    model, if the number of experts is a multiple of tp x dp (DP attention)."""

    dp_replicate: Annotated[int | None, Ge(1), Example(2)] = None
    """Groups of replicas in `megalith serve`: the dp / dp_replicate replicas of a group share
    experts (DP attention), and are restarted together. Unset: dp, each replica has its own."""

    sp: bool = False
    """Sequence parallelism: between matmuls, each tensor-parallel rank has a part of the tokens."""

    collectives: CollectivesName = "auto"
    """Collectives of tensor-parallel layers. process_group: gloo or NCCL; nvls: NVLink multicast in
    symmetric memory, with less latency, on GPUs of one machine that NVSwitches connect (Hopper or
    later); auto: nvls if every tp rank supports it."""

    replicate_kv_heads: bool = False
    """Where tp exceeds the number of KV heads, or with MLA: whether every rank stores all tokens of
    its KV head. false: ranks with the same head store a part of the tokens each, and merge their
    attention (decode context parallelism); blocks then have a multiple of that many tokens. true
    needs more memory, but less communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRun:
    """Settings of `megalith generate` and `megalith chat` besides their options."""

    engine: EngineConfig = field(default_factory=EngineConfig)

    parallel: InferenceParallelConfig = field(default_factory=InferenceParallelConfig)


def parallel_problems(config: EngineConfig, parallel: InferenceParallelConfig) -> list[str]:
    """Return a message for every setting of an engine that its parallel layout does not support."""
    problems = []
    if config.max_adapters:
        adapters = f"max_adapters={config.max_adapters}", "Set max_adapters to 0"
        problems += [
            (*adapters, "dp", parallel.dp, 1, "data-parallel ranks would load in different steps"),
            (*adapters, "sp", parallel.sp, False, "adapters need all tokens on every rank"),
        ]
    if config.batching == "static":
        static = "batching=static", "Set batching to continuous"
        problems.append((*static, "pp", parallel.pp, 1, "a batch has one step in flight"))
    messages = [
        f"{setting} with parallel.{name}={str(value).lower()}: {reason}. {fix}, or parallel.{name} "
        f"to {str(default).lower()}."
        for setting, fix, name, value, default, reason in problems
        if value != default
    ]
    if parallel.dp_replicate not in (None, 1):
        messages.append(
            f"parallel.dp_replicate={parallel.dp_replicate}: only megalith serve has groups "
            "of replicas. Leave it unset, or use megalith serve."
        )
    return messages


def dp_replicate_problems(config: EngineConfig, parallel: InferenceParallelConfig) -> list[str]:
    """Return a message if a server cannot have its number of groups of replicas."""
    dp, groups = parallel.dp, parallel.dp_replicate
    if groups is None or groups < 1 or groups == dp:
        return []
    text = f"parallel.dp_replicate={groups} with parallel.dp={dp}"
    if dp % groups:
        return [
            f"{text}: the groups of replicas that share experts have equal sizes. Set "
            f"parallel.dp_replicate to {dp}, or parallel.dp to {groups}."
        ]
    if config.max_adapters:
        return [
            f"{text} and max_adapters={config.max_adapters}: ranks that share experts would load "
            f"adapters in different steps. Set parallel.dp_replicate to {dp}, or max_adapters to 0."
        ]
    return []


def process_count_problems(parallel: InferenceParallelConfig, nproc: int) -> list[str]:
    """Return a message if `nproc` processes cannot have a parallel layout, whatever the model."""
    tp, pp, dp = parallel.tp, parallel.pp, parallel.dp
    if nproc < 1:
        return [f"--nproc={nproc} must be at least 1. Use the number of processes to start."]
    if nproc % (dp * pp):
        return [
            f"parallel.pp={pp} and parallel.dp={dp} with --nproc={nproc}: every stage and every "
            "data-parallel replica has equally many processes. Set --nproc to a multiple of "
            f"{dp * pp}, such as {dp * (tp or 1) * pp}."
        ]
    if tp is not None and tp * pp * dp != nproc:
        return [
            f"parallel.tp={tp}, parallel.pp={pp} and parallel.dp={dp} with --nproc={nproc}: tp x "
            f"pp x dp is the number of processes. Set --nproc to {tp * pp * dp}."
        ]
    if parallel.sp and nproc == dp * pp:
        return [
            f"parallel.sp=true with --nproc={nproc}: there is one tensor-parallel rank, and no "
            "tokens to share. Set parallel.sp to false."
        ]
    return []


def single_replica_problems(parallel: InferenceParallelConfig) -> list[str]:
    """Return a message if there are replicas, in a command that runs one engine."""
    if parallel.dp == 1:
        return []
    return [
        f"parallel.dp={parallel.dp}: this command runs one replica of the engine. Set parallel.dp "
        "to 1, or use megalith serve."
    ]


def adapter_name_problems(name: str | None, config: EngineConfig) -> list[str]:
    """Return a message if no adapter that is loaded at the start has the name; None: none is
    used."""
    names = [entry.partition("=")[0] for entry in config.adapters]
    if name is None or name in names:
        return []
    advice = did_you_mean(name, names) or f" Add --engine.adapters {name}=FOLDER."
    return [
        f"--adapter={name}: engine.adapters has {', '.join(names) or 'none'}, but no adapter of "
        f"this name.{advice}"
    ]


def graph_problems(config: EngineConfig) -> list[str]:
    """Return a message for every setting of graphs that does not fit the others."""
    graphs = config.graphs
    problems = []
    if graphs.mode in ("static_replay", "cuda_graph") and config.batch_invariant:
        problems.append(
            f"graphs.mode={graphs.mode} with batch_invariant=true: replayed steps use another "
            "attention kernel than prefills, whose results differ by rounding. Set graphs.mode to "
            "none, or batch_invariant to false."
        )
    if graphs.max_tokens is not None and graphs.prefills != "mixed":
        problems.append(
            f"graphs.max_tokens={graphs.max_tokens} with graphs.prefills={graphs.prefills}: it "
            "limits the buckets with prompts. Set graphs.prefills to mixed, or leave "
            "graphs.max_tokens unset."
        )
    if graphs.mode in ("none", "recorded"):
        problems += [
            f"graphs.{name}={value} with graphs.mode={graphs.mode}, which has no buckets. Set "
            f"graphs.mode to auto, or leave graphs.{name} unset."
            for name, value in bucket_settings(graphs).items()
        ]
    return problems


def bucket_settings(graphs: GraphConfig) -> dict[str, object]:
    """Return the settings of buckets that are not the default ones."""
    default = GraphConfig()
    names = "num_buckets", "distribution", "prefills", "max_tokens"
    return {
        name: getattr(graphs, name)
        for name in names
        if getattr(graphs, name) != getattr(default, name)
    }


def engine_problems(config: EngineConfig) -> list[str]:
    """Return a message for every invalid setting of an engine."""
    return range_problems(config) + combination_problems(config)


def combination_problems(config: EngineConfig) -> list[str]:
    """Return a message for every setting of an engine that does not fit the others."""
    problems = speculation_problems(config.speculation)
    problems += adapter_problems(config) + graph_problems(config)
    if config.quantization != "none" and config.speculation.method == "mtp":
        problems.append(
            f"quantization={config.quantization} with speculation.method=mtp: MTP layers are not "
            "quantized. Set speculation.method to ngram, or quantization to none."
        )
    return problems
