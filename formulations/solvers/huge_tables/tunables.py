"""Tunables of the methods for very large tables: one table per member."""

from __future__ import annotations

# annealing.py

ANNEALING_FIRST_SHARE = 0.1
"""Part of the time for the first hot cycle."""

ANNEALING_START_SHARE = 0.25
"""Part of the time for prices."""

HOTTEST = 1.0
"""Temperature of the hottest level, in units of the typical distance of strategies."""

LEVELS = 12
"""Levels at which a cycle may begin."""

COOLING_OF_A_LEVEL = 0.6
"""Temperature of a level over that of the level before."""

COLDEST = 3e-4
"""Last temperature of a cycle, in the same unit."""

TEMPERATURES = 24
"""Temperatures of a cycle."""

PRICED_TEMPERATURES = 16
"""First temperatures, at which memory has its price."""

DRAWS_OF_A_NODE = 12
"""Draws of each node at a temperature."""

MOVES_OF_A_HUB = 10
"""Moves of each hub in a cycle."""

MOVED_HUBS = 30
"""Hubs that count for the number of moves, at most."""

LENGTHS = (1, 1, 1, 3)
"""Factors of the draws, one of which a cycle takes at random."""

RESUMING = 0.3
"""Probability that a cycle begins where the last one ended."""

PRICED_SHARE = 0.5
"""Probability that memory has a price in a cycle."""

SMALLEST_TREE = 5
"""Nodes of a random tree, at least."""

LARGEST_TREE = 300
"""Nodes of a random tree, at most."""

LEVEL_CURIOSITY = 0.35
"""Probability that a level is drawn from all."""

CLOSE = 5e-3
"""Relative gap from which on exact parts and prices find more."""

# hub_branching.py

HUB_FACTORS_SHARE = 0.02
"""Part of all factors that hubs must touch, or deciding them changes nothing."""

ROOT_SHARE = 0.4
"""Part of the time for the root."""

DECODING_SHARE = 0.4
"""Part of the time for decoding branches, at most."""

WIDE_DECODING_SHARE = 0.05
"""The same where tables are very large."""

TRIED_HUBS = 3
"""Hubs that are tried before one is branched on, but where tables are very large."""

BRANCHES = 4
"""Groups into which the strategies of a hub are split."""

BRANCH_STEPS = 4
"""Not tunable: price steps of a branch; two to six do as well."""

# price_and_branch.py

MOST_CORE_COLUMNS = 400_000
"""Columns of the linear model of the core up to which it is searched."""

CORE_COLUMNS_A_SECOND = 20_000
"""The same for every second that is left: the relaxation of a larger core takes too much of the time."""

CLOSED_BY_CUTS = 1e-4
"""Relative gap up to which branch and cut comes before branch and bound on a core."""

CORE_FIRST_SHARE = 0.3
"""Part of the time after which the core is looked at."""

CORE_SECOND_SHARE = 0.6
"""The same for the second look: a better incumbent makes the core smaller."""

CORE_WIDE_SHARES = (0.45, 0.6, 1.0)
"""The same for later looks where tables are very large."""

NARROWED = 0.1
"""Part of the gap that prices must close between looks, or hubs are branched on."""

BRANCHED_ENTRIES = 30_000_000
"""Table entries up to which they are: three branches at work hold up to six copies, 1.5 GB."""

CORE_ENTRIES_A_COLUMN = 10
"""Table entries after fixing, for each column that a core may have, up to which presolve makes one of them."""

# guessed_cores.py

GUESS_FIRST_SHARE = 0.4
"""Part of the time for prices before the first guess."""

# decimation.py

DECIMATION_BATCHES = 25
"""Batches of nodes, each decided after a pair of sweeps."""
