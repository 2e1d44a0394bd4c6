"""Tunables of memory prices: one table per member, after those that members share."""

from __future__ import annotations

# ascent.py and whatever climbs

FIRST_PAIRS = 5
"""Pairs of sweeps before the first price step."""

PAIRS = 2
"""Pairs of sweeps of a price step, or before an assignment is decoded at other prices."""

SHORT_ASCENT = 40
"""Price steps where prices are one method of several, or nothing is limited, at most."""

PATIENCE = 4
"""Steps without a notable gain after which a method ends."""

NEGLIGIBLE = 1e-6
"""Part of a bound that is not worth a step."""

ROWS = 200
"""Blocks of rows, of each of which the fullest may get a price, and rows that take part in a step, at most."""

ASCENT_NEAR_LIMIT = 0.97
"""Part of the limit from which on the expected usage makes a row a candidate."""

WARM_TEMPERATURE = 0.5
"""First temperature, in units of the typical distance between strategies."""

COLD_TEMPERATURE = 0.003
"""Last temperature, in the same unit."""

COOLING_SHARE = 0.85
"""Part of the time for an ascent in which its response cools."""

EXTRAPOLATED_STEPS = 5
"""Steps between line searches along what prices and messages have moved."""

# bundle.py

BUNDLE_CUTS = 40
"""Cuts that are kept."""

BUNDLE_SERIOUS_SHARE = 0.1
"""Not tunable: part of the expected gain that a step must reach to move the centre; any below 1 converges."""

# lagrangian.py

ASCENT_SHARE = 0.3
"""Part of the time after which the ascent of phase 1 ends."""

TIGHTEN_SHARE = 0.4
"""Part of the time after which the bundle method ends."""

WALK_SHARE = 0.9
"""Part of the time after which phase 2 ends."""

START_FACTORS = (1.6, 0.5, 1.3, 1.0)
"""Factors of the best prices at which assignments are decoded first; phase 2 of prices goes on from the last one."""

LAST_SHARE = 0.95
"""Part of the time after which a method begins no further round."""

BUNDLE_ENTRIES = 1 << 24
"""Table entries that one minimisation of the bundle method may fill."""

STEPS_BETWEEN_CHECKS = 10
"""Not tunable: price steps, or rounds of phase 3, between looks at the gap."""

WALKED_FACTORS = (1.0, 1.2)
"""Not tunable: factors of the best prices between which phase 2 draws; a little above them assignments fit."""

WALKED_ROUNDS = 20
"""Not tunable: rounds of phase 2 before one begins with what decimation decodes; 10 and 40 were no better."""

RAISED_MASS = 0.02
"""Price times limit that one rise of prices adds, as a part of the whole."""

PROOF_SPACING = 1.5
"""Seconds, or steps, before the first exact bound whatever the gap, and those before one over those before the last."""

# bounding.py

LARGE_ENTRIES = 4_000_000
"""Entries of all tables, or columns of a deep model, from which on a pair of sweeps takes 0.1 s, the slow exact bound
many seconds, and the memory of two processes is too much."""

WIDE_TABLE = 2_500
"""Entries of a table on average from which on such a problem is wide, and assignments are not looked for."""

BOUND_SPACING_ALONE = 8.0
"""The same in steps where no other process waits for bounds."""

# dual_bound.py

NEGLIGIBLE_OF_LARGE = 3e-5
"""Part of the price of all limits that rounding may take from a quick bound of large tables, elsewhere a negligible."""

# decimation.py

DECIMATION_BATCHES = 40
"""Not tunable: batches of nodes, each decided after a few sweeps; 20 found less on contest instance N."""
