"""The tools that a store has, and their versions."""
