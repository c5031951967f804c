"""Encodings of optimizer states: which state of a parameter has which number format, its bytes, and
the rules of `precision.optimizer_states`; no torch."""

from collections.abc import Iterator

from megalith.config.optim import MomentDtype, OptimConfig, OptimizerStatesConfig, PrecisionConfig
from megalith.plan.parameters import PER_MATRIX_RULES
from megalith.plan.update_rules import list_per_matrix_rules, list_slice_roles

BLOCK_NUMEL = 256
"""Elements with a common scale, counted from the start of the parameter's box in row-major order.
Source: torchao's 8-bit optimizers; Dettmers et al. 2021, arXiv:2110.02861, use 2048 (section
2.1)."""

BLOCK_DTYPES: tuple[MomentDtype, ...] = ("fp16", "fp8", "int8")
"""Formats with one fp32 scale per block."""

FIRST_MOMENTS, SECOND_MOMENTS = ("exp_avg", "momentum"), ("exp_avg_sq",)
"""Roles of the states that `first_moment` and `second_moment` apply to; all others are fp32."""

BUCKET_ALIGNMENT = 64
"""Elements of which each parameter of a bucket starts at a multiple, without block encodings."""

_NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}


def select_moment_dtype(role: str, inputs: int, states: OptimizerStatesConfig) -> MomentDtype:
    """Return the number format of a state of a parameter with `inputs` input dims.

    Vectors have no block encodings: they are a negligible part, and FSDP splits them inside of
    blocks.

    >>> states = OptimizerStatesConfig(first_moment="bf16", second_moment="int8")
    >>> [select_moment_dtype(role, 1, states) for role in ("exp_avg", "exp_avg_sq", "row_mean")]
    ['bf16', 'int8', 'fp32']
    >>> select_moment_dtype("exp_avg_sq", 0, states)
    'fp32'
    """
    dtype: MomentDtype = "fp32"
    if role in FIRST_MOMENTS:
        dtype = states.first_moment
    elif role in SECOND_MOMENTS:
        dtype = states.second_moment
    return "fp32" if inputs == 0 and dtype in BLOCK_DTYPES else dtype


def has_block_encodings(states: OptimizerStatesConfig) -> bool:
    """Return whether some state is stored in blocks with a common scale."""
    return states.first_moment in BLOCK_DTYPES or states.second_moment in BLOCK_DTYPES


def block_alignment(states: OptimizerStatesConfig) -> int:
    """Return the number of elements of which parameters and slices in buckets start at a multiple:
    slices must not split blocks."""
    return BLOCK_NUMEL if has_block_encodings(states) else BUCKET_ALIGNMENT


def moment_nbytes(numel: int, dtype: MomentDtype) -> int:
    """Return the bytes of `numel` elements of a state.

    >>> [moment_nbytes(1000, dtype) for dtype in ("fp32", "bf16", "int8")]
    [4000, 2000, 1016]
    """
    num_blocks = -(-numel // BLOCK_NUMEL) if dtype in BLOCK_DTYPES else 0
    return _NBYTES[dtype] * numel + 4 * num_blocks


def slice_state_nbytes(
    numel: int, inputs: int, rule: str, optim: OptimConfig, precision: PrecisionConfig
) -> int:
    """Return the bytes of the states of a slice of `numel` elements, without master weights."""
    if precision.params == "fp64":
        return 8 * numel * len(list_slice_roles(optim, rule))
    return sum(
        moment_nbytes(numel, select_moment_dtype(role, inputs, precision.optimizer_states))
        for role in list_slice_roles(optim, rule)
    )


def master_weight_nbytes(precision: PrecisionConfig) -> int:
    """Return the bytes of the master weights of a parameter, beside its weights.

    >>> states = OptimizerStatesConfig(master_weights="remainder")
    >>> master_weight_nbytes(PrecisionConfig(params="bf16", optimizer_states=states))
    2
    """
    if precision.params not in ("bf16", "fp16"):
        return 0
    return {"fp32": 4, "remainder": 2, "none": 0}[precision.optimizer_states.master_weights]


# --- rules


def state_encoding_problems(optim: OptimConfig, precision: PrecisionConfig) -> list[str]:
    """Return an error text for each broken rule of precision.optimizer_states."""
    return [
        *_master_weight_problems(precision),
        *_moment_problems(optim, precision),
        *_per_matrix_problems(optim, precision),
    ]


def state_encoding_notes(optim: OptimConfig, precision: PrecisionConfig) -> list[str]:
    """Return a note if bf16 second moments lose most updates to rounding."""
    states = precision.optimizer_states
    if states.second_moment != "bf16" or optim.beta2 <= 1 - 2**-8 or not optim.uses("adamw"):
        return []
    return [
        f"precision.optimizer_states.second_moment=bf16 with optim.beta2={optim.beta2}: above "
        "0.996 = 1 - 2**-8, a change of (1 - beta2) (g^2 - v) is lost to rounding unless g^2 is "
        "several times v. Set optim.beta2 to 0.95, or "
        "precision.optimizer_states.second_moment=fp32"
    ]


_SECTION = "precision.optimizer_states"


def _master_weight_problems(precision: PrecisionConfig) -> Iterator[str]:
    master_weights = precision.optimizer_states.master_weights
    if master_weights == "fp32" or precision.params == "bf16":
        return
    reason = (
        "remainders are the low 16 bits of fp32 values whose high 16 bits are bf16 weights"
        if master_weights == "remainder"
        else "updates are rounded stochastically to bf16 weights"
    )
    yield (
        f"{_SECTION}.master_weights={master_weights} with precision.params={precision.params}: "
        f"{reason}. Set precision.params=bf16, or {_SECTION}.master_weights=fp32."
    )


def _moment_problems(optim: OptimConfig, precision: PrecisionConfig) -> Iterator[str]:
    states = precision.optimizer_states
    for name, roles in (("first_moment", FIRST_MOMENTS), ("second_moment", SECOND_MOMENTS)):
        dtype = getattr(states, name)
        if dtype == "fp32":
            continue
        if precision.params == "fp64":
            yield (
                f"{_SECTION}.{name}={dtype} with precision.params=fp64, which is for "
                f"verification. Remove {_SECTION}.{name}."
            )
        rules = [rule for rule in ("adamw", "sgd", "lion") if optim.uses(rule)]
        known = {role for rule in rules for role in list_slice_roles(optim, rule)}
        if optim.plugin is None and rules and not known & {*roles}:
            held = f"has only {', '.join(sorted(known))}" if known else "has no moments"
            yield (
                f"{_SECTION}.{name}={dtype}: the optimizer ({', '.join(rules)}) {held}. Remove "
                f"{_SECTION}.{name}, or set optim.kind=adamw."
            )


def _per_matrix_problems(optim: OptimConfig, precision: PrecisionConfig) -> Iterator[str]:
    rules = [name for name in list_per_matrix_rules(optim) if name in PER_MATRIX_RULES]
    if rules and precision.optimizer_states != OptimizerStatesConfig():
        yield (
            f"{_SECTION} with {', '.join(rules)}: states of rules for whole matrices are fp32. "
            f"Set optim.kind=adamw, or remove {_SECTION}."
        )
