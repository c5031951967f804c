"""The work of every rank of a run in one step: grid, stages, token counts and pipeline schedule;
and the saved activations of a pipeline stage for one microbatch, tensor by tensor, in bytes.

The rows of activations follow what the kernels save for backward, so that on CPUs their sum equals
the measured memory (testing/meter.py) to the byte. The tensors of each kind of layer are listed in
its module of plan/layers; each tensor is listed at the first module that saves it. Around the
layers, for t tokens of the microbatch on this rank (t / tp outside of the tensor-parallel matmuls
with sp), h hidden, e bytes per value and w bytes of a statistic:

    attention_norm   input and scale                     (h·e + w)·t
    (the layer)      mlp_norm's input and scale          (h·e + w)·t

A LayerNorm also saves means, w·t; norms after attention and MLP save their own inputs; a parallel
layer saves one input less, and with one norm two.

Source of the method: Korthikanti et al. 2022, arXiv:2205.05198, section 4.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from megalith.config.parallel import OffloadConfig, RecomputeConfig
from megalith.config.train import TrainRun
from megalith.plan.batch_assignment import count_microbatches_of_longest, document_multiple
from megalith.plan.frozen import with_adapters, with_frozen
from megalith.plan.grid import Grid, model_grid
from megalith.plan.layers import branches
from megalith.plan.layers.attention import all_rope_tables, source_tensors
from megalith.plan.layers.base import (
    ExpertPart,
    HeldParameter,
    LayerBranch,
    LayerRank,
    LayerSetting,
    SavedActivation,
    norm_tensors,
    residual_norm_tensors,
    stream_norm_tensors,
    total,
)
from megalith.plan.layers.embedding import embedding_tensors, head_tensors, mtp_tensors
from megalith.plan.layers.mlp import mlp_tensors
from megalith.plan.parameters import held_parameters
from megalith.plan.recompute import Span, layer_spans, mlp_in_chunks, recomputed_modules
from megalith.plan.schedule import (
    Schedule,
    build_schedule,
    effective_pipeline,
    pair_forward_backward,
    schedule_name,
)
from megalith.plan.stages import Stage, plan_stages, select_rank_stages, table_stages


@dataclass(frozen=True, slots=True)
class Workload:
    """A run on a number of ranks. Ranks with the same pp and tp coordinates do the same work on
    other data."""

    run: TrainRun
    grid: Grid
    stages: tuple[Stage, ...]
    """Stages of the whole pipeline, first to last."""

    schedule: Schedule
    crowded: bool = False
    """Whether as many tokens as possible choose the experts of one rank; else the experts are
    balanced."""

    @property
    def world(self) -> int:
        """World size."""
        return self.grid.world

    @property
    def dp(self) -> int:
        """Number of ranks that read different rows."""
        return self.grid.size("dp")

    @property
    def shards(self) -> int:
        """Number of ZeRO shards: dp_shard · cp; one without ZeRO."""
        return self.grid.size("dp_shard") * self.run.parallel.cp if self.run.parallel.zero else 1

    @property
    def expert_shards(self) -> int:
        """Number of ZeRO shards of expert parameters: edp_shard; one without ZeRO or experts."""
        grid = self.grid.experts
        return grid.size("edp_shard") if self.run.parallel.zero and grid is not None else 1

    def num_zero_shards(self, one: HeldParameter) -> int:
        """Return the number of ZeRO shards of one parameter."""
        return self.expert_shards if one.grid == "expert" else self.shards

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and rank."""
        return self.schedule.num_microbatches

    @property
    def document_multiple(self) -> int:
        """Multiple that every document is padded to; 1 without padding."""
        return document_multiple(self.run.parallel)

    @property
    def row_tokens(self) -> int:
        """Tokens of a row with its padding, counted as one document; the actual number depends on
        the data."""
        length = self.run.train.seq_len
        return length + -length % self.document_multiple

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch that one rank computes, padding included."""
        return sum(self.lengths) // self.run.parallel.cp

    @property
    def lengths(self) -> tuple[int, ...]:
        """Document lengths of a microbatch: rows; or in a pack, as many of the longest documents as
        fit."""
        train, row = self.run.train, self.row_tokens
        if train.tokens_per_microbatch is None:
            return (row,) * train.micro_batch_size
        whole, rest = divmod(train.tokens_per_microbatch * self.run.parallel.cp, row)
        return (row,) * whole + ((rest,) if rest else ())

    @property
    def replica_ranks(self) -> dict[str, tuple[int, ...]]:
        """Pipeline ranks that hold each lookup table which several stages read."""
        p = self.run.parallel
        return table_stages(self.run.model, self.stages, p.pipeline, pp=p.pp)

    @property
    def table_stages(self) -> tuple[int, ...]:
        """Pipeline ranks that hold the embedding table."""
        return self.replica_ranks["embed.weight"]

    def shared_tables(self) -> dict[str, tuple[int, ...]]:
        """Return the parameters that several pipeline ranks hold, with those ranks."""
        return {name: ranks for name, ranks in self.replica_ranks.items() if ranks[1:]}

    def chunks(self, pp_rank: int) -> list[Stage]:
        """Return the stages (model chunks) of one pipeline rank."""
        return select_rank_stages(
            self.stages, pp_rank, self.run.parallel.pipeline, pp=self.run.parallel.pp
        )

    def expert_part(self, pp_rank: int, tp_rank: int) -> ExpertPart:
        """Return the expert shard of the ranks at this (pp, tp) position; if shards differ, the
        largest."""
        p, grid, moe = self.run.parallel, self.grid.experts, self.run.model.moe
        if grid is None or moe is None:
            return ExpertPart(etp=p.tp, etp_rank=tp_rank)
        etp = grid.size("etp")
        if moe.ffn_hidden_size % etp == 0:
            return ExpertPart(p.ep, etp)
        ranks = self.grid.find_group(self.rank_at(pp_rank, tp_rank), ("dp", "cp"))
        return ExpertPart(p.ep, etp, min(grid.coordinates(rank)["etp"] for rank in ranks))

    def parameters(
        self, pp_rank: int, tp_rank: int, *, experts: ExpertPart | None = None
    ) -> list[HeldParameter]:
        """Return all parameters of a rank at this position, by chunk; a tied table of two chunks
        occurs once.

        experts: the expert shard of the rank; unset: the largest at this position.
        """
        experts = experts or self.expert_part(pp_rank, tp_rank)
        held: dict[str, HeldParameter] = {}
        for stage in self.chunks(pp_rank):
            for one in held_parameters(
                self.run.model, stage, LayerRank(self.run.parallel.tp, tp_rank, experts)
            ):
                held.setdefault(one.name, one)
        return with_frozen(
            with_adapters(list(held.values()), self.run.model, self.run.lora), self.run.optim
        )

    def rank_at(self, pp_rank: int, tp_rank: int) -> int:
        """Return the first global rank at this position."""
        return self.grid.rank_at({"pp": pp_rank, "tp": tp_rank, "dp": 0, "cp": 0})


def plan_workload(run: TrainRun, world: int) -> Workload:
    """Return the workload of a run whose rules hold, on `world` ranks.

    Raises:
        PlanError: the degrees, the layers or the schedule do not fit.
    """
    p, t = run.parallel, run.train
    grid = model_grid(p, run.model, world)
    rows = count_microbatches_of_longest(t, p, grid.size("dp"))
    used = effective_pipeline(p.pipeline, p.pp)
    schedule = build_schedule(
        schedule_name(used),
        num_ranks=p.pp,
        num_microbatches=rows,
        num_chunks=used.vpp,
        group=used.group,
    )
    if p.overlap_experts:
        schedule = pair_forward_backward(schedule)
    stages = plan_stages(
        p.pipeline, pp=p.pp, num_layers=run.model.num_layers, depths=run.model.mtp.num_layers
    )
    return Workload(run, grid, stages, schedule)


# --- saved activations of a pipeline stage


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Saved activations of one microbatch on one rank, in one stage or model chunk."""

    layers: tuple[tuple[SavedActivation, ...], ...]
    """By layer; a span of recomputed layers has all its rows at its first layer."""

    host: tuple[tuple[SavedActivation, ...], ...]
    """By layer: the rows that are offloaded to host memory."""

    ends: tuple[SavedActivation, ...]
    """Rows of the embedding, the last norm and the loss, as far as the stage has them, and of
    tensors that layers share."""

    transient: int
    """Temporary bytes in backward: the largest recomputed part, and what is copied back from the
    host."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device between forward and backward."""
        kept = total(self.ends) + sum(total(rows) for rows in self.layers)
        return kept - self.host_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(total(rows) for rows in self.host)


