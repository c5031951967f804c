"""Resuming a run: opens its newest complete checkpoint, or an older one if its tensors are
damaged; builds the trainer and the data, and loads weights, optimizer state and counters."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from megalith import storage
from megalith.checkpoint.commit import set_aside_damaged
from megalith.checkpoint.format import MANIFEST, CheckpointEntry, folder_name
from megalith.checkpoint.keys import is_moment
from megalith.checkpoint.load import (
    Checkpoint,
    find_latest,
    list_other_checkpoints,
    open_checkpoint,
)
from megalith.checkpoint.local import LocalCheckpoint, LocalTier
from megalith.checkpoint.manifest import list_complete_checkpoints
from megalith.checkpoint.readers import mark_reading
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.optim import OptimConfig
from megalith.config.train import TrainRun
from megalith.config.tree import from_dict, parse_stored_settings
from megalith.data.build import Splits, build_datasets
from megalith.data.loader import (
    BatchSettings,
    Loader,
    MaskSettings,
    build_mask_settings,
    count_label_counts,
)
from megalith.data.phases import select_read_phases
from megalith.data.sample import SampleSettings, declared_extra
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    DataError,
)
from megalith.hf.megatron_checkpoint import (
    MEGATRON_SOURCE,
    MegatronCheckpoint,
    is_megatron,
    open_megatron,
)
from megalith.hf.peft import RECORD
from megalith.hf.pretrained import (
    FORCE_LOAD_BALANCING,
    HF_SOURCE,
    check_same_model,
    check_source_on_machine,
    load_weights_with_records,
    locate_source,
    open_pretrained_checkpoint,
    read_hf_source,
    trained_with_forced_balancing,
    with_master_weights,
    with_optimizer,
)
from megalith.launch.heartbeat import RankHeartbeat
from megalith.observe.machine import peak_memory_gib
from megalith.optim.diloco import OUTER_ROLES, START
from megalith.optim.schedule import batch_size_factor, learning_rate, schedule_lengths
from megalith.optim.slots import zero_states
from megalith.parallel.context import local_slicing
from megalith.parallel.group import Group, raise_on_all_ranks
from megalith.parallel.mesh import Mesh
from megalith.plan.batch_assignment import TokenBudget, build_token_budget
from megalith.plan.batch_schedule import build_batch_schedule
from megalith.plan.replica_groups import SINGLE_GROUP, GroupShare
from megalith.plan.rollback import advance
from megalith.plan.update_rules import describe_rule_change
from megalith.posttrain.lora import load_adapters, load_base
from megalith.storage import StoragePath
from megalith.train.run_folder import (
    RunFolder,
    TokenizerFiles,
    check_batch_sizes,
    read_rolled_back_samples,
    read_tokenizer_files,
    set_aside_metrics,
    write_config,
    write_parameters,
)
from megalith.train.starts import StartLog
from megalith.train.state import TrainState
from megalith.train.trainer import (
    all_gather_loaded_params,
    build_trainer,
    checkpoint_entries,
    weight_entries,
)

_log = logging.getLogger(__name__)

# `checkpoint.load` with `load_mode` progress or all: a run that continues at the step of another
# run's checkpoint.

PROGRESS = "train", "optimizer_updates", "data", "order_samples", "tokenizer"
"""Keys that the state of a checkpoint must have for a run to continue at its step."""


def open_checkpoint_source(
    rules: CheckpointConfig, world: Group, *, vocab_size: int
) -> Checkpoint | None:
    """Return the checkpoint at whose step a run starts; None: step 0. Collective over `world`.

    vocab_size: that of the run.

    Raises:
        CheckpointError: on every rank: there is no such checkpoint, or it is not one of a run.
    """
    source = rules.load
    if rules.load_mode == "weights" or source is None:
        return None
    path = raise_on_all_ranks(lambda: locate_source(source) if world.rank == 0 else None, world)[0]
    assert path is not None
    raise_on_all_ranks(lambda: check_source_on_machine(source, path), world)
    settings = f"checkpoint.load_mode={rules.load_mode} with checkpoint.load={source}"
    opened: list[Checkpoint] = []
    raise_on_all_ranks(
        lambda: opened.append(_open_source(path, settings, vocab_size=vocab_size)), world
    )
    checkpoint = opened[0]
    if not isinstance(checkpoint, MegatronCheckpoint):
        return checkpoint
    read_state = with_optimizer if rules.load_mode == "all" else with_master_weights
    return read_state(checkpoint, world)


def _open_source(path: StoragePath, settings: str, *, vocab_size: int) -> Checkpoint:
    """Open the checkpoint at whose step a run starts, of Megatron without its optimizer state.

    Raises:
        CheckpointError: it cannot be read, or is not one of a run.
    """
    if is_megatron(path):
        megatron = open_megatron(path, vocab_size=vocab_size)
        megatron.require_progress(settings)
        return megatron
    if not storage.exists(path / MANIFEST):
        raise CheckpointError(
            f"{settings}: {path} holds weights only, so there is no step to continue from. Set "
            "checkpoint.load_mode=weights."
        )
    checkpoint = open_checkpoint(path)
    if RECORD in checkpoint.state:
        raise CheckpointError(
            f"{settings}: {path} holds LoRA adapters, and this run trains a full model. Set "
            "checkpoint.load_mode=weights to start from the merged model, or continue in the run's "
            "own folder."
        )
    required = PROGRESS[:1] if MEGATRON_SOURCE in checkpoint.state else PROGRESS
    if missing_keys := [name for name in required if name not in checkpoint.state]:
        raise CheckpointError(
            f"{settings}: {path} holds weights only, so there is no step to continue from (its "
            f"state lacks {', '.join(missing_keys)}). Set checkpoint.load_mode=weights."
        )
    return checkpoint


def check_steps_left(run: TrainRun, checkpoint_source: Checkpoint, state: TrainState) -> None:
    """Check that the run has steps left after the checkpoint's step.

    Raises:
        ConfigError: train.steps is not larger than the checkpoint's step.
    """
    if state.step >= run.train.steps:
        raise ConfigError(
            f"train.steps={run.train.steps}: {checkpoint_source.path} is of step {state.step}, "
            f"where a run with checkpoint.load_mode={run.checkpoint.load_mode} continues. Set "
            f"train.steps to more than {state.step}, or checkpoint.load_mode=weights."
        )


def describe_checkpoint_source(
    run: TrainRun, checkpoint_source: Checkpoint, state: TrainState, *, fresh: bool
) -> str:
    """Describe where a run starts: checkpoint, step, optimizer state (`fresh`: none) and learning
    rate.

    If the global batch size has changed, also describe where the schedule will end.
    """
    batch_schedule = build_batch_schedule(run.train)
    lengths = schedule_lengths(
        run.schedule, batch_schedule=batch_schedule, total_steps=run.train.steps
    )
    rate = learning_rate(run.schedule, state.scheduled_samples, lengths) * batch_size_factor(
        run.schedule,
        size=batch_schedule.get_batch_size(state.read_samples),
        full_size=run.train.global_batch_size,
    )
    optimizer = "with a new optimizer state" if fresh else "with its optimizer state"
    last = state.scheduled_samples + batch_schedule.count_samples(
        run.train.steps - state.step, consumed=state.read_samples
    )
    changed = (
        "train.batch_size_schedule"
        if run.train.batch_size_schedule
        else f"train.global_batch_size={run.train.global_batch_size}"
    )
    schedule_end = (
        ""
        if state.read_samples == batch_schedule.count_samples(state.step - len(state.skipped_steps))
        else (
            f"; with the changed {changed}, train.steps={run.train.steps} "
            f"ends at sample {last} of the schedule's {lengths.total}"
        )
    )
    return (
        f"continuing from {checkpoint_source.path} at step {state.step} {optimizer}: "
        f"{state.consumed_samples} samples consumed, schedule at sample {state.scheduled_samples}, "
        f"learning rate {rate:.3g}{schedule_end}"
    )


def open_newest_checkpoint(folder: StoragePath, world: Group) -> Checkpoint | None:
    """Open the newest complete checkpoint in `folder`; None if there is none. Collective over
    `world`.

    Raises:
        CheckpointError: there are checkpoints, but none is complete; or the newest has no training
            state.
    """
    checkpoint = _open_newest_complete(folder, world)
    if checkpoint is not None:
        checkpoint.require_state(*PROGRESS)
    return checkpoint


def _open_newest_complete(folder: StoragePath, world: Group) -> Checkpoint | None:
    """Open the newest complete checkpoint in `folder`, with or without training state; None if
    there are no checkpoints. Collective over `world`.

    Raises:
        CheckpointError: on every rank with the same text: there are checkpoints, but none is
            complete.
    """
    path = raise_on_all_ranks(lambda: find_latest(folder) if world.rank == 0 else None, world)[0]
    if path is None:
        return None
    opened: list[Checkpoint] = []
    raise_on_all_ranks(lambda: opened.append(open_checkpoint(path)), world)
    return opened[0]


def fall_back(damage: DamagedCheckpointError, world: Group) -> Checkpoint:
    """Rename a run's damaged checkpoint and open the next newest one. Collective over `world`.

    `damage`: the error that `Checkpoint.load_into` raised on every rank.

    Raises:
        DamagedCheckpointError: there is no other complete checkpoint; the damaged one is not
            renamed.
    """
    path = damage.path
    assert path is not None, "raised by Checkpoint.load_into"
    aside = raise_on_all_ranks(
        lambda: _set_aside_if_others(path) if world.rank == 0 else None, world
    )[0]
    if aside is None:
        raise damage
    older = open_newest_checkpoint(path.parent, world)
    assert older is not None, "list_other_checkpoints returned one"
    if world.rank == 0:
        text = "skipping checkpoint %s: %s It was renamed to %s. Resuming from %s."
        _log.warning(text, path.name, damage.reason, aside, older.path.name)
    return older


def _set_aside_if_others(path: StoragePath) -> StoragePath | None:
    return set_aside_damaged(path) if list_other_checkpoints(path) else None


CALLBACKS = "callbacks"
"""Key of the states of callbacks in the state of a checkpoint."""

ROLLBACKS = "rollbacks"
"""Key of the steps from which the run was rolled back, in the state of a checkpoint."""

HEALTHY = "healthy"
"""Key of the state of a checkpoint: false if the model had diverged; no run is rolled back to it.
Missing: true."""


@dataclass(frozen=True, slots=True)
class RunData:
    """Datasets of a run, and the sample counts that determine their order."""

    splits: Splits
    orders: tuple[int, ...]
    """Number of training samples that the order was first built for, and later extensions."""


class PreparedRun:
    """A run before its next step: trainer with loaded weights, data, tokenizer and counters."""

    def __init__(
        self,
        run: TrainRun,
        folder: RunFolder,
        mesh: Mesh,
        device: torch.device,
        print_line: Callable[[str], None],
        starts: StartLog | None = None,
        heartbeat: RankHeartbeat | None = None,
    ) -> None:
        """Build the trainer and load the folder's newest checkpoint, or what `checkpoint.load`
        names. Collective over the mesh.

        `print_line`: receives each line about what was loaded, on every rank. `starts`: records
        this start, and may choose an older checkpoint. `heartbeat`: records progress.
        """
        self.heartbeat = heartbeat or RankHeartbeat()
        self.run, self.folder, self.mesh, self.print_line = run, folder, mesh, print_line
        self.memory_before_gib = peak_memory_gib(device)
        """Memory of the process before it holds the data, the weights and the optimizer state."""
        self.is_writer = mesh.world.rank == 0
        local, stored = run.checkpoint.local, folder.checkpoints
        # The id of a run whose checkpoints are in an object store is in its folder.
        id_folder = stored if isinstance(stored, Path) else folder.path / "checkpoints"
        self.local_tier = (
            None
            if local.every is None
            else LocalTier(local, folder.path.name, id_folder, mesh.world, device)
        )
        self._damaged_local_saves: tuple[str, ...] = ()
        self.starts = starts or StartLog(folder.path, rank=mesh.world.rank)
        load_started = time.monotonic()
        saved = self._choose_checkpoint(self._open_newest())
        self.load_seconds = time.monotonic() - load_started
        """Time in which the checkpoint was opened and loaded."""
        self.recorded_rollbacks = self._read_recorded_rollbacks()
        self.checkpoint_source = (
            open_checkpoint_source(run.checkpoint, mesh.world, vocab_size=run.model.vocab_size)
            if saved is None
            else None
        )
        self.saved_world = saved.manifest.world_size if saved is not None else mesh.world.size
        """Number of ranks that have saved the checkpoint from which the run resumes."""
        start = saved or self.checkpoint_source
        self.state = self._read_train_state(start)
        self._check_batch_sizes(saved)
        if self.checkpoint_source is not None:
            check_steps_left(run, self.checkpoint_source, self.state)
        self.tokenizer = build_checked_tokenizer(run)
        self.data = self._open_data(start)
        self.tokenizer_files = (
            read_tokenizer_files(run) if self.is_writer else TokenizerFiles(None, {})
        )
        self.trainer = build_trainer(
            run,
            mesh,
            device,
            fill=saved is None and needs_initial_weights(run),
            fill_frozen=may_keep_initial_weights(run),
        )
        load_started = time.monotonic()
        while (damage := self._load_or_find_damage(saved)) is not None:
            saved = self._fall_back(saved, damage)
            self.state = self._read_train_state(saved)
            self._check_batch_sizes(saved)
            self.data = self._open_data(saved)
            # filled by the damaged checkpoint, and possibly missing in the older one
            zero_states(self.trainer.optimizer)
        self.load_seconds += time.monotonic() - load_started
        if saved is not None and self.is_writer:
            for warning in saved.warnings():
                _log.warning(warning)
        self.is_resumed = saved is not None
        self.is_resumed_locally = isinstance(saved, LocalCheckpoint)
        if self.local_tier is not None:
            self.local_tier.discard_after(self.state.step)
        start = saved or self.checkpoint_source
        self.callback_states: Mapping[str, Any] = (  # Any: JSON
            {} if start is None else start.state.get(CALLBACKS, {})
        )
        self.rollbacks: tuple[int, ...] = (
            () if saved is None else tuple(saved.state.get(ROLLBACKS, ()))
        )

    def _read_recorded_rollbacks(self) -> list[tuple[int, int]]:
        """Return the samples that skipped.jsonl names because of rollbacks. Collective."""
        path = self.folder.skipped
        return raise_on_all_ranks(
            lambda: read_rolled_back_samples(path) if self.is_writer else [], self.mesh.world
        )[0]

    def _read_train_state(self, checkpoint: Checkpoint | None) -> TrainState:
        """Return the counters of a checkpoint; zeros if there is none. Samples that the run has
        skipped in a rollback, after the position of an older checkpoint, stay skipped."""
        if checkpoint is None:
            return TrainState()
        state = TrainState.from_json(checkpoint.state["train"])
        if checkpoint is not self.checkpoint_source:
            # A rollback that was not completed has ranges that this checkpoint has passed.
            position = state.consumed_samples
            state.skip_samples(each for each in self.recorded_rollbacks if each[0] >= position)
        return state

    def _open_newest(self) -> Checkpoint | None:
        """Open the newest checkpoint of this run: a complete local one, unless the persistent one
        is of a later step. Collective.

        Raises:
            CheckpointError: on every rank: there are persistent checkpoints, but none is complete,
                and there is no complete local one.
        """
        folder, world = self.folder.checkpoints, self.mesh.world
        if self.local_tier is None:
            return open_newest_checkpoint(folder, world)
        saved, problem = None, None
        try:
            saved = _open_newest_complete(folder, world)
        except CheckpointError as error:  # the same on every rank
            problem = error
        if saved is not None:
            saved.require_state(*PROGRESS)
        local = self._find_local(saved)
        if local is None and problem is not None:
            raise problem
        if local is not None and problem is not None and self.is_writer:
            _log.warning("%s\nUsing the local checkpoint of step %d.", problem, local.step)
        return local or saved

    def _find_local(self, persistent: Checkpoint | None) -> LocalCheckpoint | None:
        """Return the newest complete local checkpoint, unless `persistent` is of a later step; None
        if there is none. Collective."""
        if self.local_tier is None:
            return None
        local = self.local_tier.find(
            at_least=0 if persistent is None else persistent.step,
            lineage=() if persistent is None else persistent.state.get(ROLLBACKS, ()),
            excluded=self._damaged_local_saves,
            alternative="no checkpoint" if persistent is None else persistent.path.name,
        )
        if local is not None:
            local.require_state(*PROGRESS)
        return local

    def _check_batch_sizes(self, saved: Checkpoint | None) -> None:
        """Check that the batch sizes of the samples that a local checkpoint has read have not
        changed; `list_changed_settings` has checked those of a persistent one. Collective.

        Raises:
            ConfigError: on every rank: they have.
        """
        if not isinstance(saved, LocalCheckpoint):
            return
        problem = raise_on_all_ranks(self._describe_changed_batch_sizes, self.mesh.world)[0]
        if problem:
            raise ConfigError(problem)

    def _describe_changed_batch_sizes(self) -> str:
        if not self.is_writer:
            return ""
        try:
            check_batch_sizes(self.folder, self.run, self.state.read_samples)
        except ConfigError as error:
            return str(error)
        return ""

    def _choose_checkpoint(self, newest: Checkpoint | None) -> Checkpoint | None:
        """Return the checkpoint with which this start begins: the newest one, or an older one after
        starts that failed with the same cause; record the start. Collective.

        Raises:
            CheckpointError: on every rank: the run is in a crash loop, or the older checkpoint
                cannot be read.
        """
        folder, world = self.folder.checkpoints, self.mesh.world
        is_local = isinstance(newest, LocalCheckpoint)

        def list_persistent() -> list[StoragePath]:
            return list(reversed(list_complete_checkpoints(folder).values()))

        persistent = raise_on_all_ranks(
            lambda: list_persistent() if self.is_writer and self.starts.escalates else [], world
        )[0]
        newest_step = 0 if newest is None else newest.step
        decision = self.starts.decide(
            world,
            newest_step=newest_step,
            has_older_tier=is_local and len(persistent) > 0,
            has_older_checkpoint=len(persistent) > 1,
        )
        chosen = newest
        self._skips_local_tier = decision.choice != "newest"
        if self._skips_local_tier:
            number = 0 if decision.choice == "previous_tier" else 1
            chosen = open_checkpoint(persistent[number])
            chosen.require_state(*PROGRESS)
        tier = "local" if isinstance(chosen, LocalCheckpoint) else "persistent"
        parallel = self.run.parallel
        self.starts.write_start(
            world,
            step=0 if chosen is None else chosen.step,
            newest_step=newest_step,
            layout=f"tp={parallel.tp} cp={parallel.cp} pp={parallel.pp} dp={self.mesh.dp.size}",
            checkpoint=None if chosen is None else folder_name(chosen.step),
            tier="none" if chosen is None else tier,
        )
        return chosen

    def _fall_back(self, saved: Checkpoint | None, damage: DamagedCheckpointError) -> Checkpoint:
        """Return the checkpoint to load after `saved`, which is damaged. Collective.

        Raises:
            DamagedCheckpointError: there is none.
        """
        if not isinstance(saved, LocalCheckpoint):
            return self._fall_back_from_persistent(damage)
        self._damaged_local_saves = (*self._damaged_local_saves, saved.save)
        text = "skipping the local checkpoint of step %d: %s Resuming from %s."
        try:
            older = self._open_newest()
        except CheckpointError:
            if self.is_writer:
                _log.warning(text, saved.step, damage.reason, "no checkpoint")
            raise
        if older is None:
            raise damage
        if self.is_writer:
            _log.warning(text, saved.step, damage.reason, _describe_tier(older))
        return older

    def _fall_back_from_persistent(self, damage: DamagedCheckpointError) -> Checkpoint:
        """Rename a damaged persistent checkpoint, and return the newest one before it, persistent
        or local. Collective.

        Raises:
            DamagedCheckpointError: there is none; the damaged one is not renamed.
        """
        path, world = damage.path, self.mesh.world
        assert path is not None, "raised by Checkpoint.load_into"
        others = raise_on_all_ranks(
            lambda: list_other_checkpoints(path) if self.is_writer else [], world
        )[0]
        older = fall_back(damage, world) if others else None
        local = None if self._skips_local_tier else self._find_local(older)
        if local is None and older is None:
            raise damage
        if local is not None and older is None:
            raise_on_all_ranks(lambda: set_aside_damaged(path) if self.is_writer else None, world)
        if local is not None and self.is_writer:
            text = "skipping checkpoint %s: %s Resuming from %s."
            _log.warning(text, path.name, damage.reason, _describe_tier(local))
        chosen = local or older
        assert chosen is not None, "checked above"
        return chosen

    def restore_newest(self) -> Checkpoint:
        """Load the newest checkpoint of this run in place, or an older one if it is damaged; return
        it. Collective."""
        self.checkpoint_source = None  # the run continues from its own checkpoint
        saved = open_newest_checkpoint(self.folder.checkpoints, self.mesh.world)
        assert saved is not None, "the caller has checked that there is one"
        self.trainer.data.wait_params()
        self.trainer.write_guard.wait()
        while True:
            zero_states(self.trainer.optimizer)  # a checkpoint may have no optimizer state
            try:
                self.state.restore(saved.state["train"])
                self._load_checkpoint(saved)
            except DamagedCheckpointError as damage:
                saved = fall_back(damage, self.mesh.world)
            else:
                return saved

    def write_files(self) -> None:
        """Write the settings of the run into its folder; on rank 0."""
        run, folder = self.run, self.folder
        if not self.is_resumed and (renamed := set_aside_metrics(folder)) is not None:
            self.print_line(
                f"{folder.checkpoints} has no checkpoint: starting from the beginning; see "
                f"{renamed}"
            )
        write_config(folder, run, self.tokenizer_files)
        if run.observe.parameters:
            write_parameters(folder, run)

    def adopt_state(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Continue from the state of another replica group, whose tensors were copied into those of
        `checkpoint_entries`. Collective.

        state: `state_json` of that group, with the states of its callbacks.

        Raises:
            CheckpointError: the other group has other data or another tokenizer.
        """
        trainer = self.trainer
        trainer.optimizer.set_updates(int(state["optimizer_updates"]))
        if trainer.loss_scale is not None and "loss_scale" in state:
            trainer.loss_scale.load(state["loss_scale"])
        all_gather_loaded_params(trainer)
        self.state.restore(state["train"])
        if trainer.ema is not None:
            steps = self.state.step - self.state.skipped
            trainer.ema.earlier_updates = steps - trainer.optimizer.updates
        orders = int(state["order_samples"]), *map(int, state["order_longer"])
        if orders != self.data.orders:
            self.data = RunData(self._datasets(orders), orders)
        assert self.data.splits.train is not None
        for name, value in (
            ("data", self.data.splits.train.fingerprint),
            ("tokenizer", self.tokenizer.fingerprint),
        ):
            if state[name] != value:
                raise CheckpointError(
                    f"the other replica groups have another {name}:\n"
                    f"  other groups: {state[name]}\n"
                    f"  this group:   {value}\nUse the same files in all groups."
                )
        self.callback_states = state.get(CALLBACKS, {})
        self.rollbacks = tuple(state.get(ROLLBACKS, ()))
        self.is_resumed = True

    def build_loader(
        self, share: GroupShare = SINGLE_GROUP, first_samples: Sequence[int] | None = None
    ) -> Loader:
        """Return the loader of the remaining steps; `share` and `first_samples`: see `Loader`."""
        train = self.run.train
        assert self.data.splits.train is not None
        return Loader(
            self.data.splits.train,
            BatchSettings.of_run(self.run, self.masks()),
            self.mesh.dp,
            consumed=self.state.consumed_samples,
            steps=train.steps - self.state.step,
            device=self.trainer.device,
            slicing=local_slicing(self.run.parallel, self.mesh),
            world_group=self.mesh.world,
            share=share,
            first_samples=first_samples,
            skipped=self.state.skipped_samples,
        )

    def count_label_counts(self) -> int:
        """Return the number of label counts of a global batch (`Loader.num_counts`)."""
        assert self.data.splits.train is not None
        extra = declared_extra(self.data.splits.train)
        return count_label_counts(self.run.model.mtp.num_layers, extra)

    def masks(self) -> MaskSettings:
        """Return which tokens attend to each other and which have labels."""
        return build_mask_settings(self.run.data, self.run.model, self.tokenizer.eod)

    def budget(self) -> TokenBudget | None:
        """Return the token budget of a microbatch; None if microbatches have a fixed number of
        rows."""
        return build_token_budget(self.run.train, self.run.parallel, self.run.model)

    def state_json(self) -> dict[str, Any]:  # Any: JSON
        """Return what a checkpoint stores besides tensors."""
        assert self.data.splits.train is not None
        scale = self.trainer.loss_scale
        extra = (
            ({} if scale is None else {"loss_scale": scale.as_json()})
            | ({} if self.lora_base is None else {RECORD: self.lora_base})
            | (
                {FORCE_LOAD_BALANCING: list(self.force_load_balancing)}
                if self.force_load_balancing
                else {}
            )
            | ({} if self.hf_source is None else {HF_SOURCE: self.hf_source.as_json()})
            | ({ROLLBACKS: list(self.rollbacks)} if self.rollbacks else {})
        )
        return extra | {
            "train": self.state.as_json(),
            "optimizer_updates": self.trainer.optimizer.updates,
            "data": self.data.splits.train.fingerprint,
            "order_samples": self.data.orders[0],
            "order_longer": list(self.data.orders[1:]),
            "tokenizer": self.tokenizer.fingerprint,
        }

    def _load_or_find_damage(self, saved: Checkpoint | None) -> DamagedCheckpointError | None:
        """Load the initial weights and state; return the error if the run's own checkpoint,
        `saved`, is damaged."""
        try:
            with self.heartbeat.within("load"):
                self._load(saved)
        except DamagedCheckpointError as error:
            if saved is None or error.path != saved.path:
                # the user has named this checkpoint, so there is no fallback
                raise
            return error
        return None

    def _load(self, saved: Checkpoint | None) -> None:
        """Load weights and optimizer state from the run's own checkpoint, or as `checkpoint.load`
        says."""
        run, rules = self.run, self.run.checkpoint
        self.lora_base = self._load_base(saved)
        self.force_load_balancing = trained_with_forced_balancing(saved, run.model)
        self.hf_source = read_hf_source(saved)
        if saved is not None:
            self._load_checkpoint(saved)
            tier = " from its local checkpoint" if isinstance(saved, LocalCheckpoint) else ""
            self.print_line(f"resuming {self.folder.path} at step {self.state.step}{tier}")
        elif run.lora is not None:
            if run.lora.load is not None:
                assert self.lora_base is not None, "a LoRA run has base weights"
                forced = load_adapters(
                    self._weights(),
                    run.lora,
                    self.mesh.world,
                    model=run.model,
                    record=self.lora_base,
                )
                self._gather_loaded_weights(forced)
                self.print_line(f"adapters start from {run.lora.load}")
        elif self.checkpoint_source is not None:
            is_reader = self.is_writer  # rank 0 announces the reader to the other run
            with mark_reading(self.checkpoint_source.path) if is_reader else nullcontext():
                fresh = self._load_checkpoint(self.checkpoint_source)
            self.force_load_balancing = trained_with_forced_balancing(
                self.checkpoint_source, run.model
            )
            self.hf_source = read_hf_source(self.checkpoint_source)
            self.print_line(
                describe_checkpoint_source(run, self.checkpoint_source, self.state, fresh=fresh)
            )
            if MEGATRON_SOURCE in self.checkpoint_source.state:
                self.print_line(
                    f"{self.checkpoint_source.path} records neither its data nor its tokenizer, so "
                    "they are not compared: data.* and tokenizer.* must be those of the Megatron "
                    f"run, whose next sample is number {self.state.consumed_samples}. Megatron's "
                    "random state is not loaded: random numbers depend on seed and step"
                )
        elif rules.load is not None:
            loaded = load_weights_with_records(
                self._weights(), rules.load, self.mesh.world, model=run.model, rules=rules
            )
            for line in loaded.notes:
                self.print_line(f"{rules.load}: {line}")
            self._gather_loaded_weights(loaded.forced)
            self.hf_source = loaded.hf_source
            self.print_line(f"starting from {rules.load}")

        source = saved or self.checkpoint_source
        continues = rules.load_mode != "progress" or saved is not None
        if self.trainer.outer is not None and not (continues and _has_outer_state(source)):
            self.trainer.outer.reset()  # the first round starts from these weights

    def _weights(self) -> list[CheckpointEntry]:
        """Return the entries of the weights and master weights, without optimizer moments."""
        return [
            entry for entry in checkpoint_entries(self.trainer) if entry.role in ("param", "master")
        ]

    def _gather_loaded_weights(self, forced: Sequence[str]) -> None:
        """All-gather loaded weights, and record which of their layers were trained with forced load
        balancing."""
        all_gather_loaded_params(self.trainer)
        if self.trainer.ema is not None:
            self.trainer.ema.reset()
        self.force_load_balancing = tuple(dict.fromkeys((*forced, *self.force_load_balancing)))

    def _load_checkpoint(self, saved: Checkpoint) -> bool:
        """Load a checkpoint and continue at its step; return whether the optimizer state is new.

        Raises:
            CheckpointError: the checkpoint is of another tokenizer or model, or lacks tensors.
        """
        run, rules = self.run, self.run.checkpoint
        # a Megatron checkpoint does not record its tokenizer's ids
        if saved.state.get("tokenizer", self.tokenizer.fingerprint) != self.tokenizer.fingerprint:
            raise CheckpointError(
                f"{saved.path} was trained with another tokenizer ({saved.state['tokenizer']}, now "
                f"{self.tokenizer.fingerprint}). Use that one, or choose another folder with --run "
                "NAME."
            )
        resets_optimizer = self.checkpoint_source is not None and rules.load_mode == "progress"
        entries = self._weights() if resets_optimizer else checkpoint_entries(self.trainer)
        if not _has_outer_state(saved):
            entries = [entry for entry in entries if entry.role not in OUTER_ROLES]
        if not resets_optimizer:
            _reject_other_update_rule(saved, entries, run, self.mesh.world)
        # list_changed_settings has compared the model with that of a local checkpoint.
        saved_run = (
            None
            if isinstance(saved, LocalCheckpoint)
            else open_pretrained_checkpoint(
                saved, base=None if self.lora_base is None else rules.load
            )
        )
        # The saved vocabulary may be padded to another multiple.
        padded = (
            self.checkpoint_source is not None
            and saved_run is not None
            and saved_run.model.vocab_size == run.model.vocab_size
        )
        report = saved.load_into(
            entries,
            self.mesh.world,
            rules=rules,
            purpose="start" if resets_optimizer else "resume",
            vocab_size=run.model.vocab_size if padded else None,
            report_progress=self.heartbeat.record,
        )
        # A folder without config.yaml was not compared by list_changed_settings.
        if saved_run is not None:
            for line in check_same_model(
                saved_run, run.model, allow=rules.allow_model_changes, padded=padded
            ):
                self.print_line(f"{saved.path}: {line}")
        # New moments start at zero and need bias correction from the first update.
        fresh = resets_optimizer or report.fresh_state
        updates = saved.state.get("optimizer_updates", self.state.step - self.state.skipped)
        self.trainer.optimizer.set_updates(0 if fresh else int(updates))
        if (
            self.trainer.loss_scale is not None
            and "loss_scale" in saved.state
            and not resets_optimizer
        ):
            self.trainer.loss_scale.load(saved.state["loss_scale"])
        all_gather_loaded_params(self.trainer)
        if self.trainer.ema is not None:
            self.trainer.ema.earlier_updates = (
                self.state.step - self.state.skipped - self.trainer.optimizer.updates
            )
        self._start_ema(saved, is_loaded=not resets_optimizer)
        return fresh

    def _start_ema(self, saved: Checkpoint, *, is_loaded: bool) -> None:
        """Start the moving average from the weights, unless it was loaded."""
        ema = self.trainer.ema
        if ema is None or (is_loaded and saved.has_ema):
            return
        ema.reset()
        self.print_line(
            f"train.ema: the moving average starts from the weights of {saved.path}"
            f"{'' if saved.has_ema else ', which has none'}"
        )

    def _load_base(self, saved: Checkpoint | None) -> dict[str, str] | None:
        """Load the frozen base weights of LoRA adapters, which this run's checkpoints do not
        hold."""
        run = self.run
        if run.lora is None:
            return None
        entries = weight_entries(self.trainer.data.frozen, self.mesh)
        record, notes = load_base(
            entries, run.checkpoint, self.mesh.world, model=run.model, saved=saved
        )
        all_gather_loaded_params(self.trainer)
        for line in notes:
            self.print_line(f"{run.checkpoint.load}: {line}")
        self.print_line(f"training LoRA adapters on the frozen weights of {record['base']}")
        return record

    def _open_data(self, saved: Checkpoint | None) -> RunData:
        """Build the datasets; their order depends on the number of samples at the first start.

        If the run was made longer since, more epochs follow; the samples read so far stay the same.
        The first rank to arrive builds the indices, the others map them.

        Raises:
            CheckpointError: the data, or its order, is not what the run was started with.
            DataError: there are too few samples, and they are not repeated.
        """
        orders = [self._num_samples_needed()]
        if saved is not None and "order_samples" in saved.state:
            orders = [
                int(count)
                for count in (saved.state["order_samples"], *saved.state.get("order_longer", ()))
            ]
        splits = self._datasets(orders)
        assert splits.train is not None
        if saved is not None and "data" in saved.state:
            _check_order(saved, splits.train.fingerprint)
        return self._extend_data(RunData(splits, tuple(orders)))

    def _num_samples_needed(self) -> int:
        """Return the number of samples that are consumed after the last step."""
        return advance(
            build_batch_schedule(self.run.train),
            self.state.skipped_samples,
            consumed=self.state.consumed_samples,
            num_steps=max(0, self.run.train.steps - self.state.step),
        )

    def extend_data(self) -> None:
        """Add epochs if the remaining steps need more samples, because some are skipped.

        Raises:
            DataError: there are too few samples, and they are not repeated.
        """
        self.data = self._extend_data(self.data)

    def _extend_data(self, data: RunData) -> RunData:
        """Return the data, with more epochs if the remaining steps need more samples.

        Raises:
            DataError: there are too few samples, and they are not repeated.
        """
        splits, orders = data.splits, data.orders
        assert splits.train is not None
        needed = self._num_samples_needed()
        num_available = splits.train.num_samples
        if num_available >= needed or self.run.data.sampler != "sequential":
            return data
        longer = RunData(self._datasets([*orders, needed]), (*orders, needed))
        assert longer.splits.train is not None
        if (num_unique := longer.splits.train.num_samples) < needed:
            raise DataError(
                f"train.steps={self.run.train.steps} reads {needed} samples, and without "
                f"mixture weights data.path provides each of its {num_unique} samples only once. "
                "Set train.steps to at most "
                f"{build_batch_schedule(self.run.train).count_steps(num_unique)}: with weights the "
                "samples would be in another order."
            )
        if longer.splits.train.fingerprint != splits.train.fingerprint:
            self.print_line(
                f"train.steps={self.run.train.steps} reads {needed} samples, and this run's "
                f"order has {num_available}: more epochs follow, each shuffled separately"
            )
        return longer

    def _datasets(self, orders: Sequence[int]) -> Splits:
        run, train = self.run, self.run.train
        return build_datasets(
            run.data,
            SampleSettings.of_run(run, eod=self.tokenizer.eod),
            train_samples=orders[0],
            train_longer=orders[1:],
            valid_samples=train.eval_steps * train.global_batch_size,
            tokenizer=self.tokenizer,
            tokenizer_path=run.tokenizer.path,
        )


