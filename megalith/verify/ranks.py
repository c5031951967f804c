"""The float64 proof: a layout, run on real processes, computes what one process computes.

Float64 turns rounding into about 1e-15, so whatever is left is a fault. Loss, every gradient, the
first weights, the weights after three steps, and a fourth step after saving and loading are
compared; of experts also, and first, how many tokens each was chosen by. What one process computes
could be wrong in the same way, so torch.optim computes the updates once more, and the checkpoint is
also read under another layout and compared with what was saved.
"""

import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megalith.checkpoint.boxes import CheckpointEntry, pieces
from megalith.checkpoint.load import Checkpoint, open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.optim import OptimConfig, PrecisionConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.train import LoopConfig, TrainRun, dropout_seed
from megalith.data.loader import Loader, Masks
from megalith.data.sample import Dataset, RowMask, Sample
from megalith.nn.init import init_param_
from megalith.optim.schedule import GroupRates, group_rates, schedule_lengths
from megalith.parallel.context import my_slicing
from megalith.parallel.mesh import Mesh, build_mesh, mesh_of_one, model_grid
from megalith.parallel.tensor import Init
from megalith.plan.deal import budget_of
from megalith.plan.keys import key
from megalith.plan.shards import Box, Shard
from megalith.testing.ranks import run_ranks
from megalith.testing.symm_mem import fused_on_cpus
from megalith.testing.tolerance import FP64, compare
from megalith.train.build import (
    Trainer,
    all_gather_loaded_params,
    build_trainer,
    checkpoint_entries,
)
from megalith.train.experts import LayerExpertLoad, collect_expert_load, routers_of
from megalith.train.step import train_step
from megalith.verify.faults import fault_named, planted
from megalith.verify.ragged import RaggedDocuments
from megalith.verify.reshard import resharded_run
from megalith.verify.torch_optim import RecordingOptimizer, TorchUpdate, torch_updates

STEPS = 3
"""Steps before saving; gradients are compared in the first."""

DECAY = 0.1
"""Weight decay of what has none of its own."""


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Made-up rows with uneven losses: each row keeps a random part of its labels, some rows none
    at all."""

    seq_len: int
    vocab_size: int
    num_samples: int
    masked: tuple[int, ...]
    """Samples without any label."""

    eod: int | None = None
    """This token, about every fifth, ends a document; None: rows are documents."""

    places: bool = False
    """PackedSeqParams have random places in time, height and width, in all rows but every third,
    which are text."""

    masks: "MaskKind | None" = None
    """Random masks of pairs, some of which let a token see nothing, in all rows; or beside
    causality in every third row, and padding in another third."""

    @property
    def fingerprint(self) -> str:
        """What it is made of."""
        made_of = (
            self.seq_len,
            self.vocab_size,
            self.num_samples,
            self.masked,
            self.eod,
            self.places,
            self.masks,
        )
        return " ".join(["ragged rows", *map(str, made_of)])

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, k: int) -> Sample:
        """ReportRow k, the same for everyone."""
        draw = np.random.default_rng(key(0, "verify", "rows", k))
        ids = draw.integers(0, self.vocab_size, self.seq_len + 1)
        kept = 0 if k in self.masked else int(draw.integers(2, self.seq_len + 2))
        if self.eod is not None:
            ids[draw.random(len(ids)) < 0.2] = self.eod
        places = draw.integers(0, 30, (3, self.seq_len)) if self.places and k % 3 else None
        return Sample(ids, kept, places=places, mask=None if self.masks is None else self._mask(k))

    def _mask(self, k: int) -> RowMask | None:
        draw, alone = np.random.default_rng(key(0, "verify", "masks", k)), self.masks == "alone"
        if not alone and k % 3 == 0:
            return None
        if not alone and k % 3 == 1:
            return RowMask(draw.random(self.seq_len) < 0.7)
        seen = (draw.random((self.seq_len, self.seq_len)) < 0.6) & (
            draw.random((self.seq_len, 1)) < 0.8
        )
        return RowMask(seen, alone)


MaskKind = Literal["beside", "alone"]
"""Whether masks hide more than causality does, or take its place."""


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """One layout to prove: a tiny float64 run, and how its ranks divide the work."""

    run: TrainRun
    world: int
    fault: str | None = None
    """Name of a planted fault; None: the code as it is."""

    masks: MaskKind | None = None
    """Of tokens; None: they have none."""

    resharded: TrainRun | None = None
    """The run under another layout, which reads the checkpoint; None: no other one does."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """Slices of one tensor from all ranks."""

    shape: tuple[int, ...]
    parts: list[tuple[Box, Tensor]]


Gathered = dict[str, Boxes]


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank computed, or all ranks (`join_ranks`)."""

    losses: list[float]
    grad_norms: list[float]
    scores: list[float]
    """What the size of scores cost and the largest score, step by step; empty unless a run tells of
    them."""

    initial: Gathered
    gradients: Gathered
    weights: Gathered
    stored: dict[str, Tensor]
    """Of the checkpoint, as rank 0 reads it."""

    reloaded: Gathered
    uses: list[list[LayerExpertLoad]]
    """By step: what the experts of every layer did; empty lists without experts."""

    biases: dict[str, list[Tensor]]
    """Balancing biases after the last step, by layer: one per rank that has the layer."""

    still: Gathered
    """After the last step: weights that are not trained; empty with adapters."""

    saved: Gathered
    """Every tensor of the checkpoint as the ranks held it before saving, and the optimizer's step
    count."""

    resharded: Gathered
    """The same after loading."""

    reads_other_layout: bool
    """Whether `resharded` is of another layout than `saved`."""

    expected: list[TorchUpdate]
    """What torch.optim makes of the gradients of all steps; empty but for one process."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The worst disagreement of one kind of value."""

    what: str
    name: str
    error: float
    holds: bool


