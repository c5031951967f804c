"""`megalith checkpoint`: what a checkpoint holds (`info`), and whether every byte of it is sound (`verify`)."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from megalith.cli.arguments import parse_options
from megalith.cli.output import print_json
from megalith.config.suggest import did_you_mean
from megalith.errors import CheckpointError, ConfigError


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """What a checkpoint holds: step, ranks that saved it, tensors, sizes. Reads no tensor."""

    path: Positional[str]
    """A step_NNNNNNN folder, or a run or checkpoints folder: then its newest one."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Read every byte: lengths, hashes, and tensors that are tensors. Exit code 1 if one is damaged."""

    path: Positional[str]
    """A step_NNNNNNN folder, or a run or checkpoints folder: then all of them."""
    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run `megalith checkpoint info|verify`."""
    actions = {"info": show_info, "verify": verify}
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: megalith checkpoint {{{','.join(actions)}}} PATH [--json]\n\n{__doc__}")
        return 0
    if argv[0] not in actions:
        advice = did_you_mean(argv[0], actions) or ""
        raise ConfigError(
            f"{argv[0]} is not something `megalith checkpoint` does.{advice} Use one of {', '.join(actions)}."
        )
    return actions[argv[0]](argv[1:])


def show_info(argv: list[str]) -> int:
    """Print what a checkpoint holds."""
    options = parse_options(InfoOptions, argv, prog="megalith checkpoint info")
    found = describe(newest_in(Path(options.path)))
    if options.json:
        print_json(found)
        return 0
    print(f"{found['path']}: step {found['step']:,}, saved by {found['world_size']} ranks, {found['nbytes']:,} bytes")
    print(f"  tensors     {found['tensors']:,} in {found['boxes']:,} boxes in {found['files']} files")
    print(f"  parameters  {found['parameters']:,}")
    for role, size in found["roles"].items():
        print(f"  {role:<11} {size['tensors']:,} tensors, {size['numel']:,} elements of {', '.join(size['dtypes'])}")
    return 0


def verify(argv: list[str]) -> int:
    """Print what is wrong with some checkpoints; 1 if anything is."""
    from megalith.checkpoint.load import verify_checkpoint

    options = parse_options(VerifyOptions, argv, prog="megalith checkpoint verify")
    found = {str(path): verify_checkpoint(path) for path in checkpoints_in(Path(options.path))}
    if options.json:
        print_json(found)
        return int(any(found.values()))
    for path, problems in found.items():
        print(f"{path}: {'sound' if not problems else f'{len(problems)} problems'}")
        for problem in problems:
            print(f"  {problem}")
    return int(any(found.values()))


def checkpoints_in(path: Path) -> list[Path]:
    """The checkpoint that `path` is, or those in it, oldest first, complete or not.

    Raises:
        CheckpointError: there is no such folder, or nothing in it that could be a checkpoint.
    """
    from megalith.checkpoint.format import MANIFEST, step_folders
    from megalith.checkpoint.load import open_checkpoint

    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder. Use a step_NNNNNNN folder, or the folder of a run.")
    if (path / MANIFEST).exists() or path.name.startswith("step_"):
        return [path]
    found = [each for folder in (path / "checkpoints", path) for each in step_folders(folder).values()]
    return found or [open_checkpoint(path).path]  # which says what the folder is instead


def newest_in(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest complete one in it.

    Raises:
        CheckpointError: there is none.
    """
    from megalith.checkpoint.load import find_latest

    found = checkpoints_in(path)
    return found[0] if found == [path] else find_latest(found[0].parent) or found[0]


def describe(path: Path) -> dict[str, Any]:  # JSON
    """Counts and sizes from the manifest."""
    from megalith.checkpoint.load import open_checkpoint

    opened = open_checkpoint(path)
    manifest, roles = opened.manifest, dict[str, dict[str, Any]]()
    for key, tensor in manifest.tensors.items():
        role = "weights" if key.startswith("model.") else key.split(".")[1]
        size = roles.setdefault(role, {"tensors": 0, "numel": 0, "dtypes": Counter[str]()})
        size["tensors"] += 1
        size["numel"] += prod(tensor.shape)
        size["dtypes"][tensor.dtype] += 1
    return {
        "path": str(path), "step": manifest.step, "world_size": manifest.world_size,
        "nbytes": sum(file.nbytes for file in manifest.files.values()), "files": len(manifest.files),
        "tensors": len(manifest.tensors), "boxes": sum(len(tensor.boxes) for tensor in manifest.tensors.values()),
        "parameters": roles.get("weights", {"numel": 0})["numel"],
        "roles": {role: size | {"dtypes": sorted(size["dtypes"])} for role, size in sorted(roles.items())},
        "state": sorted(opened.state),
    }  # fmt: skip
