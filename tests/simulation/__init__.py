"""A deterministic simulation of agent-loop and job-store.

Their rules and use cases are real; everything else is simulated.
"""
