"""`megalith from-megatron`: translate Megatron arguments, or a launch script, to a run or to a
`megalith serve` command."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from megalith import storage
from megalith.cli.arguments import parse_options
from megalith.cli.output import format_value, print_json
from megalith.config.tree import dump_yaml, to_dict
from megalith.data.tokenizer import build_tokenizer
from megalith.errors import ConfigError, DataError, raise_all
from megalith.megatron.launch import Launch, read_script, split_command
from megalith.megatron.parse import (
    Arguments,
    FlagReport,
    expand_file_flags,
    mapped_flags,
    parse_arguments,
)
from megalith.megatron.serving import format_command, is_serving_program, translate_serving
from megalith.megatron.translate import Translation, named_tokenizer, translate
from megalith.megatron.yaml_cfg import expand_yaml_flag
from megalith.rules.run import run_problems

HEADINGS = (
    ("mapped", "none", "mapped"),
    ("already", "none", "nothing to do"),
    ("explained", "none", "done differently"),
    ("explained", "numbers", "done differently, which changes the numbers"),
    ("not mapped", "none", "not mapped; the numbers stay the same"),
    ("not mapped", "numbers", "not mapped, which changes the numbers"),
    ("not mapped", "model", "not mapped, and rejected: the model or training would differ"),
)


@dataclass(frozen=True, kw_only=True)
class FromMegatron:
    """Translate Megatron arguments (all other words), or a launch script, to a run; prints YAML to
    standard output.

    A report on each argument goes to standard error. Arguments after --script override those in the
    script. The arguments of a text generation server become a `megalith serve` command.

    Example: megalith from-megatron --script train_llama3_8b.sh --output llama3_8b.yaml
    """

    script: str | None = None
    """Bash script that launches pretrain_gpt.py or a text generation server; it is parsed, not
    executed."""

    set: tuple[str, ...] = ()
    """NAME=VALUE for variables that the script expects from its environment; 1=VALUE for its
    first argument."""

    serve: bool = False
    """Write a `megalith serve` command instead of a run; default: if the program is one of
    Megatron's text generation servers."""

    output: str | None = None
    """File to which the YAML, or the command, is written."""

    name: str | None = None
    """Name of the run; default: that of the script."""

    world: int | None = None
    """World size, if the command does not contain it; sets a missing global batch size."""

    strict: bool = False
    """Also reject arguments that change the numbers, not only those that change the model or
    training."""

    json: bool = False
    """Print one JSON document: the run, and the report on each argument."""


def main(argv: list[str]) -> int:
    """Run the command; the exit code is 2 if there is no run, or `--strict` rejects it."""
    own, words = split_options(argv)
    options = parse_options(FromMegatron, own, prog="megalith from-megatron")
    launch = _launch(options, words)
    _reject_script_among_arguments(words)
    words = [*launch.arguments, *words] if options.script else list(launch.arguments)
    words = expand_file_flags(expand_yaml_flag(words))
    if not words:
        raise ConfigError(
            f"{len(words)} arguments were given. Pass Megatron arguments, or --script FILE."
        )
    if options.serve or is_serving_program(launch.program):
        return _serve(options, words)
    words = expand_checkpoint_args(words)
    translation = translate(
        words,
        name=options.name or (Path(options.script).stem if options.script else "from_megatron"),
        world=options.world or launch.world,
        tokenizer_vocab=_tokenizer_vocab(words),
    )
    refusals = translation.refusals(strict=options.strict)
    if translation.run is not None:
        refusals += run_problems(translation.run, translation.ranks)
    text = "" if translation.run is None or refusals else dump_yaml(translation.run)
    if options.json:
        print_json(_document(translation, refusals))
    else:
        print(report(translation.entries), file=sys.stderr)
        raise_all(refusals)
    if text and options.output is not None:
        _write(options.output, text)
    if text and not options.json:
        print(_next_step(options.output, translation), file=sys.stderr)
        print("" if options.output else text, end="")
    return 2 if refusals else 0


USE_CHECKPOINT_ARGS = "--use-checkpoint-args"


