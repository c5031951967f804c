"""Execution of planned steps; if one fails, its rows are executed one by one, so that only the rows
that cause the error fail."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from megalith.infer.requests import (
    RequestChoice,
)
from megalith.infer.runner import NO_PROMPT_OUTPUTS, ModelRunner, PromptOutputs, StepLogits
from megalith.plan.serving.scheduler import (
    BlockCopy,
    PlannedRow,
    Scheduler,
    SequenceState,
    StepPlan,
)

logger = logging.getLogger(__name__)


class RowFailure(NamedTuple):
    """A row whose request fails, with the error."""

    row: PlannedRow
    error: BaseException


class StepExecutor:
    """Executes the steps of an engine."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, choices: Mapping[int, RequestChoice]
    ) -> None:
        """`choices`: of the unfinished requests, by sequence."""
        self._runner, self._scheduler, self._choices = runner, scheduler, choices

    def execute(
        self, plan: StepPlan, needs: PromptOutputs
    ) -> tuple[StepLogits | None, list[RowFailure]]:
        """Execute a plan; if it fails, execute its rows one by one, so that only the rows that
        cause the error fail. Pipeline stages before the last one return no logits."""
        states = {row.seq_id: self._choices[row.seq_id].state for row in plan.rows}
        try:
            return self._runner.execute(plan, states, needs), []
        except Exception:
            if self._runner.is_distributed:
                # The ranks would not execute the same collectives, so nothing is tried again.
                self._scheduler.discard(plan)
                raise
            logger.warning("a step of %d rows failed; executing them one by one", len(plan.rows))
            return self._execute_rows(plan, states)
        except BaseException:
            self._scheduler.discard(plan)
            raise

    def transfer_blocks(self, plan: StepPlan) -> StepPlan:
        """Execute the copies of a plan to and from host memory; returns the plan without the rows
        whose blocks could not be loaded."""
        try:
            failed = self._runner.transfer_blocks(plan)
        except BaseException:
            self._scheduler.discard(plan)
            raise
        return self._scheduler.fail_loads(plan, failed) if failed else plan

    def find_prompt_outputs(self, plan: StepPlan) -> PromptOutputs:
        """Return the sequences whose prompt log-probs are requested and not complete, and those
        whose hidden states are pooled."""
        logits, hidden = [], []
        for row in plan.rows:
            request = self._choices[row.seq_id].request
            recorded = request.output.prompt_logprobs
            if recorded is not None and len(recorded) < len(request.output.prompt_token_ids) - 1:
                logits.append(row.seq_id)
            if request.pooler is not None:
                hidden.append(row.seq_id)
        return PromptOutputs(frozenset(logits), frozenset(hidden))

    def _execute_rows(
        self, plan: StepPlan, states: dict[int, SequenceState]
    ) -> tuple[StepLogits | None, list[RowFailure]]:
        """Execute the rows of a plan one by one without drafts, and long rows that fail in two
        parts, which need less memory."""
        copies = plan.copies
        parts: list[StepLogits] = []
        failures: list[RowFailure] = []
        try:
            for planned in plan.rows:
                row = replace(planned, count=planned.count - len(planned.draft_ids), draft_ids=())
                try:
                    parts.append(self._execute_row(row, copies, states))
                except Exception as error:  # reported to the request
                    failures.append(RowFailure(row, error))
                copies = ()  # again, they would overwrite what the row has stored
        except BaseException:
            self._scheduler.discard(plan)
            raise
        if not parts:
            return None, failures
        rows = tuple(row for part in parts for row in part.rows)
        next_token = torch.cat([part.next_token for part in parts])
        prompt = {number: rows for part in parts for number, rows in part.prompt.items()}
        hidden = {number: rows for part in parts for number, rows in part.prompt_hidden.items()}
        return StepLogits(rows, next_token, prompt, hidden), failures

    def _execute_row(
        self, row: PlannedRow, copies: tuple[BlockCopy, ...], states: dict[int, SequenceState]
    ) -> StepLogits:
        plan = StepPlan((row,), copies, ())
        needs = self.find_prompt_outputs(plan)
        try:
            return self._execute_alone(plan, states, needs)
        except Exception:
            if row.count == 1 or any(needs):
                raise
        half = row.count // 2
        first = replace(row, count=half, samples=False)
        rest = replace(row, start=row.start + half, count=row.count - half)
        self._execute_alone(StepPlan((first,), copies, ()), states)
        return self._execute_alone(StepPlan((rest,), (), ()), states)

    def _execute_alone(
        self,
        plan: StepPlan,
        states: dict[int, SequenceState],
        needs: PromptOutputs = NO_PROMPT_OUTPUTS,
    ) -> StepLogits:
        logits = self._runner.execute(plan, states, needs)
        assert logits is not None, "rows are not executed again by several stages"
        return logits
