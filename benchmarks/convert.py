"""Speed and memory of `convert`, beside a plain copy of the same files.

    python benchmarks/convert.py [--gigabytes 2.0] [--rounds 5]
    python benchmarks/convert.py --only megatron

A Llama of random bf16 weights in a Hugging Face folder becomes a checkpoint, and the checkpoint a
folder again; a GPT-2 goes the same way, whose tensors are transposed. The peer copies the folder's
files and waits until they are on disk, as both of ours do. The figures: median of the paired ratios
of speed (bar: 0.5), and the peak of a process of its own beyond what it holds before (bar: 1.3
times the largest tensor plus 1 GiB). Loading the folder into a model's weights, as training does,
is shown beside reading the bytes of its files (no bar). A checkpoint with master weights and
moments becomes a Megatron checkpoint and that one a checkpoint again (bars: 0.5 and 1.25 GiB).
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch
from paired import take_turns, times_as_fast

from megalith.checkpoint.format import CheckpointEntry
from megalith.cli.main import main as run_cli
from megalith.config.model import ModelConfig
from megalith.hf.convert import convert
from megalith.hf.families import GPT2, LLAMA
from megalith.hf.family import Family
from megalith.hf.folder import HFSource, HuggingFaceFolder, write_folder
from megalith.hf.pretrained import open_pretrained
from megalith.hf.release import parameters
from megalith.plan.shards import Box
from megalith.testing.tiny import tiny_yaml

SPEED_BAR = 0.5
MEMORY_BAR = 1.3  # times the largest tensor, and a GiB
MEGATRON_MEMORY_BAR = 1.25  # GiB
GIB = 2**30


class RandomWeights:
    """Weights that are drawn when they are asked for."""

    def dtype(self, parameter: str) -> torch.dtype:
        """All alike."""
        return torch.bfloat16

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """A box of random numbers."""
        return torch.randn([stop - start for start, stop in box], dtype=torch.float32).to(dtype)


def model_of(family: Family, gigabytes: float) -> ModelConfig:
    """A model of about so many bytes, its vocabulary table the largest tensor."""
    layers = max(1, round(gigabytes * 1e9 / 2 / (12 * 2048 * 2048)))
    plain = ModelConfig(
        vocab_size=50_304,
        hidden_size=2048,
        num_layers=layers,
        num_heads=16,
        num_kv_heads=16,
        ffn_hidden_size=5504,
        tied_embeddings=True,
    )
    return plain if family is LLAMA else GPT2.read_config(gpt2_config(plain))


def gpt2_config(like: ModelConfig) -> dict[str, object]:
    """A config.json of GPT-2 of the same size."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": like.vocab_size,
        "n_positions": 1024,
        "n_embd": like.hidden_size,
        "n_layer": like.num_layers,
        "n_head": like.num_heads,
    }


def copy_files(source: Path, target: Path) -> None:
    """Copy every file, the peer; they are on the disk when it returns."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    for file in target.rglob("*"):
        if file.is_file():
            with file.open("rb") as copied:
                os.fsync(copied.fileno())


def convert_to(kind: str, source: Path, target: Path) -> None:
    """Ours."""
    shutil.rmtree(target, ignore_errors=True)
    convert(open_pretrained(source), target, kind)  # type: ignore[arg-type]  # one of the two kinds


def read_files(source: Path) -> None:
    """The peer of loading: every byte of weights, into memory."""
    for file in source.glob("*.safetensors"):
        into = torch.empty(file.stat().st_size, dtype=torch.uint8)
        with file.open("rb", buffering=0) as opened:
            view, done = into.numpy().data, 0
            while count := opened.readinto(view[done:]):
                done += count


def load_weights(source: Path) -> None:
    """The same bytes as the parameters of a model."""
    folder = HuggingFaceFolder(source)
    shards = parameters(folder.model_config)
    folder.fill(
        [
            CheckpointEntry(shard, "param", torch.empty(shard.shape, dtype=torch.bfloat16))
            for shard in shards
        ]
    )


def peak_bytes(kind: str, source: Path, target: Path) -> int:
    """What a process needs at most for the conversion, beyond what it holds before."""
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, __file__, "--once", kind, str(source), str(target)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(output.split()[-1])


def once(kind: str, source: Path, target: Path) -> None:
    """Convert and print the growth of this process's peak."""
    if kind.startswith("command-"):
        before = held_bytes("VmRSS")
        convert_by_command(kind.removeprefix("command-"), source, target)
        print(held_bytes("VmHWM") - before)
        return
    opened = open_pretrained(source)
    before = held_bytes("VmRSS")
    convert(opened, target, kind)  # type: ignore[arg-type]  # one of the two kinds
    print(held_bytes("VmHWM") - before)


