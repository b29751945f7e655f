"""Starts the whole suite on one machine, for `pawl up` and for tests.

The launcher owns the data folder, with the embedded PostgreSQL and NATS, their secrets, the logs, and a lock against a
second launcher. It restarts processes that die, stops everything in order, and leaves no processes behind, no matter
how it ends. To the launcher, each service is only a command with environment variables and a health check.
"""

from pawl.launcher.options import SuiteOptions, read_options
from pawl.launcher.suite import Suite
from pawl.launcher.up import up

__all__ = ["Suite", "SuiteOptions", "read_options", "up"]
