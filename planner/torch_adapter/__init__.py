"""The only folder that touches private torch APIs; everything else goes through it."""
