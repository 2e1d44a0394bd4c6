"""The session that a plan was made in, from the plan alone."""

from __future__ import annotations

from planner.machine.cluster import ClusterSpec
from planner.models.references import check_code, reference_of
from planner.plan.document import Plan
from planner.session.planning import PlanningSession


def session_of(plan: Plan, cluster: ClusterSpec | str | None = None, allow_code: bool = False) -> PlanningSession:
    """Prepare the session that a plan was made in.

    Parameters
    ----------
    plan
        A plan as it was read.
    cluster
        The cluster where it is not known by name.
    allow_code
        As for :func:`planner.models.references.check_code`.

    Raises
    ------
    ValueError
        The model or the cluster cannot be loaded, or the model is code that nobody allowed.
    """
    options = plan.decision.options
    check_code(plan.decision.model.source, allow_code)
    return PlanningSession(
        reference_of(plan.decision.model),
        cluster or options.cluster,
        options.mesh,
        options.optimizer,
        grad_accum=options.grad_accum,
        fused=options.is_fused,
    )
