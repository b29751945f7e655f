"""Pawl beside what people use instead: the same work, the same machine, the same minute. See docs/performance.md."""

import pawl.chassis  # noqa: F401  # tells gRPC not to act on forks, which it must know before it is imported
