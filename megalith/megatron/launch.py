"""A launch script as Megatron's arguments: variables and arrays are filled in, nothing is ever
run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import PurePath
from typing import Literal

from megalith.errors import ConfigError
from megalith.megatron.shell import ArrayLiteral, Operator, Token, Word, tokens
from megalith.megatron.variables import Variables, names_in

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
"""Megatron's trainings that are not of a GPT, and what each trains."""

MAX_SCRIPT = 2**17
"""Characters of a script. Heuristic: ten times a long one."""

MAX_CALLS = 50
"""Functions and texts of `bash -c` that are followed inside each other. Heuristic: scripts nest
two."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_LAUNCHERS = ("torchrun", "torch.distributed.launch", "torch.distributed.run")
_DECLARE = ("export", "declare", "typeset", "readonly", "local")


@dataclass(frozen=True, slots=True)
class Launch:
    """How a job starts its training."""

    program: str | None
    """The Python file; None when only arguments were given."""

    arguments: tuple[str, ...]
    """What stands behind it. A variable that nothing sets stays as `${NAME}`."""

    world: int | None
    """Ranks of the job, where the command says so."""


@dataclass(slots=True)
class _Block:
    """An `if`, loop, `case`, call or group that is open."""

    kind: Literal["if", "loop", "case", "group"]
    line: int
    runs: bool | None
    """Does the part that is being read run? None: unknown."""

    testing: bool = False
    """The condition is being read."""

    taken: bool | None = False
    """Did an earlier branch run?"""


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of the script."""

    name: str
    line: int
    body: tuple[Token, ...]
    end: int
    """Where the script goes on behind it."""


def split_command(words: Sequence[str]) -> Launch:
    """The program and its arguments out of `torchrun ... pretrain_gpt.py ...`, or arguments alone.

    Raises:
        ConfigError: the program trains another kind of model.
    """
    place = _program_place(words)
    if place is None:
        return Launch(None, tuple(words), None)
    program = words[place]
    trained = OTHER_PROGRAMS.get(PurePath(program).name)
    if trained is not None:
        raise ConfigError(
            f"{program} trains {trained}, and only a GPT can be translated yet. Use a command with "
            "pretrain_gpt.py."
        )
    return Launch(program, tuple(words[place + 1 :]), _world(words[:place]))


def read_script(text: str, variables: Mapping[str, str]) -> Launch:
    """The training that a bash script starts. `variables` are set from outside; the script cannot
    change them.

    Raises:
        ConfigError: the script starts no training, several, or one whose arguments depend on what
            cannot be told; or it is too long, or expands to too much.
    """
    if len(text) > MAX_SCRIPT:
        raise ConfigError(
            f"it has {len(text):,} characters, and the limit is {MAX_SCRIPT:,}. Use a shorter "
            "script, with long "
            f"lists of data in a file for --data-args-path."
        )
    shell = _Shell(Variables(variables))
    shell.read(list(tokens(text)))
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


def _program_place(words: Sequence[str]) -> int | None:
    return next(
        (
            place
            for place, word in enumerate(words)
            if word.endswith(".py") and not word.startswith("-")
        ),
        None,
    )


def _world(launcher: Sequence[str]) -> int | None:
    """Ranks that a launcher starts; None when another program (srun, mpirun) decides."""
    words = [part for word in launcher for part in word.split("=", 1)]
    if not any(PurePath(word).name in _LAUNCHERS for word in words):
        plain = bool(words) and all(
            re.fullmatch(r"python[\d.]*|-\w", PurePath(word).name) for word in words
        )
        return 1 if plain else None
    counts = []
    for name in ("nproc", "nnodes"):
        spelled = (f"--{name}", f"--{name}_per_node", f"--{name}-per-node")
        value = next((after for word, after in pairwise(words) if word in spelled), "1")
        counts.append(int(value) if value.isdecimal() else None)
    processes, nodes = counts
    return None if processes is None or nodes is None else processes * nodes


