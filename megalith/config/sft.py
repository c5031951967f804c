"""Supervised fine-tuning on conversations: where they are, how they become text, and how rows are
filled."""

from dataclasses import dataclass
from datetime import date
from typing import Literal

Packing = Literal["best_fit", "greedy", "row"]
Overlong = Literal["error", "truncate", "drop"]
BUILT_IN_TEMPLATES = ("chatml", "llama3", "identity", "nemotron-h-aligned", "nemotron-nano-v2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig:
    """Conversations instead of running text; used when `path` or `mock_conversations` is set."""

    path: tuple[str, ...] = ()
    """Files, folders or globs of conversations: JSONL (also .gz and .zst) or Parquet, with the
    columns `messages`, `conversations` (ShareGPT), `instruction` and `output` (Alpaca), or
    `prompt` and `completion` (TRL)."""
    valid_path: tuple[str, ...] = ()
    """The same for the validation split; with `mock_conversations` there is one of its own."""
    mock_conversations: int | None = None
    """So many made-up conversations about sums instead of files; unset: none."""
    template: str | None = None
    """Chat template: chatml, llama3, identity (contents alone), nemotron-h-aligned,
    nemotron-nano-v2, or a Jinja file. Unset: the one that came with the tokenizer."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Which tokens are learned: what the assistant says and the end of its turn, or everything."""
    packing: Packing = "best_fit"
    """How conversations share rows. best_fit: each where it leaves the least room; greedy: one
    after the other until the next does not fit; row: the conversations of one line of the file
    have a row of their own."""
    packs: str | None = None
    """A file of `megalith data pack`, which says what conversations share rows. Unset: `packing`
    does."""
    overlong: Overlong = "error"
    """What becomes of a conversation that is longer than a row: refused, cut at its end, or left
    out; both are counted."""
    shuffle: Literal["epoch", "none"] = "epoch"
    """Shuffle again in every epoch, or keep the order of the files, as Megatron does."""
    date: str = "2024-07-26"
    """What templates that ask for today are told, so that a run's tokens never depend on the day
    (this one is the date that Llama 3.1's template has of its own)."""

    def used(self) -> bool:
        """Whether the run reads conversations."""
        return bool(self.path) or self.mock_conversations is not None


def sft_problems(sft: SFTConfig) -> list[str]:
    """Every rule that this config breaks, as texts. Touches no file."""
    problems = []
    if sft.path and sft.mock_conversations is not None:
        problems.append(
            f"data.sft.mock_conversations={sft.mock_conversations} with "
            f"data.sft.path={' '.join(sft.path)}: "
            f"use one of them."
        )
    if sft.mock_conversations is not None and sft.mock_conversations < 1:
        problems.append(
            f"data.sft.mock_conversations={sft.mock_conversations} must be 1 or more, or unset."
        )
    if sft.valid_path and not sft.path:
        problems.append(
            f"data.sft.valid_path={' '.join(sft.valid_path)} without data.sft.path: it is the "
            "validation split of one. "
            f"Set data.sft.path, or remove it."
        )
    if sft.packs is not None and sft.packing != SFTConfig().packing:
        problems.append(
            f"data.sft.packing={sft.packing} with data.sft.packs={sft.packs}: the file says which "
            "conversations share "
            f"rows. Remove one of them."
        )
    if not _is_date(sft.date):
        problems.append(f"data.sft.date={sft.date!r} must be a date like 2024-07-26.")
    return problems


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
