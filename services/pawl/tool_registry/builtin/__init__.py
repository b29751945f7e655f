"""The tools that every deployment has; one module a topic."""
