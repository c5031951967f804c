"""Project-specific lint rules that ruff and mypy cannot check, such as where collectives may be
launched, what may be unpickled, and how long functions may be.

usage: lint_project.py [FILE_OR_FOLDER ...]   (default: the folders of the repository that hold
Python)

Files are parsed, never executed. A comment with the rule's name and a reason suppresses findings in
its line:

    exec(code, scope)  # lint: allow eval-exec: the snippets are our own README

Old words are listed in tools/old_words.yaml, with the terms of docs/glossary.md that replace them.
Markdown files are searched for them too, in code between backticks and in fenced blocks.

Not covered: assertions about user input instead of bugs, and network access at import.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

if __name__ == "__main__":  # of a script, Python searches its own folder only
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.vocabulary import find_american_spelling, read_vocabulary, split_words

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("megalith", "tools", "benchmarks", "examples", "tests", "docs", "README.md")
MAX_FUNCTION_STATEMENTS = 55
MAX_FILE_STATEMENTS = 560
"""Statements, because the formatter decides how many lines they take."""

COLLECTIVE_FOLDERS = (
    "megalith/parallel/",
    "megalith/launch/",
    "megalith/testing/",
    "megalith/verify/",
)
"""Where collectives may be launched: parallel/ has the groups, the others create and check them."""

CUDA_FILES = (
    "megalith/observe/machine.py",
    "megalith/observe/machine.py",
    "megalith/launch/launcher.py",
)
"""Files that may contain the device name "cuda"; others take the device as an argument."""

CHECKER_FILES = ("megalith/verify/types.py", "megalith/verify/type_rules.py")
"""The only files that import the type checker of layouts."""

VAGUE_NAMES = ("utils.py", "util.py", "helpers.py", "common.py", "misc.py")
OPTIONAL_PACKAGES = (
    "fastapi",
    "flash_attn",
    "huggingface_hub",
    "llguidance",
    "pyarrow",
    "sentencepiece",
    "tensorboard",
    "tiktoken",
    "torch.utils.tensorboard",
    "transformers",
    "triton",
    "uvicorn",
    "wandb",
)

JOINED_COLLECTIVES = frozenset(
    {
        *(
            "all_reduce",
            "broadcast",
            "reduce",
            "all_gather",
            "gather",
            "scatter",
            "reduce_scatter",
            "all_to_all",
        ),
        *(
            "barrier",
            "monitored_barrier",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_to_all_single",
        ),
        *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    }
)
"""Every rank of the group has to call these."""
PAIRED = frozenset(
    {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "P2POp"}
)
COLLECTIVES = JOINED_COLLECTIVES | PAIRED
STARTERS = COLLECTIVES | {"batch_isend_irecv", "new_group", "init_process_group"}
OUR_COLLECTIVE_MODULES = ("megalith.parallel.group", "megalith.parallel.collectives")
OUR_COLLECTIVES = frozenset(
    {
        *("all_reduce_", "start_all_reduce_", "all_reduce_max_", "gather_objects", "barrier"),
        *(
            "enter",
            "leave",
            "all_reduce",
            "gather",
            "reduce_scatter",
            "all_gather_invariant",
            "split",
            "all_to_all",
        ),
    }
)
VAGUE_CLASSES = frozenset(
    ("Way", "Room", "Stay", "Use", "Row", "Part", "Entry", "Place", "Sent", "Kept", "Seen")
)
VAGUE_VARIABLES = frozenset(("found", "mine", "theirs", "told", "there", "here"))
SYNCHRONIZING = ("item", "cpu", "tolist", "synchronize")

Places = Iterator[tuple[int, str]]
"""Line number and what is wrong there."""


@dataclass(frozen=True)
class Source:
    """One parsed file and the names its imports give to things."""

    path: str
    """Relative to the repository, with forward slashes."""
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def in_package(self) -> bool:
        """Whether users run this file."""
        return self.path.startswith("megalith/")

    @cached_property
    def lines(self) -> list[str]:
        """The text, line by line."""
        return self.text.splitlines()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        """Every string that is a statement: docstrings of modules, classes, functions and
        attributes."""
        statements = [node.value for node in self.nodes if isinstance(node, ast.Expr)]
        return [
            value
            for value in statements
            if isinstance(value, ast.Constant) and isinstance(value.value, str)
        ]

    @cached_property
    def documentation(self) -> list[tuple[int, str]]:
        """Line and text of every docstring."""
        return [(node.lineno, str(node.value)) for node in self.docstrings]

    @cached_property
    def strings(self) -> list[tuple[int, str]]:
        """Line and text of every string literal that is not a docstring."""
        docstrings = {id(node) for node in self.docstrings}
        return [
            (node.lineno, node.value)
            for node in self.nodes
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ]

    @cached_property
    def identifiers(self) -> list[tuple[int, str]]:
        """Line and name of everything that the file defines: classes, functions, parameters,
        variables, attributes."""
        names: list[tuple[int, str]] = []
        for node in self.nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.append((node.lineno, node.name))
            elif isinstance(node, ast.arg):
                names.append((node.lineno, node.arg))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.append((node.lineno, node.attr))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.append((node.lineno, node.id))
        return names

    @cached_property
    def imported(self) -> dict[str, str]:
        """Local name -> what it stands for: {"dist": "torch.distributed"}."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.ImportFrom):
                names |= {
                    alias.asname or alias.name: f"{node.module}.{alias.name}"
                    for alias in node.names
                }
        return names

    def name(self, node: ast.AST) -> str:
        """The full dotted name of an expression, "" for anything that is not a name."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            base = self.name(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Every call, with the full name of what is called."""
        for node in self.nodes:
            if isinstance(node, ast.Call):
                yield node, self.name(node.func)


