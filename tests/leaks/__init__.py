"""Leak tests: the services in one process, under load, measured from inside."""
