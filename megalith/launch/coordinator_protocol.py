"""Messages between the coordinator and replica groups: JSON lines over TCP, checked field by field.

A connection begins with `hello`, answered by `welcome` with the incarnation of the process. Then
the group sends `join`, `vote` and `leave` with increasing request numbers, answered by `reply`, and
`heartbeat`, answered by `alive`. After an `error` the connection is closed. No message contains a
time of a clock.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megalith import storage
from megalith.plan.quorum import (
    Answer,
    Decision,
    Epoch,
    JoinRequest,
    LeaveConfirmation,
    QuorumLimits,
    Rejection,
    Vote,
    epoch_from_record,
    epoch_to_record,
)

PROTOCOL = 1
"""Version of these messages."""

MAX_MESSAGE_NBYTES = 4 << 20
"""Limit of one line: the addresses of 65,536 ranks and the settings of a run fit (computed)."""

MAX_REPLY_NBYTES = 256 << 20
"""Limit of one line of the coordinator: the addresses of four million ranks (computed)."""

MAX_ADDRESSES = 65_536
MAX_TEXT = 4096
"""Limits of lists and texts. Heuristic: bounds for untrusted input."""

MAX_NUMBER = 2**53
"""Largest integer that every JSON parser reads exactly."""

GROUP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Valid values of replica_group.id."""

Message = dict[str, Any]  # Any: JSON


class CoordinatorMessageError(Exception):
    """A message that does not have the required form."""


def encode_message(kind: str, **fields: Any) -> bytes:  # Any: JSON
    """Return a message as one line.

    >>> encode_message("vote", step=3)
    b'{"kind":"vote","step":3}\\n'
    """
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"


