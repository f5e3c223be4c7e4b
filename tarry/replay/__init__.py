"""Replaying a step function without running its Python: `tarry.compile`.

A call is recorded as always at first, and watched (`watch.py`). When two calls in a row have done the same, later ones
are replayed: the recorded graph runs again with the data of the moment (`csrc/replay/replay.h`), as long as the
arguments and what the function's code names are as they were (`guards.py`, `csrc/bind/guard.h`). Guards cannot see
everything, so some calls that could be replayed are recorded instead (`verification.py`) and compared with the replay
(`comparison.py`).
"""