def layout_case(
    model: ModelConfig,
    parallel: ParallelConfig,
    world: int,
    *,
    micro_batch_size: int = 1,
    seq_len: int = 12,
    documents: bool = False,
    fault: str | None = None,
) -> LayoutCase:
    """A tiny run of `model` in float64 under `parallel`: 12 rows a step, which dp 1, 2, 3 and 4
    divide.

    With `documents` rows are packed with documents of a few tokens each, and attention stays inside
    them.
    """
    run = TrainRun(
        name="verify",
        model=model,
        data=DataConfig(mock=True, document_masking=documents),
        parallel=replace(parallel, bucket_numel=2000),
        train=LoopConfig(
            steps=STEPS + 1,
            global_batch_size=12,
            micro_batch_size=micro_batch_size,
            seq_len=seq_len,
        ),
        schedule=ScheduleConfig(lr=1e-2, style="constant"),
        optim=OptimConfig(eps=1e-3),
        precision=PrecisionConfig(params="fp64"),
    )
    return LayoutCase(run, world, fault)


def choose_micro_batch_size(parallel: ParallelConfig) -> int:
    """Return the rows of a microbatch that give each data-parallel rank three or four microbatches
    in a step.

    So many show an error in the accumulation of gradients, and more only cost time. Context
    parallelism alone keeps microbatches of one row, in which one rank can have no label while
    another has some. So do longer pipelines and other schedules, which need more microbatches than
    stages.
    """
    p, pipeline = parallel, parallel.pipeline
    has_other_schedule = p.pp > 2 or pipeline.vpp > 1 or pipeline.schedule not in ("auto", "1f1b")
    if has_other_schedule or (p.cp > 1 and p.tp == 1):
        return 1
    return {1: 3, 2: 2}.get(parallel.dp or 1, 1)


def prove_layout(case: LayoutCase, *, timeout: float = 120.0) -> list[Difference]:
    """Run the case on its processes and on one, and compare; the caller looks at `holds`."""
    on_ranks = replace(case, resharded=resharded_run(case.run, case.world))
    with tempfile.TemporaryDirectory() as folder:
        result = join_ranks(run_ranks(run_case, case.world, on_ranks, folder, timeout=timeout))
    fault = case.fault if case.fault is not None and fault_named(case.fault).everywhere else None
    return compare_results(
        result, compute_reference(LayoutCase(run_of_one(case), 1, fault, masks=case.masks))
    )


@functools.lru_cache(
    maxsize=32
)  # neighboring rows of the matrix and most planted faults have the same model
def compute_reference(case: LayoutCase) -> RankResult:
    """Return what one process computes; the result is shared by all layouts of one model and must
    not be modified."""
    with tempfile.TemporaryDirectory() as folder:
        return run_case(0, 1, case, folder)


