"""Programs for several sizes: families of graphs that differ in integers, and call sites that differ in length."""
