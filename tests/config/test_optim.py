"""Optimizer settings: defaults and rules."""

from dataclasses import replace

import pytest

from megalith.config.fields import describe, literal_values, range_problems
from megalith.config.optim import LossScaleConfig, OptimConfig, PrecisionConfig, optim_problems

FP16 = PrecisionConfig(params="fp16")


def test_the_defaults_are_those_of_large_language_models() -> None:
    optim = OptimConfig()
    assert (optim.kind, optim.beta1, optim.beta2, optim.eps, optim.clip_grad) == (
        "adamw",
        0.9,
        0.95,
        1e-8,
        1.0,
    )
    assert optim.decoupled_weight_decay
    assert optim_problems(optim, PrecisionConfig()) == []


def test_params_has_four_dtypes() -> None:
    params = next(setting for setting in describe(PrecisionConfig) if setting.path == "params")
    assert literal_values(params.hint) == ["fp32", "bf16", "fp16", "fp64"]


@pytest.mark.parametrize(
    ("optim", "text"),
    [
        (
            OptimConfig(momentum=1.0),
            "optim.momentum=1.0 must be below 1. Use 0.9.",
        ),
        (
            OptimConfig(nesterov=True),
            "optim.nesterov=true needs optim.kind=sgd, but optim.kind=adamw. Set optim.kind=sgd, "
            "or remove optim.nesterov.",
        ),
        (
            OptimConfig(kind="sgd", momentum=0.0, nesterov=True),
            "optim.nesterov=true needs momentum, but optim.momentum=0.0. Set optim.momentum "
            "to 0.9, or remove optim.nesterov.",
        ),
    ],
)
def test_invalid_momentum_is_rejected(optim: OptimConfig, text: str) -> None:
    problems = range_problems(optim, "optim") + optim_problems(optim, PrecisionConfig())
    assert problems == [text]


@pytest.mark.parametrize(
    ("scale", "texts"),
    [
        ({"constant": 0.0}, ["constant=0.0 must be a finite number above 0. Use 1024.0."]),
        ({"initial": -1.0}, ["initial=-1.0 must be a finite number above 0. Use 4294967296.0."]),
        ({"min": float("nan")}, ["min=nan must be a finite number above 0. Use 1.0."]),
        (
            {"min": 8.0, "initial": 4.0},
            [
                "min=8 is above precision.loss_scale.initial=4, the initial scale. Set "
                "precision.loss_scale.min to 4 "
                "or less."
            ],
        ),
        (
            {"window": 0, "hysteresis": 0, "max_overflows": -1},
            [
                f"{name}={value} must be at least 1. Set precision.loss_scale.{name} to 1 or more."
                for name, value in (("window", 0), ("hysteresis", 0), ("max_overflows", -1))
            ],
        ),
    ],
)
def test_loss_scales_out_of_range_are_reported_together(
    scale: dict[str, float], texts: list[str]
) -> None:
    precision = replace(FP16, loss_scale=LossScaleConfig(**scale))  # type: ignore[arg-type]  # counts are whole
    problems = range_problems(precision, "precision") or optim_problems(OptimConfig(), precision)
    assert problems == [f"precision.loss_scale.{text}" for text in texts]


def test_loss_scale_needs_fp16() -> None:
    precision = PrecisionConfig(params="bf16", loss_scale=LossScaleConfig(constant=1024.0))
    assert optim_problems(OptimConfig(), precision) == [
        "precision.loss_scale.constant=1024 with precision.params=bf16, which uses no loss scale. "
        "Set precision.params=fp16, or remove precision.loss_scale.constant."
    ]


def test_nonfinite_grad_raise_is_rejected_with_fp16() -> None:
    assert optim_problems(OptimConfig(nonfinite_grad="raise"), FP16) == [
        "optim.nonfinite_grad=raise with precision.params=fp16: overflows are part of dynamic "
        "loss scaling and must not end the run. Set optim.nonfinite_grad=skip."
    ]
