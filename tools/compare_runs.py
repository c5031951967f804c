"""Train eight tiny runs in two checkouts on this machine and compare all that they compute, bit by
bit.

usage: compare_runs.py OLD NEW [--only NAME ...] [--steps N] [--python FILE] [--keep FOLDER]

OLD and NEW are checkouts of this repository. The runs cover dense layers under tensor and sequence
parallelism, a pipeline with ZeRO 1, context parallelism with packed documents, ZeRO 3, experts,
latent attention with multi-token prediction, LoRA on conversations, and fp16. Compared are every
row of metrics.jsonl without its times, the training state, and the checksum of every stored box:
weights, fp32 master weights and moments. Each run evaluates, saves half way and is resumed once, so
that loading is covered too.

Settings are written below by their names at OLD's oldest supported commit. A checkout with the file
`megalith/config/renamed.yaml` gets them by their new names, and what it writes is translated by the
same table. The runs of an unmodified OLD are kept in a temporary folder for the next comparison.
Ends with 1 if any value differs.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

RENAMED = Path("megalith/config/renamed.yaml")
TIMED = (
    "tokens_per_second",
    "step_ms",
    "tflops_per_device",
    "mfu",
    "hfu",
    "memory_gib",
    "time_utc",
    "eval_seconds",
)
"""Fields of metrics.jsonl that depend on the machine."""

DENSE: dict[str, Any] = {
    "model.vocab_size": 257,
    "model.hidden_size": 64,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.ffn_hidden_size": 160,
    "model.max_seq_len": 128,
    "data.mock": True,
    "data.mock_num_documents": 200,
    "data.mock_max_tokens": 96,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 2,
    "train.seq_len": 64,
    "train.eval_steps": 1,
    "schedule.lr": 1e-3,
    "schedule.min_lr": 1e-4,
    "schedule.warmup_steps": 2,
}
EXPERTS: dict[str, Any] = {
    "model.moe.experts": 4,
    "model.moe.top_k": 2,
    "model.moe.ffn_hidden_size": 32,
    "model.moe.shared_ffn_hidden_size": 32,
    "model.moe.layers": [False, True, True, True],
    "model.moe.balance.batch": 0.01,
    "model.moe.balance.z": 1e-3,
    "model.moe.router.score": "sigmoid",
    "model.moe.router.balancing_bias": True,
    "parallel.ep": 2,
}
LATENT: dict[str, Any] = {
    "model.num_kv_heads": 4,
    "model.mla.kv_rank": 16,
    "model.mla.q_rank": 24,
    "model.mla.nope_dim": 16,
    "model.mla.rope_dim": 8,
    "model.mla.value_dim": 16,
    "model.mtp.depths": 1,
    "parallel.tp": 2,
}
CONVERSATIONS: dict[str, Any] = {
    "data.mock": None,
    "data.mock_num_documents": None,
    "data.mock_max_tokens": None,
    "data.sft.mock_conversations": 60,
    "data.sft.template": "chatml",
    "model.max_seq_len": 384,
    "train.seq_len": 320,
}


@dataclass(frozen=True)
class Case:
    """One run: its settings beside DENSE, its processes, and the run whose weights it starts
    from."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    nproc: int = 2
    base: str | None = None


CASES: dict[str, Case] = {
    "dense_tp_sp": Case({"parallel.tp": 2, "parallel.sp": True, "model.dropout.residual": 0.1}),
    "pp_zero1": Case(
        {"parallel.pp": 2, "parallel.zero": 1, "model.tied_embeddings": True}, nproc=4
    ),
    "cp_ring_packed": Case({"parallel.cp": 2, "data.documents": True}),
    "zero3": Case({"parallel.zero": 3}),
    "moe_ep": Case(EXPERTS),
    "mla_mtp": Case(LATENT),
    "sft": Case(CONVERSATIONS, nproc=1),
    "lora": Case(
        {**CONVERSATIONS, "lora.rank": 4, "lora.alpha": 8.0, "lora.dropout": 0.05},
        nproc=1,
        base="sft",
    ),
    "fp16": Case({"precision.params": "fp16", "parallel.tp": 2}),
}
"""`sft` is only the base of `lora`; both are compared."""


