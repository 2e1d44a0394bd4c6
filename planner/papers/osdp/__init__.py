"""OSDP on real models."""
