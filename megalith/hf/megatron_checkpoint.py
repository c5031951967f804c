"""Megatron checkpoints with the interface of `Checkpoint`: location of their folders, and tensors
with Megalith's names and boxes, whose values are computed from the stored chunks on request."""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.chunks import ChunkedTensor, MegatronFolder
from megalith.checkpoint.dcp import read_dcp_folder
from megalith.checkpoint.format import (
    DTYPES,
    MANIFEST,
    STATE,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    divide,
    lengths,
    numel,
    sha256,
    show_dtype,
)
from megalith.checkpoint.iterations import (
    RELEASE,
    TRACKER,
    detect_megatron_format,
    locate_iteration,
)
from megalith.checkpoint.keys import MODEL
from megalith.checkpoint.load import Checkpoint
from megalith.checkpoint.safetensors import show_names
from megalith.checkpoint.save import BOX_NBYTES
from megalith.checkpoint.zarr import read_zarr_folder
from megalith.config.data import TokenizerConfig
from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.config.tree import dump_yaml
from megalith.data.tokenizer import locate_copied_tokenizer
from megalith.errors import MAX_PROBLEMS, CheckpointError
from megalith.hf.folder import CONFIG
from megalith.hf.megatron_args import TranslatedArgs, translate_args
from megalith.hf.megatron_legacy import read_legacy_folder
from megalith.hf.megatron_names import MEGATRON, normalize_tensors
from megalith.hf.megatron_optimizer import read_optimizer, verify_buckets
from megalith.hf.peft import ADAPTER_CONFIG
from megalith.hf.release import parameters, release_run
from megalith.hf.tensor_rules import (
    TensorRule,
    build_rules,
    locate_box,
    to_parameter_layout,
)
from megalith.megatron.stored_arguments import read_fields
from megalith.plan.shards import Box, Shard, intersect
from megalith.storage import StoragePath

INTEGRITY_FILE = "integrity.json"
"""File with the SHA-256 of every other file, written with --verify-integrity."""

MEGATRON_SOURCE = "megatron"
"""Key in the state of a checkpoint: the Megatron checkpoint that it is or was converted from. It
has no fingerprint of data and tokenizer."""

_ITERATION = re.compile(r"iter_(\d{7,18})")
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_log = logging.getLogger(__name__)

# --- folders


def is_megatron(path: StoragePath) -> TypeGuard[Path]:
    """Return whether a folder is one Megatron checkpoint: an `iter_NNNNNNN` or `release` folder,
    in any format.

    Raises:
        CheckpointError: it is one in a format that is not read, or whose save was interrupted.
    """
    return isinstance(path, Path) and locate_megatron(path) == path


def locate_megatron(path: Path, step: int | None = None) -> Path | None:
    """Return the Megatron checkpoint at `path`, or in this folder the one of iteration `step`
    (unset: the one that its tracker names). None if it is another kind of folder.

    Raises:
        CheckpointError: there is none of this iteration, or it is in a format that is not read.
    """
    if not path.is_dir():
        if _ITERATION.fullmatch(path.name) and (path.parent / TRACKER).exists():
            return locate_iteration(path.parent, _iteration_number(path))
        return None
    names = set(storage.list_names(path))
    is_other = names & {MANIFEST, STATE, CONFIG, ADAPTER_CONFIG}
    return (
        None if is_other or detect_megatron_format(path) is None else locate_iteration(path, step)
    )


def _iteration_number(path: Path) -> int:
    return int(path.name.removeprefix("iter_"))


def read_megatron_folder(path: Path) -> MegatronFolder:
    """Read the metadata of one Megatron checkpoint; tensors are read on request.

    Raises:
        CheckpointError: it is damaged, incomplete, or in a format that is not supported.
    """
    kind = detect_megatron_format(path)
    if kind == "torch":
        return read_legacy_folder(path)
    return read_zarr_folder(path) if kind == "zarr" else read_dcp_folder(path)


