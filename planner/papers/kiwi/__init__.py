"""KIWI's models and experiments."""