def held_bytes(which: str) -> int:
    """Of this process: VmRSS now, VmHWM at most so far."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(which)
    )
    return int(line.split()[1]) * 1024


def measure(family: Family, folder: Path, gigabytes: float, rounds: int) -> bool:
    """Print both ratios and both peaks; False where a bar is missed."""
    config, name = model_of(family, gigabytes), family.model_type
    reference, ours, again = folder / "theirs", folder / "ours", folder / "again"
    shutil.rmtree(reference, ignore_errors=True)
    nbytes = write_folder(reference, config, RandomWeights(), hf_source=HFSource(family))
    largest = config.vocab_size * config.hidden_size * 2
    convert_to("megalith", reference, ours)
    contenders: dict[str, Callable[[], object]] = {
        "copy": partial(copy_files, reference, folder / "copy"),
        "megalith": partial(convert_to, "megalith", reference, folder / "there"),
        "huggingface": partial(convert_to, "huggingface", ours, again),
        "read": partial(read_files, reference),
        "load": partial(load_weights, reference),
    }
    seconds = take_turns(contenders, rounds=rounds, warmup=1).seconds
    met = True
    for kind, source in (("megalith", reference), ("huggingface", ours)):
        ratio = times_as_fast(seconds[kind], seconds["copy"])
        peak = peak_bytes(kind, source, folder / "peak")
        allowed, rate = MEMORY_BAR * largest + GIB, nbytes / 1e9 / min(seconds[kind])
        print(
            f"{name}, {nbytes / 1e9:.1f} GB to {kind}: {ratio} of the speed of a copy (bar "
            f"{SPEED_BAR}; ours "
            f"{rate:.2f} GB/s at best); peak {peak / GIB:.2f} GiB (bar {allowed / GIB:.2f})",
            flush=True,
        )
        met &= ratio.median >= SPEED_BAR and peak <= allowed
    ratio, rate = (
        times_as_fast(seconds["load"], seconds["read"]),
        nbytes / 1e9 / min(seconds["load"]),
    )
    print(
        f"{name}, loaded into weights: {ratio} of the speed of reading ({rate:.2f} GB/s at best)",
        flush=True,
    )
    return met


def train_one_step(folder: Path) -> Path:
    """Train 67M parameters in bf16 for one step; return the checkpoint, with master weights and
    moments (0.94 GB)."""
    settings = {
        "model.vocab_size": "32768",
        "model.hidden_size": "768",
        "model.num_layers": "6",
        "model.num_heads": "12",
        "model.num_kv_heads": "12",
        "model.ffn_hidden_size": "2048",
        "precision.params": "bf16",
        "schedule.warmup_steps": "0",
        "train.steps": "1",
        "checkpoint.every": "1",
    }
    file = tiny_yaml(folder / "tiny.yaml", settings)
    run_command("train", str(file), "--run", str(folder / "run"))
    (checkpoint,) = (folder / "run").rglob("step_*")
    return checkpoint


def run_command(*words: str) -> None:
    """Run a command of ours in this process."""
    with redirect_stdout(io.StringIO()):
        code = run_cli(list(words))
    if code:
        sys.exit(f"megalith {' '.join(words)} ended with {code}")


def convert_by_command(to: str, source: Path, target: Path) -> None:
    """Convert with the command, in this process."""
    shutil.rmtree(target, ignore_errors=True)
    run_command("convert", str(source), str(target), "--to", to)


def measure_megatron(folder: Path, rounds: int) -> bool:
    """Print ratios and peaks of conversions to and from Megatron; return whether all bars are
    met."""
    checkpoint = train_one_step(folder)
    exported = folder / "megatron"
    convert_by_command("megatron", checkpoint, exported)
    cases = (("megatron", checkpoint), ("megalith", exported))
    contenders: dict[str, Callable[[], object]] = {
        "copy": partial(copy_files, checkpoint, folder / "copy")
    }
    for to, source in cases:
        contenders[to] = partial(convert_by_command, to, source, folder / f"to-{to}")
    seconds = take_turns(contenders, rounds=rounds, warmup=1).seconds
    nbytes = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    is_met = True
    for to, source in cases:
        ratio = times_as_fast(seconds[to], seconds["copy"])
        peak = peak_bytes(f"command-{to}", source, folder / "peak") / GIB
        print(
            f"checkpoint with optimizer state, {nbytes / 1e9:.1f} GB to {to}: {ratio} of the speed "
            f"of a copy (bar {SPEED_BAR}); peak {peak:.2f} GiB (bar {MEGATRON_MEMORY_BAR})",
            flush=True,
        )
        is_met &= ratio.median >= SPEED_BAR and peak <= MEGATRON_MEMORY_BAR
    return is_met


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparisons; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("huggingface", "megatron"))
    parser.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.once:
        once(options.once[0], Path(options.once[1]), Path(options.once[2]))
        return 0
    with tempfile.TemporaryDirectory() as name:
        families = () if options.only == "megatron" else (LLAMA, GPT2)
        met = [
            measure(family, Path(name), options.gigabytes, options.rounds) for family in families
        ]
        if options.only != "huggingface":
            shutil.rmtree(name)
            Path(name).mkdir()
            met.append(measure_megatron(Path(name), options.rounds))
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
