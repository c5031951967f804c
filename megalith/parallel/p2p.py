"""Point-to-point communication between pipeline stages: asynchronous sends and receives of tuples
of tensors.

With gloo every message has its own tag, so messages may be received in another order than they were
sent. NCCL has no tags: the k-th receive of a channel gets its k-th send, in the order of the
schedule, and every channel between two ranks has its own process group.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.errors import DataError
from megalith.parallel.group import Group, start_receive, start_send
from megalith.plan.schedule import Channel, Direction

Tensors = tuple[Tensor, ...]

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
"""Dtypes that may be sent between stages; a header encodes a dtype as its index here."""

HEADER_LENGTH = 64
"""Length of a header: the number of tensors, then dtype, number of dimensions and sizes of each."""


BYTES_TAG = 1 << 20
"""Tag of the messages of `ByteBroadcast`, which hidden states do not have."""


class Spec(NamedTuple):
    """Shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    """Whether its gradient is sent back; not part of a header."""

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


Specs = tuple[Spec, ...]


class StageMessage(NamedTuple):
    """Identity of one message between stages: its direction, target stage and microbatch."""

    direction: Direction
    stage: int
    """The receiving stage."""

    microbatch: int

    def tag(self, num_microbatches: int) -> int:
        """Return a tag that is unique within the step."""
        return 2 * (self.stage * num_microbatches + self.microbatch) + (
            self.direction == "backward"
        )


@dataclass(frozen=True, slots=True)
class PipelineGroups:
    """Process groups of the channels of one pipeline."""

    group: Group
    by_channel: Mapping[tuple[Direction, bool], dist.ProcessGroup]
    tags: bool
    """Whether messages are matched by tag (gloo) or by order (NCCL)."""

    def channel_group(self, direction: Direction, source: int, target: int) -> dist.ProcessGroup:
        """Return the process group for messages from one pipeline rank to another."""
        return self.by_channel[direction, target > source]


def create_pipeline_groups(
    group: Group, *, tags: bool, timeout_seconds: float = 600.0
) -> PipelineGroups | None:
    """Create the process groups for the messages of the pipeline `group`; None for one rank or meta
    tensors.

    tags: gloo, whose messages are matched by tag, uses the group's own handle. Otherwise creates
    process groups, so all ranks of the world call this together; a message over them that takes
    longer than `timeout_seconds` fails.
    """
    if group.size == 1 or group.handle is None:
        return None
    channels: list[tuple[Direction, bool]] = [
        (d, after) for d in ("forward", "backward") for after in (True, False)
    ]
    if tags:
        return PipelineGroups(group, dict.fromkeys(channels, group.handle), tags)
    all_ranks: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, group.ranks, group=dist.group.WORLD)
    pipelines = sorted({ranks for ranks in all_ranks if ranks is not None})
    by_channel = {}
    for direction, after in channels:
        for ranks in pipelines:
            name = f"pp-{direction}-{'up' if after else 'down'}"
            handle = dist.new_group(
                list(ranks), timeout=timedelta(seconds=timeout_seconds), group_desc=name
            )
            if ranks == group.ranks:
                by_channel[direction, after] = handle
    return PipelineGroups(group, by_channel, tags)


def open_channels(
    handles: PipelineGroups, channels: Sequence[Channel], device: torch.device
) -> None:
    """Send one number through every channel so that both ends are connected; all ranks list the
    same channels.

    NCCL connects two ranks at their first message and blocks the first rank until the second one
    arrives. Receives are posted long before their messages are sent, so connecting in the middle of
    a step could deadlock.
    """
    rank = handles.group.rank
    for source, target, direction in channels:
        handle, number = (
            handles.channel_group(direction, source, target),
            torch.zeros(1, device=device),
        )
        if rank == source:
            start_send(number, handles.group, target, handle=handle).wait()
        elif rank == target:
            start_receive(number, handles.group, source, handle=handle).wait()


def tensor_specs(tensors: Sequence[Tensor]) -> Specs:
    """Return shape and dtype of each tensor."""
    return tuple(
        Spec(tuple(tensor.shape), tensor.dtype, tensor.is_floating_point()) for tensor in tensors
    )


class StageLink:
    """Sends and receives of one rank in one step; a context manager that exits when all sends are
    complete.

    `announce`: send a header with shapes and dtypes before the tensors, and reject tensors that
    differ from the expected ones; gloo only. Required if the shapes are not known in advance.
    """

    def __init__(
        self,
        handles: PipelineGroups | None,
        *,
        num_microbatches: int,
        announce: bool,
        device: torch.device,
    ) -> None:
        self.handles, self.num_microbatches, self.device = handles, num_microbatches, device
        self.announce = announce
        self._outbox = SendQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._outbox.close(wait=kind is None)

    def close(self) -> None:
        """Wait until everything is sent."""
        self._outbox.close(wait=True)

    def send(self, message: StageMessage, tensors: Tensors, target: int) -> None:
        """Start sending `tensors`, which are kept alive until sent and must not be written to
        before."""
        handle, tag = self._handle(message, self._rank, target), message.tag(self.num_microbatches)
        parts = [tensor.contiguous() for tensor in tensors]
        if self.announce:
            parts = [_build_header(tensor_specs(tensors)).to(self.device), *parts]
        for part in parts:
            self._outbox.keep(start_send(part, self._group, target, tag=tag, handle=handle), part)

    def post(self, message: StageMessage, specs: Specs | None, source: int) -> "PendingReceive":
        """Start receiving a message; `specs`: expected shapes and dtypes, None: take them from the
        header."""
        handle, tag = self._handle(message, source, self._rank), message.tag(self.num_microbatches)
        posted = PendingReceive(message, source, self._group, handle, tag, specs, self.device)
        if self.announce:
            posted.expect_announcement()
        else:
            assert specs is not None, "without headers, shapes must be known"
            posted.expect(specs)
        return posted

    @property
    def _group(self) -> Group:
        assert self.handles is not None
        return self.handles.group

    @property
    def _rank(self) -> int:
        return self._group.rank

    def _handle(self, message: StageMessage, source: int, target: int) -> dist.ProcessGroup:
        assert self.handles is not None, "a pipeline of one rank sends nothing"
        assert self.handles.tags or not self.announce, "headers need tags, which NCCL lacks"
        return self.handles.channel_group(message.direction, source, target)


