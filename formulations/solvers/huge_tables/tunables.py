"""Tunables of the methods for very large tables: one table per member."""

from __future__ import annotations

# hub_branching.py

HUB_FACTORS_SHARE = 0.02
"""Part of all factors that hubs must touch, or deciding them changes nothing."""

ROOT_SHARE = 0.4
"""Part of the time for the root."""

DECODING_SHARE = 0.2
"""Part of the time for decoding branches, at most."""

DECODING_BESIDE = 0.05
"""Not tunable: the same where others look for assignments meanwhile."""

SETTLING_SHARE = 0.2
"""Not tunable: part of the time for what is small in branches, at most."""

TRIED_HUBS = 3
"""Hubs that are tried before one is branched on, but where tables are very large."""

BRANCHES = 4
"""Groups into which the strategies of a hub are split."""

BRANCH_STEPS = 5
"""Not tunable: price steps of a branch, so many that one line search is among them."""

SETTLED_ENTRIES = 20_000
"""Table entries up to which what is left of a branch is solved by linear relaxations."""

SETTLED_SECONDS = 0.5
"""Not tunable: seconds of one such part, at most; most are solved in 0.2 s."""

# price_and_branch.py

MOST_CORE_COLUMNS = 400_000
"""Columns of the linear model of the core up to which it is searched."""

CORE_COLUMNS_A_SECOND = 20_000
"""The same where one second is left; the root as many in so many. Beyond, branches at prices prove more."""

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
