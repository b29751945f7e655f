"""HTTP services as tools, and the guarded way out into the world."""
