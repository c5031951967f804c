"""Read the arguments of a training from its launch command or script; nothing is executed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import PurePath
from typing import Literal

from megalith.errors import ConfigError
from megalith.megatron.shell import (
    ArrayLiteral,
    Operator,
    Token,
    Variables,
    Word,
    tokenize,
    variable_names,
)

OTHER_PROGRAMS: Mapping[str, str] = {
    "pretrain_bert.py": "BERT",
    "pretrain_t5.py": "T5",
    "pretrain_vlm.py": "a multimodal model",
    "pretrain_retro.py": "RETRO",
    "pretrain_mamba.py": "a state-space or hybrid model",
    "pretrain_hybrid.py": "a state-space or hybrid model",
    "pretrain_ict.py": "a retriever",
    "pretrain_vision_classify.py": "a vision model",
    "pretrain_vision_dino.py": "a vision model",
    "pretrain_vision_inpaint.py": "a vision model",
    "train_rl.py": "a policy by reinforcement learning",
}
"""Training programs of Megatron other than pretrain_gpt.py, and what they train."""

MAX_SCRIPT = 2**17
"""Characters of a script. Heuristic: ten times a long one."""

MAX_CALLS = 50
"""Nesting depth of functions and `bash -c` commands. Heuristic: scripts nest two."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_LAUNCHERS = "torchrun", "torch.distributed.launch", "torch.distributed.run"
_DECLARE = "export", "declare", "typeset", "readonly", "local"


@dataclass(frozen=True, slots=True)
class Launch:
    """The command that starts a training."""

    program: str | None
    """Python file; None if only arguments were given."""

    arguments: tuple[str, ...]
    """Arguments of the program. A variable that is not set stays as `${NAME}`."""

    world: int | None
    """World size, if the command contains it."""


@dataclass(slots=True)
class _Block:
    """An `if`, loop, `case`, call or group whose commands are being read."""

    kind: Literal["if", "loop", "case", "group"]
    line: int
    runs: bool | None
    """Whether the current branch runs; None: unknown."""

    testing: bool = False
    """Whether the condition is being read."""

    taken: bool | None = False
    """Whether an earlier branch ran; None: unknown."""


@dataclass(frozen=True, slots=True)
class _Function:
    """A function defined by the script."""

    name: str
    line: int
    body: tuple[Token, ...]
    end: int
    """Position of the token after it."""


def split_command(words: Sequence[str]) -> Launch:
    """Split `torchrun ... pretrain_gpt.py ...` into the program and its arguments; words without a
    program are arguments.

    Raises:
        ConfigError: the program trains another kind of model.
    """
    position = _find_program(words)
    if position is None:
        return Launch(None, tuple(words), None)
    program = words[position]
    trained = OTHER_PROGRAMS.get(PurePath(program).name)
    if trained is not None:
        raise ConfigError(
            f"{program} trains {trained}, and only a GPT can be translated. Use a command with "
            "pretrain_gpt.py."
        )
    return Launch(program, tuple(words[position + 1 :]), _read_world_size(words[:position]))


def read_script(text: str, variables: Mapping[str, str]) -> Launch:
    """Return the training that a bash script starts. `variables` are set by the caller, and the
    script cannot change them.

    Raises:
        ConfigError: the script starts no training, several, or one whose arguments depend on an
            unknown condition; or it is too long, or its expansion is.
    """
    if len(text) > MAX_SCRIPT:
        raise ConfigError(
            f"it has {len(text):,} characters, and the limit is {MAX_SCRIPT:,}. Use a shorter "
            "script, with long "
            f"lists of data in a file for --data-args-path."
        )
    shell = _Shell(Variables(variables))
    shell.read(list(tokenize(text)))
    trainings = [
        launch
        for launch in shell.launches
        if {"--micro-batch-size", "--num-layers"} & set(launch.arguments)
    ]
    distinct = list(dict.fromkeys(trainings or shell.launches))
    if not distinct:
        raise ConfigError(
            f"none of the script's {shell.count} commands starts a training: expected a Python "
            "file and arguments, "
            f"such as torchrun ... pretrain_gpt.py --num-layers 32. Pass the arguments themselves."
        )
    if len(distinct) > 1:
        programs = ", ".join(str(launch.program) for launch in distinct)
        raise ConfigError(
            f"the script starts {len(distinct)} trainings ({programs}). Pass the arguments of the "
            "one you mean."
        )
    return distinct[0]