def parse(path: str, text: str) -> Source:
    """The file `text`, to be judged as if it lay at `path`."""
    return Source(path, text, ast.parse(text))


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))


def _imports(source: Source, nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def bare_except(source: Source) -> Places:
    """An `except:` also swallows Ctrl-C and our own bugs."""
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except. Name the errors that are expected here."


def eval_exec(source: Source) -> Places:
    """Text from outside must never run as code."""
    for call, name in source.calls():
        if name in ("eval", "exec", "builtins.eval", "builtins.exec"):
            yield (
                call.lineno,
                f"{name}() runs text as code. Use a parser, such as ast.literal_eval or json.",
            )


def shell(source: Source) -> Places:
    """A shell reads file names as commands."""
    for call, name in source.calls():
        if _is_constant(_keyword(call, "shell"), True) or name in ("os.system", "os.popen"):
            yield (
                call.lineno,
                "this runs through a shell. Pass a list of arguments to subprocess.run.",
            )


def yaml_load(source: Source) -> Places:
    """Only the safe loader builds plain values and nothing else."""
    for call, name in source.calls():
        if name not in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"):
            continue
        loader = _keyword(call, "Loader") or (call.args[1] if len(call.args) > 1 else None)
        if (
            name.endswith((".unsafe_load", ".full_load"))
            or loader is None
            or "Safe" not in source.name(loader)
        ):
            yield (
                call.lineno,
                f"{name} can build any object. Use yaml.safe_load, or a loader named ...Safe....",
            )


def torch_load(source: Source) -> Places:
    """A pickled checkpoint is a program."""
    for call, name in source.calls():
        if name == "torch.load" and not _is_constant(_keyword(call, "weights_only"), True):
            yield call.lineno, "torch.load unpickles. Pass weights_only=True."


def pickle_load(source: Source) -> Places:
    """As above, without torch. Tests may: what they load is their own."""
    if source.path.startswith("tests/"):
        return
    for call, name in source.calls():
        if re.fullmatch(
            r"(c?pickle|dill|cloudpickle|marshal)\.(load|loads|Unpickler)", name, re.IGNORECASE
        ):
            yield call.lineno, f"{name} runs code from the file. Use JSON or safetensors."


def cuda_literal(source: Source) -> Places:
    """The device is an argument; CPU runs the same code."""
    if not source.in_package or source.path in CUDA_FILES:
        return
    for node in source.nodes:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"cuda(:\d+)?", node.value)
        ):
            yield (
                node.lineno,
                f'device literal "{node.value}". Use the device of a tensor or of the '
                "configuration.",
            )


