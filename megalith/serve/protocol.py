"""Messages between the HTTP process and the engine processes, as msgpack arrays [tag, field, ...].

Nothing is unpickled: a frame that is not one of these messages raises `ProtocolError`, and its
receiver logs and drops it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from megalith.config.serve import Pooling
from megalith.infer.stopping_criteria import FinishReason


class ProtocolError(Exception):
    """A frame that is not a message of this protocol."""


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Add a request to the engine."""

    request_id: int
    """Number that the HTTP process gave it."""

    uid: str
    """Name in logs."""

    prompt_token_ids: list[int]
    params: dict[str, Any]  # JSON, see SamplingParams.to_dict
    arrival_time: float
    """Arrival at the HTTP process, on the monotonic clock of the machine."""

    pooling: Pooling | None
    """Return an embedding of the prompt instead of tokens."""

    adapter: str | None = None
    """Name of a LoRA adapter; None: the base model."""

    progress: list[Any] | None = None
    """What a lost replica has generated of each choice, as [token ids, finish reason or None], if
    it has sent tokens; None: a new request."""

    adapter_fingerprint: bytes | None = None
    """SHA-256 of the adapter's weights with which the lost replica has generated."""

    dp_rank: int = 0
    """Data-parallel rank of the engine that processes it."""


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End a request now; unknown requests are ignored."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ExpireRequest:
    """End a request whose deadline has passed; unknown requests are ignored. Rank 0 of an engine
    sends it to all ranks, whose clocks differ; the HTTP process does for other data-parallel
    ranks."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent to a replica of the engine, which returns it between two steps."""

    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class EngineCall:
    """Call a command of the engine, which answers with a `Reply`."""

    call_id: int
    command: str
    """reset_prefix_cache, load_adapter, unload_adapter, locate_weights, update_weights, stats,
    metrics, list_blocks, pause, resume, suspend, wake_up, drain or shutdown."""

    arguments: dict[str, Any] = field(default_factory=dict)  # JSON
    dp_rank: int = 0
    """Data-parallel rank that answers. It alone executes `RANK_COMMANDS`; all execute others."""


RANK_COMMANDS = ("stats", "metrics", "list_blocks")


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of a call."""

    call_id: int
    result: dict[str, Any]  # JSON
    """If it failed: `error`, a message, and `status`, an HTTP status code."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""

    info: dict[str, Any]  # JSON, see ModelInfo


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The model cannot be served."""

    message: str


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """A request was not added."""

    request_id: int
    status: int
    """HTTP status code."""

    message: str


@dataclass(frozen=True, slots=True)
class PromptResult:
    """What is known about the prompt of a request before its first token."""

    request_id: int
    num_cached_tokens: int
    prompt_logprobs: list[Any] | None
    """`Logprobs` of each prompt token after the first, as arrays."""

    embedding: bytes | None
    """Little-endian fp32."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probs at one position."""

    token: int
    logprob: float
    top: list[Any]
    """Pairs [token id, log-prob], the most likely first; contains the token itself."""


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """A generated token of one choice, or its end without a token."""

    request_id: int
    choice: int
    token: int | None
    text: str
    logprobs: list[Any] | None
    """`Logprobs` as an array."""

    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None
    is_timeout: bool
    """Whether the error is that the deadline of the request passed."""

    is_request_error: bool = False
    """Whether the parameters of the request are the cause of the error."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Results of one step, for all requests."""

    prompts: list[Any]
    """`PromptResult` as arrays."""

    updates: list[Any]
    """`TokenUpdate` as arrays."""

    cache: list[Any] | None = None
    """`CacheReport` as an array, of a replica of the engine."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Changes of the prefix cache of a replica since its last report."""

    sequence: int
    """Number of the report."""

    stored: list[int]
    removed: list[int]
    """Keys of the blocks (`BlockHash.key`)."""

    num_active_blocks: int
    """Blocks that sequences use."""


