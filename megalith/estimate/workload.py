"""The work of every rank of a run in one step: grid, stages, token counts and pipeline schedule."""

from dataclasses import dataclass

from megalith.config.train import TrainRun
from megalith.plan.batch_assignment import count_microbatches_of_longest, document_multiple
from megalith.plan.frozen import with_adapters, with_frozen
from megalith.plan.grid import Grid, model_grid
from megalith.plan.layers.base import ExpertPart, HeldParameter, LayerRank
from megalith.plan.parameters import held_parameters
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
