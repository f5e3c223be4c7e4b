"""Every limit and threshold of the runtime, each with its reason. Read as `limits.NAME`, so that tests can change them.

What a user may want to change is in `tarry.config` instead (`max_cached_programs`, `max_stored_bytes`, ...).
"""

from __future__ import annotations

# ---- how much is compiled

SMALL_OPERATIONS = 8
"""Operators of a graph that is computed by the reference path for good, unless the policy is to wait for programs. A
program would save a microsecond of each at most, and takes seconds of a core to make. Code that reads often - hooks,
masks, loops that look at each action - is made of such graphs."""

SMALL_BYTES = 1 << 17
"""What the results of its operators may take. With more, the time goes into memory, where a program helps."""

ALL = 1 << 62
"""More operators and bytes than any graph has."""

DIRECT_AFTER = 4
"""Stretches that the reference path computes one after the other before calls become direct (csrc/record/direct.h), and
twice as many after each time that other operators came. Each such time, a graph is seen one step later than it could
be: so few that a short program gains, and doubled so that a rare graph is seen at all."""

DIRECT_UNTIL = 4096
"""Stretches after which direct calls end for DIRECT_AFTER of them, to see whether a program is worth its making now."""

MAX_VARIANTS = 8
"""Programs of one graph that differ in the numbers that are constants to them. After that many the reference path runs
other numbers: compiling costs more than it saves."""

MAX_SEEN_CONSTANTS = 64
"""Sets of such constants of which a graph remembers that they have come. One that changes at every step (a step count)
must not grow a table."""

MAX_FIXED_SIZES = 8
"""Programs for fixed sizes of one family. After that many the reference path runs other sizes."""

MAX_LENGTHS = 8
"""Numbers of inputs and operators for which graphs of one call site are compiled. Graphs that differ in anything else
(types, arguments) do not count: a helper function that is called with everything makes those."""

LENGTH_PERSISTENCE = 8
"""How often a graph beyond those must come in a row, at its site, to be compiled all the same: a model of another depth
is trained for more steps than that, while a list that grows is never as long twice in a row."""

MAX_SITES = 512
"""Call sites whose lengths are counted; the least recently used one goes first."""

MAX_QUEUED_JOBS = 64
"""Compiles that may wait in the background. More do not help a program that makes graphs faster than they compile."""

# ---- programs for several sizes

FAMILY_RUNS = 32
"""How often steps of a family run on the reference path before one is compiled in the background: a short text is
generated, and the last batch of an epoch computed, before a compiler could have been of use."""

FAMILY_SECONDS = 0.05
"""And for how long. Finding out how sizes depend on each other, recording a step at several of them and loading its
program takes the user's thread some milliseconds, which a few tokens of a tiny model are not worth. A program that is
stored already needs no FAMILY_RUNS."""

MAX_FAMILIES = 512
"""Families that are remembered; the least recently used one goes first."""

MAX_SYMBOLS = 4
"""Symbols of a template. Sizes that need more are likely to follow no rule."""

MAX_TEMPLATE_ATTEMPTS = 12
"""How often one family looks for a template. After that, its sizes vary by no rule."""

MAX_TEMPLATE_FAILURES = 2
"""Templates that the backend makes no program of. The first may have been a wrong guess; the second was not."""

MAX_EXAMPLES = 4
"""Members of a family that are kept to make a template from."""

EXEMPLARS = 4
"""Sizes at which a step goes through the passes. Two determine most polynomials; the others check them."""

MAX_RANGES = 3
"""Programs of one template for different ranges of sizes: compilers treat 5000 elements unlike 50. Sizes outside them
are compiled one by one."""

# ---- compiling in the background

IDLENESS = 10.0
"""Pause of a background job, as a multiple of the time for which it had the interpreter. The user's thread gives the
interpreter away at each call of an operator, and gets it back only when the other thread lets go of it."""

MAX_PAUSE = 0.1
"""Seconds of such a pause at most, so that a long pass does not delay its program by minutes."""

STOP_POLL_SECONDS = 0.1
"""How often a job whose backend is about to go is interrupted again: it may have begun to wait only now."""

EXIT_POLITE_SECONDS = 0.05
"""At exit, for how long a job may finish by itself before its thread is interrupted."""

EXIT_SECONDS = 1.0
"""At exit, for how long the runtime waits for an interrupted job, or for a step of another thread."""

EXIT_CLOSURES_SECONDS = 30.0
"""At exit, for how long step closures may run: they write logs and checkpoints."""

WARM_UP_CORES = 8
"""Processors of a machine on which the worker is started before there is something to compile."""

WORKER_ATTEMPTS = 2
"""Worker processes for one graph. One that dies may have been killed by chance; if two die, the graph would take this
process along."""

WORKER_IDLE_SECONDS = 120.0
"""For how long a worker process without work stays: starting one costs seconds, keeping it costs memory."""

WORKER_NICENESS = 10
"""A tenth of the weight of other processes: what a program loses at most whose threads need all processors. With less,
a compile on a busy machine would take forever."""

WORKER_KILL_SECONDS = 5
"""For how long the runtime waits for a killed worker to be reaped."""

CHUNK_OPERATIONS = 128
"""Operators of a chunk of a step, where a step is launched while it is recorded: enough that cutting it costs less than
a tenth of their launches, few enough that a GPU has something to do soon."""

CLAIM_SECONDS = 240.0
"""For how long a process waits for another that compiles the same graph. Most compiles take less, and after that there
is still time to compile within the ten minutes after which watchdogs of process groups end a program."""

# ---- messages

SLOW_COMPILE_SECONDS = 30.0
"""A compile that takes longer is an event of its own: a thread waits for it, or steps do without for long."""

TAKEOVER_STEPS = 3
"""Steps with a new program from the background whose pace is measured before its takeover is reported. The native part
gets the program after that: Python has to see these."""

TAKEOVER_BEFORE = 16
"""Steps before it that it is compared with, the last ones: a median of more says no more."""

MAX_REASONS = 8
"""Lines that say why a step is compiled again, of steps of about the same size; those after are only counted."""

MAX_REASONS_PER_SITE = 3
"""Of those, how many may be of one call site."""

MAX_KNOWN_GRAPHS = 64
"""Graphs that a new one is compared with, one for each sequence of operators; the oldest goes first."""
