"""Tiny copies of a run that keep the difficult properties of its layout: shared KV heads, uneven
shards, ties, stages."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations
from math import prod
from typing import TypeVar

from megalith.config.kernels import reset_explicit_backends
from megalith.config.lora import LoraConfig
from megalith.config.model import CrossConfig, LayersConfig, ModelConfig, RopeConfig
from megalith.config.moe import MoEConfig
from megalith.config.optim import OptimConfig
from megalith.config.parallel import ContextConfig, ParallelConfig, PipelineConfig, RecomputeConfig
from megalith.config.train import TrainRun
from megalith.plan.batch_assignment import count_microbatches_of_longest
from megalith.plan.context import context_problems
from megalith.plan.frozen import trained_names
from megalith.plan.schedule import schedule_problems
from megalith.plan.shards import key_value_ranks
from megalith.plan.stages import Stage, format_layout, plan_stages
from megalith.rules.no_effect import FROM_A_LENGTH
from megalith.rules.run import smallest_stage
from megalith.verify.ranks import LayoutCase, balances_by_microbatch, layout_case

MOST_RANKS = 8
"""Number of processes that a laptop runs in seconds."""

ROWS = 12
"""Rows per step of a tiny copy, which 1, 2, 3 and 4 data-parallel ranks divide."""

MOST_DEPTHS = 2
"""MTP layers of a copy: two, to include several."""

Axes = tuple[str, ...]
T = TypeVar("T")


def shrink(
    run: TrainRun, world: int, *, most: int = MOST_RANKS, fault: str | None = None
) -> list[LayoutCase]:
    """Return float64 cases of at most `most` ranks with the layout of `run` on `world` ranks, and
    the smallest sizes per axis.

    If not all axes fit into `most` ranks, each case omits some, and every combination that fits is
    in one of them. The cases recompute and offload as the run does. The run must be valid.
    """
    smallest = _min_sizes(run, _sizes(run, world))
    return [
        _copy(run, world, sizes, fault)
        for sizes in _fitting_sizes(smallest, _sizes(run, world), run, most)
    ]


def describe_copy(run: TrainRun, world: int, case: LayoutCase) -> str:
    """Describe a tiny copy, such as `tp 2 of 8, sp, pp 2 of 16, vpp 2 of 4, 4 of 80 layers`."""
    before, after, p = _sizes(run, world), _sizes(case.run, case.world), case.run.parallel
    words = [_size_words(axis, after[axis], before[axis]) for axis in before if before[axis] > 1]
    words.insert(1, "sp") if p.sp else None
    if p.pipeline.vpp > 1:
        words.append(_size_words("vpp", p.pipeline.vpp, run.parallel.pipeline.vpp))
    if p.pp > 1 and p.pipeline.schedule != "auto":
        words.append(p.pipeline.schedule)
    if p.pp > 1 and p.pipeline.layout is not None:
        words.append(f"stages {p.pipeline.layout}")
    if p.cp > 1:
        words.append(f"context {', '.join(dict.fromkeys(p.context.layers or (p.context.kind,)))}")
    words += [f"zero {p.zero}"] if p.zero else []
    words += (
        [_size_words("replicas", p.dp_replicate, run.parallel.dp_replicate)]
        if p.dp_replicate > 1
        else []
    )
    words += (
        [f"recompute {case.run.recompute.granularity}"]
        if case.run.recompute.granularity != "none"
        else []
    )
    words += _expert_words(run, case)
    layers, rows = case.run.model.num_layers, case.run.train
    kind = "row" if rows.tokens_per_microbatch is None else "document"
    return ", ".join(
        [*words, f"{layers} of {run.model.num_layers} layers", f"{rows.seq_len} tokens a {kind}"]
    )


def _expert_words(run: TrainRun, case: LayoutCase) -> list[str]:
    before, after, p = run.model.moe, case.run.model.moe, case.run.parallel
    if before is None or after is None:
        return []
    words = [_size_words("ep", p.ep, run.parallel.ep)] if run.parallel.ep > 1 else []
    words += [_size_words("etp", p.etp, run.parallel.etp or 1)] if p.etp is not None else []
    words.append(f"{after.num_experts} of {before.num_experts} experts")
    moved = before.aux_loss.global_batch_coeff > 0 and after.aux_loss.global_batch_coeff == 0
    return [*words, "aux loss per microbatch, as other parts of it are"] if moved else words


def _size_words(axis: str, now: int, before: int) -> str:
    if now == before:
        return f"{axis} {now}"
    return f"{axis} {now} of {before}" if now > 1 else f"no {axis} (in another copy)"


# --- how many ranks along each axis


def _sizes(run: TrainRun, world: int) -> dict[str, int]:
    p = run.parallel
    return {"tp": p.tp, "cp": p.cp, "pp": p.pp, "dp": p.dp or world // (p.tp * p.cp * p.pp)}


def _min_sizes(run: TrainRun, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the smallest size of each axis with several ranks that keeps its properties."""
    keys, p = run.model.num_kv_heads, run.parallel
    shared = keys > 1 and key_value_ranks(keys, p.tp) < p.tp  # two KV heads with two ranks each
    groups = "a2a+ring" in (*p.context.layers, p.context.kind)  # two groups of two ranks
    divided = 1 < p.dp_replicate < sizes["dp"]  # two replicas of two ranks
    # Expert groups within dp: two ranks with different experts, and two with the same.
    alone = p.tp == p.cp == 1 and 1 < p.ep < sizes["dp"] // (p.etp or 1)
    least = {
        "tp": 4 if shared else 2,
        "cp": 4 if groups else 2,
        "pp": 2,
        "dp": 4 if divided or alone else 2,
    }
    return {axis: min(least[axis], size) for axis, size in sizes.items() if size > 1}


