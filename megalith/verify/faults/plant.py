"""Faults that can be planted into the running process one at a time, to test that verification
detects them.

Each fault is a realistic mistake: a function that replaces one of ours until its context ends. Code
outside of `plant_fault` never reaches it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeAlias

from megalith.errors import ConfigError, did_you_mean
from megalith.models.decoder import Decoder
from megalith.nn.build import BuildContext
from megalith.parallel.mesh import Mesh
from megalith.testing.inject import patched

Original: TypeAlias = Callable[..., Any]  # Any: the signature of the replaced function
Proof = Literal["types", "shapes", "numbers"]

NEEDS = (
    *("tp", "sp", "whole tokens", "dp", "cp", "pp", "ep", "etp", "chunks", "split backward"),
    *("zero", "zero 2", "fsdp", "replicas", "gather", "a2a", "rings", "recompute", "offload"),
    *("documents", "uneven masks", "masks", "places", "tied", "bias", "mtp", "own stage"),
    *("shared heads", "whole norms", "sinks", "window", "chunks of documents", "off by one"),
    *("learned positions", "biases by distance", "latent", "memory", "dropout"),
    *("dropped weights", "adapters", "z loss", "frozen", "groups", "sgd", "muon", "qk clip"),
    *("experts", "capacity", "balancing bias", "balancing offset", "balance over ranks"),
    "transient fault",
)
"""What a run must have to be affected by a fault: more than one rank on an axis, tokens sharded
over tp or not (`whole tokens`), more tp ranks than KV heads (`shared heads`), a bias after
attention or MLP, tied embeddings on two stages (`tied`), three model chunks per rank, a schedule
with W (`split backward`), activation checkpointing (`recompute`), activation offload (`offload`),
dropout (`dropout`, of attention weights `dropped weights`), MTP layers (`mtp`), two of them on a
separate stage (`own stage`); context parallelism other than the ring, packed documents, collective
matmul (`rings`), sharded gradients (`zero 2`), QK norms over all heads (`whole norms`), cross-layer
attention (`memory`), and other variants of attention and embeddings; experts with ep, etp,
capacity, expert bias or offsets (`balancing bias`, `balancing offset`), or an aux loss over the
global batch (`balance over ranks`); SGD or Muon instead of AdamW (`sgd`, `muon`), QK-clip
(`qk clip`);
gradients that are wrong once on the last rank, which requests a rerun (`transient fault`)."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted mistake."""

    name: str
    what: str
    """Describes the mistake in one sentence."""

    found_by: Proof
    """`types` and `shapes` are rejected by the type check, `numbers` by the float64 run."""

    needs: tuple[str, ...]
    """Subset of `NEEDS`."""

    context: Callable[[], AbstractContextManager[None]]
    """Context manager in which the fault is active."""

    wrong: Callable[..., Any]
    """The faulty function, as it was declared."""  # Any: its own signature

    everywhere: bool = False
    """Whether the one process that ranks are compared with makes the mistake, too."""


def replaces(
    owner: object,
    attribute: str,
    needs: str,
    *,
    found_by: Proof = "numbers",
    everywhere: bool = False,
) -> Callable[[Callable[..., Any]], Fault]:
    """Return a decorator for the fault that a function replaces `owner.attribute`, a function.

    Name and docstring of the function are those of the fault; its first argument is the original.
    `owner` is an object, or the name of a module that takes long to import. `needs`: separated by
    commas.
    """

    def declare(wrong: Callable[..., Any]) -> Fault:
        context = functools.partial(_replace, owner, attribute, wrong)
        return _declare(wrong, needs, found_by, context, everywhere=everywhere)

    return declare


def plants(
    needs: str, *, everywhere: bool = False
) -> Callable[[Callable[[], AbstractContextManager[None]]], Fault]:
    """Return a decorator for a fault that is a context manager of its own; see `replaces`."""

    def declare(context: Callable[[], AbstractContextManager[None]]) -> Fault:
        return _declare(context, needs, "numbers", context, everywhere=everywhere)

    return declare


def changes_model(
    needs: str, *, found_by: Proof = "types"
) -> Callable[[Callable[[Decoder, Mesh], None]], Fault]:
    """Return a decorator for a fault that modifies every `Decoder` after it was built; see
    `replaces`."""

    def declare(change: Callable[[Decoder, Mesh], None]) -> Fault:
        return _declare(change, needs, found_by, functools.partial(changed_model, change))

    return declare


def changed_model(change: Callable[[Decoder, Mesh], None]) -> AbstractContextManager[None]:
    """Apply `change` to every `Decoder` that is built in this context."""

    def build_and_change(
        original: Original, self: Decoder, context: BuildContext, **others: object
    ) -> None:
        original(self, context, **others)
        change(self, context.mesh)

    return _replace(Decoder, "__init__", build_and_change)


@functools.cache
def load_faults() -> tuple[Fault, ...]:
    """Return every fault that can be planted."""
    names = ("layers", "training", "moe", "matrices")
    modules = [import_module(f"megalith.verify.faults.{name}") for name in names]
    return tuple(
        fault for module in modules for fault in vars(module).values() if isinstance(fault, Fault)
    )


def find_fault(name: str) -> Fault:
    """Return the fault of that name.

    Raises:
        ConfigError: there is none.
    """
    by_name = {fault.name: fault for fault in load_faults()}
    if name not in by_name:
        advice = did_you_mean(name, list(by_name)) or ""
        raise ConfigError(f"fault={name}: unknown fault.{advice} Use one of {', '.join(by_name)}.")
    return by_name[name]


def plant_fault(name: str | None) -> AbstractContextManager[None]:
    """Return a context in which the named fault is active; None: no fault.

    Raises:
        ConfigError: there is no such fault.
    """
    return nullcontext() if name is None else find_fault(name).context()


@contextmanager
def _replace(owner: object, attribute: str, wrong: Callable[..., Any]) -> Iterator[None]:
    target = import_module(owner) if isinstance(owner, str) else owner
    original = getattr(target, attribute)

    def replacement(*arguments: Any, **others: Any) -> Any:  # Any: as of the original
        return wrong(original, *arguments, **others)

    with patched(target, attribute, replacement):
        yield


def _declare(
    function: Callable[..., Any],
    needs: str,
    found_by: Proof,
    context: Callable[[], AbstractContextManager[None]],
    *,
    everywhere: bool = False,
) -> Fault:
    """Return the fault with the name and docstring of a function."""
    words = tuple(needs.split(", "))
    assert {*words} <= {*NEEDS}, f"{function.__name__}: unknown needs in {needs!r}"
    what = " ".join((function.__doc__ or "").split())
    return Fault(function.__name__, what, found_by, words, context, function, everywhere)
