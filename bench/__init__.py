"""Benchmarks of Pawl and of common alternatives: the same work on the same machine. See docs/performance.md."""

import pawl.chassis  # noqa: F401  # noqa: F401  # disables gRPC's fork handlers, which must happen before gRPC is imported
