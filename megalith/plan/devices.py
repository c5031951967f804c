"""Device data for plans: memory, peak rate and link bandwidths."""

from dataclasses import dataclass

from megalith.errors import ConfigError, did_you_mean

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Memory, peak rate and bandwidths of one device of a job."""

    name: str
    memory: int | None
    """Bytes; None: unknown, so the memory check is skipped."""

    accelerator: bool = True
    """Whether it has a device context, communicators and a caching allocator, which also use
    memory."""

    tflops: float | None = None
    """Peak rate of bf16 matmuls with fp32 accumulation; None: unknown."""

    near_gbs: float = 0.0
    """Bandwidth to devices of the same node: 10^9 bytes per second, one direction."""

    far_gbs: float = 0.0
    """Bandwidth to other nodes, per device: 10^9 bytes per second, one direction."""

    host_gbs: float = 0.0
    """Bandwidth to host memory: 10^9 bytes per second, one direction."""

    node: int = 8
    """Devices per node."""


DEVICES = {
    "a100": Device(name="a100", host_gbs=25, memory=79 * GIB, tflops=312, near_gbs=300, far_gbs=25),
    "h100": Device(
        name="h100", host_gbs=55, memory=79 * GIB, tflops=989.4, near_gbs=450, far_gbs=50
    ),
    "h200": Device(
        name="h200", host_gbs=55, memory=139 * GIB, tflops=989.4, near_gbs=450, far_gbs=50
    ),
    "b200": Device(
        name="b200", host_gbs=55, memory=178 * GIB, tflops=2250, near_gbs=900, far_gbs=50
    ),
}
"""SXM modules with one network interface each. Peak rates are the vendor's dense ones (their
"sparse" figures are twice these); memory is what torch reports of the 80, 80, 141 and 180 GB on the
label."""

MOST_GIB = 1 << 20
"""Upper limit of a device's memory (1 PiB); larger values are typing errors."""

USABLE = 0.94
"""Fraction of a device's memory that a plan may fill; the rest is for memory that the ledger does
not count."""

CONTEXT = 0.6 * GIB  # heuristic: a CUDA context takes 0.4 to 0.7 GiB
NEAR_COMMUNICATOR = 0.1 * GIB  # heuristic: NCCL's buffers depend on its version and settings
FAR_COMMUNICATOR = 0.25 * GIB
# torch's scratch space for matmuls on Hopper: 32 MiB for cuBLAS and for cuBLASLt each
WORKSPACE = 64 * 2**20
SLACK = 0.04  # heuristic: fragmentation with expandable segments

EFFICIENCY = 0.4
"""Fraction of the peak rate that training steps reach; the published 405B run reached 0.38 to 0.43
(arXiv:2407.21783)."""

LINK_EFFICIENCY = 0.8  # of the link rate, for large messages; nccl-tests show 0.75 to 0.9


def device_named(text: str, *, world: int, host_memory: int) -> Device:
    """Return the device of a `--device` argument: a name of the table, `cpu`, or the GiB of one
    device.

    host_memory: bytes of this machine, which all ranks of a CPU job share.

    Raises:
        ConfigError: the argument is none of these.
    """
    if text.lower() == "cpu":
        return Device(name="cpu", memory=host_memory // world, accelerator=False, node=world)
    if (device := accelerator_named(text)) is not None:
        return device
    advice = did_you_mean(text, [*DEVICES, "cpu"]) or ""
    raise ConfigError(
        f"--device={text} is not a known device.{advice} Use one of {', '.join(DEVICES)}, cpu, "
        "or a number of GiB, "
        f"at most {MOST_GIB}."
    )


def accelerator_named(text: str) -> Device | None:
    """Return a device of the table, or one with the given GiB; None if the text is neither.

    >>> accelerator_named("80 GiB").memory == 80 * GIB, accelerator_named("h1000")
    (True, None)
    """
    if text.lower() in DEVICES:
        return DEVICES[text.lower()]
    try:
        gib = float(text.lower().removesuffix("gib").strip())
    except ValueError:
        return None
    return Device(name=f"{gib:g} GiB", memory=int(gib * GIB)) if 0 < gib <= MOST_GIB else None
