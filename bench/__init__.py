"""Benchmarks of Pawl and of common alternatives, with the same work on the same machine: docs/design/performance.md."""

import pawl.chassis  # noqa: F401  # turns off fork handlers of gRPC, before it is imported