def _has_outer_state(checkpoint: Checkpoint | None) -> bool:
    """Return whether a checkpoint has the state of DiLoCo's outer optimizer."""
    prefix = f"optimizer.{START}."
    return checkpoint is not None and any(key.startswith(prefix) for key in checkpoint.keys())  # noqa: SIM118 - not a mapping


def _describe_tier(checkpoint: Checkpoint) -> str:
    """Return the name of a checkpoint, and that it is local if it is, for messages."""
    kind = "the local checkpoint of " if isinstance(checkpoint, LocalCheckpoint) else ""
    return f"{kind}{checkpoint.path.name}"


def needs_initial_weights(run: TrainRun) -> bool:
    """Return whether a new run initializes any weights randomly: LoRA adapters, or weights that are
    not loaded."""
    return (run.lora is not None and run.lora.load is None) or may_keep_initial_weights(run)


def may_keep_initial_weights(run: TrainRun) -> bool:
    """Return whether model weights may keep their random initialization: some or all are not
    loaded."""
    checkpoint = run.checkpoint
    return checkpoint.load is None or checkpoint.missing_keys != "error" or bool(checkpoint.skip)


def _check_order(saved: Checkpoint, fingerprint: str) -> None:
    """Check that the data and its order are those of the checkpoint, up to its position in the
    data: later data phases may have changed.

    Raises:
        CheckpointError: the fingerprints differ.
    """
    consumed = int(saved.state["train"]["consumed_samples"])
    if select_read_phases(saved.state["data"], consumed) != select_read_phases(
        fingerprint, consumed
    ):
        raise CheckpointError(
            f"{saved.path} was trained on other data or in another order:\n"
            f"  then: {saved.state['data']}\n"
            f"  now:  {fingerprint}\n"
            "Use the data and the data.num_train_samples that the run was started with, or choose "
            "another folder with --run NAME (and checkpoint.load_mode=weights, to begin at step 0 "
            "of the data there). Keep train.tokens_per_microbatch set or unset, as it was: rows "
            "and documents have orders of their own."
        )


