"""A deterministic simulation of agent-loop and job-store: real rules and use cases, simulated everything else."""
