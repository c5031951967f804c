"""Closed formulas for pipeline bubbles and for activation memory from the literature.

Bubbles are for equal stages and instantaneous messages; the simulation (`plan/simulate`) gives the
same numbers exactly, and handles all other cases. The activations are those of the published GPT
layer, for comparison with other programs; those of our layers are in `estimate/workload`.
"""

from fractions import Fraction
from typing import Literal, NamedTuple

from megalith.config.parallel import ScheduleName
from megalith.plan.schedule import interleaved_warmup
from megalith.plan.simulate import Number


def idle_time(
    name: ScheduleName,
    *,
    num_ranks: int,
    num_microbatches: int,
    forward: Number = 1,
    backward_input: Number = 1,
    backward_weight: Number = 1,
) -> Number | None:
    """Return the idle time of each rank in a step, in the unit of the costs, which are those of one
    chunk.

    None if there is no formula: interleaved with an incomplete last group, zb-h1 with fewer
    microbatches than ranks, the V schedules with fewer than two per rank or with unequal costs.
    Sources: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Qi et al. 2024, arXiv:2401.10241,
    sections 2 and 6.
    """
    hops, backward = num_ranks - 1, backward_input + backward_weight
    if name in ("gpipe", "1f1b"):
        return hops * (forward + backward)
    if name == "interleaved":
        return hops * (forward + backward) if num_microbatches % num_ranks == 0 else None
    if name == "zb-h1":
        # W fills the wait for the next forward, and no more than that if it is longer.
        return (
            hops * (backward_input + max(forward - backward_weight, 0))
            if num_microbatches >= num_ranks
            else None
        )
    even = forward == backward_input == backward_weight
    return hops * forward if even and num_microbatches >= 2 * num_ranks else None


def bubble_fraction(
    name: ScheduleName, *, num_ranks: int, num_chunks: int, num_microbatches: int
) -> Fraction | None:
    """Return idle time over computation time for equal F, I and W; None if there is no formula.

    1F1B: (p-1)/m; interleaved: (p-1)/(v·m); ZB-H1: a third of 1F1B's.
    """
    idle = idle_time(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return None if idle is None else Fraction(idle) / (3 * num_chunks * num_microbatches)


def peak_in_flight(
    name: ScheduleName,
    rank: int,
    *,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group: int | None = None,
) -> int | None:
    """Return the peak number of (microbatch, chunk) pairs in flight on a rank, from F to the end of
    backward.

    Divide by the number of chunks to compare with 1F1B. None: a V schedule with fewer than two
    microbatches per rank.
    """
    if name == "gpipe":
        return num_microbatches
    if name == "1f1b":
        return min(num_microbatches, num_ranks - rank)
    if name == "zb-h1":
        return min(num_microbatches, num_ranks)
    if name == "interleaved":
        sizes = {
            "num_ranks": num_ranks,
            "num_chunks": num_chunks,
            "num_microbatches": num_microbatches,
        }
        warmup = interleaved_warmup(rank, group=group or num_ranks, **sizes)
        return min(warmup + 1, num_chunks * num_microbatches)
    if num_microbatches < 2 * num_ranks:
        return None
    return 2 * num_ranks + (1 if name == "dualpipe-v" else 0)


# --- activations of a GPT


class GptLayer(NamedTuple):
    """GPT layer with GELU, f = 4 h, n · d = h, dropout in three places, 16-bit activations, and
    saved scores."""

    length: int
    """s: sequence length."""

    sequences: int
    """b: micro batch size."""

    hidden_size: int
    num_heads: int

    @property
    def features(self) -> int:
        """s · b · h."""
        return self.length * self.sequences * self.hidden_size

    @property
    def scores(self) -> int:
        """n · s² · b: saved as the result of softmax and of dropout, 2 bytes each, and as a mask of
        1 byte."""
        return self.num_heads * self.length**2 * self.sequences


def gpt_layer_bytes(
    layer: GptLayer,
    *,
    tp: int = 1,
    sp: bool = False,
    again: Literal["nothing", "core_attention", "everything"],
) -> Fraction:
    """Return the saved activations of one layer on one rank, with `again` recomputed, in bytes.

    In units of s·b·h: attention 11 (input 2, q and k 4, v 2, the projection's input 2, a mask 1),
    the MLP 19 (inputs 2 and 8, GELU's 8, a mask 1), two norms 4. Of these 34, 10 are outside of the
    tensor-parallel parts; sp splits them too. Source: Korthikanti et al. 2022, arXiv:2205.05198,
    equations 1 to 6, table 2.

    >>> layer = GptLayer(length=2048, sequences=1, hidden_size=12288, num_heads=96)
    >>> gpt_layer_bytes(layer, again="nothing") / layer.features  # 34 + 5 n s / h
    Fraction(114, 1)
    """
    if again == "everything":
        return Fraction(2 * layer.features, tp if sp else 1)
    between, inside = 10 * layer.features, 24 * layer.features
    scores = 5 * layer.scores if again == "nothing" else 0
    return Fraction(between, tp if sp else 1) + Fraction(inside + scores, tp)


def gpt_first_stage_bytes(
    layer: GptLayer,
    num_layers: int,
    *,
    vocab_size: int,
    tp: int = 1,
    num_ranks: int = 1,
    num_chunks: int = 1,
    again: Literal["nothing", "core_attention", "everything"],
) -> Fraction:
    """Return the peak activations of the first pipeline rank, under sp and 1F1B, or interleaved.

    It holds as many microbatches as there are ranks, so all layers count once; interleaved 1 +
    (p-1)/(p·v) times. The embedding has a mask of s·b·h / tp for each of these; without a pipeline
    it also saves the inputs of the last norm and the head, and fp32 logits: 4·s·b·h/tp · (1 + v/h).
    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.3.
    """
    interleaving_factor = (
        1 + Fraction(num_ranks - 1, num_ranks * num_chunks) if num_chunks > 1 else Fraction(1)
    )
    nbytes = num_layers * gpt_layer_bytes(layer, tp=tp, sp=True, again=again) * interleaving_factor
    nbytes += Fraction(layer.features * num_ranks, tp)
    if num_ranks == 1:
        nbytes += Fraction(
            4 * layer.length * layer.sequences * (layer.hidden_size + vocab_size), tp
        )
    return nbytes


def gpt_attention_again(layer: GptLayer) -> Fraction:
    """Return the paper's cost of recomputing core attention, as a fraction of a layer's
    72·s·b·h²·(1 + s/(6 h)) FLOPs.

    It counts attention's part of all three passes, s/(6 h), once more; the second forward pass
    alone, 4·s²·b·h, is a third of that. The head is left out. Source: Korthikanti et al. 2022,
    arXiv:2205.05198, appendix A.
    """
    return Fraction(layer.length, 6 * layer.hidden_size + layer.length)
