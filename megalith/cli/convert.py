"""`megalith convert`: convert a Hugging Face model or a Megatron checkpoint to a checkpoint, and a
checkpoint or run to a Hugging Face folder or a Megatron checkpoint."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from tyro.conf import Positional

from megalith.cli.arguments import parse_options
from megalith.cli.output import print_json, print_warnings
from megalith.config.checkpoint import NewRowInit
from megalith.config.data import FILES
from megalith.config.moe import MoEConfig
from megalith.config.tree import load_yaml
from megalith.errors import CheckpointError, ConfigError, raise_all
from megalith.object_store import is_url
from megalith.storage import StoragePath

if TYPE_CHECKING:  # keep --help free of the torch import
    import torch

    from megalith.hf.convert import Move
    from megalith.hf.megatron_checkpoint import MegatronCheckpoint
    from megalith.hf.pretrained import Pretrained

Target = Literal["megalith", "huggingface", "peft", "megatron"]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Convert a Hugging Face model or a Megatron checkpoint to a Megalith checkpoint, or a
    checkpoint or run to a Hugging Face folder or a Megatron checkpoint.

    Only a few tensors are in memory at a time, and the target is written atomically. An interrupted
    conversion resumes when it is run again. A converted checkpoint has weights and a tokenizer: use
    it with `megalith generate`, as the recipe of `megalith train`, or as checkpoint.load of another
    run.
    """

    source: Positional[str]
    """Hugging Face folder, run, checkpoint, or Megatron folder (the checkpoint that its tracker
    names, or one iter_NNNNNNN folder)."""

    target: Positional[str]
    """Folder to write; it must not exist."""

    to: Target | None = None
    """Target format; default: the other one than that of the source (of Megatron: megalith). For
    a run that trained adapters, huggingface writes the whole model with merged adapters, and peft
    only the adapters in the format of the peft library. megatron writes a checkpoint that
    Megatron-LM loads, with the optimizer state if there is one."""

    step: int | None = None
    """For a Megatron folder: the iteration to convert; default: the one that its tracker names."""

    weights_only: bool = False
    """From or to a Megatron checkpoint: leave out the optimizer state, the step and the position in
    the data; default: a checkpoint from which a run continues."""

    base: str | None = None
    """For adapters: their base model; default: the one that the adapters name."""

    role: Literal["param", "ema"] = "param"
    """Weights to convert. param: those of the last step; ema: their moving average, for a run
    trained with train.ema."""

    family: str | None = None
    """Architecture of the Hugging Face folder to write, as a model_type such as llama or qwen2;
    default: the one from which the model was converted, else the first that supports it."""

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = None
    """Dtype of the written weights; default: unchanged."""

    shard_gb: float = 5.0
    """Maximum size of a file of a Hugging Face folder in GB; a single tensor may be larger."""

    pad_vocab_to_multiple_of: int | None = None
    """Pad the vocabulary of a new checkpoint to a multiple of this; default: 64, or unchanged."""

    vocab_size: int | None = None
    """Extend the vocabulary of a Hugging Face model to this number of tokens; default:
    unchanged."""

    new_rows: NewRowInit = "zero"
    """Initial value of new embedding and head rows (padding or new tokens): zero, or the mean of
    the existing rows."""

    upcycle: str | None = None
    """Upcycle a dense model to a mixture of experts: a YAML file with the settings of model.moe;
    see docs/howto/experts.md. Default: no upcycling."""

    upcycle_scale: Literal["spread", "down"] = "spread"
    """Where to apply the scale that makes the experts' sum equal to the dense MLP. spread: all
    matrices; down: the last one, which is exact for any activation."""

    upcycle_seed: int = 0
    """Random seed of new parameters such as routers."""

    workers: int = 2
    """Number of threads that read, hash and write. The output does not depend on it; each thread
    holds a tensor if tensors are cast or transposed."""

    restart: bool = False
    """Start again, even if an interrupted conversion to this target could be resumed."""

    take_over: bool = False
    """Also resume the work of a conversion that may still be running: one of another machine, or
    of this one before a reboot. The work of a running process of this machine is never taken
    over."""

    keep: bool = False
    """After a full disk or Ctrl-C, keep finished files for the next attempt; default: remove
    them. They are always kept if the conversion is killed, or if it resumed another one."""

    dry_run: bool = False
    """Only list the tensors and their conversion."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run `megalith convert`."""
    options = parse_options(ConvertOptions, argv, prog="megalith convert")
    raise_all(option_problems(options))
    import torch  # keep --help free of the torch import

    from megalith.hf.convert import (
        build_recipe,
        convert,
        describe_merged_adapters,
        list_written_tensors,
        plan_moves,
    )
    from megalith.hf.pretrained import find_export_family, mark_sources
    from megalith.hf.staging import Attempt, ConversionOptions, check_target
    from megalith.posttrain.export import plan_peft, plan_peft_moves, write_peft
    from megalith.posttrain.upcycle import describe_upcycled_sources, stored_weights

    target = Path(options.target)
    check_target(target)
    source, to = open_source(options)
    print_warnings(source)
    _print_unused_settings(source, to, options)
    dtype = None if options.dtype is None else getattr(torch, DTYPES[options.dtype])
    if to == "megatron":
        convert_to_megatron(source, target, dtype, options)
        return 0
    if to == "peft":
        planned = plan_peft_moves(source, dtype)
        nbytes = 0 if options.dry_run else write_peft(target, source, dtype=dtype)
        modules = [part.module for part in plan_peft(source)]
        print_adapter_result(str(source.path), str(target), modules, planned, nbytes, options)
        return 0
    moves = describe_upcycled_sources(source, plan_moves(source, to, dtype))
    nbytes = sum(move.nbytes for move in moves)
    if not options.dry_run:
        largest = int(options.shard_gb * 1e9)
        recipe = build_recipe(
            source, to, dtype=dtype, shard_nbytes=largest, new_rows=options.new_rows
        )
        attempt = Attempt(recipe, options.restart, options.take_over, options.keep)
        with mark_sources([source]), show_progress(nbytes) as advance:
            writing = ConversionOptions(dtype, advance, options.workers, attempt)
            nbytes = convert(source, target, to, writing, shard_nbytes=largest)
    report = {
        "source": str(source.path),
        "target": str(target),
        "to": to,
        "dry_run": options.dry_run,
        "nbytes": nbytes,
    }
    report["written"], report["left_out"] = (
        len(list_written_tensors(moves)),
        sum(not move.nbytes for move in moves),
    )
    report["merged"] = describe_merged_adapters(stored_weights(source), moves)
    # Only a tokenizer read from files can go into a Hugging Face folder; a checkpoint's config.yaml
    # names any kind.
    report["tokenizer"] = (
        source.tokenizer.kind if to == "megalith" or source.tokenizer.kind in FILES else None
    )
    verb = "chat" if source.tuning() and report["tokenizer"] else "generate"
    family = find_export_family(source) if to == "huggingface" else None
    unknown = family.architecture if family is not None and not family.in_transformers else None
    show(
        {**report, "tensors": [asdict(move) for move in moves]},
        json=options.json,
        verb=verb,
        unknown=unknown,
    )
    return 0


