"""Pure: the values of a run and the rules of the loop."""