def decode_message(line: bytes, *, max_nbytes: int = MAX_MESSAGE_NBYTES) -> Message:
    """Return the message of one line.

    Raises:
        CoordinatorMessageError: it is too long, not JSON, or not an object with a kind.
    """
    if len(line) > max_nbytes:
        raise CoordinatorMessageError(f"a message has more than {max_nbytes} bytes")
    try:
        message = storage.parse_json(line)
    except ValueError as error:
        raise CoordinatorMessageError(f"a message is not JSON: {error!s:.200}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise CoordinatorMessageError("a message is not an object with the field kind")
    return message


def read_text(message: Mapping[str, Any], name: str) -> str:  # Any: JSON
    """Return a field that is a text of bounded length.

    Raises:
        CoordinatorMessageError: it is not.
    """
    value = message.get(name)
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise CoordinatorMessageError(
            f"{name}={value!r:.100} is not a text of at most {MAX_TEXT} characters"
        )
    return value


def read_number(message: Mapping[str, Any], name: str, *, least: int = 0) -> int:  # Any: JSON
    """Return a field that is an integer of at least `least`.

    Raises:
        CoordinatorMessageError: it is not.
    """
    value = message.get(name)
    if type(value) is not int or not least <= value <= MAX_NUMBER:
        raise CoordinatorMessageError(
            f"{name}={value!r:.100} is not an integer from {least} to {MAX_NUMBER}"
        )
    return value


def read_flag(message: Mapping[str, Any], name: str) -> bool:  # Any: JSON
    """Return a field that is true or false.

    Raises:
        CoordinatorMessageError: it is not.
    """
    value = message.get(name)
    if not isinstance(value, bool):
        raise CoordinatorMessageError(f"{name}={value!r:.100} is not true or false")
    return value


def read_group(message: Mapping[str, Any]) -> str:  # Any: JSON
    """Return the id of a group.

    Raises:
        CoordinatorMessageError: it is not valid.
    """
    group = read_text(message, "group")
    if not GROUP_NAME.fullmatch(group):
        raise CoordinatorMessageError(
            f"replica_group.id={group!r:.100} is not valid. Use letters, digits, '.', '_' and '-', "
            "at most 64, such as group-0"
        )
    return group


def read_join(message: Message) -> JoinRequest:
    """Return the join request of a message.

    Raises:
        CoordinatorMessageError: a field is not valid.
    """
    settings = message.get("settings")
    if not isinstance(settings, dict):
        raise CoordinatorMessageError("settings is not an object")
    return JoinRequest(
        committed_step=read_number(message, "committed_step"),
        limits=_read_limits(message.get("limits")),
        addresses=_read_addresses(message, "addresses"),
        state_addresses=_read_addresses(message, "state_addresses"),
        settings={name: read_text(settings, name) for name in settings},
    )


def read_vote(message: Message) -> Vote:
    """Return the vote of a message.

    Raises:
        CoordinatorMessageError: a field is not valid.
    """
    return Vote(
        epoch=read_number(message, "epoch", least=1),
        step=read_number(message, "step", least=1),
        ok=read_flag(message, "ok"),
        last=read_flag(message, "last"),
        has_state=read_flag(message, "has_state"),
    )


def _read_limits(value: Any) -> QuorumLimits:  # Any: JSON
    if not isinstance(value, dict):
        raise CoordinatorMessageError("limits is not an object")
    min_groups = read_number(value, "min_groups", least=1)
    max_groups = value.get("max_groups")
    if max_groups is not None:
        max_groups = read_number(value, "max_groups", least=min_groups)
    timeout = value.get("timeout_seconds")
    if not isinstance(timeout, int | float) or not 0 < timeout < MAX_NUMBER:
        raise CoordinatorMessageError(f"timeout_seconds={timeout!r:.100} is not a positive number")
    return QuorumLimits(
        min_groups=min_groups,
        max_groups=max_groups,
        timeout_seconds=float(timeout),
        max_lag=read_number(value, "max_lag", least=1),
    )


def _read_addresses(message: Message, name: str) -> tuple[str, ...]:
    value = message.get(name)
    if not isinstance(value, list) or len(value) > MAX_ADDRESSES:
        raise CoordinatorMessageError(f"{name} is not a list of at most {MAX_ADDRESSES} addresses")
    for address in value:
        if not isinstance(address, str) or len(address) > 300:
            raise CoordinatorMessageError(
                f"{name} contains {address!r:.100}, which is not an address"
            )
    return tuple(value)


def encode_reply(request: int, answer: Answer) -> bytes:
    """Return the reply to a request as one line."""
    if isinstance(answer, Epoch):
        return encode_message("reply", request=request, epoch=epoch_to_record(answer))
    if isinstance(answer, Decision):
        epoch = None if answer.epoch is None else epoch_to_record(answer.epoch)
        decision = {
            "commit": answer.commit,
            "rejoin": answer.rejoin,
            "reason": answer.reason,
            "epoch": epoch,
        }
        return encode_message("reply", request=request, decision=decision)
    if isinstance(answer, Rejection):
        return encode_message("reply", request=request, rejection=asdict(answer))
    return encode_message("reply", request=request, left=True)


def decode_reply(message: Message) -> tuple[int, Answer]:
    """Return the request number of a reply, and the answer.

    Raises:
        CoordinatorMessageError: it is not a reply.
    """
    request = read_number(message, "request")
    try:
        if "epoch" in message:
            return request, epoch_from_record(message["epoch"])
        if "decision" in message:
            decision = message["decision"]
            epoch = decision["epoch"]
            return request, Decision(
                commit=read_flag(decision, "commit"),
                rejoin=read_flag(decision, "rejoin"),
                reason=str(decision["reason"]),
                epoch=None if epoch is None else epoch_from_record(epoch),
            )
        if "rejection" in message:
            rejection = message["rejection"]
            retry = read_flag(rejection, "retry")
            return request, Rejection(reason=str(rejection["reason"]), retry=retry)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CoordinatorMessageError(
            f"a reply of the coordinator is not valid: {error!r}"
        ) from None
    return request, LeaveConfirmation()


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of an address.

    Raises:
        ValueError: it is not HOST:PORT.

    >>> parse_address("node-3:29700")
    ('node-3', 29700)
    >>> parse_address("[::1]:29700")
    ('::1', 29700)
    """
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"{text!r:.100} is not HOST:PORT, such as node-3:29700")
    return host, int(port)
