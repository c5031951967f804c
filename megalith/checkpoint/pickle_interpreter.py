"""Interpreter of pickles that imports nothing and calls only functions on an allowlist.

A pickle is a program for a stack machine. Every object that it creates and its memory are counted,
because a short program can create large objects.
"""

import codecs
import itertools
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch

MAX_OBJECTS = 10_000_000
"""Maximum number of strings, containers and records in one pickle. Heuristic: the metadata of a
checkpoint has about 15 for each chunk of a tensor."""

MIN_REFERENCES = 1_000_000
"""Number of elements of containers that any pickle may have. Heuristic: visited within a second."""

REFERENCES_PER_BYTE = 10
"""Elements of containers per byte of a pickle. Those of a container that is inside of several
others count for each of them. Heuristic: files have fewer than one per byte."""

MAX_NESTING = 1_000
"""Maximum number of containers inside each other."""

MEMORY_PER_BYTE = 4
"""Bytes of memory for strings, numbers and elements of containers per byte of the pickle. The
fixed size of objects is limited by their number."""

MIN_MEMORY = 2**26
"""Bytes of memory that any pickle may use. Heuristic: a list of small numbers takes more than four
times its length in the file."""

MAX_INT_NBYTES = 1_024
"""Maximum length of an integer. Heuristic: Python formats integers of up to 4,300 digits."""

MAX_KEY_NODES = 200
"""Maximum number of values in a tuple that is a key of a dict: hashing visits each of them, and
again for each reference to it."""

MAX_KEY = 2**63
"""Bound of integers that are keys of a dict: larger ones can be chosen to have equal hashes, which
makes a dict slow."""

_SET_NBYTES = 216
"""Memory of an empty set in CPython; one byte of a pickle creates one."""


@dataclass(slots=True, eq=False)
class Record:
    """Object of a class on the allowlist, such as `argparse.Namespace` or a member of an enum.

    It compares and hashes by identity, so that records can be keys of a dict.
    """

    name: str
    """Module and class: `argparse.Namespace`. Older locations of a class have its newest name."""

    args: tuple[object, ...] = ()
    """Arguments of the constructor: the value of an enum's member."""

    state: dict[str, object] = field(default_factory=dict)
    """Attributes by name; a state that is not a dict of attributes has the key `state`."""


@dataclass(slots=True, eq=False)
class Placeholder:
    """A name that is not on the allowlist, or what a call of it would return; nothing is
    called."""

    name: str
    args: tuple[object, ...] = ()
    state: object = None
    items: list[object] | None = None
    """Elements that the pickle appends, or pairs of key and value that it sets."""


@dataclass(slots=True, eq=False)
class Global(Placeholder):
    """A class or function that a pickle names, before it is called."""


class MalformedPickleError(Exception):
    """Reason why bytes are not a pickle or archive that can be read."""


@dataclass(frozen=True, slots=True)
class NameTable:
    """Allowlist of the names in pickles, and what they become; other names become placeholders."""

    constants: Mapping[str, object]
    records: Mapping[str, str]
    """Classes that become a `Record` -> the name of the record."""

    calls: Mapping[str, Callable[["Interpreter", tuple[object, ...]], object]]
    """Functions -> ours, which returns the value of a call, or None for a placeholder."""

    state_fields: Mapping[str, tuple[str, ...]]
    """Records -> names for the elements of states that are tuples."""

    stateless: tuple[type, ...]
    """Classes of values whose attributes are ignored."""

    old_modules: Mapping[str, str]
    """Modules of older versions -> their present names."""


def show_name(name: str) -> str:
    """Return a name from a file as one short line."""
    return ascii(name[:200])[1:-1]


LEAVES = (str, int, float, bool, bytes, complex, torch.dtype, type(None))
"""Classes of values that contain no other values."""

_LEAF_CLASSES = frozenset(LEAVES)