def run_of_one(case: LayoutCase) -> TrainRun:
    """Return the run of one process that the case is compared with.

    It has all rows of a step in one microbatch, so that it accumulates nothing, unless a loss or
    the choice of experts depends on the microbatch. Then its microbatches have the rows of one
    microbatch of a rank, or, if balance over the global batch counts what data-parallel ranks see
    at once, of all of these ranks. Packs are as small as they can be.
    """
    run, p = case.run, case.run.parallel
    dp = p.dp or case.world // (p.tp * p.cp * p.pp)
    moe, rows = run.model.moe, run.train.global_batch_size
    by_microbatch = moe is not None and balances_by_microbatch(
        moe, documents=run.data.document_masking
    )
    if balances_over_ranks(run.model):
        rows = run.train.micro_batch_size * dp
    elif by_microbatch or run.train.tokens_per_microbatch is not None:
        rows = run.train.micro_batch_size
    return replace(
        run,
        parallel=ParallelConfig(bucket_numel=p.bucket_numel),
        recompute=RecomputeConfig(),
        offload=OffloadConfig(),
        train=replace(
            run.train,
            micro_batch_size=rows,
            loss_backward="kept",
            loss_chunk=None,
            tokens_per_microbatch=None
            if run.train.tokens_per_microbatch is None
            else run.train.seq_len,
        ),
    )


def balances_over_ranks(model: ModelConfig) -> bool:
    """Whether experts are kept busy by what data-parallel ranks see together."""
    return model.moe is not None and model.moe.aux_loss.global_batch_coeff > 0


def balances_by_microbatch(moe: MoEConfig, *, documents: bool) -> bool:
    """Whether anything depends on what a microbatch has, so that with other rows in each it is
    another model: losses over it, or over documents of which it has now more and now fewer; room
    for its tokens; plans and offsets."""
    balance = moe.aux_loss
    over_it = (
        balance.batch_coeff > 0
        or balance.quantile
        or balance.sinkhorn
        or moe.capacity.factor is not None
    )
    return over_it or (documents and balance.sequence_coeff > 0)


