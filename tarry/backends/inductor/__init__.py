"""Inductor: the whole step compiled by torch's own compiler (`backend`), launched without Python where it can (`launch`)."""

from tarry.backends.inductor.backend import InductorBackend, why_not

__all__ = ["InductorBackend", "why_not"]
