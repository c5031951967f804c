"""Tools and response formats of chat requests: their fields, the structure that they enforce, and
the parser of the output."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megalith.config.generation import SamplingParams, StructuredOutputsParams, sampling_problems
from megalith.infer.parsers.grammars import (
    allow_reasoning,
    build_harmony_calls_grammar,
    build_harmony_final_grammar,
    build_json_calls_grammar,
    build_optional_calls_grammar,
)
from megalith.infer.parsers.harmony import HarmonyParser
from megalith.infer.parsers.reasoning import END_THINK, ThinkParser
from megalith.infer.parsers.registry import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    OutputParser,
    find_reasoning_parser,
    find_tool_call_parser,
)
from megalith.infer.parsers.tool_calls import JsonParser, NamedCallParser, ToolCallParser
from megalith.serve.errors import invalid, invalid_field
from megalith.serve.model_info import ServedModel
from megalith.serve.sampling_fields import read_bool
from megalith.serve.state import ServerState

MAX_TOOLS = 128
EXAMPLE = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
"""Schema of a function without parameters."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What a chat request says about the form of its output."""

    tools: list[dict[str, Any]] = field(default_factory=list)  # JSON, for the chat template
    schemas: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments by name of the tool."""

    tool_choice: Literal["none", "auto", "required", "named"] = "none"
    tool_name: str = ""
    """The tool of a named choice."""

    structure: StructuredOutputsParams | None = None
    """Structure that the fields define; None: that of `structured_outputs`."""

    field_names: Mapping[str, str] = field(default_factory=dict)
    """Names of fields in messages about the structure -> names in the request."""

    enforces_calls: bool = False
    """Whether `structure` is a grammar of tool calls."""

    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    specials: Mapping[str, int] = field(default_factory=dict)
    """Ids of the special tokens of the tokenizer by text."""

    def build_parser(self, *, has_reasoning: bool, hides_markers: bool) -> OutputParser:
        """Return a parser for one choice; `has_reasoning`: the output begins with reasoning;
        `hides_markers`: remove special tokens that are not part of the format."""
        reasoning = self._build_reasoning_parser() if has_reasoning else None
        hidden = self.visible_special_tokens if hides_markers else ()
        return OutputParser(reasoning, self._build_call_parser(), hidden=hidden)

    def _build_reasoning_parser(self) -> ThinkParser | None:
        build = REASONING_FORMATS.get(self.reasoning_parser or "")
        return None if build is None else build()

    def _build_call_parser(self) -> ToolCallParser | None:
        if self.is_harmony:
            return HarmonyParser({} if self.tool_choice == "none" else self.schemas)
        if self.tool_choice == "required":
            return JsonParser(self.schemas)
        if self.tool_choice == "named":
            return NamedCallParser(self.tool_name)
        if self.tool_choice == "auto":
            assert self.tool_call_parser is not None, "checked when the request is read"
            return TOOL_CALL_FORMATS[self.tool_call_parser](self.schemas)
        return None

    @property
    def is_harmony(self) -> bool:
        """Whether the output has messages in the format of gpt-oss."""
        return self.tool_call_parser == "gpt-oss"

    @property
    def visible_special_tokens(self) -> tuple[str, ...]:
        """Special tokens that the parsers read."""
        parsers = (self._build_reasoning_parser(), self._build_call_parser())
        markers = [text for each in parsers if each is not None for text in each.markers]
        return tuple(text for text in markers if text in self.specials)

    def add_structure(self, params: SamplingParams, *, has_reasoning: bool) -> SamplingParams:
        """Return the parameters with the structure of the output.

        Raises:
            ApiError: it exceeds a limit.
        """
        structure = self.structure or params.structured_outputs
        if structure is None:
            return params
        if self.is_harmony and not self.enforces_calls:
            outer = build_harmony_final_grammar(self.specials)
            structure = replace(structure, outer_grammar=outer)
        elif has_reasoning and not self.is_harmony:
            outer = allow_reasoning(END_THINK, self.specials)
            structure = replace(structure, outer_grammar=outer)
        params = replace(params, structured_outputs=structure)
        problems = sampling_problems(params, vocab_size=None)
        if problems:
            raise invalid_field(problems[0], self.field_names)
        return params


def read_output_format(
    body: Mapping[str, Any], model: ServedModel, state: ServerState
) -> OutputFormat:
    """Return the form of the output of a chat request.

    Raises:
        ApiError: a field is invalid, or fields exclude each other.
    """
    tools = read_tools(body.get("tools"))
    schemas = {tool["function"]["name"]: _parameters(tool) for tool in tools}
    choice, name = _read_tool_choice(body.get("tool_choice"), schemas)
    parallel = body.get("parallel_tool_calls") is None or read_bool(body, "parallel_tool_calls")
    structure, names = _read_response_format(body.get("response_format"))
    result = OutputFormat(
        tools=[] if choice == "none" else tools,
        schemas=schemas,
        tool_choice=choice,
        tool_name=name,
        structure=structure,
        field_names=names,
        reasoning_parser=find_reasoning_parser(state.config.parsers),
        tool_call_parser=find_tool_call_parser(state.config.parsers),
        specials=model.tokenizer.specials,
    )
    _check_combination(result, body, model)
    is_strict = any(tool["function"].get("strict") for tool in tools)
    if result.is_harmony and choice in ("required", "named"):
        tools_called = {name: schemas[name]} if name else schemas
        grammar = build_harmony_calls_grammar(tools_called, result.specials)
        structure = StructuredOutputsParams(grammar=grammar)
    elif choice == "required":
        grammar = build_json_calls_grammar(schemas, parallel=parallel)
        structure = StructuredOutputsParams(grammar=grammar)
    elif choice == "named":
        structure = StructuredOutputsParams(json=json.dumps(schemas[name]))
    elif choice == "auto" and (is_strict or not (parallel or result.is_harmony)):
        _check_enforceable(result, body, is_strict=is_strict)
        grammar = build_optional_calls_grammar(
            result.tool_call_parser or "",
            {tool["function"]["name"]: _enforced_parameters(tool) for tool in tools},
            result.specials,
            parallel=parallel,
        )
        structure = StructuredOutputsParams(grammar=grammar)
    else:
        return result
    names = {r"structured_outputs\.(json|grammar)": "tools"}
    return replace(result, structure=structure, field_names=names, enforces_calls=True)


def _check_combination(output: OutputFormat, body: Mapping[str, Any], model: ServedModel) -> None:
    """Check that the fields do not exclude each other, and that the server can honor them."""
    has_structure = body.get("structured_outputs") is not None
    if output.structure is not None and has_structure:
        raise invalid(
            "response_format and structured_outputs both define the output. Remove one of them.",
            "response_format",
        )
    if output.tool_choice in ("required", "named") and (output.structure or has_structure):
        raise invalid(
            "tool_choice enforces a tool call, and response_format or structured_outputs another "
            'output. Remove one of them, or use tool_choice "none".',
            "tool_choice",
        )
    if output.tool_choice != "auto":
        return
    if output.structure is not None:
        raise invalid(
            "response_format allows no tool calls. Remove it, or use tool_choice "
            '"none" or "required".',
            "response_format",
        )
    if output.tool_call_parser is None:
        raise invalid(
            'tool_choice="auto" needs a parser of tool calls: start the server with --parsers and '
            f"one of {', '.join(TOOL_CALL_FORMATS)}, or use tool_choice "
            '"required" or "none".',
            "tool_choice",
        )
    if model.template is not None and not re.search(r"\btools\b", model.template.source):
        raise invalid(
            f"the chat template {model.template.name} does not tell the model about tools. Start "
            'the server with a --template that does, or use tool_choice "required" or "none".',
            "tools",
        )


def _check_enforceable(output: OutputFormat, body: Mapping[str, Any], *, is_strict: bool) -> None:
    """Check that a grammar can enforce strict tools, or a single call, where calls are optional."""
    field, value = ("strict", True) if is_strict else ("parallel_tool_calls", False)
    param = "tools" if is_strict else field
    if body.get("structured_outputs") is not None:
        raise invalid(
            f"{field}={json.dumps(value)} and structured_outputs both define the output. Remove "
            "one of them.",
            param,
        )
    if is_strict and output.tool_call_parser == "qwen3-coder":
        raise invalid(
            "strict=true with tool_choice=auto is not supported with the parser qwen3-coder, whose "
            'arguments are not JSON. Use strict=false, or tool_choice "required".',
            param,
        )


def _enforced_parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON schema that the arguments of a tool must have: any object if it is not
    strict."""
    return _parameters(tool) if tool["function"].get("strict") else {"type": "object"}