@dataclass(slots=True)
class PendingReceive:
    """A receive that has been started."""

    message: StageMessage
    source: int
    group: Group
    handle: dist.ProcessGroup
    tag: int
    specs: Specs | None
    device: torch.device
    header: Tensor | None = None
    buffers: Tensors = ()
    works: tuple[dist.Work, ...] = ()

    def expect(self, specs: Specs) -> None:
        """Allocate buffers of these shapes and start receiving into them."""
        self.buffers = tuple(
            torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs
        )
        self.works = tuple(self._receive(buffer) for buffer in self.buffers)

    def expect_announcement(self) -> None:
        """Start receiving the header with shapes and dtypes."""
        self.header = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self.device)
        self.works = (self._receive(self.header),)

    def wait(self) -> Tensors:
        """Wait for the tensors and return them.

        Raises:
            DataError: the other stage sends other shapes or dtypes than expected.
        """
        for work in self.works:
            work.wait()
        if self.header is not None:
            announced, self.header = _parse_header(self.header), None
            self._compare(announced)
            self.expect(announced)
            return self.wait()
        return self.buffers

    def _receive(self, buffer: Tensor) -> dist.Work:
        return start_receive(buffer, self.group, self.source, tag=self.tag, handle=self.handle)

    def _compare(self, announced: Specs) -> None:
        if self.specs is not None and [spec[:2] for spec in announced] != [
            spec[:2] for spec in self.specs
        ]:
            announced_text, expected_text = (
                ", ".join(map(str, specs)) or "nothing" for specs in (announced, self.specs)
            )
            raise DataError(
                f"pipeline rank {self.source} sends {announced_text} {self.message.direction} to "
                f"stage {self.message.stage} for microbatch {self.message.microbatch}, but "
                f"{expected_text} was expected: the stages read different rows. Use the same data "
                "and settings on every rank."
            )


class ByteBroadcast:
    """Messages of bytes from one rank of a group to all others, received in the order in which they
    are sent. The sender does not wait for the receivers."""

    def __init__(self, group: Group, source: int) -> None:
        self._group, self._source = group, source
        self._outbox = SendQueue()

    def send(self, data: bytes) -> None:
        """Start sending a message; only `source` does."""
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        for rank in range(self._group.size):
            for part in (torch.tensor([len(data)]), content):
                if rank != self._source and len(part):
                    self._outbox.keep(start_send(part, self._group, rank, tag=BYTES_TAG), part)

    def receive(self) -> bytes:
        """Wait for the next message."""
        size = torch.empty(1, dtype=torch.int64)
        start_receive(size, self._group, self._source, tag=BYTES_TAG).wait()
        content = torch.empty(int(size), dtype=torch.uint8)
        if len(content):
            start_receive(content, self._group, self._source, tag=BYTES_TAG).wait()
        return content.numpy().tobytes()

    def close(self) -> None:
        """Wait until all messages are sent."""
        self._outbox.close(wait=True)


class SendQueue:
    """Keeps tensors alive until they have been sent."""

    def __init__(self) -> None:
        self._polled: list[tuple[dist.Work, Tensor]] = []
        self._queue: SimpleQueue[tuple[dist.Work, Tensor] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def keep(self, work: dist.Work, tensor: Tensor) -> None:
        """Keep `tensor` until `work` is complete."""
        if tensor.is_cuda:  # polled: a wait would block the stream on which the rank computes
            self._polled = [entry for entry in self._polled if not entry[0].is_completed()] + [
                (work, tensor)
            ]
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._wait_for_sends, name="pipeline-outbox", daemon=True
            )
            self._thread.start()
        self._queue.put((work, tensor))

    def close(self, *, wait: bool) -> None:
        """`wait`: wait until everything has been sent and raise any error; otherwise leave the
        sends to the end of the process."""
        for work, _ in self._polled if wait else ():
            work.wait()
        if self._thread is None:
            return
        self._queue.put(None)
        if wait:
            self._thread.join()
            self._thread = None
            if self._error is not None:
                raise self._error

    def _wait_for_sends(self) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                entry[0].wait()  # gloo reports completion only to a wait
                del entry
        except BaseException as error:  # raised again by the thread that computes
            self._error = error


def _build_header(specs: Specs) -> Tensor:
    numbers = [len(specs)]
    for spec in specs:
        numbers += [DTYPES.index(spec.dtype), len(spec.shape), *spec.shape]
    assert len(numbers) <= HEADER_LENGTH, specs
    return torch.tensor(numbers + [0] * (HEADER_LENGTH - len(numbers)), dtype=torch.int64)


def _parse_header(header: Tensor) -> Specs:
    count, *numbers = header.tolist()
    specs = []
    for _ in range(count):
        kind, dims, *numbers = numbers
        dtype = DTYPES[kind]
        specs.append(Spec(tuple(numbers[:dims]), dtype, dtype.is_floating_point))
        numbers = numbers[dims:]
    return tuple(specs)
