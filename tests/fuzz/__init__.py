"""Random programs, run on CPU eager and on the device in lock-step.

    python -m tests.fuzz --minutes 10 --backend eager

A program is a list of lines over `torch`, `D` (the device), `cut()` and `read(tensor)`. What is found is minimised by
dropping lines while it still fails, and printed as a script that needs nothing of this package. `topics.py` has what
programs are made of; `tests/aliasing` has the lines about views and writes.
"""
