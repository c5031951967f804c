"""Messages between the pipeline stages of an inference engine.

Every stage plans the same steps. The hidden states of a step go from stage to stage; the last one
samples, and sends the results to all others. A stage starts the next steps without waiting for the
results of a step, so as many steps are in flight as there are stages.
"""

import pickle
from collections.abc import Sequence

import torch

from megalith.infer.outputs import StepResults
from megalith.models.decoder import NOTHING_RECEIVED, Decoder, StageTensors
from megalith.parallel.group import Group
from megalith.parallel.p2p import (
    ByteBroadcast,
    Spec,
    StageLink,
    StageMessage,
    create_pipeline_groups,
    open_channels,
)
from megalith.plan.schedule import Channel
from megalith.plan.stages import Stage, stage_boundary


class PipelineLink:
    """Sends and receives of one stage, in the order of the steps."""

    def __init__(
        self, group: Group, model: Decoder, stages: Sequence[Stage], device: torch.device
    ) -> None:
        """Connect the stages, one on each rank of `group`; `model`: the stage of this rank.
        Collective over the world."""
        self.group, self.num_stages, self._rank = group, group.size, group.rank
        self._received = stage_boundary(model.config, stages, group.rank)
        self._sent = stage_boundary(model.config, stages, group.rank + 1)
        self._hidden_size, self._device = model.config.hidden_size, device
        self._dtypes = {"model": model.dtype, "residual": model.stream_dtype}
        groups = create_pipeline_groups(group, tags=device.type == "cpu")
        if groups is not None and not groups.tags:
            open_channels(groups, list_channels(group.size), device)
        self._link = StageLink(groups, num_microbatches=1, announce=False, device=device)
        self._results = ByteBroadcast(group, group.size - 1)

    def receive(self, num_tokens: int) -> StageTensors:
        """Wait for the hidden states of the previous stage, each [num_tokens, h]."""
        if self._rank == 0:
            return NOTHING_RECEIVED
        specs = self._specs(num_tokens)
        message = StageMessage("forward", self._rank, 0)
        tensors = self._link.post(message, tuple(specs.values()), self._rank - 1).wait()
        return dict(zip(specs, tensors, strict=True))

    def allocate_received(self, num_tokens: int) -> StageTensors:
        """Return tensors like those of `receive`, of zeros."""
        if self._rank == 0:
            return NOTHING_RECEIVED
        return {
            name: torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)
            for name, spec in self._specs(num_tokens).items()
        }

    def _specs(self, num_tokens: int) -> dict[str, Spec]:
        return {
            tensor.name: Spec((num_tokens, self._hidden_size), self._dtypes[tensor.dtype])
            for tensor in self._received
        }

    def send(self, tensors: StageTensors) -> None:
        """Start sending hidden states to the next stage."""
        message = StageMessage("forward", self._rank + 1, 0)
        parts = tuple(tensors[tensor.name] for tensor in self._sent)
        self._link.send(message, parts, self._rank + 1)

    def send_results(self, results: StepResults) -> None:
        """Start sending the results of a step to all other stages; the last stage does."""
        self._results.send(pickle.dumps(results))

    def receive_results(self) -> StepResults:
        """Wait for the results of the next step."""
        data = self._results.receive()
        results: StepResults = pickle.loads(data)  # lint: allow pickle-load: from our last stage
        return results

    def close(self) -> None:
        """Wait until everything is sent, before the process group is destroyed."""
        self._link.close()
        self._results.close()


def list_channels(num_stages: int) -> list[Channel]:
    """Return the channels of the hidden states."""
    return [Channel(stage, stage + 1, "forward") for stage in range(num_stages - 1)]
