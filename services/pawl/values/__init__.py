"""What the services speak of, each value once: runs, calls, commands and tools. Pure; no protobuf, no I/O."""
