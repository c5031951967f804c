"""Dropout of activations outside divided work: embeddings, and what is added to the residual stream."""

from torch import Tensor, nn

from megalith.kernels.dropout import dropout
from megalith.kernels.tokens import Tokens
from megalith.parallel.tensor import Region
from megalith.plan.keys import key


class Dropout(nn.Module):
    """While training, set each feature of each token to zero with probability p: x [t, h] -> [t, h].

    The same features whatever the layout, also when backward computes a layer again; the others are divided by 1 - p.
    Source: Srivastava et al. 2014, JMLR 15(56).
    """

    def __init__(self, place: str, layer: int, p: float, region: Region) -> None:
        """`place` and `layer`, numbered over all stages, keep apart the masks of one token."""
        super().__init__()
        self.place, self.layer, self.p, self.region = place, layer, p, region

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [t, h], of the tokens that I have outside divided work -> [t, h]; x itself where nothing is trained."""
        if tokens.dropout is None:
            return x
        seed, numbers = tokens.dropout
        return dropout(x, self.p, key(seed, "dropout", self.place, self.layer), self.region.mine(numbers))
