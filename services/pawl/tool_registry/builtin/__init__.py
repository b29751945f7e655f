"""The tools that every deployment has, one module per topic."""