def run_case(rank: int, world: int, case: LayoutCase, folder: str) -> RankResult:
    """Run the case on one rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            planted(case.fault),
            fused_on_cpus() if case.run.parallel.collective_matmul == "fused" else nullcontext(),
        ):
            mesh = (
                mesh_of_one()
                if world == 1
                else build_mesh(model_grid(case.run.parallel, case.run.model, world), rank=rank)
            )
            return _run_case(case, mesh, Path(folder))
    finally:
        torch.set_num_threads(threads)


def _run_case(case: LayoutCase, mesh: Mesh, folder: Path) -> RankResult:
    device = torch.device("cpu")
    trainer = _recording(build_trainer(case.run, mesh, device))
    _give_adapters_values(trainer)
    initial, groups = _weights(trainer) | _still(trainer), _group_rates(case.run)
    losses, norms, uses, gradients = [], [], [], {}
    unclipped: list[dict[str, Tensor]] = []
    loader = _loader(case.run, mesh, consumed=0, steps=STEPS, masks=case.masks)
    scores: list[float] = []
    for step in range(STEPS):
        result = train_step(
            trainer, loader.next(), lr=case.run.schedule.lr, weight_decay=DECAY, groups=groups
        )
        losses.append(result.loss)
        norms.append(result.grad_norm)
        scores += [value for value in (result.z_loss, result.max_logit) if value is not None]
        uses.append(collect_expert_load(trainer.pipeline_model.modules, mesh))
        unclipped += _unclipped_gradients(trainer)
        if step == 0:
            # The optimizer has clipped these in place; they are compared as they were applied, all
            # by the same factor.
            gradients = _slices([(o.shard, o.gradient) for o in trainer.data.local_params])
    trainer.data.wait_params()
    weights, saved = _weights(trainer), _state(trainer)
    state = {"optimizer_updates": trainer.optimizer.updates}
    save_checkpoint(
        folder, STEPS, checkpoint_entries(trainer), state, mesh.world, config_text="", keep=None
    )
    checkpoint = open_checkpoint(folder / f"step_{STEPS:07d}")
    again = build_trainer(
        case.run, mesh, device, fill=case.run.lora is not None
    )  # the base is in no checkpoint
    again = _recording(again)
    _load(checkpoint, again)
    resharded = (
        _state(again) if case.resharded is None else _read_under(case.resharded, checkpoint, mesh)
    )
    rows = case.run.train.global_batch_size
    batches = _loader(case.run, mesh, consumed=STEPS * rows, steps=1, masks=case.masks).next()
    losses.append(
        train_step(again, batches, lr=case.run.schedule.lr, weight_decay=DECAY, groups=groups).loss
    )
    uses.append(collect_expert_load(again.pipeline_model.modules, mesh))
    unclipped += _unclipped_gradients(again)
    again.data.wait_params()
    names = checkpoint.keys() if mesh.world.rank == 0 else ()
    stored = {name: checkpoint.read(name) for name in names}
    expected = (
        torch_updates(
            case.run,
            _joined(initial),
            unclipped,
            lr=case.run.schedule.lr,
            weight_decay=DECAY,
            groups=groups,
        )
        if unclipped
        else []
    )
    return RankResult(
        losses,
        norms,
        scores,
        initial,
        gradients,
        weights,
        stored,
        _weights(again),
        uses,
        _biases(again),
        _still(again),
        saved,
        resharded,
        case.resharded is not None,
        expected,
    )


def join_ranks(results: Sequence[RankResult]) -> RankResult:
    """Return the slices of all ranks by name, and what every rank knows as rank 0 has it."""
    biases: dict[str, list[Tensor]] = {}
    for result in results:
        for name, values in result.biases.items():
            biases.setdefault(name, []).extend(values)
    return replace(
        results[0],
        initial=_join_slices([result.initial for result in results]),
        gradients=_join_slices([result.gradients for result in results]),
        weights=_join_slices([result.weights for result in results]),
        reloaded=_join_slices([result.reloaded for result in results]),
        biases=biases,
        still=_join_slices([result.still for result in results]),
        saved=_join_slices([result.saved for result in results]),
        resharded=_join_slices([result.resharded for result in results]),
    )


def _recording(trainer: Trainer) -> Trainer:
    """The trainer with an optimizer that records its gradients, on one process."""
    if trainer.mesh.world.size > 1:
        return trainer
    return replace(trainer, optimizer=RecordingOptimizer(trainer.optimizer))


def _unclipped_gradients(trainer: Trainer) -> list[dict[str, Tensor]]:
    """The gradients of the last step before they were clipped, if they were recorded."""
    optimizer = trainer.optimizer
    if not isinstance(optimizer, RecordingOptimizer):
        return []
    shards = [slot.shard for slot in optimizer.slots]
    return [_joined(_slices(list(zip(shards, optimizer.gradients, strict=True))))]


def _load(checkpoint: Checkpoint, trainer: Trainer) -> None:
    """Fill weights and optimizer, as a run that resumes. Collective."""
    checkpoint.load_into(checkpoint_entries(trainer), trainer.mesh.world)
    trainer.optimizer.set_updates(int(checkpoint.state["optimizer_updates"]))
    all_gather_loaded_params(trainer)


def _read_under(run: TrainRun, checkpoint: Checkpoint, mesh: Mesh) -> Gathered:
    """My part of what the checkpoint holds under the layout of `run`. Collective."""
    other = build_mesh(model_grid(run.parallel, run.model, mesh.world.size), rank=mesh.world.rank)
    trainer = build_trainer(run, other, torch.device("cpu"), fill=False)
    _load(checkpoint, trainer)
    return _state(trainer)


def compare_results(result: RankResult, reference: RankResult) -> list[Difference]:
    """Every kind of value, its worst disagreement, and whether it is within the tolerance."""
    read_under = f"checkpoint under {'another' if result.reads_other_layout else 'the same'} layout"
    rows = [
        *_experts(result, reference),
        *_frozen(result, reference),
        _scalars("first loss", result.losses[:1], reference.losses[:1]),
        _scalars("losses of all steps", result.losses, reference.losses),
        _scalars("gradient norm", result.grad_norms, reference.grad_norms),
        *(
            [_scalars("z losses, largest scores", result.scores, reference.scores)]
            if reference.scores
            else []
        ),
        _tensors("first weights", _joined(result.initial), _joined(reference.initial), exact=True),
        _tensors("gradients", _joined(result.gradients), _joined(reference.gradients)),
        _tensors(
            f"weights after {STEPS} steps", _joined(result.weights), _joined(reference.weights)
        ),
        _tensors(
            "checkpoint",
            *(_trained_ones(each.stored, reference.still) for each in (result, reference)),
        ),
        _tensors(
            "weights one step after reload", _joined(result.reloaded), _joined(reference.reloaded)
        ),
        *_against_torch(result, reference.expected),
        _tensors(read_under, _joined(result.resharded), _joined(result.saved), exact=True),
    ]
    copies = [
        name
        for name, mine in result.biases.items()
        if any(not torch.equal(mine[0], one) for one in mine)
    ]
    parts = (result.gradients, result.weights, result.resharded)
    copies += [name for part in parts for name in _unequal_copies(part)]
    error = float("inf") if copies else 0.0
    return [*rows, Difference("copies agree", ", ".join(copies[:3]), error, not copies)]


def _experts(result: RankResult, reference: RankResult) -> Iterator[Difference]:
    """Choices before all else, since where these differ nothing that follows can agree; nothing
    without experts."""
    if not any(reference.uses):
        return
    told = list(_other_choices(result.uses, reference.uses))
    yield Difference(
        "choices of experts", told[0] if told else "", float("inf") if told else 0.0, not told
    )
    mine, theirs = (
        [loss for uses in each.uses for use in uses for loss in use.losses]
        for each in (result, reference)
    )
    if any(theirs):
        yield _scalars("balance losses", mine, theirs)
    if reference.biases:
        ours, others = (
            {name: each[0] for name, each in one.biases.items()} for one in (result, reference)
        )
        yield _tensors("balancing biases", ours, others, exact=True)


def _against_torch(result: RankResult, expected: Sequence[TorchUpdate]) -> Iterator[Difference]:
    """Gradient norms, weights and moments, as torch computes them from the gradients of one
    process."""
    last, reloaded = expected[STEPS - 1 :]
    yield _scalars(
        "gradient norm against torch",
        result.grad_norms,
        [one.grad_norm for one in expected[:STEPS]],
    )
    yield _tensors("weights against torch.optim", _joined(result.weights), last.weights)
    moments = {
        name: tensor for name, tensor in result.stored.items() if name.startswith("optimizer.")
    }
    if moments or last.states:
        yield _tensors("moments against torch.optim", moments, last.states)
    yield _tensors(
        "reloaded weights against torch.optim", _joined(result.reloaded), reloaded.weights
    )


def _frozen(result: RankResult, reference: RankResult) -> Iterator[Difference]:
    """What is not trained has the bits that it began with; nothing where all is trained."""
    if reference.still:
        first = _joined({name: reference.initial[name] for name in reference.still})
        yield _tensors("weights that are not trained", _joined(result.still), first, exact=True)


def _trained_ones(stored: Mapping[str, Tensor], still: Gathered) -> dict[str, Tensor]:
    """What a checkpoint holds but for weights that are not trained, some of which are all zero;
    they were read back."""
    return {
        name: tensor for name, tensor in stored.items() if name.removeprefix("model.") not in still
    }


def _other_choices(
    mine: Sequence[Sequence[LayerExpertLoad]], reference: Sequence[Sequence[LayerExpertLoad]]
) -> Iterator[str]:
    """Where experts were not chosen as often as on one process, the first step and layer first."""
    for step, (uses, others) in enumerate(zip(mine, reference, strict=True), 1):
        for use, other in zip(uses, others, strict=True):
            where = f"step {step}, {use.layer}"
            if use.layer != other.layer or use.counts != other.counts:
                counts, wanted = ([int(count) for count in one.counts] for one in (use, other))
                yield f"{where}: experts got {counts} tokens and not {wanted}"
            elif use.refused != other.refused:
                yield f"{where}: {use.refused:.0f} choices were refused and not {other.refused:.0f}"


def _biases(trainer: Trainer) -> dict[str, list[Tensor]]:
    """Return this rank's balancing biases by layer."""
    return {
        router.layer: [router.moved.detach().clone()]
        for router in routers_of(trainer.pipeline_model.modules)
        if router.moved is not None
    }