def _fitting_sizes(
    smallest: Mapping[str, int], sizes: Mapping[str, int], run: TrainRun, most: int
) -> list[dict[str, int]]:
    """Return the axis sizes of each case: every maximal set of axes that fits, enlarged if
    possible."""
    fitting = [
        axes
        for count in range(len(smallest), -1, -1)
        for axes in combinations(smallest, count)
        if prod(smallest[axis] for axis in axes) <= most
    ]
    maximal = [axes for axes in fitting if not any(set(axes) < set(other) for other in fitting)]
    return [_enlarge({axis: smallest[axis] for axis in axes}, sizes, run, most) for axes in maximal]


def _enlarge(
    chosen: dict[str, int], sizes: Mapping[str, int], run: TrainRun, most: int
) -> dict[str, int]:
    """Use three ranks instead of two where the run has a multiple of three or a middle stage, or
    for dp alone."""
    wanted = {
        "pp": sizes["pp"] % 3 == 0 or (sizes["pp"] > 2 and run.parallel.pipeline.vpp == 1),
        "cp": sizes["cp"] % 3 == 0,
        "dp": sizes["dp"] > 2 and len(chosen) == 1 and run.parallel.dp_replicate == 1,
    }
    for axis, three in wanted.items():
        if three and chosen.get(axis) == 2 and prod(chosen.values()) // 2 * 3 <= most:
            chosen[axis] = 3
    if "tp" in chosen:  # depends on the number of heads
        room = most // prod(size for axis, size in chosen.items() if axis != "tp")
        chosen["tp"] = _shrink_heads(run.model, sizes["tp"], most=room)[0]
    return chosen


# --- one copy


