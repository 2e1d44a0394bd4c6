"""The root module in texts: identities of its operators begin with no name."""

from __future__ import annotations

import re

ROOT = "(root)"
_WITHOUT_NAME = re.compile(r"(?<![^\s'\"(\[])/(?=(?:forward|backward)/)")


def shown(text: str) -> str:
    """A text, or an identity, in which operators of the root module begin with ``(root)``."""
    return _WITHOUT_NAME.sub(f"{ROOT}/", text)


def identity(name: str) -> str:
    """The identity, or module path, of a name that a user took from such a text."""
    return name.removeprefix(ROOT) if name == ROOT or name.startswith(f"{ROOT}/") else name
