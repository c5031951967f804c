"""Jinja sandbox for chat templates, which limits work, memory and output. The only module that
imports Jinja.

A chat template is a program from an untrusted source. Jinja's sandbox blocks access to Python
objects, but not endless loops or strings of many GB. Here every loop iteration, call, filter, test
and growing operator is charged to a budget in proportion to the size of its operands, before it
runs. Nothing is computed while the template is compiled.
"""

import json
import re
import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from datetime import datetime
from functools import wraps
from itertools import chain
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.runtime
import jinja2.sandbox
from jinja2.utils import Namespace

MAX_SOURCE = 2**17
"""Characters of a template. Heuristic: published ones have up to 30,000."""

MAX_COST = 300_000
"""Cost of rendering one conversation. Heuristic: about a second; typical conversations cost less
than a thousandth."""

MAX_OPERATION = 2**16
"""Cost of one call, filter or operator: 64 MiB of text."""

_UNIT = 1024
"""Characters that cost as much as one call."""

_UNIT_OF_OUTPUT = 64
"""Characters of output that cost as much as one call: together at most 19 MB."""

_NODE_SIZE = 64
"""Size of one item of a container, in characters."""

_NODES_PER_UNIT = 4
"""Items of containers that are visited in the time of a call. Measured: 0.4 us an item, 1.7 us a
call, on a CPU."""

_MAX_INT_BITS = 4096
_CONTAINERS = list, tuple, dict, set, frozenset, range, KeysView, ValuesView, ItemsView

Value = Any  # any value of a template


class TemplateLimitError(Exception):
    """A template does more work than rendering a conversation needs."""


