"""Writes the bucket layouts that Megatron-core builds for random parameters, as test vectors.

usage: write_megatron_bucket_vectors.py OUT.json

Needs megatron-core (0.16.0 wrote the vectors in tests/plan), which the project does not depend on;
runs on a CPU without process groups.
"""

import json
import logging
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

NUM_CASES = 40


class FakeGroup:
    """A process group that only knows its size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def rank(self) -> int:
        """Return rank 0."""
        return 0


def make_case(rng: random.Random) -> dict[str, Any]:
    """Return random parameters and settings of one buffer."""
    numels = [rng.choice((1, 7, 64, 100, 128, 1000, 4096)) for _ in range(rng.randint(1, 9))]
    return {
        "numels": numels,
        "shared": sorted(rng.sample(range(len(numels)), k=rng.choice((0, 0, 1)))),
        "bucket_size": rng.choice((None, 1, 128, 500, 2000)),
        "dp": rng.choice((1, 2, 3, 8, 48)),
        "high_bandwidth": rng.random() < 0.2,
        "aligned": rng.random() < 0.85,
    }


def build_buffer(case: dict[str, Any]) -> dict[str, Any]:
    """Return the layout that Megatron-core builds: positions in the buffer and bucket sizes."""
    from megatron.core.distributed import param_and_grad_buffer as module

    module.log_on_each_pipeline_stage = lambda *_, **__: None
    params = [torch.nn.Parameter(torch.zeros(numel)) for numel in case["numels"]]
    for index in case["shared"]:
        params[index].shared_embedding = True
    config = SimpleNamespace(
        use_distributed_optimizer=case["aligned"],
        pad_buckets_for_high_nccl_busbw=case["high_bandwidth"],
        reuse_grad_buf_for_mxfp8_param_ag=False,
    )
    group = FakeGroup(case["dp"])
    buffer = module._ParamAndGradBuffer(
        config,
        torch.float32,
        torch.float32,
        params,
        group,
        case["bucket_size"],
        {param: str(index) for index, param in enumerate(params)},
        1.0,
        list(range(len(params))),
        False,
        SimpleNamespace(tp=FakeGroup(1), dp_cp=group),
    )
    return {
        **case,
        "positions": [buffer.param_index_map[param] for param in params],
        "buckets": [
            (bucket.offset, bucket.grad_data.numel(), bucket.numel_unpadded)
            for bucket in buffer.buckets
        ],
    }


def main() -> None:
    """Write the vectors to the file of the command line."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # a stub
    logging.disable()
    rng = random.Random(0)
    cases = [build_buffer(make_case(rng)) for _ in range(NUM_CASES)]
    lines = ",\n".join(json.dumps(case) for case in cases)
    Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
