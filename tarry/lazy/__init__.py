"""Lazy mode on a real device: a program that names "cuda" or "cpu" is recorded as if it had named "tarry".

`devices.py` says which device takes the place of which and whose calls are left alone; `table.py` is the one table of
what is replaced in torch, made of the functions in `functions.py` and `host.py`; `mode.py` puts it into force and takes
it back. Nothing is added to an operator: only what takes the name of a device, or makes a tensor without one, is
replaced. (A TorchFunctionMode would see every operator, and costs more than recording it does: docs/run.md.)
"""
