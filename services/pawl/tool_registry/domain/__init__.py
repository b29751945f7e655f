"""Tools, and what may be done with their calls. Pure."""
