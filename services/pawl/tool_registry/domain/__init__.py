"""What tools are and what may be done with a call. Pure."""
