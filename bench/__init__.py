"""Benchmarks of Pawl and of common alternatives: the same work on the same machine. See docs/design/performance.md."""

import pawl.chassis  # noqa: F401  # turns off fork handlers of gRPC, before it is imported