def _copy(run: TrainRun, world: int, chosen: Mapping[str, int], fault: str | None) -> LayoutCase:
    """Return the run with these sizes; axes that are not in `chosen` have size 1."""
    tp, cp, pp, dp = (chosen.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    p, before = run.parallel, _sizes(run, world)
    _, model = _shrink_heads(run.model, p.tp if tp > 1 else 1, most=tp)
    pipeline, layers = _shrink_pipeline(run, pp, kinds=len(set(p.context.layers)) if cp > 1 else 1)
    model = _shrink_kinds(replace(model, num_layers=layers))
    model = replace(model, cross=_shrink_cross(run, model, _stages(pipeline, pp, model)))
    etp, ep = _shrink_expert_ranks(run, tp=tp, ranks=tp * cp * dp)
    if model.moe is not None:
        model = replace(
            model, moe=_shrink_experts(model.moe, run, ep=ep, etp=etp or tp, layers=layers, dp=dp)
        )
    parallel = replace(
        p,
        ep=ep,
        etp=etp,
        overlap_experts=p.overlap_experts and ep > 1,
        tp=tp,
        sp=p.sp and tp > 1,
        tp_comm_overlap=p.tp_comm_overlap and tp > 1,
        collective_matmul=p.collective_matmul if p.tp_comm_overlap and tp > 1 else "auto",
        cp=cp,
        context=_shrink_context(p, cp, layers),
        pp=pp,
        pipeline=pipeline,
        dp=dp,
        dp_replicate=1 if dp == 1 or p.dp_replicate == 1 else 2,
        reduce_dtype="fp32",
    )
    assert isinstance(parallel, ParallelConfig)
    if cp > 1 and context_problems(parallel, model, seq_len=_row_of(run, parallel)):
        model = replace(model, num_heads=model.num_heads * cp)  # Ulysses also shards heads
    parallel, rows = _fit_microbatches(run, parallel, before)
    case = layout_case(
        model,
        parallel,
        tp * cp * pp * dp,
        micro_batch_size=rows,
        seq_len=_row_of(run, parallel),
        documents=run.data.document_masking,
        fault=fault,
    )
    # The reduced layouts have no large tensors, so every tensor is offloaded.
    offload = replace(run.offload, layers=min(run.offload.layers, 1), min_numel=1)
    tiny = replace(
        case.run,
        # A dataset plug-in determines the extra tensors only; their values are random.
        data=replace(case.run.data, plugin=run.data.plugin, mock=run.data.plugin is None),
        recompute=_shrink_recompute(run, tp),
        offload=offload,
        kernels=reset_explicit_backends(run.kernels),  # reduced layouts run in float64
        optim=_shrink_choice(replace(run.optim, eps=1e-3), run.model.num_layers, model),
        train=replace(
            case.run.train,
            label_smoothing=run.train.label_smoothing,
            z_loss=run.train.z_loss,
            loss_chunk=run.train.loss_chunk,
            loss_backward=run.train.loss_backward,
            loss_plugin=run.train.loss_plugin,
            tokens_per_microbatch=_shrink_packs(run, parallel),
            micro_batch_size=rows if run.train.tokens_per_microbatch is None else 1,
        ),
        lora=run.lora and _shrink_adapters(run.lora, run.model.num_layers, layers),
        # A rule requires the base checkpoint of adapters; here it is initialized randomly.
        checkpoint=replace(case.run.checkpoint, load="base" if run.lora else None),
    )
    return replace(case, run=tiny)


def _shrink_expert_ranks(run: TrainRun, *, tp: int, ranks: int) -> tuple[int | None, int]:
    """Return etp and ep of a copy with `ranks` ranks per stage.

    Experts are sharded if those of the run are, and replicated if those of the run are and there
    are enough ranks.
    """
    p, etp = run.parallel, run.parallel.etp
    if etp is not None:
        etp = tp if etp == p.tp else next((n for n in (2, 3, 1) if n <= etp and ranks % n == 0), 1)
    left = ranks // (etp or tp)
    return etp, next((n for n in (2, 3) if left % n == 0), 1) if p.ep > 1 else 1


def _shrink_experts(
    moe: MoEConfig, run: TrainRun, *, ep: int, etp: int, layers: int, dp: int
) -> MoEConfig:
    """Return the same kind of MoE: one expert or several per rank, groups, uneven shards, layers
    with and without experts.

    An aux loss over the global batch needs the microbatches of all data-parallel ranks as one.
    Where other parts depend on single microbatches, one process cannot do both, so copies with dp
    use an aux loss per microbatch.
    """
    p, router, balance = run.parallel, moe.router, moe.aux_loss
    top_k, single = (
        min(moe.top_k, 2),
        moe.num_experts == p.ep and router.num_groups is None and ep > min(moe.top_k, 2),
    )
    experts = ep if single else 6 if ep == 3 else 4
    groups = None if router.num_groups is None else experts // 2
    before = p.tp if p.etp is None else p.etp
    ffn = next(
        n
        for n in range(10, 20)
        if etp == 1 or (n % etp != 0) == (moe.ffn_hidden_size % before != 0)
    )
    if (
        balance.global_batch_coeff > 0
        and dp > 1
        and balances_by_microbatch(moe, documents=run.data.document_masking)
    ):
        balance = replace(
            balance,
            batch_coeff=balance.batch_coeff + balance.global_batch_coeff,
            global_batch_coeff=0.0,
        )
    pattern = _shrink_pattern(moe.layers, layers)
    return replace(
        moe,
        num_experts=experts,
        top_k=top_k,
        ffn_hidden_size=ffn,
        layers=pattern if any(pattern) else (),
        shared_ffn_hidden_size=moe.shared_ffn_hidden_size and 9,
        latent_size=moe.latent_size and 14,
        router=replace(router, num_groups=groups, topk_groups=None if groups is None else 1),
        aux_loss=balance,
    )


def _shrink_choice(optim: OptimConfig, before: int, model: ModelConfig) -> OptimConfig:
    """Return the same frozen parameters and groups, with layer numbers scaled to the copy; all are
    trained if the copy lacks the trained ones."""
    scale_layers = partial(_scale_layer_numbers, before=before, layers=model.num_layers)
    groups = tuple(replace(group, match=scale_layers(group.match)) for group in optim.groups)
    small = replace(
        optim,
        trained=scale_layers(optim.trained),
        frozen=scale_layers(optim.frozen),
        groups=groups,
        # the copy has small scores, some of which must be clipped
        qk_clip=None if optim.qk_clip is None else replace(optim.qk_clip, threshold=0.025, every=1),
    )
    return small if trained_names(model, small) else replace(small, trained=("*",), frozen=())


def _scale_layer_numbers(patterns: Sequence[str], *, before: int, layers: int) -> tuple[str, ...]:
    """Scale layer numbers in patterns to a model with fewer layers."""
    matches = [(re.match(r"layers\.(\d+)(?=\.)", pattern), pattern) for pattern in patterns]
    return tuple(
        pattern
        if match is None
        else f"layers.{int(match[1]) * layers // before}{pattern[match.end() :]}"
        for match, pattern in matches
    )


def _shrink_adapters(lora: LoraConfig, before: int, layers: int) -> LoraConfig:
    """Return adapters of lower rank in the corresponding layers."""
    chosen = (
        None
        if lora.layers is None
        else tuple(sorted({layer * layers // before for layer in lora.layers}))
    )
    return replace(lora, rank=min(lora.rank, 3), layers=chosen, load=None)


def _shrink_heads(model: ModelConfig, tp: int, *, most: int) -> tuple[int, ModelConfig]:
    """Return the tp degree and a model for it, with shared KV heads or uneven shards as in the
    run."""
    per_key = model.num_heads // model.num_kv_heads
    if key_value_ranks(model.num_kv_heads, tp) < tp:
        sharing = tp // model.num_kv_heads
        keys = 1 if model.num_kv_heads == 1 else 2
        copies = 3 if sharing % 3 == 0 and 3 * keys <= most else 2
        small_tp, small_per_key = keys * copies, copies + (per_key % sharing != 0)
    else:
        small_tp = min(tp, 3 if tp % 3 == 0 else 2, most)
        keys, small_per_key = small_tp + (model.num_kv_heads % tp != 0), min(2, per_key)
    uneven = model.ffn_hidden_size % tp != 0
    ffn = next(size for size in range(20, 30) if small_tp == 1 or (size % small_tp != 0) == uneven)
    small = replace(
        model,
        vocab_size=61,
        pad_vocab_to_multiple_of=4,
        hidden_size=24,
        num_layers=2,
        num_heads=keys * small_per_key,
        num_kv_heads=keys,
        head_dim=6,
        ffn_hidden_size=ffn,
        max_seq_len=64,
    )
    return small_tp, small


def _shrink_kinds(model: ModelConfig) -> ModelConfig:
    """Return the same kinds of layers and positions in the sizes of a copy.

    Windows are shorter than rows, patterns have all kinds of layers, RoPE scaling begins within a
    row, and there are up to MOST_DEPTHS MTP layers.
    """
    attention, mla, layers = model.attention, model.mla, model.num_layers
    small_mla = mla and replace(
        mla,
        kv_rank=7,
        q_rank=mla.q_rank and 9,
        nope_dim=5,
        rope_dim=4,
        value_dim=5 if mla.value_dim == mla.nope_dim else 3,
    )
    model = _shrink_layers(model)
    return replace(
        model,
        head_dim=None if mla else model.head_dim,
        num_kv_heads=model.num_heads if mla else model.num_kv_heads,
        mla=small_mla,
        mtp=replace(model.mtp, num_layers=min(model.mtp.num_layers, MOST_DEPTHS)),
        init_overrides=(),
        mup=model.mup and replace(model.mup, base_hidden_size=8),
        attention=replace(
            attention,
            window=attention.window and min(attention.window, 5),
            window_right=attention.window_right and min(attention.window_right, 2),
            window_layers=_shrink_pattern(attention.window_layers, layers),
            qk_norm_layers=_shrink_pattern(attention.qk_norm_layers, layers),
        ),
        rope=_shrink_rope(model, layers),
    )


def _shrink_rope(model: ModelConfig, layers: int) -> RopeConfig:
    """Return the same kind of RoPE for the six features of a small head, or its rotated
    fraction."""
    rope = model.rope
    part = 0.67 if rope.scaling == "dynamic" else 0.34  # dynamic scaling needs two pairs
    fraction = 1.0 if rope.fraction == 1 else part
    pairs = 2 if model.mla is not None else int(6 * fraction) // 2
    return replace(
        rope,
        fraction=fraction,
        skip=_shrink_pattern(rope.skip, layers),
        skip_step=min(rope.skip_step, 5) if rope.skip_growth else rope.skip_step,
        original_max_position=8 if rope.scaling in FROM_A_LENGTH else rope.original_max_position,
        sections=tuple(int(axis < pairs) for axis in range(3)) if rope.sections else (),
        short_factors=rope.short_factors[:pairs],
        long_factors=rope.long_factors[:pairs],
    )


def _shrink_layers(model: ModelConfig) -> ModelConfig:
    """Return one layer of each kind in order if there are enough layers, and two sizes where there
    were several."""
    own, heads, keys, ffn = model.layers, model.num_heads, model.num_kv_heads, model.ffn_hidden_size
    count = max(len(own.attention), 1) * max(len(own.mlp), 1)
    parts = _shrink_pattern(
        [(model.attention_part(n), model.mlp_part(n)) for n in range(count)], model.num_layers
    )
    two = bool(own.num_kv_heads) and heads == 2 * keys
    return replace(
        model,
        num_kv_heads=heads if two else keys,
        layers=LayersConfig(
            attention=tuple(part for part, _ in parts) if own.attention else (),
            mlp=tuple(part for _, part in parts) if own.mlp else (),
            num_kv_heads=(heads, keys)[: model.num_layers] if two else (),
            ffn_hidden_size=(ffn, ffn - 3)[: model.num_layers] if own.ffn_hidden_size else (),
        ),
    )


def _shrink_cross(run: TrainRun, model: ModelConfig, stages: Sequence[Stage]) -> CrossConfig | None:
    """Return cross-layer attention whose source layer is as early as in the run.

    It is earlier if needed to cross stage boundaries as in the run. Of the layers after it, one of
    each kind uses it.
    """
    own, p = run.model.cross, run.parallel
    if own is None:
        return None
    before = _stages(p.pipeline, p.pp, run.model)
    crosses = any(run.model.needs_cross_layer_source(stage.layers.start) for stage in before)
    pattern = _shrink_pattern(own.layers, model.num_layers) or (True,)
    latest = min(own.memory * model.num_layers // run.model.num_layers, model.num_layers - 1)
    for memory in range(latest, -1, -1):
        uses_source = [
            pattern[number % len(pattern)]
            and "none" not in (model.attention_part(layer), model.mlp_part(layer))
            for number, layer in enumerate(range(memory, model.num_layers))
        ]
        cross = CrossConfig(memory=memory, layers=() if all(uses_source) else tuple(uses_source))
        small = replace(model, cross=cross)
        if any(uses_source) and (
            not crosses
            or any(small.needs_cross_layer_source(stage.layers.start) for stage in stages)
        ):
            return cross
    return CrossConfig(memory=0)


def _shrink_pattern(pattern: Sequence[T], num_layers: int) -> tuple[T, ...]:
    """Return one layer of each kind in order if there are enough layers; else the first ones.

    >>> one_in_four = [False, False, False, True]
    >>> _shrink_pattern(one_in_four, 4), _shrink_pattern([True, False], 1), _shrink_pattern([], 3)
    ((False, True), (True,), ())
    """
    return tuple(dict.fromkeys(pattern))[:num_layers]


def _shrink_context(parallel: ParallelConfig, cp: int, num_layers: int) -> ContextConfig:
    """Return the same kinds of context parallelism, each on some layer."""
    context, kinds = parallel.context, tuple(dict.fromkeys(parallel.context.layers))
    layers = tuple(kinds[layer % len(kinds)] for layer in range(num_layers)) if kinds else ()
    if cp == 1:
        return ContextConfig()
    near = None if context.a2a is None else 2 if cp % 2 == 0 else cp
    return replace(context, layers=layers, a2a=near)


def _shrink_packs(run: TrainRun, parallel: ParallelConfig) -> int | None:
    """Return packs of two of the longest documents; None without packing."""
    if run.train.tokens_per_microbatch is None:
        return None
    parts = 2 * parallel.cp * (parallel.tp if parallel.sp else 1)
    length = -(-_row_of(run, parallel) // parts) * parts
    return 2 * length // parallel.cp


def _row_of(run: TrainRun, parallel: ParallelConfig) -> int:
    """Return the tokens per row, which divide evenly or need padding as those of the run do."""
    p = run.parallel
    if parallel.cp == 1:
        return 12
    parts, before = (2 * q.cp * (q.tp if q.sp else 1) for q in (parallel, p))
    return -(-12 // parts) * parts - (run.train.seq_len % before != 0)


def _shrink_recompute(run: TrainRun, tp: int) -> RecomputeConfig:
    """Set layer counts to 1 or 2, of the two layers of a stage: some stay some, all stay all."""
    recompute = run.recompute
    some = recompute.method == "block" and recompute.num_layers < smallest_stage(run)
    count = 1 if some else min(recompute.num_layers, 2)
    chunks = min(recompute.mlp_chunks, 3)
    return replace(
        recompute,
        num_layers=count,
        mlp_chunks=chunks,
        shard_inputs=recompute.shard_inputs and tp > 1,
    )


# --- stages


def _shrink_pipeline(run: TrainRun, pp: int, *, kinds: int) -> tuple[PipelineConfig, int]:
    """Return the same kind of pipeline layout with fewer stages, and its number of layers."""
    pipeline = run.parallel.pipeline
    vpp = min(pipeline.vpp, 2)
    whole = pp * vpp == 1 or (pp == 1 and run.parallel.pp > 1)
    deep = run.offload.layers > 0 or run.recompute.granularity == "full"
    each = max(2 if deep or whole else 1, -(-kinds // (1 if whole else pp * vpp)))
    if whole:
        return PipelineConfig(), each
    small = replace(pipeline, vpp=vpp, group=None)
    if pipeline.layout is not None:
        stages = _stages(pipeline, run.parallel.pp, run.model)
        counts = _shrink_counts([len(stage.layers) for stage in stages], pp * vpp, each)
        place = len(counts) - 1
        if run.model.mtp.num_layers and not stages[-1].num_mtp_layers and place > 1:
            # MTP layers on another stage than the loss, as in the run
            place -= 1
            counts[place] = (
                counts[place]
                if next(stage for stage in stages if stage.num_mtp_layers).layers
                else 0
            )
            counts[0] += each if not any(counts) else 0
        layout = _layout(counts, place=place, depths=min(run.model.mtp.num_layers, MOST_DEPTHS))
        return replace(small, layout=layout), sum(counts)
    if pipeline.first_layers is not None or pipeline.last_layers is not None:
        return _shrink_ends(small, pp, each)
    extra = pipeline.count_embedding + pipeline.count_loss
    return small, pp * vpp * each * (2 if extra else 1) - extra


def _shrink_counts(counts: Sequence[int], num_stages: int, each: int) -> list[int]:
    """Return the layers per stage: empty at an end or in the middle, and uneven, as in the run."""
    small = [each] * num_stages
    for end in (0, -1):
        small[end] = each if counts[end] else 0
    if num_stages > 3 and 0 in counts[1:-1]:
        small[1] = 0
    if not any(small):
        small[0] = each
    if len({count for count in counts if count}) > 1:
        small[next(stage for stage in range(num_stages) if small[stage])] += each
    return small


def _layout(counts: Sequence[int], *, place: int, depths: int) -> str:
    """Return the layout string of stages with these layer counts; `place`: the stage of the MTP
    layers."""
    ends, last = list(accumulate(counts)), len(counts) - 1
    return format_layout(
        [
            Stage(
                range(ends[stage] - count, ends[stage]),
                embedding=stage == 0,
                loss=stage == last,
                num_mtp_layers=depths * (stage == place),
            )
            for stage, count in enumerate(counts)
        ]
    )


def _stages(pipeline: PipelineConfig, pp: int, model: ModelConfig) -> tuple[Stage, ...]:
    return plan_stages(pipeline, pp=pp, num_layers=model.num_layers, depths=model.mtp.num_layers)


def _shrink_ends(pipeline: PipelineConfig, pp: int, each: int) -> tuple[PipelineConfig, int]:
    """Give the configured end stages half as many layers as the others; of two such ranks, the
    first."""
    few, many = pipeline.vpp * each, 2 * pipeline.vpp * each
    first = None if pipeline.first_layers is None else few
    last = None if pipeline.last_layers is None else many if pp == 2 and first is not None else few
    named = [count for count in (first, last) if count is not None]
    return replace(pipeline, first_layers=first, last_layers=last), sum(named) + (
        pp - len(named)
    ) * many


def _fit_microbatches(
    run: TrainRun, parallel: ParallelConfig, before: Mapping[str, int]
) -> tuple[ParallelConfig, int]:
    """Return the rows per microbatch that give fewer, as many, or more microbatches than stages, as
    in the run."""
    pp, dp = parallel.pp, parallel.dp or 1
    if pp * parallel.pipeline.vpp == 1:
        return parallel, 1
    t = run.train
    wanted = _compare(count_microbatches_of_longest(t, run.parallel, before["dp"]), before["pp"])
    grouped = run.parallel.pipeline.group not in (None, before["pp"])
    options = [
        (
            _compare(count, pp) != wanted,
            (group is not None) != grouped,
            count == group,
            group or 0,
            abs(count - 4),
            count,
        )
        for count in range(1, ROWS // dp + 1)
        for group in (None, *range(pp + 1, count + 1))
        if ROWS % (dp * count) == 0
        and not schedule_problems(
            replace(parallel.pipeline, group=group), pp=pp, num_microbatches=count
        )
    ]
    *_, group, _, count = min(options)
    pipeline = replace(parallel.pipeline, group=group or None)
    return replace(parallel, pipeline=pipeline), ROWS // (dp * count)


def _compare(left: int, right: int) -> int:
    return (left > right) - (left < right)
