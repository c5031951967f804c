"""`megalith generate`: generate text from prompts with a run, a checkpoint or a Hugging Face
model."""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from megalith import storage
from megalith.cli.arguments import join_overrides, parse_options, split_overrides
from megalith.cli.output import print_json, print_warnings
from megalith.config.generation import SamplingParams, sampling_problems
from megalith.config.kernels import Kernel
from megalith.config.parallel import ParallelConfig
from megalith.config.serve import (
    GenerateRun,
    adapter_name_problems,
    engine_problems,
    parallel_problems,
    process_count_problems,
)
from megalith.config.tree import apply_overrides, to_dict
from megalith.errors import DataError, raise_all

if TYPE_CHECKING:  # keep --help free of the torch import
    from megalith.hf.pretrained import Pretrained
    from megalith.infer.generate import Transcript
    from megalith.launch.worker import Worker

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Generate text from prompts with the model of a run, a checkpoint, or a Hugging Face folder.

    Without a prompt the model starts a new document. A model without a tokenizer reads and writes
    ids: "17 4 99". Settings of the engine are options too, such as --engine.speculation.method
    ngram.
    """

    source: Positional[str]
    """Folder of a run (its latest checkpoint), a checkpoint, or a Hugging Face model; or the
    name of a run under runs/."""

    prompts: Positional[tuple[str, ...]] = ()
    """Prompts, processed as a batch; - reads one from standard input."""

    file: str | None = None
    """File with more prompts: one per line, or in a .jsonl file an object with the key "prompt"
    per line."""

    max_new_tokens: int = 256
    """Maximum number of tokens to generate per prompt."""

    temperature: float = 1.0
    """Softmax temperature, by which logits are divided: values below 1 make unlikely tokens
    rarer; 0 is greedy decoding."""

    top_k: int | None = None
    """Sample from the k most likely tokens; default: all."""

    top_p: float | None = None
    """Sample from the smallest set of most likely tokens with this total probability; default:
    all."""

    seed: int = 1234
    """Random seed. The same seed and prompts give the same text."""

    greedy: bool = False
    """Greedy decoding, as --temperature 0."""

    ignore_eod: bool = False
    """Continue after the end-of-document token."""

    dtype: Literal["fp32", "bf16", "fp64"] | None = None
    """Compute dtype; default: bf16 on a GPU, fp32 on a CPU."""

    kernels: Kernel = "auto"
    """Kernel backends. auto: the fastest on this machine; torch: torch operations; reference:
    plain definitions."""

    mlp_chunks: int = 1
    """Number of chunks into which the MLP splits the tokens of a prompt: less memory for long
    prompts, same results."""

    base: str | None = None
    """For adapters: their base model; default: the one that the adapters name."""

    role: Literal["param", "ema"] = "param"
    """Weights of a run. param: those of the last step; ema: their moving average (train.ema)."""

    adapter: str | None = None
    """Name of a LoRA adapter that --engine.adapters NAME=FOLDER loads; default: the model without
    adapters."""

    nproc: int = 1
    """Number of processes on this machine that share the model: tensor parallel, in parallel.pp
    pipeline stages; omit under torchrun."""

    json: bool = False
    """Print one JSON document at the end instead of streaming text."""


def main(argv: list[str]) -> int:
    """Run `megalith generate`."""
    rest, overrides = split_overrides(argv, GenerateRun)
    options = parse_options(GenerateOptions, rest, prog="megalith generate", root=GenerateRun)
    run = apply_overrides(GenerateRun(), overrides)
    problems = option_problems(options) + engine_problems(run.engine)
    problems += parallel_problems(run.engine, run.parallel)
    problems += adapter_name_problems(options.adapter, run.engine)
    from megalith.infer.layout import open_source
    from megalith.launch.launcher import in_worker, run_workers

    if in_worker(os.environ) or has_one_process(options.nproc, run):
        raise_all(problems)
        return write(options, read_prompts(options), run)
    path = open_source(
        options.source,
        options.nproc,
        base=options.base,
        parallel=run.parallel,
        problems=problems,
        role=options.role,
    ).path
    prompts = read_prompts(options)
    with tempfile.TemporaryDirectory(prefix="megalith-") as folder:
        # workers cannot share standard input
        file = Path(folder) / "prompts.jsonl"
        file.write_text(
            "".join(json.dumps({"prompt": text}) + "\n" for text in prompts), encoding="utf-8"
        )
        words = [*build_worker_arguments(options, path, file), *join_overrides(overrides)]
        return run_workers(["generate", *words], options.nproc)


def has_one_process(nproc: int, run: GenerateRun) -> bool:
    """Return whether the model runs in this process."""
    return nproc == 1 and not process_count_problems(run.parallel, nproc)


def option_problems(options: GenerateOptions) -> list[str]:
    """Return errors of invalid options."""
    problems = [
        f"--{text}".replace("_", "-")
        for text in sampling_problems(settings(options), vocab_size=None)
    ]
    if options.max_new_tokens == 0:
        problems.append("--max-new-tokens=0 must be at least 1. Use 256.")
    if options.greedy and options.temperature != 1.0:
        problems.append(f"--greedy with --temperature={options.temperature}: set only one of them.")
    return problems + chunk_problems(options.mlp_chunks)


def chunk_problems(chunks: int) -> list[str]:
    """Return an error if `chunks` is not a valid number of chunks."""
    if chunks >= 1:
        return []
    return [
        f"--mlp-chunks={chunks} must be at least 1. Use 1 for no chunks, or 4 for a "
        "quarter of the memory."
    ]


def build_worker_arguments(options: GenerateOptions, source: Path, file: Path) -> list[str]:
    """Return the command line of each worker, with all prompts in one file."""
    words = [str(source), "--file", str(file)]
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in ("source", "prompts", "file", "nproc") or value == field.default:
            continue
        name = f"--{field.name.replace('_', '-')}"
        words += [name] if value is True else [name, str(value)]
    return words


def write(options: GenerateOptions, prompts: Sequence[str], run: GenerateRun) -> int:
    """Load the model and generate, as one rank of the job that the environment describes; rank 0
    prints."""
    from megalith.infer.layout import open_source
    from megalith.launch.worker import (
        Worker,
        check_consistent_settings,
        connect,
        disconnect,
        set_threads,
    )

    worker = Worker.from_environment(os.environ)
    source = open_source(
        options.source,
        worker.world,
        base=options.base,
        parallel=run.parallel,
        role=options.role,
    )
    set_threads(worker, None)
    world_group = connect(worker, timeout_seconds=ParallelConfig().timeout_seconds)
    try:
        arguments = {"prompts": list(prompts), "run": to_dict(run)}
        check_consistent_settings(asdict(options) | arguments, world_group)
        if worker.rank == 0:
            print_warnings(source)
        transcripts, seconds = generate_all(options, prompts, run, source, worker)
    except BaseException:
        disconnect(worker, failed=True)
        raise
    disconnect(worker)
    if worker.rank == 0 and options.json:
        print_json(report(str(source.path), transcripts, seconds))
    elif worker.rank == 0 and sys.stderr.isatty():
        print(summary(transcripts, seconds), file=sys.stderr)
    return 0


def generate_all(
    options: GenerateOptions,
    prompts: Sequence[str],
    run: GenerateRun,
    source: "Pretrained",
    worker: "Worker",
) -> "tuple[list[Transcript], float]":
    """Load this rank's shard of the model and generate from every prompt; return the texts and
    the elapsed seconds."""
    import torch

    from megalith.infer.generate import generate_text
    from megalith.infer.layout import build_generation_mesh
    from megalith.infer.load import load_text_generator

    mesh = build_generation_mesh(source.model, run.parallel, rank=worker.rank, world=worker.world)
    dtype: torch.dtype = getattr(
        torch, DTYPES[options.dtype or ("fp32" if worker.device.type == "cpu" else "bf16")]
    )
    generator = load_text_generator(
        source,
        mesh,
        worker.device,
        dtype,
        kernels=options.kernels,
        mlp_chunks=options.mlp_chunks,
        config=run.engine,
        parallel=run.parallel,
    )
    show = print_now if worker.rank == 0 and not options.json else ignore
    started = time.perf_counter()
    transcripts = generate_text(
        generator,
        prompts,
        settings(options),
        show=show,
        config=run.engine,
        adapter=options.adapter,
    )
    return transcripts, time.perf_counter() - started


def print_now(text: str) -> None:
    """Print text immediately. On a terminal, control characters are replaced."""
    shown = CONTROL.sub("\ufffd", text) if sys.stdout.isatty() else text
    print(shown, end="", flush=True)


def ignore(text: str) -> None:
    """Print nothing: another rank prints, or the output is one document at the end."""


def report(
    source: str, transcripts: "Sequence[Transcript]", seconds: float
) -> dict[str, Any]:  # Any: JSON
    """Return the results as one JSON document."""
    num_tokens = sum(len(transcript.ids) for transcript in transcripts)
    results = [
        {
            "prompt": transcript.prompt,
            "prompt_ids": transcript.prompt_ids,
            "text": transcript.text,
            "ids": transcript.ids,
            "finish": transcript.finish,
        }
        for transcript in transcripts
    ]
    return {
        "source": source,
        "results": results,
        "num_tokens": num_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(num_tokens / seconds, 1),
    }


def summary(transcripts: "Sequence[Transcript]", seconds: float) -> str:
    """Return one line with the number of tokens, the speed and the stop reasons."""
    num_tokens = sum(len(transcript.ids) for transcript in transcripts)
    words = {
        "stop": "the end of the document",
        "length": "--max-new-tokens",
        "context": "the model's context length",
    }
    ends = ", ".join(
        sorted({words[transcript.finish] for transcript in transcripts if transcript.finish})
    )
    return (
        f"[{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f}/s; ended by {ends}]"
    )


def settings(options: GenerateOptions) -> SamplingParams:
    """Return the sampling parameters."""
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=0.0 if options.greedy else options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        ignore_eos=options.ignore_eod,
    )


def read_prompts(options: GenerateOptions) -> list[str]:
    """Return all prompts: those of the command line, then those of the file; one empty prompt if
    there are none.

    Raises:
        DataError: the file is missing, is not text, or one of its lines is not a prompt.
    """
    texts = [_read_stdin() if text == "-" else text for text in options.prompts]
    if options.file is not None:
        texts += read_prompt_file(Path(options.file))
    return texts or [""]


def _read_stdin() -> str:
    """Read one prompt from standard input.

    Raises:
        DataError: the input is not UTF-8 or is too long.
    """
    try:
        text = sys.stdin.read(storage.MAX_TEXT_NBYTES + 1)
        # in the C locale, Python decodes invalid bytes as surrogates instead of raising an error
        text.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise DataError(
            f"-: standard input is not UTF-8 ({error.reason}). Pass UTF-8 text."
        ) from None
    if len(text) > storage.MAX_TEXT_NBYTES:
        raise DataError(
            f"-: standard input has more than {storage.MAX_TEXT_NBYTES:,} characters. Pass a "
            "shorter text."
        )
    return text.removesuffix("\n")


def read_prompt_file(path: Path) -> list[str]:
    """Return the prompts of a file, one per line; empty lines are skipped.

    Raises:
        DataError: there is no such file, it is not UTF-8, or a line of a .jsonl file has no prompt.
    """
    try:
        lines = [
            line.removesuffix("\r") for line in storage.read_text(path, allow_pipe=True).split("\n")
        ]
    except OSError as error:
        raise DataError(
            f"--file={path}: {error.strerror}. Pass a text file with one prompt per line."
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"--file={path}: byte {error.start} is not UTF-8. Pass a text file."
        ) from None
    if path.suffix != ".jsonl":
        return [line for line in lines if line.strip()]
    return [
        _parse_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
    ]


def _parse_prompt(path: Path, number: int, line: str) -> str:
    try:
        document = storage.parse_json(line)
        # rejects lone surrogates such as "\\ud800"
        json.dumps(document, ensure_ascii=False).encode()
    except ValueError as error:
        raise DataError(
            f'{path}:{number}: not JSON ({error}). Use an object like {{"prompt": "..."}}.'
        ) from None
    text = document.get("prompt") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise DataError(
            f'{path}:{number}: expected text under "prompt", found {line!r:.60}. '
            'Use {"prompt": "..."}.'
        )
    return text
