"""Benchmarks of Pawl and of its alternatives, on the same machine. See docs/design/performance.md."""

import pawl.chassis  # noqa: F401  # tells gRPC not to act on forks, which it must know before it is imported
