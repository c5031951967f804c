"""`megalith chat`: chat with a model in the terminal, or through a pipe with one line per turn."""

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from tyro.conf import Positional

from megalith import storage
from megalith.cli.arguments import join_overrides, parse_options, split_overrides
from megalith.cli.generate import DTYPES, chunk_problems, has_one_process, ignore, print_now
from megalith.cli.output import print_warnings
from megalith.config.generation import SamplingParams, sampling_problems
from megalith.config.kernels import Kernel
from megalith.config.serve import (
    EngineConfig,
    GenerateRun,
    adapter_name_problems,
    engine_problems,
    parallel_problems,
    single_replica_problems,
)
from megalith.config.tree import apply_overrides, to_dict
from megalith.errors import DataError, raise_all

if TYPE_CHECKING:  # keep --help free of the torch import
    from megalith.hf.pretrained import Pretrained
    from megalith.infer.chat import Chat
    from megalith.launch.worker import Worker
    from megalith.parallel.group import Group

EXIT, RESET, HELP = "/exit", "/reset", "/help"
DEFAULT_TEMPERATURE = (
    0.6  # as in generation_config.json of Llama 3 and Qwen3; at 1.0 small models make mistakes
)
ONE_SEQUENCE = EngineConfig(max_num_seqs=1)
TIMEOUT_SECONDS = 7 * 24 * 3600.0  # collectives wait while the user types


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Chat with a model. Ctrl-C interrupts an answer, /reset starts a new conversation, /exit or
    end of input exits.

    In a pipe, every line is a turn: `echo "What is 3 plus 4?" | megalith chat runs/sft_tiny`.
    Settings of the engine are options too, such as --engine.quantization int8.
    """

    source: Positional[str]
    """Folder of a run (its latest checkpoint), a checkpoint, or a Hugging Face model; or the
    name of a run under runs/."""

    system: str | None = None
    """System message; default: none."""

    template: str | None = None
    """Chat template: chatml, llama3, identity, nemotron-h-aligned, nemotron-nano-v2, or a Jinja
    file; default: that of the fine-tuning run, else the model's."""

    max_new_tokens: int = 512
    """Maximum number of tokens of an answer."""

    temperature: float = DEFAULT_TEMPERATURE
    """Softmax temperature, by which logits are divided: values below 1 make unlikely tokens
    rarer; 0 is greedy decoding."""

    top_k: int | None = None
    """Sample from the k most likely tokens; default: all."""

    top_p: float | None = None
    """Sample from the smallest set of most likely tokens with this total probability; default:
    all."""

    seed: int = 1234
    """Random seed. The same seed and input give the same answers."""

    greedy: bool = False
    """Greedy decoding, as --temperature 0."""

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

    adapter: str | None = None
    """Name of a LoRA adapter that --engine.adapters NAME=FOLDER loads; default: the model without
    adapters."""

    nproc: int = 1
    """Number of processes on this machine that share the model: tensor parallel, in parallel.pp
    pipeline stages; omit under torchrun."""

    input: str | None = None
    """File or named pipe with one turn per line; default: standard input."""


def main(argv: list[str]) -> int:
    """Run `megalith chat`."""
    rest, overrides = split_overrides(argv, GenerateRun)
    options = parse_options(ChatOptions, rest, prog="megalith chat", root=GenerateRun)
    run = apply_overrides(GenerateRun(engine=ONE_SEQUENCE), overrides)
    problems = option_problems(options) + engine_problems(run.engine)
    problems += parallel_problems(run.engine, run.parallel) + single_replica_problems(run.parallel)
    problems += adapter_name_problems(options.adapter, run.engine)
    from megalith.infer.layout import open_source
    from megalith.launch.launcher import in_worker, run_workers

    if in_worker(os.environ) or has_one_process(options.nproc, run):
        raise_all(problems)
        return run_chat(options, run)
    # report errors of the source once, not per worker
    open_source(
        options.source,
        options.nproc,
        base=options.base,
        parallel=run.parallel,
        problems=problems,
    )
    words = ["chat", *build_worker_arguments(options), *join_overrides(overrides)]
    if options.input is not None:
        return run_workers(words, options.nproc)
    with tempfile.TemporaryDirectory(prefix="megalith-") as folder:
        # workers cannot read the terminal's input
        pipe = f"{folder}/turns"
        os.mkfifo(pipe)
        threading.Thread(target=_forward_stdin, args=(pipe,), daemon=True).start()
        return run_workers([*words, f"--input={pipe}"], options.nproc)


def _forward_stdin(pipe: str) -> None:
    """Copy standard input to a named pipe until either ends."""
    with suppress(OSError), open(pipe, "wb", buffering=0) as turns:
        while part := os.read(0, 1 << 16):
            turns.write(part)


def option_problems(options: ChatOptions) -> list[str]:
    """Return errors of invalid options."""
    problems = [
        f"--{text}".replace("_", "-")
        for text in sampling_problems(settings(options), vocab_size=None)
    ]
    if options.max_new_tokens == 0:
        problems.append("--max-new-tokens=0 must be at least 1. Use 256.")
    if options.greedy and options.temperature != DEFAULT_TEMPERATURE:
        problems.append(f"--greedy with --temperature={options.temperature}: set only one of them.")
    return problems + chunk_problems(options.mlp_chunks)