def expand_checkpoint_args(words: Sequence[str]) -> list[str]:
    """Return the arguments with `--use-checkpoint-args` replaced by those of the model and the
    tokenizer in the checkpoint of --load or --pretrained-checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, or its arguments describe no supported model.
        ConfigError: no checkpoint is named, or other arguments contradict those of the checkpoint.
    """
    if USE_CHECKPOINT_ARGS not in words:
        return list(words)
    words = [word for word in words if word != USE_CHECKPOINT_ARGS]
    arguments = parse_arguments(words)
    source = arguments.value("--load") or arguments.value("--pretrained-checkpoint")
    if source is None:
        raise ConfigError(
            f"{USE_CHECKPOINT_ARGS} reads the arguments of a checkpoint, and none is named. Pass "
            "--load or --pretrained-checkpoint with its folder."
        )
    from megalith.hf.megatron_args import translate_args
    from megalith.hf.megatron_checkpoint import locate_megatron, read_megatron_folder

    step = arguments.value("--ckpt-step")
    path = locate_megatron(Path(str(source)), step if isinstance(step, int) else None)
    if path is None:
        raise ConfigError(
            f"{USE_CHECKPOINT_ARGS}: {source} is not a folder of Megatron checkpoints. Pass --load "
            "with one, or the arguments of the model."
        )
    folder = read_megatron_folder(path)
    stored = translate_args(folder.common.get("args"), common=folder.common)
    stored.require_model(str(path))
    chosen = select_model_words(stored.words)
    raise_all(find_contradictions(chosen, arguments, str(path)))
    given = {flag for flag in mapped_flags() if arguments.given(flag)}
    return [*(word for group in chosen if group[0] not in given for word in group[1]), *words]