def stage_activations(
    setting: LayerSetting,
    *,
    num_layers: int,
    embedding: bool = True,
    loss: bool = True,
    norm: bool | None = None,
    num_mtp_layers: int | None = None,
) -> StageActivations:
    """Return the saved activations of a stage with `num_layers` layers, with or without embedding
    and loss.

    norm, num_mtp_layers: whether the stage has the last norm, and how many MTP layers; unset: those
    that belong to the loss.
    """
    ends = _StageEnds(
        embedding,
        loss if norm is None else norm,
        loss,
        setting.model.mtp.num_layers * loss if num_mtp_layers is None else num_mtp_layers,
    )
    modules, first = recomputed_modules(setting.recompute), setting.first_layer
    layer_tensors = [
        tuple(layer_rows(setting, modules, first + layer)) for layer in range(num_layers)
    ]
    layers: list[tuple[SavedActivation, ...]] = []
    host: list[tuple[SavedActivation, ...]] = []
    transient = max(
        (_recomputed_bytes(setting, first + n, rows) for n, rows in enumerate(layer_tensors)),
        default=0,
    )
    for span in _layer_spans(setting, num_layers):
        span_tensors = layer_tensors[span.start : span.stop]
        rows = (span_input(setting),) if span.recomputed else span_tensors[0]
        if span.recomputed:
            transient = max(transient, sum(map(total, span_tensors)) - total(rows))
        no_tensors = [()] * (span.stop - span.start - 1)
        layers += [rows, *no_tensors]
        host += [offloaded(setting, span, rows), *no_tensors]
    transient = max(transient, 0) + peak_copied_back(
        [(total(r), total(away)) for r, away in zip(layers, host, strict=True) if r]
    )
    end_tensors = (*_end_rows(setting, num_layers, ends), *_shared_rows(setting, num_layers, ends))
    return StageActivations(tuple(layers), tuple(host), end_tensors, transient)


