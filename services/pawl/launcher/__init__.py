"""Starts the whole suite on one machine: `pawl up`, and the same for tests.

It owns the data folder: an embedded PostgreSQL and NATS with their secrets, the logs, and the one lock that keeps a
second launcher out. It promises that what it started is running or being started again, that everything ends in order
when it is told to, and that nothing outlives it for ever, however it ends. It knows the services only as commands with
environment variables and a health check.
"""

from pawl.launcher.options import SuiteOptions, read_options
from pawl.launcher.suite import Suite
from pawl.launcher.up import up

__all__ = ["Suite", "SuiteOptions", "read_options", "up"]
