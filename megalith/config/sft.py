"""Supervised fine-tuning data: conversations, chat template, loss mask and packing."""

from dataclasses import dataclass
from datetime import date
from typing import Literal

Packing = Literal["best_fit", "greedy", "row"]
Overlong = Literal["error", "truncate", "drop"]
BUILT_IN_TEMPLATES = ("chatml", "llama3", "identity", "nemotron-h-aligned", "nemotron-nano-v2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig:
    """Conversations for supervised fine-tuning; used if `path` or `mock_conversations` is set."""

    path: tuple[str, ...] = ()
    """Conversation files, folders or globs: JSONL (also .gz and .zst) or Parquet, with the
    columns `messages`, `conversations` (ShareGPT), `instruction` and `output` (Alpaca), or
    `prompt` and `completion` (TRL)."""
    valid_path: tuple[str, ...] = ()
    """Conversation files of the validation split, as `path`. Mock conversations have their own
    validation split."""
    mock_conversations: int | None = None
    """Number of generated conversations about sums, used instead of files. Unset: none."""
    template: str | None = None
    """Chat template: chatml, llama3, identity (contents only), nemotron-h-aligned,
    nemotron-nano-v2, or a Jinja file. Unset: the tokenizer's template."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Loss mask. assistant: train on the assistant's messages and their end-of-turn tokens; all:
    train on all tokens."""
    packing: Packing = "best_fit"
    """Sequence packing of conversations into rows. best_fit: put each where it leaves the least
    space; greedy: fill a row until the next conversation does not fit; row: the conversations
    of each input line form a row."""
    packs: str | None = None
    """File of `megalith data pack` that assigns conversations to rows. Unset: rows are packed by
    `packing`."""
    overlong: Overlong = "error"
    """Treatment of conversations longer than a row. error: raise an error; truncate: cut at the
    end; drop: skip. Truncated and dropped conversations are counted."""
    shuffle: Literal["epoch", "none"] = "epoch"
    """Order of conversations. epoch: reshuffle in every epoch; none: the order of the files, as
    in Megatron."""
    date: str = "2024-07-26"
    """Date passed to chat templates that use the current date, so that tokens do not depend on
    the day (the default is that of Llama 3.1's template)."""

    def used(self) -> bool:
        """Return whether the run reads conversations."""
        return bool(self.path) or self.mock_conversations is not None


def sft_problems(sft: SFTConfig) -> list[str]:
    """Return the violated rules as error messages. Accesses no file."""
    problems = []
    if sft.path and sft.mock_conversations is not None:
        problems.append(
            f"data.sft.mock_conversations={sft.mock_conversations} with "
            f"data.sft.path={' '.join(sft.path)}: "
            f"set only one of them."
        )
    if sft.mock_conversations is not None and sft.mock_conversations < 1:
        problems.append(
            f"data.sft.mock_conversations={sft.mock_conversations} must be 1 or more, or unset."
        )
    if sft.valid_path and not sft.path:
        problems.append(
            f"data.sft.valid_path={' '.join(sft.valid_path)} needs data.sft.path, the training "
            "split. Set data.sft.path, or remove data.sft.valid_path."
        )
    if sft.packs is not None and sft.packing != SFTConfig().packing:
        problems.append(
            f"data.sft.packing={sft.packing} with data.sft.packs={sft.packs}: the file already "
            "assigns conversations to rows. Remove one of them."
        )
    if not _is_date(sft.date):
        problems.append(f"data.sft.date={sft.date!r} must be an ISO date such as 2024-07-26.")
    return problems


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