class _Budget(threading.local):
    """Cost of the current rendering, per thread."""

    spent = 0

    def charge(self, cost: int) -> None:
        """Add the cost of one operation.

        Raises:
            TemplateLimitError: the operation or the rendering costs more than its limit.
        """
        self.spent += cost
        if cost > MAX_OPERATION or self.spent > MAX_COST:
            raise TemplateLimitError(
                f"its loops, calls and texts cost more than the limits of {MAX_COST:,} units for a "
                "conversation and "
                f"{MAX_OPERATION:,} for one operation; a unit is a call, an iteration or {_UNIT} "
                "characters"
            )

    def size(self, value: Value) -> int:
        """Return the characters of a text or of all items of a container; shared items count each
        time.

        The traversal is charged, and stops at the maximum size of one operation.
        """
        if isinstance(value, str | bytes):
            return len(value)
        size, num_nodes, waiting = 1, 0, [value]
        while waiting and size <= MAX_OPERATION * _UNIT:
            part = waiting.pop()
            num_nodes += 1
            if isinstance(part, Namespace):
                # str() of a namespace shows them
                part = object.__getattribute__(part, "_Namespace__attrs")
            if isinstance(part, str | bytes):
                size += len(part)
            elif isinstance(part, _CONTAINERS):
                size += _NODE_SIZE * len(part)
                if size <= MAX_OPERATION * _UNIT and not isinstance(part, range):
                    waiting += part
                    waiting += part.values() if isinstance(part, dict) else ()
        self.charge(num_nodes // _NODES_PER_UNIT)
        return size

    def magnitude(self, value: Value) -> int:
        """Return the size of an argument; the size of an integer is its value."""
        return min(abs(value), 2**40) if isinstance(value, int) else self.size(value)


def build_environment(today: datetime | None, marks: tuple[str, str]) -> "TemplateEnvironment":
    """Return a sandbox with the functions that transformers provides to templates.

    `today`: the time of `strftime_now`; None: the current time. `marks`: texts around the output of
    a generation block.
    """
    environment = TemplateEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[jinja2.ext.loopcontrols, _Limits, _Generation],
    )
    environment.marks = marks
    environment.finalize = environment.charge_output
    environment.filters["tojson"] = _to_json
    for table, is_test in ((environment.filters, False), (environment.tests, True)):
        for name, function in table.items():
            table[name] = _charged(environment, name, function, is_test=is_test)
    environment.globals["strftime_now"] = lambda form: (today or datetime.now()).strftime(form)
    environment.globals["raise_exception"] = _raise_exception
    del environment.globals["lipsum"]  # random filler text
    return environment


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox that charges the operations of a template to a budget."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})
    marks = "", ""

    def __init__(self, **options: Any) -> None:  # Any: Jinja's own options
        super().__init__(**options)
        self.budget = _Budget()

    def compile_source(self, source: str) -> jinja2.Template:
        """Compile a template.

        Raises:
            TemplateLimitError: the source is too long.
        """
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(
                f"its source has {len(source):,} characters, and the limit is {MAX_SOURCE:,}"
            )
        self.budget.spent = 0
        return self.from_string(source)

    def render(self, template: jinja2.Template, variables: dict[str, Value]) -> str:
        """Render a template with a new budget.

        Raises:
            TemplateLimitError: the template exceeds the budget. It may raise any other exception,
                too.
        """
        self.budget.spent = 0
        return template.render(variables)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        limits = self.extensions[_Limits.identifier]
        assert isinstance(limits, _Limits), limits
        limits.instrument(template)
        return template

    def call(
        __self, __context: jinja2.runtime.Context, __obj: Value, *args: Value, **kwargs: Value
    ) -> Value:
        """Call a function or method, after it was charged. The parameters are named as in Jinja."""
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        subject = getattr(method, "__self__", None)
        if isinstance(subject, _Limits | _Generation):
            return super().call(__context, __obj, *args, **kwargs)
        args = tuple(map(__self.without_iterator, args))
        if isinstance(__obj, jinja2.runtime.Macro | jinja2.runtime.LoopContext):
            # The operations in the body of a macro or loop are charged one by one.
            __self.budget.charge(1 + sum(map(__self.budget.size, args)) // _UNIT)
        else:
            widths = getattr(method, "__name__", "") in ("format", "format_map")
            __self.charge_operation(
                subject, chain(args, kwargs.values()), __self.budget.magnitude, widths=widths
            )
        return __self.charge_result(super().call(__context, __obj, *args, **kwargs))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Value, right: Value
    ) -> Value:
        """Compute an operator whose result may be much larger than its operands."""
        if (
            operator == "+"
            and isinstance(left, str)
            and isinstance(right, str)
            and len(left) + len(right) < _UNIT
        ):
            return left + right  # charged as part of its body
        if isinstance(left, int) and isinstance(right, int):
            bits = (
                left.bit_length() * right
                if operator == "**"
                else left.bit_length() + right.bit_length()
            )
            if bits > _MAX_INT_BITS:
                raise TemplateLimitError(
                    f"{operator} gives a number of more than {_MAX_INT_BITS} bits"
                )
        elif operator == "+":
            self.budget.charge(1 + (self.budget.size(left) + self.budget.size(right)) // _UNIT)
        elif operator == "*" and isinstance(left, int):
            self.charge_operation(right, [left], self.budget.magnitude)
        else:
            values = right if isinstance(right, tuple) else [right]
            self.charge_operation(left, values, self.budget.magnitude, widths=operator == "%")
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Value, argument: Value) -> Value:
        """Return an item or attribute. Hashing a tuple traverses all of it."""
        if isinstance(argument, tuple):
            self.budget.charge(1 + self.budget.size(argument) // _UNIT)
        return super().getitem(obj, argument)

    def without_iterator(self, value: Value) -> Value:
        """Convert an iterator to a list, whose size is known; return any other value unchanged."""
        if not isinstance(value, Iterator):
            return value
        items = []
        for item in value:
            self.budget.charge(1)
            items.append(item)
        return items

    def charge_operation(
        self,
        subject: Value,
        arguments: Iterable[Value],
        measure: Callable[[Value], int],
        *,
        widths: bool = False,
    ) -> None:
        """Charge an operation whose cost is at most proportional to the product of its operands'
        sizes.

        `measure`: returns the size of an argument. `widths`: the subject is a format string, in
        which numbers are widths.
        """
        size = sum(map(measure, arguments))
        if widths and isinstance(subject, str):
            size += max(map(int, re.findall(r"\d{1,9}", subject)), default=0)
        self.budget.charge(1 + max(self.budget.size(subject), 1) * (1 + size) // _UNIT)

    def charge_result(self, value: Value) -> Value:
        """Charge and return the result of an operation."""
        self.budget.charge(self.budget.size(value) // _UNIT)
        return value

    # pass_context also prevents Jinja from computing constant expressions at compile time
    @jinja2.pass_context
    def charge_output(self, context: jinja2.runtime.Context, value: Value) -> Value:
        """Charge and return a value that becomes output."""
        if isinstance(value, str) and len(value) < _UNIT_OF_OUTPUT:
            return value  # charged as part of its body
        self.budget.charge(1 + self.budget.size(value) // _UNIT_OF_OUTPUT)
        return value


class _Limits(jinja2.ext.Extension):
    """Inserts charges into the syntax tree of a template, which templates cannot override by
    name."""

    environment: TemplateEnvironment

    def instrument(self, template: nodes.Template) -> None:
        """Charge iterations and bodies of loops and macros, joined texts, slices, keys and
        comparisons."""
        bodies = [loop.body for loop in template.find_all(nodes.For)]
        bodies += [macro.body for macro in template.find_all(nodes.Macro)]
        bodies += [block.body for block in template.find_all(nodes.CallBlock)]
        bodies += [block.body for block in template.find_all(nodes.Block)]
        for body in bodies:
            body.insert(0, self._charge(body))
        for loop in list(template.find_all(nodes.For)):
            loop.iter = self._call("_count", loop.iter)
        for item in list(template.find_all(nodes.Getitem)):
            if isinstance(item.arg, nodes.Slice):
                item.node = self._call("_visit", item.node)
        for pair in list(template.find_all(nodes.Pair)):
            if not isinstance(pair.key, nodes.Const):
                pair.key = self._call("_visit", pair.key)
        for compare in list(template.find_all(nodes.Compare)):
            if not any(
                isinstance(part, nodes.Const)
                for part in (compare.expr, *(op.expr for op in compare.ops))
            ):
                compare.expr = self._call("_visit", compare.expr)
                for operand in compare.ops:
                    operand.expr = self._call("_visit", operand.expr)
        for concat in list(template.find_all(nodes.Concat)):
            concat.nodes = [self._call("_visit", part) for part in concat.nodes]

    def _call(
        self, method: str, argument: Any
    ) -> nodes.Call:  # Any: a nodes.Expr, which Jinja often types as Node
        return self.call_method(method, [argument], lineno=argument.lineno)

    def _charge(self, body: list[nodes.Node]) -> nodes.ExprStmt:
        """Return a statement that charges the constant text and the number of syntax nodes of a
        body."""
        whole = nodes.Scope(body)
        text = sum(len(data.data) for data in whole.find_all(nodes.TemplateData))
        cost = (
            1
            + text // _UNIT_OF_OUTPUT
            + sum(1 for _ in whole.find_all(nodes.Node)) // _NODES_PER_UNIT
        )
        line = body[0].lineno if body else 1
        return nodes.ExprStmt(self._call("_spend", nodes.Const(cost, lineno=line)), lineno=line)

    def _spend(self, cost: int) -> None:
        self.environment.budget.charge(cost)

    def _count(self, items: Iterable[Value]) -> Iterator[Value]:
        for item in items:
            self.environment.budget.charge(1)
            yield item

    def _visit(self, value: Value) -> Value:
        self.environment.budget.charge(1 + self.environment.budget.size(value) // _UNIT)
        return value


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` tag: marks the text inside it, including in macros and loops."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own attribute
    environment: TemplateEnvironment

    def parse(self, parser: Any) -> nodes.Node:  # Any: Jinja's parser
        """Parse the tag and its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        before, after = self.environment.marks
        return f"{before}{caller()}{after}"


def _charged(
    environment: TemplateEnvironment, name: str, function: Any, *, is_test: bool
) -> Callable[..., Value]:
    """Return a filter or test (`function`: any callable) that is charged before it runs."""
    # context or environment precede the subject
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0
    budget = environment.budget
    # the result is no larger than the operands
    measure = budget.size if is_test or name in ("default", "d") else budget.magnitude

    @wraps(function)
    def charged(*args: Value, **kwargs: Value) -> Value:
        context, operands = (
            args[:passed],
            [environment.without_iterator(value) for value in args[passed:]],
        )
        subject = operands[0] if operands else None
        environment.charge_operation(
            subject, chain(operands[1:], kwargs.values()), measure, widths=name == "format"
        )
        return environment.charge_result(function(*context, *operands, **kwargs))

    return charged


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Value,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:  # Any: JSON
    """Return JSON as transformers writes it. Jinja's own filter escapes the characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
