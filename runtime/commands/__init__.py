"""The command ``meshwright``."""