def _print_unused_settings(source: "Pretrained", to: Target, options: ConvertOptions) -> None:
    """Print which training settings of a Megatron checkpoint are not converted, if any is
    converted, to standard error."""
    from megalith.hf.megatron_checkpoint import MegatronCheckpoint

    checkpoint = source.checkpoint
    writes_settings = to in ("megalith", "megatron") and not options.weights_only
    if isinstance(checkpoint, MegatronCheckpoint) and writes_settings:
        for line in checkpoint.unused_settings:
            print(f"{source.path}: {line}", file=sys.stderr)


def convert_to_megatron(
    source: "Pretrained", target: Path, dtype: "torch.dtype | None", options: ConvertOptions
) -> None:
    """Write a Megatron checkpoint, unless --dry-run is given, and print the result."""
    from megalith.hf.convert import build_recipe, list_written_tensors
    from megalith.hf.megatron_write import plan_export, plan_megatron_moves, write_megatron
    from megalith.hf.pretrained import mark_sources
    from megalith.hf.staging import Attempt, ConversionOptions

    plan = plan_export(source, dtype, weights_only=options.weights_only)
    moves = plan_megatron_moves(plan, source)
    if not options.dry_run:
        recipe = build_recipe(
            source, "megatron", dtype=dtype, shard_nbytes=0, new_rows=options.new_rows
        )
        recipe = {**recipe, "weights only": str(options.weights_only)}
        attempt = Attempt(recipe, options.restart, options.take_over, options.keep)
        with mark_sources([source]), show_progress(plan.nbytes) as advance:
            writing = ConversionOptions(dtype, advance, options.workers, attempt)
            write_megatron(target, source, plan, writing)
    tensors, size = [asdict(move) for move in moves], _size(plan.nbytes)
    count, contents = f"{len(list_written_tensors(moves))} tensors", plan.describe()
    report = {
        "source": str(source.path),
        "target": str(target),
        "to": "megatron",
        "dry_run": options.dry_run,
        "nbytes": plan.nbytes,
    }
    if options.json:
        print_json({**report, "contents": contents, "tensors": tensors})
    elif options.dry_run:
        _list(tensors)
        print(f"{count}, {size}, {contents}; nothing was written")
    else:
        print(f"wrote {target}: {count}, {size}, {contents}, from {source.path}")
        print(f"try: pretrain_gpt.py --load {target} --use-checkpoint-args ...")


