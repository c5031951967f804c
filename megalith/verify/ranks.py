"""Float64 verification: a layout that runs on real processes computes what one process computes,
also after a reload under another layout.

In float64, rounding errors are about 1e-15, so any larger difference is a fault. Compared are loss,
all gradients, initial weights, weights after three steps, and a fourth step after saving and
loading; for experts also, and first, the expert load. Since one process could have the same fault,
torch.optim computes the updates as well, and the checkpoint is also loaded under another layout and
compared with the saved state.
"""

import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megalith.checkpoint.format import CheckpointEntry, pieces
from megalith.checkpoint.load import Checkpoint, open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.optim import OptimConfig, PrecisionConfig, ScheduleConfig
from megalith.config.parallel import OffloadConfig, ParallelConfig, RecomputeConfig
from megalith.config.plugins import load_plugin
from megalith.config.train import LoopConfig, TrainRun
from megalith.data.loader import BatchSettings, Loader, MaskSettings
from megalith.data.sample import (
    Dataset,
    Extra,
    ExtraTensor,
    PackedSample,
    RowMask,
    Sample,
    declared_extra,
)
from megalith.nn.build import init_param_
from megalith.optim.schedule import GroupRates, group_rates, schedule_lengths
from megalith.parallel.context import local_slicing
from megalith.parallel.grad_sync import ShardedParam
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.parallel.tensor import Init
from megalith.plan.batch_assignment import build_token_budget
from megalith.plan.batch_schedule import build_batch_schedule
from megalith.plan.grid import model_grid
from megalith.plan.keys import key
from megalith.plan.shards import Box, Shard
from megalith.rules.run import run_problems
from megalith.testing.inject import fused_on_cpus
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP64, compare
from megalith.train.moe import LayerExpertLoad, collect_expert_load, iter_routers
from megalith.train.step import NO_HOOKS, StepHooks, StepRequest, Trainer, train_step
from megalith.train.trainer import all_gather_loaded_params, build_trainer, checkpoint_entries
from megalith.verify.faults.plant import find_fault, plant_fault
from megalith.verify.torch_optim import RecordingOptimizer, TorchUpdate, torch_updates

# --- mock documents with random loss masks, for verification of sequence packing


def draw_extra(
    declared: Mapping[str, ExtraTensor], sample: int, *, num_tokens: int, num_documents: int
) -> Extra:
    """Return random extra tensors of a sample."""
    if not declared:
        return {}
    draw = np.random.default_rng(key(0, "verify", "extra", sample))
    sizes = {"token": (num_tokens,), "document": (num_documents,), "sample": ()}
    return {
        name: (3 * draw.random((*sizes[tensor.per], *tensor.shape))).astype(tensor.dtype)
        for name, tensor in declared.items()
    }


@dataclass(frozen=True, slots=True)
class RaggedDocuments:
    """Documents of 1 to `longest` tokens, of which about half have a label; some have none."""

    longest: int
    vocab_size: int
    num_samples: int
    masked: tuple[int, ...] = ()
    """Samples without any label."""

    extra: Mapping[str, ExtraTensor] = field(default_factory=dict)
    """Extra tensors, with random values."""

    @property
    def fingerprint(self) -> str:
        """Text of all arguments."""
        return " ".join(
            [
                "ragged documents",
                *map(str, (self.longest, self.vocab_size, self.num_samples, self.masked)),
                *self.extra,
            ]
        )

    def __len__(self) -> int:
        return self.num_samples

    def document_lengths(self, k: int) -> tuple[int, ...]:
        """Return the number of tokens of document k."""
        draw = np.random.default_rng(key(0, "verify", "lengths", k))
        return (int(draw.integers(1, self.longest + 1)),)

    def sample(self, k: int) -> PackedSample:
        """Return document k, the same on all ranks."""
        (length,) = self.document_lengths(k)
        draw = np.random.default_rng(key(0, "verify", "documents", k))
        ids = draw.integers(0, self.vocab_size, length + 1)
        kept = draw.random(length) < (0.0 if k in self.masked else 0.5)
        extra = draw_extra(self.extra, k, num_tokens=length, num_documents=1)
        return PackedSample(ids[:-1], np.where(kept, ids[1:], -1), (length,), length, extra=extra)


