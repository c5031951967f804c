"""Megatron's batches, steps, evaluation and checkpoints as our settings of the same."""

from megalith.config.data import parse_split
from megalith.errors import ConfigError
from megalith.megatron.draft import Draft

_SIZE = ("train.global_batch_size",)


def translate_steps(draft: Draft, dp: int | None) -> None:
    """Batches and steps. `dp`: data-parallel ranks of the job, where known."""
    draft.need("--seq-length", "the tokens per row")
    draft.need("--micro-batch-size", "the rows that one rank computes at once")
    for flag in (
        "--seq-length",
        "--micro-batch-size",
        "--log-interval",
        "--exit-duration-in-mins",
        "--seed",
    ):
        draft.copy(flag)
    _global_batch(draft, dp)
    _length(draft)
    _evaluation(draft)


def global_batch(draft: Draft) -> int:
    """Rows per step; 1 where that is a problem already."""
    size = draft.settings.get("train.global_batch_size")
    return size if isinstance(size, int) and size > 0 else 1


def total_steps(draft: Draft) -> int:
    """Steps of the run; 1 where that is a problem already."""
    steps = draft.settings.get("train.steps")
    return steps if isinstance(steps, int) and steps > 0 else 1


def _global_batch(draft: Draft, dp: int | None) -> None:
    flag, setting, size = (
        "--global-batch-size",
        "train.global_batch_size",
        draft.number("--micro-batch-size"),
    )
    if draft.arguments.value(flag) is not None:
        draft.copy(flag)
    elif dp is not None:
        text = f"--micro-batch-size {size} · {dp} data-parallel ranks"
        draft.put(flag, setting, size * dp, text, of=("--micro-batch-size",))
    else:
        draft.problems.append(
            f"{flag} is missing: Megatron takes --micro-batch-size times the data-parallel ranks, "
            "and how many "
            f"those are is not known. Pass {flag}, or --world with the number of ranks that the "
            "job runs on."
        )


def _length(draft: Draft) -> None:
    steps, samples = (
        draft.arguments.value("--train-iters"),
        draft.arguments.value("--train-samples"),
    )
    if (steps is None) == (samples is None):
        draft.problems.append(_length_problem(draft))
    if steps is not None:
        draft.copy("--train-iters")
    elif samples is not None:
        size = global_batch(draft)
        draft.put("--train-samples", "train.steps", samples // size, f"/ {size} per step", of=_SIZE)
        if samples % size and draft.sure(_SIZE[0]):
            draft.put(
                "--train-samples",
                "data.num_train_samples",
                samples,
                "so that the order is Megatron's",
            )


def _length_problem(draft: Draft) -> str:
    """Both lengths of a run, or neither, as they were typed."""
    flags = ("--train-iters", "--train-samples")
    typed = [draft.arguments.typed(flag) for flag in flags if draft.arguments.given(flag)]
    given = " and ".join(typed) or f"{' and '.join(flags)} are missing"
    return f"{given}: expected exactly one of them. Set the one you mean."


def _evaluation(draft: Draft) -> None:
    every, steps = draft.arguments.value("--eval-interval"), draft.arguments.value("--eval-iters")
    if not _has_validation(draft):
        draft.put("--eval-iters", "train.eval_steps", 0)
        if draft.arguments.given("--eval-iters") or draft.arguments.given("--eval-interval"):
            draft.say(
                "explained",
                "--eval-iters",
                "there is no validation data, so that nothing is evaluated",
            )
        return
    draft.put("--eval-iters", "train.eval_steps", steps)
    if every is not None and every > 0 and steps > 0:
        draft.put("--eval-interval", "train.eval_every", every)
    elif steps > 0:
        text = "evaluated after the last step only; Megatron before 0.19 assumes 1000"
        draft.say("explained", "--eval-interval", text)


def _has_validation(draft: Draft) -> bool:
    arguments, split = draft.arguments, draft.settings.get("data.split")
    if arguments.value("--sft"):
        return bool(arguments.given("--valid-data-path") or arguments.value("--mock-data"))
    if any(
        arguments.given(flag)
        for flag in ("--train-data-path", "--valid-data-path", "--test-data-path")
    ):
        return arguments.given("--valid-data-path")
    try:
        return split is None or parse_split(split)[1] is not None
    except ConfigError:  # reported with the rules of the run
        return True


def translate_folders(draft: Draft) -> None:
    """Checkpoints and what is written beside them."""
    arguments = draft.arguments
    save, load, every = (
        arguments.value("--save"),
        arguments.value("--load"),
        arguments.value("--save-interval"),
    )
    if save is None:
        draft.put(
            "--save-interval",
            "checkpoint.every",
            0,
            "nothing to save to: only the last step is kept",
        )
    elif every is None:
        draft.need("--save-interval", "the steps between two saves")
    else:
        draft.put("--save-interval", "checkpoint.every", every)
        draft.say(
            "explained",
            "--save",
            "checkpoints lie in the run's folder: choose it with megalith train --run",
        )
    if arguments.value("--no-save-optim"):
        draft.put("--no-save-optim", "checkpoint.save_optimizer", False)
    if load is not None and load == save:
        draft.say("already", "--load", "the same command resumes a run from its own folder")
    elif load is not None:
        text = (
            "Megatron's checkpoint folders are not read yet, and the run would start from fresh "
            "weights. Convert the "
            "model to Hugging Face and set checkpoint.load to that folder, or remove it"
        )
        draft.say("not mapped", "--load", text, "model")
    _retention(draft)
    if arguments.value("--tensorboard-dir") is not None:
        draft.put(
            "--tensorboard-dir",
            "observe.tensorboard",
            True,
            "in the run's folder, under tensorboard/",
        )


def _retention(draft: Draft) -> None:
    retain, newest = (
        draft.arguments.value("--save-retain-interval"),
        draft.arguments.value("--most-recent-k"),
    )
    if retain is not None:
        draft.put("--save-retain-interval", "checkpoint.keep_every", retain)
        draft.put(
            "--save-retain-interval",
            "checkpoint.keep",
            1,
            "the newest stays until the next is there",
        )
    elif newest is not None and newest > 0:
        draft.put("--most-recent-k", "checkpoint.keep", newest)
    else:
        draft.put("--most-recent-k", "checkpoint.keep", None, "Megatron keeps every checkpoint")