def _find_program(words: Sequence[str]) -> int | None:
    return next(
        (
            position
            for position, word in enumerate(words)
            if word.endswith(".py") and not word.startswith("-")
        ),
        None,
    )


def _read_world_size(launcher: Sequence[str]) -> int | None:
    """Return the world size of a launcher; None if another program (srun, mpirun) decides."""
    words = [part for word in launcher for part in word.split("=", 1)]
    if not any(PurePath(word).name in _LAUNCHERS for word in words):
        plain = bool(words) and all(
            re.fullmatch(r"python[\d.]*|-\w", PurePath(word).name) for word in words
        )
        return 1 if plain else None
    counts = []
    for name in ("nproc", "nnodes"):
        spelled = f"--{name}", f"--{name}_per_node", f"--{name}-per-node"
        value = next((after for word, after in pairwise(words) if word in spelled), "1")
        counts.append(int(value) if value.isdecimal() else None)
    processes, nodes = counts
    return None if processes is None or nodes is None else processes * nodes


@dataclass(slots=True)
class _Shell:
    """State while a script is read from top to bottom."""

    variables: Variables
    blocks: list[_Block] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    functions: dict[str, _Function] = field(default_factory=dict)
    count: int = 0
    depth: int = 0
    """Nesting depth of the functions and `bash -c` commands that are being read."""

    def read(self, script: list[Token]) -> None:
        """Read the commands of a script."""
        command: list[Word | ArrayLiteral] = []
        status: bool | None = True  # exit status of the last command; None: unknown
        runs: bool | None = True  # whether && and || let the next command run
        skip, position = False, 0
        script = [*script, Operator("\n", 0)]
        self.variables.charge(len(script))
        ends = _matching_braces(script)
        while position < len(script):
            function = None if command else _find_function(script, position, ends)
            if function is not None:
                self.functions[function.name] = function
                position = function.end
                continue
            token = script[position]
            position += 1
            if not isinstance(token, Operator):
                command += [] if skip else [token]
                skip = False
            elif token.text[:1] in "<>" or token.text in ("&>", "&>>"):
                skip = True  # a file, not an argument
                if command and token.glued and _plain_text(command[-1]).isdecimal():
                    command.pop()  # the 2 of 2>&1
            else:
                status = self.command(command, runs, status) if command else status
                command = []
                decided = {"&&": status, "||": None if status is None else not status}
                runs = decided.get(token.text, True)

    def command(
        self, command: list[Word | ArrayLiteral], runs: bool | None, status: bool | None
    ) -> bool | None:
        """Read one command and return its exit status, or `status`, that of the previous one, if it
        does not run."""
        self.count += 1
        negated = False
        first = 0
        while first < len(command) and self.keyword(
            _plain_text(command[first]), command[first].line
        ):
            negated ^= _plain_text(command[first]) == "!"
            first = (
                len(command)
                if _plain_text(command[first]) in ("for", "case", "select")
                else first + 1
            )
        command = command[first:]
        active = runs
        self.variables.charge(1 + len(self.blocks) // 10)
        for block in self.blocks:
            active = _both(active, True if block.testing else block.runs)
        if not command or active is False:
            return status
        result = self.run(command, active)
        result = None if runs is None else not result if negated and result is not None else result
        if self.blocks and self.blocks[-1].testing:
            self.blocks[-1].runs = result
        return result

    def run(self, command: list[Word | ArrayLiteral], active: bool | None) -> bool | None:
        """Interpret a test, a function call, an assignment or the start of a training."""
        if _plain_text(command[0]) in ("[", "[[", "test"):
            return self.variables.test([word for word in command if isinstance(word, Word)])
        if _plain_text(command[0]) in self.functions:
            self.call(self.functions[_plain_text(command[0])], command[1:], active)
            return None
        return True if self.assignments(command, active) else self.start(command)

    def call(
        self, function: _Function, words: list[Word | ArrayLiteral], active: bool | None
    ) -> None:
        """Read the body of a function with its own $1, $2 and so on."""
        self.enter()
        outside, self.functions = (
            self.functions,
            {n: f for n, f in self.functions.items() if n != function.name},
        )
        before = self.variables.fixed
        given = [
            value
            for word in words
            if isinstance(word, Word)
            for value in self.variables.expand_word(word)
        ]
        named = {name: value for name, value in before.items() if not name.isdecimal()}
        self.variables.fixed = named | {str(number): value for number, value in enumerate(given, 1)}
        depth = len(self.blocks)
        self.blocks.append(_Block("group", words[0].line if words else function.line, active))
        self.read(list(function.body))
        del self.blocks[depth:]
        self.variables.fixed, self.functions = before, {**outside, **self.functions}
        self.depth -= 1

    def enter(self) -> None:
        """Increase the nesting depth.

        Raises:
            ConfigError: they are nested too deeply.
        """
        self.depth += 1
        if self.depth > MAX_CALLS:
            raise ConfigError(
                f"more than {MAX_CALLS} functions or `bash -c` call each other. Pass the arguments "
                "themselves."
            )

    def keyword(self, word: str, line: int) -> bool:
        """Open, continue or close a block; return False for a word that is no keyword."""
        block = self.blocks[-1] if self.blocks else None
        if word in ("if", "while"):
            self.blocks.append(_Block("if" if word == "if" else "loop", line, None, testing=True))
        elif word in ("for", "select", "case", "until"):
            self.blocks.append(_Block("case" if word == "case" else "loop", line, None))
        elif word == "{":
            self.blocks.append(_Block("group", line, True))
        elif word in ("fi", "done", "esac", "}"):
            if block is not None:
                self.blocks.pop()
        elif block is not None and word in ("then", "do"):
            block.testing = False
            if word == "then":
                block.runs, block.taken = _branch(block)
            elif block.runs is not False:
                block.runs = None  # the number of iterations is unknown
        elif block is not None and word in ("elif", "else"):
            block.testing, block.runs = word == "elif", True
            if word == "else":
                block.runs, block.taken = _branch(block)
        else:
            return word in ("!", "time", "in")
        return True

    def assignments(self, command: list[Word | ArrayLiteral], active: bool | None) -> bool:
        """Remove assignments from the front of a command; return whether nothing is left."""
        if _plain_text(command[0]) in _DECLARE:
            del command[0]
            command[:] = [word for word in command if _assigns(word)]
        while command and _assigns(command[0]):
            word = command.pop(0)
            name, append, literal = _assignment(word)
            line = self.blocks[-1].line if self.blocks else word.line
            self.variables.assign(name, literal, append=append, active=active, line=line)
        return not command

    def start(self, command: list[Word | ArrayLiteral]) -> bool | None:
        """Record a command that starts a training; the exit status of others is unknown."""
        words = [
            value
            for word in command
            if isinstance(word, Word)
            for value in self.variables.expand_word(word)
        ]
        if words and words[0] in ("echo", "printf"):
            return True
        inner = next((word for word in words if re.search(r"\.py\s", word)), None)
        if inner is not None and _find_program(words) is None:
            # bash -c "torchrun ...", or one text with all of it
            inside = _Shell(self.variables, depth=self.depth)
            inside.enter()
            inside.read(list(tokenize(inner)))
            self.launches += inside.launches
            if inside.launches:
                self.reject_uncertain(command)
        elif _find_program(words) is not None:
            launch = split_command(words)
            if any(word.startswith("--") for word in launch.arguments):
                self.reject_uncertain(command)
                self.launches.append(launch)
        return None

    def reject_uncertain(self, command: list[Word | ArrayLiteral]) -> None:
        """Reject a training whose arguments depend on an unknown condition.

        Raises:
            ConfigError: they do.
        """
        uncertain = self.variables.uncertain
        for name in (
            name for word in command if isinstance(word, Word) for name in variable_names(word)
        ):
            if name in uncertain:
                raise ConfigError(
                    f"{name} depends on a condition at line {uncertain[name]} of the script, which "
                    "is not known without running it. Pass --set NAME=VALUE for a variable of the "
                    f"condition, or for {name} itself."
                )


def _matching_braces(script: Sequence[Token]) -> dict[int, int]:
    """Return the position of the `}` that closes each `{`, if there is one."""
    ends: dict[int, int] = {}
    open_braces: list[int] = []
    for position, token in enumerate(script):
        brace = _brace(token)
        if brace == 1:
            open_braces.append(position)
        elif brace == -1 and open_braces:
            ends[open_braces.pop()] = position
    return ends


def _find_function(
    script: Sequence[Token], position: int, ends: Mapping[int, int]
) -> _Function | None:
    """Return the function whose definition starts at `position`: `name() { ... }` or
    `function name { ... }`."""
    head = [
        token.text if isinstance(token, Operator) else _plain_text(token)
        for token in script[position : position + 6]
    ]
    named = head[:1] == ["function"]
    name, rest = (head[1:2], head[2:]) if named else (head[:1], head[1:])
    brackets = rest[:2] == ["(", ")"]
    begin = position + 1 + named + 2 * brackets
    while (
        begin < len(script) and isinstance(token := script[begin], Operator) and token.text == "\n"
    ):
        begin += 1
    if not (named or brackets) or not name[0] or begin >= len(script) or _brace(script[begin]) != 1:
        return None
    end = ends.get(begin)
    return (
        None
        if end is None
        else _Function(name[0], script[begin].line, tuple(script[begin + 1 : end]), end + 1)
    )


def _brace(token: Token) -> int:
    """Return 1 for `{`, -1 for `}`, otherwise 0."""
    return 0 if isinstance(token, Operator) else {"{": 1, "}": -1}.get(_plain_text(token), 0)


def _both(left: bool | None, right: bool | None) -> bool | None:
    """Return `left and right`; None means unknown."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _branch(block: _Block) -> tuple[bool | None, bool | None]:
    """Return whether the branch after the last condition runs, and whether any branch has run."""
    runs = _both(block.runs, None if block.taken is None else not block.taken)
    taken = True if block.taken or runs else None if block.taken is None or runs is None else False
    return runs, taken


def _plain_text(word: Word | ArrayLiteral) -> str:
    """Return the text of a word without expansions and quotes, otherwise ""."""
    if isinstance(word, ArrayLiteral) or any(
        part.kind != "text" or part.quoted for part in word.parts
    ):
        return ""
    return "".join(part.text for part in word.parts)


def _assigns(word: Word | ArrayLiteral) -> bool:
    return isinstance(word, ArrayLiteral) or _ASSIGNMENT.match(_leading_text(word)) is not None


def _leading_text(word: Word) -> str:
    """Return the unquoted text at the start of a word."""
    return "".join(
        part.text
        for part in takewhile(lambda part: part.kind == "text" and not part.quoted, word.parts)
    )


def _assignment(word: Word | ArrayLiteral) -> tuple[str, bool, Word | ArrayLiteral]:
    """Return name, whether it appends, and value of NAME=value, NAME+=value or an array."""
    if isinstance(word, ArrayLiteral):
        return word.name, word.append, word
    match = _ASSIGNMENT.match(_leading_text(word))
    assert match is not None
    # each unquoted character is one part
    return (
        match[1],
        bool(match[2]),
        Word(word.parts[match.end() :], word.line),
    )
