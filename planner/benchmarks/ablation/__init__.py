"""What each technique and tunable of the engine is worth: ``meshwright bench ablate``."""

from planner.benchmarks.ablation.results import AblationResult, Summary, load_verdicts
from planner.benchmarks.ablation.run import AblationRun, ablate
from planner.benchmarks.ablation.variants import AblationError, Variant, all_variants, selected, together, verdicts_of
from planner.benchmarks.ablation.worker import Instances

__all__ = [
    "AblationError",
    "AblationResult",
    "AblationRun",
    "Instances",
    "Summary",
    "Variant",
    "ablate",
    "all_variants",
    "load_verdicts",
    "selected",
    "together",
    "verdicts_of",
]
