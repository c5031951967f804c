"""`megalith checkpoint`: show the contents of a checkpoint (`info`), verify its files
(`verify`), compare two (`diff`), list (`list`), delete (`prune`) and copy (`copy`) checkpoints,
average the weights of several (`average`), merge models that were fine-tuned from one base
(`merge`)."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from megalith import storage
from megalith.cli.arguments import parse_options
from megalith.cli.output import print_json
from megalith.config.train import list_checkpoint_folders
from megalith.errors import CheckpointError, ConfigError, did_you_mean
from megalith.object_store import StorePath
from megalith.storage import StoragePath, parse_path

if TYPE_CHECKING:  # imports torch
    from megalith.checkpoint.inspect import TensorComparison
    from megalith.checkpoint.load import Checkpoint


@dataclass(frozen=True, kw_only=True)
class CheckpointInfoOptions:
    """Show the contents of a checkpoint: step, world size, tensors, sizes. Reads tensors only
    with --values."""

    path: Positional[str]
    """A step_NNNNNNN folder; or a run, its name under runs/, or a checkpoints folder: the latest
    checkpoint in it. Or a Megatron checkpoint, or a folder of them; or the URL of a step or of
    checkpoint.folder in an object store."""
    only: str | None = None
    """List the tensors whose names match this pattern: "*" for all, model.* for all weights."""
    values: bool = False
    """Read these tensors, by default all, and show statistics of their values."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, kw_only=True)
