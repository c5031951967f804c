"""Messages between pipeline stages: tuples of tensors, sent and received while the rank computes.

Every message has a number of its own, which gloo carries as a tag, so messages may be taken in
another order than they were sent in. NCCL has no tags: there the k-th receive of a channel gets its
k-th send, which is the order in which the schedule lists them, and every channel between two ranks
has a process group of its own.
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
from megalith.plan.transfers import Channel, Direction

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
"""What may cross a boundary; an announcement gives a dtype by its place here."""

ANNOUNCED = 64
"""Numbers of an announcement: how many tensors, then dtype, dims and lengths of each."""


class Spec(NamedTuple):
    """What one tensor of a message looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


Specs = tuple[Spec, ...]


class StageMessage(NamedTuple):
    """One crossing of one boundary."""

    direction: Direction
    stage: int
    """The stage it is for."""

    microbatch: int

    def tag(self, num_microbatches: int) -> int:
        """A number that no other message of the step has."""
        return 2 * (self.stage * num_microbatches + self.microbatch) + (
            self.direction == "backward"
        )


@dataclass(frozen=True, slots=True)
class Handles:
    """Process groups of a pipeline's channels: by (direction, whether the target comes after the
    source)."""

    group: Group
    by_way: Mapping[tuple[Direction, bool], dist.ProcessGroup]
    tags: bool
    """Messages are told apart by tags; else by their order."""

    def of(self, direction: Direction, source: int, target: int) -> dist.ProcessGroup:
        """The group for messages from one pipeline rank to another."""
        return self.by_way[direction, target > source]


def handles_of(group: Group, *, tags: bool, timeout_seconds: float = 600.0) -> Handles | None:
    """What messages of the pipeline `group` travel through; None for one rank or on paper.

    tags: gloo, which has them. Else makes process groups, so every rank of the world calls this
    together; a message over them that takes longer than `timeout_seconds` fails.
    """
    if group.size == 1 or group.handle is None:
        return None
    ways: list[tuple[Direction, bool]] = [
        (d, after) for d in ("forward", "backward") for after in (True, False)
    ]
    if tags:
        return Handles(group, dict.fromkeys(ways, group.handle), tags)
    everyone: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, group.ranks, group=dist.group.WORLD)
    pipelines = sorted({ranks for ranks in everyone if ranks is not None})
    by_way = {}
    for direction, after in ways:
        for ranks in pipelines:
            name = f"pp-{direction}-{'up' if after else 'down'}"
            handle = dist.new_group(
                list(ranks), timeout=timedelta(seconds=timeout_seconds), group_desc=name
            )
            if ranks == group.ranks:
                by_way[direction, after] = handle
    return Handles(group, by_way, tags)


def open_channels(handles: Handles, channels: Sequence[Channel], device: torch.device) -> None:
    """Send one number through every channel, so that both ends are connected; every rank lists the
    same channels.

    NCCL connects two ranks with their first message and holds up whoever comes first until the
    other does. A receive is posted long before its message is sent: in the middle of a step ranks
    would hold up each other in a circle.
    """
    me = handles.group.rank
    for source, target, direction in channels:
        handle, number = handles.of(direction, source, target), torch.zeros(1, device=device)
        if me == source:
            start_send(number, handles.group, target, handle=handle).wait()
        elif me == target:
            start_receive(number, handles.group, source, handle=handle).wait()


def specs_of(tensors: Sequence[Tensor]) -> Specs:
    """What these tensors look like."""
    return tuple(Spec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)


class StageLink:
    """The messages of one rank in one step; a context, which ends when everything has been sent.

    `announce`: send what tensors look like before them, and refuse those that are not as expected;
    gloo only. Without expectations that is how their shapes are known at all.
    """

    def __init__(
        self,
        handles: Handles | None,
        *,
        num_microbatches: int,
        announce: bool,
        device: torch.device,
    ) -> None:
        self.handles, self.num_microbatches, self.device = handles, num_microbatches, device
        self.announce = announce
        self._outbox = Outbox()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._outbox.close(wait=kind is None)

    def send(self, message: StageMessage, tensors: Tensors, target: int) -> None:
        """InitialValues sending; the tensors are kept until they have been sent, and must not be
        written to before."""
        handle, tag = self._handle(message, self._rank, target), message.tag(self.num_microbatches)
        parts = [tensor.contiguous() for tensor in tensors]
        if self.announce:
            parts = [_announcement(specs_of(tensors)).to(self.device), *parts]
        for part in parts:
            self._outbox.keep(start_send(part, self._group, target, tag=tag, handle=handle), part)

    def post(self, message: StageMessage, specs: Specs | None, source: int) -> "Posted":
        """InitialValues receiving; `specs`: what to expect, None: wait for the announcement."""
        handle, tag = self._handle(message, source, self._rank), message.tag(self.num_microbatches)
        posted = Posted(message, source, self._group, handle, tag, specs, self.device)
        if self.announce:
            posted.expect_announcement()
        else:
            assert specs is not None, "without announcements, shapes must be known"
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
        assert self.handles.tags or not self.announce, "announcements need tags, which NCCL has not"
        return self.handles.of(message.direction, source, target)


