"""From a recorded graph to a program: where it is compiled (here, on a thread, in another process), or found."""
