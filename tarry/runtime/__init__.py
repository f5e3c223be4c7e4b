"""What happens when a value is needed: collect, look up or compile, execute, commit. Begin at `Runtime.sync`."""
