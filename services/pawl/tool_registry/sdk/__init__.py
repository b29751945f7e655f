"""What tools are written with; others import it from `pawl.tools`."""
