"""Megatron's division of work over ranks as our `parallel` settings: tensor, pipeline, context and
data parallelism."""

import re
from collections.abc import Mapping

from megalith.megatron.draft import Draft

_PP, _CP = "--pipeline-model-parallel-size", "--context-parallel-size"
_VPP, _PER_CHUNK = (
    "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage",
)
_GROUP, _LAYOUT = (
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "--pipeline-model-parallel-layout",
)
_ENDS = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
_COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
_EXCHANGE, _LEVELS = "--cp-comm-type", "--hierarchical-context-parallel-sizes"
_OPTIMIZER, _TORCH, _MEGATRON = (
    "--use-distributed-optimizer",
    "--use-torch-fsdp2",
    "--use-megatron-fsdp",
)
_STRATEGY, _INSTANCES = "--data-parallel-sharding-strategy", "--num-distributed-optimizer-instances"
_KEPT, _REDUCE = "--torch-fsdp2-no-reshard-after-forward", "--grad-reduce-in-bf16"

_KINDS = {
    "p2p": "ring",
    "all_gather": "gather",
    "allgather": "gather",
    "a2a": "a2a",
    "a2a+p2p": "a2a+ring",
}
_ZERO: Mapping[str, int] = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def data_parallel_ranks(draft: Draft, world: int | None) -> int | None:
    """How many ranks read different rows in Megatron's job of `world` ranks; None when the world is
    not known."""
    if world is None:
        return None
    tp, pp, cp = (draft.number(flag) for flag in ("--tensor-model-parallel-size", _PP, _CP))
    if world % (tp * pp * cp) == 0:
        return world // (tp * pp * cp)
    if not draft.arguments.given("--global-batch-size"):
        draft.problems.append(
            f"{world} ranks are not a multiple of tensor · pipeline · context parallel = "
            f"{tp}·{pp}·{cp} = "
            f"{tp * pp * cp}. Use --world with the number of ranks that the job runs on."
        )
    return None


def ranks_of(draft: Draft, dp: int | None) -> int:
    """Ranks of the run: with Megatron's data-parallel ranks where they are known, else with as few
    as it can have."""
    tp, pp, cp = (draft.number(flag) for flag in ("--tensor-model-parallel-size", _PP, _CP))
    replicas = draft.settings.get("parallel.dp_replicate", 1)
    return tp * pp * cp * (dp or max(1, replicas))


def translate_layout(draft: Draft) -> None:
    """Every axis of the layout, and what data-parallel ranks divide."""
    tp = draft.number("--tensor-model-parallel-size")
    for flag in (
        "--tensor-model-parallel-size",
        "--ddp-bucket-size",
        "--distributed-timeout-minutes",
    ):
        draft.copy(flag)
    if draft.arguments.value("--sequence-parallel"):
        draft.put(
            "--sequence-parallel",
            "parallel.sp",
            tp > 1,
            "" if tp > 1 else "off at tp 1, as in Megatron",
        )
    if draft.arguments.value("--tp-comm-overlap") and tp > 1:
        draft.put(
            "--tp-comm-overlap",
            "parallel.tp_comm_overlap",
            True,
            "sums are taken in the order of the ring",
        )
    if draft.arguments.value("--use-tp-pp-dp-mapping"):
        draft.put("--use-tp-pp-dp-mapping", "parallel.order", "tp-cp-ep-pp-dp")
    _pipeline(draft)
    _context(draft)
    _zero(draft)


# --- pipeline


def _pipeline(draft: Draft) -> None:
    draft.copy(_PP)
    for flag in (_LAYOUT, *_ENDS):
        draft.copy(flag)
    for flag, setting in zip(_COUNTED, ("count_embedding", "count_loss"), strict=True):
        if draft.arguments.value(flag):
            draft.put(flag, f"parallel.pipeline.{setting}", True)
    _chunks(draft)
    if draft.settings.get("parallel.pipeline.vpp", 1) > 1:
        draft.copy(_GROUP)
    elif draft.arguments.given(_GROUP):
        draft.say("already", _GROUP, "is read with a virtual pipeline only")


def _chunks(draft: Draft) -> None:
    """The chunks per rank, which Megatron takes in three ways."""
    given = [
        flag for flag in (_PER_CHUNK, _VPP, _LAYOUT) if draft.arguments.value(flag) is not None
    ]
    if len(given) > 1:
        typed = ", ".join(draft.arguments.typed(flag) for flag in given)
        draft.problems.append(
            f"{typed}: each of them says how many chunks a rank has. Use one of them."
        )
    elif given == [_VPP]:
        draft.copy(_VPP)
    elif given == [_PER_CHUNK]:
        _layers_per_chunk(draft)
    elif given == [_LAYOUT]:
        stages, pp = count_stages(str(draft.arguments.value(_LAYOUT))), draft.number(_PP)
        vpp = (
            stages // pp if stages % pp == 0 else 1
        )  # another number is refused with the rules of the run
        draft.put(
            _LAYOUT, "parallel.pipeline.vpp", vpp, f"{stages} stages on {pp} ranks", of=(_PP,)
        )


