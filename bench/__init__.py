"""Pawl beside what people use instead: the same work, the same machine, the same minute. See docs/performance.md."""
