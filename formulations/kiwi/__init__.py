"""KIWI: the published full and reduced problems, and staged programs that can be proven."""