class _StageEnds(NamedTuple):
    """Parts of a stage other than its layers."""

    embedding: bool
    norm: bool
    loss: bool
    num_mtp_layers: int


def _recomputed_bytes(setting: LayerSetting, layer: int, rows: Sequence[SavedActivation]) -> int:
    """Return the bytes that backward recomputes in a layer that saves `rows`; with MLP chunks, of
    one chunk."""
    recomputed = total(layer_rows_without_recompute(setting, layer)) - total(rows)
    if not mlp_in_chunks(setting.recompute, setting.model, layer):
        return recomputed
    setting = replace(setting, model=setting.model.at(layer))
    inner, own = total(mlp_tensors(setting, setting.part.ffn, ())), setting.own_tokens
    return recomputed - inner + inner * -(-own // setting.recompute.mlp_chunks) // own


def _layer_spans(setting: LayerSetting, num_layers: int) -> list[Span]:
    cut = setting.model.find_cross_layer_source(
        range(setting.first_layer, setting.first_layer + num_layers)
    )
    return layer_spans(setting.recompute, setting.offload, num_layers, cut=cut)


def peak_copied_back(spans: Sequence[tuple[int, int]]) -> int:
    """Return the largest number of bytes that backward holds beyond what forward left on the
    device, because offloaded tensors are copied back.

    spans: (saved bytes, offloaded bytes of these) of each span. While backward is in one span, this
    span and the one before it are on the device, and the later ones are freed.

    >>> [
    ...     peak_copied_back(spans)
    ...     for spans in ([(9, 9), (9, 9), (9, 9), (10, 0)], [(9, 9), (10, 0), (10, 0)])
    ... ]
    [9, 0]
    """
    later = list(accumulate((kept - away for kept, away in reversed(spans)), initial=0))[-2::-1]
    before = [0, *(away for _, away in spans)]
    back = [
        away + earlier - gone
        for (_, away), earlier, gone in zip(spans, before, later, strict=False)
    ]
    return max([0, *back])


def layer_rows_without_recompute(
    setting: LayerSetting, layer: int | None = None
) -> list[SavedActivation]:
    """Return the saved tensors of a layer without recomputation."""
    return layer_rows(replace(setting, recompute=RecomputeConfig()), (), layer)


def layer_rows(
    setting: LayerSetting, recomputed: Sequence[str], layer: int | None = None
) -> list[SavedActivation]:
    """Return the saved tensors of a layer (global number; unset: the first of the stage) with the
    modules `recomputed` recomputed."""
    index = setting.first_layer if layer is None else layer
    own = replace(setting, model=setting.model.at(index))
    rows: list[SavedActivation] = []
    for branch in branches(setting.model, index):
        rows += _branch_rows(own, branch, recomputed, is_first=not rows)
    return rows


def _branch_rows(
    setting: LayerSetting, branch: LayerBranch, recomputed: Sequence[str], *, is_first: bool
) -> list[SavedActivation]:
    """Return the saved tensors of a branch of a layer and of the norms around it; is_first: it
    reads the input of the layer."""
    model, norm = setting.model, f"{branch.name}_norm"
    placement, block = model.norm_placement, "sequential" if is_first else model.block
    before, rows = placement != "after", list[SavedActivation]()
    if before and is_first:
        rows += stream_norm_tensors(setting, norm)
    elif before and (branch.name == "cross" or block == "sequential"):
        rows += residual_norm_tensors(setting, norm)
    elif before and block == "parallel":
        rows += stream_norm_tensors(setting, norm)[1:]  # the input is that of attention_norm
    # In parallel layers with one norm, or none, attention saves the same input.
    has_own_input = block == "sequential" or (before and block == "parallel")
    has_own_input = has_own_input or branch.name == "cross"
    saves_input = has_own_input and not (before and "norm" in recomputed)
    rows += branch.kind.saved_tensors(branch, setting, recomputed, saves_input)
    return rows + (
        norm_tensors(setting, f"{branch.name}_out.norm") if placement != "before" else []
    )


def span_input(setting: LayerSetting) -> SavedActivation:
    """Return the input that a span of recomputed layers saves, or its padded shard of 1/tp."""
    numel = setting.own_tokens * setting.model.hidden_size
    if setting.recompute.shard_inputs:
        numel = -(-numel // setting.tp)
    return SavedActivation("", "input of recomputed layers", numel, numel * setting.stream)


def offloaded(
    setting: LayerSetting, span: Span, rows: Sequence[SavedActivation]
) -> tuple[SavedActivation, ...]:
    """Return the rows that are offloaded to host memory: those of offloaded layers that are large
    enough."""
    return tuple(row for row in rows if span.offloaded and row.numel >= setting.offload.min_numel)


def _end_rows(
    setting: LayerSetting, num_layers: int, ends: _StageEnds
) -> Iterator[SavedActivation]:
    """Yield the saved tensors of the embedding, the last norm, the loss and the MTP layers."""
    first = setting.first_layer
    if ends.embedding:
        yield from embedding_tensors(setting)
    layers = range(first, first + num_layers)
    yield from source_tensors(setting, layers, _layer_spans(setting, num_layers))
    if ends.norm:
        yield from stream_norm_tensors(setting, "norm")
    if ends.loss:
        yield from head_tensors(setting)
    for depth in range(setting.model.mtp.num_layers):
        region = f"mtp.layers.{depth}"
        if ends.num_mtp_layers:
            yield from mtp_tensors(setting, region, _mtp_layer_rows(setting, region))
        if ends.loss:
            yield from head_tensors(setting, f"mtp_heads.{depth}")


def _mtp_layer_rows(setting: LayerSetting, region: str) -> list[SavedActivation]:
    """Return the saved tensors of the decoder layer of an MTP layer, which is like the last one."""
    if layer_spans(setting.recompute, OffloadConfig(), 1)[0].recomputed:
        return [span_input(setting)]
    rows = layer_rows(setting, recomputed_modules(setting.recompute), setting.model.num_layers - 1)
    return [row._replace(region=f"{region}.layer.{row.region}".rstrip(".")) for row in rows]


def _shared_rows(setting: LayerSetting, num_layers: int, ends: _StageEnds) -> list[SavedActivation]:
    """Return the tensors that several layers share: RoPE tables, the mask of padding, token indices
    for dropout."""
    dropout, first, t = setting.model.dropout, setting.first_layer, setting.tokens
    recomputed, shared, all_recomputed = (
        recomputed_modules(setting.recompute),
        set[SavedActivation](),
        True,
    )
    mtp_layers = [setting.model.num_layers - 1] if ends.num_mtp_layers else []
    for layers in (range(first, first + num_layers), mtp_layers):
        for span in layer_spans(setting.recompute, OffloadConfig(), len(layers)):
            if span.recomputed:
                shared |= {*all_rope_tables(setting)}
                continue
            all_recomputed = False
            for layer in layers[span.start : span.stop]:
                for branch in branches(setting.model, layer):
                    shared |= {*branch.kind.shared_tensors(branch, setting, recomputed)}
    rows = sorted(shared)
    dropped = dropout.residual > 0 and not all_recomputed
    if dropped or (dropout.embedding > 0 and (ends.embedding or ends.num_mtp_layers > 0)):
        rows.append(SavedActivation("shared", "numbers of tokens", t, 8 * t))
    return rows