def open_source(options: ConvertOptions) -> tuple["Pretrained", Target]:
    """Open the source without reading weights, and return it with the target format.

    Raises:
        ConfigError: options do not fit the source.
    """
    from megalith.hf.convert import source_format
    from megalith.hf.megatron_checkpoint import MegatronCheckpoint
    from megalith.hf.pretrained import check_has_adapters, open_pretrained
    from megalith.posttrain.upcycle import upcycle

    source = open_pretrained(_locate_source(options), base=options.base, role=options.role)
    if options.base is not None:
        check_has_adapters(source, options.base)
    kind = source_format(source)
    megatron = source.checkpoint if isinstance(source.checkpoint, MegatronCheckpoint) else None
    is_checkpoint = kind == "megalith" and options.upcycle is None and megatron is None
    to: Target = options.to or ("huggingface" if is_checkpoint else "megalith")
    if megatron is not None and to in ("megalith", "megatron") and options.upcycle is None:
        source = source if options.weights_only else _with_optimizer(source, megatron)
    if options.pad_vocab_to_multiple_of is not None:
        if kind == "megalith" or to == "huggingface":
            raise ConfigError(
                f"--pad-vocab-to-multiple-of={options.pad_vocab_to_multiple_of} applies to "
                "checkpoints "
                "converted from Hugging Face folders, whose vocabulary is not padded. Remove it."
            )
        source = replace(
            source,
            model=replace(source.model, pad_vocab_to_multiple_of=options.pad_vocab_to_multiple_of),
        )
    source = with_vocabulary(source, options, to)
    if options.upcycle is not None:
        moe, seed = load_yaml(options.upcycle, MoEConfig), options.upcycle_seed
        source = upcycle(source, moe, scale=options.upcycle_scale, seed=seed)
    if options.family is not None:
        source = _with_family(source, options.family, to)
    return source, to


def _locate_source(options: ConvertOptions) -> StoragePath:
    """Return the folder of the source.

    Raises:
        ConfigError: --step is given, and the source is not a Megatron folder.
    """
    from megalith.hf.megatron_checkpoint import locate_megatron
    from megalith.hf.pretrained import locate_source

    if options.step is None:
        return locate_source(options.source)
    if is_url(options.source):
        return locate_source(f"{options.source.rstrip('/')}/iter_{options.step:07d}")
    path = locate_megatron(Path(options.source), options.step)
    if path is None:
        raise ConfigError(
            f"--step={options.step} selects an iteration of a Megatron folder, and "
            f"{options.source} is not one. Remove --step, or pass the folder of the checkpoint."
        )
    return path


def _with_optimizer(source: "Pretrained", checkpoint: "MegatronCheckpoint") -> "Pretrained":
    """Return a Megatron source with its optimizer state.

    Raises:
        CheckpointError: that cannot be read.
    """
    from megalith.hf.pretrained import CheckpointWeights

    try:
        return replace(source, weights=CheckpointWeights(checkpoint.with_optimizer()))
    except CheckpointError as error:
        raise CheckpointError(f"{error} Or pass --weights-only.") from error


def _with_family(source: "Pretrained", name: str, to: Target) -> "Pretrained":
    """Return the model to be written as another architecture.

    Raises:
        ConfigError: there is no such family, or no Hugging Face folder is written from a
        checkpoint.
    """
    from megalith.hf.convert import source_format
    from megalith.hf.folder import HFSource, find_family_by_name

    if to in ("megalith", "megatron") or source_format(source) == "huggingface":
        raise ConfigError(
            f"--family={name} selects the architecture of a Hugging Face folder that is written "
            "from a checkpoint or "
            f"run. Remove it, or convert {source.path} to a checkpoint first."
        )
    family = find_family_by_name(name, setting="--family")
    if source.hf_source is not None and source.hf_source.family is family:
        return source
    return replace(source, hf_source=HFSource(family, {}))


def with_vocabulary(source: "Pretrained", options: ConvertOptions, to: Target) -> "Pretrained":
    """Return the source with the requested vocabulary size and new rows.

    Raises:
        ConfigError, CheckpointError: the source has tables of its own, or nothing would grow.
    """
    from megalith.hf.convert import source_format
    from megalith.hf.pretrained import add_rows

    size = options.vocab_size
    if size is not None:
        if source_format(source) == "megalith" or size < source.model.vocab_size:
            raise ConfigError(
                f"--vocab-size={size}: {source.path} has {source.model.vocab_size} tokens, and "
                "only the vocabulary of a Hugging Face folder can be extended. Use at least as "
                "many "
                "tokens with such a folder, or remove it."
            )
        source = replace(source, model=replace(source.model, vocab_size=size))
    if options.new_rows != "zero":
        padded = (
            replace(source.model, pad_vocab_to_multiple_of=1)
            if to == "huggingface"
            else source.model
        )
        add_rows(source, padded, options.new_rows, setting=f"--new-rows={options.new_rows}")
    return source


