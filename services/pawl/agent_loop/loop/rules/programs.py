from __future__ import annotations

from typing import Final

from pawl.agent_loop.goals.program import GoalProgram
from pawl.agent_loop.loop.rules.agent_program import AgentProgram
from pawl.agent_loop.loop.rules.job_program import JobProgram
from pawl.agent_loop.loop.rules.program import Program
from pawl.agent_loop.loop.rules.run import Run
from pawl.agent_loop.undo.program import UndoProgram
from pawl.agent_loop.workflows.program import WorkflowProgram

_AGENT: Final = AgentProgram()
_JOB: Final = JobProgram()
_UNDO: Final = UndoProgram()
_GOAL: Final = GoalProgram()
_WORKFLOW: Final = WorkflowProgram()


def of(run: Run) -> Program:
    if run.workflow is not None:
        return _WORKFLOW
    if run.job is not None:
        return _JOB
    if run.goal is not None:
        return _GOAL
    return _AGENT if run.undo is None else _UNDO
