"""Estimate the time of a step: computation (with recomputation) at a typical fraction of the peak
rate, communication at link rate.

Shows which parallel axis costs how much and what can be overlapped; it does not predict a step
time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalith.config.lora import lora_layers
from megalith.config.model import ModelConfig
from megalith.config.parallel import OffloadConfig, RecomputeConfig
from megalith.config.train import TrainRun
from megalith.estimate.traffic import Traffic
from megalith.estimate.workload import Workload
from megalith.plan.costs import (
    attention_flops,
    latent_flops,
    layer_flops,
    mlp_flops,
    shared_flops,
    step_flops,
)
from megalith.plan.devices import EFFICIENCY, LINK_EFFICIENCY, Device
from megalith.plan.frozen import first_trained_layer, tables_trained, trained_step_flops
from megalith.plan.layers.head import head_flops
from megalith.plan.recompute import layer_spans, recomputed_modules
from megalith.plan.stages import Stage

# --- cost of activation recomputation: FLOPs that backward repeats, by layer


def repeated_flops(
    run: TrainRun,
    stages: Sequence[Stage],
    *,
    tokens: int,
    squared_lengths: int,
    windowed: int | None = None,
) -> int:
    """Return the FLOPs of a step spent on recomputation: the forward of whole layers or of the
    selected modules, MTP layers included; a third of what `step_flops` counts for them.

    stages: of the whole pipeline; the other arguments are those of `step_flops`. Layers below every
    trained parameter have no backward, so they are not recomputed; the matmuls of adapters are not
    counted. Source: Korthikanti et al. 2022, arXiv:2205.05198, appendix A.
    """
    if run.recompute.granularity == "none":
        return 0
    token_counts = _RepeatedTokens(run.model, tokens, squared_lengths, windowed)
    if run.recompute.granularity == "full":
        return sum(token_counts.layer(layer) for layer in _list_recomputed_layers(run, stages)) // 3
    modules = recomputed_modules(run.recompute)
    # it is inside
    modules = tuple(
        one for one in modules if one != "core_attention" or "mla_up_proj" not in modules
    )
    layers = (layer for stage in stages for layer in _layers_with_backward(stage.layers, run))
    mtp_layers = [run.model.num_layers - 1] * run.model.mtp.num_layers
    return (
        sum(
            token_counts.part(module, layer)
            for layer in (*layers, *mtp_layers)
            for module in modules
        )
        // 3
    )


def _list_recomputed_layers(run: TrainRun, stages: Sequence[Stage]) -> list[int]:
    """Return the numbers of the recomputed layers over all stages; the last layer's once more per
    MTP layer."""
    recomputed_layers = []
    for stage in stages:
        layers = _layers_with_backward(stage.layers, run)
        recomputed_layers += _select_recomputed(run.recompute, layers)
    return (
        recomputed_layers
        + _select_recomputed(run.recompute, [run.model.num_layers - 1]) * run.model.mtp.num_layers
    )


def _select_recomputed(recompute: RecomputeConfig, layers: Sequence[int]) -> list[int]:
    spans = layer_spans(recompute, OffloadConfig(), len(layers))
    return [layer for span in spans if span.recomputed for layer in layers[span.start : span.stop]]


def _layers_with_backward(layers: range, run: TrainRun) -> list[int]:
    """Return the layers from the first adapter, or the first trained parameter, on."""
    if run.lora is not None:
        first = lora_layers(run.lora, run.model)[0]
    else:
        below = not run.optim.trains_all() and not tables_trained(run.model, run.optim)
        first = first_trained_layer(run.model, run.optim) if below else 0
    return [layer for layer in layers if layer >= first]


class _RepeatedTokens(NamedTuple):
    """Token counts of the documents of a step."""

    model: ModelConfig
    tokens: int
    squared_lengths: int
    windowed: int | None

    def layer(self, layer: int) -> int:
        """Return the model FLOPs of one layer."""
        return layer_flops(
            self.model,
            layer,
            tokens=self.tokens,
            squared_lengths=self.squared_lengths,
            windowed=self.windowed,
        )

    def part(self, module: str, layer: int) -> int:
        """Return the model FLOPs of a recomputed module of a layer; 0 for norms and activations."""
        if module in ("mlp", "shared_experts"):
            return (mlp_flops if module == "mlp" else shared_flops)(self.model, layer, self.tokens)
        if module not in ("core_attention", "mla_up_proj"):
            return 0
        count = latent_flops if module == "mla_up_proj" else attention_flops
        return count(
            self.model,
            layer,
            tokens=self.tokens,
            squared_lengths=self.squared_lengths,
            windowed=self.windowed,
        )


@dataclass(frozen=True, slots=True)
class CommunicationTime:
    """Time of one kind of communication in a step, and the computation time that can overlap it."""

    near: bool
    """Whether all ranks of its group are in one node."""

    seconds: float
    room: float
    """Seconds of computation that can overlap it; 0 if the next operation needs the result."""

    @property
    def exposed(self) -> float:
        """Exposed communication time in seconds, at best."""
        return max(0.0, self.seconds - self.room)


def rank_flops(workload: Workload) -> float:
    """Return the model FLOPs of one rank in a step, averaged over stages, without recomputation."""
    run, t = workload.run, workload.run.train
    row = trained_step_flops(
        run.model, run.lora, run.optim, tokens=t.seq_len, squared_lengths=t.seq_len**2
    )
    return t.global_batch_size * row / workload.world


def work_seconds(workload: Workload, device: Device) -> float | None:
    """Return the computation time of a step, with recomputation, without bubble and communication;
    None if the device's rate is not known."""
    if device.tflops is None:
        return None
    return (
        rank_flops(workload) * (1 + repeated_share(workload)) / (device.tflops * 1e12 * EFFICIENCY)
    )


