"""A deterministic simulation of agent-loop and job-store: their rules and use cases are real, all else is simulated."""
