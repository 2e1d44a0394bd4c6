"""Tunables of memory prices: one table per member."""

from __future__ import annotations

# ascent.py

ASCENT_ROWS = 200
"""Rows with a price, and rows without one, that take part in a step, at most."""

ASCENT_NEAR_LIMIT = 0.97
"""Part of the limit from which on the expected usage makes a row a candidate."""

ASCENT_FAR_STEPS = 30
"""First steps, which make five Newton iterations each; later ones make three."""

WARM_TEMPERATURE = 0.5
"""First temperature, in units of the typical distance between strategies."""

COLD_TEMPERATURE = 0.003
"""Last temperature, in the same unit."""

# bundle.py

BUNDLE_CUTS = 40
"""Cuts that are kept."""

BUNDLE_SERIOUS_SHARE = 0.1
"""Part of the expected gain that a step must reach to move the centre."""

BUNDLE_CONVERGED = 1e-6
"""Expected gain, as a part of the bound, below which a step counts as idle."""

BUNDLE_PATIENCE = 4
"""Idle steps in a row after which the bundle ends."""

# lagrangian.py

ASCENT_SHARE = 0.45
"""Part of the time after which the ascent of phase 1 ends."""

TIGHTEN_SHARE = 0.6
"""Part of the time after which the bundle method ends."""

STEER_SHARE = 0.75
"""Part of the time after which phase 2 ends."""

BUNDLE_ENTRIES = 1 << 24
"""Table entries that one minimisation of the bundle method may fill."""

STEPS_BETWEEN_CHECKS = 10
"""Price steps, or rounds of phase 3, between looks at the gap."""

STALL_WITHOUT_LIMITS = 40
"""Steps without a gain after which the ascent ends where nothing is limited."""

FORCED_STEPS = 2000
"""Moves of a search for anything feasible."""

STEERED_MASS = 0.02
"""Price times limit that one steering step adds, as a part of the whole."""

FIRST_PROOF_SECONDS = 2.0
"""Seconds before the first exact bound, whatever the gap."""

PROOF_SPACING = 1.5
"""Time of an exact bound over that of the one before."""

# bounding.py

WIDE_ENTRIES = 8_000_000
"""Entries of all tables from which on a problem may be wide: a sweep takes 0.1 s."""

WIDE_TABLE = 2_500
"""Entries of a table on average from which on such a problem is wide."""

WIDE_FIRST_SWEEPS = 5
"""Pairs of sweeps before the first price step."""

WIDE_COOLING_SHARE = 0.85
"""Part of the time in which the response cools."""

WIDE_PAIRS = 2
"""Pairs of sweeps of a price step."""

WIDE_PAIRS_WHEN_COLD = 4
"""The same once prices have settled: then messages have most to gain."""

WIDE_FIRST_PROOF = 4
"""Steps before the first exact bound."""

WIDE_PROOF_GROWTH = 1.4
"""Steps before an exact bound over those before the last."""

WIDE_FEW_PROOFS = 8, 8.0
"""Both where no other process waits for bounds."""

# dual_bound.py

NOTABLE_LOSS = 1e-6
"""Part of the price of all limits that rounding may take from a quick bound."""

NOTABLE_LOSS_OF_LARGE = 3e-5
"""The same where the slow bound would take many seconds."""

LARGE_TABLES = 4_000_000
"""Table entries from which on it would."""

# greedy.py

GREEDY_ROUNDS = 12
"""Levels of prices."""

GREEDY_FORCED_STEPS = 3000
"""Moves of a search for anything feasible."""

# steering.py

BLOCKS_OF_ROWS = 300
"""Blocks of rows, of each of which the fullest row may get a price."""

FULL_STEP_EXCESS = 0.1
"""Excess, as a part of the limit, from which on a price rises by a full share."""
