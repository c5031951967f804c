"""The module of a toy recurrent mixer, as another package would write it."""

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import PackedSeqParams
from megalith.nn.build import BuildContext
from megalith.parallel.collectives import all_gather
from megalith.parallel.context import reorder
from megalith.parallel.tensor import Init
from megalith.plan.shards import Shard, split_evenly
from tests.recurrent_kind import RECURRENT, STATE, WIDTH


class RecurrentMixer(nn.Module):
    """Linear recurrence per channel and state element: x [t, h] -> [t, h].

    s_t = sigmoid(decay) * s_{t-1} + u_t inside each document, where u = inward @ x, and the output
    is outward @ (sum of s_t over the state). Channels are sharded over the tensor-parallel group.
    Under context parallelism u of all ranks is all-gathered, and each rank computes its own tokens.
    """

    layer_kind = RECURRENT

    decay: nn.Parameter

    def __init__(self, name: str, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        h, tp, start = config.hidden_size, context.mesh.tp, Init(config.init_std)
        sizes = split_evenly(WIDTH, tp.size)

        def shard(part: str, shape: tuple[int, ...], dim: int, *, inputs: int = 1) -> Shard:
            parts = [size * (shape[dim] // WIDTH) for size in sizes]
            whole = Shard.full(f"{name}.{part}", shape, inputs=inputs)
            return whole.split_dim(dim, parts, tp.rank, tp.axes)

        self.cp = context.mesh.cp
        self.inward = context.column_linear([(shard("inward", (WIDTH, h), 0), start)])
        decay = shard("decay", (WIDTH * STATE,), 0, inputs=0)
        context.register_param(self, "decay", decay, Init(1.0))
        self.outward = context.row_linear((shard("outward", (h, WIDTH), 1), start))

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        u, seq_params = self.inward(x), inputs.seq_params
        if inputs.cache is None:
            y = self.mix(u, seq_params)
        else:
            shape = u.shape[1], STATE
            y = inputs.cache.state(self.steps(seq_params), u, seq_params, shape=shape)
        out: Tensor = self.outward(y)
        return out

    def mix(self, u: Tensor, seq_params: PackedSeqParams) -> Tensor:
        """Return the outputs of this rank's tokens [t, c]: sums over the earlier tokens of their
        documents, weighted by decay ** distance."""
        every, whole = u, seq_params.whole
        if seq_params.context is not None:
            every = reorder(all_gather(u, self.cp), seq_params.context.all_ranks)
        distance = seq_params.position_ids[:, None] - whole.position_ids
        same = seq_params.document_ids[:, None] == whole.document_ids
        visible = (same & (distance >= 0)).to(u.dtype)
        log_decay = nn.functional.logsigmoid(self.decay.view(-1, STATE))
        powers = (distance.clamp(min=0).to(u.dtype)[:, :, None, None] * log_decay).exp().sum(-1)
        return (powers * visible[:, :, None] * every).sum(1)

    def steps(self, seq_params: PackedSeqParams):  # type: ignore[no-untyped-def]  # a closure
        """Return the recurrence over the new tokens of each document, token by token."""

        def step(u: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
            rows, last, decay = [], [], torch.sigmoid(self.decay.view(-1, STATE))
            counts = [queries for queries, _ in seq_params.lengths]
            for state, part in zip(states, u.split(counts), strict=True):
                for row in part:
                    state = decay * state + row[:, None]
                    rows.append(state.sum(-1))
                last.append(state)
            return torch.stack(rows), torch.stack(last)

        return step
