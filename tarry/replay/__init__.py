"""Replaying a step function without running its Python: `tarry.compile`.

A call is recorded as always at first, and watched (`proof.py`). When two calls in a row have done the same, later ones
are replayed: the recorded graph runs again with the data of the moment (`csrc/replay.h`), as long as the arguments and
all that the function can name are as they were (`environment.py`, `csrc/guard.h`). Otherwise the call is recorded.
"""
