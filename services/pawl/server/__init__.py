"""The infrastructure that services need besides the chassis: listeners, databases, the bus, settings and metrics.

This package does not know any service. Services pass it their servicers, checks and method names.
"""
