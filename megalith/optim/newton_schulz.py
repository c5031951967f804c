"""Orthogonalization of matrices by Newton-Schulz iteration, and its named sets of coefficients."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Triple = tuple[float, float, float]
"""Coefficients (a, b, c) of one step: X <- a X + (b A + c A^2) X with A = X X^T."""

SIMPLE: Triple = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan et al. 2024, kellerjordan.github.io/posts/muon."""

COEFFICIENT_SETS: Mapping[str, tuple[Triple, ...]] = {
    "simple": (SIMPLE,),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.875, -1.25, 0.375),
    ),
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "deepseek_v4": (SIMPLE,) * 8 + ((2.0, -1.5, 0.5),),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}
"""Triples of each set, one per step. polar_express: Amsel et al. 2025, arXiv:2505.16932; cans:
Grishina et al. 2025, arXiv:2506.10935."""

REPEAT_LAST = frozenset({"polar_express", "cans", "deepseek_v4"})
"""Sets whose last triple is repeated in all later steps; the others start again."""

EPS = 1e-7
"""Smallest norm by which a matrix is divided, as in torch.optim.Muon: a zero matrix gives zero."""


def select_coefficients(coefficients: str | Sequence[Triple], num_steps: int) -> list[Triple]:
    """Return the triples of `num_steps` steps, from a named set or a list, which starts again.

    >>> select_coefficients([(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)], 3)
    [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0), (2.0, -1.5, 0.5)]
    """
    if isinstance(coefficients, str):
        triples: Sequence[Triple] = COEFFICIENT_SETS[coefficients]
        if coefficients in REPEAT_LAST:
            last = len(triples) - 1
            return [triples[min(step, last)] for step in range(num_steps)]
    else:
        triples = coefficients
    return [triples[step % len(triples)] for step in range(num_steps)]


MIN_ROWS_ONE_BY_ONE = 512
"""On CPUs matrices with this many rows are multiplied one at a time, which keeps their buffers in
cache; smaller ones in batches. Measured on an AMD EPYC with AVX512 in bf16, 8 matrices: batches
take 7 % more time at 512 x 512, 12 % less at 256 x 512."""

ROWS_PER_BLOCK = 256
"""Rows of the blocks in which a symmetric product of a CPU is computed. Measured as above: 512 rows
take 7 % less time in bf16, 12 % less in fp32; blocks of 128 rows are slower in bf16."""


def orthogonalize(
    matrices: Tensor, coefficients: Sequence[Triple], *, gram: bool = False
) -> Tensor:
    """Return matrices [b, m, n] with singular values near 1 and the singular vectors of the input.

    Every matrix is divided by its Frobenius norm; then each step multiplies its singular values s
    by a + b s^2 + c s^4. The result has the dtype of the input, in which the steps are computed.
    `gram`: iterate on Gram matrices (`iterate_gram`), with the same result in exact arithmetic.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    one_by_one = matrices.shape[0] == 1 or (
        matrices.device.type == "cpu" and min(matrices.shape[-2:]) >= MIN_ROWS_ONE_BY_ONE
    )
    directions = matrices.new_empty(matrices.shape)
    pairs = zip(matrices, directions, strict=True) if one_by_one else [(matrices, directions)]
    for part, out in pairs:
        norm = torch.linalg.vector_norm(part.flatten(-2), dim=-1, dtype=torch.float64)
        x = part / norm.to(part.dtype).clamp_(min=EPS)[..., None, None]
        if tall:
            x = x.mT.contiguous()  # torch reads transposed 16-bit matrices slowly
        if gram:
            x = iterate_gram(x, coefficients)
            out.copy_(x.mT if tall else x)
        else:
            iterate(x, coefficients, out, tall=tall)
    return directions


def iterate(x: Tensor, coefficients: Sequence[Triple], out: Tensor, *, tall: bool) -> None:
    """Write the steps' result for normalized matrices [m, n] or [b, m, n], m <= n, to `out`, which
    is transposed if `tall`; overwrites x."""
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    result = torch.empty_like(x)
    gram = x.new_empty(*x.shape[:-1], x.shape[-2])
    polynomial = torch.empty_like(gram)
    for number, (a, b, c) in enumerate(coefficients):
        multiply_symmetric(x, x.mT, gram)
        multiply_symmetric(gram, gram, polynomial, add=gram, beta=b, alpha=c)
        if number < len(coefficients) - 1:
            multiply_add(x, polynomial, x, beta=a, out=result)
            x, result = result, x
        elif not tall:
            multiply_add(x, polynomial, x, beta=a, out=out)
        elif x.dim() == 2:
            torch.addmm(x.mT, x.mT, polynomial, beta=a, out=out)
        else:
            out.copy_(torch.baddbmm(x, polynomial, x, beta=a).mT)


def multiply_symmetric(
    x: Tensor,
    y: Tensor,
    out: Tensor,
    *,
    add: Tensor | None = None,
    beta: float = 0.0,
    alpha: float = 1.0,
) -> None:
    """Write `alpha x y + beta add`, which is symmetric, to `out`.

    One large matrix on a CPU is computed by blocks of rows up to the diagonal, and mirrored.
    """
    multiply_add = torch.addmm if out.dim() == 2 else torch.baddbmm
    size = out.shape[-1]
    if out.dim() == 3 or out.device.type != "cpu" or size < 2 * ROWS_PER_BLOCK:
        if add is None:
            torch.matmul(x, y, out=out)
        else:
            multiply_add(add, x, y, beta=beta, alpha=alpha, out=out)
        return
    for start in range(0, size, ROWS_PER_BLOCK):
        stop = min(start + ROWS_PER_BLOCK, size)
        rows = out[start:stop, :stop]
        if add is None:
            torch.mm(x[start:stop], y[:, :stop], out=rows)
        else:
            block = add[start:stop, :stop]
            torch.addmm(block, x[start:stop], y[:, :stop], beta=beta, alpha=alpha, out=rows)
        out[:start, start:stop].copy_(out[start:stop, :start].mT)


STEPS_PER_GRAM = 2
"""Steps of 16-bit matrices from one Gram matrix: with more, small singular values are lost."""


def iterate_gram(x: Tensor, coefficients: Sequence[Triple]) -> Tensor:
    """Return the steps' result for normalized matrices, computed with matrices [m, m], m <= n.

    The product Q of the steps' polynomials is computed from A = X X^T, and multiplied with X once.
    16-bit matrices use fp32 for A and Q, and start again from Q X after two steps, because the
    small eigenvalues of A are lost to rounding.
    """
    if x.dtype in (torch.bfloat16, torch.float16):
        for first in range(0, len(coefficients), STEPS_PER_GRAM):
            steps = coefficients[first : first + STEPS_PER_GRAM]
            x = iterate_gram(x.float(), steps).to(x.dtype)
        return x
    gram = x.new_empty(*x.shape[:-1], x.shape[-2])
    multiply_symmetric(x, x.mT, gram)
    product: Tensor | None = None
    for number, (a, b, c) in enumerate(coefficients):
        polynomial, other = torch.empty_like(gram), torch.empty_like(gram)
        multiply_symmetric(gram, gram, polynomial, add=gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        if product is None:
            product = polynomial
        else:
            # polynomials of one matrix commute, so that all their products are symmetric
            multiply_symmetric(polynomial, product, other)
            product, other = other, torch.empty_like(gram)
        if number < len(coefficients) - 1:
            multiply_symmetric(polynomial, gram, other)
            multiply_symmetric(other, polynomial, gram)
    return x if product is None else product @ x
