"""The parts that tools are written with; others import them from `pawl.tools`."""