def select_model_words(words: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the flags of the model and the tokenizer, each with all of its words."""
    flags, groups = mapped_flags(), list[tuple[str, tuple[str, ...]]]()
    for word in words:
        if word.startswith("--"):
            groups.append((word.partition("=")[0], (word,)))
        else:
            name, group = groups[-1]
            groups[-1] = (name, (*group, word))
    return [
        group
        for group in groups
        if any(
            one.startswith(("model.", "tokenizer.", "train.seq_len"))
            for one in flags[group[0]].setting
        )
    ]


def find_contradictions(
    chosen: Sequence[tuple[str, tuple[str, ...]]], arguments: Arguments, source: str
) -> list[str]:
    """Return a message for each argument of the command line that differs from the checkpoint's."""
    problems = []
    for flag, group in chosen:
        stored = parse_arguments(group).value(flag)
        if arguments.given(flag) and arguments.value(flag) != stored:
            problems.append(
                f"{flag} {arguments.value(flag)}: {source} has {stored}, which "
                f"{USE_CHECKPOINT_ARGS} uses. Remove {flag}, or {USE_CHECKPOINT_ARGS}."
            )
    return problems


def _serve(options: FromMegatron, words: Sequence[str]) -> int:
    """Print the `megalith serve` command for the arguments of a text generation server."""
    translation = translate_serving(words)
    refusals = translation.refusals(strict=options.strict)
    line = "" if refusals else format_command(translation.command)
    if options.json:
        settings = None if translation.run is None or refusals else to_dict(translation.run)
        document = {"run": settings, "command": [] if refusals else list(translation.command)}
        print_json(document | _reports(translation.entries) | {"refused": refusals})
    else:
        print(report(translation.entries), file=sys.stderr)
        raise_all(refusals)
    if line and options.output is not None:
        _write(options.output, f"{line}\n")
    if line and not options.json and options.output is None:
        print(line)
    return 2 if refusals else 0


def split_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line into this command's options and Megatron's arguments."""
    own, words, values = [], [], []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        if word in ("--strict", "--serve", "--json", "--help", "-h"):
            own.append(word)
        elif name in ("--script", "--output", "--name", "--world", "--set"):
            following = value if equals else next(rest, None)
            if following is None:
                raise ConfigError(f"{name} has no value. Use {name} VALUE.")
            value = following
            own += [name, value] if name != "--set" else []
            values += [value] if name == "--set" else []
        else:
            words.append(word)
    return own + (["--set", *values] if values else []), words


def report(entries: Sequence[FlagReport]) -> str:
    """Format the report on each argument, grouped by verdict; arguments with the same text share
    it."""
    lines = []
    for verdict, effect, heading in HEADINGS:
        chosen = [entry for entry in entries if (entry.verdict, entry.effect) == (verdict, effect)]
        lines += [f"\n{heading}"] if chosen else []
        if verdict == "mapped":
            lines += [_mapped_line(entry) for entry in chosen]
            continue
        for text in dict.fromkeys(entry.text for entry in chosen):
            flags = ", ".join(_short(entry.flag) for entry in chosen if entry.text == text)
            lines.append(f"  {flags}\n      {text}")
    return "\n".join(lines).strip("\n")


def _mapped_line(entry: FlagReport) -> str:
    why = f"  ({entry.text})" if entry.text else ""
    return f"  {_short(entry.flag):<48} {entry.setting} = {_short(format_value(entry.value))}{why}"


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def _launch(options: FromMegatron, words: Sequence[str]) -> Launch:
    """Return the launch described by the script or the words."""
    variables = dict(_variable(word) for word in options.set)
    if options.script is None:
        if variables:
            raise ConfigError(
                f"--set {' '.join(options.set)} needs a script. Use it with --script FILE."
            )
        return split_command(words)
    try:
        text = storage.read_text(Path(options.script), allow_pipe=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--script {options.script} cannot be read: {error}. Pass a bash script."
        ) from None
    try:
        return read_script(text, variables)
    except ConfigError as error:
        raise ConfigError(f"--script {options.script}: {error}") from None


def _variable(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not (name.isidentifier() or name.isdecimal()):
        raise ConfigError(
            f"--set {word}: expected NAME=VALUE. Use for example --set "
            "DATA_PATH=/data/text_document."
        )
    return name, value


def _reject_script_among_arguments(words: Sequence[str]) -> None:
    """Reject a script before the first argument, which must be passed with --script.

    Raises:
        ConfigError: there is one.
    """
    first = list(takewhile(lambda word: not word.startswith("-"), words))
    script = next((word for word in first if word.endswith((".sh", ".bash"))), None)
    if script is not None:
        note = "" if Path(script).is_file() else ", and the file does not exist"
        raise ConfigError(
            f"{script} is not a Megatron argument{note}. Use --script FILE to read a launch script."
        )


def _tokenizer_vocab(words: Sequence[str]) -> int | None:
    """Return the vocabulary size of the tokenizer named by the arguments; None if its files are
    not available."""
    config = named_tokenizer(words)
    if config is None:
        return None
    try:
        return build_tokenizer(config).vocab_size
    except (ConfigError, DataError):
        return None


def _document(translation: Translation, refusals: list[str]) -> dict[str, object]:
    return {
        "run": None if translation.run is None or refusals else to_dict(translation.run),
        "ranks": translation.ranks,
        **_reports(translation.entries),
        "refused": refusals,
    }


def _reports(entries: Sequence[FlagReport]) -> dict[str, object]:
    """Return the reports by verdict."""
    kinds = ("mapped", "already", "explained", "not mapped")
    return {
        kind.replace(" ", "_"): [asdict(entry) for entry in entries if entry.verdict == kind]
        for kind in kinds
    }


def _write(path: str, text: str) -> None:
    """Write the YAML, or the command; an existing file is not overwritten."""
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"--output {path} already exists. Use another name, or remove that file first."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"--output {path} cannot be written: {error}. Use a folder that exists."
        ) from None


def _next_step(output: str | None, translation: Translation) -> str:
    file = output or "FILE.yaml"
    ranks = f" --nproc {translation.ranks}" if translation.ranks > 1 else ""
    return (
        f"\nnext: megalith train {file}{ranks}   (one machine; on several, the same command "
        "under torchrun)"
    )