def read_tools(value: Any, *, example: str = EXAMPLE) -> list[dict[str, Any]]:  # JSON
    """Return the tools of a request; `example`: in messages, a tool.

    Raises:
        ApiError: they are invalid.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise invalid(f"tools={value!r:.60} must be a list. Use [{example}].", "tools")
    if len(value) > MAX_TOOLS:
        raise invalid(
            f"tools has {len(value)} tools, but the limit is {MAX_TOOLS}. Use fewer.", "tools"
        )
    names: set[str] = set()
    for index, tool in enumerate(value):
        problem = _tool_problem(tool, names)
        if problem is not None:
            raise invalid(f"tools[{index}]{problem} Use {example}.", "tools")
        names.add(tool["function"]["name"])
    return value


def _tool_problem(tool: Any, names: set[str]) -> str | None:  # JSON
    """Return the message about an invalid tool; `names`: those of the tools before it."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return f"={tool!r:.60} must be an object of the type function."
    function = tool.get("function")
    if not isinstance(function, dict):
        return f".function={function!r:.60} must be an object."
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        return (
            f".function.name={name!r:.80} must have 1 to 64 letters, digits, underscores, dots or "
            "dashes."
        )
    if name in names:
        return f".function.name={name!r} occurs twice."
    if not isinstance(function.get("strict"), bool | None):
        return f".function.strict={function['strict']!r:.60} must be true or false."
    if parameters is None:
        return None
    is_object = isinstance(parameters, dict) and parameters.get("type", "object") == "object"
    if not is_object or not isinstance(parameters.get("properties", {}), dict):
        return f".function.parameters={parameters!r:.80} must be a JSON schema of an object."
    structure = StructuredOutputsParams(json=json.dumps(parameters))
    problems = sampling_problems(SamplingParams(structured_outputs=structure), vocab_size=None)
    if not problems:
        return None
    return problems[0].replace("structured_outputs.json", ".function.parameters")


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON schema of the arguments of a tool."""
    parameters = tool["function"].get("parameters")
    return NO_ARGUMENTS if parameters is None else {"type": "object", **parameters}


def _read_tool_choice(
    value: Any, schemas: Mapping[str, Any]
) -> tuple[Literal["none", "auto", "required", "named"], str]:
    """Return the kind of a tool choice, and the tool that it names."""
    if value is None:
        return ("auto" if schemas else "none"), ""
    if value == "none" or (value == "auto" and not schemas):
        return "none", ""
    if value == "auto":
        return "auto", ""
    example = '"auto", or {"type": "function", "function": {"name": "f"}}'
    name = None
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        name = value["function"].get("name")
    if value != "required" and not isinstance(name, str):
        raise invalid(
            f"tool_choice={value!r:.80} must be none, auto, required or a function. Use {example}.",
            "tool_choice",
        )
    if not schemas:
        raise invalid("tool_choice needs tools. Pass tools, or remove it.", "tool_choice")
    if value == "required":
        return "required", ""
    assert isinstance(name, str), "checked above"
    if name not in schemas:
        raise invalid(
            f"tool_choice.function.name={name!r:.60} is none of the tools. Use one of "
            f"{', '.join(schemas)}.",
            "tool_choice",
        )
    return "named", name


def _read_response_format(
    value: Any,
) -> tuple[StructuredOutputsParams | None, Mapping[str, str]]:  # JSON
    """Return the structure of a response format, and the names of its fields in the request."""
    name = "response_format"
    example = '{"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}'
    kind = value.get("type") if isinstance(value, dict) else None
    if value is None or kind == "text":
        return None, {}
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True), {}
    if kind != "json_schema":
        raise invalid(
            f"{name}={value!r:.80} must have the type text, json_object or json_schema. Use "
            f"{example}.",
            name,
        )
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise invalid(
            f"{name}.json_schema.schema={schema!r:.80} must be a JSON schema. Use {example}.", name
        )
    names = {r"structured_outputs\.json": f"{name}.json_schema.schema"}
    return StructuredOutputsParams(json=json.dumps(schema)), names