def _scalars(what: str, mine: Sequence[float], reference: Sequence[float]) -> Difference:
    largest = max(abs(value) for value in reference)
    error = max(abs(a - b) for a, b in zip(mine, reference, strict=True)) / largest
    return Difference(what, "", error, error <= FP64.relative)


def _tensors(
    what: str, mine: Mapping[str, Tensor], reference: Mapping[str, Tensor], *, exact: bool = False
) -> Difference:
    found = compare(mine, reference)
    if exact:  # biases start at zero
        return Difference(what, found.worst, found.error, found.error == 0.0 and not found.unpaired)
    name = f"{found.zeros[0]} is all zero" if found.zeros else found.worst
    return Difference(what, name, found.error, found.within(FP64))


def _give_adapters_values(trainer: Trainer) -> None:
    """Half of each adapter starts at zero, and nothing of the other half would show."""
    for slot in trainer.optimizer.slots if trainer.run.lora is not None else ():
        init_param_(slot.weight, slot.shard, Init(0.1), seed=trainer.run.seed)
        if slot.master is not slot.weight:
            slot.master.copy_(slot.weight)
    all_gather_loaded_params(trainer)


def _loader(
    run: TrainRun, mesh: Mesh, *, consumed: int, steps: int, masks: MaskKind | None = None
) -> Loader:
    train = run.train
    # The first microbatch of one rank and the second row of the run have no label at all.
    eod = 7 if run.data.document_masking else None
    budget = budget_of(train, run.parallel, run.model)
    made_of = train.seq_len, run.model.vocab_size, 12 * (STEPS + 1), (0, 1, 2, 17)
    dataset: Dataset = RaggedDocuments(*made_of)
    if budget is None:
        dataset = RaggedRows(*made_of, eod=eod, places=bool(run.model.rope.sections), masks=masks)
    return Loader(
        dataset,
        Masks(eod=eod, documents=run.data.document_masking),
        mesh.dp,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        consumed=consumed,
        steps=steps,
        device=torch.device("cpu"),
        slicing=my_slicing(run.parallel, mesh),
        dropout_seed=dropout_seed(run),
        num_mtp_layers=run.model.mtp.num_layers,
        budget=budget,
        everyone=mesh.world,
    )