def option_problems(options: ConvertOptions) -> list[str]:
    """Return errors of invalid options."""
    problems = []
    if not 0 < options.shard_gb < math.inf:
        problems.append(f"--shard-gb={options.shard_gb} must be above 0. Use 5.")
    if options.workers < 1:
        problems.append(
            f"--workers={options.workers} must be at least 1. Use 2, or as many as there are cores."
        )
    if options.pad_vocab_to_multiple_of is not None and options.pad_vocab_to_multiple_of < 1:
        problems.append(
            f"--pad-vocab-to-multiple-of={options.pad_vocab_to_multiple_of} must be at least 1. "
            "Use 64."
        )
    given = {"scale": (options.upcycle_scale, "spread"), "seed": (options.upcycle_seed, 0)}
    problems += [
        f"--upcycle-{name}={value} needs --upcycle. Set --upcycle to a YAML "
        f"file with the settings of model.moe, or remove it."
        for name, (value, default) in given.items()
        if options.upcycle is None and value != default
    ]
    if options.restart and options.take_over:
        problems.append(
            f"--restart={options.restart} with --take-over={options.take_over}: one starts again, "
            "the other resumes. "
            f"Use one of them."
        )
    if options.to == "peft":
        problems += [
            f"--{name}=True with --to=peft: adapters are written in one step. Remove it."
            for name in ("restart", "take-over", "keep")
            if getattr(options, name.replace("-", "_"))
        ]
    if options.upcycle is not None and options.to == "peft":
        problems.append(
            f"--upcycle={options.upcycle} with --to=peft: adapters have no experts. Use --to "
            "megalith."
        )
    return problems


@contextmanager
def show_progress(total: int, *, name: str = "convert") -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; yields the function that adds written bytes to it."""
    console = Console(stderr=True)
    columns = (
        TextColumn(name),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task(name, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


def print_adapter_result(
    source: str,
    target: str,
    modules: list[str],
    moves: "list[Move]",
    nbytes: int,
    options: ConvertOptions,
) -> None:
    """Print the result of a conversion of adapters, or of a dry run."""
    if options.json:
        report = {
            "source": source,
            "target": target,
            "to": "peft",
            "dry_run": options.dry_run,
            "nbytes": nbytes,
        }
        print_json({**report, "modules": modules, "tensors": [asdict(move) for move in moves]})
        return
    if options.dry_run:
        _list(asdict(move) for move in moves)
        size = f"{sum(move.nbytes for move in moves) / 1e6:.3g} MB"
        print(f"{len(modules)} linear layers with adapters, {size}; nothing was written")
        return
    print(
        f"wrote {target}: adapters of {len(modules)} linear layers, {_size(nbytes)}, from {source}"
    )
    print(f"try: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), {target!r})")


def show(
    report: dict[str, Any], *, json: bool, verb: str, unknown: str | None = None
) -> None:  # Any: JSON
    """Print the result of a conversion, or the table of a dry run; `verb`: command to suggest
    next; `unknown`: the architecture, if transformers does not have it."""
    if json:
        print_json(report)
        return
    tensors, size = report["tensors"], _size(report["nbytes"])
    count = f"{report['written']} tensors"
    count += f", {report['left_out']} skipped" if report["left_out"] else ""
    if not report["dry_run"]:
        print(f"wrote {report['target']}: {count}, {size}, from {report['source']}")
        if unknown is not None:
            print(
                f"transformers has no class for {unknown}: from_pretrained reads the folder only "
                "with auto_map in "
                f"config.json and the code files of the published model beside it"
            )
        if report["tokenizer"] is None:
            print(
                "the model has no tokenizer files, so the folder has no tokenizer: programs that "
                "read it must convert text to ids themselves"
            )
        else:
            print(f"try: megalith {verb} {report['target']}")
        return
    _list(tensors)
    merged = "" if report["merged"] is None else f", {report['merged']}"
    print(f"{count}, {size}{merged}; nothing was written")


def _list(moves: Iterable[dict[str, Any]]) -> None:  # Any: JSON
    for move in moves:
        dtype = move["source_dtype"]
        dtype += "" if dtype == move["target_dtype"] else f" -> {move['target_dtype']}"
        print(f"{move['source']} -> {move['target']}  {move['shape']} {dtype}")


def _size(nbytes: int) -> str:
    """Format a size: 87900 -> `87.9 kB`."""
    unit, name = next(
        ((u, n) for u, n in ((10**9, "GB"), (10**6, "MB")) if nbytes >= 0.9995 * u), (10**3, "kB")
    )
    return f"{nbytes / unit:.3g} {name}"