Message: TypeAlias = (
    AddRequest
    | AbortRequest
    | ExpireRequest
    | Heartbeat
    | EngineCall
    | Reply
    | Ready
    | LoadFailed
    | RequestRejected
    | StepOutputs
)
TAGS: Mapping[int, type[Message]] = {
    1: Ready,
    2: LoadFailed,
    20: AddRequest,
    21: AbortRequest,
    22: StepOutputs,
    23: RequestRejected,
    24: ExpireRequest,
    25: Heartbeat,
    30: EngineCall,
    31: Reply,
}
_TAG_OF = {message: tag for tag, message in TAGS.items()}


class Codec:
    """Encodes and decodes messages.

    Raises:
        ImportError: msgpack is not installed.
    """

    def __init__(self) -> None:
        import msgpack

        self._pack: Callable[[object], bytes] = msgpack.Packer().pack
        self._unpack: Callable[[bytes], object] = msgpack.unpackb
        self._checks = {tag: _field_checks(message) for tag, message in TAGS.items()}

    def encode(self, message: Message) -> bytes:
        """Return the frame of a message."""
        return self._pack([_TAG_OF[type(message)], *to_array(message)])

    def decode(self, frame: bytes) -> Message:
        """Return the message of a frame.

        Raises:
            ProtocolError: it is not one.
        """
        try:
            values = self._unpack(frame)
        except Exception as error:  # msgpack raises many kinds for bytes that it cannot parse
            raise ProtocolError(f"not msgpack ({type(error).__name__}: {error!s:.100})") from error
        if not isinstance(values, list) or not values or not isinstance(values[0], int):
            raise ProtocolError("not an array [tag, field, ...]")
        tag, *arguments = values
        if tag not in TAGS:
            raise ProtocolError(f"unknown tag {tag}")
        check_fields(TAGS[tag].__name__, arguments, self._checks[tag])
        return TAGS[tag](*arguments)


def join_frames(frames: Sequence[bytes]) -> bytes:
    """Return frames as one byte string, each after its length."""
    return b"".join(len(frame).to_bytes(8, "little") + frame for frame in frames)


def split_frames(data: bytes) -> list[bytes]:
    """Return the frames of `join_frames`."""
    frames: list[bytes] = []
    start = 0
    while start < len(data):
        stop = start + 8 + int.from_bytes(data[start : start + 8], "little")
        frames.append(data[start + 8 : stop])
        start = stop
    return frames


def to_array(message: object) -> list[object]:
    """Return the fields of a message in order."""
    return [getattr(message, name) for name in type(message).__slots__]  # type: ignore[attr-defined]  # slotted dataclasses


def check_fields(
    name: str, values: Sequence[object], checks: Sequence[tuple[type, ...] | None]
) -> None:
    """Check the number and the types of the fields of a message.

    Raises:
        ProtocolError: they are not those of the message `name`.
    """
    if len(values) != len(checks):
        raise ProtocolError(f"{name} has {len(values)} fields instead of {len(checks)}")
    for index, (value, types) in enumerate(zip(values, checks, strict=True)):
        # type() and not isinstance: a boolean is no number
        if types is not None and type(value) not in types:
            raise ProtocolError(f"{name}: field {index} is a {type(value).__name__}")


def _field_checks(message: type) -> list[tuple[type, ...] | None]:
    """Return the types that each field may have; None: any."""
    hints = get_type_hints(message)
    return [_plain_types(hints[item.name]) for item in fields(message)]


def _plain_types(hint: Any) -> tuple[type, ...] | None:  # a type annotation
    if hint is Any:
        return None
    origin = get_origin(hint)
    if origin in (list, dict):
        return (origin,)
    if hint is float:
        return (float, int)
    if isinstance(hint, type):
        return (hint,)
    types: list[type] = []
    for option in get_args(hint):
        types += [type(option)] if isinstance(option, str) else _plain_types(option) or ()
    return tuple(types)
