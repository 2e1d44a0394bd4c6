"""The error of a request that cannot be explored."""


class ExploreError(ValueError):
    """A pin, a change or a grid that cannot be used; the message names the input and the remedy."""