def collectives(source: Source) -> Places:
    """Only parallel/ talks to other ranks."""
    if not source.in_package or source.path.startswith(COLLECTIVE_FOLDERS):
        return
    probes = [
        inner for call, name in source.calls() if name == "hasattr" for inner in ast.walk(call)
    ]
    for node in source.nodes:
        if not isinstance(node, ast.Attribute | ast.Name) or node in probes:
            continue
        name = source.name(node)
        module, _, last = name.rpartition(".")
        if (
            module == "torch.distributed" and last in STARTERS
        ) or name == "torch.ops._c10d_functional":
            yield (
                node.lineno,
                f"{name} outside megalith/parallel. Use the functions of parallel/group or "
                "collectives.",
            )
    for line, name in _imports(source, source.nodes):
        if name.startswith("torch.distributed._functional_collectives"):
            yield (
                line,
                f"{name} outside megalith/parallel. Use the functions of parallel/collectives.",
            )


def explicit_group(source: Source) -> Places:
    """To torch.distributed, no group means world_group."""
    if not source.in_package:
        return
    for call, name in source.calls():
        module, _, last = name.rpartition(".")
        if module == "torch.distributed" and last in COLLECTIVES:
            group = _keyword(call, "group")
            if group is None or _is_constant(group, None):
                yield call.lineno, f"{last} without a group. Pass group=group.handle."


def rank_branch(source: Source) -> Places:
    """A collective that some ranks skip hangs the others."""
    if not source.in_package:
        return
    for branch in source.nodes:
        if not isinstance(branch, ast.If) or not _asks_for_rank(branch.test):
            continue
        for node in [
            inner for statement in [*branch.body, *branch.orelse] for inner in ast.walk(statement)
        ]:
            name = source.name(node.func) if isinstance(node, ast.Call) else ""
            if _joins_all(name):
                yield (
                    _line(node),
                    f"{name} under a test of the rank: every rank of a group must reach it. Move "
                    "it out.",
                )


def _asks_for_rank(test: ast.expr) -> bool:
    words = [node.id for node in ast.walk(test) if isinstance(node, ast.Name)]
    words += [node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)]
    return any(word == "rank" or word.endswith(("_rank", "is_first", "is_last")) for word in words)


def _joins_all(name: str) -> bool:
    module, _, last = name.rpartition(".")
    if module == "torch.distributed":
        return last in JOINED_COLLECTIVES
    return module in OUR_COLLECTIVE_MODULES and last in OUR_COLLECTIVES


def checker_import(source: Source) -> Places:
    """Training never loads the checker; the check and its rules are all that an upgrade of it can
    break."""
    if not source.in_package or source.path in CHECKER_FILES:
        return
    for line, name in _imports(source, source.nodes):
        if name.split(".")[0] == "spmd_types":
            yield (
                line,
                f"{name} is imported outside {CHECKER_FILES[0]}. Use the functions of that file.",
            )


