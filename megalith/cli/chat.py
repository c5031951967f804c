"""`megalith chat`: talk with a model in the terminal, or through a pipe, a line for each turn."""

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
from megalith.cli.arguments import parse_options
from megalith.cli.generate import DTYPES, chunk_problems, ignore, print_now
from megalith.cli.output import tell_warnings
from megalith.config.kernels import Kernel
from megalith.config.sample import SampleConfig, sample_problems
from megalith.errors import DataError, raise_all

if TYPE_CHECKING:  # help should not have to wait for torch
    from megalith.infer.chat import Chat
    from megalith.models.pretrained import Pretrained
    from megalith.parallel.group import Group
    from megalith.parallel.worker import Worker

EXIT, RESET, HELP = "/exit", "/reset", "/help"
DEFAULT_TEMPERATURE = (
    0.6  # as in the generation_config.json of Llama 3 and Qwen3; at 1.0 small models make slips
)
PATIENCE_SECONDS = 7 * 24 * 3600.0  # ranks wait for each other while a person thinks


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Talk with a model. Ctrl-C ends an answer, /reset begins again, /exit or the end of the input
    ends.

    Through a pipe every line is a turn: `echo "What is 3 plus 4?" | megalith chat runs/sft_tiny`.
    """

    source: Positional[str]
    """Folder of a run (its newest checkpoint), of a checkpoint, or of a Hugging Face model; or a
    name under runs/."""

    system: str | None = None
    """What the model is told before anything else; left out: nothing."""

    template: str | None = None
    """Chat template: chatml, llama3, identity, nemotron-h-aligned, nemotron-nano-v2, or a Jinja
    file; left out: what the run was tuned with, else the model's own."""

    max_new_tokens: int = 512
    """Tokens of an answer at most."""

    temperature: float = DEFAULT_TEMPERATURE
    """Logits are divided by it: below 1 unlikely tokens become rarer; 0 always takes the most
    likely token."""

    top_k: int | None = None
    """Choose among this many best tokens; left out: all."""

    top_p: float | None = None
    """Choose among the best tokens that together have this probability; left out: all."""

    seed: int = 1234
    """The same seed and words give the same answers."""

    greedy: bool = False
    """Always take the best token; the same as --temperature 0."""

    dtype: Literal["fp32", "bf16", "fp64"] | None = None
    """Compute in; left out: bf16 on a GPU, fp32 on a CPU."""

    kernels: Kernel = "auto"
    """How operations between matmuls are computed: auto, the fastest way on this machine; torch,
    torch operations; reference, their plain definitions."""

    mlp_chunks: int = 1
    """Chunks of tokens in which MLPs read prompts: the same results in less memory, which long
    prompts may need."""

    base: str | None = None
    """For a source that holds adapters: the model they belong to; left out: where they say it
    is."""

    nproc: int = 1
    """Processes on this machine that share the model (tensor parallel); under torchrun leave it
    out."""

    input: str | None = None
    """File or named pipe to read turns from; left out: standard input."""


def main(argv: list[str]) -> int:
    """Run `megalith chat`."""
    options = parse_options(ChatOptions, argv, prog="megalith chat")
    raise_all(option_problems(options))
    from megalith.infer.load import open_source
    from megalith.parallel.launch import in_worker, run_workers

    if in_worker(os.environ) or options.nproc == 1:
        return talk(options)
    open_source(
        options.source, options.nproc, base=options.base
    )  # what is wrong with it is better told once
    if options.input is not None:
        return run_workers(["chat", *worker_words(options)], options.nproc)
    with tempfile.TemporaryDirectory(
        prefix="megalith-"
    ) as folder:  # workers are cut off from the terminal's input
        pipe = f"{folder}/turns"
        os.mkfifo(pipe)
        threading.Thread(target=_pass_on, args=(pipe,), daemon=True).start()
        return run_workers(["chat", *worker_words(options), f"--input={pipe}"], options.nproc)


def _pass_on(pipe: str) -> None:
    """Copy standard input into a named pipe until either ends."""
    with suppress(OSError), open(pipe, "wb", buffering=0) as turns:
        while part := os.read(0, 1 << 16):
            turns.write(part)


def option_problems(options: ChatOptions) -> list[str]:
    """Every option that cannot be, as texts."""
    problems = [f"--{text}".replace("_", "-") for text in sample_problems(settings(options))]
    if options.greedy and options.temperature != DEFAULT_TEMPERATURE:
        problems.append(f"--greedy with --temperature={options.temperature}: use one of them.")
    problems += chunk_problems(options.mlp_chunks)
    if options.nproc < 1:
        problems.append(
            f"--nproc={options.nproc} must be at least 1. Use the number of processes to start."
        )
    return problems


def worker_words(options: ChatOptions) -> list[str]:
    """The command line of each worker."""
    words = [options.source]
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in ("source", "nproc") and value != field.default:
            name = f"--{field.name.replace('_', '-')}"
            words += [name] if value is True else [f"{name}={value}"]
    return words


