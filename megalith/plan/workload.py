"""What every rank of a run has to do in one step: its place, its stages, its tokens and its
schedule, on paper."""

from dataclasses import dataclass

from megalith.config.train import TrainRun
from megalith.plan.adapters import with_adapters
from megalith.plan.deal import document_multiple, microbatches_of_longest
from megalith.plan.frozen import with_frozen
from megalith.plan.grid import Grid
from megalith.plan.layout import model_grid
from megalith.plan.pairs import pair_forward_backward
from megalith.plan.parameters import ExpertPart, HeldParameter, held_parameters
from megalith.plan.schedule import Schedule, build_schedule, pipeline_in_use, schedule_name
from megalith.plan.stages import Stage, plan_stages, stages_of_rank, table_stages


@dataclass(frozen=True, slots=True)
class Workload:
    """A run on a number of ranks. Ranks with the same pp and tp coordinates do the same with other
    data."""

    run: TrainRun
    grid: Grid
    stages: tuple[Stage, ...]
    """Of the whole pipeline, first to last."""

    schedule: Schedule
    crowded: bool = False
    """All tokens choose the experts of one rank, as far as they can; else all experts are equally
    busy."""

    @property
    def world(self) -> int:
        """Ranks."""
        return self.grid.world

    @property
    def dp(self) -> int:
        """Ranks that read different rows."""
        return self.grid.size("dp")

    @property
    def shards(self) -> int:
        """Ranks that divide among them what ZeRO divides: dp_shard · cp; one without ZeRO."""
        return self.grid.size("dp_shard") * self.run.parallel.cp if self.run.parallel.zero else 1

    @property
    def expert_shards(self) -> int:
        """The same of experts' parameters: edp_shard; one without ZeRO, or without experts."""
        grid = self.grid.experts
        return grid.size("edp_shard") if self.run.parallel.zero and grid is not None else 1

    def shards_of(self, one: HeldParameter) -> int:
        """Ranks that divide what ZeRO divides of one parameter."""
        return self.expert_shards if one.grid == "expert" else self.shards

    @property
    def num_microbatches(self) -> int:
        """Of one step on each rank."""
        return self.schedule.num_microbatches

    @property
    def document_multiple(self) -> int:
        """What every document is padded to a multiple of; 1 where nothing is padded."""
        return document_multiple(self.run.parallel)

    @property
    def row_tokens(self) -> int:
        """PackedSeqParams of a row with its padding, counted as one document: how many it really
        has, only the data knows."""
        length = self.run.train.seq_len
        return length + -length % self.document_multiple

    @property
    def tokens(self) -> int:
        """PackedSeqParams of a microbatch that one rank computes, padding included."""
        return sum(self.lengths) // self.run.parallel.cp

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the documents of a microbatch: rows; or in a pack, as many as there is room for of the
        longest."""
        train, row = self.run.train, self.row_tokens
        if train.tokens_per_microbatch is None:
            return (row,) * train.micro_batch_size
        whole, rest = divmod(train.tokens_per_microbatch * self.run.parallel.cp, row)
        return (row,) * whole + ((rest,) if rest else ())

    @property
    def replica_ranks(self) -> dict[str, tuple[int, ...]]:
        """Pipeline ranks that hold each table which several stages may read."""
        p = self.run.parallel
        return table_stages(self.run.model, self.stages, p.pipeline, pp=p.pp)

    @property
    def table_stages(self) -> tuple[int, ...]:
        """Of these, those that hold the embedding's table."""
        return self.replica_ranks["embed.weight"]

    def shared_tables(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several pipeline ranks hold, and those ranks."""
        return {name: ranks for name, ranks in self.replica_ranks.items() if ranks[1:]}

    def chunks(self, pp_rank: int) -> list[Stage]:
        """The stages of one pipeline rank, by chunk number."""
        return stages_of_rank(
            self.stages, pp_rank, self.run.parallel.pipeline, pp=self.run.parallel.pp
        )

    def expert_part(self, pp_rank: int, tp_rank: int) -> ExpertPart:
        """Of experts, what the ranks at this place have; where some have larger parts of each,
        those."""
        p, grid, moe = self.run.parallel, self.grid.experts, self.run.model.moe
        if grid is None or moe is None:
            return ExpertPart(etp=p.tp, etp_rank=tp_rank)
        etp = grid.size("etp")
        if moe.ffn_hidden_size % etp == 0:
            return ExpertPart(p.ep, etp)
        ranks = self.grid.group_of(self.rank_at(pp_rank, tp_rank), ("dp", "cp"))
        return ExpertPart(p.ep, etp, min(grid.coordinates(rank)["etp"] for rank in ranks))

    def parameters(
        self, pp_rank: int, tp_rank: int, *, experts: ExpertPart | None = None
    ) -> list[HeldParameter]:
        """Everything that a rank at this place holds, chunk after chunk; a tied table that two
        chunks use, once.

        experts: its part of them; unset: the largest at this place.
        """
        experts = experts or self.expert_part(pp_rank, tp_rank)
        held: dict[str, HeldParameter] = {}
        for stage in self.chunks(pp_rank):
            for one in held_parameters(
                self.run.model,
                tp=self.run.parallel.tp,
                tp_rank=tp_rank,
                layers=stage.layers,
                embedding=stage.embedding,
                loss=stage.loss,
                norm=stage.norm,
                num_mtp_layers=stage.num_mtp_layers,
                experts=experts,
            ):
                held.setdefault(one.name, one)
        return with_frozen(
            with_adapters(list(held.values()), self.run.model, self.run.lora), self.run.optim
        )

    def rank_at(self, pp_rank: int, tp_rank: int) -> int:
        """The first rank of the world at this place."""
        return self.grid.rank_at({"pp": pp_rank, "tp": tp_rank, "dp": 0, "cp": 0})


def plan_workload(run: TrainRun, world: int) -> Workload:
    """Lay out a run whose rules hold on `world` ranks.

    Raises:
        PlanError: the degrees, the layers or the schedule do not fit.
    """
    p, t = run.parallel, run.train
    grid = model_grid(p, run.model, world)
    rows = microbatches_of_longest(t, p, grid.size("dp"))
    used = pipeline_in_use(p.pipeline, p.pp)
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
