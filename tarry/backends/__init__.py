"""Backends: what turns a recorded graph into results. `base` is the contract, `registry` finds them by name."""
