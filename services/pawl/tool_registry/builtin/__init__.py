"""Tools that every deployment has, one module per topic."""
