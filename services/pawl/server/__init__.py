"""The infrastructure that services need besides the chassis: listeners, databases, the bus, settings and metrics.

It knows no service. Services pass it their servicers, checks and method names.
"""