@dataclass(frozen=True)
class Renames:
    """How one checkout names what the cases name otherwise."""

    settings: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)

    def setting(self, name: str, value: Any) -> tuple[str, Any]:
        """Return name and value of a setting as this checkout knows them."""
        new_value = self.values.get(name, {}).get(value, value) if isinstance(value, str) else value
        return self.settings.get(name, name), new_value


def read_renames(checkout: Path) -> Renames:
    """Read the table of renamed settings and metrics of a checkout, empty where it has none."""
    if not (checkout / RENAMED).exists():
        return Renames()
    table = yaml.safe_load((checkout / RENAMED).read_text())
    return Renames(table.get("settings", {}), table.get("values", {}), table.get("metrics", {}))


def nest_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted settings as a tree; None drops a setting.

    >>> nest_settings({"name": "a", "model.moe.top_k": 2, "data.mock": None})
    {'name': 'a', 'model': {'moe': {'top_k': 2}}}
    """
    tree: dict[str, Any] = {}
    for dotted, value in flat.items():
        if value is None:
            continue
        *parents, leaf = dotted.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def write_config(name: str, case: Case, renames: Renames, folder: Path, steps: int) -> Path:
    """Write the YAML file of a case with the names that a checkout knows."""
    flat = {
        "name": name,
        **DENSE,
        **case.settings,
        "train.steps": steps,
        "checkpoint.every": steps // 2,
    }
    flat["train.eval_every"] = steps // 2
    if case.base is not None:
        flat["checkpoint.load"] = str(folder / case.base)
    renamed = dict(renames.setting(setting, value) for setting, value in flat.items())
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(nest_settings(renamed), sort_keys=False))
    return file


def train(checkout: Path, python: str, config: Path, run: Path, case: Case, log: Path) -> None:
    """Train a case to its end, then resume it from its first checkpoint.

    Raises:
        SystemExit: the run failed; the message shows the end of its output.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [
        python,
        "-m",
        "megalith",
        "train",
        str(config),
        "--run",
        str(run),
        "--nproc",
        str(case.nproc),
    ]
    for attempt in ("first", "resumed"):
        with log.open("a") as output:
            code = subprocess.run(
                command, cwd=config.parent, env=environment, stdout=output, stderr=subprocess.STDOUT
            ).returncode
        saved = sorted((run / "checkpoints").glob("step_*"))
        if code or len(saved) != 2:
            raise SystemExit(
                f"{config.stem} in {checkout}: exit code {code}, {len(saved)} "
                f"checkpoints:\n{log.read_text()[-3000:]}"
            )
        if attempt == "first":
            # the same command resumes at the middle and must write the last checkpoint again
            middle, last = saved
            last.rename(run / "uninterrupted")
            (run / "checkpoints" / "latest").write_text(middle.name + "\n")


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a JSON value with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}/{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from flatten(inner, f"{prefix}/{index}")
    else:
        yield prefix, value


def read_results(run: Path, renames: Renames) -> dict[str, Any]:
    """Return what a run computed, by path: metrics, training states, and the checksum of every
    stored box."""
    results: dict[str, Any] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "step" not in row:
            continue
        kind = "eval" if any("eval" in key or "valid" in key for key in row) else "train"
        for key, value in row.items():
            if key not in TIMED:
                results[f"metrics/{row['step']}/{kind}/{key}"] = value
    for step in [*sorted((run / "checkpoints").glob("step_*")), run / "uninterrupted"]:
        manifest = json.loads((step / "manifest.json").read_text())
        for tensor, stored in manifest["tensors"].items():
            boxes = [(box["box"], box["sha256"]) for box in stored["boxes"]]
            results[f"{step.name}/{tensor}"] = [stored["shape"], stored["dtype"], boxes]
        for path, value in flatten(json.loads((step / "state.json").read_text())):
            # of the base of adapters; stored runs were trained in another folder
            relative = (
                re.sub(r"^/.*/(old|new)(?=/)", "", value) if isinstance(value, str) else value
            )
            results[f"{step.name}/state{path}"] = relative
    old_names = {new: old for old, new in renames.metrics.items()}
    return {_with_old_metric(path, old_names): value for path, value in results.items()}


def _with_old_metric(path: str, old_names: Mapping[str, str]) -> str:
    """Return the path of a metric with its old name; `*` in a name stands for a number."""
    if not path.startswith("metrics/"):
        return path
    head, _, name = path.rpartition("/")
    for new, old in old_names.items():
        match = re.fullmatch(re.escape(new).replace(r"\*", r"(\d+)"), name)
        if match is not None:
            return f"{head}/{old.replace('*', ''.join(match.groups()))}"
    return path


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return one line per value that differs, or that only one side has.

    >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4})
    ['b: 2 | 3', 'c: missing | 4']
    """
    lines = []
    for path in sorted({*old, *new}):
        left, right = old.get(path, "missing"), new.get(path, "missing")
        if json.dumps(left, sort_keys=True) != json.dumps(right, sort_keys=True):
            lines.append(f"{path}: {str(left)[:80]} | {str(right)[:80]}")
    return lines


def cache_folder(checkout: Path, steps: int) -> Path | None:
    """Return where the runs of an unmodified checkout are kept for the next comparison, by commit
    and user; None if the checkout is modified."""
    git = ["git", "-C", str(checkout)]
    if subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True).stdout:
        return None
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    root = Path(tempfile.gettempdir()) / f"megalith-compare-runs-{os.getuid()}"
    return root / f"{commit.strip()}-{steps}" if commit.strip() else None


def store_results(run: Path, cache: Path | None) -> None:
    """Copy a finished run to the cache, under its final name when it is complete."""
    if cache is None:
        return
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        copy = Path(shutil.copytree(run, Path(temporary) / run.name, symlinks=True))
        if not (cache / run.name).exists():
            copy.rename(cache / run.name)


def compare(
    checkouts: Sequence[Path], names: Sequence[str], python: str, folder: Path, steps: int
) -> int:
    """Train and compare the named cases; returns the number of cases that differ."""
    failed = 0
    for name in names:
        results = []
        for label, checkout in zip(("old", "new"), checkouts, strict=True):
            renames = read_renames(checkout)
            cache = cache_folder(checkout, steps) if label == "old" else None
            place = folder / label
            place.mkdir(parents=True, exist_ok=True)
            if cache is not None and (cache / name).exists():
                shutil.copytree(cache / name, place / name, dirs_exist_ok=True)
            else:
                config = write_config(name, CASES[name], renames, place, steps)
                train(checkout, python, config, place / name, CASES[name], place / f"{name}.log")
                store_results(place / name, cache)
            results.append(read_results(place / name, renames))
        lines = differences(*results)
        tensors = sum(
            not path.startswith("metrics/") and "/state" not in path for path in results[0]
        )
        print(
            f"{name}: {len(results[0])} values, {tensors} of them tensors: {len(lines)} differ",
            flush=True,
        )
        print("\n".join(f"  {line}" for line in lines[:10]))
        failed += bool(lines)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; 1 when anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument(
        "--keep", type=Path, help="keep runs and logs here instead of in a temporary folder"
    )
    options = parser.parse_args(arguments)
    names = [
        name
        for name in CASES
        if name in options.only or any(CASES[o].base == name for o in options.only)
    ]
    checkouts = [options.old.resolve(), options.new.resolve()]
    if options.keep is not None:
        failed = compare(checkouts, names, options.python, options.keep.resolve(), options.steps)
    else:
        with tempfile.TemporaryDirectory() as folder:
            failed = compare(checkouts, names, options.python, Path(folder), options.steps)
    print(f"{len(names) - failed} of {len(names)} runs are bitwise equal")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