class Interpreter:
    """Stack machine for one pickle, whose objects and memory are counted."""

    def __init__(
        self,
        data: bytes | memoryview,
        table: NameTable,
        load_persistent: Callable[[object], object] | None = None,
    ) -> None:
        self.data = data if isinstance(data, bytes) else bytes(data)
        self.at = 0
        self.table = table
        self.load_persistent = load_persistent
        self.stack: list[object] = []
        self.marked_stacks: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.num_objects = 0
        self.memory = max(MIN_MEMORY, MEMORY_PER_BYTE * len(data))

    def run(self) -> object:
        """Execute opcodes up to STOP; return the object that is left."""
        handlers, data = _HANDLERS, self.data
        while True:
            if self.at >= len(data):
                raise MalformedPickleError("truncated pickle")
            opcode = data[self.at]
            self.at += 1
            if opcode == _STOP:
                break
            handler = handlers.get(opcode)
            if handler is None:
                raise MalformedPickleError(
                    f"malformed pickle (unknown opcode 0x{opcode:02x} at byte {self.at - 1:,})"
                )
            handler(self)
        if len(self.stack) != 1 or self.marked_stacks:
            raise MalformedPickleError("malformed pickle (it does not end with one object)")
        check_nesting(self.stack[0], MIN_REFERENCES + REFERENCES_PER_BYTE * len(data))
        return self.stack[0]

    # reading

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes of the pickle."""
        stop = self.at + nbytes
        if nbytes < 0:
            raise MalformedPickleError("malformed pickle (a negative length)")
        if stop > len(self.data):
            raise MalformedPickleError("truncated pickle")
        part = self.data[self.at : stop]
        self.at = stop
        return part

    def take_int(self, nbytes: int) -> int:
        """Return the next little-endian unsigned integer."""
        start = self.at
        self.at = stop = start + nbytes
        if stop > len(self.data):
            raise MalformedPickleError("truncated pickle")
        return self.data[start] if nbytes == 1 else int.from_bytes(self.data[start:stop], "little")

    def take_line(self) -> bytes:
        """Return the next text argument, without its line end."""
        stop = self.data.find(b"\n", self.at)
        if stop < 0:
            raise MalformedPickleError("truncated pickle")
        line = self.data[self.at : stop]
        self.at = stop + 1
        return line

    # limits

    def count(self, num_objects: int) -> None:
        """Count objects that are created or visited."""
        self.num_objects += num_objects
        if self.num_objects > MAX_OBJECTS:
            raise MalformedPickleError(f"a pickle of more than {MAX_OBJECTS:,} objects")

    def allocate(self, nbytes: int) -> None:
        """Count memory that is allocated for a value, or values that are visited, at 8 bytes
        each."""
        self.memory -= nbytes
        if self.memory < 0:
            raise MalformedPickleError(
                f"a pickle that takes more than {MEMORY_PER_BYTE} times the memory of its file"
            )

    # the stack

    def push(self, value: object) -> None:
        """Push a reference to an object."""
        self.memory -= 8
        if self.memory < 0:
            self.allocate(0)
        self.stack.append(value)

    def push_new(self, value: object, nbytes: int = 0) -> None:
        """Push a new object that takes `nbytes` besides its fixed size."""
        self.num_objects += 1
        if self.num_objects > MAX_OBJECTS:
            self.count(0)
        self.memory -= nbytes
        self.push(value)

    def pop(self) -> object:
        """Return the last object, and remove it."""
        if not self.stack:
            raise MalformedPickleError("malformed pickle (it takes an object from an empty stack)")
        self.memory += 8
        return self.stack.pop()

    def top(self) -> object:
        """Return the last object."""
        if not self.stack:
            raise MalformedPickleError("malformed pickle (it takes an object from an empty stack)")
        return self.stack[-1]

    def pop_mark(self) -> list[object]:
        """Return the objects above the last mark, and remove them and it."""
        if not self.marked_stacks:
            raise MalformedPickleError("malformed pickle (it has no mark)")
        items = self.stack
        self.stack = self.marked_stacks.pop()
        return items

    def memoize(self, index: int) -> None:
        """Add the last object to the memo."""
        self.memo[index] = self.top()
        if len(self.memo) > self.num_objects:
            raise MalformedPickleError("malformed pickle (its memo has more entries than objects)")

    # values

    def push_global(self, module: str, name: str) -> None:
        """Push the class, function or constant of this name."""
        full_name = f"{self.table.old_modules.get(module, module)}.{name}"
        self.push_new(self.table.constants.get(full_name) or Global(full_name), len(full_name))

    def check_key(self, key: object) -> None:
        """Raise if hashing a key of a dict or element of a set is impossible or takes long."""
        if type(key) is str:
            return
        num_nodes = 0
        pending = [key]
        while pending:
            node = pending.pop()
            num_nodes += 1
            if num_nodes + len(pending) > MAX_KEY_NODES:
                raise MalformedPickleError(f"a key of more than {MAX_KEY_NODES} values")
            if isinstance(node, (tuple, frozenset)):
                if len(node) > MAX_KEY_NODES:
                    raise MalformedPickleError(f"a key of more than {MAX_KEY_NODES} values")
                pending.extend(node)
            elif isinstance(node, (list, dict, set)):
                raise MalformedPickleError(f"malformed pickle (a {type(node).__name__} is a key)")
            elif isinstance(node, int) and not -MAX_KEY <= node < 2 * MAX_KEY:
                raise MalformedPickleError("an integer of more than 64 bits is a key")
        self.allocate(8 * num_nodes)

    def set_items(self, target: object, items: list[object]) -> None:
        """Set alternating keys and values in a dict; a placeholder stores the pairs."""
        if len(items) % 2:
            raise MalformedPickleError("malformed pickle (a key without a value)")
        pairs = zip(items[::2], items[1::2], strict=True)
        if isinstance(target, dict):
            for key, value in pairs:
                self.check_key(key)
                target[key] = value
        elif isinstance(target, Placeholder):
            target.items = target.items or []
            target.items.extend(pairs)
        else:
            raise MalformedPickleError(
                f"malformed pickle (it sets items of a {describe_kind(target)})"
            )

    def append_items(self, target: object, items: list[object]) -> None:
        """Append to a list; a placeholder stores the items."""
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Placeholder):
            target.items = target.items or []
            target.items.extend(items)
        else:
            raise MalformedPickleError(
                f"malformed pickle (it appends to a {describe_kind(target)})"
            )

    def add_items(self, target: object, items: list[object]) -> None:
        """Add elements to a set; a placeholder stores them."""
        if isinstance(target, set):
            for item in items:
                self.check_key(item)
                target.add(item)
        else:
            self.append_items(target, items)

    def call(self, function: object, args: object) -> object:
        """Return what a call stands for: a value, a record, or a placeholder."""
        if not isinstance(args, tuple):
            raise MalformedPickleError(f"malformed pickle (arguments are a {describe_kind(args)})")
        if not isinstance(function, Placeholder):
            raise MalformedPickleError(f"malformed pickle (it calls a {describe_kind(function)})")
        if not isinstance(function, Global):
            return Placeholder(function.name, (function, args))
        record_name = self.table.records.get(function.name)
        if record_name is not None:
            return Record(record_name, args)
        build = self.table.calls.get(function.name)
        value = None if build is None else build(self, args)
        return Placeholder(function.name, args) if value is None else value

    def set_state(self, target: object, state: object) -> None:
        """Set the attributes of a record, or the state of a placeholder."""
        if isinstance(target, Record):
            self.update_record(target, state)
        elif isinstance(target, Placeholder):
            target.state = state
        elif not isinstance(target, self.table.stateless):
            raise MalformedPickleError(
                f"malformed pickle (it sets the state of a {describe_kind(target)})"
            )

    def update_record(self, record: Record, state: object) -> None:
        """Set attributes from a state: a dict, two of them with slots, or a tuple of a known
        class."""
        names = self.table.state_fields.get(record.name)
        if isinstance(state, tuple) and names is not None:
            record.state.update(zip(names, state))
            return
        is_pair = isinstance(state, tuple) and len(state) == 2
        parts = list(cast(tuple[object, ...], state)) if is_pair else [state]
        for part in parts:
            if isinstance(part, dict):
                self.allocate(8 * len(part))
            if isinstance(part, dict) and all(type(name) is str for name in part):
                record.state.update(part)
            elif part is not None:
                record.state["state"] = part


def describe_kind(value: object) -> str:
    """Return the name of a value's class for an error."""
    return value.name if isinstance(value, Record) else type(value).__name__


