"""What a plan needs to know of a device: memory, peak rate, links. For rough times and for whether
a run fits."""

from dataclasses import dataclass

from megalith.config.suggest import did_you_mean
from megalith.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a job."""

    name: str
    memory: int | None
    """Bytes; None: not known here, so nothing is said about fitting."""

    accelerator: bool = True
    """It has a context, communicators and an allocator of its own, which take memory too."""

    tflops: float | None = None
    """Peak rate for bf16 matmuls with fp32 sums; None: not known here."""

    near_gbs: float = 0.0
    """Link to devices of the same node: 10^9 bytes a second, one way."""

    far_gbs: float = 0.0
    """Its share of the network between nodes: 10^9 bytes a second, one way."""

    host_gbs: float = 0.0
    """Link to the host's memory: 10^9 bytes a second, one way."""

    node: int = 8
    """Devices that the near link joins."""


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
"""SXM modules with one network interface each. ParameterRates are the makers' dense ones (their
"sparse" figures are twice these); memory is what torch reports of the 80, 80, 141 and 180 GB on
the label."""

MOST_GIB = 1 << 20
"""Of one device: a PiB is more than anything that is built, and a slip of the finger."""

USABLE = 0.94
"""Part of a device's memory that a plan may fill and be sure: the rest is for what the ledger does
not know."""

CONTEXT = 0.6 * GIB  # guess: what a CUDA process takes before its first tensor is 0.4 to 0.7 GiB
NEAR_COMMUNICATOR = 0.1 * GIB  # guess; NCCL's buffers depend on its version and settings
FAR_COMMUNICATOR = 0.25 * GIB
WORKSPACE = (
    64 * 2**20
)  # torch's scratch space for matmuls on Hopper: 32 MiB for cuBLAS and for cuBLASLt each
SLACK = 0.04  # guess: what the allocator holds between tensors with expandable segments

EFFICIENCY = 0.4
"""Of the peak rate that whole training steps reach; the published 405B run reached 0.38 to 0.43
(arXiv:2407.21783)."""

LINK_EFFICIENCY = 0.8  # of a link's rate that large messages reach; NCCL's tests show 0.75 to 0.9


def device_named(text: str, *, world: int, host_memory: int) -> Device:
    """What `--device` means: a name of the table, `cpu`, or the GiB of one device.

    host_memory: bytes of this machine, which all ranks of a CPU job share.

    Raises:
        ConfigError: it is none of them.
    """
    if text.lower() == "cpu":
        return Device(name="cpu", memory=host_memory // world, accelerator=False, node=world)
    if (device := accelerator_named(text)) is not None:
        return device
    advice = did_you_mean(text, [*DEVICES, "cpu"]) or ""
    raise ConfigError(
        f"--device={text} is no device known here.{advice} Use one of {', '.join(DEVICES)}, cpu, "
        "or a number of GiB, "
        f"at most {MOST_GIB}."
    )


def accelerator_named(text: str) -> Device | None:
    """A device of the table, or one of so many GiB; None where it is neither.

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