@dataclass(slots=True)
class Posted:
    """A receive that was started."""

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
        """InitialValues receiving tensors that look like this."""
        self.buffers = tuple(
            torch.empty(spec.shape, dtype=spec.dtype, device=self.device) for spec in specs
        )
        self.works = tuple(self._receive(buffer) for buffer in self.buffers)

    def expect_announcement(self) -> None:
        """InitialValues receiving what the tensors will look like."""
        self.header = torch.empty(ANNOUNCED, dtype=torch.int64, device=self.device)
        self.works = (self._receive(self.header),)

    def wait(self) -> Tensors:
        """The tensors, once they are there.

        Raises:
            DataError: the other stage announced others than were expected.
        """
        for work in self.works:
            work.wait()
        if self.header is not None:
            announced, self.header = _announced(self.header), None
            self._compare(announced)
            self.expect(announced)
            return self.wait()
        return self.buffers

    def _receive(self, buffer: Tensor) -> dist.Work:
        return start_receive(buffer, self.group, self.source, tag=self.tag, handle=self.handle)

    def _compare(self, announced: Specs) -> None:
        if self.specs is not None and announced != self.specs:
            theirs, mine = (
                ", ".join(map(str, specs)) or "nothing" for specs in (announced, self.specs)
            )
            raise DataError(
                f"pipeline rank {self.source} sends {theirs} {self.message.direction} to stage "
                f"{self.message.stage} "
                f"for microbatch {self.message.microbatch}, but {mine} was expected: the stages "
                "read other rows. "
                f"Use the same data and settings on every rank."
            )


class Outbox:
    """Keeps what is being sent alive until it is, and no longer."""

    def __init__(self) -> None:
        self._polled: list[tuple[dist.Work, Tensor]] = []
        self._waiting: SimpleQueue[tuple[dist.Work, Tensor] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def keep(self, work: dist.Work, tensor: Tensor) -> None:
        """Hold on to `tensor` until `work` is done."""
        if (
            tensor.is_cuda
        ):  # NCCL tells when asked; a wait would hold the stream on which the rank computes
            self._polled = [entry for entry in self._polled if not entry[0].is_completed()] + [
                (work, tensor)
            ]
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._let_go, name="pipeline-outbox", daemon=True
            )
            self._thread.start()
        self._waiting.put((work, tensor))

    def close(self, *, wait: bool) -> None:
        """`wait`: until everything has been sent, raising what went wrong; else leave it to the end
        of the process."""
        for work, _ in self._polled if wait else ():
            work.wait()
        if self._thread is None:
            return
        self._waiting.put(None)
        if wait:
            self._thread.join()
            if self._error is not None:
                raise self._error

    def _let_go(self) -> None:
        try:
            while (entry := self._waiting.get()) is not None:
                entry[0].wait()  # gloo tells only those who wait
                del entry
        except BaseException as error:  # raised again by the thread that computes
            self._error = error


def _announcement(specs: Specs) -> Tensor:
    numbers = [len(specs)]
    for spec in specs:
        numbers += [DTYPES.index(spec.dtype), len(spec.shape), *spec.shape]
    assert len(numbers) <= ANNOUNCED, specs
    return torch.tensor(numbers + [0] * (ANNOUNCED - len(numbers)), dtype=torch.int64)


def _announced(header: Tensor) -> Specs:
    count, *numbers = header.tolist()
    specs = []
    for _ in range(count):
        kind, dims, *numbers = numbers
        specs.append(Spec(tuple(numbers[:dims]), DTYPES[kind]))
        numbers = numbers[dims:]
    return tuple(specs)