def iter_children(value: object) -> Iterator[object]:
    """Return the values inside a container, record or placeholder."""
    if isinstance(value, dict):
        return itertools.chain(value, value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return iter(value)
    if isinstance(value, Record):
        return itertools.chain(value.args, value.state.values())
    if isinstance(value, Placeholder):
        return itertools.chain(value.args, (value.state,), value.items or ())
    return iter(())


def _select_containers(value: object) -> list[object]:
    """Return the values inside a value that may contain other values."""
    return [child for child in iter_children(value) if type(child) not in _LEAF_CLASSES]


def check_nesting(root: object, max_references: int) -> None:
    """Raise if an object contains itself, is nested too deeply, or has too many elements.

    The walk follows every reference, as readers do, so a container counts for each of them.
    """
    num_references = 0
    path: list[tuple[int, list[object]]] = []
    path_ids: set[int] = set()
    children = [root]
    while True:
        if children:
            node = children.pop()
            num_references += _count_elements(node)
            if id(node) in path_ids:
                raise MalformedPickleError("a pickle with an object that contains itself")
            if len(path) >= MAX_NESTING:
                raise MalformedPickleError(f"a pickle nested more than {MAX_NESTING:,} levels deep")
            if num_references > max_references:
                raise MalformedPickleError(
                    f"a pickle with more than {max_references:,} references to its objects"
                )
            inner = _select_containers(node)
            if inner:
                path.append((id(node), children))
                path_ids.add(id(node))
                children = inner
        elif path:
            node_id, children = path.pop()
            path_ids.discard(node_id)
        else:
            return


def _count_elements(value: object) -> int:
    """Return the number of values directly inside a value."""
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return len(value)
    if isinstance(value, Record):
        return len(value.args) + len(value.state)
    return len(value.args) + len(value.items or ()) if isinstance(value, Placeholder) else 1


# --- opcodes


def _push_constant(value: object) -> Callable[[Interpreter], None]:
    return lambda interpreter: interpreter.push(value)


def _push_unsigned(nbytes: int) -> Callable[[Interpreter], None]:
    return lambda interpreter: interpreter.push(interpreter.take_int(nbytes))


def _push_text(length_nbytes: int) -> Callable[[Interpreter], None]:
    def run(interpreter: Interpreter) -> None:
        nbytes = interpreter.take_int(length_nbytes)
        text = str(interpreter.take(nbytes), "utf-8", "surrogatepass")
        interpreter.push_new(text, nbytes)

    return run


def _push_bytes(length_nbytes: int) -> Callable[[Interpreter], None]:
    def run(interpreter: Interpreter) -> None:
        nbytes = interpreter.take_int(length_nbytes)
        interpreter.push_new(interpreter.take(nbytes), nbytes)

    return run


def _push_old_string(length_nbytes: int) -> Callable[[Interpreter], None]:
    def run(interpreter: Interpreter) -> None:
        nbytes = interpreter.take_int(length_nbytes)
        interpreter.push_new(_decode_old_string(interpreter.take(nbytes)), nbytes)

    return run


def _decode_old_string(data: bytes) -> str | bytes:
    """Return a string of Python 2: text, or bytes if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _push_quoted_string(interpreter: Interpreter) -> None:
    line = interpreter.take_line()
    if len(line) < 2 or line[0] != line[-1] or line[:1] not in (b"'", b'"'):
        raise MalformedPickleError("malformed pickle (a string without quotes)")
    if _ESCAPED.fullmatch(line, 1, len(line) - 1) is None:
        raise MalformedPickleError("malformed pickle (a string with an unknown escape)")
    data = codecs.escape_decode(line[1:-1])[0]
    interpreter.push_new(_decode_old_string(data), len(line))


def _push_unicode_line(interpreter: Interpreter) -> None:
    line = interpreter.take_line()
    interpreter.push_new(codecs.raw_unicode_escape_decode(line)[0], 4 * len(line))


def _push_long(length_nbytes: int) -> Callable[[Interpreter], None]:
    def run(interpreter: Interpreter) -> None:
        data = interpreter.take(interpreter.take_int(length_nbytes))
        if len(data) > MAX_INT_NBYTES:
            raise MalformedPickleError(f"an integer of {len(data):,} bytes")
        interpreter.push_new(int.from_bytes(data, "little", signed=True), len(data))

    return run


def _push_int_line(interpreter: Interpreter) -> None:
    line = interpreter.take_line()
    if line in (b"00", b"01"):
        interpreter.push(line == b"01")
    else:
        interpreter.push(_parse_int(line))


def _push_long_line(interpreter: Interpreter) -> None:
    interpreter.push(_parse_int(interpreter.take_line().removesuffix(b"L")))


def _parse_int(line: bytes) -> int:
    if len(line) > MAX_INT_NBYTES:
        raise MalformedPickleError(f"an integer of {len(line):,} digits")
    return int(line)


def _push_float_line(interpreter: Interpreter) -> None:
    line = interpreter.take_line()
    if len(line) > MAX_INT_NBYTES:
        raise MalformedPickleError(f"a number of {len(line):,} digits")
    interpreter.push(float(line))


def _push_float(interpreter: Interpreter) -> None:
    interpreter.push(struct.unpack(">d", interpreter.take(8))[0])


def _push_signed(interpreter: Interpreter) -> None:
    interpreter.push(int.from_bytes(interpreter.take(4), "little", signed=True))


def _push_mark(interpreter: Interpreter) -> None:
    if len(interpreter.marked_stacks) > MAX_NESTING:
        raise MalformedPickleError(f"a pickle nested more than {MAX_NESTING:,} levels deep")
    interpreter.marked_stacks.append(interpreter.stack)
    interpreter.stack = []


def _drop(interpreter: Interpreter) -> None:
    if interpreter.stack:
        interpreter.pop()
    else:  # of an empty stack, it removes the mark
        interpreter.pop_mark()


def _push_tuple(length: int) -> Callable[[Interpreter], None]:
    def run(interpreter: Interpreter) -> None:
        items = [interpreter.pop() for _ in range(length)]
        interpreter.push_new(tuple(reversed(items)))

    return run


def _push_dict(interpreter: Interpreter) -> None:
    entries: dict[object, object] = {}
    interpreter.set_items(entries, interpreter.pop_mark())
    interpreter.push_new(entries)


def _push_frozenset(interpreter: Interpreter) -> None:
    items: set[object] = set()
    interpreter.add_items(items, interpreter.pop_mark())
    interpreter.push_new(frozenset(items), _SET_NBYTES)


def _set_item(interpreter: Interpreter) -> None:
    value, key = interpreter.pop(), interpreter.pop()
    interpreter.set_items(interpreter.top(), [key, value])


def _set_items(interpreter: Interpreter) -> None:
    items = interpreter.pop_mark()
    interpreter.set_items(interpreter.top(), items)


def _append(interpreter: Interpreter) -> None:
    item = interpreter.pop()
    interpreter.append_items(interpreter.top(), [item])


def _append_all(interpreter: Interpreter) -> None:
    items = interpreter.pop_mark()
    interpreter.append_items(interpreter.top(), items)


def _add_all(interpreter: Interpreter) -> None:
    items = interpreter.pop_mark()
    interpreter.add_items(interpreter.top(), items)


def _put_line(interpreter: Interpreter) -> None:
    interpreter.memoize(_parse_int(interpreter.take_line()))


def _put(nbytes: int) -> Callable[[Interpreter], None]:
    return lambda interpreter: interpreter.memoize(interpreter.take_int(nbytes))


def _memoize(interpreter: Interpreter) -> None:
    interpreter.memoize(len(interpreter.memo))


def _get_line(interpreter: Interpreter) -> None:
    _push_memo_entry(interpreter, _parse_int(interpreter.take_line()))


def _get(nbytes: int) -> Callable[[Interpreter], None]:
    return lambda interpreter: _push_memo_entry(interpreter, interpreter.take_int(nbytes))


def _push_memo_entry(interpreter: Interpreter, index: int) -> None:
    if index not in interpreter.memo:
        raise MalformedPickleError(f"malformed pickle (its memo has no entry {index:,})")
    interpreter.push(interpreter.memo[index])


def _push_global_lines(interpreter: Interpreter) -> None:
    module, name = interpreter.take_line().decode(), interpreter.take_line().decode()
    interpreter.push_global(module, name)


def _push_global_of_stack(interpreter: Interpreter) -> None:
    name, module = interpreter.pop(), interpreter.pop()
    if not isinstance(module, str) or not isinstance(name, str):
        raise MalformedPickleError("malformed pickle (a name that is not a string)")
    interpreter.push_global(module, name)


def _push_extension(nbytes: int) -> Callable[[Interpreter], None]:
    def run(interpreter: Interpreter) -> None:
        interpreter.push_new(Global(f"copyreg.extension_{interpreter.take_int(nbytes)}"))

    return run


def _reduce(interpreter: Interpreter) -> None:
    args, function = interpreter.pop(), interpreter.pop()
    interpreter.push_new(interpreter.call(function, args))


def _new_object_with_keywords(interpreter: Interpreter) -> None:
    keywords, args, kind = interpreter.pop(), interpreter.pop(), interpreter.pop()
    if keywords == {}:
        interpreter.push_new(interpreter.call(kind, args))
    elif isinstance(kind, Placeholder):
        interpreter.push_new(Placeholder(kind.name, (args, keywords)))
    else:
        raise MalformedPickleError(f"malformed pickle (it calls a {describe_kind(kind)})")


def _instantiate_lines(interpreter: Interpreter) -> None:
    _push_global_lines(interpreter)
    kind = interpreter.pop()
    interpreter.push_new(interpreter.call(kind, tuple(interpreter.pop_mark())))


def _instantiate_of_stack(interpreter: Interpreter) -> None:
    items = interpreter.pop_mark()
    if not items:
        raise MalformedPickleError("malformed pickle (it takes an object from an empty stack)")
    interpreter.push_new(interpreter.call(items[0], tuple(items[1:])))


def _build(interpreter: Interpreter) -> None:
    state = interpreter.pop()
    interpreter.set_state(interpreter.top(), state)


def _push_persistent(interpreter: Interpreter, key: object) -> None:
    load = interpreter.load_persistent
    interpreter.push_new(Placeholder("persistent id", (key,)) if load is None else load(key))


def _check_protocol(interpreter: Interpreter) -> None:
    protocol = interpreter.take_int(1)
    if protocol > 5:
        raise MalformedPickleError(f"a pickle of protocol {protocol}, expected 0 to 5")


def _check_frame(interpreter: Interpreter) -> None:
    if interpreter.take_int(8) > len(interpreter.data) - interpreter.at:
        raise MalformedPickleError("truncated pickle")


def _reject_buffer(interpreter: Interpreter) -> None:
    raise MalformedPickleError("a pickle with buffers that are not in the file")


_ESCAPED = re.compile(
    rb"""(?:[^\\]|\\(?:[\\'"abfnrtv]|x[0-9a-fA-F]{2}|[0-3][0-7]{0,2}|[4-7][0-7]?(?![0-7])))*""",
    re.DOTALL,
)
"""Strings with escapes that Python decodes without a warning."""

_STOP = ord(".")
_HANDLERS: Mapping[int, Callable[[Interpreter], None]] = {
    opcode[0]: handler
    for opcode, handler in (
        (b"(", _push_mark),
        (b"0", _drop),
        (b"1", lambda interpreter: interpreter.pop_mark() and None),
        (b"2", lambda interpreter: interpreter.push(interpreter.top())),
        (b"F", _push_float_line),
        (b"G", _push_float),
        (b"I", _push_int_line),
        (b"J", _push_signed),
        (b"K", _push_unsigned(1)),
        (b"M", _push_unsigned(2)),
        (b"L", _push_long_line),
        (b"\x8a", _push_long(1)),
        (b"\x8b", _push_long(4)),
        (b"N", _push_constant(None)),
        (b"\x88", _push_constant(True)),
        (b"\x89", _push_constant(False)),
        (b")", _push_constant(())),
        (b"]", lambda interpreter: interpreter.push_new([])),
        (b"}", lambda interpreter: interpreter.push_new({})),
        (b"\x8f", lambda interpreter: interpreter.push_new(set(), _SET_NBYTES)),
        (b"S", _push_quoted_string),
        (b"T", _push_old_string(4)),
        (b"U", _push_old_string(1)),
        (b"V", _push_unicode_line),
        (b"X", _push_text(4)),
        (b"\x8c", _push_text(1)),
        (b"\x8d", _push_text(8)),
        (b"B", _push_bytes(4)),
        (b"C", _push_bytes(1)),
        (b"\x8e", _push_bytes(8)),
        (b"\x96", _push_bytes(8)),
        (b"t", lambda interpreter: interpreter.push_new(tuple(interpreter.pop_mark()))),
        (b"\x85", _push_tuple(1)),
        (b"\x86", _push_tuple(2)),
        (b"\x87", _push_tuple(3)),
        (b"l", lambda interpreter: interpreter.push_new(interpreter.pop_mark())),
        (b"d", _push_dict),
        (b"\x91", _push_frozenset),
        (b"s", _set_item),
        (b"u", _set_items),
        (b"a", _append),
        (b"e", _append_all),
        (b"\x90", _add_all),
        (b"p", _put_line),
        (b"q", _put(1)),
        (b"r", _put(4)),
        (b"\x94", _memoize),
        (b"g", _get_line),
        (b"h", _get(1)),
        (b"j", _get(4)),
        (b"c", _push_global_lines),
        (b"\x93", _push_global_of_stack),
        (b"\x82", _push_extension(1)),
        (b"\x83", _push_extension(2)),
        (b"\x84", _push_extension(4)),
        (b"R", _reduce),
        (b"\x81", _reduce),
        (b"\x92", _new_object_with_keywords),
        (b"i", _instantiate_lines),
        (b"o", _instantiate_of_stack),
        (b"b", _build),
        (b"P", lambda interpreter: _push_persistent(interpreter, interpreter.take_line().decode())),
        (b"Q", lambda interpreter: _push_persistent(interpreter, interpreter.pop())),
        (b"\x80", _check_protocol),
        (b"\x95", _check_frame),
        (b"\x97", _reject_buffer),
        (b"\x98", _reject_buffer),
    )
}
