"""Tools that every deployment has, with one module per topic."""