def communication_time(
    workload: Workload, row: Traffic, *, pp_rank: int, tp_rank: int, device: Device
) -> CommunicationTime | None:
    """Return the time of this communication; None if the device's bandwidths or rate are not
    known."""
    work = work_seconds(workload, device)
    if work is None or device.near_gbs == 0:
        return None
    rank = workload.rank_at(pp_rank, tp_rank)
    span = ("dp", "cp") if row.axis == "dp" else tuple(row.axis.split("_"))
    ranks = workload.grid.find_group(rank, span)
    near = len({one // device.node for one in ranks}) == 1
    rate = (device.near_gbs if near else device.far_gbs) * 1e9 * LINK_EFFICIENCY
    return CommunicationTime(near, row.nbytes / rate, _overlap_share(workload, row) * work)


def _overlap_share(workload: Workload, row: Traffic) -> float:
    """Return the fraction of a step's computation that can overlap this communication; backward is
    two thirds."""
    num_microbatches = workload.num_microbatches
    shares = {
        "": 0.0,
        "last backward": 2 / 3 / num_microbatches,
        "backward": 2 / 3,
        "next forward": 1 / 3 / num_microbatches,
        "other microbatches": 1.0,
        "the other of a pair": _paired_share(workload),
        "the layer before": 1.0,
        "attention": attention_share(workload),
        "matmuls": (layer_share(workload.run) - attention_share(workload))
        / 3,  # of inputs' or of weights' gradients
    }
    return shares[row.behind]


def _paired_share(workload: Workload) -> float:
    """Return the fraction of computation that runs in pairs, on the rank with the fewest."""
    schedule = workload.schedule
    return min(map(len, schedule.pairs), default=0) / (
        schedule.num_chunks * schedule.num_microbatches
    )


def attention_share(workload: Workload) -> float:
    """Return core attention's share of the FLOPs of a step."""
    c, length = workload.run.model, workload.run.train.seq_len
    whole = step_flops(c, tokens=length, squared_lengths=length**2)
    return 1 - step_flops(c, tokens=length, squared_lengths=0, windowed=0) / whole


def layer_share(run: TrainRun) -> float:
    """Return the layers' share of the FLOPs of a step; the head has the rest."""
    c, length = run.model, run.train.seq_len
    whole = step_flops(c, tokens=length, squared_lengths=length**2)
    return 1 - (1 + c.mtp.num_layers) * head_flops(c, length) / whole


def repeated_share(workload: Workload) -> float:
    """Return the recomputed FLOPs as a fraction of the model FLOPs."""
    run, length = workload.run, workload.run.train.seq_len
    useful = trained_step_flops(
        run.model, run.lora, run.optim, tokens=length, squared_lengths=length**2
    )
    return repeated_flops(run, workload.stages, tokens=length, squared_lengths=length**2) / useful
