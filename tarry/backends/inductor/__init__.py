"""Inductor: the whole step compiled by torch's own compiler, and launched without Python where that can be done."""

from tarry.backends.inductor.backend import InductorBackend, why_not

__all__ = ["InductorBackend", "why_not"]