def build_checked_tokenizer(run: TrainRun) -> Tokenizer:
    """Build the run's tokenizer and check that its ids fit the model's vocabulary.

    Raises:
        ConfigError: the tokenizer has more ids than the model.
    """
    tokenizer = build_tokenizer(run.tokenizer)
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={run.model.vocab_size} is smaller than the tokenizer's "
            f"{tokenizer.vocab_size} tokens. Set model.vocab_size to {tokenizer.vocab_size} or "
            "more."
        )
    return tokenizer


class _NeededStates(NamedTuple):
    """Optimizer states that a rank requests of one parameter."""

    inputs: int
    roles: frozenset[str]


def _list_needed_states(entries: Sequence[CheckpointEntry]) -> dict[str, _NeededStates]:
    """Return the optimizer states that this rank requests, by parameter."""
    roles: dict[str, set[str]] = {}
    for entry in entries:
        if is_moment(entry.key) and entry.role not in OUTER_ROLES:
            roles.setdefault(entry.shard.name, set()).add(entry.role)
    # states of a part of a parameter have names of their own, and no weight
    return {
        name: _NeededStates(entry.shard.inputs, frozenset(roles.get(name, ())))
        for entry in entries
        if entry.role == "param" and (name := entry.shard.name)
    }


def _reject_other_update_rule(
    saved: Checkpoint, entries: Sequence[CheckpointEntry], run: TrainRun, world: Group
) -> None:
    """Check that the optimizer states of a checkpoint are those of the run's update rules.
    Collective: states of a whole matrix are requested by one rank only.

    Raises:
        CheckpointError: a parameter has the states of another rule; names both.
    """
    if "warn" in (run.checkpoint.missing_keys, run.checkpoint.unexpected_keys):
        return
    stored: dict[str, set[str]] = {}
    for key in saved.manifest.tensors:
        if is_moment(key):
            _, role, name = key.split(".", 2)
            stored.setdefault(name, set()).update({role} - {*OUTER_ROLES})
    needed: dict[str, _NeededStates] = {}
    for states in raise_on_all_ranks(lambda: _list_needed_states(entries), world):
        for name, own in states.items():
            others = needed[name].roles if name in needed else frozenset[str]()
            needed[name] = own._replace(roles=own.roles | others)
    saved_optim = _read_optim(saved)
    for name, own in sorted(needed.items()):
        if not run.optim.trains(name):
            continue
        roles, other = sorted(own.roles), sorted(stored.get(name, ()))
        text = describe_rule_change(name, own.inputs, roles, other, run.optim, saved_optim)
        if text:
            raise CheckpointError(f"{saved.path}: {text}")


def _read_optim(saved: Checkpoint) -> OptimConfig | None:
    """Return the optimizer settings of the run of a checkpoint; None if this version does not read
    them, or there are none, as in a converted checkpoint."""
    try:
        settings = parse_stored_settings(saved.config_text)
        section = settings.get("optim") if isinstance(settings, dict) else None
        return from_dict(OptimConfig, section) if isinstance(section, dict) else None
    except (yaml.YAMLError, ConfigError):
        return None