# --- resharding: another layout under which the comparison loads a checkpoint

LEVELS: tuple[Literal[0, 1, 3], ...] = (0, 1, 3)
"""ZeRO levels that differ in the sharding of weights and optimizer states; 2 also shards
gradients."""


def resharded_run(run: TrainRun, world: int) -> TrainRun | None:
    """Return `run` under the most different layout of `world` ranks; None if there is no other
    valid layout.

    Weights and optimizer states are then sharded along other dimensions, over other ranks and at
    other offsets. The run is built and loaded, not trained, so its batch fits any layout.
    """
    known = set(run_problems(run, world))
    for parallel in reload_layouts(run.parallel, world):
        if parallel.ep > 1 and run.model.moe is None:
            continue
        candidate = replace(
            run,
            parallel=parallel,
            recompute=RecomputeConfig(),
            offload=OffloadConfig(),
            train=replace(
                run.train,
                global_batch_size=12 * world,
                batch_size_schedule=(),
                micro_batch_size=1,
                tokens_per_microbatch=None,
                loss_backward="kept",
                loss_chunk=None,
            ),
        )
        if known.issuperset(run_problems(candidate, world)):
            return candidate
    return None


def reload_layouts(saved: ParallelConfig, world: int) -> Iterator[ParallelConfig]:
    """Yield all other layouts of `world` ranks by tp, pp, dp, ZeRO level and ep, the most different
    first.

    >>> for saved in ParallelConfig(tp=2), ParallelConfig(pp=2), ParallelConfig(dp=2, zero=1):
    ...     first = next(reload_layouts(saved, 2))
    ...     print(f"tp {first.tp}, dp {first.dp}, zero {first.zero}")
    tp 1, dp 2, zero 1
    tp 1, dp 2, zero 3
    tp 2, dp 1, zero 0
    """
    before = _degrees(saved, world)
    degrees = [(tp, pp) for tp in _divisors(world) for pp in _divisors(world // tp)]
    layouts = [
        ParallelConfig(
            tp=tp,
            pp=pp,
            dp=world // (tp * pp),
            zero=zero,
            ep=ep,
            sp=sp,
            bucket_numel=saved.bucket_numel,
        )
        for tp, pp in degrees
        for zero in LEVELS[: 3 if tp * pp < world else 1]
        for ep in _divisors(world // pp)
        for sp in ((False, True) if tp > 1 else (False,))
    ]
    level = 3 if saved.pp > 1 else 1  # so that both levels are tested

    def changes(layout: ParallelConfig) -> int:
        return sum(a != b for a, b in zip(before, _degrees(layout, world), strict=True))

    # Of equally different layouts, those with more tensor-parallel ranks reshard the most tensors.
    layouts.sort(key=lambda p: (-changes(p), -p.tp, p.pp, p.zero != level, p.zero, p.ep, p.sp))
    yield from (layout for layout in layouts if changes(layout) > 0)


def _degrees(p: ParallelConfig, world: int) -> tuple[object, ...]:
    """Return what determines which part of weights and optimizer states a rank holds."""
    return p.tp, p.pp, p.dp or world // (p.tp * p.cp * p.pp), p.cp, p.zero > 0, p.ep


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


STEPS = 3
"""Number of steps before saving; gradients are compared in the first."""

DECAY = 0.1
"""Weight decay of parameters without a group."""


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Mock rows with random loss masks: each row has a random number of labels, some have none."""

    seq_len: int
    vocab_size: int
    num_samples: int
    masked: tuple[int, ...]
    """Samples without any label."""

    eod: int | None = None
    """End-of-document token, about every fifth; None: each row is one document."""

    places: bool = False
    """Use random position ids by time, height and width, except in every third row, which is
    text."""

    masks: "MaskKind | None" = None
    """`alone`: random [s, s] masks in all rows; `beside`: such masks in a third of the rows, and
    padding masks in another third."""

    extra: Mapping[str, ExtraTensor] = field(default_factory=dict)
    """Extra tensors, with random values."""

    @property
    def fingerprint(self) -> str:
        """Text of all arguments."""
        arguments = (
            self.seq_len,
            self.vocab_size,
            self.num_samples,
            self.masked,
            self.eod,
            self.places,
            self.masks,
        )
        return " ".join(["ragged rows", *map(str, arguments), *self.extra])

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, k: int) -> Sample:
        """Return row k, the same on all ranks."""
        draw = np.random.default_rng(key(0, "verify", "rows", k))
        ids = draw.integers(0, self.vocab_size, self.seq_len + 1)
        kept = 0 if k in self.masked else int(draw.integers(2, self.seq_len + 2))
        if self.eod is not None:
            ids[draw.random(len(ids)) < 0.2] = self.eod
        places = draw.integers(0, 30, (3, self.seq_len)) if self.places and k % 3 else None
        num_documents = 1 + int((ids[:-2] == self.eod).sum()) if self.eod is not None else 1
        return Sample(
            ids,
            kept,
            places=places,
            mask=None if self.masks is None else self._mask(k),
            extra=draw_extra(self.extra, k, num_tokens=self.seq_len, num_documents=num_documents),
        )

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
"""Whether masks are applied in addition to the causal mask, or replace it."""


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """One layout to verify: a tiny float64 run and its parallel layout."""

    run: TrainRun
    world: int
    fault: str | None = None
    """Name of a planted fault; None: no fault."""

    masks: MaskKind | None = None
    """Attention masks of the tokens; None: no masks."""

    resharded: TrainRun | None = None
    """The run under another layout, which loads the checkpoint; None: not tested."""

    transient_fault: bool = False
    """Whether the gradients of the last rank are wrong once, and the rank requests a rerun."""


class TransientFault(StepHooks):
    """Changes the gradients of this rank in one run of a step, and requests a rerun."""

    def __init__(self) -> None:
        self.has_occurred = False

    def after_backward(self, local_params: Sequence[ShardedParam]) -> StepRequest:
        """Change the gradients in the first call only."""
        if self.has_occurred:
            return StepRequest.NONE
        self.has_occurred = True
        for param in local_params:
            param.gradient.add_(1.0)
        return StepRequest.RERUN


@dataclass(frozen=True, slots=True)
class Boxes:
    """Slices of one tensor from all ranks."""

    shape: tuple[int, ...]
    parts: list[tuple[Box, Tensor]]


Gathered = dict[str, Boxes]


@dataclass(frozen=True, slots=True)
class RankResult:
    """Results of one rank, or of all ranks (`join_ranks`)."""

    losses: list[float]
    grad_norms: list[float]
    scores: list[float]
    """z-loss, maximum logit and largest attention score per step; empty unless the run reports
    them."""

    initial: Gathered
    gradients: Gathered
    weights: Gathered
    stored: dict[str, Tensor]
    """Checkpoint contents, read by rank 0."""

    reloaded: Gathered
    uses: list[list[LayerExpertLoad]]
    """Expert load of every layer per step; empty lists without experts."""

    biases: dict[str, list[Tensor]]
    """Expert biases after the last step, by layer: one per rank that has the layer."""

    still: Gathered
    """Frozen weights after the last step; empty with adapters."""

    saved: Gathered
    """Every tensor of the checkpoint as the ranks held it before saving, and the optimizer's step
    count."""

    resharded: Gathered
    """The same after loading."""

    reads_other_layout: bool
    """Whether `resharded` was loaded under another layout than `saved`."""

    expected: list[TorchUpdate]
    """Updates that torch.optim computes from the gradients; only on one process."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest difference of one kind of value."""

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
    """Return a tiny float64 run of `model` under `parallel`, with 12 rows per step, which dp 1, 2,
    3 and 4 divide.

    With `documents`, rows are packed with short documents, and attention is masked at their
    boundaries.
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
    """Return the rows per microbatch such that each data-parallel rank has three or four
    microbatches per step.

    This is enough to detect errors in gradient accumulation. Context parallelism alone uses
    microbatches of one row, in which a rank may have no label while another has some. So do longer
    pipelines and other schedules, which need more microbatches than stages.
    """
    p, pipeline = parallel, parallel.pipeline
    has_other_schedule = p.pp > 2 or pipeline.vpp > 1 or pipeline.schedule not in ("auto", "1f1b")
    if has_other_schedule or (p.cp > 1 and p.tp == 1):
        return 1
    return {1: 3, 2: 2}.get(parallel.dp or 1, 1)


def compare_with_one_process(case: LayoutCase, *, timeout: float = 120.0) -> list[Difference]:
    """Run the case on its processes and on one, and compare; the caller checks `holds`."""
    on_ranks = replace(case, resharded=resharded_run(case.run, case.world))
    with tempfile.TemporaryDirectory() as folder:
        result = join_ranks(run_ranks(run_case, case.world, on_ranks, folder, timeout=timeout))
    fault = case.fault if case.fault is not None and find_fault(case.fault).everywhere else None
    return compare_results(
        result, compute_reference(LayoutCase(one_process_run(case), 1, fault, masks=case.masks))
    )


# Adjacent rows of the matrix and most planted faults have the same model.
@functools.lru_cache(maxsize=32)
def compute_reference(case: LayoutCase) -> RankResult:
    """Return the results of one process; they are shared by all layouts of a model and must not be
    modified."""
    with tempfile.TemporaryDirectory() as folder:
        return run_case(0, 1, case, folder)


def one_process_run(case: LayoutCase) -> TrainRun:
    """Return the one-process run that the case is compared with.

    It has all rows of a step in one microbatch, unless a loss or token dropping depends on the
    microbatch. Then its microbatches have the rows of one microbatch of a rank, or, if an aux loss
    covers the global batch, of all data-parallel ranks. Packs are as small as possible.
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
    """Return whether an aux loss covers all data-parallel ranks."""
    return model.moe is not None and model.moe.aux_loss.global_batch_coeff > 0


def balances_by_microbatch(moe: MoEConfig, *, documents: bool) -> bool:
    """Return whether results depend on the composition of a microbatch.

    This is the case with aux losses over a microbatch, or over documents that may span
    microbatches, with expert capacity, and with Sinkhorn routing or offsets.
    """
    balance = moe.aux_loss
    per_microbatch = (
        balance.batch_coeff > 0
        or balance.quantile
        or balance.sinkhorn
        or moe.capacity.factor is not None
    )
    return per_microbatch or (documents and balance.sequence_coeff > 0)


def run_case(rank: int, world: int, case: LayoutCase, folder: str) -> RankResult:
    """Run the case on one rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            plant_fault(case.fault),
            fused_on_cpus() if case.run.parallel.collective_matmul == "fused" else nullcontext(),
        ):
            mesh = (
                build_single_rank_mesh()
                if world == 1
                else build_mesh(model_grid(case.run.parallel, case.run.model, world), rank=rank)
            )
            return _run_case(case, mesh, Path(folder))
    finally:
        torch.set_num_threads(threads)


def _run_case(case: LayoutCase, mesh: Mesh, folder: Path) -> RankResult:
    device = torch.device("cpu")
    trainer = _recording(build_trainer(case.run, mesh, device))
    _init_adapters(trainer)
    initial, groups = _weights(trainer) | _still(trainer), _group_rates(case.run)
    losses, grad_norms, expert_loads, gradients = [], [], [], {}
    unclipped: list[dict[str, Tensor]] = []
    loader = _loader(case.run, mesh, consumed=0, steps=STEPS, masks=case.masks)
    scores: list[float] = []
    is_faulty = case.transient_fault and 0 < mesh.world.rank == mesh.world.size - 1
    for step in range(STEPS):
        result = train_step(
            trainer,
            loader.next(),
            lr=case.run.schedule.lr,
            weight_decay=DECAY,
            hooks=TransientFault() if is_faulty and step == 1 else NO_HOOKS,
            groups=groups,
        )
        losses.append(result.loss)
        grad_norms.append(result.grad_norm)
        scores += [value for value in (result.z_loss, result.max_logit) if value is not None]
        scores += [] if result.largest_score is None else [result.largest_score.score]
        expert_loads.append(collect_expert_load(trainer.pipeline_model.modules, mesh))
        unclipped += _unclipped_gradients(trainer)
        if step == 0:
            # The optimizer clipped these in place, all by the same factor.
            gradients = _slices([(o.shard, o.gradient) for o in trainer.data.local_params])
    trainer.data.wait_params()
    weights, saved = _weights(trainer), _state(trainer)
    state = {"optimizer_updates": trainer.optimizer.updates}
    save_checkpoint(folder, STEPS, checkpoint_entries(trainer), state, mesh.world, config_text="")
    checkpoint = open_checkpoint(folder / f"step_{STEPS:07d}")
    # With adapters, the checkpoint does not contain the base weights.
    resumed = build_trainer(case.run, mesh, device, fill=case.run.lora is not None)
    resumed = _recording(resumed)
    _load(checkpoint, resumed)
    resharded = (
        _state(resumed) if case.resharded is None else _read_under(case.resharded, checkpoint, mesh)
    )
    rows = case.run.train.global_batch_size
    batches = _loader(case.run, mesh, consumed=STEPS * rows, steps=1, masks=case.masks).next()
    losses.append(
        train_step(
            resumed, batches, lr=case.run.schedule.lr, weight_decay=DECAY, groups=groups
        ).loss
    )
    expert_loads.append(collect_expert_load(resumed.pipeline_model.modules, mesh))
    unclipped += _unclipped_gradients(resumed)
    resumed.data.wait_params()
    names = checkpoint.keys() if mesh.world.rank == 0 else ()
    stored = {name: checkpoint.read(name) for name in names}
    expected = (
        torch_updates(
            case.run,
            _assemble(initial),
            unclipped,
            lr=case.run.schedule.lr,
            weight_decay=DECAY,
            groups=groups,
        )
        if unclipped and case.run.optim.qk_clip is None
        else []
    )
    return RankResult(
        losses,
        grad_norms,
        scores,
        initial,
        gradients,
        weights,
        stored,
        _weights(resumed),
        expert_loads,
        _biases(resumed),
        _still(resumed),
        saved,
        resharded,
        case.resharded is not None,
        expected,
    )


def join_ranks(results: Sequence[RankResult]) -> RankResult:
    """Return the slices of all ranks by name, and rank 0's copy of values that all ranks have."""
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
    """On one process, wrap the optimizer to record its gradients."""
    if trainer.mesh.world.size > 1:
        return trainer
    return replace(trainer, optimizer=RecordingOptimizer(trainer.optimizer))


def _unclipped_gradients(trainer: Trainer) -> list[dict[str, Tensor]]:
    """Return the recorded gradients of the last step before clipping."""
    optimizer = trainer.optimizer
    if not isinstance(optimizer, RecordingOptimizer):
        return []
    shards = [slot.shard for slot in optimizer.slots]
    return [_assemble(_slices(list(zip(shards, optimizer.gradients, strict=True))))]


def _load(checkpoint: Checkpoint, trainer: Trainer) -> None:
    """Load weights and optimizer state, as a resumed run does. Collective."""
    checkpoint.load_into(checkpoint_entries(trainer), trainer.mesh.world)
    trainer.optimizer.set_updates(int(checkpoint.state["optimizer_updates"]))
    all_gather_loaded_params(trainer)


def _read_under(run: TrainRun, checkpoint: Checkpoint, mesh: Mesh) -> Gathered:
    """Return this rank's part of the checkpoint under the layout of `run`. Collective."""
    other = build_mesh(model_grid(run.parallel, run.model, mesh.world.size), rank=mesh.world.rank)
    trainer = build_trainer(run, other, torch.device("cpu"), fill=False)
    _load(checkpoint, trainer)
    return _state(trainer)


def compare_results(result: RankResult, reference: RankResult) -> list[Difference]:
    """Return the largest difference per kind of value, and whether it is within the tolerance."""
    read_under = f"checkpoint under {'another' if result.reads_other_layout else 'the same'} layout"
    rows = [
        *_compare_experts(result, reference),
        *_compare_frozen(result, reference),
        _scalars("first loss", result.losses[:1], reference.losses[:1]),
        _scalars("losses of all steps", result.losses, reference.losses),
        _scalars("gradient norm", result.grad_norms, reference.grad_norms),
        *(
            [_scalars("z-losses, largest logits and scores", result.scores, reference.scores)]
            if reference.scores
            else []
        ),
        _tensors(
            "initial weights", _assemble(result.initial), _assemble(reference.initial), exact=True
        ),
        _tensors("gradients", _assemble(result.gradients), _assemble(reference.gradients)),
        _tensors(
            f"weights after {STEPS} steps", _assemble(result.weights), _assemble(reference.weights)
        ),
        _tensors(
            "checkpoint",
            *(_without_frozen(each.stored, reference.still) for each in (result, reference)),
        ),
        _tensors(
            "weights one step after reload",
            _assemble(result.reloaded),
            _assemble(reference.reloaded),
        ),
        *_against_torch(result, reference.expected),
        _tensors(read_under, _assemble(result.resharded), _assemble(result.saved), exact=True),
    ]
    copies = [
        name
        for name, copies_of_bias in result.biases.items()
        if any(not torch.equal(copies_of_bias[0], copy) for copy in copies_of_bias)
    ]
    parts = (result.gradients, result.weights, result.resharded)
    copies += [name for part in parts for name in _unequal_copies(part)]
    error = float("inf") if copies else 0.0
    return [*rows, Difference("replicas are equal", ", ".join(copies[:3]), error, not copies)]


def _compare_experts(result: RankResult, reference: RankResult) -> Iterator[Difference]:
    """Compare expert loads first, since all later values depend on them; yields nothing without
    experts."""
    if not any(reference.uses):
        return
    choice_differences = list(_describe_choice_differences(result.uses, reference.uses))
    yield Difference(
        "expert load",
        choice_differences[0] if choice_differences else "",
        float("inf") if choice_differences else 0.0,
        not choice_differences,
    )
    losses, reference_losses = (
        [loss for uses in each.uses for use in uses for loss in use.losses]
        for each in (result, reference)
    )
    if any(reference_losses):
        yield _scalars("aux losses", losses, reference_losses)
    if reference.biases:
        biases, reference_biases = (
            {name: each[0] for name, each in result_of.biases.items()}
            for result_of in (result, reference)
        )
        yield _tensors("expert biases", biases, reference_biases, exact=True)


def parameter_of_state(key: str) -> str:
    """Return the parameter of an optimizer state in a checkpoint, whose key may end with the part
    of the parameter that the state belongs to.

    >>> parameter_of_state("optimizer.row_mean.layers.0.attention.kv_up.key")
    'layers.0.attention.kv_up'
    """
    return key.split(".", 2)[2].removesuffix(".key").removesuffix(".value")


def _against_torch(result: RankResult, expected: Sequence[TorchUpdate]) -> Iterator[Difference]:
    """Compare gradient norms, weights and moments with those that torch.optim computes on one
    process."""
    if not expected:  # an update that torch.optim does not have
        return
    last, reloaded = expected[STEPS - 1 :]
    yield _scalars(
        "gradient norm against torch",
        result.grad_norms,
        [update.grad_norm for update in expected[:STEPS]],
    )

    def select(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x for name, x in tensors.items() if name not in last.others}

    if not last.weights:  # torch.optim has none of the update rules
        return
    yield _tensors("weights against torch.optim", select(_assemble(result.weights)), last.weights)
    moments = {
        name: tensor
        for name, tensor in result.stored.items()
        if name.startswith("optimizer.") and parameter_of_state(name) not in last.others
    }
    if moments or last.states:
        yield _tensors("moments against torch.optim", moments, last.states)
    yield _tensors(
        "reloaded weights against torch.optim",
        select(_assemble(result.reloaded)),
        reloaded.weights,
    )


def _compare_frozen(result: RankResult, reference: RankResult) -> Iterator[Difference]:
    """Check that frozen weights keep their initial bits; yields nothing if all are trained."""
    if reference.still:
        first = _assemble({name: reference.initial[name] for name in reference.still})
        yield _tensors("frozen weights", _assemble(result.still), first, exact=True)


def _without_frozen(stored: Mapping[str, Tensor], still: Gathered) -> dict[str, Tensor]:
    """Return checkpoint tensors without frozen weights, some of which are all zero; they are
    compared elsewhere."""
    return {
        name: tensor for name, tensor in stored.items() if name.removeprefix("model.") not in still
    }


def _describe_choice_differences(
    loads: Sequence[Sequence[LayerExpertLoad]], reference: Sequence[Sequence[LayerExpertLoad]]
) -> Iterator[str]:
    """Yield where expert loads differ from those of one process, ordered by step and layer."""
    for step, (layer_loads, reference_loads) in enumerate(zip(loads, reference, strict=True), 1):
        for load, reference_load in zip(layer_loads, reference_loads, strict=True):
            where = f"step {step}, {load.layer}"
            if load.layer != reference_load.layer or load.counts != reference_load.counts:
                counts, expected = (
                    [int(count) for count in each.counts] for each in (load, reference_load)
                )
                yield f"{where}: experts got {counts} tokens instead of {expected}"
            elif load.num_dropped != reference_load.num_dropped:
                yield (
                    f"{where}: {load.num_dropped:.0f} choices were dropped instead of "
                    f"{reference_load.num_dropped:.0f}"
                )


def _biases(trainer: Trainer) -> dict[str, list[Tensor]]:
    """Return this rank's expert biases by layer."""
    return {
        router.layer: [router.expert_bias.detach().clone()]
        for router in iter_routers(trainer.pipeline_model.modules)
        if router.expert_bias is not None
    }


def _scalars(what: str, values: Sequence[float], reference: Sequence[float]) -> Difference:
    largest = max(abs(value) for value in reference)
    error = max(abs(a - b) for a, b in zip(values, reference, strict=True)) / largest
    return Difference(what, "", error, error <= FP64.relative)


def _tensors(
    what: str,
    tensors: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    *,
    exact: bool = False,
) -> Difference:
    comparison = compare(tensors, reference)
    if exact:  # expert biases start at zero
        return Difference(
            what,
            comparison.worst,
            comparison.error,
            comparison.error == 0.0 and not comparison.unpaired,
        )
    name = f"{comparison.zeros[0]} is all zero" if comparison.zeros else comparison.worst
    return Difference(what, name, comparison.error, comparison.within(FP64))


def _init_adapters(trainer: Trainer) -> None:
    """Initialize both halves of adapters, since with one at zero the other has no gradient."""
    for slot in trainer.optimizer.slots if trainer.run.lora is not None else ():
        init_param_(slot.weight, slot.shard, Init(0.1), seed=trainer.run.seed)
        if slot.has_master:
            slot.write_master(slot.weight, purpose="initial weights")
    all_gather_loaded_params(trainer)


def _loader(
    run: TrainRun, mesh: Mesh, *, consumed: int, steps: int, masks: MaskKind | None = None
) -> Loader:
    train = run.train
    # The first microbatch of one rank and the second row of the run have no label.
    eod = 7 if run.data.document_masking else None
    budget = build_token_budget(train, run.parallel, run.model)
    arguments = train.seq_len, run.model.vocab_size, 12 * (STEPS + 1), (0, 1, 2, 17)
    plugin = run.data.plugin
    extra = {} if plugin is None else declared_extra(load_plugin("dataset", plugin))
    dataset: Dataset = RaggedDocuments(*arguments, extra=extra)
    if budget is None:
        places = bool(run.model.rope.sections)
        dataset = RaggedRows(*arguments, eod=eod, places=places, masks=masks, extra=extra)
    return Loader(
        dataset,
        BatchSettings.of_run(run, MaskSettings(eod=eod, documents=run.data.document_masking)),
        mesh.dp,
        consumed=consumed,
        steps=steps,
        device=torch.device("cpu"),
        slicing=local_slicing(run.parallel, mesh),
        world_group=mesh.world,
    )


def _weights(trainer: Trainer) -> Gathered:
    return _slices([(slot.shard, slot.weight) for slot in trainer.optimizer.slots])


def _state(trainer: Trainer) -> Gathered:
    """Return this rank's slices of all checkpoint entries, and the optimizer's step count."""
    updates = Boxes((), [((), torch.tensor(float(trainer.optimizer.updates), dtype=torch.float64))])
    slices: Gathered = {"optimizer step": updates}
    for entry in checkpoint_entries(trainer):
        slices.setdefault(entry.key, Boxes(entry.shard.shape, [])).parts.extend(_parts(entry))
    return slices


def _still(trainer: Trainer) -> Gathered:
    """Return frozen weights; with adapters none, because their checkpoint does not contain base
    weights."""
    frozen = [] if trainer.run.lora is not None else trainer.data.frozen
    return _slices([(shard, weight) for shard, weight in frozen if ".balancing_" not in shard.name])


def _group_rates(run: TrainRun) -> dict[str, GroupRates]:
    """Return the rates of parameter groups, which are constant in a case."""
    lengths = schedule_lengths(
        run.schedule, batch_schedule=build_batch_schedule(run.train), total_steps=STEPS
    )
    return group_rates(run.optim.groups, replace(run.schedule, weight_decay=DECAY), 0, lengths)


def _slices(pairs: Sequence[tuple[Shard, Tensor]]) -> Gathered:
    """Return this rank's slices as boxes; a flat slice is several."""
    slices: Gathered = {}
    for shard, tensor in pairs:
        slices.setdefault(shard.name, Boxes(shard.shape, [])).parts.extend(
            _parts(CheckpointEntry(shard, "param", tensor))
        )
    return slices


def _parts(entry: CheckpointEntry) -> list[tuple[Box, Tensor]]:
    return [(piece.box, piece.values.clone()) for piece in pieces(entry.decode())]


def _join_slices(parts: Sequence[Gathered]) -> Gathered:
    """Return the slices of all parts by name."""
    joined: Gathered = {}
    for part in parts:
        for name, boxes in part.items():
            joined.setdefault(name, Boxes(boxes.shape, [])).parts.extend(boxes.parts)
    return joined


def _assemble(gathered: Gathered) -> dict[str, Tensor]:
    """Assemble whole tensors from slices; replicas are compared separately."""
    whole = {}
    for name, boxes in gathered.items():
        whole[name] = torch.full(boxes.shape, float("nan"), dtype=torch.float64)
        for box, values in boxes.parts:
            whole[name][tuple(slice(start, stop) for start, stop in box)] = values
    return whole


def _unequal_copies(gathered: Gathered) -> list[str]:
    """Return parameters whose replicas differ between ranks."""
    unequal = []
    for name, boxes in gathered.items():
        first: dict[Box, Tensor] = {}
        for box, values in boxes.parts:
            first_copy = first.setdefault(box, values)
            # The order of summation may differ between ranks; a missing sum is far above rounding.
            if not torch.allclose(first_copy, values, rtol=FP64.relative, atol=1e-14):
                unequal.append(name)
    return unequal