def build_worker_arguments(options: ChatOptions) -> list[str]:
    """Return the command line of each worker."""
    words = [options.source]
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in ("source", "nproc") and value != field.default:
            name = f"--{field.name.replace('_', '-')}"
            words += [name] if value is True else [f"{name}={value}"]
    return words


def settings(options: ChatOptions) -> SamplingParams:
    """Return the sampling parameters."""
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=0.0 if options.greedy else options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )


def run_chat(options: ChatOptions, run: GenerateRun) -> int:
    """Load the model and chat, as one rank of the job that the environment describes; rank 0
    reads input and prints."""
    from megalith.infer.layout import open_source
    from megalith.launch.worker import (
        Worker,
        check_consistent_settings,
        connect,
        disconnect,
        set_threads,
    )
    from megalith.parallel.group import gather_objects

    worker = Worker.from_environment(os.environ)
    source = open_source(options.source, worker.world, base=options.base, parallel=run.parallel)
    set_threads(worker, None)
    world_group = connect(worker, timeout_seconds=TIMEOUT_SECONDS)
    try:
        check_consistent_settings(asdict(options) | {"run": to_dict(run)}, world_group)
        if worker.rank == 0:
            print_warnings(source)
        chat = open_chat(options, run, source, worker)
        with open_turns(options.input) if worker.rank == 0 else nullcontext() as turns:
            forgiving = gather_objects(turns is not None and turns.person, world_group)[0] is True
            for line in read_lines(turns, world_group):
                handle_turn(
                    chat,
                    line,
                    first=worker.rank == 0,
                    forgiving=forgiving,
                    stoppable=forgiving and worker.world == 1,
                )
        chat.engine.runner.close()
    except BaseException:
        disconnect(worker, failed=True)
        raise
    disconnect(worker)
    return 0


def open_chat(
    options: ChatOptions, run: GenerateRun, source: "Pretrained", worker: "Worker"
) -> "Chat":
    """Load this rank's model for chat; a missing template is reported before weights are read."""
    import torch

    from megalith.data.tokenizer import build_tokenizer
    from megalith.infer.chat import Chat, select_template
    from megalith.infer.layout import build_generation_mesh
    from megalith.infer.load import load_text_generator

    template = select_template(source, build_tokenizer(source.tokenizer), options.template)
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
    return Chat(
        generator,
        template,
        settings(options),
        run.engine,
        system=options.system,
        adapter=options.adapter,
    )


@dataclass(frozen=True, slots=True)
class Turns:
    """Input of a chat, one turn per line."""

    file: IO[str]
    person: bool
    """Whether the input is interactive, so that a prompt is printed for each line."""

    def next(self) -> str | None:
        """Return the next line that is not empty; None at the end."""
        while True:
            try:
                line = self._line()
            except EOFError:
                print_now("\n")  # end the line of the prompt
                return None
            except KeyboardInterrupt:
                print_now("\n")
                raise
            except UnicodeDecodeError as error:
                raise DataError(
                    f"turns: byte {error.start} is not UTF-8. Pass UTF-8 text with one turn per "
                    "line."
                ) from None
            if not line:
                return None
            if line.strip():
                return line.strip()

    def _line(self) -> str:
        if self.person and self.file is sys.stdin:
            return input("\n> ") + "\n"  # input() has line editing
        if self.person:
            print_now("\n> ")
        line = self.file.readline(storage.MAX_TEXT_NBYTES + 1)
        if len(line) > storage.MAX_TEXT_NBYTES:
            raise DataError(
                f"turns: a line has more than {storage.MAX_TEXT_NBYTES:,} characters. Pass shorter "
                "lines."
            )
        return line


@contextmanager
def open_turns(path: str | None) -> Iterator[Turns]:
    """Open standard input, or a file.

    Raises:
        DataError: there is no such file.
    """
    if path is None:
        yield Turns(sys.stdin, sys.stdin.isatty())
        return
    if not (Path(path).is_file() or Path(path).is_fifo()):
        raise DataError(f"--input={path}: no such file. Pass a file with one turn per line.")
    with Path(path).open(encoding="utf-8") as file:
        yield Turns(file, Path(path).is_fifo() and sys.stdout.isatty())


def read_lines(turns: Turns | None, world_group: "Group") -> Iterator[str]:
    """Yield the lines of the chat, the same on every rank, until the end; only the first rank
    has `turns`."""
    from megalith.parallel.group import gather_objects

    while True:
        line = gather_objects(None if turns is None else turns.next(), world_group)[0]
        if line is None or line == EXIT:
            return
        assert isinstance(line, str)
        yield line


def handle_turn(
    chat: "Chat", line: str, *, first: bool, forgiving: bool = False, stoppable: bool = False
) -> None:
    """Run a command, or answer. `forgiving`: print errors and continue the conversation;
    `stoppable`: also continue after an interrupted answer.

    Raises:
        DataError: the input is invalid and the chat is not interactive.
    """
    show = print_now if first else ignore
    if line == RESET:
        chat.reset()
    elif line == HELP:
        show(
            f"{RESET} starts a new conversation, {EXIT} exits, Ctrl-C interrupts an answer; any "
            "other "
            "line is sent to the model.\n"
        )
    else:
        try:
            chat.reply(line, show)
            show("\n")
        except DataError as error:
            if not forgiving:
                raise
            show(f"{error}\n")
        except KeyboardInterrupt:  # several ranks would stop at different tokens
            if not stoppable:
                raise
            show(" [stopped]\n")
