"""Infrastructure for services, in addition to the chassis: listeners, databases, the bus, settings and metrics.

This package does not depend on any service. Services pass in their servicers, checks and method names.
"""