def untyped_function(source: Source) -> Places:
    """An autograd function without a typing rule is a hole in the proof of a layout.

    The rule is `moves` (a collective), `reference` (the plain composition it stands for) or a
    decorator `typed_by`.
    """
    if not source.in_package:
        return
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and any(
            _is_autograd(source.name(base)) for base in node.bases
        ):
            targets = [target for line in node.body for target in _targets(line)]
            decorators = [
                source.name(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list
            ]
            typed = "moves" in targets or "reference" in targets
            if not typed and not any(name.rpartition(".")[2] == "typed_by" for name in decorators):
                yield (
                    node.lineno,
                    f"autograd function {node.name} has no typing rule. Add `moves = ...` or "
                    "@typed_by(...).",
                )


def _is_autograd(name: str) -> bool:
    return name in ("torch.autograd.Function", "torch.autograd.function.Function")


def _targets(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.AnnAssign):
        return [statement.target.id] if isinstance(statement.target, ast.Name) else []
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []


def check_left_on(source: Source) -> Places:
    """Switching the check off is how a wrong layout passes it."""
    for node in source.nodes:
        named = isinstance(node, ast.Name) and node.id == "no_typecheck"
        attribute = isinstance(node, ast.Attribute) and node.attr == "no_typecheck"
        if named or attribute:
            yield _line(node), "no_typecheck is never used. Give the operation its rule instead."
    for line, name in _imports(source, source.nodes):
        if name.rpartition(".")[2] == "no_typecheck":
            yield line, "no_typecheck is never imported. Give the operation its rule instead."


def optional_import(source: Source) -> Places:
    """Every module imports with the required packages alone."""
    if not source.in_package:
        return
    for line, name in _imports(source, source.tree.body):
        if any(name == package or name.startswith(f"{package}.") for package in OPTIONAL_PACKAGES):
            yield line, f"{name} is optional. Import it inside the function that needs it."


def module_state(source: Source) -> Places:
    """Importing a module only defines things."""
    if not source.in_package:
        return
    for node in source.nodes:
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield (
                node.lineno,
                f"{type(node).__name__.lower()} {', '.join(node.names)}. Pass the value, or use a "
                "class.",
            )
    for statement in source.tree.body:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        if value is not None and _is_empty_container(source, value):
            yield (
                statement.lineno,
                "an empty container at module level is hidden state. Make it an argument.",
            )


def _is_empty_container(source: Source, value: ast.expr) -> bool:
    if isinstance(value, ast.List):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    return isinstance(value, ast.Call) and source.name(value.func).rpartition(".")[2] in (
        "list",
        "dict",
        "set",
        "defaultdict",
        "deque",
        "OrderedDict",
    )


def hot_path(source: Source) -> Places:
    """Files with a line `# hot-path` never make the host wait, unless a line says `# sync-ok:
    reason`."""
    if "# hot-path" not in (line.strip() for line in source.lines):
        return
    for call, name in source.calls():
        last = call.func.attr if isinstance(call.func, ast.Attribute) else name
        if last in (*SYNCHRONIZING, "print") and not re.search(
            r"# sync-ok: \S", source.lines[call.lineno - 1]
        ):
            yield (
                call.lineno,
                f"{last}() on the hot path waits for the device. Remove it, or add `# sync-ok: "
                "reason`.",
            )


def vague_name(source: Source) -> Places:
    """A name that says nothing collects everything."""
    if source.in_package and Path(source.path).name in VAGUE_NAMES:
        yield (
            1,
            f"{Path(source.path).name} does not say what it is about. Name the idea, or move it to "
            "its owner.",
        )


def long_function(source: Source) -> Places:
    """A function fits on two screens; one is better."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = _count_statements(node)
            if count > MAX_FUNCTION_STATEMENTS:
                limit = f"the limit is {MAX_FUNCTION_STATEMENTS}. Split it."
                yield node.lineno, f"{node.name} has {count} statements, {limit}"


def long_file(source: Source) -> Places:
    """A file holds one idea."""
    count = _count_statements(source.tree)
    if count > MAX_FILE_STATEMENTS:
        yield 1, f"{count} statements, the limit is {MAX_FILE_STATEMENTS}. Split it by idea."


def _count_statements(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def old_word(source: Source) -> Places:
    """One term per idea; docs/glossary.md lists the terms."""
    vocabulary = read_vocabulary().for_file(source.path)
    names = [(line, name) for line, name in source.identifiers if not name.startswith("__")]
    first_lines = [(node.lineno, _first_line(node)) for node in source.docstrings]
    for line, name in names:
        yield from ((line, fault) for fault in vocabulary.faults_of_name(name))
    for line, text in source.strings:
        yield from ((line, fault) for fault in vocabulary.faults_of_value(text))
    for line, text in [*source.strings, *first_lines]:
        yield from ((line, fault) for fault in vocabulary.faults_of_text(text))
    yield from ((1, fault) for fault in vocabulary.faults_of_file_name(source.path))


def _first_line(docstring: ast.Constant) -> str:
    return str(docstring.value).strip().partition("\n")[0]


def old_setting(source: Source) -> Places:
    """A setting has one name; megalith/config/renamed.yaml translates the earlier ones."""
    vocabulary = read_vocabulary().for_file(source.path)
    fields = _config_fields(source) if source.path.startswith("megalith/config/") else ()
    for line, text in [*source.strings, *source.documentation, *fields]:
        yield from ((line, fault) for fault in vocabulary.faults_of_settings(text))


def _config_fields(source: Source) -> Iterator[tuple[int, str]]:
    """Every field of a class SectionConfig, as section.field."""
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            name = re.sub(r"^(MoE|MTP|MLA)", lambda match: match[0].title(), node.name)
            section = "_".join(split_words(name)[:-1])
            for statement in node.body:
                yield from (
                    (statement.lineno, f"{section}.{field}") for field in _targets(statement)
                )


def british_spelling(source: Source) -> Places:
    """American spelling, as in the code that ours is used with."""
    if read_vocabulary().skips(source.path):
        return
    for line, text in [*source.identifiers, *source.strings, *source.documentation]:
        for word in split_words(text):
            if (american := find_american_spelling(word)) is not None:
                yield line, f'British spelling "{word}". Use "{american}".'


def format_skip(source: Source) -> Places:
    """The formatter determines the layout."""
    for number, line in enumerate(source.lines, 1):
        if re.search(r"#\s*fmt:\s*(skip|off)\s*$", line):
            yield (
                number,
                ("the formatter is switched off here. Remove the comment and format the file."),
            )


def vague_class(source: Source) -> Places:
    """A class name is a specific noun phrase."""
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and node.name.lstrip("_") in VAGUE_CLASSES:
            yield (
                node.lineno,
                (f"class {node.name} does not say what it is. Use a specific noun phrase."),
            )


def vague_variable(source: Source) -> Places:
    """A variable name says what the variable holds."""
    if not source.in_package:
        return
    for node in source.nodes:
        name = node.arg if isinstance(node, ast.arg) else _stored_name(node)
        if name in VAGUE_VARIABLES:
            yield (
                _line(node),
                (
                    f"variable {name} does not say what it holds. Use a name such as "
                    "local_shard or layouts."
                ),
            )


def _stored_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return node.name
    return None


RULES: dict[str, Callable[[Source], Places]] = {
    "bare-except": bare_except,
    "eval-exec": eval_exec,
    "shell": shell,
    "yaml-load": yaml_load,
    "torch-load": torch_load,
    "pickle-load": pickle_load,
    "cuda-literal": cuda_literal,
    "collectives": collectives,
    "explicit-group": explicit_group,
    "rank-branch": rank_branch,
    "checker-import": checker_import,
    "untyped-function": untyped_function,
    "no-typecheck": check_left_on,
    "optional-import": optional_import,
    "module-state": module_state,
    "hot-path": hot_path,
    "vague-name": vague_name,
    "long-function": long_function,
    "long-file": long_file,
    "old-word": old_word,
    "old-setting": old_setting,
    "british-spelling": british_spelling,
    "format-skip": format_skip,
    "vague-class": vague_class,
    "vague-variable": vague_variable,
}


def repeated_class(sources: Sequence[Source]) -> Iterator[tuple[Source, int, str]]:
    """A class name means one class in the whole package."""
    defined: defaultdict[str, list[tuple[Source, int]]] = defaultdict(list)
    for source in sources:
        for node in source.nodes if source.in_package else ():
            if isinstance(node, ast.ClassDef):
                defined[node.name].append((source, node.lineno))
    for name, definitions in defined.items():
        first, first_line = definitions[0]
        for source, line in definitions[1:]:
            yield (
                source,
                line,
                (
                    f"class {name} is also in {first.path}:{first_line}. Use another "
                    "name for one of them."
                ),
            )


PACKAGE_RULES: dict[str, Callable[[Sequence[Source]], Iterator[tuple[Source, int, str]]]] = {
    "repeated-class": repeated_class,
}
"""Rules about several files."""


def findings(*sources: Source) -> list[str]:
    """Everything wrong with the files, as `path:line: rule: what to do`, in order of lines."""
    faults: set[tuple[int, int, str, str]] = set()
    order = {id(source): number for number, source in enumerate(sources)}
    for source in sources:
        for rule, check in RULES.items():
            faults |= {(order[id(source)], line, rule, message) for line, message in check(source)}
    for rule, check_all in PACKAGE_RULES.items():
        faults |= {
            (order[id(source)], line, rule, message) for source, line, message in check_all(sources)
        }
    return [
        f"{sources[number].path}:{line}: {rule}: {message}"
        for number, line, rule, message in sorted(faults)
        if not _is_waived(sources[number], line, rule)
    ]


def _is_waived(source: Source, line: int, rule: str) -> bool:
    return (
        bool(source.lines)
        and re.search(rf"# lint: allow {rule}: \S", source.lines[line - 1]) is not None
    )


def markdown_findings(path: str, text: str) -> list[str]:
    """Old words in the code of a Markdown file: between backticks and in fenced blocks."""
    vocabulary = read_vocabulary().for_file(path)
    faults: dict[str, None] = {}
    for number, code in _code_of(text):
        for name in re.findall(r"[A-Za-z_]\w*", vocabulary.without_stored_strings(code)):
            faults |= {
                f"{path}:{number}: old-word: {fault}": None
                for fault in vocabulary.faults_of_name(name)
            }
        faults |= {
            f"{path}:{number}: old-setting: {fault}": None
            for fault in vocabulary.faults_of_settings(code)
        }
    return list(faults)


def _code_of(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of every piece of code in Markdown."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced:
            yield number, line
        else:
            yield from ((number, code) for code in re.findall(r"`([^`]+)`", line))


def main(arguments: Sequence[str]) -> int:
    """Check the given files and folders; return 1 if there are findings."""
    targets = [Path(name).resolve() for name in arguments] or [ROOT / name for name in FOLDERS]
    files = sorted({file for target in targets for file in _files_in(target)})
    paths = {file: _path_of(file) for file in files}
    sources = [
        parse(path, file.read_text()) for file, path in paths.items() if file.suffix == ".py"
    ]
    faults = findings(*sources)
    for file, path in paths.items():
        if file.suffix == ".md":
            faults += markdown_findings(path, file.read_text())
    num_rules = len(RULES) + len(PACKAGE_RULES)
    print(
        "\n".join(
            [
                *faults,
                f"lint_project: {len(files)} files, {num_rules} rules, {len(faults)} findings",
            ]
        )
    )
    return int(bool(faults))


def _files_in(target: Path) -> list[Path]:
    """Python and Markdown files below a folder; a file itself."""
    if target.is_file():
        return [target]
    return [*target.rglob("*.py"), *target.rglob("*.md")]


def _path_of(file: Path) -> str:
    """Relative to the repository, where the file is in it."""
    return (file.relative_to(ROOT) if file.is_relative_to(ROOT) else file).as_posix()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