class CheckpointVerifyOptions:
    """Verify checkpoints by reading every byte: file lengths, hashes and tensor formats. Exit
    code 1 if one is damaged."""

    path: Positional[str]
    """A step_NNNNNNN folder; or a run, its name under runs/, or a checkpoints folder: all
    checkpoints in it. Also the URL of a step or of checkpoint.folder in an object store."""
    deep: bool = False
    """Also check all values: tensors with NaN or infinite elements count as damaged."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, kw_only=True)
class CheckpointDiffOptions:
    """Compare the values of two checkpoints, which may have different layouts. Exit code 0 if
    they are equal, 1 if not."""

    a: Positional[str]
    """A step_NNNNNNN folder; or a run, its name under runs/, or a checkpoints folder: the latest
    checkpoint in it. Or a Megatron checkpoint, or a folder of them; or the URL of a step or of
    checkpoint.folder in an object store."""
    b: Positional[str]
    """Checkpoint to compare with, as the first."""
    atol: float = 0.0
    """Absolute tolerance: elements that differ by at most this are equal."""
    only: str = "*"
    """Pattern of tensor names: model.* for all weights, optimizer.exp_avg.* for the first
    moments."""
    json: bool = False
    """Print one JSON document."""


SUBCOMMANDS = {
    "info": "show step, tensors and sizes of a checkpoint",
    "verify": "compare every byte of checkpoints with its hash",
    "diff": "compare the values of two checkpoints, in any layouts",
    "list": "list the checkpoints of a run",
    "prune": "delete old checkpoints of a run",
    "copy": "copy a checkpoint and verify its hashes",
    "average": "average the weights of checkpoints of one model",
    "merge": "merge models that were fine-tuned from one base (task vectors, TIES)",
}
"""Subcommand -> description in the help."""


def main(argv: list[str]) -> int:
    """Run a subcommand of `megalith checkpoint`."""
    from megalith.cli import checkpoint_edit as edit

    actions = {"info": show_info, "verify": verify, "diff": diff, "list": edit.list_all}
    actions |= {"prune": edit.prune, "copy": edit.copy}
    actions |= {"average": edit.average, "merge": edit.merge}
    if not argv or argv[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:<9}{text}" for name, text in SUBCOMMANDS.items())
        print(f"usage: megalith checkpoint {{{','.join(actions)}}} PATH ... [--json]\n\n{rows}")
        return 0
    if argv[0] not in actions:
        advice = did_you_mean(argv[0], actions) or ""
        raise ConfigError(
            f"{argv[0]} is not a subcommand of `megalith checkpoint`.{advice} Use one of "
            f"{', '.join(actions)}."
        )
    return actions[argv[0]](argv[1:])


def show_info(argv: list[str]) -> int:
    """Print the contents of a checkpoint."""
    options = parse_options(CheckpointInfoOptions, argv, prog="megalith checkpoint info")
    path = find_latest_checkpoint(find_folder(options.path))
    info = describe(path)
    if options.only is not None or options.values:
        info["listed"] = listed(path, options.only or "*", values=options.values)
    if options.json:
        print_json(info)
        return 0
    print(
        f"{info['path']}: step {info['step']:,}, saved by {info['world_size']} ranks, "
        f"{info['nbytes']:,} bytes"
    )
    print(f"  tensors     {info['tensors']:,} in {info['boxes']:,} boxes in {info['files']} files")
    print(f"  parameters  {info['parameters']:,}")
    for role, size in info["roles"].items():
        print(
            f"  {role:<11} {size['tensors']:,} tensors, {size['numel']:,} elements of "
            f"{', '.join(size['dtypes'])}"
        )
    if "megatron" in info:
        _print_megatron(info["megatron"])
    for tensor in info.get("listed", []):
        print(f"  {_describe_tensor(tensor)}")
    return 0


def _print_megatron(info: dict[str, Any]) -> None:  # JSON
    """Print what `MegatronCheckpoint.describe` returns."""
    print(f"  format      {info['format']}, checkpoint_version {info['checkpoint_version']}")
    print(f"  optimizer   {info['optimizer'] or 'none'}")
    if info["optimizer_problem"] is not None:
        print(f"  cannot read {info['optimizer_problem']}")
    for name, value in info["args"].items():
        print(f"  args        {name}={value}")


def listed(path: StoragePath, only: str, *, values: bool) -> list[dict[str, Any]]:  # JSON
    """Return shape, dtype and number of boxes of the tensors that match a pattern; with `values`
    also statistics.

    Raises:
        CheckpointError: none fits, or a file is damaged.
    """
    from megalith.checkpoint.inspect import compute_statistics, match_tensor_names

    opened = open_any(path)
    tensors = {name: opened.manifest.tensors[name] for name in match_tensor_names(opened, only)}
    return [
        {
            "name": name,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype,
            "boxes": len(tensor.boxes),
        }
        | (asdict(compute_statistics(opened, name)) if values else {})
        for name, tensor in tensors.items()
    ]


def _describe_tensor(tensor: dict[str, Any]) -> str:  # JSON
    text = f"{tensor['name']}  {tensor['shape']} {tensor['dtype']} in {tensor['boxes']} boxes"
    if "mean" not in tensor:
        return text
    spread = ", ".join(f"{word} {tensor[word]:.4g}" for word in ("mean", "std", "least", "largest"))
    lost = f", {tensor['not_finite']:,} not finite" if tensor["not_finite"] else ""
    return f"{text}: {spread}{lost}"


def verify(argv: list[str]) -> int:
    """Print the problems of checkpoints; return 1 if there are any."""
    from megalith.checkpoint.inspect import list_nonfinite_tensors

    options = parse_options(CheckpointVerifyOptions, argv, prog="megalith checkpoint verify")
    paths = {str(path): path for path in list_checkpoints(find_folder(options.path))}
    problems_by_path = {name: find_problems(path) for name, path in paths.items()}
    if options.deep:
        problems_by_path |= {
            path: list_nonfinite_tensors(open_any(paths[path]))
            for path, problems in problems_by_path.items()
            if not problems
        }
    if options.json:
        print_json(problems_by_path)
        return int(any(problems_by_path.values()))
    for path, problems in problems_by_path.items():
        print(f"{path}: {'valid' if not problems else f'{len(problems)} problems'}")
        for problem in problems:
            print(f"  {problem}")
        for warning in [] if problems else open_any(paths[path]).warnings():
            print(f"  warning: {warning}")
    return int(any(problems_by_path.values()))


def find_problems(path: StoragePath) -> list[str]:
    """Return all problems of one checkpoint; empty if it is intact."""
    from megalith.checkpoint.load import verify_checkpoint
    from megalith.checkpoint.readers import mark_reading
    from megalith.hf.megatron_checkpoint import is_megatron, verify_megatron

    try:
        if not is_megatron(path):
            with mark_reading(path):
                return verify_checkpoint(path)
    except CheckpointError as error:  # an interrupted save, or a format that is not read
        return [str(error)]
    return verify_megatron(path)


def diff(argv: list[str]) -> int:
    """Print which tensors of two checkpoints differ, and by how much; return 1 if any does."""
    from megalith.checkpoint.inspect import compare_checkpoints
    from megalith.checkpoint.readers import mark_reading

    options = parse_options(CheckpointDiffOptions, argv, prog="megalith checkpoint diff")
    if not 0 <= options.atol < math.inf:
        raise ConfigError(
            f"--atol={options.atol} must be a finite number of at least 0. Use for example --atol "
            "1e-6."
        )
    opened = [
        _open_readable(find_latest_checkpoint(find_folder(name)), options.only)
        for name in (options.a, options.b)
    ]
    (a, problem_a), (b, problem_b) = opened
    problems = {
        str(each.path): text for each, text in ((a, problem_a), (b, problem_b)) if text is not None
    }
    with mark_reading(a.path), mark_reading(b.path):
        comparisons = [
            each
            for each in compare_checkpoints(a, b, atol=options.atol, only=options.only)
            if not problems or each.name.startswith("model.")
        ]
    differing = [each for each in comparisons if each.kind != "same"]
    same = len(comparisons) - len(differing)
    summary = _summarize(comparisons)
    if options.json:
        print_json(
            {
                "a": str(a.path),
                "b": str(b.path),
                "step_a": a.step,
                "step_b": b.step,
                "atol": options.atol,
                "same": same,
                "different": [
                    asdict(each) | {"largest": _finite(each.largest)} for each in differing
                ],
                "summary": [asdict(each) | {"largest": _finite(each.largest)} for each in summary],
                "problems": problems,
            }
        )
        return int(bool(differing or problems))
    print(f"a: {a.path}, step {a.step:,}\nb: {b.path}, step {b.step:,}")
    for each in differing:
        print(f"  {each.name}: {_describe_difference(each)}")
    print(f"{same} tensors are equal, {len(differing)} differ")
    for role in summary:
        print(f"  {role.describe()}")
    for path, problem in problems.items():
        print(f"the optimizer state was not compared, because that of {path} cannot be read:")
        print(f"  {problem}")
    return int(bool(differing or problems))


def _open_readable(path: StoragePath, only: str) -> tuple["Checkpoint", str | None]:
    """Open a checkpoint, and return why its optimizer state cannot be read; None if it can, or if
    `only` names none of it. The weights of a Megatron checkpoint can often be read without it.

    Raises:
        CheckpointError: the weights cannot be read.
    """
    from megalith.hf.megatron_checkpoint import is_megatron, open_megatron

    if not is_megatron(path):
        return open_any(path), None
    if only.startswith("model."):
        return open_megatron(path), None
    try:
        return open_any(path), None
    except CheckpointError as error:
        return open_megatron(path), str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSummary:
    """How the tensors of one role differ between two checkpoints."""

    role: str
    """`weights`, or a part of the optimizer state."""
    tensors: int
    different: int
    """Tensors whose values or shapes differ."""
    missing: int
    """Tensors that only one of the checkpoints has."""
    numel: int
    """Elements that were compared."""
    differing: int
    """Elements that differ by more than the tolerance."""
    largest: float
    """Largest absolute difference."""
    largest_in: str | None
    """Tensor with the largest difference; None: there is no difference."""

    def describe(self) -> str:
        """Return the line that `diff` prints."""
        missing = f", {self.missing} only in one" if self.missing else ""
        counts = f"{self.role:<11} {self.different:,} of {self.tensors:,} tensors differ{missing}"
        if not self.differing:
            return counts
        share = f"{self.differing:,} of {self.numel:,} elements ({self.differing / self.numel:.3g})"
        return f"{counts}: {share}, by {self.largest:.3g} at most, in {self.largest_in}"


def _summarize(comparisons: Sequence["TensorComparison"]) -> list[RoleSummary]:
    """Return one summary for the weights and for each part of the optimizer state."""
    roles: dict[str, list[TensorComparison]] = {}
    for each in comparisons:
        roles.setdefault(tensor_role(each.name), []).append(each)
    return [_summarize_role(role, members) for role, members in sorted(roles.items())]


def _summarize_role(role: str, members: Sequence["TensorComparison"]) -> RoleSummary:
    most = max(members, key=lambda each: each.largest)
    kinds = Counter(each.kind for each in members)
    return RoleSummary(
        role=role,
        tensors=len(members),
        different=kinds["values"] + kinds["shape"],
        missing=kinds["only in a"] + kinds["only in b"],
        numel=sum(each.numel for each in members),
        differing=sum(each.differing for each in members),
        largest=most.largest,
        largest_in=most.name if most.largest else None,
    )


def tensor_role(key: str) -> str:
    """Return the role of a tensor in a checkpoint: `weights`, or the name of a part of the
    optimizer state."""
    return "weights" if key.startswith("model.") else key.split(".")[1]


def _describe_difference(tensor: "TensorComparison") -> str:
    if tensor.kind == "values":
        types = "" if tensor.a == tensor.b else f" ({tensor.a} and {tensor.b})"
        return (
            f"{tensor.differing:,} of {tensor.numel:,} elements differ, by {tensor.largest:.3g} "
            f"at most{types}"
        )
    return (
        f"{tensor.a} in a, {tensor.b} in b"
        if tensor.kind == "shape"
        else f"{tensor.kind} ({tensor.a or tensor.b})"
    )


def _finite(value: float) -> float | None:
    """Return None for infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def find_folder(name: str) -> StoragePath:
    """Return the folder for a path, a URL, or the name of a run under runs/.

    Raises:
        CheckpointError: there is no such folder.
    """
    from megalith.hf.megatron_checkpoint import locate_megatron

    runs, given = Path("runs"), parse_path(name)
    if isinstance(given, StorePath):
        return _find_in_store(given)
    for path in (given, runs / name):
        if path.is_dir():
            return path
    locate_megatron(Path(name))  # an iteration that does not exist: the error lists the others
    if Path(name).exists():
        raise CheckpointError(f"{name} is a file. Use its folder, or the folder of a run.")
    runs_in_folder = (
        sorted(path.name for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    )
    advice = did_you_mean(name, runs_in_folder) or (
        f" Runs: {', '.join(runs_in_folder)}." if runs_in_folder else ""
    )
    raise CheckpointError(
        f"{name}: no such folder, neither in the working directory nor in {runs}/.{advice} Use a "
        "step_NNNNNNN folder, or a run."
    )


def _find_in_store(path: StorePath) -> StoragePath:
    """Return a URL of checkpoints as it is, and of a Megatron folder a local copy.

    Raises:
        CheckpointError: the store cannot be read, or it is a Hugging Face folder.
    """
    from megalith.hf.store_source import download_foreign_folder, is_hugging_face

    try:
        if is_hugging_face(path):
            raise CheckpointError(
                f"{path} is a Hugging Face model, not a checkpoint. Convert it first: megalith "
                f"convert {path} OUT --to megalith."
            )
        return download_foreign_folder(path) or path
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error


def list_checkpoints(path: StoragePath) -> list[StoragePath]:
    """Return the checkpoint at `path`, or all checkpoints in this folder, oldest first, including
    incomplete ones.

    Raises:
        CheckpointError: there is nothing in it that could be a checkpoint.
    """
    from megalith.checkpoint.format import MANIFEST, step_folders
    from megalith.checkpoint.iterations import list_iterations
    from megalith.checkpoint.load import open_checkpoint
    from megalith.checkpoint.manifest import find_saved_again
    from megalith.hf.megatron_checkpoint import locate_megatron

    if storage.exists(path / MANIFEST) or path.name.startswith("step_"):
        return [find_saved_again(path)]
    if isinstance(path, Path) and (megatron := locate_megatron(path)) is not None:
        return [megatron] if megatron == path else list(list_iterations(path).values())
    folders = [*list_checkpoint_folders(path), path]
    checkpoints = [each for folder in folders for each in step_folders(folder).values()]
    return checkpoints or [open_checkpoint(path).path]  # raises an error about the folder


def find_latest_checkpoint(path: StoragePath) -> StoragePath:
    """Return the checkpoint at `path`, or the latest complete one in this folder.

    Raises:
        CheckpointError: there is none.
    """
    from megalith.checkpoint.load import find_latest
    from megalith.hf.megatron_checkpoint import locate_megatron

    if isinstance(path, Path) and (megatron := locate_megatron(path)) is not None:
        return megatron
    checkpoints = list_checkpoints(path)
    if checkpoints == [path] or path.name.startswith("step_"):
        return checkpoints[0]
    return find_latest(checkpoints[0].parent) or checkpoints[0]


def open_any(path: StoragePath) -> "Checkpoint":
    """Open a Megalith checkpoint, or a Megatron checkpoint with its optimizer state.

    Raises:
        CheckpointError: it is damaged or incomplete, or cannot be read.
    """
    from megalith.checkpoint.load import open_checkpoint
    from megalith.hf.megatron_checkpoint import is_megatron, open_megatron

    return open_megatron(path).with_optimizer() if is_megatron(path) else open_checkpoint(path)


def describe(path: StoragePath) -> dict[str, Any]:  # JSON
    """Return counts and sizes from the manifest."""
    from megalith.hf.megatron_checkpoint import MegatronCheckpoint, is_megatron, open_megatron

    problem = None
    try:
        opened = open_any(path)
    except CheckpointError as error:
        if not is_megatron(path):
            raise
        # the weights can often be read without the optimizer state
        opened, problem = open_megatron(path), str(error)
    manifest, roles = opened.manifest, dict[str, dict[str, Any]]()
    for key, tensor in manifest.tensors.items():
        size = roles.setdefault(
            tensor_role(key), {"tensors": 0, "numel": 0, "dtypes": Counter[str]()}
        )
        size["tensors"] += 1
        size["numel"] += prod(tensor.shape)
        size["dtypes"][tensor.dtype] += 1
    return {
        "path": str(path),
        "step": manifest.step,
        "world_size": manifest.world_size,
        "nbytes": sum(file.nbytes for file in manifest.files.values()),
        "files": len(manifest.files),
        "tensors": len(manifest.tensors),
        "boxes": sum(len(tensor.boxes) for tensor in manifest.tensors.values()),
        "parameters": roles.get("weights", {"numel": 0})["numel"],
        "roles": {
            role: size | {"dtypes": sorted(size["dtypes"])} for role, size in sorted(roles.items())
        },
        "state": sorted(opened.state),
    } | (
        {"megatron": opened.describe() | {"optimizer_problem": problem}}
        if isinstance(opened, MegatronCheckpoint)
        else {}
    )