def settings(options: ChatOptions) -> SampleConfig:
    """How tokens are chosen."""
    return SampleConfig(
        max_new_tokens=options.max_new_tokens,
        temperature=0.0 if options.greedy else options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )


def talk(options: ChatOptions) -> int:
    """Load the model and talk, as one rank of the job that the environment describes; rank 0
    listens and speaks."""
    from megalith.infer.load import open_source
    from megalith.parallel.group import gather_objects
    from megalith.parallel.worker import (
        Worker,
        check_consistent_settings,
        connect,
        disconnect,
        set_threads,
    )

    worker = Worker.from_environment(os.environ)
    source = open_source(options.source, worker.world, base=options.base)
    set_threads(worker, None)
    everyone = connect(worker, timeout_seconds=PATIENCE_SECONDS)
    try:
        check_consistent_settings(asdict(options), everyone)
        if worker.rank == 0:
            tell_warnings(source)
        chat = open_chat(options, source, worker)
        with open_turns(options.input) if worker.rank == 0 else nullcontext() as turns:
            forgiving = gather_objects(turns is not None and turns.person, everyone)[0] is True
            for line in spoken(turns, everyone):
                take_turn(
                    chat,
                    line,
                    first=worker.rank == 0,
                    forgiving=forgiving,
                    stoppable=forgiving and worker.world == 1,
                )
    except BaseException:
        disconnect(worker, failed=True)
        raise
    disconnect(worker)
    return 0


def open_chat(options: ChatOptions, source: "Pretrained", worker: "Worker") -> "Chat":
    """The model of this rank, ready to talk; a missing template is found before any weight is
    read."""
    import torch

    from megalith.data.tokenizer import build_tokenizer
    from megalith.infer.chat import Chat, template_of
    from megalith.infer.load import load_text_generator, writing_layout
    from megalith.parallel.mesh import build_mesh, model_grid

    template = template_of(source, build_tokenizer(source.tokenizer), options.template)
    grid = model_grid(writing_layout(source.model, worker.world), source.model, worker.world)
    dtype: torch.dtype = getattr(
        torch, DTYPES[options.dtype or ("fp32" if worker.device.type == "cpu" else "bf16")]
    )
    writer = load_text_generator(
        source,
        build_mesh(grid, rank=worker.rank),
        worker.device,
        dtype,
        kernels=options.kernels,
        mlp_chunks=options.mlp_chunks,
    )
    return Chat(writer, template, settings(options), options.system)


@dataclass(frozen=True, slots=True)
class Turns:
    """Where lines come from."""

    file: IO[str]
    person: bool
    """Somebody sits there, and is asked for each line."""

    def next(self) -> str | None:
        """A line that is not empty; None at the end."""
        while True:
            try:
                line = self._line()
            except EOFError:
                print_now("\n")  # what comes next is not said on the line of the prompt
                return None
            except KeyboardInterrupt:
                print_now("\n")
                raise
            except UnicodeDecodeError as error:
                raise DataError(
                    f"turns: byte {error.start} is not UTF-8. Pass text, a line for each turn."
                ) from None
            if not line:
                return None
            if line.strip():
                return line.strip()

    def _line(self) -> str:
        if self.person and self.file is sys.stdin:
            return input("\n> ") + "\n"  # with the terminal's line editing
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
    """Standard input, or a file.

    Raises:
        DataError: there is no such file.
    """
    if path is None:
        yield Turns(sys.stdin, sys.stdin.isatty())
        return
    if not (Path(path).is_file() or Path(path).is_fifo()):
        raise DataError(f"--input={path}: no such file. Pass a file with a turn in every line.")
    with Path(path).open(encoding="utf-8") as file:
        yield Turns(file, Path(path).is_fifo() and sys.stdout.isatty())


def spoken(turns: Turns | None, everyone: "Group") -> Iterator[str]:
    """What is said, line by line and the same on every rank, until the end; only the first rank has
    `turns`."""
    from megalith.parallel.group import gather_objects

    while True:
        line = gather_objects(None if turns is None else turns.next(), everyone)[0]
        if line is None or line == EXIT:
            return
        assert isinstance(line, str)
        yield line


def take_turn(
    chat: "Chat", line: str, *, first: bool, forgiving: bool = False, stoppable: bool = False
) -> None:
    """Obey a command, or answer. `forgiving`: what goes wrong is told, and the conversation goes
    on; `stoppable`: so it does after an answer that was interrupted.

    Raises:
        DataError: where nobody sits who could do anything about it.
    """
    show = print_now if first else ignore
    if line == RESET:
        chat.reset()
    elif line == HELP:
        show(
            f"{RESET} begins again, {EXIT} ends, Ctrl-C ends an answer; anything else is said to "
            "the model.\n"
        )
    else:
        try:
            chat.say(line, show)
            show("\n")
        except DataError as error:
            if not forgiving:
                raise
            show(f"{error}\n")
        except KeyboardInterrupt:  # of several ranks each would stop at a token of its own
            if not stoppable:
                raise
            show(" [stopped]\n")
