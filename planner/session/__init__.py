"""A training step on one mesh, prepared once and planned as often as wanted."""

from planner.session.formulations import PUBLISHED
from planner.session.planning import PlanningSession
from planner.session.reopening import session_of
from planner.session.request import PlanRequest

__all__ = ["PUBLISHED", "PlanRequest", "PlanningSession", "session_of"]