# --- one checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class _RulePart:
    """The part of a parameter that one rule fills from a Megatron tensor."""

    rule: TensorRule
    tensor: ChunkedTensor

    def read(self, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box inside the box of the rule."""
        region = locate_box(self.rule, box)
        stored = self.tensor.read(tuple((part.start, part.stop) for part in region.slices), dtype)
        return to_parameter_layout(self.rule, stored.view(region.view)[region.at])


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronCheckpoint(Checkpoint):
    """A Megatron checkpoint whose tensors have Megalith's names and shapes.

    Its manifest is built from the folder's metadata, and holds the weights; `with_optimizer` adds
    master weights and moments.
    """

    folder: MegatronFolder
    args: Mapping[str, Any] = field(repr=False)  # values of a pickle
    """Arguments of Megatron's run."""

    run: TrainRun = field(repr=False)
    """The settings that the arguments correspond to."""

    rules: Sequence[TensorRule] = field(repr=False)
    canonical_tensors: Mapping[str, ChunkedTensor] = field(repr=False)
    """Weights in canonical Megatron names."""

    sources: Mapping[str, Sequence[_RulePart | None]] = field(repr=False)
    """How each stored box of a tensor is computed, by its `offset`; None: it is padding, zero."""

    has_optimizer: bool = False
    """Whether master weights and moments are included, if the folder has them."""

    sharding_type: str | None = None
    """How its optimizer state is stored (`distrib_optim_sharding_type`); None: there is none, or
    it was not read."""

    tokenizer_problem: str | None = None
    """Why its tokenizer is not available, if it names one."""

    progress_problem: str | None = None
    """Why its step and samples cannot be read, if they cannot."""

    unused_settings: tuple[str, ...] = ()
    """Why some of its training settings are not those of `run`, a message for each reason."""

    def require_progress(self, settings: str) -> None:
        """Check that a run can continue at its step; `settings` request it.

        Raises:
            CheckpointError: it is released weights, or its counters are damaged.
        """
        if self.progress_problem is not None:
            raise CheckpointError(f"{settings}: {self.progress_problem}")
        if "train" not in self.state:
            raise CheckpointError(
                f"{settings}: {self.path} was released as weights only, so there is no step to "
                "continue from. Set checkpoint.load_mode=weights."
            )

    @property
    def has_training_state(self) -> bool:
        """Whether a run can continue from it with its optimizer state."""
        return self.has_optimizer and "train" in self.state

    def warnings(self) -> list[str]:
        """Return a warning for each problem that does not prevent loading."""
        return [] if self.tokenizer_problem is None else [self.tokenizer_problem]

    def view(self, key: str, box: Box) -> Tensor | None:
        """Return a box if it is inside one stored box, else None; only this box is read.

        Raises:
            CheckpointError: there is no such tensor, or a chunk is missing or damaged.
        """
        for stored in self._tensor(key).boxes:
            if intersect(stored.box, box) == box:
                return self._compute(key, stored, box)
        return None

    def with_optimizer(self, *, rank: int = 0, world_size: int = 1) -> "MegatronCheckpoint":
        """Return the checkpoint with master weights and optimizer moments, if it has any.

        State that has no names of parameters is compared with the weights; with `world_size`
        ranks, each compares a part of it.

        Raises:
            CheckpointError: the optimizer state cannot be read, or is not that of the weights.
        """
        if self.folder.optimizer_problem is not None:
            raise CheckpointError(self.folder.optimizer_problem)
        if not _has_optimizer(self.folder):
            return replace(self, has_optimizer=True)
        optimizer = read_optimizer(self.folder, self.run.model, self.canonical_tensors)
        verify_buckets(optimizer, self.canonical_tensors, rank=rank, world_size=world_size)
        boxes = _BoxTable(self.local_folder(), self.run.model)
        for role in ("master", "exp_avg", "exp_avg_sq"):
            prefix = f"{role}."
            tensors = {
                name.removeprefix(prefix): tensor
                for name, tensor in optimizer.tensors.items()
                if name.startswith(prefix)
            }
            boxes.add(self.rules, tensors, f"optimizer.{role}.")
        state = self.state | (
            {} if optimizer.step is None else {"optimizer_updates": optimizer.step}
        )
        if optimizer.loss_scale is not None:
            state["loss_scale"] = {"scale": optimizer.loss_scale} | _read_trackers(self.folder)
        return replace(
            self,
            manifest=replace(self.manifest, tensors=self.manifest.tensors | boxes.tensors),
            sources={**self.sources, **boxes.sources},
            state=state,
            has_optimizer=True,
            sharding_type=optimizer.sharding_type,
        )

    def describe(self) -> dict[str, Any]:  # JSON
        """Return the format, version, optimizer sharding type and main args of the folder."""
        return {
            "format": self.folder.format,
            "checkpoint_version": self.folder.common.get("checkpoint_version"),
            "optimizer": self.sharding_type,
            "args": {
                name: value if isinstance(value, int | float) else str(value)
                for name in SHOWN_ARGS
                if name in self.args and (value := self.args[name]) is not None
            },
        }

    def format_settings(self, tokenizer: TokenizerConfig, *, load: Path) -> str:
        """Return config.yaml of a converted checkpoint with this tokenizer, at `load`."""
        checkpoint = replace(self.run.checkpoint, load=str(load))
        return dump_yaml(replace(self.run, tokenizer=tokenizer, checkpoint=checkpoint))

    def describe_settings(self) -> str:
        """Return where the settings of its run are, for errors."""
        return f"`megalith checkpoint info {self.path}`"

    def describe_missing_optimizer(self) -> str:
        """Return why there is no optimizer state, and what to do, for errors."""
        return (
            f"{self.path} has no optimizer state: it was saved with --no-save-optim, or released "
            "as weights. To continue with zero moments, set checkpoint.load_mode=progress; to "
            "start at step 0, checkpoint.load_mode=weights."
        )

    def _read_box(self, key: str, stored: StoredBox) -> Tensor:
        """Compute the values of one stored box.

        Raises:
            CheckpointError: a chunk is missing or damaged.
        """
        return self._compute(key, stored, stored.box)

    def _compute(self, key: str, stored: StoredBox, box: Box) -> Tensor:
        """Return the values of a box inside a stored box."""
        dtype, part = self.dtype(key), self.sources[key][stored.offset]
        return torch.zeros(lengths(box), dtype=dtype) if part is None else part.read(box, dtype)


def _has_optimizer(folder: MegatronFolder) -> bool:
    return any(_OPTIMIZER.match(name) for name in (*folder.tensors, *folder.objects))


def _read_trackers(folder: MegatronFolder) -> dict[str, int]:
    """Return the counters of the loss scaler; 0 where they are not stored."""
    trackers = {"growth_tracker": 0, "hysteresis_tracker": 0}
    pending = [folder.common.get("optimizer")]
    while pending:
        node = pending.pop()
        if not isinstance(node, Mapping):
            pending += node if isinstance(node, list | tuple) else []
            continue
        scaler = node.get("grad_scaler")
        if isinstance(scaler, Mapping):
            return {
                name: value if type(value := scaler.get(name)) is int else default
                for name, default in trackers.items()
            }
        pending += [value for key, value in node.items() if key not in ("param_groups", "state")]
    return trackers


def _build_run(
    translated: TranslatedArgs, model: ModelConfig, tokenizer: TokenizerConfig, path: Path
) -> TrainRun:
    """Return the settings that the arguments correspond to; without those of training if some of
    them have no counterpart."""
    if translated.run is None:
        return release_run("megatron", model, tokenizer, path)
    return replace(translated.run, tokenizer=tokenizer)


def _find_tokenizer(
    translated: TranslatedArgs, args: Mapping[str, Any], vocab_size: int, path: Path
) -> tuple[TokenizerConfig, str | None]:
    """Return the tokenizer that the arguments name; if it is not available, a null tokenizer and
    the reason."""
    null_tokenizer = TokenizerConfig(kind="null", vocab_size=vocab_size)
    if translated.tokenizer is None:
        kind = args.get("tokenizer_type")
        return null_tokenizer, None if kind is None else (
            f"args.tokenizer_type={kind!r:.60} names no tokenizer whose files are supported, so "
            "text cannot be converted to tokens: set tokenizer.kind and tokenizer.path"
        )
    tokenizer = locate_copied_tokenizer(translated.tokenizer, path)
    if tokenizer.path is None or Path(tokenizer.path).exists():
        return tokenizer, None
    return null_tokenizer, (
        f"its tokenizer {tokenizer.path} does not exist here, so text cannot be converted to "
        f"tokens: copy its files into {path}"
    )


def _check_parameters(path: Path, rules: Sequence[TensorRule], model: ModelConfig) -> None:
    """Check that Megatron has tensors for every parameter of a model.

    Raises:
        CheckpointError: it has none for some parameters; all of them are named.
    """
    unmapped = {shard.name for shard in parameters(model)} - {rule.parameter for rule in rules}
    if unmapped:
        raise CheckpointError(
            f"{path}: Megatron's tensors for {show_names(sorted(unmapped))} are not known, so the "
            "model cannot be read. Export it to a Hugging Face folder with Megatron's tools, and "
            "use that one."
        )


class _BoxTable:
    """Tensors of a checkpoint and how their boxes are computed from Megatron tensors."""

    def __init__(self, path: Path, model: ModelConfig) -> None:
        self.path = path
        self.shards = {shard.name: shard for shard in parameters(model)}
        self.tensors: dict[str, StoredTensor] = {}
        self.sources: dict[str, Sequence[_RulePart | None]] = {}

    def add(
        self, rules: Iterable[TensorRule], tensors: Mapping[str, ChunkedTensor], prefix: str
    ) -> None:
        """Add the parameters that the rules fill from `tensors`, by name, as PREFIX + parameter.

        Raises:
            CheckpointError: a tensor has another shape than its rule, or an unsupported dtype, or
                only a part of a parameter is stored.
        """
        parts: dict[str, list[_RulePart]] = {}
        for rule in rules:
            if rule.parameter is not None and rule.name in tensors:
                parts.setdefault(rule.parameter, []).append(_RulePart(rule, tensors[rule.name]))
        problems = [problem for rows in parts.values() for problem in _find_problems(rows)]
        if problems:
            more = f"; and {len(problems) - 6} more" if len(problems) > 6 else ""
            raise CheckpointError(
                f"{self.path}: {'; '.join(problems[:6])}{more}. Use the folder as Megatron wrote "
                "it."
            )
        for parameter, rows in parts.items():
            self._add_parameter(self.shards[parameter], rows, f"{prefix}{parameter}")

    def _add_parameter(self, shard: Shard, rows: Sequence[_RulePart], key: str) -> None:
        dtype = rows[0].tensor.dtype
        for row in rows[1:]:
            dtype = torch.promote_types(dtype, row.tensor.dtype)
        filled: list[tuple[Box, _RulePart | None]] = [(row.rule.box, row) for row in rows]
        num_rows = max(box[0][1] for box, _ in filled)
        if num_rows < shard.shape[0]:  # padding of the vocabulary
            padding = ((num_rows, shard.shape[0]), *((0, size) for size in shard.shape[1:]))
            filled.append((padding, None))
        boxes = [
            (part, row) for box, row in filled for part in divide(box, BOX_NBYTES // dtype.itemsize)
        ]
        self.tensors[key] = StoredTensor(
            shard.shape,
            show_dtype(dtype),
            tuple(
                StoredBox(box, key, number, numel(box) * dtype.itemsize, "")
                for number, (box, _) in enumerate(boxes)
            ),
        )
        self.sources[key] = [row for _, row in boxes]


def _find_problems(rows: Sequence[_RulePart]) -> list[str]:
    """Return the problems of the tensors that fill one parameter."""
    problems = [
        f"{row.tensor.name} is {list(row.tensor.shape)}, expected {list(row.rule.shape)}"
        for row in rows
        if row.tensor.shape != row.rule.shape
    ]
    names = set(DTYPES.values())
    return problems + [
        f"{row.tensor.name} is stored as {show_dtype(row.tensor.dtype)}, expected one of "
        f"{', '.join(DTYPES)}"
        for row in rows
        if row.tensor.dtype not in names
    ]


def open_megatron(path: Path, *, vocab_size: int | None = None) -> MegatronCheckpoint:
    """Open one Megatron checkpoint (`iter_NNNNNNN`, `release`): its weights and its progress.

    vocab_size: number of tokens, if its args contain only the padded number.

    Raises:
        CheckpointError: it is damaged, incomplete, or its args describe a model that is not
            supported; all such args are named.
    """
    folder = read_megatron_folder(path)
    translated = translate_args(
        folder.common.get("args"), common=folder.common, name="megatron", tokenizer_vocab=vocab_size
    )
    args, model = read_fields(folder.common.get("args")), translated.require_model(str(path))
    tokenizer, tokenizer_problem = _find_tokenizer(translated, args, model.vocab_size, path)
    run = _build_run(translated, model, tokenizer, path)
    # the optimizer state is read on request: its problems do not affect the weights
    weights = {
        name: tensor for name, tensor in folder.tensors.items() if not _OPTIMIZER.match(name)
    }
    tensors = normalize_tensors(replace(folder, tensors=weights), model)
    rules = build_rules(MEGATRON, model)
    _check_parameters(path, rules, model)
    boxes = _BoxTable(path, model)
    boxes.add(rules, tensors, MODEL)
    files = {
        str(file.relative_to(path)): StoredFile(storage.file_nbytes(file))
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    problem, progress = None, dict[str, Any]()
    try:
        progress = read_progress(folder.common, args, path)
    except CheckpointError as error:
        problem = str(error)  # does not affect the weights
    step = progress["train"]["step"] if progress else 0
    source = {"path": str(path.absolute()), "format": folder.format}
    return MegatronCheckpoint(
        path=path,
        manifest=Manifest(step, _count_ranks(args), boxes.tensors, files),
        state={MEGATRON_SOURCE: source} | progress,
        config_text=dump_yaml(run),
        folder=folder,
        args=args,
        run=run,
        rules=rules,
        canonical_tensors=tensors,
        sources=boxes.sources,
        tokenizer_problem=tokenizer_problem,
        progress_problem=problem,
        unused_settings=tuple(_describe_unused_settings(translated, args)),
    )


TRAINING_ARGS = (
    "rampup_batch_size",
    "step_batch_size_schedule",
    "iterations_to_skip",
    "phase_transition_iterations",
    "renormalize_blend_weights",
    "fim_data",
    "mtp_detach_heads",
)
"""Args of batches, data and loss that have no setting."""


def _describe_unused_settings(translated: TranslatedArgs, args: Mapping[str, Any]) -> Iterable[str]:
    """Yield why the settings of a run are not those of its args."""
    if translated.run_problems:
        reasons = "; ".join(translated.run_problems[:MAX_PROBLEMS])
        what = "all settings" if translated.run is None else "some settings"
        yield f"{what} of training are defaults, because args cannot be used: {reasons}"
    unused = [
        f"args.{name}={value!r:.60}"
        for name in TRAINING_ARGS
        if (value := args.get(name)) is not None and value is not False and value not in ("", [])
    ]
    if unused:
        yield (
            f"no setting corresponds to {', '.join(unused)}, so a run with config.yaml continues "
            "without it"
        )


def _count_ranks(args: Mapping[str, Any]) -> int:
    """Return the number of ranks that saved a checkpoint; 1 if it is not stated."""
    ranks = args.get("world_size")
    return ranks if type(ranks) is int and 0 < ranks <= MAX_RANKS else 1


MAX_RANKS = 1 << 30
"""Limit of the number of ranks. Heuristic: more than any run has."""

SHOWN_ARGS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "num_experts",
    "seq_length",
    "padded_vocab_size",
    "params_dtype",
    "global_batch_size",
    "consumed_train_samples",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "context_parallel_size",
    "world_size",
)
"""Args that `describe` returns, where present."""


def read_progress(
    common: Mapping[str, Any], args: Mapping[str, Any], path: Path
) -> dict[str, Any]:  # JSON
    """Return the counters of the run in the form of `state.json`; empty for released weights.

    Raises:
        CheckpointError: a counter is missing or no number.
    """
    if path.name == RELEASE or common.get("iteration") == RELEASE:
        return {}
    step = _read_count(common, "iteration", path)
    rows = _read_count(args, "global_batch_size", path)
    consumed = _read_count(args, "consumed_train_samples", path, default=step * rows)
    skipped = _read_count(args, "skipped_train_samples", path, default=0)
    schedule = common.get("opt_param_scheduler") or common.get("lr_scheduler") or {}
    if not isinstance(schedule, Mapping):
        raise CheckpointError(
            f"{path}: its opt_param_scheduler is {schedule!r:.60}, expected a dict. Without it "
            "only the weights can be used: set checkpoint.load_mode=weights."
        )
    scheduled = _read_count(schedule, "num_steps", path, default=consumed - skipped)
    total = _read_count(args, "train_samples", path, default=0)
    total = total or _read_count(args, "train_iters", path, default=0) * rows
    train = {
        "step": step,
        "consumed_samples": consumed,
        "scheduled_samples": scheduled,
        "tokens": consumed * _read_count(args, "seq_length", path),
        "skipped": max(0, consumed - scheduled) // max(1, rows),
        "skipped_in_a_row": 0,
    }
    return {"train": train} | ({"order_samples": total} if total else {})


def _read_count(
    values: Mapping[str, Any], name: str, path: Path, *, default: int | None = None
) -> int:
    value = values.get(name, default)
    value = default if value is None else value
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CheckpointError(
            f"{path}: its {name} is {value!r:.60}, expected a count. Without it only the weights "
            "can be used: set checkpoint.load_mode=weights."
        )
    return value


# --- verification


def verify_megatron(path: Path) -> list[str]:
    """Return all problems of a Megatron checkpoint: hashes where it has them, file lengths, chunks
    that do not cover their tensors. Empty if it is intact."""
    problems = _find_hash_problems(path) if (path / INTEGRITY_FILE).exists() else []
    if problems:
        return problems
    try:
        opened = open_megatron(path)
        opened = opened.with_optimizer()
    except CheckpointError as error:
        return [str(error)]
    for key, tensor in opened.manifest.tensors.items():
        try:
            for stored in tensor.boxes:
                opened.read(key, stored.box)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _find_hash_problems(path: Path) -> list[str]:
    """Compare the files with the SHA-256 that integrity.json lists."""
    try:
        raw = storage.parse_json(storage.read_bytes(path / INTEGRITY_FILE))
        listed = raw.get("files", raw)
        hashes = {
            str(name): str(value.get("sha256") if isinstance(value, dict) else value)
            for name, value in listed.items()
        }
    except (OSError, ValueError, AttributeError) as error:
        return [f"{path / INTEGRITY_FILE} cannot be read ({error}). Copy the checkpoint again."]
    problems = []
    for name, expected in sorted(hashes.items()):
        if not _SHA256.fullmatch(expected):
            continue  # another field of the file
        file = path / name
        if not file.resolve().is_relative_to(path.resolve()):
            problems.append(f"{path / INTEGRITY_FILE} names {name}, which is outside the folder.")
            continue
        try:
            if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
                raise OSError("not a regular file")
            actual = sha256(storage.mapped(file, 0, storage.file_nbytes(file)))
        except OSError as error:
            problems.append(f"{file} cannot be read ({error}). Copy the checkpoint again.")
            continue
        if actual != expected:
            problems.append(
                f"hash mismatch in {name} (expected {expected}, got {actual}). Copy the file again."
            )
    return problems
