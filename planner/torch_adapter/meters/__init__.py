"""Meters of live tensor storages."""
