"""Update rules against other implementations: torch.optim, pytorch_optimizer, short references and
mathematical identities."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from megalith.config.optim import AdafactorConfig, MuonConfig, OptimConfig, SoapConfig
from megalith.optim.adafactor import Adafactor
from megalith.optim.muon import Muon, update_scale
from megalith.optim.newton_schulz import orthogonalize
from megalith.optim.rules import MatrixPiece, UpdateScalars
from megalith.optim.soap import Soap
from megalith.plan.shards import Shard
from megalith.testing.tolerance import EXACT, FP64, Tolerance, assert_equals
from megalith.train.trainer import build_optimizer
from tests.cases import loop_over
from tests.optim.matrix_rules import RectanglePieces, WholeMatrices, draw, step_torch

SHAPES = [(24, 16), (16, 24), (20, 20), (24, 16), (5, 40), (20, 20)]

ORACLE = Tolerance(
    "oracle",
    1e-6,
    "the same update in fp32, with the matmuls of a batch or of sums in another order",
)

CPU = torch.device("cpu")

MUON = MuonConfig(coefficients="simple", dtype="bf16")


def draw_gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return draw(SHAPES, 100 + step, dtype)


def build_parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(weight) for weight in draw(SHAPES, 3, dtype)]


# --- Muon


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no torch.optim.Muon")
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("scale", "factor", "adjustment"),
    [("spectral", 0.2, "match_rms_adamw"), ("shape", 1.0, "original")],
)
def test_muon_equals_torch_muon(
    scale: Literal["spectral", "shape"],
    factor: float,
    adjustment: str,
    nesterov: bool,
    batched: bool,
) -> None:
    parameters = build_parameters()
    lr = 1e-3 if batched else 2e-2  # one bf16 rounding of an update is at most 1e-6 of a weight
    oracle = torch.optim.Muon(
        parameters,
        lr=lr,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=nesterov,
        adjust_lr_fn=adjustment,
    )
    config = OptimConfig(muon=replace(MUON, scale=scale, factor=factor, nesterov=nesterov))
    ours = WholeMatrices(Muon(config), draw(SHAPES, 3, torch.float32), batched=batched)
    for step in range(8):
        step_torch(oracle, parameters, draw_gradients(step))
        ours.step(draw_gradients(step), lr=lr, weight_decay=0.1)
    for number, (weight, parameter) in enumerate(zip(ours.weights, parameters, strict=True)):
        assert_equals(f"w{number}", weight, parameter.detach(), ORACLE if batched else EXACT)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no torch.optim.Muon")
def test_muon_of_large_matrices_equals_torch_muon() -> None:
    shapes = [(520, 530), (520, 530), (530, 520), (300, 260), (260, 300)]
    parameters = [torch.nn.Parameter(weight) for weight in draw(shapes, 3, torch.float32)]
    oracle = torch.optim.Muon(parameters, lr=1e-2, adjust_lr_fn="match_rms_adamw", ns_steps=2)
    config = OptimConfig(muon=replace(MUON, ns_steps=2))
    ours = WholeMatrices(Muon(config), draw(shapes, 3, torch.float32), batched=True)
    step_torch(oracle, parameters, draw(shapes, 4, torch.float32))
    ours.step(draw(shapes, 4, torch.float32), lr=1e-2, weight_decay=0.1)
    for number, (weight, parameter) in enumerate(zip(ours.weights, parameters, strict=True)):
        assert_equals(f"w{number}", weight, parameter.detach(), EXACT)


def test_muon_multiplies_the_gradients_by_the_scale_before_the_momentum() -> None:
    scaled, plain = (
        WholeMatrices(Muon(OptimConfig()), draw(SHAPES, 3, torch.float64), batched=True)
        for _ in range(2)
    )
    for step in range(3):
        gradients = draw_gradients(step, torch.float64)
        scaled.step(gradients, lr=0.1, scale=torch.tensor(0.25 * (step + 1)))
        plain.step([g * 0.25 * (step + 1) for g in gradients], lr=0.1)
    for ours, reference in zip(scaled.weights, plain.weights, strict=True):
        assert torch.equal(ours, reference)


@loop_over("second_moment", ["normuon", "adamuon"])
def test_second_moments_equal_a_short_reference(
    second_moment: Literal["normuon", "adamuon"],
) -> None:
    muon = MuonConfig(second_moment=second_moment)
    rule = Muon(OptimConfig(muon=muon))
    ours = WholeMatrices(rule, draw(SHAPES, 3, torch.float64), batched=True)
    weights = draw(SHAPES, 3, torch.float64)
    momenta: list[Tensor] = [torch.zeros_like(w) for w in weights]
    squares: list[Tensor | float] = [0.0 for _ in weights]
    for step in range(6):
        gradients = draw_gradients(step, torch.float64)
        ours.step(gradients, lr=0.02, weight_decay=0.1)
        for i, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            rows, columns = w.shape
            momenta[i] = momenta[i] * 0.95 + g * 0.05
            o = orthogonalize((momenta[i] * 0.95 + g * 0.05)[None], rule.coefficients)[0]
            mean_of = {"normuon": 1 if rows >= columns else 0, "adamuon": ()}[second_moment]
            square = (o**2).mean(mean_of, keepdim=True) if mean_of != () else o**2
            squares[i] = 0.95 * squares[i] + 0.05 * square
            root = squares[i] ** 0.5 + (muon.eps if second_moment == "adamuon" else 0.0)
            d = o / root * (o.norm() / (o / root).norm())
            w.mul_(1 - 0.02 * 0.1).sub_(0.02 * 0.2 * max(rows, columns) ** 0.5 * d)
    for number, (weight, reference) in enumerate(zip(ours.weights, weights, strict=True)):
        assert_equals(f"w{number}", weight, reference, FP64)


def test_second_moments_of_a_zero_matrix_give_zero() -> None:
    for second_moment in ("normuon", "adamuon"):
        rule = Muon(OptimConfig(muon=MuonConfig(second_moment=second_moment)))  # type: ignore[arg-type]  # one of the two
        ours = WholeMatrices(rule, [torch.ones(3, 4)], batched=True)
        ours.step([torch.zeros(3, 4)], lr=0.1)
        assert torch.equal(ours.weights[0], torch.ones(3, 4))


def test_update_scales_of_a_matrix() -> None:
    scales = {
        name: [update_scale(MuonConfig(scale=name, factor=1.0), *s) for s in ((4, 16), (16, 4))]  # type: ignore[arg-type]  # one of the three
        for name in ("spectral", "unit_rms", "shape")
    }
    assert scales == {"spectral": [4.0, 4.0], "unit_rms": [0.5, 2.0], "shape": [1.0, 2.0]}


def test_spectral_scale_gives_the_update_rms_of_adamw() -> None:
    # 0.2 is the usual RMS of AdamW's updates (arXiv:2502.16982, section 2.2)
    config = OptimConfig(muon=MuonConfig(coefficients="polar_express", ns_steps=8))
    for shape in ((16, 48), (48, 16), (32, 32)):
        ours = WholeMatrices(Muon(config), [torch.zeros(shape)], batched=True)
        ours.step(draw([shape], 5, torch.float32), lr=1.0)
        assert ours.weights[0].square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-3)


def test_message_dtype_follows_the_parameters_unless_it_is_set() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    unset, bf16, fp32 = (
        [Muon(OptimConfig(muon=MuonConfig(dtype=name))).message_dtype(d) for d in dtypes]  # type: ignore[arg-type]  # one of the names
        for name in (None, "bf16", "fp32")
    )
    assert unset == [torch.float64, torch.float32, torch.bfloat16, torch.bfloat16]
    assert bf16 == [torch.float64, *[torch.bfloat16] * 3]
    assert fp32 == [torch.float64, *[torch.float32] * 3]


def test_rank_without_matrices_can_step() -> None:
    for rule in (Muon(OptimConfig()), Soap(OptimConfig())):
        scalars = UpdateScalars(0.1, 0.1, 2)
        assert rule.prepare([], [], scalars) == []
        rule.apply([], [], (3, 4), scalars)


# --- Adafactor


@loop_over("parts", [1, 3])
def test_adafactor_equals_torch_adafactor(parts: int) -> None:
    parameters = build_parameters()
    oracle = torch.optim.Adafactor(parameters, lr=5e-2, weight_decay=0.1, foreach=False)
    ours = RectanglePieces(Adafactor(OptimConfig()), draw(SHAPES, 3, torch.float32), parts=parts)
    for step in range(10):
        gradients = [g * (10.0 if step == 5 else 1.0) for g in draw_gradients(step)]
        step_torch(oracle, parameters, gradients)
        ours.step(gradients, lr=5e-2, weight_decay=0.1)
    for number, (weight, parameter) in enumerate(zip(ours.weights, parameters, strict=True)):
        assert_equals(f"w{number}", weight, parameter.detach(), ORACLE)


def test_adafactor_settings_equal_those_of_torch() -> None:
    config = AdafactorConfig(beta2_decay=-0.5, eps1=1e-3, eps2=0.5, d=2.0)
    parameters = build_parameters(torch.float64)
    oracle = torch.optim.Adafactor(
        parameters, lr=0.7, beta2_decay=-0.5, eps=(1e-3, 0.5), d=2.0, weight_decay=0.0
    )
    rule = Adafactor(OptimConfig(adafactor=config))
    ours = RectanglePieces(rule, draw(SHAPES, 3, torch.float64), parts=2)
    for step in range(6):
        gradients = draw_gradients(step, torch.float64)
        step_torch(oracle, parameters, [g * 0.01 for g in gradients])
        ours.step(gradients, lr=0.7, scale=torch.tensor(0.01, dtype=torch.float64))
    for number, (weight, parameter) in enumerate(zip(ours.weights, parameters, strict=True)):
        assert_equals(f"w{number}", weight, parameter.detach(), FP64)


def test_adafactor_counts_only_first_replicas_and_sums_over_ranks() -> None:
    weights, gradients = draw(SHAPES[:1], 3, torch.float64), draw(SHAPES[:1], 4, torch.float64)
    rule = Adafactor(OptimConfig())
    whole = RectanglePieces(rule, weights, parts=1)
    whole.step(gradients, lr=0.1)
    barrier, sums_of_ranks = threading.Barrier(2, timeout=60), [torch.zeros(0)] * 2

    def update_rank(rank: int) -> Tensor:
        """Update rows 10 to 24 and a copy of rows 0 to 10 (rank 0), or rows 0 to 10 (rank 1)."""

        def all_reduce(sums: Tensor) -> None:
            sums_of_ranks[rank] = sums.clone()
            barrier.wait()
            sums.copy_(sums_of_ranks[0] + sums_of_ranks[1])
            barrier.wait()

        weight, states = weights[0].clone(), {"row_mean": torch.zeros(24).double()}
        states["column_mean"] = torch.zeros(16).double()
        pieces = [
            MatrixPiece(0, start, 0, weight[start:stop], gradients[0][start:stop], counted, states)
            for start, stop, counted in (((10, 24, True), (0, 10, False)), ((0, 10, True),))[rank]
        ]
        rule.update_pieces(pieces, UpdateScalars(0.1, 0.0, 1), [(24, 16)], all_reduce, CPU)
        return weight

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(update_rank, range(2))
    assert_equals("rank 0", first, whole.weights[0], FP64)
    assert_equals("rank 1", second[:10], whole.weights[0][:10], FP64)


def test_adafactor_without_pieces_makes_the_same_sums() -> None:
    sizes: list[int] = []
    Adafactor(OptimConfig()).update_pieces(
        [],
        UpdateScalars(0.1, 0.0, 1),
        [(3, 4), (2, 5)],
        lambda sums: sizes.append(sums.numel()),
        CPU,
    )
    assert sizes == [3 + 4 + 2 + 5 + 2, 2]


# --- SOAP


def test_soap_equals_pytorch_optimizer() -> None:
    package = pytest.importorskip("pytorch_optimizer")
    parameters = build_parameters()
    oracle = package.SOAP(
        parameters,
        lr=1e-2,
        betas=(0.9, 0.95),
        shampoo_beta=0.8,
        weight_decay=0.1,
        precondition_frequency=3,
        max_precondition_dim=24,
    )
    soap = SoapConfig(
        beta1=0.9, shampoo_beta=0.8, precondition_frequency=3, max_precondition_dim=24
    )
    rule = Soap(OptimConfig(soap=soap))
    ours = WholeMatrices(rule, draw(SHAPES, 3, torch.float32), batched=True)
    for step in range(10):
        step_torch(oracle, parameters, draw_gradients(step))
        ours.step(draw_gradients(step), lr=1e-2, weight_decay=0.1)
    for number, (weight, parameter) in enumerate(zip(ours.weights, parameters, strict=True)):
        assert_equals(f"w{number}", weight, parameter.detach(), ORACLE)


def test_soap_with_identity_bases_equals_adam_after_its_first_update() -> None:
    soap = SoapConfig(beta1=0.9, beta2=0.99, eps=1e-30, max_precondition_dim=1)
    rule = Soap(OptimConfig(soap=soap))
    assert set(rule.matrix_state_shapes(3, 4)) == {"exp_avg", "exp_avg_sq"}
    ours = WholeMatrices(rule, draw(SHAPES, 3, torch.float64), batched=True)
    parameters = build_parameters(torch.float64)
    oracle = torch.optim.Adam(parameters, lr=1e-2, betas=(0.9, 0.99), eps=1e-30)
    for step in range(8):
        ours.step(draw_gradients(step, torch.float64), lr=1e-2)
        if step > 0:
            step_torch(oracle, parameters, draw_gradients(step, torch.float64))
    for number, (weight, parameter) in enumerate(zip(ours.weights, parameters, strict=True)):
        assert_equals(f"w{number}", weight, parameter.detach(), FP64)


@loop_over("kl", [False, True])
def test_soap_rotates_its_trajectory_with_the_problem(kl: bool) -> None:
    rule = Soap(OptimConfig(soap=SoapConfig(precondition_frequency=2, kl=kl)))
    shape = (6, 6)
    left, right = (torch.linalg.qr(draw([shape], seed, torch.float64)[0]).Q for seed in (1, 2))
    plain = WholeMatrices(rule, [torch.zeros(shape, dtype=torch.float64)], batched=True)
    rotated = WholeMatrices(rule, [torch.zeros(shape, dtype=torch.float64)], batched=True)
    for step in range(7):
        (gradient,) = draw([shape], 10 + step, torch.float64)
        plain.step([gradient], lr=0.1)
        rotated.step([left @ gradient @ right], lr=0.1)
    assert_equals("weights", rotated.weights[0], left @ plain.weights[0] @ right, FP64)


def test_kl_factors_are_weighted_by_the_inverse_of_the_other_factor() -> None:
    rule = Soap(OptimConfig(soap=SoapConfig(kl=True, shampoo_beta=0.5)))
    ours = WholeMatrices(rule, draw([(4, 4)], 3, torch.float64), batched=True)
    first, second = (draw([(4, 4)], seed, torch.float64)[0] for seed in (7, 8))
    ours.step([first], lr=0.1)
    left, right = 0.5 * first @ first.T, 0.5 * first.T @ first
    ours.step([second], lr=0.1)
    expected_left = 0.5 * left + 0.5 * second @ torch.linalg.inv(right) @ second.T / 4
    expected_right = 0.5 * right + 0.5 * second.T @ torch.linalg.inv(left) @ second / 4
    assert_equals("left", ours.states[0]["factor_left"][0], expected_left, FP64)
    assert_equals("right", ours.states[0]["factor_right"][0], expected_right, FP64)


def test_soap_changes_no_weight_in_its_first_update_and_accepts_zero_gradients() -> None:
    ours = WholeMatrices(Soap(OptimConfig()), [torch.ones(3, 4)], batched=True)
    ours.step([torch.zeros(3, 4)], lr=0.1, weight_decay=0.1)
    assert torch.equal(ours.weights[0], torch.ones(3, 4))
    ours.step([torch.zeros(3, 4)], lr=0.1)
    assert torch.equal(ours.weights[0], torch.ones(3, 4))
    ours.step([torch.ones(3, 4)], lr=0.1)
    assert bool(ours.weights[0].isfinite().all())


@loop_over("kl", [False, True])
def test_soap_continues_without_states(kl: bool) -> None:
    # as after a checkpoint without them, or first updates without gradients (an expert without
    # tokens): bases or factors are zero
    for num_zeros, factor in ((0, 1.0), (2, 1.0), (12, 1e3)):
        rule = Soap(OptimConfig(soap=SoapConfig(kl=kl, precondition_frequency=3)))
        ours = WholeMatrices(rule, [torch.zeros(6, 5)], batched=True)
        ours.updates = 7 if num_zeros == 0 else 0
        for _ in range(num_zeros):
            ours.step([torch.zeros(6, 5)], lr=0.1)
        before = 0.0
        for step in range(8):
            ours.step([factor * draw([(6, 5)], step, torch.float32)[0]], lr=0.1)
            weights = ours.weights[0]
            assert weights.isfinite().all() and weights.norm() != before
            before = float(weights.norm())
        assert all(state.isfinite().all() for state in ours.states[0].values())
        basis = ours.states[0]["basis_left"][0]
        assert torch.allclose(basis.T @ basis, torch.eye(6), atol=1e-5)
        assert weights.abs().max() < 5


# --- Lion


def test_lion_equals_pytorch_optimizer() -> None:
    package = pytest.importorskip("pytorch_optimizer")
    parameters = build_parameters()
    oracle = package.Lion(parameters, lr=1e-2, betas=(0.95, 0.98), weight_decay=0.1)
    ours = build_optimizer(
        [
            (Shard.full(f"w{i}", tuple(weight.shape)), weight)
            for i, weight in enumerate(draw(SHAPES, 3, torch.float32))
        ],
        OptimConfig(kind="lion"),
    )
    for step in range(8):
        step_torch(oracle, parameters, draw_gradients(step))
        ours.step(draw_gradients(step), lr=1e-2, weight_decay=0.1)
    for slot, parameter in zip(ours.slots, parameters, strict=True):
        assert_equals(slot.shard.name, slot.weight, parameter.detach(), ORACLE)