@dataclass(slots=True)
class _Shell:
    """What is known while a script is read from top to bottom."""

    variables: Variables
    blocks: list[_Block] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    functions: dict[str, _Function] = field(default_factory=dict)
    count: int = 0
    depth: int = 0
    """Functions and texts that are being read now, one inside the other."""

    def read(self, script: list[Token]) -> None:
        """Go through the commands of a script."""
        command: list[Word | ArrayLiteral] = []
        status: bool | None = True  # how the last command ended; None: it cannot be told
        runs: bool | None = True  # does the next one run, as far as && and || decide?
        skip, place = False, 0
        script = [*script, Operator("\n", 0)]
        self.variables.charge(len(script))
        ends = _matching_braces(script)
        while place < len(script):
            function = None if command else _function(script, place, ends)
            if function is not None:
                self.functions[function.name] = function
                place = function.end
                continue
            token = script[place]
            place += 1
            if not isinstance(token, Operator):
                command += [] if skip else [token]
                skip = False
            elif token.text[:1] in "<>" or token.text in ("&>", "&>>"):
                skip = True  # a file, not an argument
                if command and token.glued and _plain(command[-1]).isdecimal():
                    command.pop()  # the 2 of 2>&1
            else:
                status = self.command(command, runs, status) if command else status
                command = []
                decided = {"&&": status, "||": None if status is None else not status}
                runs = decided.get(token.text, True)

    def command(
        self, command: list[Word | ArrayLiteral], runs: bool | None, status: bool | None
    ) -> bool | None:
        """Read one command; returns how it ends, or `status`, how the one before did, when it does
        not run."""
        self.count += 1
        negated = False
        first = 0
        while first < len(command) and self.keyword(_plain(command[first]), command[first].line):
            negated ^= _plain(command[first]) == "!"
            first = (
                len(command) if _plain(command[first]) in ("for", "case", "select") else first + 1
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
        """Follow a command that sets variables, asks a question or starts a training."""
        if _plain(command[0]) in ("[", "[[", "test"):
            return self.variables.test([word for word in command if isinstance(word, Word)])
        if _plain(command[0]) in self.functions:
            self.call(self.functions[_plain(command[0])], command[1:], active)
            return None
        return True if self.assignments(command, active) else self.start(command)

    def call(
        self, function: _Function, words: list[Word | ArrayLiteral], active: bool | None
    ) -> None:
        """Follow a function of the script, with its own $1, $2 and so on."""
        self.enter()
        outside, self.functions = (
            self.functions,
            {n: f for n, f in self.functions.items() if n != function.name},
        )
        before = self.variables.fixed
        given = [
            value for word in words if isinstance(word, Word) for value in self.variables.fill(word)
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
        """Count a function or text that is about to be read inside another.

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
        """Open, turn or close a block. False for an ordinary word."""
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
                block.runs = None  # how often cannot be told
        elif block is not None and word in ("elif", "else"):
            block.testing, block.runs = word == "elif", True
            if word == "else":
                block.runs, block.taken = _branch(block)
        else:
            return word in ("!", "time", "in")
        return True

    def assignments(self, command: list[Word | ArrayLiteral], active: bool | None) -> bool:
        """Take assignments off the front of a command; True when nothing is left of it."""
        if _plain(command[0]) in _DECLARE:
            del command[0]
            command[:] = [word for word in command if _assigns(word)]
        while command and _assigns(command[0]):
            word = command.pop(0)
            name, append, literal = _assignment(word)
            line = self.blocks[-1].line if self.blocks else word.line
            self.variables.assign(name, literal, append=append, active=active, line=line)
        return not command

    def start(self, command: list[Word | ArrayLiteral]) -> bool | None:
        """Note a command that starts a training; how others end is unknown."""
        words = [
            value
            for word in command
            if isinstance(word, Word)
            for value in self.variables.fill(word)
        ]
        if words and words[0] in ("echo", "printf"):
            return True
        inner = next((word for word in words if re.search(r"\.py\s", word)), None)
        if (
            inner is not None and _program_place(words) is None
        ):  # bash -c "torchrun ...", or one text with all of it
            inside = _Shell(self.variables, depth=self.depth)
            inside.enter()
            inside.read(list(tokens(inner)))
            self.launches += inside.launches
            if inside.launches:
                self.refuse_unsure(command)
        elif _program_place(words) is not None:
            launch = split_command(words)
            if any(word.startswith("--") for word in launch.arguments):
                self.refuse_unsure(command)
                self.launches.append(launch)
        return None

    def refuse_unsure(self, command: list[Word | ArrayLiteral]) -> None:
        """A training whose arguments hang on a condition that cannot be judged is not
        translated."""
        unsure = self.variables.unsure
        for name in (name for word in command if isinstance(word, Word) for name in names_in(word)):
            if name in unsure:
                raise ConfigError(
                    f"{name} is changed under a condition, at line {unsure[name]} of the script, "
                    "that cannot be judged "
                    "without running it. Pass --set NAME=VALUE for what it asks about, or for "
                    f"{name} itself."
                )


def _matching_braces(script: Sequence[Token]) -> dict[int, int]:
    """Return the place of the `}` that closes each `{`; one that is not closed has none."""
    ends: dict[int, int] = {}
    open_braces: list[int] = []
    for place, token in enumerate(script):
        brace = _brace(token)
        if brace == 1:
            open_braces.append(place)
        elif brace == -1 and open_braces:
            ends[open_braces.pop()] = place
    return ends


def _function(script: Sequence[Token], place: int, ends: Mapping[int, int]) -> _Function | None:
    """The function whose definition begins at `place`: `name() { ... }` or `function name { ...
    }`."""
    head = [
        token.text if isinstance(token, Operator) else _plain(token)
        for token in script[place : place + 6]
    ]
    named = head[:1] == ["function"]
    name, rest = (head[1:2], head[2:]) if named else (head[:1], head[1:])
    brackets = rest[:2] == ["(", ")"]
    begin = place + 1 + named + 2 * brackets
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
    """1 for `{`, -1 for `}`."""
    return 0 if isinstance(token, Operator) else {"{": 1, "}": -1}.get(_plain(token), 0)


def _both(left: bool | None, right: bool | None) -> bool | None:
    """`and` of answers that may be unknown."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def _branch(block: _Block) -> tuple[bool | None, bool | None]:
    """Whether the branch whose condition was just read runs, and whether any branch did so far."""
    runs = _both(block.runs, None if block.taken is None else not block.taken)
    taken = True if block.taken or runs else None if block.taken is None or runs is None else False
    return runs, taken


def _plain(word: Word | ArrayLiteral) -> str:
    """The letters of a word that has nothing to fill in and no quotes, else ""."""
    if isinstance(word, ArrayLiteral) or any(
        part.kind != "text" or part.quoted for part in word.parts
    ):
        return ""
    return "".join(part.text for part in word.parts)


def _assigns(word: Word | ArrayLiteral) -> bool:
    return isinstance(word, ArrayLiteral) or _ASSIGNMENT.match(_letters(word)) is not None


def _letters(word: Word) -> str:
    """The unquoted letters that a word begins with."""
    return "".join(
        part.text
        for part in takewhile(lambda part: part.kind == "text" and not part.quoted, word.parts)
    )


def _assignment(word: Word | ArrayLiteral) -> tuple[str, bool, Word | ArrayLiteral]:
    """Name, whether it appends, and value of NAME=value, NAME+=value or an array."""
    if isinstance(word, ArrayLiteral):
        return word.name, word.append, word
    match = _ASSIGNMENT.match(_letters(word))
    assert match is not None
    return (
        match[1],
        bool(match[2]),
        Word(word.parts[match.end() :], word.line),
    )  # an unquoted letter is one part