def _weights(trainer: Trainer) -> Gathered:
    return _slices([(slot.shard, slot.weight) for slot in trainer.optimizer.slots])


def _state(trainer: Trainer) -> Gathered:
    """My slices of what a checkpoint holds, by their names in it, and the step count of the
    optimizer."""
    updates = Boxes((), [((), torch.tensor(float(trainer.optimizer.updates), dtype=torch.float64))])
    found: Gathered = {"optimizer step": updates}
    for entry in checkpoint_entries(trainer):
        found.setdefault(entry.key, Boxes(entry.shard.shape, [])).parts.extend(_parts(entry))
    return found


def _still(trainer: Trainer) -> Gathered:
    """Weights that stay as they are; adapters are trained beside ones that no checkpoint of theirs
    holds."""
    frozen = [] if trainer.run.lora is not None else trainer.data.frozen
    return _slices([(shard, weight) for shard, weight in frozen if ".balancing_" not in shard.name])


def _group_rates(run: TrainRun) -> dict[str, GroupRates]:
    """Of groups, which have them for all steps, as the schedule of a case is constant."""
    lengths = schedule_lengths(
        run.schedule, global_batch_size=run.train.global_batch_size, total_steps=STEPS
    )
    return group_rates(run.optim.groups, replace(run.schedule, weight_decay=DECAY), 0, lengths)


def _slices(pairs: Sequence[tuple[Shard, Tensor]]) -> Gathered:
    """My slices as boxes; a flat one is several."""
    found: Gathered = {}
    for shard, tensor in pairs:
        found.setdefault(shard.name, Boxes(shard.shape, [])).parts.extend(
            _parts(CheckpointEntry(shard, "param", tensor))
        )
    return found


def _parts(entry: CheckpointEntry) -> list[tuple[Box, Tensor]]:
    return [(piece.box, piece.values.clone()) for piece in pieces(entry)]


def _join_slices(parts: Sequence[Gathered]) -> Gathered:
    """Return the slices of all parts by name."""
    joined: Gathered = {}
    for part in parts:
        for name, boxes in part.items():
            joined.setdefault(name, Boxes(boxes.shape, [])).parts.extend(boxes.parts)
    return joined


def _joined(gathered: Gathered) -> dict[str, Tensor]:
    """Whole tensors from slices; where several ranks hold one, the last counts (they are compared
    apart)."""
    whole = {}
    for name, boxes in gathered.items():
        whole[name] = torch.full(boxes.shape, float("nan"), dtype=torch.float64)
        for box, values in boxes.parts:
            whole[name][tuple(slice(start, stop) for start, stop in box)] = values
    return whole


def _unequal_copies(gathered: Gathered) -> list[str]:
    """Parameters of which two ranks hold the same box with other numbers."""
    bad = []
    for name, boxes in gathered.items():
        first: dict[Box, Tensor] = {}
        for box, values in boxes.parts:
            same = first.setdefault(box, values)
            # Sums may run in another order on each rank; a missing sum is far above rounding.
            if not torch.allclose(same, values, rtol=FP64.relative, atol=1e-14):
                bad.append(name)
    return bad
