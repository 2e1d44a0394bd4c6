"""The checker of schedules: an exact replay of every instruction."""
