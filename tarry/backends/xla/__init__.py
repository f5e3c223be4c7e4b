"""XLA through JAX: a step becomes one jitted JAX program. An extra: `pip install 'tarry[xla]'`.

    backend.py         the backend: which operators and numbers it takes, on which device it runs
    program.py         a graph to a compiled program, and its runs
    data.py            tensors to JAX arrays and back, by DLPack
    table.py           what a lowering is; the tables below register theirs there
    pointwise.py, reductions.py, shapes.py, indexing.py, linear.py, networks.py, attention.py
                       the lowerings, by kind
    draws.py           random operators, drawn by ATen outside the program so that seeds give eager's numbers
    decompositions.py  operators that are made of others

Only `backend.py` is imported before the backend is made, so that a machine without JAX gets an error that says what to
install.

Results differ from eager's by rounding: XLA fuses multiplications with additions, and divides by a scalar by
multiplying with its reciprocal. It takes denormal numbers for zero. It uses all cores, whatever
`torch.set_num_threads` says.
"""

from __future__ import annotations

from tarry.backends.xla.backend import XlaBackend

__all__ = ["XlaBackend"]