def _layers_per_chunk(draft: Draft) -> None:
    """Layers of each chunk to chunks of each rank."""
    if any(draft.arguments.value(flag) is not None for flag in _ENDS):
        typed = draft.arguments.typed(_PER_CHUNK)
        draft.problems.append(
            f"{typed}: ranks have different numbers of layers. Use {_VPP} instead, as in Megatron."
        )
        return
    counted = sum(bool(draft.arguments.value(flag)) for flag in _COUNTED)
    layers, pp, each = (
        draft.number("--num-layers") + counted,
        draft.number(_PP),
        draft.number(_PER_CHUNK),
    )
    if layers % (pp * each) and all(draft.sure(flag) for flag in ("--num-layers", _PP, _PER_CHUNK)):
        extra = f" and {counted} that count as one" if counted else ""
        draft.problems.append(
            f"{draft.arguments.typed(_PER_CHUNK)}: {layers - counted} layers{extra} do not divide "
            f"into chunks of {each} on {pp} ranks. Use a number that divides, or {_LAYOUT}."
        )
        return
    text = f"{layers} layers / {pp} ranks / {each}"
    draft.put(
        _PER_CHUNK,
        "parallel.pipeline.vpp",
        layers // pp // each,
        text,
        of=("--num-layers", _PP, _PER_CHUNK),
    )


def count_stages(layout: str) -> int:
    """The stages of a layout string without writing it out: one more than its bars.

    >>> count_stages("Et*3|(tt|)*29,m|L")
    32
    """
    text, before = re.sub(r"[, ]", "", layout), ""
    while text != before:
        before, text = text, re.sub(r"\(([^()]*)\)(?:\*(\d+))?", _bars_of_group, text)
    return _bars(text) + 1


def _bars_of_group(group: re.Match[str]) -> str:
    return f"|*{_bars(group[1]) * int(group[2] or 1)}"


def _bars(text: str) -> int:
    return sum(int(count or 1) for count in re.findall(r"\|(?:\*(\d+))?", text))


# --- context


def _context(draft: Draft) -> None:
    draft.copy(_CP)
    given = [flag for flag in (_EXCHANGE, _LEVELS) if draft.arguments.given(flag)]
    kinds = _exchange_kinds(draft)
    if draft.number(_CP) == 1:
        for flag in given:
            draft.say("already", flag, f"is read with {_CP} only")
        return
    if kinds:
        mixed = len(set(kinds)) > 1
        kind = (
            "a2a+ring" if "a2a+ring" in kinds else kinds[0]
        )  # the one that needs groups of neighbors
        draft.put(_EXCHANGE, "parallel.context.kind", kind)
        if mixed:
            draft.put(_EXCHANGE, "parallel.context.layers", kinds)
    if "a2a+ring" in kinds:
        _neighbors(draft)
    elif _LEVELS in given:
        draft.say("already", _LEVELS, f"is read with {_EXCHANGE} a2a+p2p only")


def _exchange_kinds(draft: Draft) -> list[str]:
    """Our names of the kinds that were typed."""
    words = draft.arguments.value(_EXCHANGE) or []
    for word in words:
        if word not in _KINDS:
            draft.problems.append(
                f"{_EXCHANGE} {word}: Megatron has no such choice. Use one of p2p, all_gather, "
                "a2a, a2a+p2p."
            )
    return [_KINDS[word] for word in words if word in _KINDS]


def _neighbors(draft: Draft) -> None:
    """How many neighbors exchange heads before a ring goes across them."""
    words, cp = draft.arguments.value(_LEVELS) or [], draft.number(_CP)
    sizes = [int(word) for word in words if word.isdecimal()]
    if len(sizes) == len(words) == 2 and sizes[0] * sizes[1] == cp:
        draft.put(_LEVELS, "parallel.context.a2a", sizes[0])
        return
    typed = draft.arguments.typed(_LEVELS) if words else f"{_LEVELS} is missing"
    draft.problems.append(
        f"{typed}: {_EXCHANGE} a2a+p2p needs two numbers, ranks that exchange heads and ranks of "
        f"the ring, whose product is {_CP} {cp}. Use for example {_LEVELS} {_example(cp)}."
    )


def _example(cp: int) -> str:
    near = next((size for size in range(2, cp) if cp % size == 0), cp)
    return f"{near} {cp // near}"


# --- data


def _zero(draft: Draft) -> None:
    """What data-parallel ranks divide: optimizer state, gradients, weights."""
    levels = {0: ""}
    if draft.arguments.value(_OPTIMIZER):
        levels[1] = _OPTIMIZER
    if draft.arguments.value(_MEGATRON):
        levels[_ZERO[str(draft.arguments.value(_STRATEGY))]] = _STRATEGY
    if draft.arguments.value(_TORCH):
        levels[2 if draft.arguments.given(_KEPT) else 3] = _TORCH
    zero = max(levels)
    for flag in (_OPTIMIZER, _MEGATRON, _STRATEGY, _TORCH):
        if zero and (flag == levels[zero] or draft.arguments.value(flag) is True):
            draft.put(flag, "parallel.zero", zero)
    if draft.arguments.given(_STRATEGY) and not draft.arguments.value(_MEGATRON):
        draft.say("already", _STRATEGY, f"is read with {_MEGATRON} only")
    _instances(draft, zero)
    _reduction(draft, zero)


def _instances(draft: Draft, zero: int) -> None:
    if zero:
        draft.copy(_INSTANCES)
    elif draft.number(_INSTANCES) > 1:
        text = f"divides nothing without {_OPTIMIZER}. Add that, or remove it"
        draft.say("not mapped", _INSTANCES, text)


def _reduction(draft: Draft, zero: int) -> None:
    if not draft.arguments.value(_REDUCE):
        return
    if zero in (1, 2):
        draft.put(
            _REDUCE,
            "parallel.reduce_dtype",
            "bf16",
            "each rank still adds what it receives in fp32",
        )
    else:
        where = f"without {_OPTIMIZER}" if zero == 0 else "of fully sharded weights"
        draft.say(
            "explained", _REDUCE, f"gradients {where} are summed in fp32 here, which is more exact"
        )
